"""Running the forward on fake tensors and writing down every aten op that it calls.

The trace is taken before autograd and before composite ops are broken up: `linear`, attention and
cross-entropy stay one op. Beside each op stand the module and the line of the user that called it.
"""

from __future__ import annotations

import logging
import operator
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from autopar.frontends.losses import find_loss, scalars_of
from autopar.frontends.places import UNKNOWN, declared
from autopar.frontends.pytorch.autocast import autocast_of_devices_refused
from autopar.frontends.pytorch.build import Built, fake, is_internal, last_line, without_cache
from autopar.frontends.pytorch.calls import Calls, Kind, NotAlike, Note, Place
from autopar.frontends.pytorch.errors import (
    CaptureError,
    DataDependentError,
    ForwardError,
    LossError,
    UnsupportedOpError,
)
from autopar.frontends.pytorch.functions import Called, kept_functions
from autopar.frontends.pytorch.guards import passing, passing_number
from autopar.frontends.pytorch.hooks import ASK_GRAD_FN, GET_GRAD_FN, check_hooks, hooks_refused
from autopar.frontends.pytorch.left_behind import Numbers, check_tensors, numbers_of
from autopar.frontends.pytorch.recording import Replayer
from autopar.frontends.pytorch.repeats import can_be_lent, find_repeats, lent
from autopar.frontends.pytorch.seeds import seeds_refused
from autopar.nouns.graph import Source
from autopar.runtime.pytorch.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    causal_check,
    exporting,
)

SPLITS = 4  # sorts of layers in one group that are still told from one another by trying

_VALUES = ("__bool__", "item")
_DRAWN = (
    "{}:{} decides by a random number that the forward draws, as LayerDrop does: which layers run "
    "changes from step to step, and a program is the same at every step. Set the probability to 0 "
    "(layerdrop, encoder_layerdrop, decoder_layerdrop), or multiply by a mask of 0 and 1"
)
_DATA = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter, buffer or plain tensor attribute of the model, under its first name."""

    name: str
    tensor: torch.Tensor
    role: str  # "parameter" or "buffer"
    persistent: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """What was written down.

    graph:   the fx graph; placeholders are the batch entries in order, ``batch`` their names.
    root:    holds what ``get_attr`` nodes name.
    named:   the model's tensors by ``id`` of the tensor that stood for them in the trace.
    aliases: every other name of a tied tensor, to the first one.
    functions: calls of hand-written derivatives, by their number in the graph.
    before, left: plain attributes of the model around the forward.
    """

    graph: fx.Graph
    root: nn.Module
    batch: tuple[str, ...]
    named: dict[int, Named]
    aliases: dict[str, str]
    kinds: list[Kind]
    functions: list[Called]
    sources: Sources
    before: Numbers
    left: Numbers


class Sources:
    """Which module and line an op came from, by its place in the trace."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = {id(m): path for path, m in model.named_modules()}
        self._stack = [("", type(model).__name__)]  # path and class of the modules that run
        self.checks: list[str] = []  # where the forward only checks values
        self._starts: list[int] = []
        self._sources: list[Source] = []

    @property
    def module(self) -> str:
        """The module that runs, or that was running when the forward failed."""
        return self._stack[-1][0]

    def at(self, place: int) -> Source:
        found = bisect_right(self._starts, place) - 1
        return self._sources[found] if found >= 0 else Source()

    def note(self, frame: FrameType | None) -> None:
        mode = get_proxy_mode()
        if mode is None:
            return
        while frame is not None and is_internal(frame.f_code.co_filename):
            frame = frame.f_back
        file, line = (frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0)
        self._starts.append(len(mode.tracer.graph.nodes))
        module, owner = self._stack[-1]
        self._sources.append(Source(module, file, line, owner))

    @contextmanager
    def recording(self, calls: Calls) -> Iterator[None]:
        def enter(module: nn.Module, args: Any) -> None:
            path = self._paths.get(id(module))
            own = self._stack[-1] if path is None else (path, type(module).__name__)
            self._stack.append(own)

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            self._stack.pop()

        hooks = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave))
        try:
            with _Noting(self, calls):
                yield
        finally:
            for hook in hooks:
                hook.remove()


@dataclass(frozen=True, slots=True)
class _Value:
    """The question for a tensor's truth or number, another one at every place of the code."""

    code: CodeType
    place: int
    name: str
    ask: Callable[[torch.Tensor], Any] = field(compare=False)

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self.ask(tensor)

    @property
    def __name__(self) -> str:
        return self.name


class _Noting(TorchFunctionMode):
    """Sees every call to torch: notes where it came from, and hands those of layers on."""

    def __init__(self, sources: Sources, calls: Calls) -> None:
        super().__init__()
        self.sources, self.calls = sources, calls
        self.checks = sources.checks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in _VALUES:
            frame = sys._getframe(1)
            ask = partial(self.value, func=func, frame=frame)
            func = _Value(frame.f_code, frame.f_lasti, func.__name__, ask)
        elif func == GET_GRAD_FN:
            func = ASK_GRAD_FN
        layer = self.calls.current
        if isinstance(layer, Replayer):
            return layer.call(func, args, kwargs or {})
        if func.__name__ != "__get__":  # shape, dtype and the like make no op
            self.sources.note(sys._getframe(1))
        if layer is not None:
            return layer.call(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def value(self, tensor: torch.Tensor, func: Callable[..., Any], frame: FrameType) -> Any:
        """Of a tensor without values, where the forward only checks it: that the check holds."""
        try:
            return func(tensor)
        except _DATA as error:
            answer = passing(frame) if func.__name__ == "__bool__" else passing_number(frame)
            if answer is None and _is_drawn():
                place = frame.f_code.co_filename, frame.f_lineno
                raise DataDependentError(_DRAWN.format(*place)) from error
            if answer is None:
                raise
            self.checks.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            return answer


def _is_drawn() -> bool:
    """Whether the last op of the trace computes from random numbers and constants alone."""
    mode = get_proxy_mode()
    last = next(iter(reversed(mode.tracer.graph.nodes)), None) if mode is not None else None
    waiting, draws = [last] if last is not None else [], False
    while waiting:
        node = waiting.pop()
        if node.op != "call_function":
            return False
        draws = draws or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        waiting += node.all_input_nodes
    return draws


class Repeats:
    """Which layers are taken as alike; a trace that shows otherwise narrows it down."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.members = find_repeats(model)
        self.apart: set[int] = set()
        self.repeated: set[int] = set()
        self.firsts: dict[Place, int] = {}  # with the group
        self.lent: set[int] = set()  # groups whose calls are handed their tensors from outside

    def split(self, error: NotAlike) -> None:
        splits = sum(group == error.group for group in self.firsts.values())
        if error.repeated:
            self.repeated.add(error.group)
        elif error.several and self._may_lend(error.group):
            self._lend(error.group)
        elif error.first is None or splits == SPLITS:
            self.apart.add(error.group)
        else:
            self.firsts[error.first] = error.group

    def _may_lend(self, group: int) -> bool:
        if group in self.lent:
            return False
        return all(can_be_lent(m) for m in self.members.values() if m.group == group)

    def _lend(self, group: int) -> None:
        """Every member is a group of its own now, and its calls are handed its tensors."""
        fresh = 1 + max(m.group for m in self.members.values())
        for key, member in self.members.items():
            if member.group == group:
                self.members[key] = lent(member, fresh, self.model)
                self.lent.add(fresh)
                self.repeated.add(fresh)
                fresh += 1

    def calls(self, note: Note) -> Calls:
        members = [m for m in self.members.values() if m.group not in self.apart]
        return Calls(members, self.repeated, set(self.firsts), note)


def take_trace(built: Built, repeats: Repeats) -> Trace:
    """Traces the forward once, repeated layers once each.

    Raises `NotAlike` for layers that turn out to differ, else a `CaptureError`.
    """
    model = built.model
    names = tuple(built.batch)
    sources = Sources(model)
    calls = repeats.calls(sources.note)
    check_hooks(model)
    before = numbers_of(model)
    functions: list[Called] = []

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        with sources.recording(calls), calls.patched(named):
            return _loss(model(**dict(zip(names, tensors, strict=True))))

    with ExitStack() as stack:
        named, aliases, held = stack.enter_context(_fakes_inside(model, built.mode))
        stack.enter_context(without_cache(model))
        stack.enter_context(exporting())
        stack.enter_context(kept_functions(functions, built.mode, calls))
        stack.enter_context(hooks_refused())
        stack.enter_context(seeds_refused())
        stack.enter_context(autocast_of_devices_refused())
        stack.enter_context(_masks_unread())
        stack.enter_context(_quiet_fake_tensors())
        stack.enter_context(built.mode)
        try:
            traced = make_fx(run, pre_dispatch=True)(*built.batch.values())
        except (NotAlike, CaptureError):
            raise
        except Exception as error:  # a user's forward
            if calls.failure is not None:
                raise calls.failure from error
            raise _explained(error, model, sources.module) from error
        if calls.failure is not None:
            raise calls.failure
        check_tensors(model, held, _read(traced))
    left = numbers_of(model)
    return Trace(
        traced.graph, traced, names, named, aliases, calls.kinds, functions, sources, before, left
    )


def _read(traced: fx.GraphModule) -> set[int]:
    """By ``id``, the tensors from outside that the trace's ops read."""
    names = {str(n.target) for n in traced.graph.nodes if n.op == "get_attr"}
    return {id(operator.attrgetter(name)(traced)) for name in names}


def _loss(result: Any) -> torch.Tensor:
    loss = find_loss(result)
    if loss is None:
        raise LossError(
            f"the forward returns {_shown(result)} without a loss: return the scalar loss, a tuple "
            "with no other scalar, or a record with .loss (Hugging Face models compute it when the "
            "batch has labels)"
        )
    if loss.numel() != 1 or not loss.dtype.is_floating_point:
        raise LossError(
            f"the forward returns a {str(loss.dtype).removeprefix('torch.')} tensor of shape "
            f"{list(loss.shape)}, not a scalar loss: reduce it, as in loss.mean()"
        )
    return loss


def _shown(result: Any) -> str:
    """``a dict (logits, hidden)``, ``a tuple with scalars at 1 and 2``"""
    kind = f"a {type(result).__name__}"
    if isinstance(result, dict):
        return f"{kind} ({', '.join(map(str, result))})"
    if not isinstance(result, tuple | list):
        return f"{kind} (no .loss)"
    places = " and ".join(map(str, scalars_of(result)))
    return f"{kind} with {f'scalars at {places}' if places else 'no scalar'}"


@contextmanager
def _masks_unread() -> Iterator[None]:
    """Inside, `nn.Transformer` takes every mask as it is: it looks into one that comes without a
    hint, only to leave it out where it is causal, which is found here anyway."""
    module, name = causal_check
    plain = getattr(module, name)
    setattr(module, name, lambda mask, is_causal=None, size=None: is_causal is True)
    try:
        yield
    finally:
        setattr(module, name, plain)


@contextmanager
def _quiet_fake_tensors() -> Iterator[None]:
    """Inside, torch does not log the traceback of an error that it also raises."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _explained(error: Exception, model: nn.Module, path: str) -> Exception:
    """``error`` of the user's forward as a named error that points at the user's line.

    path: the module whose forward failed.
    """
    place = last_line(error)
    # no line of the user's ran: a call that the forward does not take, or torch's
    if place == UNKNOWN:
        place = _declared(type(model))
    if path:
        place += f" (module {path})"
    text = str(error).strip().partition("\n")[0]
    data = isinstance(error, _DATA) or "data-dependent" in text or "tracing tensor" in text
    if data or "meta tensors" in text:
        return DataDependentError(
            f"{place} needs the value of a tensor while the model is captured ({text}). The "
            "program must be the same for every batch: replace .item(), bool(tensor), int(tensor) "
            "and boolean indexing by torch.where, masks or fixed shapes"
        )
    if "HigherOrder" in type(error).__name__:
        return UnsupportedOpError(
            f"{place} uses a higher-order op (torch.cond, a while loop, a map), which is not "
            "supported in a forward: compute both sides and choose with torch.where"
        )
    return ForwardError(f"the forward failed at {place}: {type(error).__name__}: {text}")


def _declared(model: type[nn.Module]) -> str:
    """``file:line`` of the forward of a class, or of the class where it has none of its own."""
    for found in (model.forward, model):
        place = declared(found, is_internal)
        if place != UNKNOWN:
            return place
    return model.__name__


@contextmanager
def _fakes_inside(
    model: nn.Module, mode: FakeTensorMode
) -> Iterator[tuple[dict[int, Named], dict[str, str], dict[tuple[str, str], torch.Tensor]]]:
    """Inside, all tensors that the model holds are fake; yields what they stand for, and where
    they are held by (module path, name)."""
    held: dict[tuple[str, str], torch.Tensor] = {}
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    fakes: dict[int, torch.Tensor] = {}
    named: dict[int, Named] = {}
    aliases: dict[str, str] = {}
    try:
        for path, module in model.named_modules():
            plain = {n: v for n, v in vars(module).items() if isinstance(v, torch.Tensor)}
            tables = (module._parameters, module._buffers, plain)
            for table, role in zip(tables, ("parameter", "buffer", "buffer"), strict=True):
                for key, tensor in list(table.items()):
                    if tensor is None:
                        continue
                    name = f"{path}.{key}" if path else key
                    made = fakes.get(id(tensor))
                    if made is None:
                        made = fake(tensor, mode)
                        if role == "parameter":  # what nn.Parameter does, without a dispatch
                            made.requires_grad_(tensor.requires_grad)
                            made._is_param = True
                        fakes[id(tensor)] = made
                        kept = table is not plain and key not in module._non_persistent_buffers_set
                        named[id(made)] = Named(name, made, role, kept)
                    else:
                        aliases[name] = named[id(made)].name
                    home = vars(module) if table is plain else table
                    places.append((home, key, tensor))
                    home[key] = held[path, key] = made
        yield named, aliases, held
    finally:
        for home, key, tensor in places:
            home[key] = tensor
