"""Whether ``verify`` finds errors that are planted in the package, one at a time.

    python -m benchmarks.planted_errors [--only NAME]... [--framework torch|jax] [--jobs 2]
                                        [--sample 10 --seed 0] [--json]

Each error is one piece of the text of one function of capture, lifting, rules, emission or runtime,
replaced in a process of its own, which plans a small model under a fixed layout, if the error is in
what plans, and verifies it; the same case without an error comes first, and must be right. Where
the text to replace is not found exactly once, nothing is run. A row says what ``verify`` said:
``WRONG``, or ``right`` where it missed the error; a refusal does not count as found.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks import planted_jax, planted_torch
from benchmarks.figures import Target, show
from benchmarks.planting import Case, Planted, check, judged

CASES: Mapping[str, Case] = {**planted_torch.CASES, **planted_jax.CASES}
ERRORS: Mapping[str, tuple[Planted, ...]] = {
    "torch": planted_torch.ERRORS,
    "jax": planted_jax.ERRORS,
}
LEAST = 60
_IMPORTED = {
    "torch": (
        "autopar.runtime.jobs.pytorch_worker",
        "autopar.runtime.verify.pytorch.verify",
        "autopar.frontends.pytorch",
    ),
    "jax": ("autopar.runtime.verify.jax.verify",),
}
Task = tuple[str, tuple[Any, ...]]
_fork = multiprocessing.get_context("fork")


def ready(framework: str, errors: Sequence[Planted]) -> None:
    """Imports once what every process needs, and looks whether all errors can be planted.

    Raises `CannotPlant`.
    """
    for module in (*_IMPORTED[framework], "autopar.planner", "autopar.cli.commands"):
        importlib.import_module(module)
    for error in errors:
        check(error)


def rows(errors: Sequence[Planted], scratch: Path, jobs: int) -> list[dict[str, Any]]:
    """A row a case, without an error, and then a row an error; `ready` has been called."""
    names = list(dict.fromkeys(error.case for error in errors))
    folders = {name: scratch / f"case {i}" for i, name in enumerate(names)}
    controls: list[Task] = [
        (f"none: {n}", (CASES[n], None, folders[n] / "plan", folders[n])) for n in names
    ]
    planted: list[Task] = [
        (e.name, (CASES[e.case], e, folders[e.case] / "plan", scratch / f"error {i}"))
        for i, e in enumerate(errors)
    ]
    about = [{"part": "", "framework": CASES[n].framework} for n in names]
    about += [{"part": e.part, "framework": CASES[e.case].framework} for e in errors]
    verdicts = [*_all(controls, jobs), *_all(planted, jobs)]
    labels = [label for label, _ in (*controls, *planted)]
    return [
        {"error": label, **more, "verdict": row.pop("verdict"), **row}
        for label, more, row in zip(labels, about, verdicts, strict=True)
    ]


def summary(verdicts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line a framework and part; ``--json`` has every error."""
    lines: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in verdicts:
        lines.setdefault((row["framework"], row["part"] or "no error"), []).append(row)
    return [
        {
            "framework": framework,
            "part": part,
            "cases": len(mine),
            "WRONG": sum(row["verdict"] == "WRONG" for row in mine),
            "right": sum(row["verdict"] == "right" for row in mine),
            "refused": sum(row["verdict"] not in ("WRONG", "right") for row in mine),
            "told by the weights alone": sum(row.get("told by") == "weight" for row in mine),
        }
        for (framework, part), mine in lines.items()
    ]


def _all(tasks: Sequence[Task], jobs: int) -> list[dict[str, Any]]:
    """`judged` of every task, each in a process, ``jobs`` at a time."""
    verdicts: list[dict[str, Any]] = [{} for _ in tasks]
    running: dict[Connection, tuple[int, Any]] = {}
    left = list(enumerate(tasks))
    while left or running:
        while left and len(running) < jobs:
            place, (_, arguments) = left.pop(0)
            ours, theirs = _fork.Pipe(duplex=False)
            process = _fork.Process(target=_send, args=(theirs, arguments))
            process.start()
            theirs.close()
            running[ours] = (place, process)
        for connection in list(running):
            if connection not in wait(list(running)):
                continue
            place, process = running.pop(connection)
            verdicts[place] = connection.recv()
            process.join()
            print(f"{tasks[place][0]}: {verdicts[place]['verdict']}", file=sys.stderr, flush=True)
    return verdicts


def _send(to: Connection, arguments: tuple[Any, ...]) -> None:
    to.send(judged(*arguments))
    to.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="errors of this name")
    parser.add_argument("--framework", choices=("torch", "jax"))
    parser.add_argument("--sample", type=int, help="so many of them alone")
    parser.add_argument("--seed", type=int, default=0, help="with --sample: what it draws by")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="where plans and programs stay")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    errors = [
        error
        for framework, some in ERRORS.items()
        for error in some
        if given.framework in (None, framework) and (not given.only or error.name in given.only)
    ]
    if given.sample is not None:
        errors = random.Random(given.seed).sample(errors, given.sample)
    if not errors:
        parser.error(f"--only {given.only}: there is no such error")
    for framework in dict.fromkeys(CASES[e.case].framework for e in errors):
        ready(framework, [e for e in errors if CASES[e.case].framework == framework])
    with tempfile.TemporaryDirectory() as folder:
        verdicts = rows(errors, given.keep or Path(folder), given.jobs)
    controls = [row for row in verdicts if not row["part"]]
    planted = [row for row in verdicts if row["part"]]
    wrong = sum(row["verdict"] == "WRONG" for row in planted)
    targets = [
        Target("planted errors that are not called WRONG", len(planted) - wrong, 0),
        Target("cases without an error that are not right",
               sum(row["verdict"] != "right" for row in controls), 0),
    ]  # fmt: skip
    if given.framework is None and not given.only and given.sample is None:
        targets.append(Target(f"errors below {LEAST}", max(0, LEAST - len(planted)), 0))
    show(verdicts if given.json else summary(verdicts), targets, given.json)
    sys.exit(0 if all(target.met for target in targets) else 1)


if __name__ == "__main__":
    main()
