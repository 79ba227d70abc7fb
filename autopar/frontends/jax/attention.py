"""Attention, however it is written: softmax(mask(scale * q k)) v as one op.

The two products may be any einsums, with any views in between; what matters is which index of the
first one ends where in the second. Indices are followed through views as `views.Factor`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from autopar.frontends.jax import views
from autopar.frontends.jax.attention_logits import Climb, Logits, letter_at, letters_of
from autopar.frontends.jax.draft import (
    Builder,
    Draft,
    Node,
    Operand,
    Uniform,
    broadcast,
    rewrite,
)
from autopar.frontends.jax.known_places import Places
from autopar.frontends.jax.simplify import simplified
from autopar.frontends.jax.views import Dims

HIDES = -1e30
"""Added to a score it leaves a weight of exactly 0, in bfloat16 too."""


def attention_lifted(draft: Draft) -> Draft:
    """The draft with every softmax between two products replaced by an ``attention`` op."""
    return simplified(rewrite(draft, partial(_visit, Places())))


@dataclass(frozen=True, slots=True)
class _Roles:
    """Letters of the first product by role; ``batch`` and ``head`` may be missing."""

    batch: str | None
    head: str | None
    query: str
    repeat: str | None
    key: str
    depth: str


def _visit(places: Places, node: Node, builder: Builder) -> Sequence[Operand] | None:
    if node.kind != "einsum":
        return None
    for position in (0, 1):
        attention = _attention(node, position, Climb(builder, places))
        if attention is not None:
            return [attention]
    return None


def _attention(second: Node, position: int, above: Climb) -> Operand | None:
    """``position`` is the operand of ``second`` that holds the probabilities."""
    builder = above.builder
    after, x = _views_above(second.inputs[position], builder)
    softmax = builder.made_by(x, "softmax")
    if softmax is None or softmax.attrs["dim"] != len(softmax.out.shape) - 1:
        return None
    start = letters_of(second.attrs["equation"])
    if not above.climb(softmax.inputs[0]):
        return None
    first = above.product
    assert first is not None
    in_q, in_k, out = letters_of(first.attrs["equation"])
    dims = views.factored(first.out.shape)
    letter_of = {id(f): letter for letter, d in zip(out, dims, strict=True) for f in d}
    logits = above.settle(dims, letter_of)
    if logits is None:
        return None
    now: Dims | None = above.end
    for view in after:
        now = views.followed(now, view) if now is not None else None
    if now is None:
        return None
    in_p = [letter_at(d, letter_of) for d in now]
    if None in in_p:
        return None
    rows = letter_at(above.end[-2], letter_of) if len(above.end) > 1 else None
    roles = _roles(in_q, in_k, out, first, above.key_letter, rows)
    if roles is None:
        return None
    v = second.inputs[1 - position]
    rename = dict(zip(start[position], in_p, strict=True))
    used = set(in_q) | set(in_k)
    fresh = (c for c in "ABCDEFGH" if c not in used)
    for letter in (*start[1 - position], *start[2]):
        if letter not in rename:
            rename[letter] = next(fresh)
    in_v = [str(rename[c]) for c in start[1 - position]]
    result = [str(rename[c]) for c in start[2]]
    return _emit(first, second, v, logits, roles, (in_q, in_k, in_v, result), letter_of, builder)


def _views_above(x: Operand, builder: Builder) -> tuple[list[Node], Operand]:
    chain: list[Node] = []
    while (node := builder.made_by(x, *views.VIEWS, "cast")) is not None:
        if node.kind in views.VIEWS:
            chain.insert(0, node)
        x = node.inputs[0]
    return chain, x


def _roles(
    in_q: list[str], in_k: list[str], out: list[str], first: Node, key: str, rows: str | None
) -> _Roles | None:
    """Which operand is q does not matter here: the one without the key letter. ``rows``: the letter
    of the logits' last dim but one."""
    if key in in_q:
        in_q, in_k = in_k, in_q
        operand = first.inputs[1]
    else:
        operand = first.inputs[0]
    sizes = dict(zip(in_q, operand.shape, strict=True))
    shared = [c for c in in_q if c in in_k and c in out and sizes[c] != 1]
    contracted = [c for c in in_q if c in in_k and c not in out]
    queries = [c for c in in_q if c not in in_k and sizes[c] != 1]
    if len(contracted) != 1 or len(shared) > 2 or not 1 <= len(queries) <= 2 or key not in in_k:
        return None
    batch = shared[0] if shared else None
    head = shared[1] if len(shared) == 2 else None
    if len(queries) == 1:
        return _Roles(batch, head, queries[0], None, key, contracted[0])
    if head is None:  # all heads share one key
        if rows not in queries:
            return None
        repeat = next(c for c in queries if c != rows)
        return _Roles(batch, None, rows, repeat, key, contracted[0])
    # grouped queries: the repeat follows its head
    if in_q.index(head) + 1 >= len(in_q):
        return None
    repeat = in_q[in_q.index(head) + 1]
    if repeat not in queries:
        return None
    query = next(c for c in queries if c != repeat)
    return _Roles(batch, head, query, repeat, key, contracted[0])


def _emit(
    first: Node,
    second: Node,
    v: Operand,
    logits: Logits,
    roles: _Roles,
    terms: tuple[list[str], list[str], list[str], list[str]],
    letter_of: dict[int, str],
    builder: Builder,
) -> Operand | None:
    in_q, in_k, in_v, result = terms
    q, k = first.inputs
    if roles.key in in_q:
        in_q, in_k, q, k = in_k, in_q, k, q
    size = {c: n for c, n in (*zip(in_q, q.shape, strict=True), *zip(in_k, k.shape, strict=True))}
    value = [c for c in in_v if c and c not in size]
    width = next((n for c, n in zip(in_v, v.shape, strict=True) if c in value and n != 1), 1)
    if width != size[roles.depth]:
        return None
    kept = [c for c in (roles.batch, roles.head) if c]
    if not {*kept, roles.key} <= set(in_v) or roles.key in result:
        return None
    depth = next(c for c, n in zip(in_v, v.shape, strict=True) if c in value and n == width)
    heads = [c for c in (roles.head, roles.repeat) if c]
    b = size[roles.batch] if roles.batch else 1
    groups = size[roles.head] if roles.head else 1
    repeats = size[roles.repeat] if roles.repeat else 1
    s, t = size[roles.query], size[roles.key]

    def laid(x: Operand, term: list[str], order: list[str], shape: tuple[int, ...]) -> Operand:
        return builder.reshape(_in_order(x, term, order, builder), shape)

    lead = [c for c in (roles.batch,) if c]
    try:
        q = laid(
            q, in_q, [*lead, *heads, roles.query, roles.depth], (b, groups * repeats, s, width)
        )
        head = [roles.head] if roles.head else []
        k = laid(k, in_k, [*lead, *head, roles.key, roles.depth], (b, groups, t, width))
        v = laid(v, in_v, [*lead, *head, roles.key, depth], (b, groups, t, width))
        seen, given = _seen(logits, roles, s, t)
        masks = [_mask(m, d, letter_of, roles, size, builder) for m, d in given]
    except _NotAttention:
        return None
    if masks:
        masks = [_joined(masks, builder)]
    usual = math.isclose(logits.scale, 1 / math.sqrt(width), rel_tol=1e-6)
    out = builder.op(
        "attention",
        (q, k, v, *masks),
        (b, groups * repeats, s, width),
        second.out.dtype,
        **seen,
        scale=None if usual else logits.scale,
        dropout_p=0.0,
    )
    order = [*lead, *heads, roles.query, depth]
    return _as_result(out, order, {**size, depth: width}, result, second, builder)


def _as_result(
    out: Operand,
    order: list[str],
    sizes: dict[str, int],
    result: list[str],
    second: Node,
    builder: Builder,
) -> Operand | None:
    """``out``, whose letters are in ``order``, as the second product had its result."""
    spread = builder.reshape(out, tuple(sizes[c] for c in order))
    final = [c for c, n in zip(result, second.out.shape, strict=True) if c in order]
    if sorted(final) != sorted(order):
        return None
    moved = builder.transpose(spread, tuple(order.index(c) for c in final))
    return builder.reshape(moved, second.out.shape)


def _in_order(x: Operand, term: list[str], order: list[str], builder: Builder) -> Operand:
    """``x`` with its letters in ``order``, dims of size one gone."""
    thin = [c for c, n in zip(term, x.shape, strict=True) if n != 1 or c in order]
    x = builder.reshape(x, tuple(n for c, n in zip(term, x.shape, strict=True) if c in thin))
    order = [c for c in order if c in thin]
    if sorted(order) != sorted(thin):
        raise _NotAttention
    return builder.transpose(x, tuple(thin.index(c) for c in order))


class _NotAttention(Exception):
    """The operands cannot be laid out as attention's."""


def _seen(
    logits: Logits, roles: _Roles, s: int, t: int
) -> tuple[dict[str, Any], list[tuple[Operand, Dims]]]:
    """What attention says of the columns that a row sees, and the masks that are left to give."""
    band = logits.band
    if band is None:
        return {"causal": False}, logits.masks
    if band.row == roles.query and s == t and band.ahead == 0 and band.back >= 0:
        window = {"window": int(band.back) + 1} if band.back < t - 1 else {}
        return {"causal": True, **window}, logits.masks
    return {"causal": False}, [*logits.places, *logits.masks]


def _mask(
    mask: Operand,
    dims: Dims,
    letter_of: dict[int, str],
    roles: _Roles,
    sizes: dict[str, int],
    builder: Builder,
) -> Operand:
    """A mask over the logits' dims as [b|1, h|1, s|1, t|1]."""
    mask = views.unspread(mask, builder)
    if isinstance(mask, Uniform):
        raise _NotAttention
    here = dims[len(dims) - len(mask.shape) :]
    letters = []
    for n, dim in zip(mask.shape, here, strict=True):
        letter = letter_at(dim, letter_of)
        if letter is None:
            raise _NotAttention
        if n != 1:
            letters.append(letter)
    heads = [roles.head, roles.repeat]
    order = [roles.batch, *heads, roles.query, roles.key]
    present = [c for c in order if c in letters]
    if len(present) != len(letters):
        raise _NotAttention
    size = dict(zip(letters, (n for n in mask.shape if n != 1), strict=True))
    thin = builder.reshape(mask, tuple(size[c] for c in letters))
    moved = builder.transpose(thin, tuple(letters.index(c) for c in present if c))
    if roles.head and roles.repeat and len({*heads} & size.keys()) == 1:  # of some heads alone
        spread = {**size, **{c: sizes[c] for c in heads if c}}
        moved = builder.reshape(moved, tuple(size.get(c, 1) for c in order if c in spread))
        moved = builder.expand(moved, tuple(spread[c] for c in order if c in spread))
        size = spread
    of_heads = math.prod(size.get(c, 1) for c in heads if c)
    last = (roles.query, roles.key)
    shape = (size.get(roles.batch or "", 1), of_heads, *(size.get(c, 1) for c in last))
    return builder.reshape(moved, shape)


def _joined(masks: list[Operand], builder: Builder) -> Operand:
    """Several as one: all of those that say where scores count, and the sum of what is added."""
    whole: Operand | None = None
    added = [m for m in masks if m.dtype != "bool"]
    for kind, those in (("and", [m for m in masks if m.dtype == "bool"]), ("add", added)):
        total: Operand | None = None
        for mask in those:
            total = mask if total is None else _both(kind, total, mask, builder)
        if total is None:
            continue
        whole = total if whole is None else _hidden(whole, total, builder)
    assert whole is not None
    return whole


def _both(kind: str, one: Operand, other: Operand, builder: Builder) -> Operand:
    shape = broadcast(one.shape, other.shape)
    if shape is None or one.dtype != other.dtype:
        raise _NotAttention
    return builder.op(kind, (one, other), shape, one.dtype)


def _hidden(counts: Operand, added: Operand, builder: Builder) -> Operand:
    """What is added to the scores that count, and hides the others."""
    shape = broadcast(counts.shape, added.shape)
    if shape is None:
        raise _NotAttention
    hides = Uniform(HIDES, added.dtype)
    return builder.op("where", (counts, added, hides), shape, added.dtype)
