"""Ring attention on ranks simulated in one process, beside attention of whole tensors.

Shifts are exchanges through the table of `tests.emit.simulated`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.nouns.mesh import Mesh
from autopar.runtime.pytorch import ranks as rank_state
from autopar.runtime.pytorch import transport
from autopar.runtime.pytorch.ring_attention import ring_attention
from autopar.runtime.pytorch.zigzag import from_gathered, own_zigzag
from tests.emit import simulated


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
    documents: tuple[int, ...] = ()
    """Lengths of those of the first sample; the others' are the same in the other order."""
    sinks: bool = False
    scale: float | None = None

    @property
    def trained(self) -> bool:
        """Whether the mask has a gradient."""
        return self.mask.startswith("trained")

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
    sinks: Tensor | None = None

    def items(self) -> dict[str, Tensor]:
        named = {"out": self.out, "q": self.q, "k": self.k, "v": self.v}
        more = {"mask": self.mask, "sinks": self.sinks}
        return named | {name: x for name, x in more.items() if x is not None}


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
    if case.sinks:
        made["sinks"] = normal(case.h)
    if case.documents:
        counts = [case.documents, case.documents[::-1]] * case.b
        numbers = [torch.arange(len(c)).repeat_interleave(torch.tensor(c)) for c in counts]
        made["documents"] = torch.stack(numbers[: case.b])
    return {**made, "mask": _mask(case, draw, normal)} if case.mask else made


def _mask(case: Case, draw: torch.Generator, normal: Callable[..., Tensor]) -> Tensor:
    t = case.t or case.s
    seen = torch.rand((case.b, 1, case.s, t), generator=draw) > 0.4
    seen[..., 0] = True
    dead = seen.clone()
    dead[0, :, case.s // 4] = False
    dead[:, :, case.s - 1] = False
    late = seen.clone()
    late[:, :, :, : t // 2] = False  # nothing is seen of whole pieces
    lowest = torch.finfo(torch.float32).min
    masks: dict[str, Callable[[], Tensor]] = {
        "pairs": lambda: seen,
        "two dims": lambda: seen[0, 0],
        "keys": lambda: seen[:, :, :1],
        "dead rows": lambda: dead,
        "late": lambda: late,
        "added": lambda: normal(case.b, case.h, case.s, t),
        "added, dead rows": lambda: normal(case.b, 1, case.s, t).masked_fill(~dead, -torch.inf),
        "lowest": lambda: normal(case.b, case.h, case.s, t).masked_fill(~dead, lowest),
        "column alone": lambda: normal(case.h, case.s, 1),
        "trained": lambda: normal(1, case.h, case.s, t),
        "trained, of keys": lambda: normal(case.b, 1, 1, t),
    }
    return masks[case.mask]()


def whole(case: Case, given: Mapping[str, Tensor], kernel: SDPBackend = SDPBackend.MATH) -> Results:
    """On one device; by torch's products and softmax, which are exact for each mask."""
    q, k, v = (given[name].detach().clone().requires_grad_() for name in "qkv")
    mask = given.get("mask")
    leaf = mask.clone().requires_grad_() if case.trained and mask is not None else None
    mask = leaf if leaf is not None else mask
    s, t = q.shape[2], k.shape[2]
    if case.causal:
        back = torch.arange(s)[:, None] - torch.arange(t)
        seen = (back >= 0) & (back < (case.window or s))
        if mask is None:
            mask = seen
        else:
            mask = mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, -torch.inf)
    if case.documents:
        numbers = given["documents"]
        same = (numbers[:, :, None] == numbers[:, None])[:, None]
        mask = same if mask is None else mask & same
    if case.sinks:
        return _with_sinks(case, given, mask)
    with sdpa_kernel(kernel):
        out = F.scaled_dot_product_attention(
            q, k, v, mask, scale=case.scale, enable_gqa=case.h != case.g
        )
    torch.autograd.backward(out, given["grad"])
    dq, dk, dv = map(_grad, (q, k, v))
    return Results(out.detach(), dq, dk, dv, None if leaf is None else leaf.grad)


def _with_sinks(case: Case, given: Mapping[str, Tensor], mask: Tensor | None) -> Results:
    """Written out, as `~transformers` has it for gpt-oss."""
    q, k, v, sinks = (given[x].detach().clone().requires_grad_() for x in (*"qkv", "sinks"))
    b, h, s, d = q.shape
    keys, values = (x.repeat_interleave(h // x.shape[1], 1) for x in (k, v))
    scores = q @ keys.mT * (d**-0.5 if case.scale is None else case.scale)
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    every = torch.cat([scores, sinks[:, None, None].expand(b, h, s, 1)], -1)
    out = every.softmax(-1)[..., :-1] @ values
    torch.autograd.backward(out, given["grad"])
    return Results(out.detach(), _grad(q), _grad(k), _grad(v), None, _grad(sinks))


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def cut(x: Tensor, dim: int, case: Case, place: int) -> Tensor:
    """The piece of rank ``place``; a view where the order is contiguous."""
    if case.order == "zigzag":
        return own_zigzag(x, dim, place, case.ways)
    return x.chunk(case.ways, dim)[place]


def own_mask(mask: Tensor, case: Case, place: int) -> Tensor:
    """This rank's rows, and all columns in their own order."""
    return mask if mask.shape[-2] == 1 else cut(mask, -2, case, place)


def on_this_rank(
    case: Case, given: Mapping[str, Tensor], attend: Callable[..., Tensor] = ring_attention
) -> list[Tensor]:
    """Its pieces of the result and of the gradients of q, k, v and a trained mask."""
    place = rank_state.current().index(*case.axes)
    q, k, v = (cut(given[x], 2, case, place).detach().clone().requires_grad_() for x in "qkv")
    leaves = [q, k, v]
    mask = given.get("mask")
    if mask is not None:
        mask = own_mask(mask, case, place).detach().clone()
        if case.trained:
            leaves.append(mask.requires_grad_())
    asked: dict[str, Any] = {"ring": case.axes, "order": case.order, "window": case.window}
    if case.documents:
        numbers = given["documents"]
        asked["documents"] = (cut(numbers, 1, case, place), numbers)
    if case.sinks:
        leaves.append(given["sinks"].detach().clone().requires_grad_())
        asked["sinks"] = leaves[-1]
    out = attend(q, k, v, mask, case.causal, case.scale, **asked)
    torch.autograd.backward(out, cut(given["grad"], 2, case, place))
    return [out.detach(), *map(_grad, leaves)]


def around(case: Case, given: Mapping[str, Tensor]) -> tuple[Results, simulated.World]:
    """On simulated ranks: results put together, and what was issued."""
    with shifts():
        by_rank, world = simulated.run(Mesh.parse(case.mesh), lambda _: on_this_rank(case, given))
    out, dq, dk, dv = joined_of(case, [r[:4] for r in by_rank])
    if case.sinks:  # each has the part of its own rows
        return Results(out, dq, dk, dv, None, torch.stack([r[4] for r in by_rank]).sum(0)), world
    if not case.trained:
        return Results(out, dq, dk, dv, None), world
    mask = given["mask"].detach().clone().requires_grad_()
    for place, own in enumerate(by_rank):  # the cuts' gradients put each where it belongs
        torch.autograd.backward(own_mask(mask, case, place), own[4])
    return Results(out, dq, dk, dv, mask.grad), world


def joined_of(case: Case, by_rank: Sequence[Sequence[Tensor]]) -> Iterator[Tensor]:
    """Pieces of each rank put together in natural order."""
    for pieces in zip(*by_rank, strict=True):
        joined = torch.cat(pieces, 2)
        yield from_gathered(joined, 2, case.ways) if case.order == "zigzag" else joined


def farthest(got: Results, expected: Results) -> dict[str, float]:
    """By name the distance over the norm of what is right; of a norm below 1 the distance, since
    rows that see one column have gradients of nothing but rounding."""
    right = expected.items()
    return {
        name: float((x.double() - right[name]).norm() / max(1.0, float(right[name].norm())))
        for name, x in got.items().items()
    }
