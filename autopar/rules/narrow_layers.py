"""Which linear layers of a model may run in 8 bits at all, and why the others stay.

The head, embeddings, norms, routers and attention keep the dtype of compute, as published recipes
have them (DeepSeek-V3, arXiv:2412.19437, section 3.3.1; torchao leaves out the output layer).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.nouns.graph import Graph, Op
from autopar.nouns.plan import key
from autopar.nouns.recipes import ALIGNED
from autopar.rules.loss_heads import LossHead, loss_heads

LINEAR = ("linear", "linear_t")
FROM = ("float32", "bfloat16", "float16")
"""Dtypes that products are scaled from."""
_CHOOSES = ("topk", "top_k", "sort", "argsort", "argmax")
_ROUTED_BY = (1, 2)
"""Operands of `experts`: which expert, with what weight."""


@dataclass(frozen=True, slots=True)
class Stays:
    """Why a layer keeps the dtype of compute; ``sizes``: n and k, where these are why."""

    reason: str
    sizes: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.reason


def narrow_layers(graph: Graph) -> Iterator[tuple[str, Stays | None]]:
    """Of every linear layer its op key, and why it stays; None: it need not."""
    heads = _heads(graph)
    for name, block in graph.blocks.items():
        for op in block.body.ops:
            if op.kind in LINEAR:
                yield key(name, op.name), _stays(block.body, op)
    for op in graph.ops:
        if op.kind in LINEAR:
            head = Stays("the head") if op.name in heads else None
            yield key(None, op.name), head or _stays(graph, op)


def _heads(graph: Graph) -> frozenset[str]:
    """The products whose results are logits: the last one at the top, and those of losses."""
    last = [op.name for op in graph.ops if op.kind in LINEAR][-1:]
    return frozenset(
        [*last, *(h.linear.name for h in loss_heads(graph) if isinstance(h, LossHead))]
    )


def _stays(graph: Graph, op: Op) -> Stays | None:
    x, weight = (graph.tensors[name] for name in op.inputs[:2])
    readers = graph.consumers()
    if weight.role != "parameter" or len(weight.shape) != 2:
        return Stays("its weight is no matrix of parameters")
    if any(other.kind == "embedding" for other, _ in readers[weight.name]):
        return Stays("its weight is an embedding too")
    if x.dtype not in FROM:
        return Stays(f"it computes in {x.dtype}")
    if _routes(op, readers):
        return Stays("a router")
    n, k = weight.shape if op.kind == "linear" else weight.shape[::-1]
    if n % ALIGNED or k % ALIGNED:
        return Stays(f"{ALIGNED} does not divide both dims of its weight, {n} x {k}", (n, k))
    return None


def _routes(op: Op, readers: Mapping[str, list[tuple[Op, int]]]) -> bool:
    """Whether what the layer gives says where tokens go: the best few of it are found, or experts
    read it as such, before another product does."""
    queue, seen = [op.name], {op.name}
    while queue:
        for reader, place in readers[queue.pop()]:
            if reader.kind.rpartition("::")[2] in _CHOOSES:
                return True
            if reader.kind == "experts" and place in _ROUTED_BY:
                return True
            if reader.kind in (*LINEAR, "matmul", "einsum", "attention", "experts", "block"):
                continue
            new = [name for name in reader.outputs if name not in seen]
            seen.update(new)
            queue += new
    return False
