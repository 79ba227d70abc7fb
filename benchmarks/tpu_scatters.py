"""Which reduce-scatters the TPU's compiler makes whole all-reduces of, by slice and mesh axis.

    python -m benchmarks.tpu_scatters [--json [FILE]] [--only TEXT]

Compiles one `psum_scatter` over each axis of each mesh, for described slices, what programs do in
its place (`autopar.runtime.jax.parallel.scatter`) and one `all_gather`, and reads the compiled
modules; beside them what prices assume of programs, and what that takes a GiB of float32 for. No
TPU is needed, but libtpu is: `pip install libtpu`, of the version that the installed jax names. The
last rows scatter over the whole slice in turn, over one axis, then what is left over another, and
over part of a slice what is as large as the head of Llama 3. Exits with 1 where the compiler makes
of programs what is not priced.
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
from autopar.cost_models.collectives import AxisGroup, OnTorus, on_torus, price
from autopar.cost_models.slices import find_slice
from autopar.nouns.cluster import Cluster, DeviceGroup
from autopar.nouns.errors import UserError
from autopar.runtime.ahead.described import Described, devices_of, environment
from benchmarks.figures import Target, show

CHILD = "AUTOPAR_TPU_SCATTERS"
PRICED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """A slice, its devices as a mesh in rank order, and the axes that are scattered over.

    axes: one entry a scatter, after each other; an entry has the numbers of mesh dims.
    size: rows and columns.
    """

    slice: str
    mesh: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...] = ((0,),)
    slices: int = 1
    size: tuple[int, int] = (16384, 1024)


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
    Case("v5e-4x4", (8, 2), size=(4096, 128256)),
    Case("v5e-4x4", (8, 2), size=(4096, 128000)),
    Case("v5e-16x16", (128, 2), size=(4096, 128256)),
)


def described(case: Case) -> Described:
    one = find_slice(case.slice)
    name = case.slice.replace("-", ":")
    wraps = one.generation.wraps(one.shape)
    return Described("tpu", one.device_count * case.slices, name, wraps, case.slices)


def compiled(case: Case, what: str) -> str:
    """The module of a ``scatter``, of what a ``program`` does for it, or of a ``gather``."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from autopar.runtime.jax import parallel

    mesh = Mesh(np.array(devices_of(described(case))).reshape(case.mesh), names(case.mesh))
    over = [tuple(names(case.mesh)[dim] for dim in axes) for axes in case.axes]
    split = PartitionSpec(tuple(axis for axes in over for axis in axes))

    def scatter(x: Any) -> Any:
        for axes in over:
            x = jax.lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True)
        return x

    def program(x: Any) -> Any:
        for axes, place in zip(over, places(case), strict=True):
            first = 0 if place is None else place.first
            x = parallel.scatter(x, 0, axes if len(axes) > 1 else axes[0], first=first)
        return x

    def gather(x: Any) -> Any:
        return jax.lax.all_gather(x, split[0], axis=0, tiled=True)

    whole = PartitionSpec()
    function = {"scatter": scatter, "program": program, "gather": gather}[what]
    given, made = (split, whole) if what == "gather" else (whole, split)
    step = jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=made, check_vma=False)
    shape = jax.ShapeDtypeStruct(case.size, jnp.float32, sharding=NamedSharding(mesh, given))
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


def groups(case: Case) -> list[AxisGroup]:
    """What each scatter goes over."""
    sizes, made = case.mesh, []
    for axes in case.axes:
        outer = sizes[axes[0]] if len(axes) > 1 else 0
        ranks, apart = (math.prod(sizes[d] for d in axes), math.prod(sizes[max(axes) + 1 :]))
        made.append(AxisGroup(ranks, apart, outer))
    return made


def cluster(case: Case) -> Cluster:
    one = find_slice(case.slice)
    devices = DeviceGroup(find_device(one.generation.device), one.device_count * case.slices)
    return Cluster(case.slice, (devices,), one.levels(case.slices))


def places(case: Case) -> list[OnTorus | None]:
    return [on_torus(cluster(case), over) for over in groups(case)]


def priced(case: Case) -> tuple[bool, float]:
    """Whether prices take any of the scatters for an all-reduce, and the seconds of all of them."""
    whole = any(place is not None and place.whole and not place.first for place in places(case))
    size_bytes, seconds = float(PRICED_BYTES), 0.0
    for over in groups(case):
        seconds += price(cluster(case), "reduce_scatter", over).time_s(size_bytes)
        size_bytes /= over.size
    return whole, seconds


def row(case: Case) -> dict[str, Any]:
    whole, seconds = priced(case)
    over = " then ".join("x".join(str(case.mesh[dim]) for dim in axes) for axes in case.axes)
    two = [place.first for place in places(case) if place is not None and place.first]
    return {
        "slice": case.slice + (f" x {case.slices}" if case.slices > 1 else ""),
        "mesh": "x".join(map(str, case.mesh)),
        "over": over,
        "rows x columns": "x".join(map(str, case.size)),
        "one scatter": _made(case, "scatter"),
        "program": _made(case, "program"),
        "first": two[0] if two else None,
        "all-gather": _made(case, "gather"),
        "priced as": "all-reduce" if whole else "reduce-scatter",
        "ms a GiB": round(1e3 * seconds, 1),
    }


def _made(case: Case, what: str) -> str:
    own = "all-gather" if what == "gather" else "reduce-scatter"
    return "all-reduce" if sums(compiled(case, what)) else own


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
    other = sum(made["program"] != made["priced as"] for made in rows)
    gathers = sum(made["all-gather"] != "all-gather" for made in rows)
    targets = (
        Target("programs that are not what they are priced as", float(other), 0.0),
        Target("gathers that are all-reduces", float(gathers), 0.0),
    )
    show(rows, targets, arguments.json)
    return 0 if all(target.met for target in targets) else 1


if __name__ == "__main__":
    raise SystemExit(main())
