"""What is noted of every call to torch while a forward runs: the module and line that it came from.

A forward that asks for a tensor's truth or number is answered here, where it only checks it.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from autopar.frontends.pytorch.binned import in_bins
from autopar.frontends.pytorch.build import is_internal
from autopar.frontends.pytorch.calls import Calls
from autopar.frontends.pytorch.constant_indices import by_constant
from autopar.frontends.pytorch.constant_sizes import sized_by_constants
from autopar.frontends.pytorch.constant_values import BatchValues, constant_of, node_of
from autopar.frontends.pytorch.errors import DataDependentError
from autopar.frontends.pytorch.forward_errors import NEEDS_VALUES
from autopar.frontends.pytorch.guards import leads_inside, passing, passing_number, path_of
from autopar.frontends.pytorch.hits import (
    EACH_HIT,
    Hit,
    Round,
    asks_each,
    loop_around,
    mask_behind,
)
from autopar.frontends.pytorch.hooks import ASK_GRAD_FN, GET_DATA, GET_GRAD_FN
from autopar.frontends.pytorch.python_numbers import number_of
from autopar.frontends.pytorch.recording import Replayer
from autopar.frontends.pytorch.rows_of_samples import ChosenRows
from autopar.frontends.pytorch.same_counts import SameCounts
from autopar.frontends.pytorch.same_numbers import asked_of_all, known_of
from autopar.frontends.pytorch.skipped import Skip, SomeRows, refused
from autopar.frontends.pytorch.skipped_source import left_by_rounds, skipping
from autopar.frontends.pytorch.unchecked import unchecked
from autopar.nouns.graph import Source
from autopar.torch_private.modes import without_modes, without_torch_function

_VALUES = ("__bool__", "item", "__index__", "__int__", "tolist")
_ANSWERS: Mapping[str, Callable[[FrameType], Any]] = {"__bool__": passing, "item": passing_number}
_DRAWN = (
    "{}:{} decides by a random number that the forward draws, as LayerDrop does: which layers run "
    "changes from step to step, and a program is the same at every step. Set the probability to 0 "
    "(layerdrop, encoder_layerdrop, decoder_layerdrop), or multiply by a mask of 0 and 1"
)


class Sources:
    """Which module and line an op came from, by its place in the trace."""

    def __init__(self, model: nn.Module, batch: Callable[[], BatchValues] = dict) -> None:
        self.chosen = ChosenRows(batch)
        self._paths = {id(m): path for path, m in model.named_modules()}
        self._stack = [("", type(model).__name__)]  # path and class of the modules that run
        self.checks: list[str] = []  # where the forward only checks values
        self.skips: list[Skip] = []  # branches that were taken, though a mask may choose no row
        self._open: list[Skip] = []
        self._rounds: list[Round] = []
        self._behind: list[fx.Node | None] = []
        self._starts: list[int] = []
        self._sources: list[Source] = []

    @staticmethod
    def all_at(source: Source) -> Sources:
        """Those of a trace whose ops all come from one place."""
        sources = Sources(nn.Module())
        sources._starts, sources._sources = [0], [source]
        return sources

    @property
    def module(self) -> str:
        """The module that runs, or that was running when the forward failed."""
        return self._stack[-1][0]

    def at(self, place: int) -> Source:
        index = bisect_right(self._starts, place) - 1
        return self._sources[index] if index >= 0 else Source()

    def settle(self, graph: fx.Graph) -> None:
        """Counts the places in the trace as it is kept, from which dead ops are gone."""
        places = {node: place for place, node in enumerate(graph.nodes)}
        self._starts = [place_behind(node, places) for node in self._behind]
        for skip in self.skips:
            skip.start, skip.end = (place_behind(n, places) for n in (skip.behind, skip.last))

    def note(self, frame: FrameType | None) -> None:
        mode = get_proxy_mode()
        if mode is None:
            return
        self._close(frame)
        if self._rounds:
            self._next_rounds(frame)
        while frame is not None and is_internal(frame.f_code.co_filename):
            frame = frame.f_back
        file, line = (frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0)
        self._behind.append(next(iter(reversed(mode.tracer.graph.nodes)), None))
        module, owner = self._stack[-1]
        self._sources.append(Source(module, file, line, owner))

    def take(self, asked: fx.Node | SomeRows | None, frame: FrameType) -> bool | None:
        """The truth of what is ``asked`` at ``frame`` with which a branch runs that else is only
        skipped; None where it stands before no such branch. See `Skip`."""
        path, mode = path_of(frame), get_proxy_mode()
        known = skipping(path, leads_inside(frame, path)) if path is not None else None
        if known is None or asked is None or mode is None:
            return None
        truth, lines, names = known
        if isinstance(asked, SomeRows) and asked.truth is not truth:
            return None
        self._begin(asked, truth, lines, names, frame)
        return truth

    def _begin(
        self,
        asked: fx.Node | SomeRows | Hit,
        truth: bool,
        lines: range,
        names: frozenset[str],
        frame: FrameType,
    ) -> None:
        graph: fx.Graph = get_proxy_mode().tracer.graph  # type: ignore[union-attr]
        held = {n: (t, node_of(t)) for n, t in frame.f_locals.items() if n in names}
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        behind = next(iter(reversed(graph.nodes)))
        self._open.append(Skip(asked, truth, place, lines, frame, graph, behind, held))

    def _close(self, frame: FrameType | None) -> None:
        """Ends the branches that code below ``frame`` has left."""
        while self._open and not self._open[-1].runs(frame):
            self._end(self._open.pop())

    def _end(self, skip: Skip) -> None:
        skip.close(node_of)
        self.skips.append(skip)

    def loop(self, elements: Sequence[torch.Tensor], mask: fx.Node, frame: FrameType) -> None:
        """A loop over ``elements``, for those where ``mask`` is true, has its head at ``frame``.
        Raises `DataDependentError` where it does more than compute tensors."""
        path = path_of(frame)
        loop = loop_around(path)
        left = left_by_rounds(loop, path) if loop is not None and path is not None else None
        if loop is None or left is None:
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise refused(place, "it does more than compute tensors, or is no plain loop")
        self._rounds.append(Round(frame, loop.target.id, *left, mask, elements))  # type: ignore[attr-defined]

    def _next_rounds(self, frame: FrameType | None) -> None:
        """Begins the rounds of loops that code below ``frame`` has come to."""
        self._rounds = [r for r in self._rounds if r.runs(frame)]
        for one in self._rounds:
            if (number := one.entered()) is None:
                continue
            while any(skip.frame is one.frame and skip.lines == one.lines for skip in self._open):
                self._end(self._open.pop())
            self._begin(Hit(one.mask, number), True, one.lines, one.names, one.frame)

    @contextmanager
    def recording(self, calls: Calls) -> Iterator[None]:
        def enter(module: nn.Module, args: Any) -> None:
            path = self._paths.get(id(module))
            own = self._stack[-1] if path is None else (path, type(module).__name__)
            self._stack.append(own)

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            self._stack.pop()
            self._close(sys._getframe(1))

        hooks = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave))
        try:
            with _Noting(self, calls), self._asked_of_sizes(calls):
                yield
            self._close(None)
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _asked_of_sizes(self, calls: Calls) -> Iterator[None]:
        """Inside, ``if rows.numel() == 0`` is answered as `take` says."""
        plain: Callable[[torch.SymBool], bool] = torch.SymBool.__bool__

        def truth(size: torch.SymBool) -> bool:
            try:
                return plain(size)
            except NEEDS_VALUES:
                frame, some = sys._getframe(1), SomeRows.of(size)
                if some is None or is_internal(frame.f_code.co_filename):
                    raise
                if isinstance(calls.current, Replayer):
                    return some.truth  # as it was answered in the layer that is alike
                answer = self.take(some, frame)
                if answer is None:
                    raise
                return answer

        torch.SymBool.__bool__ = truth  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.SymBool.__bool__ = plain  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class _Value:
    """The question for a tensor's truth or number, another one at every place of the code."""

    code: CodeType
    span: tuple[int | None, ...]
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
        self.counts = SameCounts()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in _VALUES:
            frame = sys._getframe(1)
            ask = partial(self.value, func=func, frame=frame)
            func = _Value(frame.f_code, _span(frame), func.__name__, ask)
        elif func == GET_GRAD_FN:
            func = ASK_GRAD_FN
        elif func is torch.tensor and args and isinstance(args[0], float):
            # kept in all its digits: a tensor would be rounded to its dtype before the trace has it
            func, args = torch.full, ((), args[0])
        elif func == GET_DATA:  # outside of the trace otherwise, which sees ops alone
            func = torch.Tensor.detach
        elif (piece := by_constant(func, args, kwargs)) is not None:
            func, args = piece
        elif (each := self.sources.chosen.by_samples(func, args, kwargs)) is not None:
            func, *args = each
        elif (binned := in_bins(func, args, kwargs)) is not None:
            (func, args), kwargs = binned, None
        elif (plain := unchecked(func, args, kwargs)) is not None:
            func, kwargs = plain, {k: v for k, v in (kwargs or {}).items() if v is not None}
        elif (sized := sized_by_constants(func, args, kwargs)) is not None:
            func, args, kwargs = sized
        elif asks_each(func, args, kwargs):
            func, args = EACH_HIT, args[:1]
        layer = self.calls.current
        if isinstance(layer, Replayer):
            return layer.call(func, args, kwargs or {})
        if func.__name__ != "__get__":  # shape, dtype and the like make no op
            self.sources.note(sys._getframe(1))
        try:
            if layer is not None:
                result = layer.call(func, args, kwargs or {})
            else:
                result = func(*args, **(kwargs or {}))
        finally:
            self.counts.settle()
        self.sources.chosen.note(func, args, result)
        if func is EACH_HIT and (mask := mask_behind(args[0])) is not None:
            self.sources.loop(result, mask, _outside(sys._getframe(1)))
        return result

    def value(self, tensor: torch.Tensor, func: Callable[..., Any], frame: FrameType) -> Any:
        """Of a tensor without values, where the forward only checks it: that the check holds."""
        try:
            return func(tensor)
        except NEEDS_VALUES as error:
            asks = func.__name__ in ("item", "__bool__")  # which others may answer
            if (known := constant_of(tensor) if asks else known_of(tensor)) is not None:
                return _plainly(func, known)
            answer = _ANSWERS.get(func.__name__, _none)(frame)
            if answer is None and _is_drawn():
                place = frame.f_code.co_filename, frame.f_lineno
                raise DataDependentError(_DRAWN.format(*place)) from error
            if answer is None and func.__name__ == "__bool__":
                if (known := asked_of_all(tensor)) is not None:
                    return _plainly(func, known)
                answer = self.sources.take(node_of(tensor), frame)
                if answer is not None:
                    return answer
            if answer is None and func.__name__ == "item" and tensor.numel() == 1:
                return number_of(tensor)
            if answer is None and (known := known_of(tensor)) is not None:
                return _plainly(func, known)
            if answer is None:
                raise
            self.checks.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            return answer


def place_behind(node: fx.Node | None, places: Mapping[fx.Node, int]) -> int:
    """The place behind ``node``; behind what came before it, where it is gone."""
    while node is not None and node not in places and node.op != "root":
        node = node.prev
    return 0 if node is None else places.get(node, -1) + 1


def _span(frame: FrameType) -> tuple[int | None, ...]:
    """Where in its source ``frame`` is. Its instruction is not compared: code that ran often makes
    a call by another one."""
    return next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))


def _plainly(func: Callable[..., Any], known: torch.Tensor) -> Any:
    """``func`` of a tensor with values."""
    with without_modes(), without_torch_function():
        return func(known)


def _none(frame: FrameType) -> None:
    """No answer."""


def _outside(frame: FrameType) -> FrameType:
    """The frame of the user's code that calls ``frame``, or is it."""
    while is_internal(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame


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
