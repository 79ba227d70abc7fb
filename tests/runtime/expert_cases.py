"""Experts cut over axes in every way that `experts` knows, beside all of them written out.

A rank's piece of a case is run, and its result and gradients are put together here: where tokens
are its own they stand beside those of others, where they are whole its numbers are a part of a sum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.nouns.mesh import Mesh
from autopar.runtime.pytorch.experts import experts

WIDTH, INNER, EXPERTS, EACH = 5, 8, 8, 2
NAMES = ("x", "weights", "up", "down", "up_bias", "down_bias")
ROUTINGS = ("drawn", "one hot expert", "own experts", "one rank's experts", "every second expert")
TOKENS = {"even": 4, "odd": 5}


@dataclass(frozen=True)
class Layout:
    """What each axis of ``mesh`` does: experts gathered, rows dispatched, inner width, of which
    halves are traded, tokens with all matrices whole."""

    mesh: Mesh
    held: tuple[str, ...] = ()
    dispatch: tuple[str, ...] = ()
    width: tuple[str, ...] = ()
    halves: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()

    @property
    def of_tokens(self) -> tuple[str, ...]:
        """The axes along which ranks have tokens of their own."""
        return self._in_order(self.dispatch + self.plain)

    @property
    def of_experts(self) -> tuple[str, ...]:
        return self._in_order(self.held + self.dispatch)

    def _in_order(self, axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(a for a in self.mesh.axes if a in axes)

    def place(self, rank: int, axes: Sequence[str]) -> tuple[int, int]:
        """(place, of how many) along ``axes``, the first varying slowest."""
        place = 0
        for axis in axes:
            size = self.mesh.size(axis)
            place = place * size + rank // self.mesh.stride(axis) % size
        return place, math.prod(self.mesh.size(a) for a in axes)


def layouts() -> dict[str, Layout]:
    """By name; those of four ranks and fewer run in real processes too."""
    pair, four, square = Mesh.parse("ep=2"), Mesh.parse("ep=4"), Mesh.parse("ep=2 x tp=2")
    cube = Mesh.parse("cp=2 x ep=2 x tp=2")
    ep, tp = ("ep",), ("tp",)
    return {
        "gathered over 2": Layout(pair, held=ep),
        "gathered over 4": Layout(four, held=ep),
        "gathered over 2 x 2": Layout(square, held=("ep", "tp")),
        "dispatched over 2": Layout(pair, dispatch=ep),
        "dispatched over 4": Layout(four, dispatch=ep),
        "dispatched over 2 x 2": Layout(square, dispatch=("ep", "tp")),
        "gathered outside, dispatched inside": Layout(square, held=ep, dispatch=tp),
        "dispatched outside, gathered inside": Layout(square, held=tp, dispatch=ep),
        "dispatched, width": Layout(square, dispatch=ep, width=tp),
        "gathered, width": Layout(square, held=tp, width=ep),
        "dispatched, tokens": Layout(square, dispatch=tp, plain=ep),
        "gathered, tokens": Layout(square, held=ep, plain=tp),
        "dispatched over 2 x 2 x 2": Layout(cube, dispatch=("cp", "ep", "tp")),
        "gathered in the middle": Layout(cube, held=ep, dispatch=("cp", "tp")),
        "dispatched in the middle": Layout(cube, held=("cp", "tp"), dispatch=ep),
        "gathered, dispatched, width": Layout(cube, held=("cp",), dispatch=ep, width=tp),
        "halves over 2": Layout(pair, halves=ep),
        "halves over 4": Layout(four, halves=ep),
        "dispatched, halves": Layout(square, dispatch=ep, halves=tp),
        "gathered, halves": Layout(square, held=tp, halves=ep),
        "tokens, halves": Layout(square, plain=ep, halves=tp),
        "gathered, dispatched, halves": Layout(cube, held=("cp",), dispatch=ep, halves=tp),
    }


@dataclass(frozen=True)
class Form:
    """How matrices are stored, and the gate between them."""

    reads: str = "halves"
    transposed: bool = False
    bias: bool = False

    @property
    def gate(self) -> Callable[..., Tensor]:
        return torch.tanh if self.reads == "all" else _gated


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


READS, EITHER = ("all", "halves", "pairs"), (False, True)
FORMS = [Form(*of) for of in itertools.product(READS, EITHER, EITHER)]


@dataclass(frozen=True)
class Case:
    """``tokens``: of each place along the axes that split them. ``index``: of all, by place.
    ``pieces``: in which a rank's tokens travel."""

    layout: Layout
    form: Form
    tokens: tuple[int, ...]
    index: Tensor
    pieces: int = 1


def case(layout: Layout, form: Form, routing: str, tokens: str = "even") -> Case:
    """Tokens are "even" among ranks, "odd", or "none" on every second rank."""
    _, ways = layout.place(0, layout.of_tokens)
    if tokens == "none":
        numbers = tuple(6 * (i % 2) for i in range(ways)) if ways > 1 else (6,)
    else:
        numbers = tuple(TOKENS[tokens] + i * (tokens == "odd") for i in range(ways))
    if layout.width:
        form = replace(form, bias=False)
    if layout.halves:
        form = replace(form, bias=False, reads="halves")
    draw = torch.Generator().manual_seed(len(routing) + sum(numbers))
    index = torch.randint(0, EXPERTS, (sum(numbers), EACH), generator=draw)
    if routing == "one hot expert":
        index[:] = 3
    elif routing == "own experts":
        _, pieces = layout.place(0, layout.of_experts)
        own = torch.arange(ways).repeat_interleave(torch.tensor(numbers)).unsqueeze(1)
        index = (own % pieces) * (EXPERTS // pieces) + index % (EXPERTS // pieces)
    elif routing == "one rank's experts":
        index = EXPERTS - 1 - index % (EXPERTS // 8)
    elif routing == "every second expert":
        index = index // 2 * 2
    return Case(layout, form, numbers, index)


def drawn(case: Case) -> dict[str, Tensor]:
    """The whole tensors, and under "grad" the gradient of the result."""
    draw = torch.Generator().manual_seed(1)
    n, f = sum(case.tokens), INNER
    wide = f if case.form.reads == "all" else 2 * f
    shapes: dict[str, tuple[int, ...]] = {
        "x": (n, WIDTH),
        "weights": (n, EACH),
        "up": (EXPERTS, wide, WIDTH),
        "down": (EXPERTS, WIDTH, f),
        "up_bias": (EXPERTS, wide),
        "down_bias": (EXPERTS, WIDTH),
        "grad": (n, WIDTH),
    }
    made = {k: torch.randn(s, generator=draw, dtype=torch.float64) for k, s in shapes.items()}
    if not case.form.bias:
        del made["up_bias"], made["down_bias"]
    return made


def whole(case: Case) -> dict[str, Tensor]:
    """Result and gradients, written out: a matrix for every route."""
    given = drawn(case)
    leaves = {k: v.requires_grad_() for k, v in given.items() if k != "grad"}
    h = torch.einsum("nd,nkgd->nkg", leaves["x"], leaves["up"][case.index])
    if case.form.bias:
        h = h + leaves["up_bias"][case.index]
    if case.form.reads == "pairs":
        h = case.form.gate(h[..., 0::2], h[..., 1::2])
    else:
        h = case.form.gate(*h.chunk(1 if case.form.reads == "all" else 2, dim=-1))
    h = torch.einsum("nkf,nkdf->nkd", h, leaves["down"][case.index])
    if case.form.bias:
        h = h + leaves["down_bias"][case.index]
    result = torch.einsum("nkd,nk->nd", h, leaves["weights"])
    torch.autograd.backward(result, given["grad"])
    return {"result": result.detach(), **{k: _grad(v) for k, v in leaves.items()}}


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None, "a gradient that is None"
    return leaf.grad


def own_part(
    case: Case, rank: int, around: Callable[..., Tensor] | None = None
) -> dict[str, Tensor]:
    """Result and gradients of a rank, which computes in its own mesh; ``around``: a function that
    calls the one that it is given with tensors."""
    given = {k: v[_of(case, rank, k)] for k, v in drawn(case).items()}
    for name in ("up", "down", "up_bias"):
        if name in given:
            given[name] = _narrowed(case, rank, name, given[name])
    if case.form.transposed:
        given |= {k: given[k].transpose(1, 2).contiguous() for k in ("up", "down")}
    leaves = {k: v.clone().requires_grad_() for k, v in given.items() if k != "grad"}
    index = case.index[_of(case, rank, "x")]

    def run(*tensors: Tensor) -> Tensor:
        x, weights, *rest = tensors
        made: Tensor = experts(
            *(x, index, weights, *rest),
            gate=case.form.gate,
            reads=case.form.reads,
            transposed=case.form.transposed,
            held=case.layout.held,
            dispatch=case.layout.dispatch,
            halves=case.layout.halves,
            pieces=case.pieces,
        )
        return made

    result = around(run, *leaves.values()) if around is not None else run(*leaves.values())
    assert result.shape == (len(index), WIDTH)
    torch.autograd.backward(result, given["grad"])
    made = {"result": result.detach(), **{k: _grad(v) for k, v in leaves.items()}}
    if case.form.transposed:
        made |= {k: made[k].transpose(1, 2) for k in ("up", "down")}
    return made


def _of(case: Case, rank: int, name: str) -> slice:
    """What of dim 0 a rank has."""
    if name in ("up", "down", "up_bias", "down_bias"):
        place, ways = case.layout.place(rank, case.layout.of_experts)
        return slice(place * EXPERTS // ways, (place + 1) * EXPERTS // ways)
    place, _ = case.layout.place(rank, case.layout.of_tokens)
    first = sum(case.tokens[:place])
    return slice(first, first + case.tokens[place])


def _columns(case: Case, rank: int, name: str) -> Tensor:
    """What of the inner width's entries in matrix ``name`` a rank has: of halves, of each."""
    place, ways = case.layout.place(rank, case.layout.width + case.layout.halves)
    if case.layout.halves and name != "down":
        return torch.arange(2 * INNER).chunk(ways)[place]
    own = torch.arange(INNER).chunk(ways)[place]
    if name == "down" or case.form.reads == "all":
        return own
    if case.form.reads == "pairs":
        return torch.stack([2 * own, 2 * own + 1], 1).reshape(-1)
    return torch.cat([own, own + INNER])


def _narrowed(case: Case, rank: int, name: str, piece: Tensor) -> Tensor:
    dim = 2 if name == "down" else 1
    return piece.index_select(dim, _columns(case, rank, name))


def together(case: Case, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Every rank's numbers added at the places in the whole that they are of."""
    given = drawn(case)
    made = {"result": torch.zeros_like(given["grad"])}
    made |= {k: torch.zeros_like(v) for k, v in given.items() if k != "grad"}
    for rank, part in enumerate(parts):
        for name, value in part.items():
            into = made[name][_of(case, rank, name)]
            if name in ("up", "down", "up_bias"):
                into.index_add_(2 if name == "down" else 1, _columns(case, rank, name), value)
            else:
                into += value
    return made


def furthest(case: Case, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Of result and gradients the relative difference from the whole computation."""
    wanted, got = whole(case), together(case, parts)
    assert wanted.keys() == got.keys()
    return {
        name: float((got[name] - right).norm() / right.norm().clamp_min(1e-30))
        for name, right in wanted.items()
    }
