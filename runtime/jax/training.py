"""Everything that the ``train.py`` of emitted programs imports."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from autopar.runtime.jax.collectives import scatter
from autopar.runtime.jax.gradients import clipped, join_pieces, norm_of, own_pieces
from autopar.runtime.jax.layout import Layout, Leaf
from autopar.runtime.jax.load import Program, cpu_devices, messages, read
from autopar.runtime.jax.optimizer import optimizer_step
from autopar.runtime.jax.step import Array, Arrays, State, Step, make_mesh
from autopar.runtime.shared.planned_batch import batch_of

Held = tuple[Mesh, dict[str, Any]]
"""The mesh, and a tree of partition specs for the state."""


def global_batch(program: Program, number: int) -> Arrays:
    """The batch of a step, with the random numbers that its keys give."""
    batch: Arrays = batch_of(program.workload, number)
    return batch if program.draws is None else program.draws.drawn(batch)


__all__ = [
    "Array", "Arrays", "Held", "Layout", "Leaf", "State", "Step", "clipped", "cpu_devices",
    "global_batch", "join_pieces", "make_mesh", "messages", "norm_of", "optimizer_step",
    "own_pieces", "read", "scatter",
]  # fmt: skip
