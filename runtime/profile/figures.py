"""What the measuring processes know already, when they have measured enough, and how they say it:
a line of JSON for each figure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import quantiles

Known = set[tuple[str, str, float, float]]
"""Subject, key, bytes and FLOPs of what is not measured again."""

ENOUGH_S = 0.25
FEWEST, MOST = 5, 20
LEAST_S = 1e-9
"""No call is as short: a profile refuses such a figure."""
SIZES = tuple(1 << power for power in (12, 15, 18, 21, 24))
"""Bytes of collectives: 4 KiB to 16 MiB."""
PIECES = 16
"""Rows of the tensors that are cut along their columns: what packing has to put together."""


def write(subject: str, key: str, size_bytes: float, flops: float, times: list[float]) -> None:
    """Prints one measurement; ``spread`` is (p90 - p10) / median.

    What adds no time to the compute beside it was lost in noise: that is said, and measured again
    next time.
    """
    ordered = sorted(times)
    middle = ordered[len(ordered) // 2]
    if middle <= LEAST_S:
        lost = {"left_out": subject, "key": key, "size_bytes": size_bytes, "seconds": middle}
        print(json.dumps(lost), flush=True)
        return
    tenths = quantiles(ordered, n=10)
    line = {
        "subject": subject,
        "key": key,
        "size_bytes": float(size_bytes),
        "flops": float(flops),
        "seconds": middle,
        "spread": (tenths[-1] - tenths[0]) / middle,
        "repeats": len(ordered),
    }
    print(json.dumps(line), flush=True)


def groups(world: int) -> Iterator[tuple[int, int]]:
    """(size, stride) of every group that an axis of a mesh of powers of two can have."""
    size = 2
    while size <= world:
        stride = 1
        while size * stride <= world:
            if world % (size * stride) == 0:
                yield size, stride
            stride *= 2
        size *= 2
