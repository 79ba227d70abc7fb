"""Rows of chunked losses as loss heads: which way of computing a provider is."""

from __future__ import annotations

from autopar.cost_models.kernels.chunked_loss import (
    WAYS,
    Head,
    LossWay,
    liger_chunks,
    loss_bytes,
    loss_s,
)
from autopar.cost_models.kernels.streams import Constants
from benchmarks.kernel_rows import KernelRow

LOSSES = {
    "cross_entropy": "cross_entropy",
    "simpo": "cpo",
    "orpo": "cpo",
    "cpo": "cpo",
    "grpo": "grpo",
    "dpo": "grpo",
    "kto": "grpo",
    "jsd": "grpo",
}
"""Losses by a part of a kernel's name, and what prices them: with a reference model or without."""
PLAIN = {
    "huggingface": "eager",
    "torch": "eager",
    "torch_eager": "eager_float32",
    "inductor": "compiled",
    "inductor_auto_chunker": "chunker",
}


def loss_of_row(row: KernelRow) -> tuple[Head, LossWay]:
    """The head of a row and how its provider computes it.

    Raises:
        KeyError: a loss or a provider that no formula is for.
    """
    kernel = row.shape.get("kernel", "fused_linear_cross_entropy")
    loss = next((name for part, name in LOSSES.items() if part in kernel), "")
    width, vocab = row.size("H", "hidden_size"), row.size("V", "vocab_size")
    sequences = row.size("B", default=0)
    rows = row.size("BT", "N", "rows", default=0) or row.size("T") * max(1, sequences)
    chunks = row.size("chunks", default=0)
    if row.provider.startswith("liger"):
        new = loss == "grpo" and row.provider != "liger"
        way = WAYS[loss, "liger_new" if new else "liger"]
        if loss == "cross_entropy":
            chunks = chunks or liger_chunks(rows, width, vocab)
        elif loss == "cpo" or "dpo" in kernel:  # one pair of sequences a chunk
            chunks = max(1, sequences // 2)
        else:  # one sequence a chunk
            chunks = max(1, sequences)
    else:
        way = WAYS[loss, PLAIN[row.provider]]
    return Head(rows, width, vocab, max(1, chunks)), way


def price_loss(row: KernelRow, c: Constants) -> tuple[float, float | None]:
    """Seconds of a row, and bytes at the peak where both ways ran."""
    assert row.device is not None
    head, way = loss_of_row(row)
    seconds = loss_s(row.device, head, way, c, row.way)
    return seconds, loss_bytes(head, way) if row.way == "full" else None
