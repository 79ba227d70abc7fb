"""What must hold before anything is called done, in one table of at most 25 minutes on two cores.

    python -m benchmarks.gate [--only PART]... [--beside-suite] [--jobs 2] [--json]

Every part is a command of its own, named in its row: fixed cases of what was once found wrong, and
samples by a fixed seed of what takes hours as a whole. Samples run ``--jobs`` at a time, tests one
part after the other, each by two workers and with every case. ``--beside-suite`` leaves out the
parts of which the suite has tests (`TESTED`), and takes the first of what is drawn (`BESIDE`).
``out/gate.json`` gets the table and its commit; the exit code is 1 where a part fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import census
from benchmarks.every_case import EVERY_CASE
from benchmarks.figures import Target, machine, show
from benchmarks.quick_xla import compile_quickly
from benchmarks.sequences import LAYOUTS as SEQUENCES
from benchmarks.train_files import LAYOUTS
from benchmarks.zoo import PLANS
from benchmarks.zoo_models import EXPERTS, ZOO

SEED = 22
MINUTES, BESIDE_MINUTES = 25.0, 10.0
"""Of the whole table; of what the suite does not run."""
TRAINED = "llama,examples/05_gpt_jax.py"
JAX_PLANS = ("shard, ZeRO 3", "replicate x tp")
OUT = Path("out/gate.json")
FINDINGS: Mapping[str, Sequence[str]] = {
    "constants, masks": ("tests/emit/test_constants.py", "tests/jax/test_masks.py"),
    "blocks called again, alarms": (
        "tests/runtime/test_shared_layers.py",
        "tests/runtime/test_idle_parameters.py",
        "tests/emit/test_orders_of_calls.py",
        "tests/planner/test_physics.py",
        "tests/planner/test_pipeline_search.py",
    ),
    "adapters": ("tests/emit/test_adapters.py",),
    "what a forward keeps, rows by masks": (
        "tests/frontends/test_torch_unseen.py",
        "tests/emit/test_carried.py",
        "tests/emit/test_chosen_rows.py",
        "tests/emit/test_placed_rows.py",
        "tests/emit/test_own_functions_split.py",
    ),
    "names": ("tests/emit/test_odd_names.py", "tests/jax/test_odd_names.py"),
    "one way to train": (
        "tests/runtime/test_train_file.py",
        "tests/benchmarks/test_train_files.py",
        "tests/script/test_loss_scale.py",
        "tests/emit/test_stages.py",
        "tests/runtime/test_dry_run.py",
    ),
    "fields of a plan": ("tests/emit/test_plan_fields.py",),
    "precisions, false alarms": (
        "tests/runtime/test_precisions.py",
        "tests/jax/test_own_casts.py",
        "tests/jax/test_reference.py",
        "tests/jax/test_reduce_dtype.py",
        "tests/runtime/test_verify_evaluation.py",
    ),
    "groups that stages make": ("tests/runtime/test_groups.py",),
    "arguments of torch's functions": ("tests/frontends/test_torch_arguments.py",),
    "SIGTERM, checkpoints": (
        "tests/script/test_sigterm.py",
        "tests/script/test_state.py",
        "tests/runtime/test_failures.py",
    ),
    "arrays and rules of JAX users": ("tests/jax/test_ownership.py", "tests/rules"),
    "labels that move, split sequences": (
        "tests/emit/test_sequences.py",
        "tests/runtime/test_attention_rows.py",
    ),
    "loss heads in chunks": (
        "tests/emit/test_loss_heads.py",
        "tests/runtime/test_loss_head.py",
    ),
    "MLPs in chunks": (
        "tests/emit/test_mlp_chunks.py",
        "tests/planner/test_mlp_chunk_plans.py",
        "tests/runtime/test_feed_forward.py",
    ),
    "layers in 8 bits": (
        "tests/rules/test_narrow.py",
        "tests/rules/test_narrow_gathers.py",
        "tests/planner/test_recipes.py",
        "tests/planner/test_gathers.py",
        "tests/runtime/test_scaled_products.py",
        "tests/runtime/test_recipes_verified.py",
    ),
    "collectives as sends": ("tests/collectives", "tests/runtime/test_played_collectives.py"),
    "buckets, two levels": (
        "tests/planner/test_chosen_sums.py",
        "tests/planner/test_two_level_plans.py",
    ),
    "kernels as choices": (
        "tests/planner/test_kernel_choices.py",
        "tests/planner/test_prefetch.py",
        "tests/emit/test_kernels.py",
        "tests/runtime/test_own_kernels.py",
        "tests/runtime/test_gated_activation.py",
    ),
    "choices pinned": (
        "tests/planner/test_tp_piece_plans.py",
        "tests/runtime/test_verify_rerun.py",
        "tests/benchmarks/test_verified_choices.py",
    ),
    "attention over ranks": (
        "tests/emit/test_attention_along_sequences.py",
        "tests/runtime/test_ring_attention.py",
        "tests/runtime/test_ring_processes.py",
        "tests/runtime/test_ring_recomputed.py",
        "tests/runtime/test_predicted_pieces.py",
        "tests/runtime/test_left_alone.py",
    ),
    "mixtures of experts": (
        "tests/runtime/test_experts.py",
        "tests/runtime/test_dispatch.py",
        "tests/emit/test_experts.py",
        "tests/planner/test_shared_experts.py",
    ),
    "bad input": (
        "tests/cli/test_bad_input.py",
        "tests/cli/test_every_bad_input.py",
        "tests/jax/test_bad_input.py",
    ),
}
"""Tests of what was once found, by what it was."""
TESTED = (
    *FINDINGS,
    *("every schedule, verified", "choices, verified", "train.py beside run"),
    *("rehearsal, planted mistakes", "planted errors"),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many are drawn: families of the zoo (and one with experts), layouts of each, families
    whose plans are to be the same, layouts with split sequences and of JAX, types of the census, of
    these to verify, spellings, choices pinned, layouts trained under, planted errors.

    pipelines: what the names of those that are verified have in them."""

    families: int
    layouts: int
    same: int
    sequences: int
    jax: int
    types: int
    verified: int
    spellings: int
    choices: int
    trained: int
    planted: int
    pipelines: str


WHOLE = Sizes(3, len(PLANS), 5, len(SEQUENCES), 2, 10, 3, 8, 16, len(LAYOUTS), 10, "")
BESIDE = Sizes(1, 4, 2, 6, 1, 3, 1, 2, 6, 3, 4, " x ")
"""Of the whole table; of what the suite does not run, where that runs too."""


@dataclass(frozen=True, slots=True)
class Part:
    """A row of the table. words: of a Python module and its arguments; read: gives cases and what
    is wrong from what it printed; alone: it keeps all cores busy by itself."""

    name: str
    words: Sequence[str]
    read: Callable[[str], tuple[int, list[str]]]
    alone: bool


def parts(sizes: Sizes = WHOLE) -> list[Part]:
    drawn = random.Random(SEED)
    families = drawn.sample(sorted(ZOO.keys() - EXPERTS.keys()), WHOLE.families)[: sizes.families]
    families.append(drawn.choice(sorted(EXPERTS)))
    types = drawn.sample(census.names(None), WHOLE.types)[: sizes.types]
    same = drawn.sample(sorted(ZOO), WHOLE.same)[: sizes.same]
    same += ["examples/02_gpt.py", "gpus"]
    layouts = drawn.sample(list(PLANS), WHOLE.layouts)[: sizes.layouts]
    sequences = list(SEQUENCES)[: sizes.sequences]
    of_jax = JAX_PLANS[: sizes.jax]
    trained = drawn.sample(list(LAYOUTS), WHOLE.trained)[: sizes.trained]
    benchmarks: Mapping[str, Sequence[str]] = {
        "same plans as committed": ("same_plans", "--families", ",".join(same), "--against"),
        "zoo, verified": ("zoo", "--families", ",".join(families), "--plans", ";".join(layouts)),
        "sequences split, verified": (
            "sequences", "--families", families[0], "--plans", ";".join(sequences),
        ),
        "JAX, verified": (
            "zoo", "--families", "examples/05_gpt_jax.py", "--plans", ";".join(of_jax),
        ),
        "census, free plans": (
            "zoo", "--all", "--only", ",".join(types),
            "--sample", str(sizes.verified), "--seed", str(SEED),
        ),
        "spellings": ("spellings", "--sample", str(sizes.spellings), "--seed", "0"),
        "every schedule, verified": (
            "pipelines", "--models", "examples/02_gpt.py", "--only", sizes.pipelines,
        ),
        "choices, verified": (
            "verified_choices", "--sample", str(sizes.choices), "--seed", str(SEED),
        ),
        "train.py beside run": (
            "train_files", "--families", TRAINED, "--plans", ";".join(trained),
        ),
        "rehearsal, planted mistakes": ("rehearsals", "--planted"),
        "memory, rehearsed": ("torch_memory", "--only", "zero=2,recompute=none"),
        "kernels": ("kernels", "--shapes", "6", "--targets", "90"),
        "planted errors": ("planted_errors", "--sample", str(sizes.planted), "--seed", str(SEED)),
    }  # fmt: skip
    made = [
        Part(name, ("pytest", "-n", "2", "--dist", "loadgroup", *tests), _tested, True)
        for name, tests in FINDINGS.items()
    ]
    return made + [
        Part(name, (f"benchmarks.{words[0]}", *words[1:], "--json"), _measured, False)
        for name, words in benchmarks.items()
    ]


def _tested(printed: str) -> tuple[int, list[str]]:
    """Cases and failures of pytest's closing lines."""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
    dots = sum(len(line) for line in re.findall(r"^([.sFExX]+)\s+\[ *\d+%\]$", printed, re.M))
    return dots, failed


def _measured(printed: str) -> tuple[int, list[str]]:
    """Rows and missed targets of a benchmark's object."""
    last = next((line for line in reversed(printed.splitlines()) if line.startswith("{")), "")
    if not last:
        return 0, ["it printed no table"]
    table = json.loads(last)
    missed = [
        f"{target['name']}: {target['value']:g}, at most {target['limit']:g}"
        for target in table["targets"]
        if not target["met"]
    ]
    return len(table["rows"]), missed


def run(part: Part) -> dict[str, Any]:
    """The row of a part."""
    start = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "AUTOPAR_MEASURE": "0", EVERY_CASE: "1"}
    done = subprocess.run(
        [sys.executable, "-m", *part.words], capture_output=True, text=True, env=environment
    )
    cases, wrong = part.read(done.stdout)
    if done.returncode and not wrong:
        wrong = [f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"]
    if not cases and not wrong:
        wrong = ["no case was run"]
    return {
        "part": part.name,
        "cases": cases,
        "wrong": "; ".join(wrong[:3]) + (" ..." if len(wrong) > 3 else ""),
        "seconds": round(time.perf_counter() - start, 1),
        "verdict": "red" if wrong else "green",
    }


def rows_of(every: Sequence[Part], jobs: int) -> Iterator[dict[str, Any]]:
    """The rows as they are done, those that run alone first."""
    yield from map(run, (part for part in every if part.alone))
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(run, part) for part in every if not part.alone]):
            yield done.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="parts of this name")
    parser.add_argument("--beside-suite", action="store_true", help="no parts that are tests")
    parser.add_argument("--jobs", type=int, default=2, help="samples that run at a time")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    start = time.perf_counter()
    every = parts(BESIDE if given.beside_suite else WHOLE)
    unknown = set(given.only) - {part.name for part in every}
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(p.name for p in every)}")
    left_out = TESTED if given.beside_suite else ()
    most = BESIDE_MINUTES if given.beside_suite else MINUTES
    asked = [
        p for p in every if p.name not in left_out and (not given.only or p.name in given.only)
    ]
    compiled = compile_quickly(os.environ)
    rows = []
    for row in rows_of(asked, given.jobs):
        rows.append(row)
        said = f"{row['verdict']} {row['seconds']:.0f} s, {row['cases']} cases {row['wrong']}"
        print(f"{row['part']}: {said}", file=sys.stderr, flush=True)
    if compiled is not None:
        compiled.cleanup()
    order = [part.name for part in asked]
    rows.sort(key=lambda row: order.index(row["part"]))
    red = sum(row["verdict"] == "red" for row in rows)
    targets = [
        Target("parts that are red", red, 0),
        Target("minutes", (time.perf_counter() - start) / 60, most),
    ]
    OUT.parent.mkdir(exist_ok=True)
    whole = not (given.only or given.beside_suite)
    table = {"commit": _commit(), "rows": rows, "machine": machine(), "whole": whole}
    OUT.write_text(json.dumps(table, indent=1) + "\n")
    show(rows, targets, given.json)
    sys.exit(1 if red else 0)


def _commit() -> str:
    """Of the checkout, with a + where it has changes."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")


if __name__ == "__main__":
    main()
