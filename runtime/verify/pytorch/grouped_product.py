"""Products of groups of rows with a matrix each, in float64, where torch has no kernel for it."""

from __future__ import annotations

import torch
from torch import Tensor

NAMES = frozenset({"grouped_mm", "_grouped_mm"})


def grouped_product(
    rows: Tensor,
    matrices: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """rows [s, k], matrices [e, k, n], offs [e] (where each group's rows end) -> [s, n].

    What `torch.nn.functional.grouped_mm` computes of these; rows past the last group give zeros.
    """
    assert bias is None, "grouped_mm takes no bias yet"
    ends = [int(end) for end in offs]
    parts = [
        rows[a:b] @ matrices[i] for i, (a, b) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    parts.append(rows.new_zeros(rows.shape[0] - ends[-1], matrices.shape[2]))
    product = torch.cat(parts)
    return product if out_dtype is None else product.to(out_dtype)
