"""Putting together what all ranks computed, and naming the first result that is not right.

Framework-neutral: values are what NumPy takes for arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.emit.marks import RESHARDED
from autopar.nouns.graph import Graph
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import key
from autopar.nouns.sharding import Sharding
from autopar.runtime.shared.seen import Seen


@dataclass(frozen=True, slots=True)
class Whole:
    """A result put together: ``occurrence`` counts the calls of one name within a microbatch.

    A piece that several ranks hold is kept once; ``disagree`` says ``value`` or ``gradient`` where
    they hold different ones.
    """

    name: str
    occurrence: int
    value: Any
    gradient: Any
    disagree: str = ""


def assemble(
    ranks: Sequence[Sequence[Seen]], mesh: Mesh, microbatches: int, slices: int = 1
) -> list[Whole]:
    """The results of all ranks, in the order of the calls. ``mesh`` has none of the axes that cut a
    batch over time; ``slices``: of each microbatch.

    Raises ValueError where the ranks did not call the same probes.
    """
    calls, passes = [_by_name(rank) for rank in ranks], microbatches * slices
    times = [{name: len(seen) for name, seen in called.items()} for called in calls]
    if any(t != times[0] for t in times[1:]) or any(n % passes for n in times[0].values()):
        raise ValueError("the ranks did not call the same probes")
    timed = mesh.timed(microbatches, slices)
    counted: dict[str, int] = {}
    wholes = []
    for name in (seen.name for seen in ranks[0]):
        each, i = times[0][name] // passes, counted.get(name, 0)
        if i == each:
            continue  # of a later microbatch
        # The calls of one name come microbatch by microbatch, the outermost axis; between names a
        # compiled program keeps no order.
        cells = [called[name][m * each + i] for m in range(passes) for called in calls]
        sharding = Sharding.parse(cells[0].sharding)
        value, same = _join([np.asarray(c.value) for c in cells], timed, sharding, backward=False)
        gradient, agreed = None, True
        if any(c.gradient is not None for c in cells):
            given = [np.zeros_like(c.value) if c.gradient is None else c.gradient for c in cells]
            gradient, agreed = _join([np.asarray(g) for g in given], timed, sharding, backward=True)
        disagree = "value" if not same else "" if agreed else "gradient"
        wholes.append(Whole(name, i, value, gradient, disagree))
        counted[name] = i + 1
    return wholes


def _by_name(results: Sequence[Seen]) -> dict[str, list[Seen]]:
    calls: dict[str, list[Seen]] = {}
    for seen in results:
        calls.setdefault(seen.name, []).append(seen)
    return calls


def _join(
    cells: list[np.ndarray], mesh: Mesh, sharding: Sharding, backward: bool
) -> tuple[np.ndarray, bool]:
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
        if placement.zigzag:
            halves = [np.split(t, 2, placement.dim) for t in tensors]
            tensors = [early for early, _ in halves] + [late for _, late in halves[::-1]]
        return np.concatenate(tensors, placement.dim), agree
    if placement.kind == ("D" if backward else "P"):
        return np.stack(tensors).sum(0), agree
    return tensors[0], agree and all(_same(t, tensors[0]) for t in tensors[1:])


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape:
        return False
    if not np.issubdtype(a.dtype, np.floating) or not a.size:
        return np.array_equal(a, b)
    return np.allclose(a, b, rtol=0.0, atol=1e-9 * float(np.abs(a).max()), equal_nan=True)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first result that is not what one device computes.

    direction: ``forward`` or ``backward``.
    expected, actual: the elements at ``index``, where they differ most.
    relative:  norm of the difference over the norm of what is expected.
    note:      what else is known, such as ranks that disagree.
    """

    name: str
    occurrence: int
    direction: str
    index: tuple[int, ...]
    expected: float
    actual: float
    relative: float
    note: str = ""

    def text(self, place: str = "") -> str:
        """One sentence; ``place`` is the module path and source line."""
        where = f" in {place}" if place else ""
        note = f"; {self.note}" if self.note else ""
        what = "value" if self.direction == "forward" else "gradient"
        return (
            f"first difference: {self.direction}, {self.name}{where}: {what}{list(self.index)} is "
            f"{self.actual:.9g} and should be {self.expected:.9g} "
            f"(relative error {self.relative:.1e} of its norm){note}"
        )


def first_difference(
    expected: Sequence[Whole], actual: Sequence[Whole], tolerance: float = 1e-9
) -> Difference | None:
    """The first result in forward order that differs, else the first gradient in backward order.

    A gradient below a millionth of the largest one's norm is measured against that millionth.
    """
    right = {(w.name, w.occurrence): w for w in expected}
    named = [((w.name.removesuffix(RESHARDED), w.occurrence), w) for w in actual]
    pairs = [(right[which], w) for which, w in named if which in right]
    for want, have in pairs:
        difference = _differ(want, have, want.value, have.value, "forward", 0.0, tolerance)
        if difference is not None:
            return difference
    norms = [
        float(np.linalg.norm(np.asarray(w.gradient))) for w in expected if w.gradient is not None
    ]
    floor = 1e-6 * max(norms, default=0.0)
    for want, have in reversed(pairs):
        if want.gradient is None:
            continue
        have_gradient = np.zeros_like(have.value) if have.gradient is None else have.gradient
        difference = _differ(want, have, want.gradient, have_gradient, "backward", floor, tolerance)
        if difference is not None:
            return difference
    return None


def _differ(
    want: Whole,
    have: Whole,
    wanted: Any,
    given: Any,
    direction: str,
    floor: float,
    tolerance: float,
) -> Difference | None:
    kind = "value" if direction == "forward" else "gradient"
    note = "ranks that should agree do not" if have.disagree == kind else ""
    right, value = np.asarray(wanted), np.asarray(given)
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
    a, b = right.astype(np.float64), value.astype(np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.nan_to_num(np.where(a == b, 0.0, np.abs(a - b)), nan=np.inf)
    scale = max(float(np.linalg.norm(a[np.isfinite(a)])), floor)
    error = float(np.linalg.norm(gap)) / scale if scale else float(np.linalg.norm(gap))
    if error <= tolerance and not note:
        return None
    place = int(gap.argmax()) if gap.size else 0
    index = tuple(int(i) for i in np.unravel_index(place, a.shape)) if gap.size else ()
    at = (a[index], b[index]) if gap.size else (float("nan"), float("nan"))
    return Difference(
        have.name, have.occurrence, direction, index, float(at[0]), float(at[1]), error, note
    )


Places = Mapping[str, Sequence[str]]
"""Result name -> where its op stands in the model, one text per occurrence."""


def place_of(places: Places, difference: Difference) -> str:
    occurrences = places.get(difference.name.removesuffix(RESHARDED), ())
    return occurrences[min(difference.occurrence, len(occurrences) - 1)] if occurrences else ""


def places_of(graph: Graph) -> dict[str, list[str]]:
    """Result name -> module path and source line of its op, by occurrence."""
    places: dict[str, list[str]] = {}
    for op in graph.ops:
        for name in op.outputs:
            places[key(None, name)] = [str(op.source)]
    for block in graph.blocks.values():
        for op in block.body.ops:
            for name in op.outputs:
                inside = op.source.module
                places[key(block.name, name)] = [
                    f"{instance}.{inside} ({op.source.file}:{op.source.line})".replace(". (", " (")
                    for instance in block.instances
                ]
    return places


def describe_first(
    single: Sequence[Sequence[Seen]],
    ranks: Sequence[Sequence[Seen]],
    mesh: Mesh,
    microbatches: int,
    slices: int,
    places: Places,
    changed: str,
) -> str:
    """One sentence on the first result of ``ranks`` that is not that of the ``single`` device.

    ``changed``: what sets the program apart from its plan's, told behind it.
    """
    ending = f". {changed}" if changed else ""
    try:
        actual = assemble(ranks, mesh, microbatches, slices)
    except ValueError as error:  # pieces of other shapes, or of other results
        if not changed:
            raise
        return f"the first difference cannot be named, its pieces make no whole ({error}){ending}"
    difference = first_difference(assemble(single, Mesh((), ()), 1), actual)
    if difference is not None:
        return difference.text(place_of(places, difference)) + ending
    return (
        "first difference: in no result and no gradient of one, so in what a parameter's "
        "gradient is reduced to, in a buffer's update, or in the same way on one device too "
        "(the worst parameters stand above); plans with other pins, such as --fix tp=1 or "
        f"zero=0, show which axis it comes with{ending}"
    )
