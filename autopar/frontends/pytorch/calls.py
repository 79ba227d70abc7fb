"""Calls of repeated layers during the trace: the first of a kind runs, later ones are one op.

A call may be of a kind with an earlier one when the layers are built alike (`repeats`) and the
arguments agree: the same structure, constants, shapes and dtypes, and the same arguments being one
tensor. It is of that kind when its forward then makes the same calls to torch (`recording`). The
trace says for every call exactly which tensors it read and made::

    inside = autopar::enter(arguments, kind)    the first call: its ops stand between these two
    outside = autopar::leave(results, kind)
    outside = autopar::call(arguments, kind)    every later call
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree

from autopar.frontends.pytorch.call_facts import argument_names, modes, shape_of, state_of
from autopar.frontends.pytorch.labels import Labels, Origin
from autopar.frontends.pytorch.recording import Recorder, Recording, Replayer, marked
from autopar.frontends.pytorch.repeats import Member
from autopar.frontends.pytorch.structure import (
    Given,
    Made,
    put_together,
    renumber,
    take_apart,
)
from autopar.torch_private.modes import FakeTensor, without_modes, without_torch_function

CELLS = 4
"""Calls from which on a cell of one op is a block."""

Place = tuple[str, int]  # a call in the trace: module path, how many calls it had before


class NotAlike(Exception):
    """Internal: the trace has to be taken again with the layers of ``group`` told apart.

    repeated: the only layer of the group is called several times.
    first:    only this call is told apart from those before it.
    several:  its calls are alike, but not of one block.
    leaked:   label of a tensor that is used outside without being returned, by a hook, say.
    """

    def __init__(
        self,
        group: int,
        why: str,
        *,
        repeated: bool = False,
        first: Place | None = None,
        several: bool = False,
        leaked: Hashable = None,
    ) -> None:
        super().__init__(why)
        self.leaked = leaked
        self.group, self.why, self.first = group, why, first
        self.repeated, self.several = repeated, several


@dataclass(slots=True)
class Kind:
    """Calls that are alike.

    shared:    full names of tensors in the first layer that all of them have in common.
    given:     which of the tensors that the first call was given require gradients.
    results:   meta tensors like those that the first call made; ``mode`` fakes them again.
    gradients: which of the results require gradients.
    slots:     where each tensor of the returned value comes from; ``labels`` are theirs.
    leaked:    labels of results that are used outside without being returned, made last.
    """

    number: int
    group: int
    class_name: str
    argument_names: tuple[str, ...]
    paths: list[str]
    shared: frozenset[str]
    given: list[bool]
    results: list[torch.Tensor] = field(default_factory=list)
    gradients: list[bool] = field(default_factory=list)
    mode: Any = None
    labels: list[Hashable] = field(default_factory=list)
    slots: list[Given | Made] = field(default_factory=list)
    leaked: list[Hashable] = field(default_factory=list)
    recording: Recording = field(default_factory=Recording)


def _like(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors
    ]


def _declare() -> None:
    for name in ("enter", "leave", "call"):
        torch.library.define(f"autopar::{name}", "(Tensor[] tensors, int kind) -> Tensor[]")

    for name in ("enter", "leave"):
        torch.library.register_fake(f"autopar::{name}", lambda tensors, kind: _like(tensors))


_declare()


def _again(
    kind: Kind, tensors: list[torch.Tensor], leaked: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Writes one op ``autopar::call`` into the trace; dispatching it would cost milliseconds.

    ``leaked``: what stands for the last of its results already.
    """
    mode = get_proxy_mode()
    if not kind.results or mode is None:
        return []
    tracer: Any = mode.tracer
    with without_torch_function():
        operands = [tracer.unwrap_proxy(t) for t in tensors]
        op = torch.ops.autopar.call.default
        proxy = tracer.create_proxy("call_function", op, (operands, kind.number), {})
        made: list[torch.Tensor] = [
            FakeTensor(kind.mode, t, torch.device("cpu")) for t in kind.results
        ]
        track_tensor_tree(made, proxy, constant=None, tracer=tracer)
        for tensor, result in zip(leaked, made[len(made) - len(leaked) :], strict=True):
            known = tracer.unwrap_proxy(result)
            track_tensor_tree(tensor, known, constant=None, tracer=tracer)
    require(made, kind.gradients)
    return made


class _History(torch.autograd.Function):
    """Makes tensors require gradients without being leaves, as results of a layer are."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("a trace has no backward pass")


_apply = vars(torch.autograd.Function)["apply"].__get__(None, _History)
_anchor = torch.empty((), device="meta", requires_grad=True)


def require(tensors: Sequence[torch.Tensor], needed: Sequence[bool]) -> None:
    """Gives a history to the tensors that need gradients: a forward may ask ``requires_grad``."""
    chosen = [t for t, n in zip(tensors, needed, strict=True) if n and not t.requires_grad]
    if chosen:
        with without_torch_function(), torch.enable_grad():
            _apply(_anchor, chosen)


Note = Callable[[FrameType | None], None]


class Calls:
    """Patches the forward of repeated layers; ``kinds`` is what it met.

    members:  layers that may be taken as alike.
    repeated: groups of one member that turned out to be called several times.
    firsts:   calls that turned out to differ from those before them.
    leaks:    by group, labels of tensors that turned out to be used outside.
    named:    the model's tensors by ``id`` of what stands for them.
    note:     told of the calling frame before an op is written by hand.
    current:  what sees the torch calls of the layer that runs.
    failure:  why the trace has to be taken again. The forward runs to its end all the same, so
              that what it counts in Python is as after every other step.
    """

    def __init__(
        self,
        members: list[Member],
        repeated: set[int],
        firsts: set[Place],
        leaks: Mapping[int, Collection[Hashable]],
        note: Note,
    ) -> None:
        self.members = members
        self.repeated, self.firsts, self.leaks, self.note = repeated, firsts, leaks, note
        self.kinds: list[Kind] = []
        self.named: Mapping[int, Origin] = {}
        self.current: Recorder | Replayer | None = None
        self.failure: NotAlike | None = None
        self._by_key: dict[Hashable, list[Kind]] = {}
        self._seen: dict[Hashable, int] = {}
        self._counts: dict[str, int] = {}

    @contextmanager
    def patched(self, named: Mapping[int, Origin]) -> Iterator[None]:
        """Inside, calls of the members go through here."""
        self.named = named
        patched: list[Member] = []
        try:
            for member in self.members:
                if "forward" in vars(member.module):
                    continue  # someone else's patch: leave it alone
                patched.append(member)
                member.module.forward = self._wrap(member)
            yield
        finally:
            for member in patched:
                del vars(member.module)["forward"]

    def _wrap(self, member: Member) -> Callable[..., Any]:
        forward = member.module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.current is not None:
                return forward(*args, **kwargs)
            tensors, structure = take_apart((args, kwargs))
            if any(isinstance(n, torch.SymInt) for t in tensors for n in (*t.shape, *t.stride())):
                return forward(*args, **kwargs)  # rows that a mask chooses: another one each time
            key = (member.group, structure, tuple(map(shape_of, tensors)), modes())
            if member.alone and member.group not in self.repeated:
                self._seen[key] = self._seen.get(key, 0) + 1
                if self._seen[key] == (2 if any(member.module.children()) else CELLS):
                    self._fail(NotAlike(member.group, "called more than once", repeated=True))
                return forward(*args, **kwargs)
            place = (member.path, self._counts.get(member.path, 0))
            self._counts[member.path] = place[1] + 1
            before = self._by_key.setdefault(key, [])
            needed = [t.requires_grad for t in tensors]
            alike = [k for k in before if not k.recording.asks or k.given == needed]
            if alike and place not in self.firsts:
                return self._later(alike, place, member, forward, (args, kwargs), tensors)
            kind = Kind(
                len(self.kinds),
                member.group,
                type(member.module).__name__,
                tuple(argument_names(forward, args, kwargs)),
                [member.path],
                member.shared,
                needed,
            )
            self.kinds.append(kind)
            before.append(kind)
            return self._first(kind, member, forward, tensors, structure)

        return call

    def _fail(self, error: NotAlike) -> None:
        if self.failure is None:
            self.failure = error

    def _later(
        self,
        kinds: list[Kind],
        place: Place,
        member: Member,
        forward: Any,
        given: tuple[Any, Any],
        tensors: list[torch.Tensor],
    ) -> Any:
        """Runs the layer with answers from the recordings, and writes one op into the trace."""
        labels = Labels(member.path, member.shared, self.named, tensors)
        replayer = Replayer(labels, [k.recording for k in kinds], member.group)
        self.current = replayer
        args, kwargs = given
        try:
            result = forward(*args, **kwargs)
        finally:
            replayer.end()
            self.current = None
            if replayer.why:
                self._fail(NotAlike(member.group, replayer.why, first=place))
        if replayer.why:
            return result
        kind = next(k for k in kinds if k.recording is replayer.left[0])
        outputs, shape = take_apart(result)
        if [labels.known(t) for t in outputs] != kind.labels:
            self._fail(NotAlike(member.group, "what it returns is another thing", first=place))
            return result
        if any(map(marked, (*outputs, *tensors))):
            self._fail(NotAlike(member.group, "the forward leaves something behind in a tensor"))
        kind.paths.append(member.path)
        self.note(sys._getframe(2))
        # containers and constants are its own: only tensors have to be the same ones
        leaked = [labels.tensors[label] for label in kind.leaked]
        return put_together(renumber(shape, kind.slots), tensors, _again(kind, tensors, leaked))

    def _first(
        self, kind: Kind, member: Member, forward: Any, tensors: list[torch.Tensor], structure: Any
    ) -> Any:
        """Runs the layer between the two marks."""
        given = torch.ops.autopar.enter(tensors, kind.number)
        require(given, kind.given)
        args, kwargs = put_together(structure, given, [])
        before = state_of(member, structure)
        labels = Labels(member.path, member.shared, self.named, given)
        recorder = Recorder(labels)
        self.current = recorder
        grad = torch.is_grad_enabled()
        try:
            result = forward(*args, **kwargs)
            recorder.end()
        finally:
            self.current = None
        if state_of(member, structure) != before or take_apart((args, kwargs))[1] != structure:
            recorder.why = "the forward leaves something behind in an object"
        outputs, shape = take_apart(result)
        if any(map(marked, (*outputs, *given, *tensors))):
            recorder.why = "the forward leaves something behind in a tensor"
        if torch.is_grad_enabled() != grad:
            recorder.why = "the forward leaves gradients switched on or off"
        if recorder.why:
            self._fail(NotAlike(member.group, recorder.why))
        place = {id(t): Given(i) for i, t in enumerate(given)}
        new: list[torch.Tensor] = []
        for tensor in outputs:
            if id(tensor) in place:
                kind.slots.append(place[id(tensor)])
            else:
                kind.slots.append(Made(len(new)))
                new.append(tensor)
        kind.labels = [labels.of(t) for t in outputs]
        for label in self.leaks.get(kind.group, ()):
            leak = labels.tensors.get(label)
            if leak is not None and all(leak is not t for t in (*new, *given)):
                kind.leaked.append(label)
                new.append(leak)
        kind.recording = recorder.recording
        if new:
            kind.mode = new[0].fake_mode  # type: ignore[attr-defined]
            with without_modes():
                kind.results = [
                    torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
                    for t in new
                ]
        kind.gradients = [t.requires_grad for t in new]
        made = torch.ops.autopar.leave(new, kind.number)
        require(made, kind.gradients)
        return put_together(renumber(shape, kind.slots), tensors, made)
