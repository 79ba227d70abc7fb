"""What a hand-written derivative does, seen by running it on fake tensors.

Forward and backward run under a mode that sees every op. An op is *element by element* when it is
one of torch's pointwise ops on tensors of the one shape, or changes nothing; a function all of
whose ops are, in several sizes with the same constants, may be split along any dim. Which tensors
depend on the incoming gradients is followed by the memory that they lie in, and how: *linearly*
where only ops that are linear in them meet them. What is not known here counts as neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.torch_private.modes import TorchDispatchMode, without_modes, without_torch_function
from autopar.torch_private.ops import schema_of
from autopar.torch_private.tensors import memory_of, version_of

_SAME = frozenset(
    "detach alias clone _to_copy lift_fresh lift_fresh_copy view _unsafe_view".split()
)
_MADE = frozenset(
    "zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full scalar_tensor "
    "empty_like empty".split()
)
_ZEROS = frozenset("zeros zeros_like new_zeros".split())
_LINEAR = frozenset(
    "neg sum mean view _unsafe_view reshape expand permute t transpose unsqueeze squeeze slice "
    "select clone detach alias _to_copy repeat split split_with_sizes unbind chunk cat stack flip "
    "roll index_select gather diagonal as_strided cumsum constant_pad_nd".split()
)
_POINTWISE = frozenset(  # without torch's own tag
    "softplus_backward elu_backward leaky_relu_backward hardtanh_backward mish_backward "
    "hardswish_backward hardsigmoid_backward log_sigmoid_backward threshold_backward".split()
)
_PRODUCTS = frozenset("mul mm bmm mv dot".split())


@dataclass(frozen=True, slots=True)
class Seen:
    """What one run showed.

    results:   of ``apply``, tensors fake.
    reached:   by argument, whether backward gives it a gradient.
    linear:    the backward is linear in what comes in.
    steps:     each op with its constants; None where one is not element by element.
    draws:     an op that draws random numbers, or "".
    writes:    whether an argument is written into.
    """

    results: Any
    reached: tuple[bool, ...]
    linear: bool
    steps: tuple[Any, ...] | None
    draws: str
    writes: bool


def run(
    apply: Callable[..., Any], args: Sequence[Any], sizes: Callable[[int], int], fake: Any
) -> Seen:
    """Runs ``apply`` on fakes like ``args``, dims through ``sizes``, and its backward.

    ``fake`` is the mode that fakes. Raises whatever the function raises.
    """
    with without_modes(), without_torch_function(), fake:
        given = [_sample(a, sizes) if isinstance(a, Tensor) else a for a in args]
        tensors = [t for t in given if isinstance(t, Tensor)]
        shape = tuple(tensors[0].shape) if tensors else ()
        watch = _Watch(shape if all(t.shape == shape for t in tensors) and shape else None)
        versions = [version_of(t) for t in tensors]
        with torch.enable_grad():
            inside = [t.clone() if t.requires_grad else t for t in tensors]  # no leaves
            replaced = iter(inside)
            called = [next(replaced) if isinstance(a, Tensor) else a for a in given]
            before = [version_of(t) for t in inside]
            with watch:
                results = apply(*called)
        after = [version_of(t) for t in inside]
        writes = before != after or versions != [version_of(t) for t in tensors]
        made = [r for r in _listed(results) if isinstance(r, Tensor) and r.requires_grad]
        wanted = [t for t in tensors if t.requires_grad]
        grads: dict[int, Any] = {}
        if made and wanted:
            incoming = [torch.empty_like(r) for r in made]
            watch.follow(incoming)
            with watch:
                gradients = torch.autograd.grad(made, wanted, incoming, allow_unused=True)
            watch.give([g for g in gradients if g is not None])
            grads = {id(t): g for t, g in zip(wanted, gradients, strict=True)}
    reached = tuple(isinstance(a, Tensor) and grads.get(id(a)) is not None for a in given)
    return Seen(results, reached, watch.linear, watch.steps, watch.draws, writes)


def _listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple | list) else [results]


def _sample(tensor: Tensor, sizes: Callable[[int], int]) -> Tensor:
    made = torch.empty([sizes(n) for n in tensor.shape], dtype=tensor.dtype)
    return made.requires_grad_(tensor.dtype.is_floating_point)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows what is done to tensors of ``shape``, and to gradients."""

    def __init__(self, shape: tuple[int, ...] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape = shape
        self.steps: tuple[Any, ...] | None = None if shape is None else ()
        self.linear = True
        self.draws = ""
        self._graded: dict[int, Any] = {}  # storages, kept so that no other takes their place
        self._zero: dict[int, Any] = {}

    def follow(self, gradients: Sequence[Tensor]) -> None:
        for gradient in gradients:
            self._mark(self._graded, gradient)

    def give(self, gradients: Sequence[Tensor]) -> None:
        """One that was made of nothing that came in is as large whatever comes in."""
        if not all(self._has(self._graded, g) or self._has(self._zero, g) for g in gradients):
            self.linear = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func.namespace == "prim":  # asks for a device
            return made
        name = schema_of(func).name.partition("::")[2]
        inplace = name.endswith("_") and not name.endswith("__")
        given = [*args, *kwargs.values()]
        operands = [t for a in given for t in _flat(a)]
        results = [t for a in _listed(made) for t in _flat(a)]
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws = self.draws or name
        if self.steps is not None:
            if self._is_elementwise(func, name.removesuffix("_"), args, operands, results):
                self.steps = (*self.steps, (str(func), *map(_constant, given)))
            else:
                self.steps = None
        plain = name.removesuffix("_") if inplace else name
        self._follow(plain, args, operands, results, bool(kwargs.get("rounding_mode")))
        return made

    def _is_elementwise(
        self, func: Any, name: str, args: Any, operands: list[Tensor], results: list[Tensor]
    ) -> bool:
        fits = all(tuple(t.shape) in (self.shape, ()) for t in (*operands, *results))
        if not fits:
            return False
        if name == "index_put":  # only where a mask says so
            masks = args[1]
            return len(masks) == 1 and masks[0].dtype is torch.bool and args[2].dim() == 0
        if name in _SAME:
            return results[0].shape == operands[0].shape
        return name in _MADE or name in _POINTWISE or torch.Tag.pointwise in func.tags

    def _follow(
        self, name: str, args: Any, operands: list[Tensor], results: list[Tensor], rounded: bool
    ) -> None:
        filled = name in ("full", "full_like", "new_full", "scalar_tensor", "fill", "zero")
        value = 0 if name == "zero" else next((a for a in args if _is_number(a)), None)
        graded = [self._has(self._graded, t) for t in operands]
        if not any(graded):
            if name in _ZEROS or (filled and value == 0):
                for t in results:
                    self._mark(self._zero, t)
            elif name not in ("view", "detach", "alias", "expand", "_to_copy", "lift_fresh"):
                for t in results:
                    self._zero.pop(memory_of(t), None)
            elif operands and all(self._has(self._zero, t) for t in operands):
                for t in results:
                    self._mark(self._zero, t)
            return
        if rounded or not self._is_linear(name, args, operands, graded):
            self.linear = False
        if name in ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones"):
            return  # takes the shape alone
        for t in results:
            self._zero.pop(memory_of(t), None)
            self._mark(self._graded, t)

    def _is_linear(self, name: str, args: Any, operands: list[Tensor], graded: list[bool]) -> bool:
        none_or_zero = all(
            g or self._has(self._zero, t) for t, g in zip(operands, graded, strict=True)
        )
        if name in _MADE and name != "full":
            return True
        if name in ("add", "sub"):
            return none_or_zero and not any(_is_number(a) and a != 0 for a in args[:2])
        if name in _PRODUCTS:
            return sum(graded) == 1
        if name == "div":
            return graded[0] and sum(graded) == 1
        if name == "where":
            condition, *rest = zip(operands, graded, strict=True)
            return not condition[1] and all(g or self._has(self._zero, t) for t, g in rest)
        if name == "masked_fill":
            value = args[2]
            zero = self._has(self._zero, value) if isinstance(value, Tensor) else value == 0
            return graded[0] and not graded[1] and zero
        if name == "index_put":
            places = [t for a in args[1] for t in _flat(a)]
            ends = [args[0], args[2]]
            return not any(self._has(self._graded, t) for t in places) and all(
                self._has(self._graded, t) or self._has(self._zero, t) or _is_zero(t) for t in ends
            )
        if name == "copy":
            whole = args[0].untyped_storage().nbytes() == args[0].numel() * args[0].itemsize
            return graded[1] and (whole or graded[0] or self._has(self._zero, args[0]))
        if name.endswith(("_backward", "_backward_data")):  # torch's own, of the first operand
            return graded[0] and sum(graded) == 1
        return name in _LINEAR and none_or_zero

    def _mark(self, table: dict[int, Any], tensor: Tensor) -> None:
        table[memory_of(tensor)] = tensor.untyped_storage()

    def _has(self, table: dict[int, Any], tensor: Tensor) -> bool:
        return memory_of(tensor) in table


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in _flat(v)] if isinstance(value, tuple | list) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _is_zero(tensor: Tensor) -> bool:
    """Whether a tensor made from a number in Python is 0; fakes keep such values."""
    return bool(_held(tensor) == 0.0)


def _held(tensor: Tensor) -> Any:
    """The values of a fake tensor that keeps them, None for others."""
    held = getattr(tensor, "constant", None)
    if held is None:
        return None
    with without_modes():
        return held.tolist()


def _constant(value: Any) -> Any:
    """What of an argument must not depend on sizes: numbers, and tensors made from numbers."""
    if isinstance(value, Tensor):
        held = _held(value)
        if held is not None:
            return ("constant", held)
        return "tensor" if tuple(value.shape) or math.prod(value.shape) != 1 else "scalar"
    if isinstance(value, tuple | list):  # sizes and dims
        return "list"
    return value
