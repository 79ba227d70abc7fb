"""One process plays all ranks of a mesh: tensors dealt out by their shardings, and put together.

An op runs on each rank with the pieces that its strategy asks for, in plain torch. Special
implementations are played too: ranks that would talk share one autograd graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import DEFERRED, PARTIAL, WHOLE, Placement, Sharding
from autopar.rules.implementations.table import CAUSAL_ROWS, DISPATCH, HELD_EXPERTS
from autopar.rules.notation import BoundRule
from autopar.rules.strategies import Strategy, flows, shardings
from tests.rules.drawing import Case
from tests.rules.reference import Call, linear_logits, run

Coordinate = tuple[int, ...]
Pieces = dict[Coordinate, Tensor]

DUAL = {"R": WHOLE, "D": PARTIAL, "P": WHOLE}


def coordinates(mesh: Mesh) -> Iterator[Coordinate]:
    return itertools.product(*(range(n) for n in mesh.sizes))


def dual(sharding: Sharding, mesh: Mesh) -> Sharding:
    """How the gradient of a tensor lies: D is a partial sum, P is whole."""
    return Sharding.of((a, DUAL.get(p.kind, p)) for a in mesh.axes for p in (sharding.on(a),))


def bounds(size: int, ways: int, index: int) -> tuple[int, int]:
    """(start, length) of piece ``index``, as ``torch.chunk`` cuts."""
    step = -(-size // ways)
    start = min(index * step, size)
    return start, min(step, size - start)


def deal(tensor: Tensor, sharding: Sharding, mesh: Mesh, generator: torch.Generator) -> Pieces:
    """The tensor on every rank. Partial sums are random parts that add up to it."""
    pieces: Pieces = {(): tensor}
    for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
        placement = sharding.on(axis)
        pieces = {
            (*at, i): part
            for at, piece in pieces.items()
            for i, part in enumerate(_parts(piece, placement, size, generator))
        }
    return pieces


def _parts(
    piece: Tensor, placement: Placement, ways: int, generator: torch.Generator
) -> list[Tensor]:
    if placement.kind == "S":
        cuts = [bounds(piece.shape[placement.dim], ways, i) for i in range(ways)]
        return [piece.narrow(placement.dim, *cut) for cut in cuts]
    if placement.kind == "P":
        shape = (ways - 1, *piece.shape)
        drawn = torch.rand(shape, generator=generator, dtype=torch.double) - 0.5
        return [piece - drawn.sum(0), *drawn]
    return [piece] * ways


def collect(
    pieces: Mapping[Coordinate, Tensor], sharding: Sharding, mesh: Mesh, what: str = ""
) -> Tensor:
    """The whole tensor. Fails, naming ``what``, where ranks that should hold the same do not."""
    now = dict(pieces)
    for axis, size in reversed(list(zip(mesh.axes, mesh.sizes, strict=True))):
        placement = sharding.on(axis)
        now = {
            at: _join(
                [now[*at, i] for i in range(size)], placement, f"{what}: ranks of {axis} differ"
            )
            for at in {k[:-1] for k in now}
        }
    return now[()]


def _join(parts: list[Tensor], placement: Placement, what: str) -> Tensor:
    if placement.kind == "S":
        return torch.cat(parts, placement.dim)
    if placement == PARTIAL:
        return torch.stack(parts).sum(0)
    assert placement in (WHOLE, DEFERRED), placement
    for part in parts[1:]:
        same(part, parts[0], what)
    return parts[0]


def same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal to 1e-12 of the largest number, or the assertion says where and by how much."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    if torch.equal(actual, expected):
        return
    assert actual.dtype == torch.double, what
    if actual.numel():
        error = float((actual - expected).abs().max())
        scale = 1 + float(expected.abs().max())
        assert error <= 1e-12 * scale, f"{what}: off by {error:.3g} (largest {scale - 1:.3g})"


def check(case: Case, bound: BoundRule, strategy: Strategy, mesh: Mesh) -> None:
    """Runs the op split by ``strategy`` and compares results and gradients with the whole op."""
    generator = torch.Generator().manual_seed(7)
    into, out = flows(case.op, case.nouns)
    wants, gives = shardings(bound, strategy, mesh, into, out)
    leaves: list[Pieces] = []
    for operand, want, grad in zip(case.operands, wants, into, strict=True):
        dealt = deal(operand.detach(), want, mesh, generator)
        leaves.append({c: t.clone().requires_grad_(grad) for c, t in dealt.items()})
    results = _run(case, bound, strategy, mesh, leaves, gives)
    place = f"{case.op.kind} [{bound}] {strategy} on {mesh}"
    for i, (whole, give) in enumerate(zip(case.results, gives, strict=True)):
        pieces = {c: by_place[i].detach() for c, by_place in results.items()}
        here = f"{place}, result {i}"
        same(collect(pieces, give, mesh, here), whole.detach(), here)
    if not any(into):
        return
    arriving, expected = case.backward
    gradients = _gradients(
        bound, strategy, mesh, leaves, results, arriving, gives, into, out, generator
    )
    flowing = [i for i, grad in enumerate(into) if grad]
    for i, whole in zip(flowing, expected, strict=True):
        here = f"{place}, gradient of operand {i} ({wants[i]})"
        same(collect(gradients[i], dual(wants[i], mesh), mesh, here), whole, here)


def _gradients(
    bound: BoundRule,
    strategy: Strategy,
    mesh: Mesh,
    leaves: list[Pieces],
    results: dict[Coordinate, tuple[Tensor, ...]],
    arriving: list[Tensor],
    gives: tuple[Sharding, ...],
    into: tuple[bool, ...],
    out: tuple[bool, ...],
    generator: torch.Generator,
) -> dict[int, Pieces]:
    """Gradients of all leaves, for result gradients that lie as the shardings say."""
    once = [i for i, a in enumerate(mesh.axes) if bound.rule.moves_inside(strategy.on(a))]
    outputs: list[Tensor] = []
    weights: list[Tensor] = []
    for i, give in enumerate(gives):
        if not out[i]:
            continue
        dealt = deal(arriving[i], dual(give, mesh), mesh, generator)
        for at, piece in dealt.items():
            # One graph through all ranks that talk: a result that is whole on them counts once.
            if any(at[k] and give.on(mesh.axes[k]) == WHOLE for k in once):
                continue
            outputs.append(results[at][i])
            weights.append(piece)
    places = [(i, at) for i, grad in enumerate(into) if grad for at in leaves[i]]
    grads = torch.autograd.grad(
        outputs, [leaves[i][at] for i, at in places], weights, materialize_grads=True
    )
    gradients: dict[int, Pieces] = {}
    for (i, at), grad in zip(places, grads, strict=True):
        gradients.setdefault(i, {})[at] = grad
    return gradients


def _run(
    case: Case,
    bound: BoundRule,
    strategy: Strategy,
    mesh: Mesh,
    leaves: list[Pieces],
    gives: tuple[Sharding, ...],
) -> dict[Coordinate, tuple[Tensor, ...]]:
    """The op on every rank."""
    chosen = strategy.implementations(bound.rule)
    if "synchronised" in chosen:
        return _batch_norm(case, bound, strategy, mesh, leaves)
    if "vocabulary_parallel" in chosen:
        return _cross_entropy(case, bound, strategy, mesh, leaves)
    if DISPATCH in chosen:
        return _dispatched(case, bound, strategy, mesh, leaves)
    results = {}
    for at in coordinates(mesh):
        shapes = tuple(
            _local(tuple(r.shape), give, mesh, at)
            for r, give in zip(case.results, gives, strict=True)
        )
        operands = tuple(pieces[at] for pieces in leaves)
        attrs = {**case.op.attrs, **_local_attrs(case, bound, strategy, mesh, at)}
        results[at] = run(case.op.kind, Call(attrs, operands, shapes))
    return results


def _local(
    shape: tuple[int, ...], sharding: Sharding, mesh: Mesh, at: Coordinate
) -> tuple[int, ...]:
    local = list(shape)
    for axis, index in zip(mesh.axes, at, strict=True):
        placement = sharding.on(axis)
        if placement.kind == "S":
            local[placement.dim] = bounds(local[placement.dim], mesh.size(axis), index)[1]
    return tuple(local)


def _local_attrs(
    case: Case, bound: BoundRule, strategy: Strategy, mesh: Mesh, at: Coordinate
) -> dict[str, Any]:
    """What implementations know beside their operands."""
    attrs: dict[str, Any] = {}
    for name in strategy.implementations(bound.rule):
        if name in (HELD_EXPERTS, DISPATCH):
            attrs["experts"] = _held(bound, strategy, mesh, at)
        elif name in ("masked_lookup", CAUSAL_ROWS):
            factor = "v" if name == "masked_lookup" else "s"
            start, size = 0, bound.factors[factor].size
            for axis, index in zip(mesh.axes, at, strict=True):
                if strategy.on(axis) == factor:
                    offset, size = bounds(size, mesh.size(axis), index)
                    start += offset
            attrs["first_row"] = start
        elif name == "global_count" and case.op.kind == "mean":
            x = case.operands[0]
            attrs["count"] = torch.Size([x.shape[d] for d in case.op.attrs["dims"]]).numel()
        elif name == "global_count":
            attrs["count"] = int((case.operands[1] != case.op.attrs["ignore_index"]).sum())
        elif name in ("local_groups", "local_repeats"):
            attr, factor = {"local_groups": ("groups", "g"), "local_repeats": ("repeats", "r")}[
                name
            ]
            ways = 1
            for axis, choice in strategy.choices:
                ways *= mesh.size(axis) if choice == factor else 1
            attrs[name] = case.op.attrs[attr] // ways
    return attrs


def _talk(bound: BoundRule, strategy: Strategy, mesh: Mesh, name: str) -> list[int]:
    """Positions of the axes over which a special implementation's collectives run."""
    return [mesh.axes.index(a) for a in strategy.implementations(bound.rule)[name]]


def _dispatched(
    case: Case, bound: BoundRule, strategy: Strategy, mesh: Mesh, leaves: list[Pieces]
) -> dict[Coordinate, tuple[Tensor, ...]]:
    """Every rank's tokens, by the experts of all ranks that send each other routes."""
    axes = _talk(bound, strategy, mesh, DISPATCH)
    results: dict[Coordinate, tuple[Tensor, ...]] = {}
    for at in coordinates(mesh):
        others = [c for c in coordinates(mesh) if _apart(at, c) <= {*axes}]
        x, index, weights = (pieces[at] for pieces in leaves[:3])
        matrices = [torch.cat([pieces[c] for c in others]) for pieces in leaves[3:]]
        held = [e for c in others for e in _held(bound, strategy, mesh, c)]
        attrs = {**case.op.attrs, "experts": held}
        operands = (x, index, weights, *matrices)
        results[at] = run(case.op.kind, Call(attrs, operands, (tuple(x.shape),)))
    return results


def _apart(one: Coordinate, other: Coordinate) -> set[int]:
    """The positions of the axes along which two ranks have other places."""
    return {k for k, (a, b) in enumerate(zip(one, other, strict=True)) if a != b}


def _held(bound: BoundRule, strategy: Strategy, mesh: Mesh, at: Coordinate) -> list[int]:
    """The experts of one rank."""
    start, size = 0, bound.factors["e"].size
    for axis, index in zip(mesh.axes, at, strict=True):
        if "e" in bound.splits(strategy.on(axis)):
            offset, size = bounds(size, mesh.size(axis), index)
            start += offset
    return list(range(start, start + size))


def _batch_norm(
    case: Case, bound: BoundRule, strategy: Strategy, mesh: Mesh, leaves: list[Pieces]
) -> dict[Coordinate, tuple[Tensor, ...]]:
    """Statistics from the sums and squares of all ranks that split the batch or the image."""
    axes = _talk(bound, strategy, mesh, "synchronised")
    x = leaves[0]
    dims = [d for d in range(x[next(iter(x))].dim()) if d != 1]

    def peers(at: Coordinate) -> list[Coordinate]:
        return [c for c in x if all(c[k] == at[k] for k in range(len(at)) if k not in axes)]

    results: dict[Coordinate, tuple[Tensor, ...]] = {}
    for at in coordinates(mesh):
        group = [x[c] for c in peers(at)]
        count = sum(p.numel() for p in group) // x[at].shape[1]
        mean = torch.stack([p.sum(dims) for p in group]).sum(0) / count
        shape = [-1 if d == 1 else 1 for d in range(x[at].dim())]
        apart = [((p - mean.view(shape)) ** 2).sum(dims) for p in group]
        deviation = (torch.stack(apart).sum(0) / count + case.op.attrs["eps"]).sqrt()
        y = (x[at] - mean.view(shape)) / deviation.view(shape)
        for i, pieces in enumerate(leaves[1:]):
            y = y * pieces[at].view(shape) if i == 0 else y + pieces[at].view(shape)
        results[at] = (y,)
    return results


def _cross_entropy(
    case: Case, bound: BoundRule, strategy: Strategy, mesh: Mesh, leaves: list[Pieces]
) -> dict[Coordinate, tuple[Tensor, ...]]:
    """Maximum, sum of exponentials and the label's logit over the ranks that split v."""
    axes = _talk(bound, strategy, mesh, "vocabulary_parallel")
    logits, labels, *held = leaves
    a = case.op.attrs
    if held:  # a loss head: the logits of every rank's own columns
        rows_of, weight, *bias = logits, *held
        logits = {
            at: linear_logits(a, rows_of[at], weight[at], *(b[at] for b in bias)) for at in rows_of
        }
    of_rows = held and not a.get("transposed")
    classes = case.operands[2 if held else 0].shape[0 if of_rows else 1]
    results: dict[Coordinate, tuple[Tensor, ...]] = {}
    for at in coordinates(mesh):
        group = [c for c in logits if all(c[k] == at[k] for k in range(len(at)) if k not in axes)]
        rows = torch.cat([logits[c] for c in sorted(group)], 1)
        assert rows.shape[1] == classes
        largest = torch.stack([logits[c].max(1).values for c in group]).max(0).values.detach()
        exponents = [(logits[c] - largest.unsqueeze(1)).exp().sum(1) for c in group]
        logsum = torch.stack(exponents).sum(0).log() + largest
        valid = labels[at] != a["ignore_index"]
        hot = F.one_hot(labels[at].clamp(min=0), classes).to(torch.double)
        loss = (1 - a["label_smoothing"]) * (logsum - (rows * hot).sum(1))
        loss = loss + a["label_smoothing"] * (logsum - rows.mean(1))
        total = loss * valid
        if a["reduction"] != "none":
            total = total.sum()
        if a["reduction"] == "mean":
            total = total / (case.operands[1] != a["ignore_index"]).sum()
        results[at] = (total,)
    return results
