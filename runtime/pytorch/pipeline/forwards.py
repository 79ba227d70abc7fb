"""The forwards of a schedule alone, for any number of microbatches."""

from __future__ import annotations

from autopar.pipeline.actions import Action, Lists


def forwards_of(lists: Lists, microbatches: int, count: int) -> Lists:
    """For each rank the F actions of ``count`` microbatches.

    Microbatch i goes through the stages that microbatch i modulo ``microbatches`` goes through in
    ``lists``: a model may have two routes. As many microbatches as there are ranks pass a stage
    before its rank turns to the next one that it holds; every action stands behind those that it
    needs in one order of all, so no two ranks wait for each other.
    """
    together = len(lists)
    made = []
    for actions in lists:
        stages: dict[int, list[int]] = {}
        for action in actions:
            if action.kind == "F":
                stages.setdefault(action.microbatch, []).append(action.stage)
        own = [
            Action(stage, "F", i)
            for i in range(count)
            for stage in stages.get(i % microbatches, ())
        ]
        made.append(tuple(sorted(own, key=lambda a: (a.microbatch // together, a.stage, a[2]))))
    return tuple(made)
