"""Attention as one op, and what stands around it: rotary embedding, repeated kv heads.

Query heads are made of kv heads ``g`` and the queries ``r`` that share one: h = (g r). An axis that
splits g gives every rank whole groups. An axis may split r where g is down to one a rank: keys and
values are then whole there. An axis along sequences splits the queries' rows ``s``, and gathers
keys and values (Dubey et al. 2024, The Llama 3 herd of models, section 3.3.2) or has pieces of them
that pass around a ring (Liu et al. 2023, Ring attention, section 3), or splits heads (Jacobs et al.
2023, DeepSpeed Ulysses, section 3): that is a resharding before, and one behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from autopar.nouns.graph import DTYPE_BYTES, Op, Tensor
from autopar.nouns.windows import seen_of_documents, seen_pairs
from autopar.rules.implementations.table import (
    CAUSAL_RING,
    CAUSAL_ROWS,
    KEPT_ROWS,
    LOCAL_REPEATS,
    RING,
    ROWS,
    ZIGZAG_RING,
    ZIGZAG_ROWS,
)
from autopar.rules.kept import Kept
from autopar.rules.notation import Implemented, Internal, Rule, RuleError, RuleMaker
from autopar.rules.resharding import SHIFT
from autopar.rules.terms import text

# The flash backward computes the scores again and then four products, against two forward
# (Dao et al. 2022, FlashAttention, appendix B).
FLASH_BACKWARD = 2.5


def _attention(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    del results
    query, key, value = (t.shape for t in operands[:3])
    if not len(query) == len(key) == len(value) == 4 or query[1] % key[1]:
        raise RuleError(
            f"attention takes q [b, h, s, d], k [b, g, t, d], v [b, g, t, e] with h a multiple of "
            f"g, not {list(query)}, {list(key)}, {list(value)}"
        )
    shared = query[1] // key[1]
    heads = f"(g={key[1]} r={shared})" if shared > 1 else "g"
    terms = [["b", heads, "s", "d!"], ["b", "g", "t!", "d!"], ["b", "g", "t!", "e!"]]
    sinks = bool(op.attrs.get("sinks"))
    if op.attrs.get("documents"):
        numbers = operands[3].shape
        terms += [["b" if numbers[0] > 1 else "1", name] for name in ("s", "t!")]
    elif len(operands) > 3 + sinks:
        mask = operands[3].shape
        whole = ["b", heads, "s", "t!"][4 - len(mask) :]
        terms.append(["1" if n == 1 else f for f, n in zip(whole, mask, strict=True)])
    seen = _share_seen(op, query[2], key[2])
    terms += [[heads]] if sinks else []
    space = ("b", "g", "s", "t") if shared == 1 else ("b", "g", "r", "s", "t")
    heads_kept = ("g",) if shared == 1 else ("g", "r")
    return Rule(
        text(terms, [["b", heads, "s", "e!"]]),
        saves=tuple(range(len(operands))),
        saves_results=(0,),
        keeps=(Kept(("b", *heads_kept, "s"), 4),) * (1 + sinks),  # and the weights of sinks
        implementations=_rows(op, operands),
        flop_terms=((2.0 * seen, (*space, "d")), (2.0 * seen, (*space, "e"))),
        backward=FLASH_BACKWARD,
        cost="attention",
    )


def _share_seen(op: Op, rows: int, columns: int) -> float:
    """Of all pairs of a row and a column, those that are computed."""
    if tokens := op.attrs.get("document_tokens"):
        seen = seen_of_documents(columns, tokens, bool(op.attrs.get("causal")))
        return min(seen, float(op.attrs.get("window", columns))) / columns
    if "strip" in op.attrs:
        pairs = seen_pairs(rows, columns, op.attrs["window"], op.attrs["strip"])
        return pairs / (rows * columns)
    if op.attrs.get("causal"):
        # Row i sees the columns up to i, and no more than there are, or the last few of them.
        short = min(rows, columns)
        most = min(int(op.attrs.get("window", columns)), short)
        seen = (most * (most + 1) / 2 + (short - most) * most) / (rows * columns)
        return seen + max(rows - columns, 0) * min(most, columns) / (rows * columns)
    if "window" in op.attrs:
        return min(int(op.attrs["window"]), columns) / columns
    return 1.0


def _rows(op: Op, operands: tuple[Tensor, ...]) -> tuple[Implemented, ...]:
    """How queries' rows are split: against gathered keys, or against such as pass by."""
    causal = op.attrs.get("causal")
    key, value = operands[1:3]
    window = op.attrs.get("window", key.shape[2]) if causal else key.shape[2]
    reach = min(window, op.attrs.get("document_tokens", window)) / key.shape[2]
    names = (CAUSAL_ROWS, ZIGZAG_ROWS) if causal else (ROWS,)
    plain = tuple(Implemented("s", name, reach=reach) for name in names)
    if op.attrs.get("dropout_p") or (causal and operands[0].shape[2] != key.shape[2]):
        return plain
    masks = operands[3 : len(operands) - bool(op.attrs.get("sinks"))]
    if any(t.differentiable for t in masks):
        return plain
    # Keys and values both ways, and in backward the sums of their gradients, added up wide.
    pair, width = ("b", "g", "t"), key.shape[3] + value.shape[3]
    wide = max(key.dtype, "float32", key=DTYPE_BYTES.__getitem__)
    moved: tuple[tuple[Literal["forward", "backward"], str], ...] = (
        ("forward", key.dtype),
        ("backward", key.dtype),
        ("backward", wide),
    )

    def ring(name: str) -> Implemented:
        # Pieces in zigzag go all the way round: the late half of each sees what is near.
        back = window - 1 if window < key.shape[2] and name == CAUSAL_RING else None
        moves = (Internal(SHIFT, way, pair, width, dtype, back=back) for way, dtype in moved)
        # A mask has all of its columns on every rank.
        return Implemented("s", name, tuple(moves), ("t",), (1, 2), reach)

    if not causal:
        return (*plain, ring(RING))
    kept = Implemented("s", KEPT_ROWS, also=("t",), of=(1, 2), reach=reach)
    return (*plain, ring(CAUSAL_RING), ring(ZIGZAG_RING), kept)


def _rotary(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Linear in x: a rotation of pairs of the last dim."""
    del op, results
    names = ["b", "h", "s", "d!"]
    angles = {2: ["s", "d!"], 3: ["b", "s", "d!"], 4: names}
    terms = [names]
    for angle in operands[1:]:
        term = angles[len(angle.shape)]
        terms.append(["1" if n == 1 else f for f, n in zip(term, angle.shape, strict=True)])
    varies = any(t.differentiable for t in operands[1:])
    return Rule(
        text(terms, [names]),
        linear=True,
        partials=(0,),
        saves=(0, 1, 2) if varies else (1, 2),
        flops=3.0,
    )


def _repeat_heads(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    del operands, results
    repeats = int(op.attrs["repeats"])
    heads = f"(g r={repeats})" if repeats > 1 else "g"
    split = (Implemented("r", LOCAL_REPEATS),) if repeats > 1 else ()
    return Rule(f"b g t d -> b {heads} t d", linear=True, flops=0.0, implementations=split)


ATTENTION: Mapping[str, Rule | RuleMaker] = {
    "attention": _attention,
    "rotary": _rotary,
    "repeat_heads": _repeat_heads,
}
