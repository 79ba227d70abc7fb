"""What the four processes of `test_dispatch` do, in one start; rank 0 writes the results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.pytorch import transport
from autopar.runtime.pytorch.counting import Counting
from autopar.runtime.pytorch.ranks import Ranks, using
from autopar.runtime.pytorch.recomputing import recompute
from autopar.runtime.pytorch.training.load import start
from tests.runtime.expert_cases import (
    EACH,
    EXPERTS,
    FORMS,
    ROUTINGS,
    WIDTH,
    Case,
    Form,
    Layout,
    case,
    furthest,
    layouts,
    own_part,
)

Around = Callable[..., Tensor]
EACH_LAYOUT = 3
"""Routings, and forms, of which each layout has its turn."""
AGAIN: dict[str, dict[str, Any]] = {
    "all": {},
    "collectives kept": {"keep_collectives": True},
    "routes kept": {"keep_routes": True},
}


def ranks_of(layout: Layout) -> Ranks:
    """The mesh of a layout of all four processes, or twice that of one of two."""
    sizes = layout.mesh.degrees
    return Ranks({"dp_shard": 4 // layout.mesh.device_count, **sizes})


def parts(of: Case, here: Ranks, around: Around | None = None) -> list[Any]:
    """What every rank of the layout's mesh makes."""
    count = of.layout.mesh.device_count
    with using(here):
        made = own_part(of, here.rank % count, around)
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, made)
    return every[:count]


def compared(of: Case, here: Ranks, around: Around | None = None) -> dict[str, float]:
    return furthest(of, parts(of, here, around))


def some_cases(meshes: dict[str, Ranks]) -> dict[str, Any]:
    """Each layout under a few routings and forms, by turns, so that each of these is tried: what
    is more is the same on simulated ranks, where all are tried under all."""
    made = {}
    known = layouts()
    turns = zip(cycle(product(ROUTINGS, ("even", "odd", "none"))), cycle(FORMS))
    for name, here in meshes.items():
        for (routing, tokens), form in islice(turns, EACH_LAYOUT):
            of = case(known[name], Form(bias=True), routing, tokens)
            made[f"{name}: {routing}, {tokens}"] = compared(of, here)
            made[f"{name}: {form}"] = compared(case(known[name], form, "drawn", "odd"), here)
    return made


def again(meshes: dict[str, Ranks], kept: dict[str, Any]) -> dict[str, Any]:
    """Recomputed in backward, whatever of it is kept."""

    def around(run: Around, *tensors: Tensor) -> Tensor:
        made: Tensor = recompute(run, *tensors, **kept)
        return made

    of = partial(case, form=Form(bias=True), routing="drawn", tokens="none")
    return {k: compared(of(layouts()[k]), here, around) for k, here in meshes.items()}


@contextmanager
def travelling() -> Iterator[tuple[list[int], list[int]]]:
    """Inside, the bytes of rows that are given to all-to-alls, and of these what others get."""
    given: list[int] = []
    crossing: list[int] = []
    plain = transport.begin_all_to_all_rows

    def watched(x: Tensor, sent: Any, received: Any, axis: str, counted: int) -> Tensor:
        size = x.shape[1] * x.itemsize
        given.append(len(x) * size)
        crossing.append((sum(sent) - sent[transport.index(axis)]) * size)
        return plain(x, sent, received, axis, counted)

    transport.begin_all_to_all_rows = watched
    try:
        yield given, crossing
    finally:
        transport.begin_all_to_all_rows = plain


def issued(name: str, here: Ranks, routing: str) -> dict[str, Any]:
    """Of a layout that dispatches over one axis of four ranks: what `Counting` counts on rank 0,
    and on every rank what it counts of rows and what travels."""
    of = case(layouts()[name], Form(), routing, "odd")
    (axis,) = of.layout.dispatch
    with Counting(here) as counted, travelling() as (given, crossing):
        parts(of, here)
    rows = [r for r in counted.rows() if r.kind == "all_to_all"]
    of_counts = EXPERTS * 8
    own = [of.tokens[here.index(axis)] * EACH * WIDTH * 8] * 4
    sums = [sum(own), sum(given), sum(crossing)]
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, sums)
    place = torch.arange(4).repeat_interleave(torch.tensor(of.tokens)).unsqueeze(1)
    return {
        "counted": sorted([r.axis, r.size_bytes, r.count] for r in rows),
        "formula": sorted([[axis, of_counts, 1], [axis, own[0], 4]]),
        "counted_bytes": [one[0] for one in every],
        "given_bytes": [one[1] for one in every],
        "crossing_bytes": [one[2] for one in every],
        "rows_to_others": int((of.index // (EXPERTS // 4) != place).sum()),
    }


def main() -> None:
    results = Path(sys.argv[1])
    start("cpu", timeout_s=60)
    meshes = {k: ranks_of(v) for k, v in layouts().items() if v.mesh.device_count <= 4}
    four = meshes["dispatched over 4"]
    made = {
        "cases": some_cases(meshes),
        "again": {how: again(meshes, kept) for how, kept in AGAIN.items()},
        "issued": [issued("dispatched over 4", four, routing) for routing in ROUTINGS],
    }
    if dist.get_rank() == 0:
        (results / "results.json").write_text(json.dumps(made))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
