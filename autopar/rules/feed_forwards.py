"""Feed-forward parts: products of one tensor, what is done to these element by element, and one
more product, as one op.

    linear (and linear of the same tensor), biases -> (silu, mul, gelu, ...)* -> linear

becomes ``feed_forward`` of the tensor and the matrices, so that what stands between the products is
there for a chunk of the tokens at a time, forward and backward (Liu and Abbeel 2023, Blockwise
Parallel Transformer, section 3; Jagannath et al. 2025, Arctic Long Sequence Training, section 3.2).
Nobody else may read what stands between. A bias behind the last product stays an op of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.nouns.graph import Graph, Op, Tensor
from autopar.nouns.kinds import DRAWS
from autopar.rules.elementwise import ELEMENTWISE
from autopar.rules.gates import Step

KIND = "feed_forward"
AS_MANY_AS_IT_TAKES = 0
"""Chunks, to the search: as `autopar.rules.feed_forward` prices them."""
NOTHING_BETWEEN = "nothing stands between it and the product before it"
_PRODUCTS = ("linear", "linear_t")


@dataclass(frozen=True, slots=True)
class FeedForward:
    """``ups``: the first products, with the bias of each (""), ``between``: what is done to them,
    in order; ``down``: the last product; ``steps``: the same as `autopar.rules.gates` has it."""

    ups: tuple[tuple[Op, str], ...]
    between: tuple[Op, ...]
    down: Op
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class NoFeedForward:
    """A product of what an op made element by element that ends none, and why."""

    down: Op
    reason: str


def feed_forwards(part: Graph) -> list[FeedForward | NoFeedForward]:
    """Of the top of a graph, or of a block's body."""
    readers = part.consumers()
    makers = {name: op for op in part.ops for name in op.outputs}
    made: list[FeedForward | NoFeedForward] = []
    ends: set[str] = set()
    for op in part.ops:
        if op.kind not in _PRODUCTS or not _may_end(makers.get(op.inputs[0])):
            continue
        each = _read(part, op, makers, readers)
        if isinstance(each, FeedForward):
            if ends & {up.name for up, _ in each.ups}:
                each = NoFeedForward(op, "a product before it is the last of another part")
            else:
                ends.add(op.name)
        made.append(each)
    return made


def every_feed_forward(graph: Graph) -> Iterator[tuple[Graph, FeedForward | NoFeedForward]]:
    """With the part of the graph in which it stands."""
    for part in (graph, *(block.body for block in graph.blocks.values())):
        yield from ((part, each) for each in feed_forwards(part))


def with_mlp_chunks(graph: Graph, chunks: int | None) -> Graph:
    """The graph with every feed-forward part in so many chunks of tokens; itself where that is
    None."""
    if chunks is None:
        return graph
    blocks = {
        name: replace(block, body=_joined(block.body, chunks))
        for name, block in graph.blocks.items()
    }
    return replace(_joined(graph, chunks), blocks=blocks)


def _may_end(op: Op | None) -> bool:
    return op is not None and op.kind in ELEMENTWISE


def _is_step(op: Op) -> bool:
    return op.kind in ELEMENTWISE and op.kind not in DRAWS


def _read(
    part: Graph,
    down: Op,
    makers: Mapping[str, Op],
    readers: Mapping[str, list[tuple[Op, int]]],
) -> FeedForward | NoFeedForward:
    tensors = part.tensors
    shape = tensors[down.inputs[0]].shape
    if len(shape) < 2 or tensors[down.inputs[1]].role != "parameter":
        return NoFeedForward(down, "its operands are no tokens and a matrix of the model")
    ups: dict[str, tuple[Op, str]] = {}
    between: list[Op] = []
    waiting, seen = [down.inputs[0]], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        op = makers.get(name)
        if op is None:
            return NoFeedForward(down, f"what stands before it reads {name}, which no product made")
        first = _first_product(op, tensors, makers)
        if first is not None:
            ups[name] = first
            seen.add(first[0].name)
        elif not _is_step(op) or tensors[name].shape != shape:
            return NoFeedForward(down, f"{op.kind} stands before it, at {op.source}")
        else:
            between.append(op)
            waiting += op.inputs
    order = {op.name: place for place, op in enumerate(part.ops)}
    firsts = sorted(ups.items(), key=lambda item: order[item[0]])
    forms = {(op.kind, op.inputs[0]) for _, (op, _) in firsts}
    if len(forms) > 1 or down.kind not in {kind for kind, _ in forms}:
        return NoFeedForward(down, "the products before it are of several tensors, or of two forms")
    ends = (name for _, (op, _) in firsts for name in (op.inputs[0], op.name))
    if len({tensors[name].dtype for name in (*ends, down.inputs[0], down.name)}) > 1:
        return NoFeedForward(down, "what goes in and comes out of its products has several dtypes")
    if not between:
        return NoFeedForward(down, NOTHING_BETWEEN)
    inside = {down.name, *seen, *(op.name for op in between)}
    for name in seen:
        others = [op for op, _ in readers[name] if op.name not in inside]
        if others or name in part.outputs:
            where = f"at {others[0].source}" if others else "as a result"
            return NoFeedForward(down, f"what stands before it is read elsewhere too, {where}")
    ordered = sorted(between, key=lambda op: order[op.name])
    places = {name: place for place, (name, _) in enumerate(firsts)}
    steps: list[Step] = []
    for op in ordered:
        attrs = {k: v for k, v in op.attrs.items() if k != "torch"}
        steps.append((op.kind, tuple(places[n] for n in op.inputs), attrs))
        places[op.name] = len(firsts) + len(steps) - 1
    return FeedForward(tuple(first for _, first in firsts), tuple(ordered), down, tuple(steps))


def _first_product(
    op: Op, tensors: Mapping[str, Tensor], makers: Mapping[str, Op]
) -> tuple[Op, str] | None:
    """The product with a matrix of the model that an op is, or adds a bias to."""
    bias = ""
    if op.kind == "add" and len(op.inputs) == 2:
        added, made = tensors[op.inputs[1]], makers.get(op.inputs[0])
        if added.role != "parameter" or len(added.shape) != 1 or made is None:
            return None
        op, bias = made, added.name
    if op.kind not in _PRODUCTS or tensors[op.inputs[1]].role != "parameter":
        return None
    return op, bias


def _joined(part: Graph, chunks: int) -> Graph:
    known = [each for each in feed_forwards(part) if isinstance(each, FeedForward)]
    if not known:
        return part
    made = {each.down.name: _op(each, chunks) for each in known}
    gone = {name for each in known for name in _inner(each)}
    ops = tuple(made.get(op.name, op) for op in part.ops if op.name not in gone)
    tensors = {name: tensor for name, tensor in part.tensors.items() if name not in gone}
    return replace(part, ops=ops, tensors=tensors)


def _inner(each: FeedForward) -> Iterator[str]:
    """What is not there any more."""
    for op in each.between:
        yield op.name
    for up, _ in each.ups:
        yield up.name
    readers = {name for op in each.between for name in op.inputs} | {each.down.inputs[0]}
    yield from readers - {op.name for op in each.between}


def _op(each: FeedForward, chunks: int) -> Op:
    """Operands: the tensor, the matrices of the first products, that of the last, biases."""
    biases: Sequence[str] = [bias for _, bias in each.ups if bias]
    ups = [op.inputs[1] for op, _ in each.ups]
    inputs = (each.ups[0][0].inputs[0], *ups, each.down.inputs[1], *biases)
    attrs = {
        "ups": len(ups),
        "biases": tuple(place for place, (_, bias) in enumerate(each.ups) if bias),
        "gate": each.steps,
        "transposed": each.down.kind == "linear_t",
        "chunks": chunks,
    }
    return replace(each.down, kind=KIND, inputs=inputs, attrs=attrs)
