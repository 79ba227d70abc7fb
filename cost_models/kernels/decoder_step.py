"""A step of a decoder's layers and head as single kernels, to compare precisions of its products.

    gain = time(16 bits) / time(narrow) - 1,   time = layers (linears + attention + streams) + head

Only ratios of two such times are meant: collectives, the optimizer and the host, which both
share, are a fixed share of the 16-bit step. A linear whose products are narrow pays its casts; one
that tensor parallelism cuts has them on its local shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.kernels.attention import Attention, fused_attention_s
from autopar.cost_models.kernels.chunked_loss import WAYS, Head, loss_s
from autopar.cost_models.kernels.narrow import trained_linear_s
from autopar.cost_models.kernels.products import sustained
from autopar.cost_models.kernels.streams import Constants, stream_bytes_per_s
from autopar.nouns.cluster import Device

LAYER_PASSES = 40.0
"""Of 16 bits over the hidden rows of a layer, compiled, forward and backward: two norms, two sums,
rotary embedding; counted as `memory_bound` does."""
INNER_PASSES = 8.0
"""Over the rows of an MLP's inner width, or a routed one's, fused forward and backward."""


@dataclass(frozen=True)
class Decoder:
    """A decoder's figures; `experts` of which a token visits `visits`, beside a shared one."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    visits: int = 0


@dataclass(frozen=True)
class Narrowed:
    """What runs in which dtype: linears of the first `layers` (0: all), and grouped products."""

    linears: str = "bf16"
    grouped: str = "bf16"
    layers: int = 0


def decoder_step_s(
    device: Device,
    model: Decoder,
    batch: int,
    seq: int,
    narrowed: Narrowed,
    c: Constants,
    tensor_ranks: int = 1,
) -> float:
    """Seconds of forward and backward on one device for `batch` sequences, and what a step has
    beside them."""
    c = sustained(c)
    plain = Narrowed()
    many = min(model.layers, narrowed.layers or model.layers)
    layer_s = [
        _layer_s(device, model, batch, seq, way, c, tensor_ranks) for way in (narrowed, plain)
    ]
    rest = model.layers - many
    head = Head(batch * seq, model.width, model.vocab // tensor_ranks)
    head_s = loss_s(device, head, WAYS["cross_entropy", "compiled"], c)
    beside_s = c["step_beside"] * (model.layers * layer_s[1] + head_s)
    return many * layer_s[0] + rest * layer_s[1] + head_s + beside_s


def _layer_s(
    device: Device,
    model: Decoder,
    batch: int,
    seq: int,
    way: Narrowed,
    c: Constants,
    tensor_ranks: int,
) -> float:
    rows, width, t = batch * seq, model.width, tensor_ranks
    queries, keys = model.heads * model.head_dim // t, model.kv_heads * model.head_dim // t
    inner = model.inner // t
    shapes = [(queries, width), (keys, width), (keys, width), (width, queries)]
    shapes += [(inner, width), (inner, width), (width, inner)]
    time_s = sum(trained_linear_s(device, rows, n, k, way.linears, c) for n, k in shapes)
    per_byte = 2.0 / stream_bytes_per_s(device, c)
    time_s += rows * (LAYER_PASSES * width + INNER_PASSES * inner) * per_byte
    if model.experts:
        routed = rows * model.visits
        for n, k in ((inner, width), (inner, width), (width, inner)):
            time_s += trained_linear_s(device, routed, n, k, way.grouped, c, model.experts)
        time_s += routed * (LAYER_PASSES / 2 * width + INNER_PASSES * inner) * per_byte
    shape = Attention(
        batch, seq, model.heads // t, max(1, model.kv_heads // t), model.head_dim, model.head_dim
    )
    return time_s + fused_attention_s(device, shape, "flash_new", c, "full")
