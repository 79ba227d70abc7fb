"""Activations over one microbatch, from the lives of its tensors.

A tensor lives from the op that makes it to its last reader, or to the backward of the last op that
saves it; a gradient from the backward of its first reader to that of its producer. Blocks repeat,
so the peak lies in the last call of some block, or outside: while call i runs backward the saved
tensors of the calls before it are still there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.lowering.issued import internal_collectives
from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.nouns import costly
from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.mesh import Mesh
from autopar.nouns.recompute import COMPUTE, FULL, NONE, POLICIES, SELECTIVE, keeps_routes
from autopar.pricing.units.places import Places, bytes_of, later_bytes, moves, roots
from autopar.pricing.units.walk import Life, Walk
from autopar.rules.held_bytes import kept_bytes
from autopar.rules.implementations.table import KEPT_ROWS
from autopar.rules.resharding import SHIFT


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
    walk = Walk.of(places)
    for policy in POLICIES:
        inner = {name: by_policy[policy] for name, by_policy in bodies.items()}
        left = {name: of[policy] for name, of in kept.items()}
        lives[policy] = walk.life(inner, left)
    return lives


def kept_by_policy(body: Lowered, lives: Mapping[str, Life]) -> dict[str, int]:
    """Bytes that one call of a block leaves for its backward, by recompute policy."""
    moved, routes = moved_bytes(body), routes_bytes(body)
    routes += sum(slices_bytes(body, op) for op in body.ops)
    return {
        NONE: lives[NONE].saved,
        SELECTIVE: routes + moved + products_bytes(body),
        COMPUTE: routes + moved + rings_bytes(body),
        FULL: routes,
    }


def slices_bytes(body: Lowered, op: LoweredOp) -> int:
    """Of a slice of sequences what its attention keeps whatever runs again: keys and values, which
    later slices read, and what these give to their gradients."""
    if KEPT_ROWS not in op.implementations:
        return 0
    pair = [o.name for o in op.operands[1:3]]
    return later_bytes(body, op) + sum(
        bytes_of(body, n, o.wanted) for n, o in zip(pair, op.operands[1:3], strict=True)
    )


def saved_parameters(lowered: Lowered) -> dict[str, int]:
    """Elements of parameters that ops keep for backward, by stored dtype; once for each op.

    Where they are used in another dtype than they are stored in, each op keeps a cast of its own.
    """
    numel_of: dict[str, int] = {}
    root = roots(lowered)
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


def waiting_bytes(body: Lowered) -> int:
    """Gradients that a backward in two parts keeps for its second: those that come to ops which
    read a trained parameter (`autopar.runtime.pytorch.pipeline.split_backward`)."""
    tensors, made = body.graph.tensors, dict[str, int]()
    for op in body.ops:
        read = (tensors[name] for name in op.op.inputs)
        if op.bound is None or not any(t.role == "parameter" and t.differentiable for t in read):
            continue
        for name in op.op.outputs:
            if tensors[name].differentiable and tensors[name].role == "activation":
                made[name] = bytes_of(body, name, body.tensors[name].produced)
    return sum(made.values())


def moved_bytes(body: Lowered) -> int:
    """Results of a block's forward collectives on activations."""
    kept = 0
    for value in body.tensors.values():
        if moves(value.steps) and value.tensor.differentiable:
            kept += bytes_of(body, value.tensor.name, value.shared)
    for op in body.ops:
        for operand in op.operands:
            tensor = body.graph.tensors[operand.name]
            if tensor.role == "activation" and moves(operand.steps):
                kept += bytes_of(body, operand.name, operand.wanted)
    return kept


def routes_bytes(body: Lowered) -> int:
    """The best few of rows, which blocks with experts find once
    (`autopar.runtime.pytorch.recomputing`)."""
    if not keeps_routes(body.graph):
        return 0
    best = [op for op in body.ops if op.op.kind == "aten::topk"]
    return sum(bytes_of(body, n, body.tensors[n].produced) for op in best for n in op.op.outputs)


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
    """Whether keys and values pass around a ring in it, or are those of slices before."""
    if op.bound is None:
        return False
    return KEPT_ROWS in op.implementations or any(
        inside.collective.kind == SHIFT for inside in internal_collectives(op, mesh)
    )


def rings_bytes(body: Lowered) -> int:
    """What attention around rings gives, and keeps beside it: that does not run again where the
    results of collectives are kept (`autopar.runtime.pytorch.ring_results`)."""
    kept = 0
    for op in body.ops:
        if is_ring(op, body.mesh):
            assert op.bound is not None
            kept += sum(bytes_of(body, n, body.tensors[n].produced) for n in op.op.outputs)
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
            kept += sum(bytes_of(body, n, body.tensors[n].produced) for n in op.op.outputs)
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
