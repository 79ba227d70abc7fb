"""Recording what a program computes, value by value and gradient by gradient.

An emitter can print every result through ``probe("block::name", x, "tp:S1")``. Outside of
`recording` that returns ``x``. Inside, the local value and its gradient are kept with the sharding
that the plan claims for them; `assemble` puts the pieces of all ranks and microbatches together and
says where ranks that should agree do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Sharding

MICROBATCH = "microbatch"


@dataclass(slots=True)
class Seen:
    """One call of `probe` on one rank. ``gradient`` is None where none arrived."""

    name: str
    sharding: str
    value: torch.Tensor
    gradient: torch.Tensor | None = None


_recorder: list[Seen] | None = None


def probe(name: str, x: torch.Tensor, sharding: str = "R") -> torch.Tensor:
    """``x`` itself, noted under ``name`` while `recording`.

    ``sharding`` is that of the result over all axes, the microbatch included.
    """
    if _recorder is not None:
        seen = Seen(name, sharding, x.detach().clone())
        _recorder.append(seen)
        if x.requires_grad:
            x.register_hook(partial(_keep, seen))  # type: ignore[no-untyped-call]
    return x


def _keep(seen: Seen, gradient: torch.Tensor) -> None:
    seen.gradient = gradient.detach().clone()


@contextmanager
def recording() -> Iterator[list[Seen]]:
    """Inside, `probe` appends to the list that this yields, in the order of the calls."""
    global _recorder
    before, _recorder = _recorder, []
    try:
        yield _recorder
    finally:
        _recorder = before


@dataclass(frozen=True, slots=True)
class Whole:
    """A result put together: ``occurrence`` counts the calls of one name within a microbatch.

    A piece that several ranks hold is kept once; ``disagree`` says ``value`` or ``gradient`` where
    they hold different ones.
    """

    name: str
    occurrence: int
    value: torch.Tensor
    gradient: torch.Tensor | None
    disagree: str = ""


def assemble(ranks: Sequence[Sequence[Seen]], mesh: Mesh, microbatches: int) -> list[Whole]:
    """The results of all ranks, in the order of the calls. ``mesh`` has no microbatch axis.

    Raises ValueError where the ranks did not call the same probes.
    """
    names = [[seen.name for seen in found] for found in ranks]
    if any(other != names[0] for other in names[1:]) or len(names[0]) % microbatches:
        raise ValueError("the ranks did not call the same probes")
    timed = Mesh((MICROBATCH, *mesh.axes), (microbatches, *mesh.sizes)).trimmed()
    steps = len(names[0]) // microbatches
    counted: dict[str, int] = {}
    wholes = []
    for i, name in enumerate(names[0][:steps]):
        # microbatches come one after the other, and are the outermost axis
        cells = [found[m * steps + i] for m in range(microbatches) for found in ranks]
        sharding = Sharding.parse(cells[0].sharding)
        value, same = _join([c.value for c in cells], timed, sharding, backward=False)
        gradient, agreed = None, True
        if any(c.gradient is not None for c in cells):
            given = [torch.zeros_like(c.value) if c.gradient is None else c.gradient for c in cells]
            gradient, agreed = _join(given, timed, sharding, backward=True)
        disagree = "value" if not same else "" if agreed else "gradient"
        wholes.append(Whole(name, counted.get(name, 0), value, gradient, disagree))
        counted[name] = counted.get(name, 0) + 1
    return wholes


def _join(
    cells: list[torch.Tensor], mesh: Mesh, sharding: Sharding, backward: bool
) -> tuple[torch.Tensor, bool]:
    """The whole of ``cells`` (one per rank of ``mesh``), and whether copies of a piece agree."""
    if not mesh.axes:
        return cells[0], True
    inner = Mesh(mesh.axes[1:], mesh.sizes[1:])
    stride = inner.device_count
    parts = [
        _join(cells[i * stride : (i + 1) * stride], inner, sharding, backward)
        for i in range(mesh.sizes[0])
    ]
    tensors, agree = [t for t, _ in parts], all(a for _, a in parts)
    placement = sharding.on(mesh.axes[0])
    if placement.kind == "S":
        return torch.cat(tensors, placement.dim), agree
    if placement.kind == ("D" if backward else "P"):
        return torch.stack(tensors).sum(0), agree
    return tensors[0], agree and all(_same(t, tensors[0]) for t in tensors[1:])


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point() or not a.numel():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=0.0, atol=1e-9 * float(a.abs().max()), equal_nan=True)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first result that is not what one device computes.

    direction: ``forward`` or ``backward``.
    expected, found: the elements at ``index``, where they differ most.
    relative:  norm of the difference over the norm of what is expected.
    note:      what else is known, such as ranks that disagree.
    """

    name: str
    occurrence: int
    direction: str
    index: tuple[int, ...]
    expected: float
    found: float
    relative: float
    note: str = ""

    def text(self, place: str = "") -> str:
        """One sentence; ``place`` is the module path and source line."""
        where = f" in {place}" if place else ""
        note = f"; {self.note}" if self.note else ""
        what = "value" if self.direction == "forward" else "gradient"
        return (
            f"first difference: {self.direction}, {self.name}{where}: {what}{list(self.index)} is "
            f"{self.found:.9g} and should be {self.expected:.9g} "
            f"(relative error {self.relative:.1e} of its norm){note}"
        )


def first_difference(
    expected: Sequence[Whole], found: Sequence[Whole], tolerance: float = 1e-9
) -> Difference | None:
    """The first result in forward order that differs, else the first gradient in backward order.

    A gradient below a millionth of the largest one's norm is measured against that millionth.
    """
    right = {(w.name, w.occurrence): w for w in expected}
    pairs = [(right[w.name, w.occurrence], w) for w in found if (w.name, w.occurrence) in right]
    for want, have in pairs:
        difference = _differ(want, have, want.value, have.value, "forward", 0.0, tolerance)
        if difference is not None:
            return difference
    norms = [float(w.gradient.norm()) for w in expected if w.gradient is not None]
    floor = 1e-6 * max(norms, default=0.0)
    for want, have in reversed(pairs):
        if want.gradient is None:
            continue
        have_gradient = torch.zeros_like(have.value) if have.gradient is None else have.gradient
        difference = _differ(want, have, want.gradient, have_gradient, "backward", floor, tolerance)
        if difference is not None:
            return difference
    return None


def _differ(
    want: Whole,
    have: Whole,
    right: torch.Tensor,
    value: torch.Tensor,
    direction: str,
    floor: float,
    tolerance: float,
) -> Difference | None:
    kind = "value" if direction == "forward" else "gradient"
    note = "ranks that should agree do not" if have.disagree == kind else ""
    if right.shape != value.shape:
        note = f"its shape is {list(value.shape)} and should be {list(right.shape)}"
        return Difference(
            have.name,
            have.occurrence,
            direction,
            (),
            float("nan"),
            float("nan"),
            float("inf"),
            note,
        )
    a, b = right.double(), value.double()
    gap = torch.where(a == b, torch.zeros(()), (a - b).abs()).nan_to_num(nan=torch.inf)
    scale = max(float(a[a.isfinite()].norm()), floor)
    error = float(gap.norm()) / scale if scale else float(gap.norm())
    if error <= tolerance and not note:
        return None
    place = int(gap.reshape(-1).argmax()) if gap.numel() else 0
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), a.shape))
    at = (a[index], b[index]) if gap.numel() else (float("nan"), float("nan"))
    return Difference(
        have.name, have.occurrence, direction, index, float(at[0]), float(at[1]), error, note
    )


Places = Mapping[str, Sequence[str]]
"""Result name -> where its op stands in the model, one text per occurrence."""


def place_of(places: Places, difference: Difference) -> str:
    found = places.get(difference.name, ())
    return found[min(difference.occurrence, len(found) - 1)] if found else ""
