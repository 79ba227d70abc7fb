"""From a plan folder to a trainer on this process's place in the mesh, with everything checked."""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.files import plan_folder
from autopar.nouns.errors import UserError
from autopar.nouns.plan import Plan
from autopar.nouns.workload import Workload
from autopar.runtime.pytorch.groups import own_optimizer
from autopar.runtime.pytorch.initialize import Target, initialize
from autopar.runtime.pytorch.optimizer import of_groups as make_optimizer_of
from autopar.runtime.pytorch.own_model import difference, fields, start_from
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.training.program import Program
from autopar.runtime.pytorch.training.trainer import Trainer
from autopar.runtime.shared.planned_workload import workload_for
from autopar.runtime.shared.program_module import read_lists, read_train, run_program
from autopar.runtime.shared.settings import (
    ProgramError,
    check_settings,
    check_workload,
    tell_changes,
)
from autopar.runtime.shared.stale import changed_batch, check_fingerprint, check_tool

TIMEOUT_S = 300.0
"""How long a collective waits for ranks that neither come nor die."""


class PlansDiffer(UserError):
    """The ranks of one job were given different plans."""


def load(
    folder: str | Path,
    device: str = "auto",
    check_model: bool = True,
    model: Any = None,
    optimizer: Any = None,
    groups: Sequence[Mapping[str, Any]] | None = None,
) -> Trainer:
    """The trainer of the plan in ``folder``, with the initial weights of the original model, or
    those that ``model`` has now where that is an `nn.Module`.

    Called by every process of a torchrun job (or by a plain process where the plan has one rank);
    starts the process group if that has not happened. ``device`` is ``cpu``, ``cuda`` or ``auto``.

    Raises:
        PlansDiffer: the ranks do not run the same plan and program.
        StalePlan: the model is not the one that was planned (``check_model``: capture it again).
        ProgramError: the number of processes is not the plan's.
    """
    place = start(device)
    program, workload = read(folder, check_model, model)
    program = replace(program, train=read_train(folder))
    assert workload.model is not None
    make = workload.model
    notes: list[str | None] = [None]

    def fill(targets: Mapping[str, Target]) -> None:
        if isinstance(model, nn.Module):
            start_from(model, targets)
        else:
            notes[0] = initialize(make, workload.seed, targets)

    trainer = Trainer(
        program,
        workload,
        fill,
        Ranks(program.mesh, place),
        planned=plan_folder.read_batch(folder),
        folder=Path(folder),
        optimizer=None
        if optimizer is None and groups is None
        else lambda held: own_optimizer(
            held, optimizer or partial(make_optimizer_of, workload), groups, model
        ),
    )
    trainer.predicted = plan_folder.read_plan(folder).prediction
    if notes[0] is not None and trainer.ranks.rank == 0:
        print(
            f"autopar: the whole model was built in memory for its initial weights ({notes[0]})",
            file=sys.stderr,
        )
    return trainer


def read(
    folder: str | Path, check_model: bool = True, model: Any = None
) -> tuple[Program, Workload]:
    """The program of a plan and the workload that it was made from, see `workload_for`; raises as
    `load`."""
    plan = plan_folder.read_plan(folder)
    check_same(plan, folder)
    workload = workload_for(folder, model, fields)
    if check_model:
        check_model_of(plan, workload, folder, tell=model is None)
    return Program.of(read_program(folder), read_lists(folder, plan)), workload


def start(device: str = "auto", timeout_s: float = TIMEOUT_S) -> torch.device:
    """Joins the process group that torchrun's environment names; returns this process's device.

    NCCL (and gloo for what lies on the CPU) where there is a GPU for every local process, gloo
    otherwise. Without that environment the process stays alone.
    """
    local, count = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device == "auto":
        device = "cuda" if torch.cuda.device_count() >= count else "cpu"
    place = torch.device("cpu")
    if device == "cuda":
        if torch.cuda.device_count() < count:
            raise UserError(
                f"device cuda: {torch.cuda.device_count()} GPUs for {count} processes on this "
                "machine; use --device cpu, or plan for fewer devices"
            )
        place = torch.device("cuda", local)
        torch.cuda.set_device(place)
    if not dist.is_initialized() and "RANK" in os.environ:
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        atexit.register(_end_groups)
    return place


def _end_groups() -> None:
    """Before the interpreter ends. A thread of gloo that lets go of the last collective's tensors
    waits for the interpreter's lock, and one that gets it too late aborts the process ("terminate
    called without an active exception"): so it is left to them for a moment."""
    if dist.is_initialized():
        dist.destroy_process_group()
    time.sleep(0.1)


def leave() -> None:
    """Ends this process once all ranks are here."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    # Tearing the interpreter down under gloo's threads aborts now and then; the work is done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def rank_of_job(device: str = "auto") -> Iterator[torch.device]:
    """Inside, this process is a rank of its job, see `start`; behind it the process ends, for a
    user's error with a message and exit code 2."""
    try:
        yield start(device)
    except UserError as error:
        print(f"autopar: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    leave()


def check_same(plan: Plan, folder: str | Path) -> None:
    """Raises `PlansDiffer` on every rank unless all have the same plan and program."""
    if not dist.is_initialized():
        return
    own = (plan.fingerprint(), _program_hash(folder), str(Path(folder).resolve()))
    by_rank: list[tuple[str, str, str]] = [own] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    if len({(plan_hash, program) for plan_hash, program, _ in by_rank}) > 1:
        shown = "; ".join(
            f"rank {rank}: plan {plan_hash}, program {program} from {where}"
            for rank, (plan_hash, program, where) in enumerate(by_rank)
        )
        raise PlansDiffer(
            f"the ranks run different plans. {shown}. Copy one plan folder to every machine"
        )


def _program_hash(folder: str | Path) -> str:
    digest = hashlib.sha256()
    for file in sorted((Path(folder) / plan_folder.PROGRAM).iterdir()):
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def check_model_of(plan: Plan, workload: Workload, folder: str | Path, tell: bool = True) -> None:
    """Captures the model again on rank 0 and compares its fingerprint with the plan's.

    Raises `StalePlan` where the model, or the tool that planned it, is another one now. A changed
    learning rate and the like is told (``tell``), and used.
    """
    check_tool(plan)
    check_workload(plan, workload)
    answer = ["", ""]
    if not dist.is_initialized() or dist.get_rank() == 0:
        from autopar.frontends.pytorch import capture

        try:
            captured = capture(workload)
            changes = changed_batch(folder, captured.batch)
            if captured.fingerprint() != plan.fingerprints.model:
                changes = changes or difference(captured.graph, plan_folder.read_graph(folder))
            answer = [captured.fingerprint(), changes]
        except UserError as error:
            answer = [f"none, it cannot be captured any more: {error}", ""]
        if tell and answer[0] == plan.fingerprints.model:
            tell_changes(plan, workload)
    if dist.is_initialized():
        dist.broadcast_object_list(answer, src=0)
    check_fingerprint(plan, *answer)


def read_program(folder: str | Path) -> ModuleType:
    """Runs ``program/model.py`` of a plan folder. Raises `PlanFolderError`, `ProgramError`."""
    file = plan_folder.code_of(folder, plan_folder.MODEL)
    module = run_program(file.read_text(), str(file))
    if not hasattr(module, "Model") and not hasattr(module, "STAGES"):
        raise ProgramError(f"{file} is no PyTorch program of autopar: it has no class `Model`")
    check_settings(plan_folder.read_plan(folder), module.MESH, module.SETTINGS)
    return module
