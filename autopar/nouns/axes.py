"""The axes of a mesh, and the roles that each may have.

=============  =========================================  ====================================
axis           splits                                     what it does to state that it does
                                                          not split
=============  =========================================  ====================================
pp             the model's depth, into stages             nothing: stages have their own
dp_replicate   the samples of the batch                   keeps it whole
dp_shard       the samples of the batch                   shares it, as ZeRO says
ep             the samples of the batch; experts, where   shares it likewise
               the plan says so
cp_outer       the batch along its sequences: rings of    shares it likewise
               cp are one, of two levels, over both
cp             the batch along its sequences              shares it likewise
cp_head        the same inside pieces of cp; attention    shares it likewise
               splits heads there
tp2, tp        factors of ops, as the plan says of each   keeps it whole
=============  =========================================  ====================================

Gradients of a parameter are summed over the axes that leave it whole and split an op that reads it.
`microbatch` and `slice` are no axes of devices: the batch is cut over time there, before anything
else, its samples by the first, their sequences by the second (Li et al. 2021, TeraPipe).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

PIPELINE, REPLICATE, SHARD, CONTEXT = "pp dp_replicate dp_shard cp".split()
HEADS, EXPERT, SECOND_TENSOR, TENSOR = "cp_head ep tp2 tp".split()
OUTER = "cp_outer"
MICROBATCH, SLICE = "microbatch", "slice"
TIMES = (MICROBATCH, SLICE)
"""What the batch is cut by over time, outermost first."""
EXPERT_TENSOR = "etp"
"""A degree and no axis: of the ranks of tp, those that split each expert's matrices."""


class Role(Enum):
    """What an axis splits."""

    DEPTH = auto()
    SAMPLES = auto()
    SEQUENCES = auto()
    OPS = auto()


@dataclass(frozen=True, slots=True)
class Axis:
    """splits: for people, what an axis of this name is for. shares: its ranks share the state of
    what it does not split, as ZeRO says."""

    role: Role
    splits: str
    shares: bool = False


TABLE: Mapping[str, Axis] = MappingProxyType(
    {
        PIPELINE: Axis(Role.DEPTH, "the model's depth, into stages"),
        REPLICATE: Axis(Role.SAMPLES, "the batch; everything else is whole"),
        SHARD: Axis(Role.SAMPLES, "the batch, and what ZeRO splits", shares=True),
        EXPERT: Axis(Role.SAMPLES, "the batch, and experts", shares=True),
        OUTER: Axis(Role.SEQUENCES, "sequences, and the outer of two rings", shares=True),
        CONTEXT: Axis(Role.SEQUENCES, "sequences", shares=True),
        HEADS: Axis(Role.SEQUENCES, "sequences, and heads in attention", shares=True),
        SECOND_TENSOR: Axis(Role.OPS, "tensors of the model, beside tp"),
        TENSOR: Axis(Role.OPS, "tensors of the model"),
    }
)
"""Outermost first, as a mesh has them."""

AXES = tuple(TABLE)


def of(*roles: Role) -> tuple[str, ...]:
    """The axes that have one of these roles, outermost first."""
    return tuple(name for name, axis in TABLE.items() if axis.role in roles)


def role_of(axis: str) -> Role:
    """Of an axis, or of what cuts the batch over time."""
    if axis in TABLE:
        return TABLE[axis].role
    return Role.SEQUENCES if axis == SLICE else Role.SAMPLES


SAMPLES = of(Role.SAMPLES)
"""They split the samples of the batch."""
SHARING = tuple(name for name, axis in TABLE.items() if axis.shares)
"""Their ranks share the state of what they do not split; gradients are summed over them, and over
replicas."""
SEQUENCES = of(Role.SEQUENCES)
BATCH = of(Role.SAMPLES, Role.SEQUENCES)
"""They split the batch, in ops as it flows through them."""
OPS = of(Role.OPS)
"""They split ops as the plan says of each."""
