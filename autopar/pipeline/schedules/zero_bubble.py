"""Backward in two, I for the input and W for the weights, so that no rank waits for a gradient.

zb-h1           rank r starts as 1F1B does and puts every W off by r backwards: all ranks hold what
                rank 0 of 1F1B does, and the bubble is a third (Qi et al. 2023, 2.1)
zb-h2           twice the forwards first, every W put off by 2r: 2p - 1 microbatches held, and no
                rank waits between its first action and its last (ibid., 2.2)
zb-interleaved  zb-h1 over v stages a rank
zb-v            two stages a rank, r and 2p - 1 - r: every rank holds p microbatches, and none waits
                between its first action and its last (Qi et al. 2024, 4.2)
dualpipe-v      the same V; forwards of one stage stand beside backwards of the other, so that
                sends hide behind either (DeepSeek-AI 2024, 3.2.1, cut in half by Qi et al. 2025)

What is said of bubbles holds where F, I and W take the same time.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import cast

from autopar.pipeline.actions import (
    KINDS,
    Action,
    ActionKind,
    Lists,
    Schedule,
    last_first,
    one_route,
    passes,
)
from autopar.pipeline.schedules.interleaved import turns

PASSES: tuple[ActionKind, ...] = ("F", "I", "W")


def zb_h1(pp: int, microbatches: int, _: int = 1, slices: int = 1) -> Schedule:
    return _put_off("zb-h1", pp, microbatches, 1, 1, slices)


def zb_h2(pp: int, microbatches: int, _: int = 1, slices: int = 1) -> Schedule:
    return _put_off("zb-h2", pp, microbatches, 1, 2, slices)


def zb_interleaved(pp: int, microbatches: int, v: int = 2) -> Schedule:
    return _put_off("zb-interleaved", pp, microbatches, v, 1)


def _put_off(
    name: str, pp: int, microbatches: int, v: int, times: int, slices: int = 1
) -> Schedule:
    """``times`` the forwards of 1F1B first; every W comes ``times x rank`` backwards late. Of
    sequences in ``slices``, as many forwards more as each has behind its first."""
    total = microbatches * v
    lists = []
    for rank in range(pp):
        forwards, inputs, weights = (turns(kind, rank, pp, microbatches, v) for kind in PASSES)
        inputs, weights = last_first(inputs, slices), last_first(weights, slices)
        first = min((v - 1) * pp + times * (pp - 1 - rank) + slices - 1, total)
        late = min(times * rank, total)
        actions = forwards[:first]
        for k in range(total):
            if first + k < total:
                actions.append(forwards[first + k])
            actions.append(inputs[k])
            if k >= late:
                actions.append(weights[k - late])
        actions += weights[total - late :]
        lists.append(tuple(actions))
    return one_route(name, tuple(range(pp)) * v, tuple(lists), microbatches, slices)


def zb_v(pp: int, microbatches: int, _: int = 1) -> Schedule:
    def actions(rank: int) -> tuple[Action, ...]:
        vee = _Vee(rank, pp, microbatches)
        vee.repeat(2 * (pp - rank) - 1, "down F")
        vee.repeat(rank, "up F, down F")
        vee.repeat(pp - rank, "up F, up I, W")
        vee.repeat(microbatches - pp, "down F, down I, W, up F, up I, W")
        vee.repeat(rank, "down I, up I")
        vee.repeat(pp - rank, "down I, W")
        return vee.ended()

    return _vee("zb-v", pp, tuple(map(actions, range(pp))), microbatches)


def dualpipe_v(pp: int, microbatches: int, _: int = 1) -> Schedule:
    def actions(rank: int) -> tuple[Action, ...]:
        vee = _Vee(rank, pp, microbatches)
        vee.repeat(2 * (pp - rank - 1), "down F")
        vee.repeat(rank + 1, "down F, up F")
        vee.repeat(pp - rank - 1, "up I, W, up F")
        vee.repeat(microbatches - 2 * pp + rank + 1, "down F, up B, up F, down B")
        vee.repeat(pp - rank - 1, "up B, up F, down B")
        both = ["up", "down"] * (rank + 1)
        vee.repeat(1, ", ".join(f"{s} {'B' if i <= rank else 'I'}" for i, s in enumerate(both)))
        vee.repeat(pp - rank - 1, "W, down I")
        return vee.ended()

    return _vee("dualpipe-v", pp, tuple(map(actions, range(pp))), microbatches)


def _vee(name: str, pp: int, lists: Lists, microbatches: int) -> Schedule:
    return one_route(name, (*range(pp), *reversed(range(pp))), lists, microbatches)


class _Vee:
    """The actions of one rank of a V, written in the order of its own microbatches: ``down`` is its
    first stage, ``up`` its second; ``W`` is the oldest weight gradient that was put off."""

    def __init__(self, rank: int, pp: int, microbatches: int) -> None:
        self.stages = {"down": rank, "up": 2 * pp - 1 - rank}
        self.made = {
            (stage, kind): passes(stage, kind, microbatches)
            for stage in self.stages.values()
            for kind in KINDS
        }
        self.microbatches = microbatches
        self.count: Counter[tuple[str, bool]] = Counter()
        self.put_off: deque[tuple[int, int]] = deque()
        self.actions: list[Action] = []

    def repeat(self, times: int, text: str) -> None:
        words = [word.rpartition(" ") for word in text.split(", ")]
        for _ in range(times):
            for stage, _, kind in words:
                self._one(stage, cast(ActionKind, kind))

    def ended(self) -> tuple[Action, ...]:
        self.repeat(len(self.put_off), "W")
        return tuple(self.actions)

    def _one(self, stage: str, kind: ActionKind) -> None:
        if kind == "W":
            if self.put_off:
                number, i = self.put_off.popleft()
                self.actions.append(self.made[number, "W"][i])
            return
        i = self.count[stage, kind == "F"]
        if i == self.microbatches:
            return  # the fill and the drain of a short run overlap
        self.count[stage, kind == "F"] += 1
        number = self.stages[stage]
        if kind == "I":
            self.put_off.append((number, i))
        self.actions.append(self.made[number, kind][i])
