"""Which reduce-scatters the TPU's compiler makes whole all-reduces of, by slice and mesh axis.

    python -m benchmarks.tpu_scatters [--json [FILE]] [--only TEXT]

Compiles one `psum_scatter` and one `all_gather` over each axis of each mesh, for described slices,
and reads the compiled module; beside it what prices assume (`torus.sums_whole`), and what they
take a GiB of float32 for. No TPU is needed,
but libtpu is: `pip install libtpu`, of the version that the installed jax names. The last rows
scatter over the whole slice in turn: over one axis, then what is left over another, or over parts
of one axis. Exits with 1
where the compiler does what is not priced.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.cost_models.catalogue import find_device
from autopar.cost_models.collectives import AxisGroup, on_torus, price
from autopar.cost_models.slices import find_slice
from autopar.nouns.cluster import Cluster, DeviceGroup
from autopar.nouns.errors import UserError
from autopar.runtime.ahead.described import Described, devices_of, environment
from benchmarks.figures import Target, show

CHILD = "AUTOPAR_TPU_SCATTERS"
ROWS, COLUMNS = 16384, 1024
PRICED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """A slice, its devices as a mesh in rank order, and the axes that are scattered over.

    axes:  one entry a scatter, after each other; an entry has the numbers of mesh dims.
    first: of a mesh of one axis: groups of so many ranks are scattered over first, then what is
           left of it (`axis_index_groups`); 0: all at once.
    """

    slice: str
    mesh: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...] = ((0,),)
    slices: int = 1
    first: int = 0


CASES = (
    Case("v5e-2x2", (4,)),
    Case("v5e-2x4", (8,)),
    Case("v5e-4x4", (16,)),
    Case("v5e-4x4", (8, 2)),
    Case("v5e-4x4", (8, 2), ((1,),)),
    Case("v5e-4x4", (2, 8), ((1,),)),
    Case("v5e-4x4", (4, 4), ((0, 1),)),
    Case("v5e-4x4", (4, 4), ((0,),)),
    Case("v5e-4x4", (4, 4), ((1,),)),
    Case("v5e-4x8", (32,)),
    Case("v5e-8x8", (64,)),
    Case("v5e-8x8", (32, 2)),
    Case("v5e-8x16", (128,)),
    Case("v5e-16x16", (256,)),
    Case("v5e-16x16", (64, 4)),
    Case("v5e-16x16", (128, 2)),
    Case("v6e-4x8", (32,)),
    Case("v6e-8x8", (64,)),
    Case("v6e-16x16", (256,)),
    Case("v4-4x4x4", (64,)),
    Case("v5p-2x2x1", (4,)),
    Case("v5p-2x2x2", (8,)),
    Case("v5p-2x2x4", (16,)),
    Case("v5p-2x2x4", (4, 4), ((1,),)),
    Case("v5p-2x4x4", (32,)),
    Case("v5p-2x4x4", (16, 2)),
    Case("v5p-4x4x4", (64,)),
    Case("v5p-4x4x4", (16, 4)),
    Case("v5p-4x4x4", (4, 16), ((1,),)),
    Case("v5p-4x4x8", (128,)),
    Case("v5p-4x4x8", (2, 64), ((1,),)),
    Case("v5p-8x8x8", (512,)),
    Case("v5e-2x4", (16,), slices=2),
    Case("v5e-4x4", (8, 4), slices=2),
    Case("v5e-4x4", (2, 16), ((1,),), slices=2),
    Case("v5e-4x4", (4, 4), ((0,), (1,))),
    Case("v5e-4x4", (8, 2), ((0,), (1,))),
    Case("v5e-16x16", (128, 2), ((0,), (1,))),
    Case("v5p-4x4x4", (16, 4), ((0,), (1,))),
    Case("v5p-4x4x4", (32, 2), ((0,), (1,))),
    Case("v5p-4x4x4", (4, 4, 4), ((0,), (1,), (2,))),
    Case("v5e-4x4", (16,), first=8),
    Case("v5e-16x16", (256,), first=128),
    Case("v5p-4x4x4", (64,), first=32),
)


def described(case: Case) -> Described:
    one = find_slice(case.slice)
    name = case.slice.replace("-", ":")
    wraps = one.generation.wraps(one.shape)
    return Described("tpu", one.device_count * case.slices, name, wraps, case.slices)


def compiled(case: Case, gathers: bool) -> str:
    """The compiled module, as text."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(devices_of(described(case))).reshape(case.mesh), names(case.mesh))
    over = [tuple(names(case.mesh)[dim] for dim in axes) for axes in case.axes]
    split = PartitionSpec(tuple(axis for axes in over for axis in axes))
    steps: list[tuple[Any, list[list[int]] | None]] = [(axes, None) for axes in over]
    if case.first:
        steps = [(over[0][0], ranks) for ranks in in_two(case.mesh[0], case.first)]

    def scatter(x: Any) -> Any:
        for axes, ranks in steps:
            x = jax.lax.psum_scatter(
                x, axes, scatter_dimension=0, axis_index_groups=ranks, tiled=True
            )
        return x

    def gather(x: Any) -> Any:
        return jax.lax.all_gather(x, split[0], axis=0, tiled=True)

    whole = PartitionSpec()
    function, given, made = (gather, split, whole) if gathers else (scatter, whole, split)
    step = jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=made, check_vma=False)
    shape = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32, sharding=NamedSharding(mesh, given))
    return str(jax.jit(step).lower(shape).compile().as_text())


def names(mesh: Sequence[int]) -> tuple[str, ...]:
    return tuple("abc"[: len(mesh)])


def sums(text: str) -> bool:
    """Whether a module has an all-reduce outside of the fusions that are reduce-scatters."""
    inside = ""
    for line in text.splitlines():
        header = re.match(r"(?:ENTRY )?%([\w.\-]+) \(", line)
        inside = header[1] if header else inside
        if re.search(r" all-reduce(-start)?\(", line) and "all-reduce-scatter" not in inside:
            return True
    return False


def in_two(ranks: int, first: int) -> tuple[list[list[int]], list[list[int]]]:
    """Groups of two scatters that leave rank i with piece i: ``first`` ranks evenly apart, then
    neighbours."""
    apart = ranks // first
    wide = [list(range(start, ranks, apart)) for start in range(apart)]
    return wide, [list(range(start, start + apart)) for start in range(0, ranks, apart)]


def groups(case: Case) -> list[AxisGroup]:
    """What each scatter goes over."""
    sizes = case.mesh
    if case.first:
        apart = sizes[0] // case.first
        return [AxisGroup(case.first, apart), AxisGroup(apart)]
    return [
        AxisGroup(math.prod(sizes[dim] for dim in axes), math.prod(sizes[max(axes) + 1 :]))
        for axes in case.axes
    ]


def priced(case: Case) -> tuple[bool, float]:
    """Whether prices take any of the scatters for an all-reduce, and the seconds of all of them."""
    one = find_slice(case.slice)
    device = find_device(one.generation.device)
    group = DeviceGroup(device, one.device_count * case.slices)
    cluster = Cluster(case.slice, (group,), one.levels(case.slices))
    size_bytes, whole, seconds = float(PRICED_BYTES), False, 0.0
    for over in groups(case):
        place = on_torus(cluster, over)
        whole = whole or (place is not None and place.whole)
        seconds += price(cluster, "reduce_scatter", over).time_s(size_bytes)
        size_bytes /= over.size
    return whole, seconds


def row(case: Case) -> dict[str, Any]:
    scatters = sums(compiled(case, gathers=False))
    whole, seconds = priced(case)
    over = " then ".join("x".join(str(case.mesh[dim]) for dim in axes) for axes in case.axes)
    if case.first:
        over = f"{case.first} then {case.mesh[0] // case.first} of it"
    return {
        "slice": case.slice + (f" x {case.slices}" if case.slices > 1 else ""),
        "mesh": "x".join(map(str, case.mesh)),
        "over": over,
        "reduce-scatter": "all-reduce" if scatters else "reduce-scatter",
        "all-gather": "all-reduce" if sums(compiled(case, gathers=True)) else "all-gather",
        "priced as": "all-reduce" if whole else "reduce-scatter",
        "ms a GiB": round(1e3 * seconds, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="rows whose slice has this text")
    arguments = parser.parse_args()
    if CHILD not in os.environ:  # the environment must be there before jax is
        added = environment(described(CASES[0])) | {CHILD: "1"}
        command = [sys.executable, "-m", "benchmarks.tpu_scatters", *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, **added}).returncode
    try:
        rows = [row(case) for case in CASES if arguments.only in case.slice]
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if not rows:
        parser.error(f"no slice has {arguments.only!r}")
    other = sum(made["reduce-scatter"] != made["priced as"] for made in rows)
    gathers = sum(made["all-gather"] != "all-gather" for made in rows)
    targets = (
        Target("reduce-scatters that are not what they are priced as", float(other), 0.0),
        Target("gathers that are all-reduces", float(gathers), 0.0),
    )
    show(rows, targets, arguments.json)
    return 0 if all(target.met for target in targets) else 1


if __name__ == "__main__":
    raise SystemExit(main())
