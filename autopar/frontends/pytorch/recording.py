"""Whether two layers compute the same: every torch call of one forward, written down and repeated.

A layer is traced once and its `Recorder` writes down each call that its forward makes to torch: the
function, its arguments, and what it gave. For every later layer taken as alike the user's own
forward runs as well, in its place and in full, but a `Replayer` answers its calls to torch from the
recording: nothing is computed. Each call must be the recorded one. One that is not, or that a layer
makes too many or too few, and the layers are not alike.

Why layers that differ cannot pass: what a forward computes is what its calls to torch compute. Up
to the first call that differs both forwards were given the same answers, so the answers that a
Replayer gives are the true ones (the layers' own tensors have equal names, shapes and dtypes, and
no call reads values: tensors are fake). Whatever a layer's own number does to the result, through
Python or C, an attribute, a closure, a global, a configuration or a random generator, it must reach
torch as an argument, as a choice of function, or as the number of calls; all three are compared,
constants by type and value, floats bit by bit, tensors by where they came from. What cannot be
compared (an object that could change, a function, a hook, a tensor of unknown origin, an assignment
to a tensor's attribute) is not folded at all.

It rests on this:
- An op that bypasses the recording is seen: inside a layer every op of the graph must have been
  made by a recorded call, and a replayed layer must add none.
- torch's own functions depend on their arguments and on the states in `_ambient` alone.
- A forward does not ask who calls it, nor what the time is.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopar.frontends.pytorch.labels import Labels
from autopar.frontends.pytorch.structure import (
    Given,
    Leaf,
    leaves,
    put_together,
    take_apart,
)
from autopar.torch_private.modes import (
    FakeTensor,
    FakeTensorMode,
    any_autocast,
    dispatch_modes,
    set_grad,
    without_modes,
    without_torch_function,
)
from autopar.torch_private.tensors import PARAMETER_MARK, new_subclass

_EFFECTS = frozenset(  # what they do outlives the call without being a result
    ("__set__", "__delete__", "register_hook", "register_post_accumulate_grad_hook", "backward",
     "requires_grad_", "retain_grad", "set_", "resize_", "apply_", "map_", "numpy", "__array__")
)  # fmt: skip
_GRADIENTS = ("requires_grad", "is_leaf", "grad_fn")
_CPU = torch.device("cpu")
_STATES = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled")


@dataclass(slots=True)
class Event:
    """One call: ``labels`` of the tensors in ``given``, its arguments' structure; likewise made."""

    func: Any
    given: Any
    labels: list[Hashable | None]
    ambient: Hashable
    made: Any = None
    results: list[Hashable] = field(default_factory=list)
    error: Exception | None = None


@dataclass(slots=True)
class Recording:
    """``events`` in order.

    asks: one of them asks whether a tensor needs gradients.
    like: for the label of a result its form as a meta tensor, and a fake tensor's attributes.
    """

    events: list[Event] = field(default_factory=list)
    asks: bool = False
    results: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    like: dict[Hashable, tuple[torch.Tensor, dict[str, Any]]] = field(default_factory=dict)

    def fresh(self, label: Hashable, group: int) -> torch.Tensor:
        """A new tensor that looks like the recorded result, marked as an answer to ``group``."""
        if label not in self.like:
            made: Any = self.results[label]
            with without_modes():
                meta = torch.empty_strided(
                    made.shape, made.stride(), dtype=made.dtype, device="meta"
                )
            whole = FakeTensor(made.fake_mode, meta, made.fake_device)
            self.like[label] = meta, vars(whole)
        # what FakeTensor(...) does, at a fifth of the cost
        meta, attributes = self.like[label]
        answer: Any = new_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=_CPU
        )
        vars(answer).update(attributes, _answers=(group, label))
        return answer  # type: ignore[no-any-return]


def answered(tensor: torch.Tensor) -> tuple[int, Hashable] | None:
    """The group of layers inside which ``tensor`` was a mere answer, and its label there: it must
    not leave them."""
    return vars(tensor).get("_answers")


@cache
def _plain() -> frozenset[str]:
    fake = FakeTensor(FakeTensorMode(), torch.empty(0, device="meta"), torch.device("cpu"))
    return frozenset((*vars(fake), PARAMETER_MARK, "_answers"))


def marked(tensor: torch.Tensor) -> bool:
    """Whether attributes of its own were hung on a tensor: they are lost when layers are folded."""
    return not vars(tensor).keys() <= _plain()


class Recorder:
    """Writes down the calls of a layer that is traced. ``why`` it cannot be folded, or empty."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.recording = Recording()
        self.why = ""
        self._last = last_node()

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._check_recorded()
        event = _event(self.labels, func, args, kwargs)
        self.recording.events.append(event)
        self._check_comparable(event)
        if getattr(getattr(func, "__self__", None), "__name__", "") in _GRADIENTS:
            self.recording.asks = True
        try:
            result = func(*args, **kwargs)
        except Exception as error:  # the user's forward may catch it
            event.error = error
            raise
        finally:
            self._last = last_node()
        if func is set_grad:
            event.made = Leaf(None)
            return result
        tensors, event.made = take_apart(result)
        for tensor in tensors:
            label = self.labels.known(tensor)
            if label is None and not isinstance(tensor, FakeTensor):
                self.why = f"{_name(func)} makes a real tensor"
            if label is None:
                label = self.labels.new(tensor)
                self.recording.results[label] = tensor
            event.results.append(label)
        if not all(leaf.fixed for leaf in leaves(event.made)):
            self.why = f"{_name(func)} gives an object"
        return result

    def end(self) -> None:
        self._check_recorded()

    def _check_comparable(self, event: Event) -> None:
        name = _name(event.func)
        if None in event.labels:
            self.why = f"{name} reads a tensor that is not handed to the layer"
        elif not all(leaf.fixed for leaf in leaves(event.given)):
            self.why = f"{name} is given an object"
        elif name in _EFFECTS or _foreign(event.func):
            self.why = f"{name} may do more than its result says"

    def _check_recorded(self) -> None:
        if not _only_states(self._last):
            self.why = "an op is called past torch's own functions"
        self._last = last_node()


class Replayer:
    """Answers the calls of a layer from the recordings that it may equal.

    ``left`` are the recordings that agree with every call so far; ``why`` none does, or empty.
    """

    def __init__(self, labels: Labels, recordings: list[Recording], group: int) -> None:
        self.labels, self._group = labels, group
        self.left = recordings
        self.why = ""
        self._place = 0
        self._first = last_node()

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        event = None
        with without_torch_function():
            if self._matches(func, args, kwargs):
                event = self.left[0].events[self._place - 1]
                answer = self._answer(event, func, args)
        # once it differs the rest only has to run to its end: the trace is thrown away
        return answer if event is not None else func(*args, **kwargs)

    def end(self) -> None:
        if not self.why and not _only_states(self._first):
            self.why = "an op is called past torch's own functions"
        left = [r for r in self.left if len(r.events) == self._place]
        if not left and not self.why:
            self.why = "the forward ends earlier"
        self.left = left

    def _answer(self, event: Event, func: Any, args: Any) -> Any:
        if func is set_grad:
            func(*args)
        if event.error is not None:
            raise event.error
        tensors = []
        for label in event.results:
            known = self.labels.tensors.get(label)
            if known is None:
                known = self.left[0].fresh(label, self._group)
                self.labels.new(known)
            tensors.append(known)
        return put_together(event.made, tensors, [])

    def _matches(self, func: Any, args: Any, kwargs: Any) -> bool:
        if self.why:
            return False
        place, now = self._place, _ambient()
        kept = [
            r
            for r in self.left
            if place < len(r.events)
            and func == (event := r.events[place]).func
            and now == event.ambient
            and _agrees(event, event.given, (args, kwargs), self.labels)
        ]
        if kept:
            self.left = kept
            self._place += 1
        else:
            self.why = f"call {place + 1}, {_name(func)}, is another one"
        return not self.why


def _event(labels: Labels, func: Any, args: Any, kwargs: Any) -> Event:
    tensors, given = take_apart((args, kwargs))
    return Event(func, given, [labels.of(t) for t in tensors], _ambient())


def _agrees(event: Event, recorded: Any, value: Any, labels: Labels) -> bool:
    """Whether `take_apart` would make ``recorded`` of ``value``, with the event's labels."""
    kind = type(recorded)
    if kind is Leaf:
        return bool(recorded.equals(value))
    if kind is Given:
        label = labels.known(value)
        if label is None:  # asking whether it is a tensor is slow
            if not isinstance(value, torch.Tensor):
                return False
            label = labels.of(value)
        return bool(label == event.labels[recorded.index])
    kind, parts = recorded
    if type(value) is not kind:
        return False
    if kind is slice:
        value = (value.start, value.stop, value.step)
    elif issubclass(kind, dict):
        if [k for k, _ in parts] != list(value):
            return False
        return all(_agrees(event, p, value[k], labels) for k, p in parts)
    if len(parts) != len(value):
        return False
    for part, item in zip(parts, value, strict=True):
        if not _agrees(event, part, item, labels):
            return False
    return True


def _ambient() -> Hashable:
    """The states of torch that its functions depend on besides their arguments."""
    autocast = any_autocast() and tuple(
        (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")
    )
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        dispatch_modes(),
        autocast,
    )


def _foreign(func: Any) -> bool:
    """A Python function that is not torch's: what it does besides calling torch is not seen."""
    return isinstance(func, FunctionType) and not func.__module__.startswith("torch")


def _name(func: Any) -> str:
    return getattr(func, "__name__", None) or str(func)


def last_node() -> Any:
    """The last op of the trace; None: there is no trace."""
    mode: Any = get_proxy_mode()
    return next(iter(reversed(mode.tracer.graph.nodes)), None) if mode is not None else None


def _only_states(last: Any) -> bool:
    """Whether the graph has grown since ``last`` by changes of state alone."""
    mode: Any = get_proxy_mode()
    if mode is None:
        return True
    for node in reversed(mode.tracer.graph.nodes):
        if node is last:
            return True
        if getattr(node.target, "__name__", "") not in _STATES:
            return False
    return True
