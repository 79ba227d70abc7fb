"""Ring attention on ranks simulated in one process, beside attention of whole tensors.

Shifts are exchanges through the table of `tests.emit.simulated`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.nouns.mesh import Mesh
from autopar.runtime.pytorch import transport
from autopar.runtime.pytorch.ring_attention import ring_attention
from autopar.runtime.pytorch.zigzag import own_zigzag, to_zigzag
from tests.emit import simulated

RING: Mapping[int, str] = {1: "cp", 2: "cp", 3: "cp", 4: "cp"}


def begin_shift(x: Tensor, axis: str, by: int = 1) -> Tensor:
    """`transport.begin_shift` on simulated ranks."""
    world = simulated._here.world
    world.note("shift", axis, x.numel(), x.element_size())
    pieces: list[Tensor] = world.exchange(x.detach().reshape(-1).clone(), axis)
    return pieces[(transport.index(axis) - by) % len(pieces)].clone()


@contextmanager
def shifts() -> Iterator[None]:
    """Inside, simulated ranks shift too."""
    before = transport.begin_shift, transport.wait
    try:
        transport.begin_shift, transport.wait = begin_shift, lambda x: x
        yield
    finally:
        transport.begin_shift, transport.wait = before


@dataclass(frozen=True)
class Case:
    """Sizes of whole tensors, and what is asked; ``mesh`` is the ring, all of it."""

    mesh: str = "cp=4"
    s: int = 16
    t: int = 0
    """0: as many as ``s``."""
    h: int = 4
    g: int = 2
    d: int = 8
    e: int = 8
    b: int = 2
    causal: bool = False
    order: str = "contiguous"
    window: int | None = None
    mask: str = ""
    scale: float | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        return Mesh.parse(self.mesh).axes

    @property
    def ways(self) -> int:
        return Mesh.parse(self.mesh).device_count


@dataclass(frozen=True)
class Results:
    """The result and gradients of whole tensors."""

    out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None

    def items(self) -> dict[str, Tensor]:
        named = {"out": self.out, "q": self.q, "k": self.k, "v": self.v}
        return named if self.mask is None else {**named, "mask": self.mask}


def operands(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """q, k, v, the result's gradient and, where the case has one, a mask in natural order."""
    draw = torch.Generator().manual_seed(11)
    t = case.t or case.s

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    made = {
        "q": normal(case.b, case.h, case.s, case.d),
        "k": normal(case.b, case.g, t, case.d),
        "v": normal(case.b, case.g, t, case.e),
        "grad": normal(case.b, case.h, case.s, case.e),
    }
    seen = torch.rand((case.b, 1, case.s, t), generator=draw) > 0.4
    seen[..., 0] = True
    dead = seen.clone()
    dead[0, :, 3] = False
    dead[:, :, case.s - 1] = False
    late = seen.clone()
    late[:, :, :, : t // 2] = False  # nothing is seen of whole pieces
    masks = {
        "pairs": seen,
        "two dims": seen[0, 0],
        "keys": seen[:, :, :1],
        "dead rows": dead,
        "late": late,
        "added": normal(case.b, case.h, case.s, t),
        "added, dead rows": torch.zeros(dead.shape, dtype=dtype).masked_fill(~dead, -torch.inf),
        "lowest": normal(1, case.h, case.s, t).masked_fill(~dead, torch.finfo(torch.float32).min),
        "column alone": normal(case.h, case.s, 1),
        "trained": normal(1, case.h, case.s, t),
        "trained, of keys": normal(case.b, 1, 1, t),
    }
    return {**made, "mask": masks[case.mask]} if case.mask else made


def whole(case: Case, given: Mapping[str, Tensor]) -> Results:
    """On one device, by torch's products and softmax, whose gradients are exact for each mask."""
    q, k, v = (given[name].detach().clone().requires_grad_() for name in "qkv")
    mask = given.get("mask")
    trained = case.mask.startswith("trained")
    leaf = mask.clone().requires_grad_() if trained and mask is not None else None
    mask = leaf if leaf is not None else mask
    s, t = q.shape[2], k.shape[2]
    if case.causal:
        back = torch.arange(s)[:, None] - torch.arange(t)
        seen = (back >= 0) & (back < (case.window or s))
        if mask is None:
            mask = seen
        else:
            mask = mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, -torch.inf)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = F.scaled_dot_product_attention(
            q, k, v, mask, scale=case.scale, enable_gqa=case.h != case.g
        )
    out.backward(given["grad"])
    grads = [x.grad for x in (q, k, v)]
    return Results(out.detach(), *grads, None if leaf is None else leaf.grad)  # type: ignore[arg-type]


def cut(x: Tensor, dim: int, case: Case, place: int) -> Tensor:
    """The piece of rank ``place``; a view where the order is contiguous."""
    if case.order == "zigzag":
        return own_zigzag(x, dim, place, case.ways)
    return x.chunk(case.ways, dim)[place]


def own_mask(mask: Tensor, case: Case, place: int) -> Tensor:
    """This rank's rows and all columns, in the order of the pieces."""
    if case.order == "zigzag" and mask.shape[-1] > 1:
        mask = to_zigzag(mask, -1, case.ways)
    return mask if mask.shape[-2] == 1 else cut(mask, -2, case, place)


def around(case: Case, given: Mapping[str, Tensor]) -> tuple[Results, simulated.World]:
    """On simulated ranks: results put together, and what was issued."""
    q, k, v = (given[name].detach().clone().requires_grad_() for name in "qkv")
    mask = given.get("mask")
    trained = case.mask.startswith("trained")
    if mask is not None and trained:
        mask = mask.clone().requires_grad_()

    def task(here: Any) -> Sequence[Tensor]:
        place = here.index(*case.axes)
        pieces = [cut(x, 2, case, place).detach().clone().requires_grad_() for x in (q, k, v)]
        mine = None if mask is None else own_mask(mask, case, place).detach().clone()
        if mine is not None and trained:
            mine.requires_grad_()
        out = ring_attention(
            *pieces, mine, case.causal, case.scale,
            ring=case.axes, order=case.order, window=case.window,
        )  # fmt: skip
        out.backward(cut(given["grad"], 2, case, place))
        leaves = [*pieces, *([mine] if mine is not None and trained else [])]
        return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]

    with shifts():
        by_rank, world = simulated.run(Mesh.parse(case.mesh), task)
    joined = list(joined_of(case, [r[:4] for r in by_rank]))
    dmask = None
    if trained and mask is not None:
        # Through the cuts, whose gradients put each rank's where it belongs.
        for place in range(case.ways):
            own_mask(mask, case, place).backward(by_rank[place][4])
        dmask = mask.grad
    return Results(*joined, dmask), world


def joined_of(case: Case, by_rank: Sequence[Sequence[Tensor]]) -> Iterator[Tensor]:
    """Pieces of each rank put together in natural order."""
    for pieces in zip(*by_rank, strict=True):
        n = case.ways
        if case.order == "contiguous":
            yield torch.cat(pieces, 2)
        else:
            first = [p.chunk(2, 2)[0] for p in pieces]
            second = [p.chunk(2, 2)[1] for p in pieces]
            yield torch.cat([*first, *reversed(second)], 2)
            assert len(first) == n


def farthest(got: Results, expected: Results) -> dict[str, float]:
    """By name the distance over the norm of what is right."""
    right = expected.items()
    return {
        name: float((x.double() - right[name].double()).norm() / right[name].double().norm())
        for name, x in got.items().items()
    }
