"""A plan against the model that it was made from, on the plan's own ranks.

Every rank runs the plan; rank 0 also runs the original model, gathers the pieces of gradients and
weights, and compares each with its region of the whole. A piece that several ranks hold is compared
on each of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar import plan_folder
from autopar.errors import UserError
from autopar.frontends.loading import load_workload
from autopar.runtime import counting, program
from autopar.runtime.counting import Counting
from autopar.runtime.edits import EditedProgram, failed
from autopar.runtime.initialize import initialize
from autopar.runtime.loading import check_model_of, check_same, read_program, start
from autopar.runtime.locate import edited, locate, probed
from autopar.runtime.parameters import Region, region_shape
from autopar.runtime.ranks import Ranks
from autopar.runtime.reference import (
    STEPS,
    NoDropout,
    Reference,
    VerifyError,
    exact,
    random_batch,
    reference,
)
from autopar.runtime.trainer import Program, Trainer
from autopar.runtime.verified import (
    NEGLIGIBLE,
    TOLERANCE,
    Errors,
    VerifyResult,
    gradient_scale,
    narrowest,
    rounding_of,
)
from autopar.workload import Workload

Piece = tuple[str, Region, torch.Tensor]

_references: dict[str, Reference] = {}
_checked: set[tuple[str, str]] = set()


def verify_here(folder: str | Path) -> dict[str, Any]:
    """Verifies the plan in ``folder``; all its ranks call it. Rank 0's answer is a `VerifyResult`
    as `dataclasses.asdict` gives it, the others' is empty."""
    begin = time.perf_counter()
    plan = plan_folder.read_plan(folder)
    place = start()
    check_same(plan, folder)
    target = plan_folder.workload_of(folder, plan)
    workload = load_workload(target)
    if (target, plan.fingerprints.model) not in _checked:
        check_model_of(plan, workload)
        _checked.add((target, plan.fingerprints.model))
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first and target not in _references:
        cpu = torch.device("cpu")
        _references[target] = reference(workload, random_batch(workload), cpu)
    wanted = _references.get(target)
    batch = _broadcast(wanted.batch if wanted is not None else {})
    try:
        lifted = _run(folder, workload, batch, place, wanted, torch.float64)
        precision = narrowest(plan_folder.read_graph(folder), plan.precision)
        own = _run(folder, workload, batch, place, wanted, None, rounding_of(precision))
    except Exception as error:  # of an edited program, maybe
        _tell_edits(folder, workload, error)
        raise
    failed = lifted.errors is not None and lifted.errors.largest > TOLERANCE
    where = _locate(folder, workload, batch, place, failed)
    if not first:
        return {}
    assert lifted.errors is not None
    assert own.errors is not None
    match, lines = _priced(folder, own.issued)
    if match is False and not where:
        where = _edited(folder, workload)
    result = VerifyResult(
        plan=str(folder),
        ranks=plan.device_count,
        exact=lifted.errors,
        own=own.errors,
        precision=precision,
        collectives_match=match,
        collective_differences=tuple(lines),
        issued=tuple(asdict(row) for row in own.issued),
        time_s=time.perf_counter() - begin,
        first_difference=where,
    )
    return asdict(result)


def _edited(folder: str | Path, workload: Workload) -> str:
    """`edited`, or nothing where that cannot be told: there is something else to tell then."""
    try:
        return edited(folder, workload)
    except Exception:  # of a model that cannot be captured now, say
        return ""


def _tell_edits(folder: str | Path, workload: Workload, error: Exception) -> None:
    """Raises `EditedProgram` if ``error`` is that of a program that is not its plan's.

    Every rank finds that out for itself: the others may wait for this one in a collective.
    """
    changed = _edited(folder, workload)
    if changed:
        raise EditedProgram(failed(error, changed)) from error


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


def _priced(folder: str | Path, issued: list[counting.Row]) -> tuple[bool | None, list[str]]:
    file = Path(folder) / plan_folder.COLLECTIVES
    if not file.exists():
        return None, []
    lines = counting.differences(counting.from_json(file.read_text()), issued)
    return not lines, lines


@dataclass(slots=True)
class _Run:
    errors: Errors | None = None
    issued: list[counting.Row] = field(default_factory=list)


def _run(
    folder: str | Path,
    workload: Workload,
    batch: Mapping[str, Any],
    device: torch.device,
    wanted: Reference | None,
    lift: torch.dtype | None,
    negligible: float = NEGLIGIBLE,
) -> _Run:
    """`STEPS` steps; without ``lift`` one more, whose collectives are counted. ``negligible``
    stands for `NEGLIGIBLE` in a lower precision."""
    trainer = make_trainer(folder, workload, device, lift)
    quiet: Callable[[], AbstractContextManager[Any]] = exact if lift else NoDropout
    given = dict(batch) if lift is not None else _in_float32(batch)
    comparison = Comparison(wanted, negligible)
    for step in range(STEPS):
        with quiet():
            loss = trainer.backward(given)
        comparison.loss(step, float(loss))
        graded = [(h.name, h.region, h.leaf.grad) for h in trainer.held]
        pieces = [(name, region, grad) for name, region, grad in graded if grad is not None]
        _gather(pieces, partial(comparison.gradients, step))
        trainer.update()
    held: list[Piece] = [(h.name, h.region, h.leaf.detach()) for h in trainer.held]
    held += [(n, r, t) for n, t, r in trainer.storage.buffers() if t.is_floating_point()]
    _gather(held, comparison.weights)
    result = _Run(comparison.errors() if wanted is not None else None)
    if lift is None:
        # DDP settles its buckets in the first steps; this one is like all later ones.
        with NoDropout(), Counting(trainer.ranks) as counted:
            trainer.step(given)
        result.issued = counted.rows()
    return result


def make_trainer(
    folder: str | Path, workload: Workload, device: torch.device, lift: torch.dtype | None
) -> Trainer:
    """The plan's trainer with the original initial weights; ``lift`` replaces float32 in it."""
    assert workload.model is not None
    make = workload.model
    before = program.FP32
    program.FP32 = lift or before  # emitted code takes the name when it is imported
    try:
        found = Program.of(read_program(folder))
    finally:
        program.FP32 = before
    return Trainer(
        found,
        workload,
        lambda targets: initialize(make, workload.seed, targets),
        Ranks(found.mesh, device),
        lift=lift,
    )


def _in_float32(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {
        n: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
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
        found: list[Piece] = []
        for named, values in zip(index, into, strict=True):
            regions = [(name, tuple(slice(*ends) for ends in region)) for name, region in named]
            found += _pieces(regions, values)
        compare(found)


def _pieces(named: list[tuple[str, Region]], flat: torch.Tensor) -> list[Piece]:
    found: list[Piece] = []
    start = 0
    for name, region in named:
        shape = region_shape(region)
        count = math.prod(shape)
        found.append((name, region, flat[start : start + count].view(shape)))
        start += count
    return found


class Comparison:
    """Collects the largest relative errors; without a reference (ranks other than 0) nothing."""

    def __init__(self, wanted: Reference | None, negligible: float) -> None:
        self._wanted = wanted
        self._share = negligible
        self._loss = 0.0
        self._gradient = (0.0, "")
        self._weight = (0.0, "")

    def loss(self, step: int, value: float) -> None:
        if self._wanted is not None:
            right = self._wanted.losses[step]
            error = abs(value - right) / max(abs(right), 1e-300)
            self._loss = max(self._loss, error if math.isfinite(value) else math.inf)

    def gradients(self, step: int, pieces: list[Piece]) -> None:
        if self._wanted is None:
            return
        whole = self._wanted.gradients[step]
        everything = self._wanted.gradients_norm(step)
        errors = _errors(pieces, whole, self._wanted.alias, whole)
        for name, error in errors.items():
            scale = gradient_scale(float(whole[name].norm()), everything, self._share)
            self._gradient = max(self._gradient, (error / scale, name))

    def weights(self, pieces: list[Piece]) -> None:
        if self._wanted is None:
            return
        all_weights = self._wanted.weights_norm()
        found = _errors(pieces, self._wanted.weights, self._wanted.alias, self._wanted.gradients[0])
        for name, error in found.items():
            own = float(self._wanted.weights[name].norm())
            buffer = name not in self._wanted.gradients[0]
            small = own < self._share * all_weights if buffer else self._negligible(name)
            scale = all_weights if small else own
            self._weight = max(self._weight, (error / max(scale, 1e-300), name))

    def _negligible(self, name: str) -> bool:
        assert self._wanted is not None
        norms = [
            float(g[name].norm()) / max(self._wanted.gradients_norm(i), 1e-300)
            for i, g in enumerate(self._wanted.gradients)
            if name in g
        ]
        return bool(norms) and max(norms) < self._share

    def errors(self) -> Errors:
        return Errors(
            self._loss, self._gradient[0], self._weight[0], self._gradient[1], self._weight[1]
        )


def _errors(
    pieces: list[Piece],
    whole: Mapping[str, torch.Tensor],
    alias: Mapping[str, str],
    needed: Container[str],
) -> dict[str, float]:
    """Norm of the difference by name. Raises `VerifyError` where pieces do not make the whole.

    What is not ``needed`` may be missing: programs leave out tensors that the loss never reads.
    """
    squares: dict[str, float] = {}
    covered: dict[str, int] = {}
    for given, region, piece in pieces:
        name = alias.get(given, given)
        if name not in whole:
            raise VerifyError(f"the program has a value for {given}, the model has none")
        right = whole[name][region]
        if right.shape != piece.shape:
            raise VerifyError(
                f"{given}: the program holds {list(piece.shape)}, its region is {list(right.shape)}"
            )
        error = float((piece - right.cpu()).square().sum())
        squares[name] = squares.get(name, 0.0) + (error if math.isfinite(error) else math.inf)
        covered[name] = covered.get(name, 0) + piece.numel()
    for name, right in whole.items():
        held = covered.get(name, 0)
        if (held or name in needed) and (held < right.numel() or held % max(right.numel(), 1)):
            raise VerifyError(f"{name}: the ranks hold {held} of {right.numel()} elements")
    # a piece that n ranks hold was counted n times
    copies = {name: covered[name] / max(whole[name].numel(), 1) for name in squares}
    return {name: math.sqrt(square / max(copies[name], 1)) for name, square in squares.items()}


__all__ = ["Comparison", "make_trainer", "verify_here"]
