"""Models as people write them: every spelling planned under several layouts, and verified.

    python -m benchmarks.spellings [--framework torch|jax] [--only NAME]... [--sample 10 --seed 0]
                                   [--workers 2] [--keep DIR] [--choices] [--json]

A free plan, tp 2 x dp_shard 2, pp 2 x dp_replicate 2, pp 4 and ZeRO 3, all for four devices. A plan
that is made is compared with the model on one device in float64. A spelling is refused where one of
its layouts is.

``--choices`` plans PyTorch's in bfloat16 for four H100 with what plans choose on top of layouts:
a loss in chunks, collectives in pieces, gathers further ahead, 8 bits. Most are refused by many.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from autopar.runtime.jobs.launch import AT_ONCE
from benchmarks.figures import Target, show
from benchmarks.in_processes import each
from benchmarks.spellings.every import every
from benchmarks.spellings.kept import Kept, kept_in
from benchmarks.spellings.planned import LAYOUTS, Outcome, outcomes
from benchmarks.spellings.refusals import REFUSALS
from benchmarks.worst_errors import worst_errors

FIRST = Path(__file__).with_name("first_run.json")
"""What became of the plans of each thing when the corpus was run for the first time."""
LIMIT = 1e-9
LIMIT_S = 180.0
MINUTES = 120.0
REFUSED_SHARE = 0.03
"""Of the PyTorch spellings."""
_PLAIN = ("planned", "not there")
_PRELOADED = ["torch", "autopar.planner.planning", "benchmarks.spellings.every"]


def rows(
    names: Sequence[str], home: Path, workers: int, kept: Kept, choices: bool
) -> list[Outcome]:
    """An outcome for every name and layout, verified where it was planned; what is kept stays."""
    left = [name for name in names if name not in kept.outcomes]
    run = partial(outcomes, home=home, choices=choices)
    for some in each(left, run, _lost, workers, LIMIT_S, _PRELOADED):
        kept.planned(some)
        counts = Counter(row.outcome for row in some)
        said = ", ".join(f"{n} {outcome}" for outcome, n in counts.items())
        print(f"{some[0].name}: {said}", file=sys.stderr, flush=True)
        for why in dict.fromkeys(row.why for row in some if row.outcome not in _PLAIN):
            print(f"    {why}", file=sys.stderr, flush=True)
    made = [row for name in names for row in kept.outcomes[name]]
    folders = [row.folder for row in made if row.folder and row.folder not in kept.errors]
    while folders:
        kept.verified(worst_errors(folders[:AT_ONCE]))
        folders = folders[AT_ONCE:]
        print(f"{len(folders)} plans to go", file=sys.stderr, flush=True)
    return [_verified(row, kept.errors[row.folder]) if row.folder else row for row in made]


def _lost(name: str, why: str, seconds: float) -> list[Outcome]:
    return [Outcome(name, layout, "crashed", why) for layout in LAYOUTS[name.partition("/")[0]]]


def _verified(row: Outcome, error: float) -> Outcome:
    return replace(row, outcome="right" if error <= LIMIT else "WRONG", error=error)


def by_thing(made: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A line for each thing: how many of its spellings under all layouts came out how."""
    lines: dict[tuple[str, str], list[Outcome]] = {}
    for row in made:
        framework, thing, _ = row.name.split("/")
        lines.setdefault((framework, thing), []).append(row)
    table = []
    first = json.loads(FIRST.read_text())
    for (framework, thing), mine in lines.items():
        counts = Counter(row.outcome for row in mine)
        bad = next((row for row in mine if row.outcome not in ("right", "not there")), None)
        table.append(
            {
                "framework": framework,
                "thing": thing,
                "plans": len(mine),
                "right": counts["right"],
                "refused": counts["refused"],
                "other": len(mine) - counts["right"] - counts["refused"],
                "right at first": first.get(f"{framework}/{thing}", {}).get("right", 0),
                "the first that is not right": _said(bad)[:110] if bad else "",
            }
        )
    return table


def _said(row: Outcome) -> str:
    return f"{row.name.split('/')[2]}, {row.layout}: {row.outcome} {row.why}"


def targets(made: Sequence[Outcome], minutes: float, choices: bool) -> list[Target]:
    def count(*kinds: str) -> int:
        return sum(row.outcome in kinds for row in made)

    pytorch = [name for name in every() if name.startswith("torch/")]
    refused = {row.name for row in made if row.outcome == "refused"}
    planned = {row.name for row in made} - refused
    share = 100 * len(refused.intersection(pytorch)) / len(pytorch)
    wrong = [
        Target("plans that are WRONG", count("WRONG"), 0),
        Target("plans that crashed or are told a defect of autopar", count("crashed", "defect"), 0),
    ]
    if choices:
        return wrong
    return [
        *wrong,
        Target("refused, and no reason is known", len(refused - REFUSALS.keys()), 0),
        Target("not refused, and a reason is told", len(planned & REFUSALS.keys()), 0),
        Target("% of all PyTorch spellings that are refused", share, 100 * REFUSED_SHARE),
        Target("minutes", minutes, MINUTES),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--framework", choices=tuple(LAYOUTS))
    parser.add_argument("--only", action="append", default=[], help="names, or what they begin by")
    parser.add_argument("--sample", type=int, help="so many of them alone")
    parser.add_argument("--seed", type=int, default=0, help="with --sample: what it draws by")
    parser.add_argument("--workers", type=int, default=2, help="processes that plan")
    parser.add_argument(
        "--keep", type=Path, help="where plans and programs stay; a run of the same code goes on"
    )
    parser.add_argument("--choices", action="store_true", help="on top of layouts")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    names = [
        name
        for name, spelling in every().items()
        if ("torch" if given.choices else given.framework) in (None, spelling.framework)
        and (not given.only or name.startswith(tuple(given.only)))
    ]
    if given.sample is not None:
        names = random.Random(given.seed).sample(names, given.sample)
    if not names:
        parser.error(f"--only {given.only}: no spelling is called so")
    with tempfile.TemporaryDirectory() as scratch:
        home = (given.keep or Path(scratch)).resolve()
        kept = kept_in(home, Path(__file__).parents[2])
        made = rows(names, home, given.workers, kept, given.choices)
    met = targets(made, kept.all_minutes, given.choices)
    shown = [{**asdict(row), "folder": ""} for row in made]
    show(shown if given.json else by_thing(made), met, given.json)
    sys.exit(0 if all(target.met for target in met) else 1)


if __name__ == "__main__":
    main()
