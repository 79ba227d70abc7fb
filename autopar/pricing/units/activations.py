"""Activations over one microbatch, from the lives of its tensors.

A tensor lives from the op that makes it to its last reader, or to the backward of the last op that
saves it; a gradient from the backward of its first reader to that of its producer. Blocks repeat,
so the peak lies in the last call of some block, or outside: while call i runs backward the saved
tensors of the calls before it are still there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.lowering.issued import internal_collectives
from autopar.lowering.lowered import Lowered, LoweredOp, Operand
from autopar.lowering.precision import HALF, OWN_CASTS
from autopar.nouns import costly
from autopar.nouns.graph import DTYPE_BYTES, Op
from autopar.nouns.mesh import Mesh
from autopar.nouns.recompute import COMPUTE, FULL, NONE, POLICIES, SELECTIVE, keeps_routes
from autopar.nouns.sharding import Sharding
from autopar.rules.resharding import SHIFT
from autopar.rules.work import kept_bytes, workspace_bytes


@dataclass(frozen=True, slots=True)
class Life:
    """One pass through a graph: ``saved`` at the end of forward, ``peak`` at the worst moment."""

    saved: int
    peak: int
    where: str


def activation_lives(
    lowered: Lowered,
    bodies: Mapping[str, Mapping[str, Life]] | None = None,
    kept: Mapping[str, Mapping[str, int]] | None = None,
) -> dict[str, Life]:
    """By recompute policy: one microbatch followed forward and backward; ``bodies``: of blocks,
    ``kept``: as `kept_by_policy` has it of each."""
    places = Places(lowered)
    if bodies is None:
        bodies = {name: activation_lives(body) for name, body in lowered.blocks.items()}
    if kept is None:
        kept = {name: kept_by_policy(lowered.blocks[name], of) for name, of in bodies.items()}
    lives: dict[str, Life] = {}
    for policy in POLICIES:
        inner = {name: by_policy[policy] for name, by_policy in bodies.items()}
        left = {name: of[policy] for name, of in kept.items()}
        lives[policy] = Walk(places, inner, left).run()
    return lives


def kept_by_policy(body: Lowered, lives: Mapping[str, Life]) -> dict[str, int]:
    """Bytes that one call of a block leaves for its backward, by recompute policy."""
    moved, routes = moved_bytes(body), routes_bytes(body)
    return {
        NONE: lives[NONE].saved,
        SELECTIVE: routes + moved + products_bytes(body),
        COMPUTE: routes + moved + rings_bytes(body),
        FULL: routes,
    }


def saved_parameters(lowered: Lowered) -> dict[str, int]:
    """Elements of parameters that ops keep for backward, by stored dtype; once for each op.

    Where they are used in another dtype than they are stored in, each op keeps a cast of its own.
    """
    numel_of: dict[str, int] = {}
    root = _roots(lowered)
    for op in lowered.ops:
        if op.bound is None or not any(
            lowered.graph.tensors[n].differentiable for n in op.op.outputs
        ):
            continue
        for i in op.bound.rule.saves:
            if i < len(op.operands):
                tensor = lowered.graph.tensors[root[op.op.inputs[i]]]
                if tensor.role == "parameter":
                    shape = op.operands[i].wanted.local_shape(
                        lowered.graph.tensors[op.op.inputs[i]].shape, lowered.mesh
                    )
                    numel_of[tensor.dtype] = numel_of.get(tensor.dtype, 0) + math.prod(shape)
    return numel_of


def moved_bytes(body: Lowered) -> int:
    """Results of a block's forward collectives on activations."""
    kept = 0
    for value in body.tensors.values():
        if moves(value.steps) and value.tensor.differentiable:
            kept += _bytes(body, value.tensor.name, value.shared)
    for op in body.ops:
        for operand in op.operands:
            tensor = body.graph.tensors[operand.name]
            if tensor.role == "activation" and moves(operand.steps):
                kept += _bytes(body, operand.name, operand.wanted)
    return kept


def routes_bytes(body: Lowered) -> int:
    """The best few of rows, which blocks with experts find once
    (`autopar.runtime.pytorch.recomputing`)."""
    if not keeps_routes(body.graph):
        return 0
    best = [op for op in body.ops if op.op.kind == "aten::topk"]
    return sum(_bytes(body, n, body.tensors[n].produced) for op in best for n in op.op.outputs)


def keeps_result(op: LoweredOp) -> bool:
    """Whether ``recompute=selective-op`` keeps what an op gives (`autopar.nouns.costly`)."""
    if op.bound is None:
        return False
    kind = op.op.kind
    if kind in costly.ATTENTION.kinds:
        return not op.op.attrs.get("dropout_p")
    by_matrix = kind == "matmul" and any(len(term) == 2 for term in op.bound.operands)
    convolved = kind.removeprefix("aten::").startswith(costly.CONVOLUTION.kinds)
    return by_matrix or convolved or kind in costly.BY_MATRIX.kinds


def is_ring(op: LoweredOp, mesh: Mesh) -> bool:
    """Whether keys and values pass around a ring in it."""
    if op.bound is None:
        return False
    return any(inside.collective.kind == SHIFT for inside in internal_collectives(op, mesh))


def rings_bytes(body: Lowered) -> int:
    """What attention around rings gives, and keeps beside it: that does not run again where the
    results of collectives are kept (`autopar.runtime.pytorch.ring_results`)."""
    kept = 0
    for op in body.ops:
        if is_ring(op, body.mesh):
            assert op.bound is not None
            kept += sum(_bytes(body, n, body.tensors[n].produced) for n in op.op.outputs)
            kept += sum(kept_bytes(op.bound, op.strategy, body.mesh))
    return kept


def products_bytes(body: Lowered) -> int:
    """Results of a block's ops that `keeps_result` names, with what attention keeps beside them."""
    kept = 0
    for op in body.ops:
        if keeps_result(op) and any(body.graph.tensors[n].differentiable for n in op.op.outputs):
            assert op.bound is not None
            if op.op.kind == "experts":
                kept += _expert_products_bytes(body, op)
                continue
            kept += sum(_bytes(body, n, body.tensors[n].produced) for n in op.op.outputs)
            kept += sum(kept_bytes(op.bound, op.strategy, body.mesh))
    return kept


def _expert_products_bytes(body: Lowered, op: LoweredOp) -> int:
    """What both products of all routes give."""
    tensors = [body.graph.tensors[o.name] for o in op.operands]
    (_, hidden), (tokens, routes), _, up = (
        o.wanted.local_shape(t.shape, body.mesh)
        for o, t in zip(op.operands[:4], tensors, strict=False)
    )
    wide = up[2 if op.op.attrs["transposed"] else 1]
    return tokens * routes * (wide + hidden) * DTYPE_BYTES[tensors[0].dtype]


class Places:
    """Where the tensors of one graph lie, and what of them outlives forward, under any policy.

    A place is a tensor's own storage by its name, or ``name->sharding`` of a copy for one reader.
    """

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.root = _roots(lowered)
        self.size = {
            name: _bytes(lowered, name, lowered.tensors[name].shared)
            for name in dict.fromkeys(self.root.values())
        }
        self.reads = [[self._read(operand) for operand in op.operands] for op in lowered.ops]
        self.makes = [[self.root[name] for name in op.op.outputs] for op in lowered.ops]
        self.saved = {
            place: size
            for place, size in self._saved()
            if lowered.block is None or not self._is_input(place)
        }

    def _read(self, operand: Operand) -> tuple[str, int]:
        """Place and bytes of what an op really reads: the shared copy or its own resharded one."""
        if moves(operand.steps):
            name, wanted = operand.name, operand.wanted
            return f"{name}->{wanted}", _bytes(self.lowered, name, wanted)
        root = self.root[operand.name]
        return root, self.size[root]

    def _saved(self) -> Iterator[tuple[str, int]]:
        """What outlives forward, with its bytes; one place may come twice."""
        tensors = self.lowered.graph.tensors
        for op, reads in zip(self.lowered.ops, self.reads, strict=True):
            if not any(tensors[n].differentiable for n in op.op.outputs):
                continue
            if op.bound is None:
                yield from reads
                continue
            for i in op.bound.rule.saves:
                if i < len(op.operands) and self.is_activation(op.op.inputs[i]):
                    yield self._kept(op.op, i, reads[i])
            kept = sum(kept_bytes(op.bound, op.strategy, self.lowered.mesh))
            if kept:
                yield f"{op.op.name} keeps", kept
            for i in op.bound.rule.saves_results:
                root = self.root[op.op.outputs[i]]
                yield root, self.size[root]

    def _kept(self, op: Op, position: int, read: tuple[str, int]) -> tuple[str, int]:
        """What is kept of an operand: float32 that meets a narrower stream takes its dtype first,
        and that copy is what the op sees."""
        tensors = self.lowered.graph.tensors
        operand, result = tensors[op.inputs[position]].dtype, tensors[op.outputs[0]].dtype
        if operand != "float32" or result not in HALF or op.kind in OWN_CASTS:
            return read
        place, size = read
        return f"{place}->{result}", size // DTYPE_BYTES[operand] * DTYPE_BYTES[result]

    def _is_input(self, place: str) -> bool:
        return place in self.lowered.graph.inputs

    def is_activation(self, name: str) -> bool:
        """Neither a parameter nor a buffer, nor a view of one."""
        return self.lowered.graph.tensors[self.root[name]].role not in ("parameter", "buffer")

    def is_temporary(self, place: str) -> bool:
        """Memory of this pass, if nothing saves it: no state, and no block's input."""
        if place not in self.lowered.tensors:
            return True
        if self.lowered.block is not None and self._is_input(place):
            return False
        return self.is_activation(place)


class Walk:
    """Live bytes along the ops of one graph; a block call is one op with an inner peak."""

    def __init__(self, places: Places, bodies: Mapping[str, Life], kept: Mapping[str, int]) -> None:
        self.places = places
        self.lowered = places.lowered
        self.bodies = bodies
        self.kept = kept
        self.peak = 0
        self.where = ""

    def run(self) -> Life:
        calls = (op.op.attrs["block"] for op in self.lowered.ops if op.bound is None)
        total_saved = sum(self.places.saved.values()) + sum(self.kept[name] for name in calls)
        self._forward()
        self._backward(total_saved)
        return Life(total_saved, self.peak, self.where)

    def _note(self, live: int, op: Op) -> None:
        if live > self.peak:
            self.peak, self.where = live, str(op.source)

    def _forward(self) -> None:
        places, saved = self.places, self.places.saved
        last = {place: i for i, reads in enumerate(places.reads) for place, _ in reads}
        held = 0  # saved storage made so far, and block calls' saved tensors
        temporary: dict[str, int] = {}
        seen: set[str] = set()
        for i, op in enumerate(self.lowered.ops):
            inner = 0
            made = [(root, places.size[root]) for root in places.makes[i]]
            for place, size in (*places.reads[i], *made):
                if place in saved:
                    held += size if place not in seen else 0
                    seen.add(place)
                elif places.is_temporary(place):
                    temporary.setdefault(place, size)
            held += saved.get(f"{op.op.name} keeps", 0)
            if op.bound is None:
                inner = self.bodies[op.op.attrs["block"]].peak
            else:
                inner = workspace_bytes(op.bound, op.strategy, self.lowered.mesh)
            self._note(held + sum(temporary.values()) + inner, op.op)
            if op.bound is None:
                held += self.kept[op.op.attrs["block"]]
            for place in [p for p in temporary if last.get(p, i) <= i]:
                del temporary[place]

    def _backward(self, total: int) -> None:
        places = self.places
        first: dict[str, int] = {}
        for i, op in enumerate(self.lowered.ops):
            read = [place for place, _ in places.reads[i]]
            for place in (*read, *places.makes[i], f"{op.op.name} keeps"):
                first.setdefault(place, i)
        tensors = self.lowered.graph.tensors
        held = total
        gradients: dict[str, int] = {}
        release: dict[int, int] = {}
        for place, size in places.saved.items():
            release[first.get(place, 0)] = release.get(first.get(place, 0), 0) + size
        for i in range(len(self.lowered.ops) - 1, -1, -1):
            op = self.lowered.ops[i]
            if any(tensors[n].differentiable for n in op.op.outputs):
                for name in op.op.inputs:
                    if tensors[name].differentiable and places.is_activation(name):
                        root = places.root[name]
                        gradients[root] = places.size[root]
            inner = 0
            if op.bound is None:
                block = op.op.attrs["block"]
                held -= self.kept[block]
                inner = self.bodies[block].peak
            self._note(held + sum(gradients.values()) + inner, op.op)
            held -= release.get(i, 0)
            for name in op.op.outputs:
                if places.root[name] == name:
                    gradients.pop(name, None)


def _roots(lowered: Lowered) -> dict[str, str]:
    root = {name: name for name in lowered.graph.tensors}
    for op in lowered.ops:
        if op.bound is not None and op.bound.rule.view and op.op.inputs:
            if not moves(op.operands[0].steps):
                for name in op.op.outputs:
                    if not moves(lowered.tensors[name].steps):
                        root[name] = root[op.op.inputs[0]]
    return root


def moves(steps: tuple[object, ...]) -> bool:
    return any(getattr(step, "forward", "none") != "none" for step in steps)


def _bytes(lowered: Lowered, name: str, sharding: Sharding) -> int:
    tensor = lowered.graph.tensors[name]
    return math.prod(sharding.local_shape(tensor.shape, lowered.mesh)) * DTYPE_BYTES[tensor.dtype]
