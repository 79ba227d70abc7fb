"""A loss head (hidden x head -> logits -> loss) as a whole, or in chunks of rows.

    time   = sum of products + passes over logits + n (accumulation of the head's gradient)
    memory = heads V H b + copies (N / n) V b + hidden N H b

for N rows of width H, a vocabulary of V, n chunks and b bytes an element. It is `t0 + n d` and
`m0 + (N/n) V b`: every chunk reads the head for its logits and for the gradient of its rows, and
adds into the head's gradient what one product wrote: read twice, written once. Which copies stand
at the peak and what each pass moves are counted per way of computing (`WAYS`).
Chunks by Liger's rule (linkedin/Liger-Kernel, fused_linear_cross_entropy.py); memory agrees with
its published table to the digit of one logit copy (128,256 x 4,096 in bf16).
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.kernels.products import product_s
from autopar.cost_models.kernels.streams import Constants, stream_bytes_per_s
from autopar.nouns.cluster import Device

ACCUMULATE_PASSES = 3
"""Over the head's gradient: the sum so far and a chunk's part read, the new sum written."""


@dataclass(frozen=True)
class LossWay:
    """How a loss head is computed; bytes are of device memory, per logit of a row."""

    products_forward: int
    """Products before the loss: one, and one more of a reference model."""
    forward_bytes: float
    backward_bytes: float
    head_copies: float
    """At the peak: weights (of a reference too), the gradient, a chunk's part of it."""
    logit_bytes: float
    """At the peak, of the rows at work."""
    hidden_copies: float
    gradients_in_forward: bool = False
    float32_products: int = 0
    """Products of the newest versions that run in float32, without tensor cores."""


@dataclass(frozen=True)
class Head:
    """Rows, width, vocabulary and chunks of one loss head in 16 bits."""

    rows: int
    width: int
    vocab: int
    chunks: int = 1

    @property
    def chunk_rows(self) -> int:
        return -(-self.rows // self.chunks)


def liger_chunks(rows: int, width: int, vocab: int) -> int:
    """Chunks of Liger's fused loss: as many as make a chunk of logits no larger than the hidden
    rows, of a power of two of rows."""
    at_least = -(-rows // -(-vocab // width))
    chunk_rows = 1 << max(0, at_least - 1).bit_length()
    return -(-rows // chunk_rows)


def loss_s(
    device: Device, head: Head, way: LossWay, c: Constants, direction: str = "full"
) -> float:
    """Seconds of a loss head: `fwd`, `bwd`, or `full`, both."""
    if way.gradients_in_forward:
        scaling_s = _scaling_s(device, head, way, c)
        if direction == "bwd":
            return scaling_s
        both_s = head.chunks * (
            _forward_s(device, head, way, c)
            + _backward_s(device, head, way, c)
            + (_head_pass_s(device, head, c) * ACCUMULATE_PASSES)
        )
        return both_s + (scaling_s if direction == "full" else 0.0)
    forward_s = head.chunks * _forward_s(device, head, way, c)
    backward_s = head.chunks * _backward_s(device, head, way, c)
    if head.chunks > 1:
        backward_s += head.chunks * ACCUMULATE_PASSES * _head_pass_s(device, head, c)
    return {"fwd": forward_s, "bwd": backward_s}.get(direction, forward_s + backward_s)


def loss_bytes(head: Head, way: LossWay, element_bytes: float = 2.0) -> float:
    """Bytes at the peak of forward and backward, inputs and weights inside."""
    heads = way.head_copies * head.vocab * head.width * element_bytes
    logits = way.logit_bytes * head.chunk_rows * head.vocab
    return heads + logits + way.hidden_copies * head.rows * head.width * element_bytes


def _forward_s(device: Device, head: Head, way: LossWay, c: Constants) -> float:
    products_s = way.products_forward * product_s(
        device, head.chunk_rows, head.vocab, head.width, c
    )
    return products_s + _logits_s(device, head, way.forward_bytes, c)


def _backward_s(device: Device, head: Head, way: LossWay, c: Constants) -> float:
    rows, width, vocab = head.chunk_rows, head.width, head.vocab
    shapes = ((rows, width, vocab), (vocab, width, rows))
    total_s = _logits_s(device, head, way.backward_bytes, c)
    for i, shape in enumerate(shapes):
        wide = i < way.float32_products
        total_s += product_s(device, *shape, c, dtype="fp32" if wide else "bf16")
    return total_s


def _logits_s(device: Device, head: Head, bytes_each: float, c: Constants) -> float:
    return bytes_each * head.chunk_rows * head.vocab / stream_bytes_per_s(device, c)


def _head_pass_s(device: Device, head: Head, c: Constants, element_bytes: float = 2.0) -> float:
    return element_bytes * head.vocab * head.width / stream_bytes_per_s(device, c)


def _scaling_s(device: Device, head: Head, way: LossWay, c: Constants) -> float:
    """The incoming gradient times the head's: read, written, and added into the leaf's."""
    wide = 2.0 if way.float32_products else 1.0
    return 3.0 * wide * _head_pass_s(device, head, c)


_CE = LossWay(1, 8, 10, 3, 6, 2)
_WIDE_CE = LossWay(1, 22, 26, 3, 15, 3)
_CPO = LossWay(1, 38, 52, 5, 14, 2)
_GRPO = LossWay(2, 44, 26, 5, 16, 3)
WAYS: dict[tuple[str, str], LossWay] = {
    # 16-bit logits: log-softmax reads thrice and writes, its backward is filled, reads, writes
    ("cross_entropy", "eager"): _CE,
    ("cross_entropy", "eager_float32"): _WIDE_CE,
    ("cross_entropy", "compiled"): LossWay(1, 12, 26, 3, 5, 3),
    ("cross_entropy", "chunker"): LossWay(1, 12, 26, 3, 10, 3),
    ("cross_entropy", "liger"): LossWay(1, 6, 0, 4, 8, 3, gradients_in_forward=True),
    # preferences: log-softmax in float32, and a second loss over the same logits
    ("cpo", "eager"): _CPO,
    ("cpo", "liger"): LossWay(1, 12, 20, 4, 16, 3, gradients_in_forward=True),
    # policies: the logits of a reference model beside
    ("grpo", "eager"): _GRPO,
    ("grpo", "liger"): LossWay(2, 10, 12, 5, 18, 4, gradients_in_forward=True),
    ("grpo", "liger_new"): LossWay(
        2, 10, 12, 5, 16, 4, gradients_in_forward=True, float32_products=1
    ),
}
