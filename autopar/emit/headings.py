"""Lines at the top of a program that both backends have."""

from __future__ import annotations

import math

from autopar.nouns.mesh import DATA_AXES
from autopar.nouns.plan import Plan


def state_held(plan: Plan) -> str:
    """How the data ranks hold the model's state."""
    return (
        "every data rank holds all of the state",
        "optimizer state is split over dp_shard",
        "gradients and optimizer state are split over dp_shard",
        "parameters, gradients and optimizer state are split over dp_shard",
    )[max(stage.zero for stage in plan.stages)]


def count_of(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{plural if count != 1 else ''}"


def train_heading(plan: Plan, samples: int, command: str, ranks: str, again: str) -> list[str]:
    """The docstring of ``train.py``; ``command`` starts it, ``again`` says what recomputes."""
    mesh, micro = plan.program_mesh, plan.microbatches
    width = math.prod(mesh.size(axis) for axis in DATA_AXES)
    batch = count_of(samples, "sample")
    if micro > 1:
        batch += f" in {count_of(micro, 'microbatch', 'es')}"
    if width > 1:
        each = f"{samples // micro // width}{' of each' if micro > 1 else ''}"
        batch += f", {each} on each of {width} data ranks"
    recompute = plan.each("recompute")
    return [
        f"Trains model.py on {count_of(mesh.device_count, ranks)}: {mesh}.",
        "",
        f"    {command} program/train.py --steps 10",
        "",
        f"Batch:     {batch}.",
        f"State:     {state_held(plan)}.",
        f"Optimizer: {plan.optimizer}, its numbers in the workload's file.",
        f"Recompute: {recompute}{'' if recompute == 'none' else f', {again}'}.",
        f"Precision: {plan.precision}.",
        "",
        "`autopar run` and `autopar verify` call the `hold`, `backward` and `update` of this file.",
    ]
