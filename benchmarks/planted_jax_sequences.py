"""Errors in how JAX programs split sequences and experts, one small change each."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.planting import Case, Planted, in_emission, in_runtime

CASES: Mapping[str, Case] = {
    "jax long ring": Case("jax_long", {"cp_ring": "4"}),
    "jax long heads": Case("jax_long", {"cp_head": "2"}),
    "jax gpt pieces": Case("jax_gpt", {"cp_ring": "3"}),
    "jax experts alone": Case("jax_experts", {"ep": "2", "dp_shard": "2", "zero": "0"}),
    "jax experts": Case("jax_experts", {"ep": "2", "dp_shard": "4"}),
}


ERRORS: tuple[Planted, ...] = (
    in_runtime("a ring turns the other way (jax)", "long ring",
        "ring_attention:_sent_on", "(i + by) % ways", "(i - by) % ways"),
    in_runtime("sums of weights of other pieces are not scaled (jax)", "long ring",
        "ring_attention:_add_softmax", "total * before", "total"),
    in_runtime("rows see pieces behind them (jax)", "long ring",
        "ring_attention:_seen_of", "piece < rank, earlier", "piece > rank, earlier"),
    in_runtime("gradients of keys stay where the piece went last (jax)", "long ring",
        "ring_attention:_there_and_back", "else _added(own, behind)", "else own"),
    in_runtime("pieces of a ring are one behind the other (jax)", "gpt pieces",
        "ring_attention:_piece", "- behind", "+ behind"),
    in_runtime("a batch is cut as if pieces were in order (jax)", "long ring",
        "part:Part.apart", '!= "zigzag"', '== "zigzag"'),
    in_runtime("positions of the wrong pieces (jax)", "long ring",
        "zigzag:own_zigzag", "(rank, 2 * ways - 1 - rank)", "(2 * rank, 2 * rank + 1)"),
    in_runtime("traded heads have pieces in zigzag (jax)", "long heads",
        "collectives:traded", "if zigzag == concat", "if False"),
    in_emission("gradients are not summed over cp (jax)", "long ring",
        "staged:sums", 'f"lax.psum(g, {axes_text(how.data)})" if how.data else "g"', '"g"'),
    in_emission("gradients of experts are summed over their ranks (jax)", "experts alone",
        "train:_reduced", '"leaf.summed" if how.pieces and not how.shards else axes_text(rest)',
        "axes_text(rest)"),
    in_runtime("experts' ranks count once in the norm (jax)", "experts",
        "layout:Layout.cutting_axes", "for a in leaf.axes(d)]",
        "for a in leaf.axes(d)[1:]]"),
)  # fmt: skip
