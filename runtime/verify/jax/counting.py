"""The collectives of a compiled step, read off its HLO.

XLA writes every collective that runs, also those that its partitioner or another pass added. Inside
a loop they count as often as the loop runs, which XLA knows for every `jax.lax.scan`.

XLA widens bfloat16 to float32 on CPUs, collectives too, which other devices do not.
`mark_asked_dtypes` writes at each collective what the program asked for, and it is counted as that.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jax.extend.mlir import ir

from autopar.lowering.collectives import Row

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}  # s8, u32, ...: in the name
_OP = re.compile(
    r"^\s*(?:ROOT )?%?\S+ = (?P<type>.*?) (?P<kind>"
    + "|".join(KINDS)
    + r")(?P<start>-start)?\((?P<rest>.*)"
)
_SHAPE = re.compile(r"([a-z]+[0-9]*)\[([0-9,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CALLED = re.compile(r"(?:body|calls|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ASKED = re.compile(r'asked_dtype="(\w+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class UnknownTripCount(NotImplementedError):
    """A loop with collectives of which XLA does not know how often it runs."""


def mark_asked_dtypes(module: Any) -> None:
    """Notes the dtype at every bfloat16 collective of a StableHLO module that is not compiled yet.

    The note changes nothing of what is compiled.
    """

    def note(op: Any) -> Any:
        kind = op.name.removeprefix("stablehlo.").replace("_", "-")
        if kind in KINDS and {str(r.type.element_type) for r in op.results} == {"bf16"}:
            with op.context:
                attributes = {"asked_dtype": ir.StringAttr.get("bf16")}
                op.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(attributes)
        return ir.WalkResult.ADVANCE

    module.walk(note)


@dataclass(slots=True)
class _Computation:
    collectives: list[tuple[str, str, int]] = field(default_factory=list)
    calls: list[tuple[str, int | None]] = field(default_factory=list)


def collectives(hlo: str, mesh: Mapping[str, int]) -> list[Row]:
    """Every collective of the program, on one device; ``size_bytes`` is the full-size side.

    Axes are found from the groups: ``"dp_replicate+dp_shard"`` for one over both. Raises
    `UnknownTripCount`.
    """
    computations, entry = _parse(hlo, mesh)
    counts: Counter[tuple[str, str, int]] = Counter()
    _count(computations, entry, 1, counts)
    return [Row(*what, count) for what, count in sorted(counts.items())]


def _parse(hlo: str, mesh: Mapping[str, int]) -> tuple[dict[str, _Computation], str]:
    groups = _groups_of_axes(mesh)
    computations: dict[str, _Computation] = {}
    current, entry = _Computation(), ""
    for line in hlo.splitlines():
        header = _HEADER.match(line)
        if header:
            current = computations.setdefault(header[2], _Computation())
            entry = header[2] if header[1] else entry
            continue
        op = _OP.search(line)
        if op:
            current.collectives.append(_collective(op, line, groups))
            continue
        trips = _TRIPS.search(line)
        times = int(trips[1]) if trips else None if " while(" in line else 1
        current.calls += [(name, times) for name in _CALLED.findall(line)]
        for branches in _BRANCHES.findall(line):
            current.calls += [(name.strip(" %"), 1) for name in branches.split(",")]
    return computations, entry


def _count(
    computations: Mapping[str, _Computation],
    name: str,
    times: int,
    counts: Counter[tuple[str, str, int]],
) -> bool:
    """Adds what ``name`` runs; says whether there was anything."""
    here = computations.get(name)
    if here is None:
        return False
    for what in here.collectives:
        counts[what] += times
    some = bool(here.collectives)
    for called, trips in here.calls:
        inside = _count(computations, called, times * (trips or 1), counts)
        if inside and trips is None:
            raise UnknownTripCount(f"XLA does not say how often the loop {called} runs")
        some = some or inside
    return some


def _collective(
    op: re.Match[str], line: str, groups: Mapping[frozenset[int], str]
) -> tuple[str, str, int]:
    kind = KINDS[op["kind"]]
    shapes = _SHAPE.findall(op["type"])
    if op["start"] and kind in ("all_gather", "permute"):
        shapes = shapes[len(shapes) // 2 :]  # (operands, results)
    asked = _ASKED.search(line)
    if asked:
        shapes = [(asked[1] if dtype == "f32" else dtype, dims) for dtype, dims in shapes]
    size = sum(_bytes(dtype, dims) for dtype, dims in shapes)
    group = _group(line)
    if kind == "reduce_scatter":
        size *= len(group)
    return kind, groups.get(group, f"devices {sorted(group)}"), size


def _bytes(dtype: str, dims: str) -> int:
    width = BITS.get(dtype) or int(re.sub(r"\D", "", dtype) or 8)
    return math.prod(int(d) for d in dims.split(",") if d) * -(-width // 8)


def _group(line: str) -> frozenset[int]:
    """The devices of the group that device 0 is in."""
    listed = re.search(r"replica_groups=\{\{([0-9,{} ]*)\}\}", line)
    if listed:
        groups = [frozenset(map(int, g.split(","))) for g in re.split(r"\},\s*\{", listed[1])]
        return next(g for g in groups if 0 in g)
    iota = re.search(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?", line)
    if iota:
        rows, columns = (int(n) for n in iota[1].split(","))
        sizes = [int(n) for n in iota[2].split(",")]
        order = [int(n) for n in iota[3].split(",")] if iota[3] else list(range(len(sizes)))
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        ids = [
            sum(place * strides[d] for place, d in zip(places, order, strict=True))
            for places in itertools.product(*(range(sizes[d]) for d in order))
        ]
        rows_of_ids = [frozenset(ids[r * columns : (r + 1) * columns]) for r in range(rows)]
        return next(g for g in rows_of_ids if 0 in g)
    pairs = re.search(r"source_target_pairs=\{\{(.*?)\}\}", line)
    if pairs:
        return frozenset(int(n) for n in re.findall(r"\d+", pairs[1]))
    raise NotImplementedError(f"a collective without groups: {line.strip()[:200]}")


def _groups_of_axes(mesh: Mapping[str, int]) -> dict[frozenset[int], str]:
    """The group of device 0 for every set of axes, outermost first in the name."""
    names = [a for a, n in mesh.items() if n > 1]
    strides, stride = {}, 1
    for axis in reversed(list(mesh)):
        strides[axis], stride = stride, stride * mesh[axis]
    axes_of = {}
    for count in range(1, len(names) + 1):
        for axes in itertools.combinations(names, count):
            places = itertools.product(*(range(mesh[a]) for a in axes))
            ids = (sum(p * strides[a] for p, a in zip(ps, axes, strict=True)) for ps in places)
            axes_of[frozenset(ids)] = "+".join(axes)
    return axes_of
