"""What `autopar plan` measures by itself of the CPU cores at hand: a few seconds of a profile.

One case of each common kind of op, the collectives of data and tensor parallelism at two sizes, the
optimizer, and how far ranks come apart, by the means of `autopar.runtime.profile.worker` and with
as many processes as the plan has: ranks that share cores are measured sharing them.
"""

from __future__ import annotations

import torch

from autopar.runtime.profile.bench import Bench
from autopar.runtime.profile.cases import middle_cases
from autopar.runtime.profile.quick_sizes import (
    CHAIN_BYTES,
    ENOUGH_S,
    FEWEST,
    LARGEST,
    SIZES,
    UPDATES,
)
from autopar.runtime.profile.worker import (
    begun,
    end,
    measure_case,
    measure_collectives,
    measure_updates,
    measure_waiting,
)

KINDS = ("all_reduce", "all_gather", "reduce_scatter")
SEGMENTS_S = (20e-3,)


def main() -> None:
    bench = Bench(begun(), ENOUGH_S, FEWEST)
    for case in middle_cases(LARGEST):
        measure_case(bench, case, torch.float32, "fp32", CHAIN_BYTES)
        if case.kind in ("linear", "attention"):
            measure_case(bench, case, torch.bfloat16, "bf16", CHAIN_BYTES)
    measure_updates(bench, UPDATES)
    if bench.world > 1:
        measure_collectives(bench, KINDS, SIZES)
        measure_waiting(bench, SEGMENTS_S)
    end()


if __name__ == "__main__":
    main()
