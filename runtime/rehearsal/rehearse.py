"""A plan's step rehearsed without its devices: ranks are chosen, started, and compared."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autopar.files import plan_folder
from autopar.nouns.axes import PIPELINE
from autopar.nouns.errors import UserError
from autopar.nouns.plan import Plan
from autopar.runtime.jobs import jax_launch
from autopar.runtime.jobs.causes import killed_by
from autopar.runtime.rehearsal.findings import Finding

WORKERS = {"torch": "ranks", "jax": "worker_jax"}
PLATFORMS = ("cuda", "tpu")
"""That JAX programs are lowered for."""


class NotRehearsed(UserError):
    """A rehearsal that could not be made."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """findings: of all ranks that were rehearsed, each once, those that are meant among them.
    peak_bytes: the most that tensors of a rank held in steps of ``train.py``, by rank (PyTorch);
    planned_bytes: what the plan says of the fullest."""

    framework: str
    ranks: tuple[int, ...]
    devices: int
    findings: tuple[Finding, ...]
    peak_bytes: Mapping[int, int] = field(default_factory=dict)
    planned_bytes: int = 0

    @property
    def wrong(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if not finding.reason)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "wrong": len(self.wrong)}


def rehearse(folder: str | Path) -> Rehearsal:
    """Two steps of a plan's ``train.py`` and of its trainer, and an evaluation, on one rank of each
    stage of the pipeline; a JAX program is lowered for `PLATFORMS`.

    Raises `NotRehearsed`, `PlanFolderError`.
    """
    plan = plan_folder.read_plan(folder)
    plan_folder.check_whole(folder, plan)
    ranks = stage_ranks(plan) if plan.framework == "torch" else [0]
    with tempfile.TemporaryDirectory(prefix="autopar-") as out:
        worker = f"autopar.runtime.rehearsal.{WORKERS[plan.framework]}"
        words = ["-m", worker, str(folder), ",".join(map(str, ranks)), out]
        sees_all = jax_launch.environment(plan.device_count, "cpu")
        environment = sees_all if plan.framework == "jax" else None
        code, errors = python(words, environment)
        made = [Path(out) / f"{rank}.json" for rank in ranks]
        missing = [rank for rank, file in zip(ranks, made, strict=True) if not file.exists()]
        if missing:
            how = killed_by(code) if code < 0 else "without a result"
            last_line = errors.strip().splitlines()[-1:]
            raise NotRehearsed(
                f"the rehearsal of rank {missing[0]} ended {how}: {''.join(last_line)}"
            )
        rows = [json.loads(file.read_text()) for file in made]
    findings = [Finding(**finding) for row in rows for finding in row["findings"]]
    findings += order_of_groups([row["groups"] for row in rows], ranks)
    peaks = {row["rank"]: row["peak_bytes"] for row in rows if "peak_bytes" in row}
    planned = plan.prediction.memory_bytes.allocated
    once = tuple(_once(findings))
    return Rehearsal(plan.framework, tuple(ranks), plan.device_count, once, peaks, planned)


def python(words: Sequence[str], environment: Mapping[str, str] | None) -> tuple[int, str]:
    """The exit code of ``python WORDS``, and what it wrote to stderr."""
    command = [sys.executable, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, done.stderr


def stage_ranks(plan: Plan) -> list[int]:
    """The first rank of every place in the pipeline."""
    pp = plan.degrees[PIPELINE]
    return [place * (plan.device_count // pp) for place in range(pp)]


def order_of_groups(made: Sequence[Sequence[list[int]]], ranks: Sequence[int]) -> list[Finding]:
    """Where ranks would wait for each other for ever: a process group is there when all that make
    it have come to it, each in its own order. ``made``: by rank, who makes each group."""
    waiting = {rank: list(groups) for rank, groups in zip(ranks, made, strict=True)}
    going = True
    while going:
        going = False
        for group in [groups[0] for groups in waiting.values() if groups]:
            members = [rank for rank in group if rank in waiting]
            if members and all(waiting[rank][:1] == [group] for rank in members):
                going = True
                for rank in members:
                    del waiting[rank][0]
    for rank, groups in waiting.items():
        for other in groups[0] if groups else ():
            next_there = waiting.get(other, groups)[:1]
            if next_there != groups[:1]:
                what = f"rank {rank} makes a process group with {groups[0]} next, rank {other} "
                what += f"with {next_there[0]}" if next_there else "none"
                return [Finding("refused", what, "the order in which groups are made")]
    return []


def _once(findings: Sequence[Finding]) -> list[Finding]:
    """Of the same finding on several ranks the one that came most often."""
    known: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        at = (finding.kind, finding.what, finding.where)
        if at not in known or known[at].times < finding.times:
            known[at] = finding
    return list(known.values())
