"""Buckets of gradients that replicas add up in one all-reduce each, as backward fills them.

Small ones begin early and pay the latency of a collective more often; the last one of all is added
up behind backward, so that a large one shows (ByteScheduler, Peng et al. 2019; Li et al. 2020,
PyTorch Distributed, section 3.2.3).
"""

from __future__ import annotations

import re

MIB = 1 << 20
FIRST_BUCKET_BYTES, BUCKET_BYTES = MIB, 25 * MIB
"""Of DistributedDataParallel, unless it is given another size."""
BUCKETS = (BUCKET_BYTES, *(n * MIB for n in (1, 2, 4, 8, 16, 50, 100)))
"""Sizes that a plan chooses from."""
GAIN = 0.02
"""Of a pass, that another size than the usual one must save: less is noise."""


def parse_bucket(text: str) -> int | None:
    """Bytes of ``8MB`` or ``8MiB``, which DDP counts alike; None: it is none."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})Mi?B", text)
    return int(match[1]) * MIB if match else None


def bucket_text(size_bytes: int) -> str:
    """The inverse of `parse_bucket`."""
    return f"{size_bytes // MIB}MiB"
