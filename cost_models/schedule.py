"""Pipeline schedules: for each rank its ordered actions, written and read as `2F0`.

An action is a stage, a kind and a microbatch: F forward, B whole backward, I gradient of the input,
W gradient of the weights. Stage s lives on rank s mod pp.

gpipe        all forwards, then all backwards (Huang et al. 2019)
1f1b         one backward as soon as one can be (Narayanan et al. 2019)
interleaved  1f1b over v stages a rank, pp microbatches at a time (Narayanan et al. 2021, 2.2)
zero_bubble  1f1b with B split into I and W, W where a rank would wait (Qi et al. 2023, ZB-H1)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

ActionKind = Literal["F", "B", "I", "W"]
_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, order=True)
class Action:
    """One thing that a rank does."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """`Action.parse("2F0")` is stage 2, forward, microbatch 0. Raises ValueError."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is no action; write stage, one of F B I W, microbatch: 2F0")
        kind: ActionKind = match.group(2)  # type: ignore[assignment]
        return Action(int(match.group(1)), kind, int(match.group(3)))


Program = tuple[tuple[Action, ...], ...]
"""The actions of every rank, in order."""


def show(program: Program) -> str:
    """One line a rank: `0F0 0F1 0B0 0B1`."""
    return "\n".join(" ".join(map(str, actions)) for actions in program)


def parse(text: str) -> Program:
    """The inverse of `show`."""
    return tuple(
        tuple(Action.parse(word) for word in line.split()) for line in text.strip().splitlines()
    )


def schedule(name: str, pp: int, microbatches: int, interleave: int = 1) -> Program:
    """The actions of every rank.

    Raises:
        ValueError: an unknown schedule, or microbatches that an interleaved one cannot group.
    """
    if name == "gpipe":
        return tuple(_gpipe(rank, microbatches) for rank in range(pp))
    if name == "zero_bubble":
        return _zero_bubble(pp, microbatches)
    if name == "interleaved" or interleave > 1:
        if microbatches % pp:
            raise ValueError(f"interleaved: {microbatches} microbatches are no multiple of pp {pp}")
        return tuple(_interleaved(rank, pp, microbatches, interleave) for rank in range(pp))
    if name == "1f1b":
        return tuple(_one_f_one_b(rank, pp, microbatches) for rank in range(pp))
    raise ValueError(f"no schedule {name!r}; there are gpipe, 1f1b, interleaved, zero_bubble")


def _gpipe(rank: int, microbatches: int) -> tuple[Action, ...]:
    forward = [Action(rank, "F", i) for i in range(microbatches)]
    return (*forward, *(Action(rank, "B", i) for i in range(microbatches)))


def _one_f_one_b(rank: int, pp: int, microbatches: int) -> tuple[Action, ...]:
    warm = min(pp - rank - 1, microbatches)
    actions = [Action(rank, "F", i) for i in range(warm)]
    for i in range(microbatches - warm):
        actions += [Action(rank, "F", warm + i), Action(rank, "B", i)]
    actions += [Action(rank, "B", i) for i in range(microbatches - warm, microbatches)]
    return tuple(actions)


def _interleaved(rank: int, pp: int, microbatches: int, v: int) -> tuple[Action, ...]:
    total = microbatches * v

    def action(kind: ActionKind, k: int) -> Action:
        chunk = (k % (pp * v)) // pp
        if kind == "B":
            chunk = v - 1 - chunk
        return Action(chunk * pp + rank, kind, k // (pp * v) * pp + k % pp)

    warm = min((pp - rank - 1) * 2 + (v - 1) * pp, total)
    actions = [action("F", k) for k in range(warm)]
    for k in range(total - warm):
        actions += [action("F", warm + k), action("B", k)]
    actions += [action("B", k) for k in range(total - warm, total)]
    return tuple(actions)


def _zero_bubble(pp: int, microbatches: int) -> Program:
    """Greedy in unit time: an I that is ready, else an F within 1f1b's memory, else a W."""
    order: list[list[Action]] = [[] for _ in range(pp)]
    done: dict[Action, int] = {}
    forwards, inputs, weights = [0] * pp, [0] * pp, [0] * pp
    time = 0
    while min(weights) < microbatches:
        started: list[tuple[int, Action]] = []
        for rank in range(pp):
            i, f, w = inputs[rank], forwards[rank], weights[rank]
            after = Action(rank + 1, "I", i) if rank + 1 < pp else Action(rank, "F", i)
            before = Action(rank - 1, "F", f)
            if i < microbatches and i < f and done.get(after, time) < time:
                started.append((rank, Action(rank, "I", i)))
            elif (
                f < microbatches
                and f - w < pp - rank
                and (rank == 0 or done.get(before, time) < time)
            ):
                started.append((rank, Action(rank, "F", f)))
            elif w < i:
                started.append((rank, Action(rank, "W", w)))
        for rank, action in started:
            order[rank].append(action)
            done[action] = time
            counts = {"F": forwards, "I": inputs, "W": weights}[action.kind]
            counts[rank] += 1
        time += 1
    return tuple(tuple(actions) for actions in order)
