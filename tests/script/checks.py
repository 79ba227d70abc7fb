"""What four ranks do in a user's own script; `tests.script.test_on_ranks` reads what they saw."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.nouns.errors import UserError
from autopar.runtime.first_rank import first_rank_makes
from autopar.runtime.pytorch.load import start
from tests.plans import cluster
from tests.script.models import Words, words


def everywhere(own: Any) -> list[Any]:
    every = [own] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def message(do: Callable[[], object]) -> str:
    """The text of the error that this raises on this rank."""
    try:
        do()
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def planned_once(folder: Path) -> dict[str, Any]:
    """Every rank asks for a plan; ranks 2 and 3 are a machine with a disk of its own."""
    rank = dist.get_rank()
    own = folder / f"machine {rank // 2}" / "plan"
    made: list[int] = []

    def plan() -> Mapping[str, str]:
        made.append(rank)
        result = autopar.plan(Words, words(8), cluster(1), folder=own)  # as a job of one rank
        names = [file for file in result.folder.rglob("*") if file.is_file()]
        return {str(file.relative_to(own)): file.read_text() for file in names}

    kept = dict(os.environ)
    os.environ["LOCAL_RANK"] = str(rank % 2)
    first_rank_makes(lambda: alone(plan), own)
    os.environ.update(kept)
    texts = [(own / "plan.json").read_text(), (own / "program" / "model.py").read_text()]
    return {"made": everywhere(made), "texts": everywhere(texts)}


def alone(plan: Callable[[], Mapping[str, str]]) -> Mapping[str, str]:
    """``plan`` as in a process without a job: `autopar.plan` inside it makes no collective call."""
    import autopar.script.plan as script

    with_ranks = script.first_rank_makes
    script.first_rank_makes = lambda make, folder: make()  # type: ignore[assignment]
    try:
        return plan()
    finally:
        script.first_rank_makes = with_ranks


def refused_everywhere(folder: Path) -> list[list[str]]:
    """A plan that cannot be, and a defect on the rank that plans."""

    def broken() -> Mapping[str, str]:
        raise ZeroDivisionError("of ours")

    asked = [
        message(
            lambda: autopar.plan(Words, words(8), cluster(4), {"tp": 3}, folder=folder / "plan")
        )
    ]
    try:
        asked.append(message(lambda: first_rank_makes(broken, folder / "plan")))
    except ZeroDivisionError as error:
        asked.append(f"itself: {error}")
    return everywhere(asked)


def other_weights(folder: Path) -> list[str]:
    made = autopar.plan(Words, words(8), cluster(4), {"dp_shard": 4}, folder=folder / "plan")
    torch.manual_seed(dist.get_rank() // 2)
    return everywhere(message(lambda: autopar.load(made, model=Words())))


CHECKS: dict[str, Callable[[Path], Any]] = {
    "planned once": planned_once,
    "refused everywhere": refused_everywhere,
    "other weights": other_weights,
}


def main() -> None:
    results = Path(sys.argv[1])
    start("cpu", timeout_s=60)
    seen: dict[str, Any] = {}
    for name, check in CHECKS.items():
        try:
            seen[name] = check(results / name)
        except Exception:
            seen[name] = {"failed": traceback.format_exc()}
            print(seen[name]["failed"], file=sys.stderr)
            if dist.get_rank() != 0:
                raise
            break
    if dist.get_rank() == 0:
        (results / "results.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
