"""Runs of block calls that are a loop: ``for layer in self.layers: x = layer(x, cos, sin)``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.emit.pytorch.scopes import Scope
from autopar.lowering.spread import Lowered, LoweredOp
from autopar.nouns.sharding import WHOLE
from autopar.rules.resharding import Step


@dataclass(frozen=True, slots=True)
class Loop:
    """Calls that differ in their module only.

    carried: for each operand of the call after the first, which result of the call before it is;
             None where all calls read one tensor.
    ahead:   for each operand the steps before the first call only, ``each`` those before every one.
    """

    calls: tuple[LoweredOp, ...]
    carried: tuple[int | None, ...]
    ahead: tuple[tuple[Step, ...], ...]
    each: tuple[tuple[Step, ...], ...]

    @property
    def instances(self) -> tuple[str, ...]:
        return tuple(c.op.attrs["instance"] for c in self.calls)


def find_loops(
    items: Sequence[LoweredOp | Scope], lowered: Lowered
) -> list[LoweredOp | Scope | Loop]:
    """``items`` with every run of two or more alike block calls as one `Loop`."""
    readers: dict[str, int] = {name: len(r) for name, r in lowered.graph.consumers().items()}
    for name in lowered.graph.outputs:
        readers[name] += 1
    found: list[LoweredOp | Scope | Loop] = []
    run: list[LoweredOp] = []
    carried: tuple[int | None, ...] = ()

    def end_run() -> None:
        if len(run) > 1:
            firsts = [o.steps for o in run[0].operands]
            each = tuple(o.steps for o in run[1].operands)
            ahead = tuple(_ahead(f, e) or () for f, e in zip(firsts, each, strict=True))
            found.append(Loop(tuple(run), carried, ahead, each))
        else:
            found.extend(run)
        run.clear()

    for item in items:
        if isinstance(item, Scope) or item.op.kind != "block":
            end_run()
            found.append(item)
            continue
        if run:
            pattern = _pattern(run[-1], item, readers)
            alike = pattern is not None and _alike(run[-1], item, lowered, len(run) == 1, pattern)
            if alike and pattern is not None and (len(run) == 1 or pattern == carried):
                carried = pattern
                run.append(item)
                continue
            end_run()
        run.append(item)
    end_run()
    return found


def _pattern(
    before: LoweredOp, after: LoweredOp, readers: dict[str, int]
) -> tuple[int | None, ...] | None:
    """How ``after`` depends on ``before``; None where that is no loop."""
    if len(before.op.inputs) != len(after.op.inputs):
        return None
    if len(before.op.outputs) != len(after.op.outputs):
        return None
    if not _next_to(before.op.attrs["instance"], after.op.attrs["instance"]):
        return None
    found: list[int | None] = []
    for old, new in zip(before.op.inputs, after.op.inputs, strict=True):
        if new in before.op.outputs:
            found.append(before.op.outputs.index(new))
        elif new == old:
            found.append(None)
        else:
            return None
    for i, name in enumerate(before.op.outputs):
        if readers[name] != found.count(i):
            return None  # read after the loop, or elsewhere
    return tuple(found)


def _next_to(before: str, after: str) -> bool:
    if before == after:
        return True
    head, _, index = before.rpartition(".")
    other_head, _, other = after.rpartition(".")
    if head != other_head or not (index.isdigit() and other.isdigit()):
        return False
    return int(other) == int(index) + 1


def _alike(
    before: LoweredOp,
    after: LoweredOp,
    lowered: Lowered,
    first: bool,
    pattern: tuple[int | None, ...],
) -> bool:
    """The same resharding before the call and after it.

    The first call may have more steps ahead of its carried operands: those go before the loop.
    """
    for old, new, carried in zip(before.operands, after.operands, pattern, strict=True):
        ahead = _ahead(old.steps, new.steps)
        if ahead is None or (ahead and not (first and carried is not None)):
            return False
    return [lowered.tensors[n].steps for n in before.op.outputs] == [
        lowered.tensors[n].steps for n in after.op.outputs
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
    found: list[Step] = []
    for step in steps:
        if (step.source.kind, step.target.kind) == ("P", "D"):
            found.append(replace(step, target=WHOLE, backward="none"))
            step = replace(step, source=WHOLE, forward="none")
        found.append(step)
    return tuple(found)


def single(call: LoweredOp) -> Loop:
    """One call by itself."""
    steps = tuple(o.steps for o in call.operands)
    return Loop((call,), (None,) * len(steps), ((),) * len(steps), steps)
