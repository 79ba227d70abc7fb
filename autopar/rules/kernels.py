"""By which kernels a graph's ops run: each named in an op's attr, and ops that one runs made one.

    attention                      ->  attention; kernel=cudnn
    silu or gelu (by tanh), mul    ->  gated_activation; kernel=triton
    cross_entropy                  ->  the same, kernel=triton, for the loss head that is made of it

A kernel is chosen for the op that gives the last result, by its key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.nouns.graph import Graph, Op, with_ops
from autopar.nouns.kernels import kernel_of, kernel_text
from autopar.nouns.layout import alternatives
from autopar.nouns.plan import key
from autopar.rules.implementations.kernels import ATTR, GATED, LOSS_HEAD, kernels_of
from autopar.rules.loss_heads import LossHead, loss_heads

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu_tanh"}
"""Of the runtime's call, by the op."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where kernels may run.

    key:   of the op that gives the result.
    kind:  of the kernels that may run there.
    op:    what a kernel computes there.
    first: the op that it takes with it, if any.
    part:  the top of the graph, or the body of a block, in which it stands.
    """

    key: str
    kind: str
    op: Op
    first: Op | None
    part: Graph


def sites(graph: Graph) -> Iterator[Site]:
    """Of the top of ``graph`` and of its blocks' bodies."""
    for scope, part in ((None, graph), *((name, b.body) for name, b in graph.blocks.items())):
        yield from _sites(part, scope)


def with_kernels(graph: Graph, kernels: Mapping[str, str]) -> Graph:
    """The graph whose ops run by ``kernels``, as `autopar.nouns.kernels` has them, by the key of a
    `Site`. What is none is left as it is: see `wrong_kernels`."""
    if not kernels:
        return graph
    blocks = {
        name: replace(block, body=_with_kernels(block.body, name, kernels))
        for name, block in graph.blocks.items()
    }
    return replace(_with_kernels(graph, None, kernels), blocks=blocks)


def kernels_in(graph: Graph) -> dict[str, str]:
    """The kernels that ops run by. A cross-entropy names one for the loss head that may be made of
    it, and runs by none."""
    named = (s for s in sites(graph) if s.op.attrs.get(ATTR) and s.op.kind == s.kind)
    return {s.key: kernel_text(s.kind, str(s.op.attrs[ATTR])) for s in named}


def wrong_kernels(graph: Graph, kernels: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(key, why not) of those that cannot run there; the graph is a model's own, at the plan's
    precision."""
    at = {site.key: site for site in sites(graph)}
    for where, text in kernels.items():
        kind, name = kernel_of(text)
        site = at.get(where)
        rows = {row.text: row for row in kernels_of(site.kind)} if site is not None else {}
        if site is not None and text in rows:
            if against := rows[text].computes(site.op, site.part.tensors):
                yield where, f"cannot be: {against}"
        elif site is None or not (":" in name and kind == site.kind):
            yield where, f"may be {alternatives(rows) or 'nothing: no kernel runs it'}"
        # else a user's, whom the model's file registers


def only_kernels(graph: Graph, kernels: Mapping[str, str]) -> Graph:
    """The graph of which no other op names a kernel; those stay as one that are made one."""
    others = {site.op.name for site in sites(graph) if site.key not in kernels}

    def of(part: Graph, op: Op) -> Op:
        del part
        if op.kind == GATED or ATTR not in op.attrs or op.name not in others:
            return op
        return replace(op, attrs={n: v for n, v in op.attrs.items() if n != ATTR})

    return with_ops(graph, of) if others else graph


def _sites(part: Graph, scope: str | None) -> Iterator[Site]:
    readers = part.consumers()
    makers = {name: op for op in part.ops for name in op.outputs}
    heads = {h.loss.name for h in loss_heads(part) if isinstance(h, LossHead)}
    for op in part.ops:
        if op.kind in ("attention", GATED, LOSS_HEAD):
            yield Site(key(scope, op.name), op.kind, op, None, part)
        elif op.name in heads:
            yield Site(key(scope, op.name), LOSS_HEAD, op, None, part)
        elif op.kind == "mul" and len(op.inputs) == 2:
            for place, name in enumerate(op.inputs):
                first = makers.get(name)
                alone = len(readers[name]) == 1 and name not in part.outputs
                if first is not None and alone and _gates(part, first, op.inputs[1 - place]):
                    yield Site(key(scope, op.name), GATED, _gated(first, op, place), first, part)
                    break


def _gates(part: Graph, first: Op, up: str) -> bool:
    """Whether it is an activation of a tensor like ``up``."""
    if first.kind not in _ACTIVATIONS:
        return False
    if first.kind == "gelu" and first.attrs.get("approximate", "none") != "tanh":
        return False
    gate, other = part.tensors[first.inputs[0]], part.tensors[up]
    return gate.shape == other.shape and gate.dtype == other.dtype and gate.name != up


def _gated(first: Op, last: Op, place: int) -> Op:
    attrs = {"activation": _ACTIVATIONS[first.kind]}
    return replace(last, kind=GATED, inputs=(first.inputs[0], last.inputs[1 - place]), attrs=attrs)


def _with_kernels(part: Graph, scope: str | None, kernels: Mapping[str, str]) -> Graph:
    at = {s.op.name: s for s in _sites(part, scope) if s.key in kernels}
    if not at:
        return part
    inside = {s.first.name for s in at.values() if s.first is not None}
    ops = []
    for op in part.ops:
        site = at.get(op.name)
        if site is not None:
            name = kernel_of(kernels[site.key])[1]
            ops.append(replace(site.op, attrs={**site.op.attrs, ATTR: name}))
        elif op.name not in inside:
            ops.append(op)
    tensors = {name: t for name, t in part.tensors.items() if name not in inside}
    return replace(part, tensors=tensors, ops=tuple(ops))
