"""What verification on a CPU does not see of a plan's kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from autopar.nouns.kernels import kernel_of


def not_run(kernels: Mapping[str, str], device: torch.device) -> Iterator[str]:
    """A sentence for those of a plan that run on a GPU alone, where ``device`` is none. On one they
    ran in the program's own precision; in float64 torch's ops stand for all, a user's too."""
    away = sorted({text for text in kernels.values() if ":" not in kernel_of(text)[1]})
    if away and device.type != "cuda":
        yield (
            f"{' and '.join(away)}: these run on GPUs; here torch's ops ran in their place "
            "(verify on a GPU, or compare kernels of triton's by python -m benchmarks.kernels)"
        )
