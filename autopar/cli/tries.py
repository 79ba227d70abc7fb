"""`autopar plan --try N`: the best few plans run for some steps here, and the fastest is kept."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.commands import plan_files
from autopar.cli.progress import progress
from autopar.files import plan_folder
from autopar.nouns.errors import UserError
from autopar.planner.tries import RUNS, Tried, kept, worth_trying
from autopar.report.tries import tries_object
from autopar.report.units import degrees
from autopar.runtime.jobs import launch
from autopar.runtime.jobs.machine import check_machine

if TYPE_CHECKING:
    from autopar.planner import PlanResult

STEPS = 10
ASIDE = ("schedule", "interleave")
"""Pins that say nothing of the layouts that are tried beside one another."""
Search = Callable[[Mapping[str, str]], "PlanResult"]


@dataclass(frozen=True, slots=True)
class Trial:
    """``results`` are the plans that ran, ``tried`` how; the one at ``place`` is kept."""

    results: list[PlanResult]
    tried: list[Tried]
    place: int

    @property
    def result(self) -> PlanResult:
        return self.results[self.place]

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
    with tempfile.TemporaryDirectory(prefix=".tried-", dir=_home(output)) as home:
        folders = [written(best, Path(home) / "0")]
        check_machine(best.plan, folders[0], "auto")
        results = [best]
        more = {name: value for name, value in fixed.items() if name in ASIDE}
        for chosen in worth_trying(best.plan, best.captured.samples, several - 1):
            try:
                results.append(search({**more, **chosen}))
            except UserError as error:
                progress(f"not tried: {_words(chosen)}: {error}")
                continue
            folders.append(written(results[-1], Path(home) / str(len(folders))))
        times_s = measured(folders, results, profile)
    tried = [
        Tried(in_words(result), result.plan.prediction.step_time_s, tuple(runs))
        for result, runs in zip(results, times_s, strict=True)
    ]
    return Trial(results, tried, kept(tried))


def measured(
    folders: list[Path], results: list[PlanResult], profile: Path | None = None
) -> list[list[float]]:
    """Of each plan the median step of every run; what disturbs one meets all in turn."""
    times_s: list[list[float]] = [[] for _ in folders]
    order = list(range(len(folders)))
    for run in range(RUNS):
        for place in order if run % 2 == 0 else reversed(order):
            progress(f"trying {in_words(results[place])}, {STEPS} steps, run {run + 1} of {RUNS}")
            done = launch.run(folders[place], STEPS, quiet=True)
            times_s[place].append(done.step_time_s)
            if profile is not None:
                from autopar.cli.profile import remember

                progress(remember(folders[place], done, profile, progress))
    return times_s


def _home(output: Path) -> Path:
    home = output.resolve().parent
    home.mkdir(parents=True, exist_ok=True)
    return home


def written(result: PlanResult, folder: Path) -> Path:
    files, _ = plan_files(result, folder)
    plan_folder.write(folder, files)
    return folder


def in_words(result: PlanResult) -> str:
    plan = result.plan
    words = [degrees(plan.degrees), f"ZeRO {plan.each('zero')}"]
    if plan.microbatches > 1:
        words.append(f"{plan.microbatches} microbatches")
    if plan.each("recompute") != "none":
        words.append(f"recompute {plan.each('recompute')}")
    return ", ".join(words)


def _words(chosen: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in chosen.items())
