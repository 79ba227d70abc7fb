"""What ring attention cannot do, and what to do instead."""

from __future__ import annotations

from torch import Tensor

from autopar.runtime.pytorch.ring_blocks import ORDERS
from autopar.runtime.shared.settings import ProgramError


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    n: int,
    order: str,
    window: int | None,
    dropout: float,
) -> None:
    """Raises `ProgramError` for what it cannot do, with what to do instead."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    wrong = None
    if dropout:
        wrong = (
            f"dropout={dropout:g}: ring attention cannot drop scores; train with dropout 0, or "
            "split attention by heads or by rows of queries alone"
        )
    elif not q.dtype == k.dtype == v.dtype:
        wrong = f"q is {q.dtype}, k {k.dtype} and v {v.dtype}: cast them to one dtype"
    elif k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        wrong = f"{shapes}: keys and values are pieces of equal length, as wide as queries are"
    elif q.shape[1] % k.shape[1]:
        wrong = f"{shapes}: heads of queries are a multiple of those of keys"
    elif order not in ORDERS:
        wrong = f"order={order!r}: write one of {', '.join(ORDERS)}"
    elif window is not None and (not causal or window < 1):
        wrong = f"window={window} with causal={causal}: a window has causal=True and 1 row or more"
    elif causal and q.shape[2] != k.shape[2]:
        wrong = f"{shapes}: a causal mask needs pieces of queries and keys of one length"
    elif causal and order == "zigzag" and q.shape[2] % 2:
        wrong = (
            f"{shapes}: zigzag pieces are two chunks of one length, and {q.shape[2]} is odd; take "
            f"a sequence that {2 * n} divides, or order='contiguous'"
        )
    elif mask is not None:
        wrong = _wrong_mask(q, k, mask, n)
    if wrong is not None:
        raise ProgramError(f"ring attention over {n} ranks: {wrong}")


def check_documents(
    q: Tensor, k: Tensor, mask: Tensor | None, documents: tuple[Tensor, Tensor] | None, n: int
) -> None:
    """Raises `ProgramError` where the documents' numbers are not those of rows and columns."""
    if documents is None:
        return
    own, every = documents
    shapes = (q.shape[0], q.shape[2]), (q.shape[0], n * k.shape[2])
    if mask is not None or (tuple(own.shape), tuple(every.shape)) != shapes:
        raise ProgramError(
            f"documents of {list(own.shape)} rows and {list(every.shape)} columns, "
            f"{'with' if mask is not None else 'without'} a mask: attention here takes numbers of "
            f"{list(shapes[0])} rows and {list(shapes[1])} columns, and no mask beside them"
        )


def _wrong_mask(q: Tensor, k: Tensor, mask: Tensor, n: int) -> str | None:
    whole = (q.shape[0], q.shape[1], q.shape[2], n * k.shape[2])
    fits = 2 <= mask.dim() <= 4 and all(
        size in (1, wanted)
        for size, wanted in zip(reversed(mask.shape), reversed(whole), strict=False)
    )
    if fits:
        return None
    return (
        f"a mask {list(mask.shape)} is not one of {list(whole)} or of 1 in their place: it holds "
        f"this rank's rows and all columns, those of {n} equal pieces"
    )
