"""What `autopar plan` measures by itself of the CPU cores at hand: a few seconds of a profile.

One case of each common kind of op, the collectives of data and tensor parallelism at two sizes, the
optimizer, and how far ranks come apart, by the means of `autopar.runtime.profile.worker` and with
as many processes as the plan has: ranks that share cores are measured sharing them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autopar.runtime.profile.bench import Bench
from autopar.runtime.profile.ops import Case, cases
from autopar.runtime.profile.worker import (
    begun,
    end,
    measure_case,
    measure_collectives,
    measure_updates,
    measure_waiting,
)

ENOUGH_S = 0.02
FEWEST = 3
CHAIN_BYTES = 4e6
"""What a chain touches: the results of a small model stay in the caches that a core has."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
SIZES = (1 << 15, 1 << 21)
LARGEST = 1 << 20
"""Elements of the largest operand of a case; larger ones take their time."""
SEGMENTS_S = (20e-3,)


def chosen() -> Iterator[Case]:
    """The middle one of the sizes of each kind of op, two of products."""
    by_kind: dict[str, list[Case]] = {}
    for case in cases(1):
        kind = "bias" if case.kind == "add" and len(case.operands[1]) == 1 else case.kind
        elements = max(torch.Size(shape).numel() for shape in case.operands)
        if elements <= LARGEST:
            by_kind.setdefault(kind, []).append(case)
    for kind, sizes in by_kind.items():
        middle = len(sizes) // 2
        yield from sizes[middle : middle + 2] if kind == "linear" else [sizes[middle]]


def main() -> None:
    bench = Bench(begun(), ENOUGH_S, FEWEST)
    for case in chosen():
        measure_case(bench, case, torch.float32, "fp32", CHAIN_BYTES)
        if case.kind in ("linear", "attention"):
            measure_case(bench, case, torch.bfloat16, "bf16", CHAIN_BYTES)
    measure_updates(bench, (1 << 18, 1 << 21))
    if bench.world > 1:
        measure_collectives(bench, KINDS, SIZES)
        measure_waiting(bench, SEGMENTS_S)
    end()


if __name__ == "__main__":
    main()
