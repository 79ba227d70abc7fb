"""Building the user's model and batch without the memory that they would take.

Parameters live on the meta device. Small tensors that are made from given values (`arange`,
`zeros`, `tensor`) are real, so that a constructor may read them: ``[p.item() for p in
torch.linspace(0, rate, depth)]`` works as usual.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from autopar import torch_private
from autopar.frontends.pytorch.errors import BatchError, BuildError
from autopar.frontends.shared import places
from autopar.nouns.batch import NO_DIM, NO_SAMPLES
from autopar.nouns.workload import Workload
from autopar.torch_private.modes import (
    FakeTensor,
    FakeTensorMode,
    without_modes,
    without_torch_function,
)
from autopar.torch_private.tensors import memory_of

SMALL = 1 << 14  # elements; the largest tensor that is real

WHOLE = 1 << 28  # bytes; the largest model that is built in memory where nothing else will do

_SIZED: dict[Callable[..., Any], int] = {  # factories by position of the first size argument
    torch.zeros: 0,
    torch.ones: 0,
    torch.full: 0,
}
_FILLS = frozenset(  # by name: libraries put their own functions in place of those of nn.init
    (*(name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")),
     "fill_", "zero_", "exponential_", "random_", "bernoulli_", "clamp_", "erfinv_")
)  # fmt: skip
_COUNTED = (torch.arange, torch.linspace, torch.logspace, torch.eye, torch.tensor)


class SmallReal(TorchFunctionMode):
    """Inside ``torch.device("meta")``: small tensors with values are real all the same."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") in _FILLS:
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, torch.Tensor) and filled.is_meta:
                return filled  # nothing to fill, and torch takes a millisecond over it
        if kwargs.get("device") is None and self._is_small(func, args, kwargs):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)

    @staticmethod
    def _is_small(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
        if func in _SIZED:
            size = kwargs.get("size", args[0] if args else ())
            if isinstance(size, int):  # zeros(2, 3); full takes a tuple only
                size = [a for a in args if isinstance(a, int)]
            return int(math.prod(size)) <= SMALL
        if func in (torch.arange, torch.eye):
            numbers = [a for a in args if isinstance(a, int | float)]
            return len(numbers) == len(args) and bool(numbers) and max(map(abs, numbers)) <= SMALL
        return func in _COUNTED


class TooLarge(Exception):
    """A model that is not built in memory."""


class InMemory(TorchFunctionMode):
    """Inside, tensors of at most `WHOLE` bytes are made; more raise `TooLarge`."""

    def __init__(self) -> None:
        super().__init__()
        self.left = WHOLE
        self.known: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and (place := memory_of(made)) not in self.known:
            self.known.add(place)
            self.left -= made.nbytes
            if self.left < 0:
                raise TooLarge
        return made


@dataclass(frozen=True, slots=True)
class Built:
    """The model (meta and small real tensors) and the fake batch, with the mode that fakes.

    values: makes the batch once more, with values, whatever modes it is called in.
    """

    model: nn.Module
    batch: dict[str, torch.Tensor]
    mode: FakeTensorMode
    values: Callable[[], Mapping[str, torch.Tensor]]


def build(workload: Workload, again: Callable[[], None] = lambda: None) -> Built:
    """Calls the workload's model and batch. Raises `BuildError` and `BatchError`.

    again: called before the batch is made a second time, with values.
    """
    sizes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=True)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes, static_shapes=True)

    def values() -> Mapping[str, torch.Tensor]:
        again()
        with without_modes(), without_torch_function():
            made: Mapping[str, torch.Tensor] = _real_batch(workload)
            return made

    return Built(build_model(workload), build_batch(workload, mode, again), mode, values)


def build_model(workload: Workload) -> nn.Module:
    """The model on the meta device, in the mode (train or eval) that it comes in."""
    assert workload.model is not None
    try:
        with torch.device("meta"), SmallReal():
            model = workload.model()
    except Exception as error:  # a user's constructor
        first = error
        try:  # a constructor that mixes small and large tensors
            with torch.device("meta"):
                model = workload.model()
        except Exception:  # the constructor again
            model = _built_whole(workload, first)
    if not isinstance(model, nn.Module):
        raise BuildError(
            f"the workload's model made a {type(model).__name__}, not an nn.Module: return the "
            "module itself"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise BuildError(
                f"{name} has no shape before the first forward: it is of a lazy module. Give its "
                "sizes where the model is built, as nn.Linear(64, 128) for nn.LazyLinear(128)"
            )
    return model


def _built_whole(workload: Workload, first: Exception) -> Any:
    """A small model in memory, since its constructor reads values of weights: whether a matrix is
    orthogonal, say. Raises `BuildError` of ``first``, what stood against the meta device."""
    assert workload.model is not None
    try:
        with torch.random.fork_rng(devices=[]), InMemory():
            return workload.model()
    except Exception as error:  # the constructor once more
        more = f", of which there may be {WHOLE >> 20} MiB" if isinstance(error, TooLarge) else ""
        raise BuildError(
            f"building the model without memory failed: {type(first).__name__}: {first}\n"
            f"  at {last_line(first)}\nThe constructor runs on the 'meta' device: it must not "
            f"read values of large tensors{more}"
        ) from first


def build_batch(
    workload: Workload, mode: FakeTensorMode, again: Callable[[], None] = lambda: None
) -> dict[str, torch.Tensor]:
    """The global batch as distinct fake CPU tensors, by name."""
    try:
        with mode:
            made = workload.batch()
    except Exception:  # a user's function
        again()
        made = _real_batch(workload)  # a batch that reads its own values has to be real
    if not isinstance(made, Mapping) or not made:
        kind = "empty" if isinstance(made, Mapping) else f"a {type(made).__name__}"
        raise BatchError(
            f"the batch is {kind}, not a dict of tensors: return "
            "{'argument of forward': tensor, ...}"
        )
    fakes: dict[str, torch.Tensor] = {}
    for name, value in made.items():
        if not isinstance(value, torch.Tensor):
            raise BatchError(
                f"batch[{name!r}] is a {type(value).__name__}, not a tensor: put constants into "
                "the model, tensors into the batch"
            )
        # one fake per name: a tensor that is passed twice would be one operand in the trace
        fakes[name] = fake(torch.empty(value.shape, dtype=value.dtype, device="meta"), mode)
    check_batch(fakes, workload.whole_inputs)
    return fakes


def check_batch(batch: Mapping[str, torch.Tensor], whole: tuple[str, ...]) -> int:
    """The number of samples; raises `BatchError` where dim 0 of two tensors differs."""
    unknown = [name for name in whole if name not in batch]
    if unknown:
        raise BatchError(f"whole_inputs names {unknown[0]!r}; the batch has {', '.join(batch)}")
    cut = {name: t.shape[0] for name, t in batch.items() if name not in whole and t.ndim}
    if not cut:
        raise BatchError(NO_DIM)
    if len(set(cut.values())) > 1:
        shown = ", ".join(f"{n} {list(batch[n].shape)}" for n in cut)
        raise BatchError(
            f"dim 0 of the batch's tensors differs: {shown}. It counts the samples; name tensors "
            f"without a batch dim in Workload(whole_inputs=...)"
        )
    samples = next(iter(cut.values()))
    if samples == 0:
        raise BatchError(NO_SAMPLES)
    return samples


def without_values(value: Any) -> bool:
    """Whether ``value`` is a tensor, or a module with one, that has a shape and no values."""
    if isinstance(value, nn.Module):
        return any(map(without_values, itertools.chain(value.parameters(), value.buffers())))
    return isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and value.is_meta)


def fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake CPU tensor of the same shape, strides and dtype as ``tensor``."""
    meta = tensor.detach() if tensor.is_meta else tensor.detach().to("meta")
    return FakeTensor(mode, meta, torch.device("cpu"))


def _real_batch(workload: Workload) -> Any:
    try:
        return workload.batch()
    except Exception as error:  # a user's function
        raise BuildError(
            f"making the batch failed: {type(error).__name__}: {error}\n  at {last_line(error)}"
        ) from error


def last_line(error: BaseException) -> str:
    """``file:line`` of the innermost frame that is not torch's own."""
    return places.last_line(error, is_internal)


_OWN = (
    inspect.getfile(torch).rpartition("/")[0] + "/",
    __file__.rpartition("/")[0] + "/",
    torch_private.__file__.rpartition("/")[0] + "/",
    "<",
)


def is_internal(file: str) -> bool:
    """Whether ``file`` is torch's or ours, so no place to show to a user."""
    return file.startswith(_OWN)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Inside, a Hugging Face model keeps no key-value cache: a loss never reads it."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    cached = [c for c in configs.values() if getattr(c, "use_cache", None) is True]
    for config in cached:
        config.use_cache = False
    try:
        yield
    finally:
        for config in cached:
            config.use_cache = True
