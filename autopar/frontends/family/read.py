"""The architecture figures of a captured transformer: a graph read as `Arch`.

Every product with a weight is told apart by what flows into it and out of it:

    qkv    queries, keys and values of an attention come from it
    proj   an attention goes into it
    head   gives as many values as a table of tokens has rows, and no product follows
    down   comes from other products alone: the end of a feed-forward part
    up     a `down` comes from it

A layer is one attention and one feed-forward part. The rest of a model (poolers, token types,
gates) may be 2 % of its matrices; a model with more of it is refused. Vectors and rows of position
tables that no sequence reaches are not compared: in small models they are more than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from autopar.frontends.family.arch import Arch
from autopar.frontends.family.products import STREAM, Product, Products
from autopar.nouns.errors import UserError
from autopar.nouns.graph import Graph, Op, Tensor

TOLERANCE = 0.02
"""Share of a model's matrices that may be outside the family."""


class NotOfFamily(UserError):
    """A model that is no transformer of the family; the text says what does not fit."""


@dataclass(frozen=True, slots=True)
class Derived:
    """The figures, and what they leave out of the model."""

    arch: Arch
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Attention:
    rows: int
    heads: int
    kv_heads: int
    dim: int
    seq: int
    hidden: int

    def __str__(self) -> str:
        return (
            f"{self.heads} heads ({self.kv_heads} of keys) of {self.dim} over {self.rows} x "
            f"{self.seq} positions"
        )


@dataclass(frozen=True, slots=True)
class _FeedForward:
    """One MLP of ``width`` (``up`` = 2: gated), or ``count`` experts."""

    width: int
    up: int
    count: int
    top_k: int


def arch_of(graph: Graph, samples: int, name: str) -> Derived:
    """The figures of a model with a global batch of ``samples`` sequences.

    Raises:
        NotOfFamily: what of the model no transformer of the family has, with the numbers.
    """
    top = Products(graph)
    scopes = [(top, 1)]
    for block in graph.blocks.values():
        calls = sum(op.kind == "block" and op.attrs["block"] == block.name for op in graph.ops)
        scopes.append((Products(block.body), calls))
    attention, layers = _attention(scopes)
    if attention.rows != samples:
        raise NotOfFamily(
            f"attention runs over {attention.rows} rows of {attention.seq} positions, and the "
            f"batch has {samples} samples"
        )
    table, head = _vocabulary(top, attention.hidden)
    every = [op for scope, calls in scopes for op in scope.attentions for _ in range(calls)]
    masks = [(bool(op.attrs.get("causal")), _is_masked(op)) for op in every]
    window, windowed = _windows(every)
    others = {table.name, *(p.weight for p in top.all.values())}
    others |= {name for op in top.experts for name in op.inputs}
    positions = _positions(top, attention, others)
    arch = Arch(
        name=name,
        layers=layers,
        hidden=attention.hidden,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        vocab=table.shape[0],
        seq=attention.seq,
        head_dim=attention.dim if attention.dim * attention.heads != attention.hidden else 0,
        tied=head.weight == table.name,
        causal=_causal(masks),
        window=window,
        windowed_layers=windowed,
        positions=bool(positions),
        **_feed_forward(scopes, attention.hidden, layers, {head.weight}),
    )
    _check_size(arch, graph, positions)
    return Derived(arch, _mask_note(masks, arch.causal))


def _attention(scopes: Iterable[tuple[Products, int]]) -> tuple[_Attention, int]:
    """The one kind of attention that all layers have, and how many there are."""
    counts = Counter[_Attention]()
    for scope, calls in scopes:
        for op in scope.attentions:
            counts[_one_attention(scope, op)] += calls
    if not counts:
        raise NotOfFamily(
            "none of its ops is known as attention (written out of products and a softmax, it is "
            "not, unless the capture knows the form)"
        )
    if len(counts) > 1:
        kinds = "; ".join(f"{count} x {one}" for one, count in counts.items())
        raise NotOfFamily(f"its attentions differ: {kinds}")
    return next(iter(counts.items()))


def _is_masked(op: Op) -> bool:
    """Beside what is causal or a window; sinks hide nothing."""
    return len(op.inputs) > 3 + bool(op.attrs.get("sinks"))


def _windows(attentions: list[Op]) -> tuple[int, int]:
    """The one window of some layers, and of how many; 0 and 0 where none has one."""
    windows = Counter(op.attrs["window"] for op in attentions if "window" in op.attrs)
    if len(windows) > 1:
        raise NotOfFamily(f"its layers see windows of {', '.join(map(str, sorted(windows)))}")
    return next(iter(windows.items()), (0, 0))


def _causal(masks: list[tuple[bool, bool]]) -> bool:
    """Whether attention without a mask of its own is causal."""
    plain = {causal for causal, masked in masks if not masked}
    if len(plain) > 1:
        raise NotOfFamily("some of its attentions are causal and others are not")
    return plain == {True} or (not plain and any(causal for causal, _ in masks))


def _mask_note(masks: list[tuple[bool, bool]], causal: bool) -> tuple[str, ...]:
    masked = sum(has for _, has in masks)
    if not masked:
        return ()
    priced = "only causal" if causal else "hiding nothing"
    return (f"{masked} of {len(masks)} layers have a mask of their own, priced as {priced}",)


def _vocabulary(top: Products, hidden: int) -> tuple[Tensor, Product]:
    """The table of tokens and the head that gives a value for each of its rows."""
    tables = [t for t in top.tables if t.shape[-1] == hidden]
    if not tables:
        raise NotOfFamily(f"it has no table of tokens with rows of {hidden}, its hidden size")
    heads = [p for p in top.all.values() if p.inputs == hidden and not top.following(p.name)]
    pairs = [(t, p) for p in heads for t in tables if t.shape[0] == p.outputs]
    if not pairs:
        rows = " or ".join(str(t.shape[0]) for t in tables)
        gives = ", ".join(f"{p.inputs} to {p.outputs}" for p in heads) or "nothing"
        raise NotOfFamily(
            f"no head gives a value for each token: tables of {rows} rows, heads from {gives}"
        )
    return next((pair for pair in pairs if pair[0].name == pair[1].weight), pairs[0])


def _positions(top: Products, attention: _Attention, others: set[str]) -> list[Tensor]:
    """Tables with a learned row for every position."""
    return [
        t
        for t in top.parameters
        if t.name not in others
        and len(t.shape) > 1
        and t.shape[-1] == attention.hidden
        and t.shape[-2] >= attention.seq
    ]


def _feed_forward(
    scopes: Iterable[tuple[Products, int]], hidden: int, layers: int, heads: set[str]
) -> dict[str, Any]:
    """What `Arch` says of the feed-forward parts."""
    counts = Counter[_FeedForward]()
    for scope, calls in scopes:
        for one in _feed_forwards(scope, hidden, heads):
            counts[one] += calls
    experts = [one for one in counts if one.count > 1]
    plain = {one: count for one, count in counts.items() if one.count == 1}
    if not counts:
        raise NotOfFamily("it has no feed-forward part: no product that comes from products alone")
    if len({one.up for one in counts}) > 1:
        raise NotOfFamily("some of its feed-forward parts are gated and others are not")
    first = next(iter(counts))
    if not experts:
        if len(plain) > 1 or plain[first] != layers:
            parts = ", ".join(f"{count} of width {one.width}" for one, count in plain.items())
            raise NotOfFamily(
                f"it has {layers} attentions, and as feed-forward parts {parts}: not one for each"
            )
        return {"ffn": first.width, "gated": first.up == 2}
    if len(experts) > 1:
        raise NotOfFamily("its layers have experts of different number or width")
    one = experts[0]
    if not one.top_k:
        raise NotOfFamily(f"how many of its {one.count} experts a token meets is not to be seen")
    return {
        "ffn": one.width,
        "gated": one.up == 2,
        "experts": one.count,
        "top_k": one.top_k,
        **_beside_experts(one, counts[one], plain, layers),
    }


def _beside_experts(
    experts: _FeedForward, routed: int, plain: dict[_FeedForward, int], layers: int
) -> dict[str, Any]:
    """Shared experts of the ``routed`` layers, and the MLP of the others."""
    widths = {one.width: count for one, count in plain.items()}
    dense = layers - routed
    shared = [w for w, n in widths.items() if n == routed and w % experts.width == 0]
    if sum(widths.values()) == dense:
        shared = []  # one MLP for each layer without experts, and none is left
    rest = {w: n for w, n in widths.items() if w not in shared[:1]}
    if dense < 0 or sum(rest.values()) != dense or len(rest) > 1:
        parts = ", ".join(f"{count} of width {width}" for width, count in widths.items())
        raise NotOfFamily(
            f"it has {layers} attentions, {routed} layers of experts of width {experts.width}, and "
            f"other feed-forward parts that do not go with them: {parts or 'none'}"
        )
    return {
        "shared_experts": shared[0] // experts.width if shared else 0,
        "dense_layers": dense,
        "dense_ffn": next(iter(rest), 0),
    }


def _check_size(arch: Arch, graph: Graph, positions: list[Tensor]) -> None:
    """Raises `NotOfFamily` where the figures do not make up the model's matrices."""
    theirs = sum(t.numel for _, t in graph.parameters() if len(t.shape) > 1)
    theirs -= sum(t.numel - arch.seq * arch.hidden for t in positions)
    ours = arch.parameters - 2 * arch.hidden * arch.layers
    if abs(ours - theirs) > TOLERANCE * theirs:
        raise NotOfFamily(
            f"{arch.layers} layers of hidden {arch.hidden}, {arch.heads} heads, ffn {arch.ffn} and "
            f"vocabulary {arch.vocab} make {ours:,} weights in matrices, and the model has "
            f"{theirs:,}: more than {TOLERANCE:.0%} apart"
        )


def _one_attention(scope: Products, op: Op) -> _Attention:
    """Sizes of one attention; raises `NotOfFamily` for what is not that of the family."""
    q, k, v = (scope.graph.tensors[name].shape for name in op.inputs[:3])
    if not 3 <= len(q) <= 4:
        raise NotOfFamily(f"{op.source}: attention over queries of shape {list(q)}")
    heads, dim = (q[1] if len(q) == 4 else 1), q[-1]
    if v[-1] != dim:
        raise NotOfFamily(
            f"{op.source}: queries are {dim} wide and values {v[-1]} (latent attention is not "
            "read from a model)"
        )
    if k[-2] != q[-2]:
        raise NotOfFamily(f"{op.source}: {q[-2]} queries meet {k[-2]} keys")
    before = scope.named(set().union(*(scope.sources(name) for name in op.inputs[:3])))
    after = scope.named(scope.following(op.name))
    wide, hidden = sum(p.outputs for p in before), {p.outputs for p in after}
    kv_heads, left = divmod(wide - heads * dim, 2 * dim)
    if left or kv_heads < 1 or heads % kv_heads or len({p.inputs for p in before}) != 1:
        raise NotOfFamily(
            f"{op.source}: queries, keys and values of {heads} heads of {dim} come from "
            f"products that are {wide} wide in all"
        )
    size = sum(p.inputs * p.outputs for p in after)
    if len(hidden) != 1 or size != heads * dim * min(hidden):
        goes = ", ".join(f"{p.inputs} to {p.outputs}" for p in after) or "no product"
        raise NotOfFamily(f"{op.source}: {heads} heads of {dim} go into {goes}")
    return _Attention(q[0], heads, kv_heads, dim, q[-2], min(hidden))


def _routed(scope: Products, op: Op) -> _FeedForward:
    _, index, _, up, down = (scope.graph.tensors[name].shape for name in op.inputs[:5])
    one, other = (1, 2) if op.attrs["transposed"] else (2, 1)
    width = down[one]
    return _FeedForward(width, up[other] // width, down[0], index[-1])


def _feed_forwards(scope: Products, hidden: int, heads: set[str]) -> Iterator[_FeedForward]:
    """Every `down` with the products that it comes from, and all experts that are one op."""
    for op in scope.experts:
        yield _routed(scope, op)
    taken = {p.name for p in scope.all.values() if p.weight in heads}
    for op in scope.attentions:
        taken |= set().union(*(scope.sources(name) for name in op.inputs[:3]))
        taken |= scope.following(op.name)
    routes = [
        1 if op.kind == "argmax" else scope.graph.tensors[op.outputs[0]].shape[-1]
        for op in scope.graph.ops
        if op.kind == "argmax" or "topk" in op.kind or "top_k" in op.kind
    ]
    for product in scope.all.values():
        sources = scope.sources(product.operand)
        if product.name in taken or product.outputs != hidden or not sources:
            continue
        if STREAM in sources or sources & taken:
            continue
        wide = sum(p.outputs for p in scope.named(sources))
        up, left = divmod(wide, product.inputs)
        if left or up not in (1, 2):
            raise NotOfFamily(
                f"{scope.makers[product.name].source}: a feed-forward part takes {wide} values "
                f"to {product.inputs}"
            )
        top_k = max(routes, default=0) if product.count > 1 else 0
        yield _FeedForward(product.inputs, up, product.count, top_k)
