"""What the JAX trainers share, which take a mesh and rules by logical dim.

MaxText and AXLearn have an axis for experts beside that of ``fsdp``, and tokens are split over
both; our ep borrows its ranks, so their ``fsdp`` is dp_shard / ep.
"""

from __future__ import annotations

from autopar.emit.exports.setup import Setup
from autopar.emit.exports.text import refuse


def check_mesh(setup: Setup, target: str) -> None:
    if setup.precision == "float64":
        raise refuse(
            target,
            "precision float64",
            "it computes in bfloat16, float16 or float32",
            "Plan with precision='float32'",
        )
    if setup.layout.dp_shard % setup.layout.ep:
        raise refuse(
            target,
            f"ep {setup.layout.ep}",
            f"its expert axis splits tokens, so ep must divide dp_shard {setup.layout.dp_shard}",
            "Lower ep, or move ranks to dp_shard",
        )
    if setup.layout.etp > 1:
        raise refuse(
            target,
            f"etp {setup.layout.etp}",
            "experts are split by the model axis",
            "Leave etp out",
        )


def check_stages(setup: Setup, target: str) -> None:
    if setup.layout.pp > 1 and (
        setup.layers is None or setup.layers % setup.stages or len({*setup.cuts}) > 1
    ):
        raise refuse(
            target,
            f"{setup.stages} stages",
            f"they must divide the {setup.layers or 'unknown number of'} layers evenly",
            "Choose pp and interleave that divide them, or export to torchtitan or megatron",
        )
