"""A plan against the model that it was made from, on the plan's own ranks.

Every rank runs the plan; rank 0 also runs the original model, gathers the pieces of gradients and
weights, and compares each with its region of the whole. A piece that several ranks hold is compared
on each of them. Once its own gradients are compared, the program's optimizer steps on those of the
model, for which `autopar.runtime.verify.verified` has the argument.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.files import plan_folder
from autopar.frontends.pytorch import capture
from autopar.lowering.collectives import Row
from autopar.nouns.axes import PIPELINE
from autopar.nouns.errors import UserError
from autopar.nouns.workload import Workload
from autopar.runtime.pytorch.counting import Counting
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.recomputing import recomputations
from autopar.runtime.pytorch.scaled_products import compared, products_as
from autopar.runtime.pytorch.training.load import (
    check_model_of,
    check_same,
    start,
)
from autopar.runtime.shared.edits import known_edits, raise_edited
from autopar.runtime.shared.planned_workload import planned_workload
from autopar.runtime.verify.collectives import compare_priced
from autopar.runtime.verify.pytorch import stand_ins
from autopar.runtime.verify.pytorch.comparison import Comparison
from autopar.runtime.verify.pytorch.kernels import not_run
from autopar.runtime.verify.pytorch.locate import locate, probed
from autopar.runtime.verify.pytorch.modes import FixedDraws, exact
from autopar.runtime.verify.pytorch.narrow import narrow_result
from autopar.runtime.verify.pytorch.reference import (
    Reference,
    marks_of,
    random_batch,
    reference,
)
from autopar.runtime.verify.pytorch.steps import broadcast, compared_evaluation, compared_steps
from autopar.runtime.verify.pytorch.trainers import make_trainer, recorded_once
from autopar.runtime.verify.recomputed import differences
from autopar.runtime.verify.verified import TOLERANCE, Errors, VerifyResult, narrowest, rounding_of

_references: dict[str, Reference] = {}
_checked: set[tuple[str, str]] = set()


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
        marks = marks_of(plan_folder.read_graph(folder))
        kept = [e.name for e in plan_folder.read_batch(folder) if e.numbers]
        random = random_batch(workload, marks=marks, kept=kept)
        _references[target] = reference(workload, random, cpu)
    wanted = _references.get(target)
    batch, above = broadcast((wanted.batch, wanted.above) if wanted is not None else ({}, 0.0))
    stand_ins.above.set(above)
    try:
        precision = narrowest(plan_folder.read_graph(folder), plan.precision)
        # What compiled kernels round otherwise is not the program's.
        with torch.compiler.set_stance("force_eager"):
            with products_as("whole"):
                lifted = _run(folder, workload, batch, place, wanted, torch.float64)
            with compared() as seen:
                rounding = rounding_of(precision)
                own = _run(folder, workload, batch, place, wanted, None, precision, rounding)
            narrow = narrow_result(Path(folder), workload, batch, place, wanted, seen)
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
        unchecked=(*not_run(plan.kernels, place), *_unevaluated(wanted)),
    )
    return asdict(result)


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
    texts = broadcast(texts)
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
    if lift is not None:
        compared_evaluation(trainer, given, comparison, quiet)
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


def _unevaluated(wanted: Reference | None) -> list[str]:
    """What evaluation has of the model's own, in a sentence."""
    if wanted is None or wanted.evaluation is None or not wanted.evaluation.branches:
        return []
    return [
        "the model in .eval() has another loss than without dropout and with running statistics "
        "alone: it asks for self.training by itself, and programs keep what it does in training"
    ]


def _of_every_place(own: list[Line], ranks: Ranks) -> list[Line]:
    """On rank 0 the rows of the first rank of every place on ``pp``; a collective call."""
    group = ranks.group(PIPELINE)
    if group is None:
        return own
    by_stage: list[list[Line]] = [[] for _ in range(ranks.size(PIPELINE))]
    dist.all_gather_object(by_stage, own, group=group)
    return [row for rows in by_stage for row in rows]


def _as_planned(folder: str | Path, batch: Mapping[str, Any]) -> dict[str, Any]:
    """``batch`` in the dtypes that the workload gives it."""
    own = {entry.name: entry.dtype for entry in plan_folder.read_batch(folder)}
    return {
        n: v.to(getattr(torch, own[n])) if isinstance(v, torch.Tensor) and n in own else v
        for n, v in batch.items()
    }
