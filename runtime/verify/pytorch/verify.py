"""A plan against the model that it was made from, on the plan's own ranks.

Every rank runs the plan; rank 0 also runs the original model, gathers the pieces of gradients and
weights, and compares each with its region of the whole. A piece that several ranks hold is compared
on each of them. Once its own gradients are compared, the program's optimizer steps on those of the
model, for which `autopar.runtime.verify.verified` has the argument.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autopar.files import plan_folder
from autopar.frontends.pytorch import capture
from autopar.lowering.collectives import Row
from autopar.nouns.axes import PIPELINE
from autopar.nouns.errors import UserError
from autopar.nouns.workload import Workload
from autopar.runtime.pytorch import program
from autopar.runtime.pytorch.counting import Counting
from autopar.runtime.pytorch.initialize import initialize
from autopar.runtime.pytorch.parameters import Region, region_shape
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.recomputing import recomputations
from autopar.runtime.pytorch.recording import Record, record
from autopar.runtime.pytorch.scaled_products import compared, products_as
from autopar.runtime.pytorch.training.load import (
    check_model_of,
    check_same,
    read_program,
    start,
)
from autopar.runtime.pytorch.training.trainer import Program, Trainer
from autopar.runtime.shared.edits import known_edits, raise_edited
from autopar.runtime.shared.planned_workload import planned_workload
from autopar.runtime.shared.program_module import read_lists, read_train
from autopar.runtime.verify.collectives import compare_priced
from autopar.runtime.verify.pytorch import stand_ins
from autopar.runtime.verify.pytorch.comparison import Comparison, Piece
from autopar.runtime.verify.pytorch.kernels import not_run
from autopar.runtime.verify.pytorch.locate import locate, probed
from autopar.runtime.verify.pytorch.modes import FixedDraws, exact
from autopar.runtime.verify.pytorch.narrow import narrow_result
from autopar.runtime.verify.pytorch.reference import (
    STEPS,
    Reference,
    is_compared,
    random_batch,
    reference,
)
from autopar.runtime.verify.recomputed import differences
from autopar.runtime.verify.verified import TOLERANCE, Errors, VerifyResult, narrowest, rounding_of

_references: dict[str, Reference] = {}
_checked: set[tuple[str, str]] = set()
_recorded: dict[str, Record] = {}
"""How models initialise themselves, by target as `_references`."""
KEPT_BYTES = 1 << 20
"""Of tensors in a record that is kept: constants, not weights."""


def verify(folder: str | Path) -> dict[str, Any]:
    """Verifies the plan in ``folder``; all its ranks call it. Rank 0's answer is a `VerifyResult`
    as `dataclasses.asdict` gives it, the others' is empty."""
    begin = time.perf_counter()
    plan = plan_folder.read_plan(folder)
    place = start()
    check_same(plan, folder)
    target = plan_folder.workload_of(folder, plan)
    workload = planned_workload(folder, plan)
    if (target, plan.fingerprints.model) not in _checked:
        check_model_of(plan, workload, folder)
        _checked.add((target, plan.fingerprints.model))
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first and target not in _references:
        cpu = torch.device("cpu")
        _references[target] = reference(workload, random_batch(workload), cpu)
    wanted = _references.get(target)
    batch, above = _broadcast((wanted.batch, wanted.above) if wanted is not None else ({}, 0.0))
    stand_ins.above.set(above)
    try:
        # What compiled kernels round otherwise is not the program's.
        with torch.compiler.set_stance("force_eager"):
            with products_as("whole"):
                lifted = _run(folder, workload, batch, place, wanted, torch.float64)
            precision = narrowest(plan_folder.read_graph(folder), plan.precision)
            rounding = rounding_of(precision)
            with compared() as seen:
                own = _run(folder, workload, batch, place, wanted, None, precision, rounding)
            narrow = None
            if plan.recipes:
                trainer = make_trainer(
                    folder, workload, place, torch.float64, recorded_once(folder)
                )
                narrow = narrow_result(
                    Path(folder), workload, trainer, batch, wanted, seen, _gather
                )
    except Exception as error:  # of an edited program, maybe
        # Every rank finds that out for itself: the others may wait for this one in a collective.
        raise_edited(error, known_edits(folder, plan, partial(capture, workload)))
        raise
    failed = lifted.errors is not None and lifted.errors.largest > TOLERANCE
    with products_as("whole"):
        where = _locate(folder, workload, batch, place, failed)
    if not first:
        return {}
    assert lifted.errors is not None
    assert own.errors is not None
    match, lines = compare_priced(folder, own.issued)
    if (match is False or own.recomputed) and not where:
        where = known_edits(folder, plan, partial(capture, workload))
    result = VerifyResult(
        plan=str(folder),
        ranks=plan.device_count,
        exact=lifted.errors,
        own=own.errors,
        precision=precision,
        computes_in=plan.precision,
        collectives_match=match,
        collective_differences=tuple(lines),
        issued=tuple(asdict(row) for row in own.issued),
        recompute_differences=tuple(own.recomputed),
        time_s=time.perf_counter() - begin,
        first_difference=where,
        narrow=narrow,
        unchecked=tuple(not_run(plan.kernels, place)),
    )
    return asdict(result)


def _broadcast(value: Any) -> Any:
    """``value`` of rank 0, on every rank."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def _locate(
    folder: str | Path,
    workload: Workload,
    batch: Mapping[str, Any],
    device: torch.device,
    failed: bool,
) -> str:
    """What rank 0 says of the first difference, if it ``failed``; all ranks call this."""
    texts: Any = ""
    if failed:
        try:
            texts = probed(folder, workload)
        except UserError as error:
            texts = f"the first difference cannot be named, the model is not to be had: {error}"
    texts = _broadcast(texts)
    if isinstance(texts, str):
        return texts
    return locate(texts, workload, batch, device)


Line = TypeVar("Line")


@dataclass(slots=True)
class _Run:
    errors: Errors | None = None
    issued: list[Row] = field(default_factory=list)
    recomputed: list[str] = field(default_factory=list)
    """How that differs from the plan, a line each."""


def _run(
    folder: str | Path,
    workload: Workload,
    batch: Mapping[str, Any],
    device: torch.device,
    wanted: Reference | None,
    lift: torch.dtype | None,
    precision: str = "float64",
    tolerance: float = TOLERANCE,
) -> _Run:
    """`STEPS` steps; without ``lift`` one more, whose collectives are counted."""
    trainer = make_trainer(folder, workload, device, lift, recorded_once(folder))
    quiet: Callable[[], AbstractContextManager[Any]] = exact if lift else FixedDraws
    given = dict(batch) if lift is not None else _as_planned(folder, batch)
    comparison = Comparison(wanted, precision, tolerance)
    compared_steps(trainer, given, wanted, comparison, quiet)
    result = _Run(comparison.errors() if wanted is not None else None)
    if lift is None:
        # DDP settles its buckets in the first steps; this one is like all later ones.
        with FixedDraws(), Counting(trainer.ranks) as counted, recomputations() as again:
            trainer.step(given)
        plan, graph = plan_folder.read_plan(folder), plan_folder.read_graph(folder)
        differing = differences(plan, graph, trainer.ranks.index(PIPELINE), again)
        result.issued = _of_every_place(counted.rows(), trainer.ranks)
        result.recomputed = _of_every_place(differing, trainer.ranks)
    return result


def _of_every_place(own: list[Line], ranks: Ranks) -> list[Line]:
    """On rank 0 the rows of the first rank of every place on ``pp``; a collective call."""
    group = ranks.group(PIPELINE)
    if group is None:
        return own
    by_stage: list[list[Line]] = [[] for _ in range(ranks.size(PIPELINE))]
    dist.all_gather_object(by_stage, own, group=group)
    return [row for rows in by_stage for row in rows]


def compared_steps(
    trainer: Trainer,
    batch: Mapping[str, Any],
    wanted: Reference | None,
    comparison: Comparison,
    quiet: Callable[[], AbstractContextManager[Any]],
) -> list[torch.Tensor | None]:
    """`STEPS` steps, each on the reference's gradients once the program's own are compared; the
    norms that `Trainer.update` gives. All ranks call it, ``wanted`` is None on all but rank 0."""
    norms = []
    for step in range(STEPS):
        with quiet():
            loss = trainer.backward(batch)
        comparison.loss(step, float(loss))
        graded = [(h.name, h.region, h.leaf.grad) for h in trainer.held]
        pieces = [(name, region, grad) for name, region, grad in graded if grad is not None]
        _gather(pieces, partial(comparison.gradients, step))
        _give(trainer, wanted, step)
        norms.append(trainer.update())
    held: list[Piece] = [(h.name, h.region, h.leaf.detach()) for h in trainer.held]
    held += [(n, r, t) for n, t, r in trainer.storage.buffers() if is_compared(t)]
    _gather(held, comparison.weights)
    return norms


def _give(trainer: Trainer, wanted: Reference | None, step: int) -> None:
    """Overwrites the program's gradients with the reference's. Where the program has none, it
    stays without: then it has been told, or the weights will tell."""
    named = wanted.gradients[step] if wanted is not None else {}
    known = {name: tuple(g.shape) for name, g in named.items()}
    known, alias = _broadcast((known, wanted.alias if wanted is not None else {}))
    sizes = {name: math.prod(shape) for name, shape in known.items()}
    flat = torch.empty(sum(sizes.values()), dtype=torch.float64)
    if named:
        torch.cat([g.detach().reshape(-1).cpu() for g in named.values()], out=flat)
    if dist.is_initialized():
        dist.broadcast(flat, src=0)
    parts = dict(zip(known, torch.split(flat, list(sizes.values())), strict=True))
    for held in trainer.held:
        name, grad = alias.get(held.name, held.name), held.leaf.grad
        if grad is not None and name in parts:
            whole = parts[name].view(known[name])
            if whole[held.region].shape == grad.shape:
                grad.copy_(whole[held.region])


def recorded_once(folder: str | Path) -> Callable[[Callable[[], nn.Module]], Record]:
    """`record` of the plan's model, which all plans of one target need only once.

    One that holds more than a little memory is made again. A replay may write into constants, so
    each gets its own.
    """
    target = plan_folder.workload_of(folder, plan_folder.read_plan(folder))

    def recorded(make: Callable[[], nn.Module]) -> Record:
        kept = _recorded.get(target)
        if kept is None:
            kept = record(make)
            real = [v for v in kept.values.values() if isinstance(v, torch.Tensor)]
            if sum(tensor.nbytes for tensor in (*real, *kept.constants.values())) > KEPT_BYTES:
                return kept
            _recorded[target] = kept
        return replace(kept, constants={key: t.clone() for key, t in kept.constants.items()})

    return recorded


def make_trainer(
    folder: str | Path,
    workload: Workload,
    device: torch.device,
    lift: torch.dtype | None,
    recorded_of: Callable[[Callable[[], nn.Module]], Record] = record,
) -> Trainer:
    """The plan's trainer with the original initial weights; ``lift`` replaces float32 in it."""
    assert workload.model is not None
    make = workload.model
    before = program.FP32
    program.FP32 = lift or before  # emitted code takes the name when it is imported
    try:
        plan = plan_folder.read_plan(folder)
        lists = read_lists(folder, plan)
        emitted = Program.of(read_program(folder), lists, read_train(folder))
    finally:
        program.FP32 = before
    return Trainer(
        emitted,
        workload,
        lambda targets: initialize(make, workload.seed, targets, recorded_of),
        Ranks(emitted.mesh, device),
        lift=lift,
    )


def _as_planned(folder: str | Path, batch: Mapping[str, Any]) -> dict[str, Any]:
    """``batch`` in the dtypes that the workload gives it."""
    own = {entry.name: entry.dtype for entry in plan_folder.read_batch(folder)}
    return {
        n: v.to(getattr(torch, own[n])) if isinstance(v, torch.Tensor) and n in own else v
        for n, v in batch.items()
    }


def _gather(pieces: list[Piece], compare: Callable[[list[Piece]], None]) -> None:
    """Hands the pieces of all ranks, in float64 on the CPU, to ``compare`` on rank 0."""
    flats = [t.detach().reshape(-1).to("cpu", torch.float64) for _, _, t in pieces]
    flat = torch.cat([*flats, torch.empty(0, dtype=torch.float64)])
    if not dist.is_initialized():
        compare(_pieces([(name, region) for name, region, _ in pieces], flat))
        return
    rank, world = dist.get_rank(), dist.get_world_size()
    index: list[Any] | None = [None] * world if rank == 0 else None
    own = [(name, [(s.start, s.stop) for s in region]) for name, region, _ in pieces]
    dist.gather_object(own, index, dst=0)
    longest = torch.tensor(flat.numel())
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    padded = nn.functional.pad(flat, (0, int(longest) - flat.numel()))
    into = [torch.empty_like(padded) for _ in range(world)] if rank == 0 else None
    dist.gather(padded, into, dst=0)
    if index is not None and into is not None:
        gathered: list[Piece] = []
        for named, values in zip(index, into, strict=True):
            regions = [(name, tuple(slice(*ends) for ends in region)) for name, region in named]
            gathered += _pieces(regions, values)
        compare(gathered)


def _pieces(named: list[tuple[str, Region]], flat: torch.Tensor) -> list[Piece]:
    pieces: list[Piece] = []
    start = 0
    for name, region in named:
        shape = region_shape(region)
        count = math.prod(shape)
        pieces.append((name, region, flat[start : start + count].view(shape)))
        start += count
    return pieces
