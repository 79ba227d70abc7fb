"""The collectives of a compiled step, read off its HLO.

XLA writes every collective that runs, also those that its partitioner or another pass added. Inside
a loop they count as often as the loop runs.

XLA widens bfloat16 to float32 on CPUs, collectives too, which other devices do not.
`mark_asked_dtypes` writes at each collective what the program asked for, and it is counted as that.

Modules for TPUs have three forms of their own. A gather that runs beside compute stands in several
fusions, from its start to its end, and counts at its start. A reduce-scatter may be a fusion of an
all-reduce and a slice (`all-reduce-scatter`), of rows that were added up to whole tiles; it counts
as what was asked, and what neighbours then exchange so that pieces are even is part of it. An
all-reduce of several tensors is one, of all their bytes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jax.extend.mlir import ir

from autopar.lowering.collectives import Row
from autopar.rules.resharding import SHIFT
from autopar.runtime.verify.jax.hlo import Computation, Instruction, Module, parse
from autopar.runtime.verify.jax.replica_groups import goes_around, group_of, groups_of_axes

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}  # s8, u32, ...: in the name
_SHAPE = re.compile(r"([a-z]+[0-9]*)\[([0-9,]*)\]")
_USUAL = {"xla_dump_max_hlo_modules": -1}
"""An option as it is anyway."""
_ASKED = re.compile(r'asked_dtype="(\w+)"')
_UNDER_WAY = re.compile(r'custom_call_target="AsyncCollective(?!Start)\w*"')
_SCATTER_FUSION = "all-reduce-scatter"


class UnknownTripCount(NotImplementedError):
    """A loop with collectives of which XLA does not know how often it runs."""


def mark_asked_dtypes(module: Any) -> bool:
    """Notes the dtype at every bfloat16 collective of a StableHLO module that is not compiled yet;
    whether there is one.

    The note changes nothing of what is compiled.
    """
    is_there = False

    def note(op: Any) -> Any:
        nonlocal is_there
        kind = op.name.removeprefix("stablehlo.").replace("_", "-")
        if kind in KINDS and {str(r.type.element_type) for r in op.results} == {"bf16"}:
            with op.context:
                attributes = {"asked_dtype": ir.StringAttr.get("bf16")}
                op.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(attributes)
            is_there = True
        return ir.WalkResult.ADVANCE

    module.walk(note)
    return is_there


def compiled_as_asked(lowered: Any, options: Mapping[str, str] | None = None) -> Any:
    """A lowered function, compiled so that `collectives` counts what it asked for."""
    marked = mark_asked_dtypes(lowered.compiler_ir("stablehlo").operation)
    # Under the same options jax gives what it compiled of the same function before the marks.
    anew = _USUAL if marked else {}
    own = {**anew, **(options or {})}
    return lowered.compile(compiler_options=own or None)


def collectives(
    hlo: str,
    mesh: Mapping[str, int],
    by_readers: bool = False,
    scatters: Mapping[str, int] = MappingProxyType({}),
) -> list[Row]:
    """Every collective of the program, on one device; ``size_bytes`` is the full-size side.

    Axes are found from the groups: ``"dp_replicate+dp_shard"`` for one over both; ``scatters``: of
    the plan, whose reduce-scatters are over parts of an axis. ``by_readers``:
    an all-reduce of which each device reads its piece alone counts as the reduce-scatter that was
    asked for; a CPU's compiler, whose partitioner writes no other, moves all of it nevertheless.

    Raises `UnknownTripCount`.
    """
    module = parse(hlo)
    groups = groups_of_axes(mesh, scatters)
    counts: Counter[tuple[str, str, int]] = Counter()
    for where, one, times in _issued(module, module.entry, 1):
        kind, axis, size = _collective(one, where, groups)
        if by_readers and kind == "all_reduce" and _pieces_read(module, where, one):
            kind = "reduce_scatter"
        counts[kind, axis, size] += times
    return [Row(*what, count) for what, count in sorted(counts.items())]


def _pieces_read(module: Module, where: Computation, one: Instruction) -> bool:
    """Whether each device reads one of as many pieces as its group has devices."""
    slices = module.slices_read(where, one.name)
    pieces = len(group_of(one.text))
    whole = _elements(one.type)
    return bool(slices) and all(_elements(s) * pieces == whole for s in slices or ())


def _elements(of_type: str) -> int:
    return sum(
        math.prod(int(d) for d in dims.split(",") if d) for _, dims in _SHAPE.findall(of_type)
    )


Issued = tuple[Computation, Instruction, int]
"""Where a collective stands, the collective, and how often it runs."""


def _issued(module: Module, name: str, times: int) -> list[Issued]:
    """What ``name`` runs."""
    here = module.computations.get(name)
    if here is None or _goes_on(here):
        return []
    every: list[Issued] = []
    for one in here.instructions.values():
        if _kind(one) and not _evens_out(one, here):
            every.append((here, one, times))
            continue
        for called, trips in module.called(one):
            inside = _issued(module, called, times * (1 if trips is None else trips))
            if inside and trips is None:
                raise UnknownTripCount(f"XLA does not say how often the loop {called} runs")
            every += inside if trips != 0 else []
    return every


def _goes_on(here: Computation) -> bool:
    """Whether it is the middle or the end of a collective that began in another computation."""
    if here.name.startswith("async_collective_fusion"):
        return True
    return any(_UNDER_WAY.search(one.text) for one in here.instructions.values())


def _kind(one: Instruction) -> str:
    """Empty: no collective, or the end of one."""
    return KINDS.get(one.opcode.removesuffix("-start"), "")


def _evens_out(one: Instruction, here: Computation) -> bool:
    """Whether it sends rows between neighbours behind a reduce-scatter of added rows."""
    if _kind(one) != "permute":
        return False
    given = here.instructions.get(one.operands[0]) if one.operands else None
    if given is not None and given.opcode == "slice":
        given = here.instructions.get(given.operands[0])
    return given is not None and f"calls=%{_SCATTER_FUSION}" in given.rest


def _collective(
    one: Instruction, here: Computation, groups: Mapping[frozenset[int], str]
) -> tuple[str, str, int]:
    kind, begins = _kind(one), one.opcode.endswith("-start")
    shapes = _SHAPE.findall(one.type)
    group = group_of(one.text)
    if kind == "permute" and begins:  # (operands, results, what it waits for)
        shapes = [(dtype, dims) for dtype, dims in shapes if dims or dtype not in ("u32", "s32")]
    if begins and kind in ("all_gather", "permute"):
        shapes = shapes[len(shapes) // 2 :]  # (operands, results)
    if kind == "all_reduce" and here.name.startswith(_SCATTER_FUSION):
        kind = "reduce_scatter"
        given = [o for o in here.instructions.values() if o.opcode == "parameter"]
        shapes = _SHAPE.findall(given[0].type)
    elif kind == "reduce_scatter":
        shapes = shapes * len(group)
    if kind == "permute" and goes_around(one.text):
        kind = SHIFT
    asked = _ASKED.search(one.text)
    if asked:
        shapes = [(asked[1] if dtype == "f32" else dtype, dims) for dtype, dims in shapes]
    return kind, groups.get(group, f"devices {sorted(group)}"), sum(_bytes(*s) for s in shapes)


def _bytes(dtype: str, dims: str) -> int:
    width = BITS.get(dtype) or int(re.sub(r"\D", "", dtype) or 8)
    return math.prod(int(d) for d in dims.split(",") if d) * -(-width // 8)
