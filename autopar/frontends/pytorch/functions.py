"""`torch.autograd.Function` in a forward: one op that keeps its own forward and backward.

A trace sees the forward of a function only, and the derivative of that is what its author did not
want: a straight-through estimator, a gradient that is reversed, scaled or clipped. So the call
stands in the trace as one op, ``autopar::function(tensors, number)``, and the program calls the
class again. What running it on fake tensors shows (`derivatives`) says which rule it follows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree

from autopar.frontends.pytorch.calls import Calls, require
from autopar.frontends.pytorch.derivatives import Seen, run
from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.frontends.shared.named_functions import MissingFunction, function_at
from autopar.rules.own_functions import elementwise_text
from autopar.torch_private.modes import (
    FakeTensor,
    FakeTensorMode,
    without_modes,
    without_torch_function,
)

_SIZES: tuple[Callable[[int], int], ...] = (lambda n: 2 * n + 1, lambda n: max(n // 2, 1))
"""Other sizes in which a function must do the same to count as element by element."""


@dataclass(frozen=True, slots=True)
class Again:
    """A call to be made again: ``apply``, and its arguments, tensors fake."""

    apply: Callable[..., Any]
    args: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Called:
    """One call of a function in the trace.

    path:     ``module:Name`` of the class; ``kind`` is what rules name it by.
    args:     of ``apply``, tensors as ``"%0"`` by place among the operands.
    rule:     how it may be split, as text; empty where that is not known.
    reached:  by operand, whether backward gives it a gradient.
    graded:   by result, whether a gradient flows into it.
    again:    where no rule is known: how to call it, see `function_rules`.
    """

    path: str
    args: tuple[Any, ...]
    rule: str
    linear: bool
    reached: tuple[bool, ...]
    graded: tuple[bool, ...]
    again: Again | None = field(default=None, compare=False)

    @property
    def kind(self) -> str:
        return self.path.replace(":", ".")


@dataclass(frozen=True, slots=True)
class Applied:
    """A call that is kept whole, equal for calls of one ``kind``: a function's class, say."""

    kind: Hashable
    write: Callable[..., Any] = field(compare=False)

    def __call__(self, *args: Any) -> Any:
        return self.write(*args)


torch.library.define("autopar::function", "(Tensor[] tensors, int number) -> Tensor[]")


@contextmanager
def kept_functions(functions: list[Called], mode: FakeTensorMode, calls: Calls) -> Iterator[None]:
    """Inside, `Function.apply` writes one op into the trace and what it is into ``functions``.

    In a repeated layer it is one of the calls by which layers are compared. A function that a
    program cannot call again raises `UnsupportedOpError`.
    """
    function: Any = torch.autograd.Function
    plain = vars(function)["apply"]
    running = False

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        real = plain.__get__(None, cls)
        if cls.__module__ == "torch.utils.checkpoint":
            raise UnsupportedOpError(
                "the forward uses reentrant checkpointing: pass use_reentrant=False, or leave "
                "recomputation to the plan"
            )
        own = not cls.__module__.startswith(("torch.", "autopar."))
        if running or not own or not torch.is_grad_enabled() or get_proxy_mode() is None:
            return real(*args, **kwargs)
        frame = sys._getframe(1)

        def write(*args: Any) -> Any:
            nonlocal running
            running = True
            try:
                with without_torch_function():  # none of these calls is the layer's
                    called, results = _call(cls, real, args, mode)
            finally:
                running = False
            calls.note(frame)
            functions.append(called)
            with without_torch_function():
                return _written(called, len(functions) - 1, args, results, mode)

        if calls.current is not None:
            return calls.current.call(Applied(cls, write), args, {})
        return write(*args)

    function.apply = classmethod(apply)
    try:
        yield
    finally:
        function.apply = plain


def _call(
    cls: type, real: Callable[..., Any], args: Sequence[Any], mode: FakeTensorMode
) -> tuple[Called, Any]:
    """What a call is, and its results on fake tensors."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    path = f"{cls.__module__}:{cls.__qualname__}"
    _check_reachable(cls, path, name)
    tensors = [a for a in args if isinstance(a, Tensor)]
    places = iter(range(len(tensors)))
    constants = tuple(
        f"%{next(places)}" if isinstance(a, Tensor) else _constant(a, name, i)
        for i, a in enumerate(args)
    )
    given = [a if isinstance(a, Tensor) else _unwatched(a) for a in args]
    try:
        seen = run(real, given, lambda n: n, mode)
    except Exception as error:  # a user's function
        text = str(error).partition("\n")[0]
        raise UnsupportedOpError(
            f"{name} (torch.autograd.Function) is kept as one op, and its forward and backward "
            f"cannot be followed on tensors without values: {type(error).__name__}: {text}. It "
            "must not read values, or tensors that are not handed to apply()"
        ) from error
    if seen.draws:
        raise UnsupportedOpError(
            f"{name} (torch.autograd.Function) draws random numbers ({seen.draws}), which ranks "
            "would draw differently: draw them outside and hand them to apply()"
        )
    if seen.writes:
        raise UnsupportedOpError(
            f"{name} (torch.autograd.Function) writes into a tensor that it is given: make a new "
            "one in its forward, as in x.clone()"
        )
    results = [r for r in _listed(seen.results) if isinstance(r, Tensor)]
    if not results:
        raise UnsupportedOpError(f"{name} (torch.autograd.Function) returns no tensor")
    reached = tuple(r for r, a in zip(seen.reached, args, strict=True) if isinstance(a, Tensor))
    graded = tuple(r.requires_grad for r in results)
    alone = seen.steps is not None and _same_in_other_sizes(seen, real, given, mode)
    text = elementwise_text(len(tensors), len(results)) if alone else ""
    again = None if alone else Again(real, given)
    return Called(path, constants, text, seen.linear, reached, graded, again), seen.results


def _same_in_other_sizes(
    seen: Seen, real: Callable[..., Any], args: Sequence[Any], mode: FakeTensorMode
) -> bool:
    try:
        return all(run(real, args, sizes, mode).steps == seen.steps for sizes in _SIZES)
    except Exception:  # a user's function on sizes of our own: whatever it raises
        return False


def _check_reachable(cls: type, path: str, name: str) -> None:
    try:
        function = function_at(path)
    except MissingFunction as error:
        raise UnsupportedOpError(
            f"{name} (torch.autograd.Function) is called by the program under that name, where it "
            "is not found: define it at the top level of the model's file or of a module"
        ) from error
    files = {_file(c) for c in (function, cls)}
    if len(files) > 1:
        raise UnsupportedOpError(
            f"{name} (torch.autograd.Function) is another class where a program would look for "
            f"it, in {' and '.join(sorted(files))}: give one of the files another name"
        )


def _file(cls: Any) -> str:
    return str(getattr(getattr(cls.forward, "__code__", None), "co_filename", "?"))


def _constant(value: Any, name: str, place: int) -> Any:
    """``value`` as a program can write it."""
    if isinstance(value, list | tuple):
        return tuple(_constant(v, name, place) for v in value)
    if isinstance(value, torch.dtype):
        return str(value)
    text = isinstance(value, str) and not value.startswith(("%", "torch."))
    if value is None or text or isinstance(value, bool | int | float):
        return _unwatched(value)
    raise UnsupportedOpError(
        f"{name}.apply (torch.autograd.Function) is given a {type(value).__name__} as argument "
        f"{place}, which a program cannot write: hand it tensors and plain numbers"
    )


def _unwatched(value: Any) -> Any:
    """A plain number, also where it comes as a subclass of int."""
    if isinstance(value, int) and type(value) not in (int, bool):
        return int(value)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map(_unwatched, value))
    return value


def _listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple | list) else [results]


def _written(
    called: Called, number: int, args: Sequence[Any], results: Any, mode: FakeTensorMode
) -> Any:
    """Writes the op into the trace; gives what ``apply`` gives, in tensors of the trace."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    outputs = [r for r in _listed(results) if isinstance(r, Tensor)]
    op = torch.ops.autopar.function.default
    made = iter(written(op, tensors, number, outputs, called.graded, mode))
    filled = [next(made) if isinstance(r, Tensor) else r for r in _listed(results)]
    return tuple(filled) if isinstance(results, tuple | list) else filled[0]


def written(
    op: Any,
    tensors: Sequence[Tensor],
    number: int,
    like: Sequence[Tensor],
    graded: Sequence[bool],
    mode: FakeTensorMode,
) -> list[Tensor]:
    """Writes ``op(tensors, number)`` into the trace; its results, of the form of ``like``.

    ``graded``: by result, whether a gradient flows into it.
    """
    proxies = get_proxy_mode()
    assert proxies is not None
    tracer: Any = proxies.tracer
    with without_torch_function(), without_modes():
        operands = [tracer.unwrap_proxy(t) for t in tensors]
        proxy = tracer.create_proxy("call_function", op, (operands, number), {})
        made: list[Tensor] = [
            FakeTensor(
                mode,
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"),
                torch.device("cpu"),
            )
            for t in like
        ]
    with without_torch_function():
        track_tensor_tree(made, proxy, constant=None, tracer=tracer)
    require(made, graded)
    return made
