"""Torch function modes in which model and program are compared: nothing is drawn, all is wide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autopar.frontends.pytorch.experts import chosen_experts
from autopar.runtime.verify.pytorch.dropping import dropped_fixed
from autopar.runtime.verify.pytorch.grouped_product import NAMES, grouped_product
from autopar.runtime.verify.pytorch.stand_ins import drawn_fixed
from autopar.torch_private.modules import backward_within


class FixedDraws(TorchFunctionMode):
    """Inside, dropout multiplies by one number (`dropping`) and random numbers are fixed ones
    (`stand_ins`): what is drawn cannot agree between layouts."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "").partition(".")[0]  # aten ops name their overload
        if name == "backward":
            # a function that a mode handles, so the mode is off while it runs; what is recomputed
            # there needs it all the same
            with backward_within(self):
                return func(*args, **kwargs)
        for fixed in (dropped_fixed, drawn_fixed):
            draw = fixed(name, func, args, kwargs)
            if draw is not None:
                return draw
        return func(*args, **kwargs)


class Exact(FixedDraws):
    """Inside, every floating dtype that is asked for means float64 as well.

    Models cast to float32 on purpose (norms, softmax, rotary embedding, loss), and programs to the
    plan's precision; in a float64 run that would lose what a comparison needs.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("float", "half", "bfloat16"):
            return args[0].double()
        if name in ("cfloat", "chalf"):
            return args[0].to(torch.complex128)
        if name == "type" and any(_names_a_float(a) for a in (*args[1:], *(kwargs or {}).values())):
            return args[0].double()
        args = tuple(map(_widened, args))
        kwargs = {key: _widened(value) for key, value in (kwargs or {}).items()}
        if func is F.rms_norm and kwargs.get("eps", args[3] if len(args) > 3 else None) is None:
            # torch's own is the smallest step of the dtype that it computes in: that of float32
            args, kwargs["eps"] = args[:3], torch.finfo(torch.float32).eps
        if _in_groups(func, args):
            return grouped_product(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


class Evaluated(Exact):
    """`Exact`, and inside batch norms that have running statistics normalise by these."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            given = signature(func).bind(*args, **(kwargs or {}))
            if given.arguments.get("running_mean") is not None:
                given.arguments["training"] = False
            args, kwargs = given.args, given.kwargs
        return super().__torch_function__(func, types, args, kwargs)


def _in_groups(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is a product of groups that torch has no kernel for."""
    if getattr(func, "__name__", "") not in NAMES or len(args) < 2:
        return False
    return args[0].dtype is torch.float64 and (args[0].dim(), args[1].dim()) == (2, 3)


def _names_a_float(value: Any) -> bool:
    """Whether this is a class of tensors or its name, as ``x.type(torch.FloatTensor)`` takes it."""
    name = value if isinstance(value, str) else f"{getattr(value, '__name__', '')}"
    return name.rpartition(".")[2] in ("FloatTensor", "HalfTensor", "BFloat16Tensor")


def _widened(value: Any) -> Any:
    if not isinstance(value, torch.dtype):
        return value
    if value.is_complex:
        return torch.complex128
    return torch.float64 if value in (torch.float32, torch.bfloat16, torch.float16) else value


@contextmanager
def exact(mode: Callable[[], Exact] = Exact) -> Iterator[None]:
    """A mode, with float64 as the default dtype; a library's experts run by its own plain loop,
    not by what a config names: kernels that want half precision, or tokens sorted as ours are."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with mode(), chosen_experts(lambda own: own):
            yield
    finally:
        torch.set_default_dtype(before)
