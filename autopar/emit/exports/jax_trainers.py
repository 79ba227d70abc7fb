"""What the JAX trainers share, which take a mesh and rules by logical dim.

MaxText and AXLearn have an axis for experts beside that of ``fsdp``, and tokens are split over
both; our ep borrows its ranks, so their ``fsdp`` is dp_shard / ep.
"""

from __future__ import annotations

from autopar.emit.exports.setup import Setup
from autopar.emit.exports.text import Limit, no_float64, no_heads, no_matrices


def mesh_limits(setup: Setup) -> tuple[Limit, ...]:
    return (
        no_float64(setup, "it computes in bfloat16, float16 or float32"),
        Limit(
            setup.layout.dp_shard % setup.layout.ep > 0,
            f"ep {setup.layout.ep}",
            f"its expert axis splits tokens, so ep must divide dp_shard {setup.layout.dp_shard}",
            "Lower ep, or move ranks to dp_shard",
        ),
        no_matrices(setup, "its expert axis splits experts alone"),
        no_heads(setup, "its axis of sequences splits rows alone", "megatron or deepspeed"),
    )


def stage_limit(setup: Setup) -> Limit:
    uneven = setup.layers is None or setup.layers % setup.stages > 0 or len({*setup.cuts}) > 1
    return Limit(
        setup.layout.pp > 1 and uneven,
        f"{setup.stages} stages",
        f"they must divide the {setup.layers or 'unknown number of'} layers evenly",
        "Choose pp and interleave that divide them, or export to torchtitan or megatron",
    )
