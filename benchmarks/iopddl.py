"""The contest's instances against the clock: ``python -m benchmarks.iopddl DIR``.

For every instance: the exact cost of the answer, the best known, score = best known / cost, the
lower bound and the gap, seconds and CPU seconds with loading, seconds to the first feasible answer,
peak memory (of the process and of the solver's child together), and what found it.  Each
instance runs in a process of its own within its time limit.  Exits with 1 when an answer is
infeasible or missing.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, TextIO

DEFAULT_LIMIT_S = 180.0
TARGETS = {"A": 1.0, "B": 1.0, "C": 1.0, "G": 1.0, "K": 1.02, "L": 1.001, "M": 1.00005, "R": 1.03}
"""The least score that the project asks of itself."""


@dataclass(frozen=True)
class Row:
    """One run of one instance."""

    instance: str
    seed: int
    cost: int | None
    best_known: int | None
    score: float | None
    bound: float | None
    gap: float | None
    seconds: float
    cpu_seconds: float
    first_s: float | None
    peak_mb: float
    searcher: str
    error: str = ""

    def __str__(self) -> str:
        def show(value: float | None, form: str) -> str:
            return format(value, form) if value is not None else "-"

        return (
            f"{self.instance:<10} {show(self.cost, 'd'):>14} {show(self.best_known, 'd'):>14} "
            f"{show(self.score, '.6f'):>9} {show(self.bound, '.0f'):>14} "
            f"{show(self.gap, '.1e'):>8} "
            f"{self.seconds:7.1f} {self.cpu_seconds:7.1f} {show(self.first_s, '.1f'):>7} "
            f"{self.peak_mb:7.0f}  "
            f"{self.error or self.searcher}"
        )


HEADER = (
    f"{'instance':<10} {'cost':>14} {'best known':>14} {'score':>9} {'bound':>14} {'gap':>8} "
    f"{'s':>7} {'CPU s':>7} {'first s':>7} {'MB':>7}  searcher"
)


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.iopddl", description=__doc__)
    parser.add_argument("dir", type=Path, help="folder of instances, *.json or *.json.gz")
    parser.add_argument("--instances", help="names such as A,B; all by default")
    parser.add_argument("--searcher", default="portfolio")
    parser.add_argument("--csv", type=Path, help="best known values; DIR/best_known.csv by default")
    parser.add_argument("--save", type=Path, help="folder for the answers, the best of all seeds")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--seeds", default="0", help="such as 0,1,2; the median is printed as well")
    parser.add_argument("--limit-s", type=float, help="seconds instead of the contest's limit")
    parser.add_argument("--evaluations", type=int, help="a deterministic budget instead of a clock")
    parser.add_argument("--verbose", action="store_true", help="progress on stderr")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return _work(options)

    files = _instances(options.dir)
    if not files:
        print(f"no instances (*.json, *.json.gz) in {options.dir}", file=sys.stderr)
        return 2
    if options.csv and not options.csv.is_file():
        print(f"--csv {options.csv}: there is no such file", file=sys.stderr)
        return 2
    known = _best_known(options.csv or options.dir / "best_known.csv")
    wanted = options.instances.split(",") if options.instances else sorted(files)
    if missing := [name for name in wanted if name not in files]:
        print(f"no instance {', '.join(missing)} in {options.dir}", file=sys.stderr)
        return 2
    seeds = [int(seed) for seed in options.seeds.split(",")]
    rows: list[Row] = []
    if not options.json:
        print(HEADER)
    for name in wanted:
        answers: list[tuple[Row, list[int]]] = []
        for seed in seeds:
            row, choice = _run(options, name, files[name], known.get(name, {}), seed)
            rows.append(row)
            if choice is not None:
                answers.append((row, choice))
            if not options.json:
                print(row, flush=True)
        if options.save and answers:
            _save(options.save, name, answers, sys.stderr if options.json else sys.stdout)
        if len(seeds) > 1 and not options.json:
            scores = [row.score or 0.0 for row in rows if row.instance == name]
            print(f"{name:<10} {'median of ' + str(len(seeds)):>38} {median(scores):.6f}")
    if options.json:
        print(json.dumps(_summary(rows)))
    return 1 if any(row.error for row in rows) else 0


def _summary(rows: list[Row]) -> dict[str, Any]:
    python = platform.python_version()
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {python}",
        "targets": TARGETS,
        "rows": [asdict(row) for row in rows],
    }


def _instances(folder: Path) -> dict[str, Path]:
    """Files by the last part of their name: asplos-2025-iopddl-A.json.gz is A."""
    files = sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")])
    return {path.name.split(".json")[0].split("-")[-1]: path for path in files}


def _best_known(path: Path) -> dict[str, dict[str, str]]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {row["instance"]: row for row in csv.DictReader(file)}


def _save(folder: Path, name: str, answers: list[tuple[Row, list[int]]], out: TextIO) -> None:
    """Write the cheapest answer of all seeds, one without an error if there is one; say which."""
    row, choice = min(answers, key=lambda answer: (bool(answer[0].error), answer[0].cost))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(choice))
    if len(answers) > 1:
        print(f"{path} is the best answer, of seed {row.seed}: cost {row.cost}", file=out)


def _run(
    options: argparse.Namespace, name: str, path: Path, known: dict[str, str], seed: int
) -> tuple[Row, list[int] | None]:
    """One run in a process of its own, and the choice that it answered with."""
    limit = options.limit_s or float(known.get("time_limit_s") or DEFAULT_LIMIT_S)
    command = [sys.executable, "-m", "benchmarks.iopddl", str(options.dir)]
    command += ["--searcher", options.searcher, "--worker", str(path), str(limit), str(seed)]
    if options.evaluations:
        command += ["--evaluations", str(options.evaluations)]
    if options.verbose:
        command += ["--verbose"]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - started
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        answer = {"error": f"no answer (exit code {done.returncode})"}
    choice = answer.pop("choice", None)
    best = int(known["best_known_within_limit"]) if known.get("best_known_within_limit") else None
    cost = answer.get("cost")
    error = answer.get("error", "")
    if not error and seconds > limit and not options.evaluations:
        error = f"took {seconds:.1f} s of {limit:.0f} s"
    row = Row(
        instance=name,
        seed=seed,
        cost=cost,
        best_known=best,
        score=best / cost if best and cost else None,
        bound=answer.get("bound"),
        gap=answer.get("gap"),
        seconds=seconds,
        cpu_seconds=answer.get("cpu_seconds", 0.0),
        first_s=answer.get("first_s"),
        peak_mb=answer.get("peak_mb", 0.0),
        searcher=answer.get("found_by", options.searcher),
        error=error,
    )
    return row, choice


def _work(options: argparse.Namespace) -> int:
    """In the process of one instance: load, search, check, print one JSON object."""
    started = time.perf_counter()
    from autopar.nouns.problem import ProblemError
    from autopar.searchers import Budget, Progress, highs, search
    from benchmarks.contest_format import load

    path, limit, seed = options.worker

    answer: dict[str, Any] = {}

    def tell(progress: Progress) -> None:
        if progress.cost is not None:
            answer.setdefault("first_s", time.perf_counter() - started)
        if not options.verbose:
            return
        print(
            f"{progress.wall_s:7.1f} s  cost {progress.cost}  bound {progress.lower_bound:.0f}  "
            f"{progress.note}",
            file=sys.stderr,
            flush=True,
        )

    try:
        problem = load(path)
        if options.evaluations:
            budget = Budget(evaluations=options.evaluations)
        else:
            # The clock includes starting Python, loading, and coming to an end.
            spare = 2.0 + 0.04 * float(limit)
            left = float(limit) - spare - (time.perf_counter() - started)
            budget = Budget(wall_s=max(left, 1.0))
        solution = search(problem, options.searcher, budget, int(seed), tell)
        answer |= {
            "choice": solution.choice.tolist(),
            "cost": problem.total(solution.choice),
            "bound": solution.lower_bound,
            "gap": solution.gap,
            "found_by": solution.found_by,
        }
        if not problem.feasible(solution.choice):
            answer["error"] = "infeasible"
    except ProblemError as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    highs.stop()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    answer["cpu_seconds"] = sum(u.ru_utime + u.ru_stime for u in used)
    answer["peak_mb"] = sum(u.ru_maxrss for u in used) / 1024
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
