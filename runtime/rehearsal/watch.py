"""Every op of a rehearsed step: on which device, on which stream, and what the host waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.runtime.rehearsal import nccl
from autopar.runtime.rehearsal.clocks import HOST, Known, Memory
from autopar.runtime.rehearsal.fakes import (
    SIZED_BY_VALUES,
    as_if_all,
    as_places,
    is_mask,
    is_view,
    number_of,
    view_of,
)
from autopar.runtime.rehearsal.findings import Finding, frames_here, place_of, reason_of
from autopar.runtime.rehearsal.remembered import Remembered
from autopar.runtime.rehearsal.second_device import NAME, Device
from autopar.torch_private.distributed import fake_work
from autopar.torch_private.modes import FakeTensor, TorchDispatchMode, without_modes
from autopar.torch_private.ops import schema_of
from autopar.torch_private.tensors import StorageWeakRef, memory_of, tree_map_only

INDEXED = frozenset({"aten::index", "aten::index_put", "aten::index_put_"})
SENDS = (
    "allreduce allreduce_coalesced broadcast allgather _allgather_base allgather_coalesced "
    "allgather_into_tensor_coalesced reduce_scatter _reduce_scatter_base alltoall alltoall_base "
    "reduce_scatter_tensor_coalesced send recv recv_anysource gather scatter reduce barrier "
    "all_gather_single all_gather_single_coalesced all_to_all_single reduce_scatter_single "
    "reduce_scatter_single_coalesced _end_coalescing"
).split()


_MAKERS = (torch.tensor, torch.as_tensor)


class Literals(TorchFunctionMode):
    """Makes tensors of the host's numbers on the host and moves them, which an op without a kernel
    for the device does not do by itself. Those of the host stay as they are: a model that is
    captured again has values of what it writes out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _MAKERS or not kwargs or kwargs.get("device") is None:
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs)
        if torch.device(kwargs["device"]).type == "cpu":
            return func(*args, **kwargs)
        place = kwargs.pop("device")
        made = func(*args, **kwargs)
        there = torch.empty(made.shape, dtype=made.dtype, device=place)
        return there.copy_(made)  # as an op that fake tensors see


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, what ops and collectives do to `Device` becomes findings."""

    def __init__(self, device: Device, program: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.program = device, program
        self.findings: dict[tuple[str, str, str], Finding] = {}
        self.failed: tuple[Exception, list[tuple[str, int, str]]] | None = None
        self.groups: list[list[int]] = []
        self._memory: dict[int, tuple[Any, Memory]] = {}
        self._sent: list[str] = []
        self._works: dict[int, tuple[Any, list[Known]]] = {}
        self._pinned: dict[int, Any] = {}
        self._remembered = Remembered()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether each call is wrapped, so that nothing of it is compiled; nothing here is."""
        return False

    def find(self, kind: str, what: str) -> None:
        """Notes a finding where the program stands."""
        frames = frames_here(self.program)
        place = place_of(frames)
        reason = reason_of(frames) if kind == "waits" else ""
        known = self.findings.get((kind, what, place))
        times = 1 if known is None else known.times + 1
        self.findings[kind, what, place] = Finding(kind, what, place, reason, times)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # half of all calls ask for it alone
        try:
            return self._watched(func, args, kwargs or {})
        except Exception as error:  # whatever an op raises; one of a hook may lose its way in C++
            self.failed = error, frames_here(self.program)
            raise

    def _watched(self, func: Any, args: Any, kwargs: Any) -> Any:
        view = view_of(func, args, kwargs)
        if view is not None:
            return view
        name = schema_of(func).name
        given = _tensors((args, kwargs))
        if given and _stays(name, kwargs) and all(type(t) is Tensor for t in given):
            # the host's own numbers, such as the ranks of a mesh, are not fake and need not be
            with without_modes():
                return func(*args, **kwargs)
        here = [t for t in given if _place(t).type == NAME]
        if name == "aten::_local_scalar_dense" and isinstance(args[0], FakeTensor):
            if here:
                self._host_waits(".item()", args[0])
            return number_of(args[0])
        if name in SIZED_BY_VALUES and here:
            self._host_waits(name.removeprefix("aten::"), here[0])
            return as_if_all(name, here[0])
        if name in INDEXED and here and any(is_mask(i) for i in args[1]):
            self._host_waits("index by a mask", here[0])
            args = (args[0], as_places(args[1]), *args[2:])
        pinned = kwargs.get("pin_memory")
        if pinned:  # which asks for the device's own memory of the host
            kwargs = {**kwargs, "pin_memory": False}
        made = self._made(func, args, kwargs, given, here)
        if pinned and isinstance(made, Tensor):
            self._pinned[memory_of(made)] = _weak(made.untyped_storage())
        if name.startswith("prim::") or is_view(func):
            return made
        if name.startswith("c10d::"):
            self._collective(name.removeprefix("c10d::"), func, args, here)
        elif name.startswith("_c10d_functional::"):
            self._functional(name, args, here, made)
            if name.endswith("::wait_tensor"):
                return args[0]  # as on a device: a fake tensor of its own would be memory more
        elif name in ("aten::copy_", "aten::_to_copy"):
            self._copied(name, args, kwargs, made)
        else:
            self._launched(func, here, given, made)
        return made

    def _made(
        self, func: Any, args: Any, kwargs: Any, given: list[Tensor], here: list[Tensor]
    ) -> Any:
        """The op's result; of mixed operands that of all on the device."""
        try:
            return self._remembered(func, args, kwargs)
        except RuntimeError as error:
            mixed = here and any(_place(t).type == "cpu" and t.ndim for t in given)
            if not mixed or "device" not in str(error).lower():
                raise
        lies = sorted({f"{list(t.shape)} on {t.device}" for t in given})
        self.find("mixes", f"{_short(func)}: {', '.join(lies)}")
        args, kwargs = tree_map_only(
            Tensor, lambda t: torch.empty_like(t, device=NAME), (args, kwargs)
        )
        return func(*args, **kwargs)

    def _host_waits(self, what: str, tensor: Tensor) -> None:
        stream = self.device.current_stream().key
        self._use(tensor, stream, self.device.clocks.starts(stream), False, what)
        self.find("waits", what)
        self.device.clocks.wait(HOST, self.device.clocks.now(stream))

    def _launched(self, func: Any, here: list[Tensor], given: list[Tensor], made: Any) -> None:
        results = [t for t in _tensors(made) if _place(t).type == NAME]
        if not here and not results:
            for tensor in given:  # the host's own work, on memory that a stream may still use
                self._use(tensor, HOST, self.device.clocks.starts(HOST), False, _short(func), True)
            return
        stream = self.device.current_stream().key
        count = self.device.clocks.starts(stream)
        read = {memory_of(t) for t in here}
        for tensor in here:
            self._use(tensor, stream, count, False, _short(func))
        for tensor in _written(func, given, results):
            self._use(tensor, stream, count, True, _short(func))
        for tensor in results:
            if memory_of(tensor) not in read:
                self._use(tensor, stream, count, True, _short(func))

    def _copied(self, name: str, args: Any, kwargs: Any, made: Any) -> None:
        to, source = (args[0], args[1]) if name == "aten::copy_" else (made, args[0])
        places = {_place(to).type, _place(source).type}
        if NAME not in places:
            return
        stream = self.device.current_stream().key
        count = self.device.clocks.starts(stream)
        what = f"copy of {list(source.shape)} from {source.device.type} to {to.device.type}"
        self._use(source, stream, count, False, what)
        self._use(to, stream, count, True, what)
        if len(places) > 1 and not self._is_beside(args, kwargs, to, source):
            self.find("waits", what)
            self.device.clocks.wait(HOST, self.device.clocks.now(stream))

    def _is_beside(self, args: Any, kwargs: Any, to: Tensor, source: Tensor) -> bool:
        """Whether a copy goes on while the host does: it is asked to, and the memory is pinned."""
        asked = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True))
        host = to if to.device.type == "cpu" else source
        number = source.device.type == "cpu" and source.ndim == 0
        held = self._pinned.get(memory_of(host))
        return asked and (number or (held is not None and not held.expired()))

    def _collective(self, op: str, func: Any, args: Any, here: list[Tensor]) -> None:
        if not here:
            return
        group = next((a for a in args if isinstance(a, torch.ScriptObject)), None)
        ranks = _size_of(group)
        why = nccl.refusal(op, here, ranks)
        if why:
            self.find("refused", f"{op.strip('_')}: {why}")
        current, lane = self.device.current_stream().key, f"collectives of {_name_of(group)}"
        self.device.clocks.wait(lane, self.device.clocks.now(current))
        count = self.device.clocks.starts(lane)
        for tensor in here:
            self._use(tensor, lane, count, op != "send", op.strip("_"))  # to several at once
        self._sent.append(lane)

    def _functional(self, name: str, args: Any, here: list[Tensor], made: Any) -> None:
        if not here:
            return
        current = self.device.current_stream().key
        if name.endswith("::wait_tensor"):
            memory = self._of(here[0])
            if memory.written is not None:
                self.device.clocks.wait(current, dict([memory.written]))
            return
        op = name.partition("::")[2]
        why = nccl.refusal({"all_reduce": "allreduce_"}.get(op, op), here, 0)
        if why:
            self.find("refused", f"{op}: {why}")
        lane = "functional collectives"
        self.device.clocks.wait(lane, self.device.clocks.now(current))
        count = self.device.clocks.starts(lane)
        for tensor in here:
            self._use(tensor, lane, count, False, op)
        for tensor in _tensors(made):
            self._use(tensor, lane, count, True, op)

    def _of(self, tensor: Tensor) -> Memory:
        at = memory_of(tensor)
        known = self._memory.get(at)
        if known is None or known[0].expired():
            known = _weak(tensor.untyped_storage()), Memory()
            self._memory[at] = known
        return known[1]

    def _use(
        self, tensor: Tensor, stream: str, count: int, write: bool, what: str, known: bool = False
    ) -> None:
        """``known``: only where a stream has used the memory before."""
        if known and memory_of(tensor) not in self._memory:
            return
        memory = self._of(tensor)
        use = memory.writes if write else memory.reads
        early = use(self.device.clocks, stream, count)
        if early is not None:
            verb = "writes" if write else "reads"
            shown = f"{what} {verb} {list(tensor.shape)} on {stream}"
            self.find("races", f"{shown}, which does not wait for {early}")
            self.device.clocks.wait(stream, self.device.clocks.now(early))  # told once

    @contextmanager
    def works(self) -> Iterator[None]:
        """Inside, waiting for a collective makes the stream wait that is current then."""
        before = {name: getattr(dist.ProcessGroup, name) for name in SENDS}
        of_works = fake_work()
        wait = of_works.wait

        def starting(plain: Any) -> Any:
            def start(group: Any, *args: Any, **kwargs: Any) -> Any:
                self._sent = []
                work = plain(group, *args, **kwargs)
                if work is not None and self._sent:
                    each = [self.device.clocks.now(lane) for lane in self._sent]
                    self._works[id(work)] = work, each
                return work

            return start

        def waiting(work: Any, *given: Any) -> Any:
            for known in self._works.pop(id(work), (None, []))[1]:
                self.device.clocks.wait(self.device.current_stream().key, known)
            return wait(work, *given)

        for name, plain in before.items():
            setattr(dist.ProcessGroup, name, starting(plain))
        of_works.wait = waiting
        try:
            yield
        finally:
            for name, plain in before.items():
                setattr(dist.ProcessGroup, name, plain)
            of_works.wait = wait


_weak: Any = StorageWeakRef
_DEVICE: Any = torch.ops.prim.device.default


def _tensors(values: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    _add_tensors(values, tensors)
    return tensors


def _add_tensors(values: Any, tensors: list[Tensor]) -> None:
    if isinstance(values, Tensor):
        tensors.append(values)
    elif isinstance(values, dict):
        _add_tensors(list(values.values()), tensors)
    elif isinstance(values, (list, tuple)):
        for value in values:
            _add_tensors(value, tensors)


def _place(tensor: Tensor) -> torch.device:
    """Its device, which of a fake tensor is an op that modes see."""
    return tensor.fake_device if type(tensor) is FakeTensor else tensor.device


def _written(func: Any, given: list[Tensor], results: list[Tensor]) -> list[Tensor]:
    """Operands that the op writes into: the first where its name says so."""
    writes = any(
        a.alias_info is not None and a.alias_info.is_write for a in schema_of(func).arguments
    )
    if not writes:
        return []
    ours = {memory_of(t) for t in results}
    return [t for t in given if _place(t).type == NAME and memory_of(t) in ours] or given[:1]


def _stays(name: str, kwargs: Any) -> bool:
    """Whether what an op makes of real tensors may stay real: it never meets the device."""
    return "lift" not in name and kwargs.get("device") is None


def _short(func: Any) -> str:
    return str(schema_of(func).name.partition("::")[2])


def _group(boxed: Any) -> Any:
    return dist.ProcessGroup.unbox(boxed)


def _size_of(boxed: Any) -> int:
    return 1 if boxed is None else int(_group(boxed).size())


def _name_of(boxed: Any) -> str:
    return "" if boxed is None else str(_group(boxed).group_name)
