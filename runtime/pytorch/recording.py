"""Recording how a model initialises itself, without its memory.

The constructor runs under fake tensors while every op is written down: which storages it reads and
writes, and which it overwrites whole. `autopar.runtime.pytorch.initialize` replays that list.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from autopar.torch_private.modes import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    fakes_copied_by,
    without_modes,
)
from autopar.torch_private.modules import truncated_normal
from autopar.torch_private.ops import schema_of
from autopar.torch_private.tensors import memory_of, tree_map_only


class Untrusted(Exception):
    """The constructor did something that a replay might not repeat exactly."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a window into a storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def span_bytes(self) -> int:
        """Bytes of the storage up to the last element that the view sees."""
        steps = zip(self.size, self.stride, strict=True)
        last = 0 if 0 in self.size else 1 + sum((n - 1) * s for n, s in steps)
        return (self.offset + last) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Call:
    """One op: ``args`` and ``kwargs`` hold a `View` where a tensor stood.

    whole: the storage that it overwrites without having read it, if any.
    made:  a `View` for every tensor that it returns, those in a storage of their own included.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    touches: frozenset[int]
    whole: int | None
    made: tuple[View, ...]


@dataclass(slots=True)
class Record:
    """``values``: name -> where the parameter or buffer of the finished model lies, or itself."""

    calls: list[Call] = field(default_factory=list)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[str, View | torch.Tensor] = field(default_factory=dict)


_OVERWRITING = frozenset(
    {"uniform_", "normal_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_"}
)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = Record()
        self._alive: list[torch.Tensor] = []  # storages keep their identity while they live
        self._bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise Untrusted("it draws from a random generator of its own")
        before = {a.storage for a in _views((args, kwargs), self.view)}
        call_args, call_kwargs = tree_map_only(torch.Tensor, self.view, (args, kwargs))
        result = func(*args, **kwargs)
        made = tuple(_views(result, self.view))
        fresh = any(v.storage not in before for v in made)
        if fresh or schema_of(func).is_mutable:  # else it made another view, which views know
            self._note(func, call_args, call_kwargs, before, made)
        return result

    def stub(self, function: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        """Writes down a Python function that fills ``tensor``, as if it were an op."""
        target = self.view(tensor)
        whole = target.storage if self._covers(target) else None
        touches = frozenset({target.storage})
        self.record.calls.append(Call(function, (target, *args), {}, touches, whole, (target,)))
        return tensor

    def view(self, tensor: torch.Tensor) -> View:
        storage = tensor.untyped_storage()
        key = memory_of(tensor)
        if key not in self._bytes:
            self._bytes[key] = storage.nbytes()
            self._alive.append(tensor)
            if not isinstance(tensor, FakeTensor):
                with without_modes():
                    flat = torch.empty(0, dtype=tensor.dtype).set_(storage)
                    self.record.constants[key] = flat.clone()
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        return View(key, size, stride, int(tensor.storage_offset()), tensor.dtype)

    def _note(
        self, func: Any, args: Any, kwargs: Any, before: set[int], made: tuple[View, ...]
    ) -> None:
        whole: int | None = None
        name = schema_of(func).name.partition("::")[2]
        if name in _OVERWRITING and isinstance(args[0], View):
            target = args[0]
            others = {v.storage for v in _views((args[1:], kwargs), lambda v: v)}
            if target.storage not in others and self._covers(target):
                whole = target.storage
        touches = frozenset({*before, *(v.storage for v in made)})
        self.record.calls.append(Call(func, tuple(args), kwargs, touches, whole, made))

    def _covers(self, view: View) -> bool:
        numel = 1
        for n in view.size:
            numel *= n
        return view.offset == 0 and numel * view.dtype.itemsize == self._bytes[view.storage]


def _views(tree: Any, view: Callable[[Any], View]) -> list[View]:
    views: list[View] = []
    tree_map_only((torch.Tensor, View), lambda t: views.append(view(t)), tree)
    return views


def record(make: Callable[[], nn.Module]) -> Record:
    """Runs ``make`` without memory and returns what it did.

    Raises `Untrusted`, or whatever ``make`` raises under fake tensors (reading values fails).
    """
    recorder = _Recorder()
    state = torch.random.get_rng_state()
    with warnings.catch_warnings():
        # copying a module asks whether its tensors have memory
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        with FakeTensorMode(allow_non_fake_inputs=True), recorder, _watched(recorder):
            model = make()
    if not torch.equal(state, torch.random.get_rng_state()):
        raise Untrusted("it sets the state of the random generator")
    recorded = recorder.record
    for name, tensor in named_tensors(model):
        real = not isinstance(tensor, FakeTensor)
        recorded.values[name] = tensor.detach().clone() if real else recorder.view(tensor)
    return recorded


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers and plain tensor attributes under all of their names, in this order.

    A complex parameter is a view of it as pairs [..., 2] of real numbers, which programs hold.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, torch.view_as_real(parameter) if parameter.is_complex() else parameter
    yield from model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}" if path else name, value


@dataclass(slots=True)
class _Copies:
    """What ``copy.deepcopy`` makes of a tensor: one of its own memory, which a parameter has
    anyway. Copies of buffers that share memory would share it too: these are not followed."""

    recorder: _Recorder
    _shared: dict[tuple[int, int], int] = field(default_factory=dict)
    """By the memo of a copy and the storage of a tensor, the tensor that it is of."""

    def __call__(self, tensor: FakeTensor, memo: dict[int, Any]) -> torch.Tensor:
        if id(tensor) in memo:
            return cast(torch.Tensor, memo[id(tensor)])
        if not tensor.is_leaf:
            raise Untrusted("it copies a tensor that was computed with gradients")
        parameter = isinstance(tensor, nn.Parameter)
        place = id(memo), self.recorder.view(tensor).storage
        if not parameter and self._shared.setdefault(place, id(tensor)) != id(tensor):
            raise Untrusted("it copies tensors that share memory")
        with torch.no_grad():
            made: torch.Tensor = tensor.detach().clone()
        if parameter:  # whose attributes are not copied
            memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad)
            return cast(torch.Tensor, memo[id(tensor)])
        memo[id(tensor)] = made
        made.requires_grad_(tensor.requires_grad)
        for name, value in vars(tensor).items():
            if name not in vars(made):
                setattr(made, name, copy.deepcopy(value, memo))
        return made


@contextmanager
def _watched(recorder: _Recorder) -> Iterator[None]:
    """Inside, seeding is refused and the one initialiser that reads its values is written down.

    `trunc_normal_` draws again until every value is in range, which fake tensors cannot tell.
    """
    seeds = torch.manual_seed, torch.set_rng_state

    def stub(
        fill: Any, tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> torch.Tensor:
        if generator is not None:
            raise Untrusted("it draws from a random generator of its own")
        return recorder.stub(fill, tensor, mean, std, a, b)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise Untrusted("it sets the state of the random generator")

    torch.manual_seed = torch.set_rng_state = refuse
    try:
        with truncated_normal(stub), fakes_copied_by(_Copies(recorder)):
            yield
    finally:
        torch.manual_seed, torch.set_rng_state = seeds
