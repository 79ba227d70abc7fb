"""`torch.autocast` inside a forward: the casts that it makes, as casts of the program.

Which operands an op casts is asked of torch itself: the op runs on fake tensors inside the region,
and what is copied to another dtype is seen. An op that casts further inside than its operands has
no such form, and is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from autopar.frontends.pytorch.autocast_decorators import is_off
from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.torch_private.modes import TorchDispatchMode
from autopar.torch_private.ops import to_copy
from autopar.torch_private.tensors import tree_map_only

Region = torch.dtype | None
"""What is cast to; None where nothing is."""


@contextmanager
def autocast_of_devices_refused() -> Iterator[None]:
    """Inside, autocast of another device than the CPU, on which the capture runs, raises
    `UnsupportedOpError`: torch turns it off without the device, and its casts would be lost."""
    made: Any = torch.autocast
    init, enter = made.__init__, made.__enter__

    def refuse(device: str) -> None:
        raise UnsupportedOpError(
            f"torch.autocast({device!r}) inside the forward: a capture has no such device. Write "
            "torch.autocast(x.device.type, ...) of a tensor at hand, or take it out: precision is "
            "chosen by Workload(precision=...)"
        )

    def start(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *rest: Any, **kw: Any
    ) -> None:
        if device_type != "cpu" and enabled:  # before torch warns that it turns it off
            refuse(device_type)
        init(self, device_type, dtype, enabled, *rest, **kw)
        self.asked = enabled

    def begin(self: Any) -> Any:
        asked = getattr(self, "asked", None)
        if asked is None:  # made before: a decorator
            asked = not is_off(sys._getframe(1))
        if self.device != "cpu" and asked:
            refuse(self.device)
        return enter(self)

    made.__init__, made.__enter__ = start, begin
    try:
        yield
    finally:
        made.__init__, made.__enter__ = init, enter


def entered(node: fx.Node, before: Region) -> Region:
    """The region that an ``_enter_autocast(device, dtype, enabled, cached)`` opens."""
    device, dtype, enabled, *_ = (*node.args, None, True)
    if device != "cpu":
        return before  # turned off: nothing here is on that device
    return dtype if enabled else None


def casts(node: fx.Node, region: torch.dtype, place: object) -> dict[fx.Node, torch.dtype]:
    """To which dtype each operand of ``node`` is cast. Raises `UnsupportedOpError`."""
    given = {n: v for n in node.all_input_nodes if isinstance(v := n.meta.get("val"), Tensor)}
    inside = _run(node, {}, region)
    wanted = {n: dtype for n, v in given.items() if (dtype := inside.copied.get(id(v))) is not None}
    outside = _run(node, wanted, None)
    if inside.ops != outside.ops:
        raise UnsupportedOpError(
            f"{place}: torch.autocast casts inside of {node.target}, not its operands: cast them "
            "by hand, as in x.to(torch.bfloat16), or take autocast out; precision is chosen by "
            "Workload(precision=...)"
        )
    return wanted


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``copied``: dtypes by ``id`` of what was copied; ``ops``: all others, with their results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copied: dict[int, torch.dtype] = {}
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is to_copy:
            self.copied[id(args[0])] = made.dtype
        elif func.namespace != "prim":  # which asks for a device
            results = made if isinstance(made, tuple | list) else [made]
            self.ops.append((func, [t.dtype for t in results if isinstance(t, Tensor)]))
        return made


def _run(node: fx.Node, wanted: dict[fx.Node, torch.dtype], region: Region) -> _Casts:
    def value(operand: fx.Node) -> Any:
        tensor = operand.meta["val"]
        dtype = wanted.get(operand)
        return tensor if dtype is None else tensor.to(dtype)

    mode = next(v.fake_mode for n in (*node.all_input_nodes, node) if (v := _fake(n)) is not None)
    seen = _Casts()
    on = region is not None
    with mode, torch.no_grad(), torch.autocast("cpu", region, enabled=on, cache_enabled=False):
        args, kwargs = tree_map_only(fx.Node, value, (node.args, node.kwargs))
        with seen:
            node.target(*args, **kwargs)  # type: ignore[operator]
    return seen


def _fake(node: fx.Node) -> Any:
    tensor = node.meta.get("val")
    tensor = tensor[0] if isinstance(tensor, tuple | list) and tensor else tensor
    return tensor if hasattr(tensor, "fake_mode") else None
