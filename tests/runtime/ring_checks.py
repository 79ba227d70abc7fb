"""What the four processes of `test_ring_processes` do: every case in one start."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.nouns.mesh import Mesh
from autopar.runtime.pytorch import ranks as rank_state
from autopar.runtime.pytorch.counting import Counting
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.ring_attention import ring_attention
from autopar.runtime.pytorch.training.load import start
from autopar.runtime.shared.settings import ProgramError
from tests.runtime.ring_cases import CASES
from tests.runtime.ring_ranks import Case, Results, cut, on_this_rank, operands, own_mask, whole
from tests.sampling import some

COMPILED = ("causal", "zigzag", "added", "window of two pieces")
MESHES = {"one ring": "cp=4", "double ring": "outer=2 x inner=2"}
TRIED = some(
    [(r, name) for place, r in enumerate(MESHES) for name in list(CASES)[place :: len(MESHES)]], 24
)
"""Each case on one of the meshes: on simulated ranks each runs on all."""


def own_part(case: Case, right: Results) -> list[Tensor]:
    """This rank's pieces of what is right, but for what is a sum over ranks."""
    place = rank_state.current().index(*case.axes)
    parts = [cut(x, 2, case, place) for x in (right.out, right.q, right.k, right.v)]
    if right.mask is not None and right.mask.shape[-2] > 1:
        parts.append(own_mask(right.mask, case, place))
    return parts


def agrees(case: Case, here: Ranks) -> Any:
    """The largest distance on any rank, and bytes by axis that this rank issued."""
    with Counting(here) as counted:
        distance = distance_of(case, here)
    rows = counted.rows()
    assert {row.kind for row in rows} <= {"shift"}
    issued = {a: sum(r.size_bytes * r.count for r in rows if r.axis == a) for a in case.axes}
    return {"distance": largest(distance), "issued": issued}


def compiled(case: Case, here: Ranks) -> Any:
    @torch.compile(backend="aot_eager")
    def attend(q: Tensor, *args: Any, **options: Any) -> Tensor:
        out: Tensor = ring_attention(q * 2 / 2, *args, **options)
        return out * 1  # a graph before it and one after

    return {"distance": largest(distance_of(case, here, attend))}


def distance_of(case: Case, here: Ranks, attend: Callable[..., Tensor] = ring_attention) -> float:
    given = operands(case)
    with rank_state.using(here):
        got = on_this_rank(case, given, attend)
        right = own_part(case, whole(case, given))
    return max(
        float((x - y).norm() / max(1.0, float(y.norm()))) for x, y in zip(got, right, strict=False)
    )


def largest(distance: float) -> float:
    """Of all ranks'."""
    worst = torch.tensor([distance])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def unequal(here: Ranks) -> list[str]:
    """What each rank says where the last one has a row less."""
    rows = 6 - (dist.get_rank() == 3)
    x = torch.zeros(1, 2, rows, 4)
    try:
        with rank_state.using(here):
            ring_attention(x, x, x, ring=tuple(here.mesh.axes))
        message = ""
    except ProgramError as error:
        message = str(error)
    every = [""] * 4
    dist.all_gather_object(every, message)
    return every


def main() -> None:
    results = Path(sys.argv[1])
    start("cpu", timeout_s=60)
    meshes = {name: Ranks(axes_of(mesh)) for name, mesh in MESHES.items()}
    checks: dict[str, Callable[[], Any]] = {}
    for ring, name in TRIED:
        case = replace(CASES[name], mesh=MESHES[ring], s=24)
        checks[f"{ring}: {name}"] = lambda c=case, r=ring: agrees(c, meshes[r])  # type: ignore[misc]
    for ring, mesh in MESHES.items():
        for name in COMPILED:
            case = replace(CASES[name], mesh=mesh, s=24)
            checks[f"compiled, {ring}: {name}"] = lambda c=case, r=ring: compiled(c, meshes[r])  # type: ignore[misc]
    for ring in MESHES:
        checks[f"unequal, {ring}"] = lambda r=ring: unequal(meshes[r])  # type: ignore[misc]
    results_of: dict[str, Any] = {}
    for name, check in checks.items():
        try:
            results_of[name] = check()
        except Exception:  # whatever a check raises
            results_of[name] = {"failed": traceback.format_exc()}
            if dist.get_rank() != 0:
                raise
            break
    if dist.get_rank() == 0:
        (results / "results.json").write_text(json.dumps(results_of))
    dist.destroy_process_group()


def axes_of(mesh: str) -> Mapping[str, int]:
    parsed = Mesh.parse(mesh)
    return dict(zip(parsed.axes, parsed.sizes, strict=True))


if __name__ == "__main__":
    main()
