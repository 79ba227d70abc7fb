"""`autopar plan --try N` and `autopar tune`: the best few plans run for some steps here, and the
fastest is kept."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.commands import plan_files, write_plan
from autopar.cli.progress import progress
from autopar.files import plan_folder, whole_file
from autopar.nouns.errors import UserError
from autopar.nouns.layout import OF_PROGRAMS
from autopar.planner.advice.tries import RUNS, Tried, kept, worth_trying
from autopar.report.tries import tries_object
from autopar.report.units import degrees
from autopar.runtime.jobs import launch
from autopar.runtime.jobs.machine import check_machine

if TYPE_CHECKING:
    from autopar.nouns.plan import Plan
    from autopar.planner import PlanResult

STEPS = 10
ASIDE = ("schedule", "interleave", *OF_PROGRAMS)
"""Pins that say nothing of the layouts that are tried beside one another."""
Search = Callable[[Mapping[str, str]], "PlanResult"]


@dataclass(frozen=True, slots=True)
class Trial:
    """How plans ran; the one at ``place`` is kept. ``others`` are those after the first."""

    others: list[PlanResult]
    tried: list[Tried]
    place: int

    @property
    def other(self) -> PlanResult | None:
        """What is kept, where it is not the first."""
        return self.others[self.place - 1] if self.place else None

    def to_json(self) -> str:
        """What ran, as the plan's folder keeps it."""
        return json.dumps(tries_object(self.tried, self.place), indent=2) + "\n"


def try_few(
    best: PlanResult,
    several: int,
    fixed: Mapping[str, str],
    search: Search,
    output: Path,
    profile: Path | None,
) -> Trial:
    """Runs ``best`` and up to ``several - 1`` of those that lost to it, in turn, each twice.

    search:  the plan under given pins.
    output:  where the plan will go: those tried stand beside it meanwhile.
    profile: where what was measured goes, by phase.

    Raises `UserError` where nothing of this runs here.
    """
    more = {name: value for name, value in fixed.items() if name in ASIDE}
    with _home(output) as home:
        first = written(best, home / "first")
        return _beside(first, best.plan, best.captured.samples, several, more, search, profile)


def tune(folder: Path, several: int, search: Search, profile: Path | None) -> Trial:
    """The same of a plan that is written: ``folder`` is then that of the fastest.

    Raises `UserError`, also for a plan whose search had nothing else to choose from.
    """
    plan = plan_folder.read_plan(folder)
    samples = next(
        e.shape[e.batch_dim] for e in plan_folder.read_batch(folder) if e.batch_dim is not None
    )
    if not worth_trying(plan, samples, 1):
        raise UserError(
            f"{folder} names no layout beside its own to try: its search was left one that fits. "
            f"Plan {plan.workload} again with fewer --fix"
        )
    trial = _beside(folder, plan, samples, several, {}, search, profile)
    if trial.other is None:
        whole_file.write(folder / plan_folder.TRIED, trial.to_json())
        return trial
    files, _ = plan_files(trial.other, folder)
    write_plan(trial.other, folder, {**files, plan_folder.TRIED: trial.to_json()})
    return trial


def _beside(
    first: Path,
    plan: Plan,
    samples: int,
    several: int,
    more: Mapping[str, str],
    search: Search,
    profile: Path | None,
) -> Trial:
    """``plan``, which stands in ``first``, and those that lost to it."""
    check_machine(plan, first, "auto")
    others: list[PlanResult] = []
    folders = [first]
    with _home(first) as home:
        for pins in worth_trying(plan, samples, several - 1):
            try:
                others.append(search({**more, **pins.texts()}))
            except UserError as error:
                progress(f"not tried: {pins}: {error}")
                continue
            folders.append(written(others[-1], home / str(len(others))))
        plans = [plan, *(other.plan for other in others)]
        times_s = measured(folders, plans, profile)
    tried = [
        Tried(in_words(one), one.prediction.step_time_s, tuple(runs))
        for one, runs in zip(plans, times_s, strict=True)
    ]
    return Trial(others, tried, kept(tried))


def measured(
    folders: list[Path], plans: list[Plan], profile: Path | None = None
) -> list[list[float]]:
    """Of each plan the median step of every run; what disturbs one meets all in turn."""
    times_s: list[list[float]] = [[] for _ in folders]
    order = list(range(len(folders)))
    for run in range(RUNS):
        for place in order if run % 2 == 0 else reversed(order):
            progress(f"trying {in_words(plans[place])}, {STEPS} steps, run {run + 1} of {RUNS}")
            done = launch.run(folders[place], STEPS, quiet=True)
            times_s[place].append(done.step_time_s)
            if profile is not None:
                from autopar.cli.profile import remember

                progress(remember(folders[place], done, profile, progress))
    return times_s


@contextmanager
def _home(beside: Path) -> Iterator[Path]:
    """A folder for plans that are tried, next to one that stays; it does not."""
    parent = beside.resolve().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tried-", dir=parent) as home:
        yield Path(home)


def written(result: PlanResult, folder: Path) -> Path:
    files, _ = plan_files(result, folder)
    write_plan(result, folder, files)
    return folder


def in_words(plan: Plan) -> str:
    words = [degrees(plan.degrees), f"ZeRO {plan.each('zero')}"]
    if plan.microbatches > 1:
        words.append(f"{plan.microbatches} microbatches")
    if plan.each("recompute") != "none":
        words.append(f"recompute {plan.each('recompute')}")
    return ", ".join(words)
