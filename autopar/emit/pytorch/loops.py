"""Runs of block calls that are a loop: ``for layer in self.layers: x = layer(x, cos, sin)``.

Over time too, where each call reads the next slice of one tensor, and what it makes is read later::

    for t in range(64):
        h = self.cell(x[:, t], h)
        hs.append(h)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.lowering.scopes import Scope
from autopar.nouns.sharding import WHOLE
from autopar.rules.resharding import Step

MANY = 8
"""Results of one op from which on they are members of one variable."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What ``op`` makes at ``index``: a ``select``, or one of many results of a ``split``."""

    op: LoweredOp
    index: int

    @property
    def alone(self) -> bool:
        """A statement of its own, where it is not read in a loop."""
        return self.op.op.kind == "select"

    def next_is(self, other: Slice) -> bool:
        if self.index + 1 != other.index or self.alone != other.alone:
            return False
        mine, its = self.op.op, other.op.op
        if not self.alone:
            return mine is its
        return mine.inputs == its.inputs and mine.attrs["dim"] == its.attrs["dim"]


@dataclass(frozen=True, slots=True)
class Loop:
    """Calls that differ in their module only.

    carried: for each operand of the call after the first, which result of the call before it is;
             None where all calls read one tensor.
    ahead:   for each operand the steps before the first call only, ``each`` those before every one.
    slices:  for each operand that is a slice of a tensor which one it is in the first call, the
             next slice being the next call's; None for all others.
    listed:  results that are read after the loop, of every call.
    """

    calls: tuple[LoweredOp, ...]
    carried: tuple[int | None, ...]
    ahead: tuple[tuple[Step, ...], ...]
    each: tuple[tuple[Step, ...], ...]
    slices: tuple[Slice | None, ...]
    listed: tuple[int, ...] = ()

    @property
    def instances(self) -> tuple[str, ...]:
        return tuple(c.op.attrs["instance"] for c in self.calls)


@dataclass(frozen=True, slots=True)
class _Round:
    """A call, and the slices that it alone reads, by name."""

    call: LoweredOp
    slices: Mapping[str, Slice]

    def sliced(self) -> tuple[Slice | None, ...]:
        return tuple(self.slices.get(name) for name in self.call.op.inputs)


@dataclass(frozen=True, slots=True)
class _Pattern:
    """How a call depends on the one before it, see `Loop`; ``stays``: of the same module."""

    stays: bool
    carried: tuple[int | None, ...]
    listed: tuple[int, ...]
    sliced: bool

    @property
    def least(self) -> int:
        """Rounds that are worth a loop."""
        return 4 if self.listed or self.sliced else 2


def find_loops(
    items: Sequence[LoweredOp | Scope], lowered: Lowered
) -> list[LoweredOp | Scope | Loop]:
    """``items`` with every run of alike block calls as one `Loop`."""
    readers: dict[str, int] = {name: len(r) for name, r in lowered.graph.consumers().items()}
    for name in lowered.graph.outputs:
        readers[name] += 1
    made: list[LoweredOp | Scope | Loop] = []
    run: list[_Round] = []
    pattern: _Pattern | None = None

    def end_run() -> None:
        if pattern is not None and len(run) >= pattern.least:
            made.append(_loop([r.call for r in run], pattern, run[0].sliced()))
        else:
            for part in run:
                made.extend((*(s.op for s in part.slices.values() if s.alone), part.call))
        run.clear()

    for item in _rounds(items, lowered, readers):
        if not isinstance(item, _Round):
            end_run()
            pattern = None
            made.append(item)
            continue
        if run:
            new = _pattern(run[-1], item, readers)
            alike = new is not None and _alike(run[-1], item, lowered, len(run) == 1, new)
            if not alike or (len(run) > 1 and new != pattern):
                end_run()
                new = None
            pattern = new
        run.append(item)
    end_run()
    return made


def _rounds(
    items: Sequence[LoweredOp | Scope], lowered: Lowered, readers: Mapping[str, int]
) -> Iterator[LoweredOp | Scope | _Round]:
    """``items`` with every block call as a `_Round`."""
    waiting: dict[str, Slice] = {}
    parts: dict[str, Slice] = {}
    for item in items:
        if isinstance(item, LoweredOp) and item.op.kind == "block":
            own = {n: s for n in item.op.inputs if (s := waiting.pop(n, None) or parts.get(n))}
            yield from (s.op for s in waiting.values())
            waiting.clear()
            yield _Round(item, own)
            continue
        slices = dict(_slices(item, lowered, readers)) if isinstance(item, LoweredOp) else {}
        if any(s.alone for s in slices.values()):
            waiting |= slices
            continue
        yield from (s.op for s in waiting.values())
        waiting.clear()
        parts |= slices
        yield item
    yield from (s.op for s in waiting.values())


def _slices(
    item: LoweredOp, lowered: Lowered, readers: Mapping[str, int]
) -> Iterator[tuple[str, Slice]]:
    """What ``item`` makes, where that is slices of one tensor, each read once and as it is."""
    op = item.op
    if op.kind == "select":
        if op.attrs["index"] < 0 or item.operands[0].steps or not _is_plain(op.name, lowered):
            return
        given = lowered.tensors[op.inputs[0]]
        if readers[op.name] == 1 and given.tensor.role not in ("parameter", "buffer"):
            yield op.name, Slice(item, op.attrs["index"])
    elif op.kind == "split" and len(op.outputs) > MANY:
        for index, name in enumerate(op.outputs):
            if readers[name] == 1 and _is_plain(name, lowered):
                yield name, Slice(item, index)


def _is_plain(name: str, lowered: Lowered) -> bool:
    return not lowered.tensors[name].steps


def _loop(calls: Sequence[LoweredOp], pattern: _Pattern, slices: tuple[Slice | None, ...]) -> Loop:
    firsts = [o.steps for o in calls[0].operands]
    each = tuple(o.steps for o in calls[1].operands)
    ahead = tuple(_ahead(f, e) or () for f, e in zip(firsts, each, strict=True))
    return Loop(tuple(calls), pattern.carried, ahead, each, slices, pattern.listed)


def _pattern(before: _Round, after: _Round, readers: Mapping[str, int]) -> _Pattern | None:
    """How ``after`` depends on ``before``; None where that is no loop."""
    old, new = before.call.op, after.call.op
    if len(old.inputs) != len(new.inputs) or len(old.outputs) != len(new.outputs):
        return None
    instances = old.attrs["instance"], new.attrs["instance"]
    if not _next_to(*instances):
        return None
    carried: list[int | None] = []
    for was, now in zip(old.inputs, new.inputs, strict=True):
        if now in old.outputs:
            carried.append(old.outputs.index(now))
        elif now == was or _next_slice(before.slices.get(was), after.slices.get(now)):
            carried.append(None)
        else:
            return None
    listed = tuple(i for i, n in enumerate(old.outputs) if readers[n] != carried.count(i))
    stays = instances[0] == instances[1]
    return _Pattern(stays, tuple(carried), listed, bool(after.slices))


def _next_slice(old: Slice | None, new: Slice | None) -> bool:
    return old is not None and new is not None and old.next_is(new)


def _next_to(before: str, after: str) -> bool:
    if before == after:
        return True
    head, _, index = before.rpartition(".")
    other_head, _, other = after.rpartition(".")
    if head != other_head or not (index.isdecimal() and other.isdecimal()):
        return False
    return int(other) == int(index) + 1


def _alike(before: _Round, after: _Round, lowered: Lowered, first: bool, pattern: _Pattern) -> bool:
    """The same resharding before the call and after it.

    The first call may have more steps ahead of its carried operands: those go before the loop.
    """
    was, now = before.call, after.call
    for old, new, carried in zip(was.operands, now.operands, pattern.carried, strict=True):
        ahead = _ahead(old.steps, new.steps)
        if ahead is None or (ahead and not (first and carried is not None)):
            return False
    return [lowered.tensors[n].steps for n in was.op.outputs] == [
        lowered.tensors[n].steps for n in now.op.outputs
    ]


def _ahead(first: tuple[Step, ...], each: tuple[Step, ...]) -> tuple[Step, ...] | None:
    """What ``first`` does before it does ``each``; None where it does not end with that."""
    apart, rest = _apart(first), _apart(each)
    if first == each:
        return ()
    if rest and apart[-len(rest) :] != rest:
        return None
    return apart[: len(apart) - len(rest)]


def _apart(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """``steps`` with a sum for a deferred gradient as the two steps that it is."""
    parts: list[Step] = []
    for step in steps:
        if (step.source.kind, step.target.kind) == ("P", "D"):
            parts.append(replace(step, target=WHOLE, backward="none"))
            step = replace(step, source=WHOLE, forward="none")
        parts.append(step)
    return tuple(parts)


def single(call: LoweredOp) -> Loop:
    """One call by itself."""
    steps = tuple(o.steps for o in call.operands)
    return Loop((call,), (None,) * len(steps), ((),) * len(steps), steps, (None,) * len(steps))
