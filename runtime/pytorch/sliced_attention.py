"""Attention of a slice of its sequences, against keys and values that are kept of slices before."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from autopar.runtime.pytorch import sequence_slices
from autopar.runtime.pytorch.ring_attention import against
from autopar.runtime.pytorch.ring_blocks import blocks
from autopar.runtime.pytorch.ring_checks import check, check_documents
from autopar.runtime.pytorch.ring_course import Course
from autopar.runtime.pytorch.ring_masks import expanded
from autopar.runtime.pytorch.sequence_slices import Earlier
from autopar.runtime.shared.settings import ProgramError


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sliced_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    *,
    earlier: Hashable,
    window: int | None = None,
    documents: tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The rows of one slice of ``softmax(q k^T * scale + mask) v``, of which row i of the sequence
    sees columns up to i, with ``window`` those after i - window alone.

    q [b, h, s/n, d], k [b, g, s/n, d], v [b, g, s/n, e] with h = g * r -> [b, h, s/n, e].

    earlier: which attention of the program this is: its keys and values stay until backward has
             come to their slice.
    mask:    [.., s/n or 1, s or 1], of this slice's rows and all columns.
    documents: numbers of this slice's rows [b, s/n] and of all columns [b, s].

    Kept for backward are q, the result, the log-sum-exp, and k and v once. Raises `ProgramError`
    for what it cannot do.
    """
    here, ways, rows = sequence_slices.index(), sequence_slices.count(), q.shape[2]
    if not causal:
        raise ProgramError("attention of slices is causal: rows of one see no later ones")
    reach = here + 1
    if window is not None:
        reach = min(reach, 1 + -(-(window - 1) // rows))
    seen = blocks(here, (ways,), rows, k.shape[2], "contiguous", True, window)
    first = (k.shape[2] * piece for piece in range(here, here - reach, -1))
    course = Course((), (), tuple(zip(first, seen, strict=False)))
    kept = Earlier(earlier, reach)
    check(q, k, v, mask, True, ways, "contiguous", window, 0.0)
    check_documents(q, k, mask, documents, ways)
    mask = None if mask is None else expanded(mask, q, k.shape[2] * ways)
    return against(kept, course, q, k, v, mask, scale, documents, sinks)
