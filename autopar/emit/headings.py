"""Lines at the top of a program that both backends have."""

from __future__ import annotations

import math

from autopar.nouns.axes import PIPELINE, SAMPLES
from autopar.nouns.offload import OFFLOAD
from autopar.nouns.plan import Plan


def state_held(plan: Plan, rank: str = "rank") -> str:
    """Which part of the model's state each ``rank`` holds."""
    mesh = plan.program_mesh
    zero = max(stage.zero for stage in plan.stages)
    if len({stage.zero for stage in plan.stages}) > 1:
        over = " and ".join(mesh.sharing())
        return f"state is split over {over} by ZeRO {plan.each('zero')}, stage by stage"
    if zero and mesh.sharing():
        return f"{('', *_SPLIT)[zero]} split over {' and '.join(mesh.sharing())}"
    model = bool(mesh.model_axes)
    if mesh.device_count == 1:
        return f"the one {rank} holds all of it"
    if not model and mesh.size(PIPELINE) == 1:
        return f"every {rank} holds all of it"
    part = "the state of its stages"
    if model:
        part = "its pieces of the state" + (" of its stages" if mesh.size(PIPELINE) > 1 else "")
    copies = bool(mesh.batch_axes)
    return f"each {rank} holds {part}" + (f"; data {rank}s hold the same" if copies else "")


_SPLIT = (
    "optimizer state is",
    "gradients and optimizer state are",
    "parameters, gradients and optimizer state are",
)


def _where(plan: Plan) -> str:
    """Where the optimizer's state is, if it is not on the device."""
    return "" if plan.each("offload") == OFFLOAD[0] else "; its state in host memory"


def count_of(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{plural if count != 1 else ''}"


def train_heading(
    plan: Plan, samples: int, command: str, ranks: str, again: str, called: str
) -> list[str]:
    """The docstring of ``train.py``; ``command`` starts it, ``again`` says what recomputes, and
    ``called`` what of it others call."""
    mesh, micro = plan.program_mesh, plan.microbatches
    width = math.prod(mesh.size(axis) for axis in SAMPLES)
    batch = count_of(samples, "sample")
    if micro > 1:
        batch += f" in {count_of(micro, 'microbatch', 'es')}"
    if plan.seq_slices is not None:
        batch += f", sequences in {plan.seq_slices} slices"
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
        f"State:     {state_held(plan, ranks)}.",
        f"Optimizer: {plan.optimizer}, its numbers in the workload's file{_where(plan)}.",
        f"Recompute: {recompute}{'' if recompute == 'none' else f', {again}'}.",
        f"Precision: {plan.precision}.",
        "",
        f"`autopar run` and `autopar verify` call the {called} of this file.",
    ]
