"""Attention that is written out: scores, what is added to or hidden of them, a softmax, a product.

It becomes the op that one kernel computes, which holds no scores. With sinks each head's softmax
has one more logit, a parameter, whose weight goes nowhere (`GptOssAttention` of transformers).
Without sinks that is done where the mask says no more than places do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.frontends.pytorch.index_facts import Facts
from autopar.frontends.pytorch.ir import Links, Node, Value
from autopar.frontends.pytorch.mask_forms import seen
from autopar.frontends.shared.facts import Choice


def lift_attention(nodes: list[Node], results: set[Value], facts: Facts) -> None:
    """Attention in the place of the last product of each that is written out."""
    links = Links(nodes, results)
    for i, node in enumerate(nodes):
        made = _attention(node, links, facts) if node.kind == "matmul" else None
        if made is not None:
            made.outputs, made.source, made.grad = node.outputs, node.source, node.grad
            nodes[i] = made


@dataclass(frozen=True, slots=True)
class _Scores:
    """``q k^T scale + mask``."""

    q: Value
    k: Value
    scale: float
    mask: Value | None


def _attention(node: Node, links: Links, facts: Facts) -> Node | None:
    weights, values = node.inputs
    if len(node.output.shape) != 4 or weights.shape[:2] != values.shape[:2]:
        return None
    weights, cut = _without_last(_uncast(weights, links), links)
    soft = links.made_by(weights, "softmax")
    if soft is None or soft.attrs["dim"] != 3 or not links.only(weights):
        return None
    logits, sinks = _unshifted(soft.inputs[0], links), None
    if cut:
        joined = links.made_by(logits, "cat")
        if joined is None or joined.attrs["dim"] != 3 or len(joined.inputs) != 2:
            return None
        logits, sinks = joined.inputs[0], _of_heads(joined.inputs[1], links)
        if sinks is None or logits.shape[3] != values.shape[2]:
            return None
    scores = _scores(logits, links)
    if scores is None or {scores.q.dtype, scores.k.dtype, values.dtype} != {node.output.dtype}:
        return None
    fact = None if scores.mask is None else facts.get(scores.mask)
    known = isinstance(fact, Choice) and seen(fact) is not None
    if sinks is None and scores.mask is not None and not known:
        return None
    extra = [x for x in (scores.mask, sinks) if x is not None]
    attrs: dict[str, Any] = {"causal": False, "scale": scores.scale, "dropout_p": 0.0}
    attrs |= {"sinks": True} if sinks is not None else {}
    return Node("attention", [scores.q, scores.k, values, *extra], [], attrs)


def _uncast(value: Value, links: Links) -> Value:
    node = links.made_by(value, "cast")
    return value if node is None or not links.only(value) else node.inputs[0]


def _without_last(value: Value, links: Links) -> tuple[Value, bool]:
    """The weights that ``value`` has all columns but the last of."""
    node = links.made_by(value, "slice")
    if node is None or node.attrs["dim"] != 3 or not links.only(value):
        return value, False
    whole = node.inputs[0]
    span = (node.attrs["start"], node.attrs["stop"], node.attrs["step"])
    return (whole, True) if span == (0, whole.shape[3] - 1, 1) else (value, False)


def _unshifted(value: Value, links: Links) -> Value:
    """``x`` of ``x - x.amax(-1)``, whose softmax is the same."""
    shift = links.made_by(value, "sub")
    if shift is None or len(shift.inputs) != 2:
        return value
    x, most = shift.inputs
    top = links.made_by(most, "amax")
    same = top is not None and top.inputs[0] is x and tuple(top.attrs["dims"]) == (3,)
    return x if same and links.readers[x] in ([shift, top], [top, shift]) else value


def _of_heads(value: Value, links: Links) -> Value | None:
    """The [h] that ``value`` [b, h, s, 1] is spread from."""
    spread = links.made_by(value, "expand")
    apart = None if spread is None else links.made_by(spread.inputs[0], "reshape")
    if apart is None or value.shape[3] != 1:
        return None
    heads = (value.shape[1],)
    fits = apart.output.shape == (1, *heads, 1, 1) and apart.inputs[0].shape == heads
    return apart.inputs[0] if fits else None


def _scores(value: Value, links: Links) -> _Scores | None:
    value, mask = _uncast(value, links), None
    added = links.made_by(value, "add")
    if added is not None and len(added.inputs) == 2:
        scaled = [x for x in added.inputs if _product(x, links) is not None]
        if len(scaled) != 1 or scaled[0].shape != value.shape:
            return None
        (mask,) = (x for x in added.inputs if x is not scaled[0])
        value = scaled[0]
    known = _product(value, links)
    if known is None or not links.only(known[0].output):
        return None
    product, scale = known
    turned = links.made_by(product.inputs[1], "transpose")
    if turned is None or tuple(turned.attrs["dims"]) != (0, 1, 3, 2):
        return None
    q, k = product.inputs[0], turned.inputs[0]
    return _Scores(q, k, scale, mask) if q.shape[:2] == k.shape[:2] else None


def _product(value: Value, links: Links) -> tuple[Node, float] | None:
    """The product of which ``value`` is a multiple, and the factor."""
    value, factor = _uncast(value, links), 1.0
    scaled = links.made_by(value, "mul", "div")
    if scaled is not None and len(scaled.inputs) == 1 and not scaled.attrs.get("scalar_first"):
        other = scaled.attrs.get("other")
        if not isinstance(other, int | float) or other == 0:
            return None
        factor = float(other) if scaled.kind == "mul" else 1 / other
        value = scaled.inputs[0]
    product = links.made_by(value, "matmul")
    return None if product is None or len(value.shape) != 4 else (product, factor)
