"""Every choice on top of a layout, pinned on small models under many layouts and verified.

    python -m benchmarks.verified_choices [--models gpt,t5] [--choices "2 pieces;mxfp8"]
                                          [--layouts "tp 4;zb-h1 x tp"] [--sample 20] [--seed 0]
                                          [--keep DIR] [--json]

A GPT, a Llama, a T5 and two mixtures of experts on four processes: each choice that ``--fix`` pins
under tensor parallelism beside ZeRO 0 to 3, alone, and in pipelines; recomputation takes turns over
them. `autopar verify` compares each with one device in float64, its collectives with what was
priced, layers in 8 bits with their emulation, and the plan must have what was pinned. A refusal is
a row with its reason, which is known (`KNOWN`) or a defect. Kernels of GPUs are planned for H100s;
a CPU runs their reference, which `verify` says. ``--sample`` verifies so many, drawn by the seed.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import textwrap
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any

from autopar.files.cluster_file import load_cluster
from autopar.files.plan_folder import read_plan
from autopar.frontends.dispatch import capture
from autopar.frontends.loading import load_workload
from autopar.frontends.shared.captured import Captured
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.nouns.plan import Plan
from autopar.nouns.workload import Workload
from autopar.runtime.jobs.launch import verify_many
from autopar.runtime.verify.verified import TOLERANCE, VerifyResult
from benchmarks.figures import Target, show
from benchmarks.planned import write_plan

FILE = "benchmarks/choice_models.py"
MODELS = ("gpt", "llama", "t5", "mixture", "shared")
CORES = """name: two hosts of two fast cores
groups:
  - {device: cpu-core, count: 4}
levels:
  - {name: loopback, span: 2, bandwidth: 1000 GB/s, latency: 0.1 us, library: gloo}
  - {name: link, span: 4, bandwidth: 100 GB/s, latency: 0.2 us, library: gloo}
"""
"""Links on which small models are split over ranks as large ones are."""
GPUS = """name: four H100
groups:
  - {device: H100, count: 4}
levels:
  - {name: nvlink, span: 4, bandwidth: 450 GB/s, latency: 2 us}
"""
PIPELINED = {"pp": "2", "tp": "2", "microbatch": "4"}
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "replicate 4, microbatches": {"dp_replicate": "4", "microbatch": "1"},
    "replicate x tp, ZeRO 0": {"dp_replicate": "2", "tp": "2", "microbatch": "4"},
    "shard x tp, ZeRO 1": {"dp_shard": "2", "tp": "2", "zero": "1", "microbatch": "2"},
    "shard x tp, ZeRO 2": {"dp_shard": "2", "tp": "2", "zero": "2", "microbatch": "4"},
    "shard x tp, ZeRO 3": {"dp_shard": "2", "tp": "2", "zero": "3", "microbatch": "2"},
    "tp 4": {"tp": "4", "microbatch": "8"},
    "1f1b x tp": {**PIPELINED, "schedule": "1f1b"},
    "zb-h1 x tp": {**PIPELINED, "schedule": "zb-h1"},
}
RECOMPUTE = ("none", "selective-op", "full")
"""They take turns over the layouts of a choice, and each layout's turn moves by the choice."""


@dataclass(frozen=True, slots=True)
class Choice:
    """fix: what is pinned beside the layout; ``there``: whether a plan has it; ``model``: what a
    model's name ends with whose dtypes allow it; ``cluster``: where there is such a device."""

    fix: Mapping[str, str]
    there: Callable[[Plan], bool]
    model: str = ""
    cluster: str = CORES


def _chunks(count: int | None) -> Callable[[Plan], bool]:
    return lambda plan: plan.loss_chunks == count


def _mlp_chunks(count: int) -> Callable[[Plan], bool]:
    return lambda plan: plan.mlp_chunks == count


def _pieces(count: int) -> Callable[[Plan], bool]:
    return lambda plan: set(plan.tp_pieces.values()) == {count}


def _routed(count: int) -> Callable[[Plan], bool]:
    return lambda plan: set(plan.expert_pieces.values()) == {count}


def _beside(plan: Plan) -> bool:
    return bool(plan.shared_experts)


def _recipe(name: str) -> Choice:
    def there(plan: Plan) -> bool:
        texts = (plan.recipes or {}).values()
        return bool(texts) and all(text.startswith(name) for text in texts)

    return Choice({"precision": name}, there)


def _kernel(fix: Mapping[str, str], runs: str) -> Choice:
    return Choice(fix, lambda plan: runs in plan.kernels.values(), "_half", GPUS)


CHOICES: Mapping[str, Choice] = {
    "whole logits": Choice({"loss_chunks": "none"}, _chunks(None)),
    "2 chunks": Choice({"loss_chunks": "2"}, _chunks(2)),
    "5 chunks": Choice({"loss_chunks": "5"}, _chunks(5)),
    "MLPs at once but made again": Choice({"mlp_chunks": "1"}, _mlp_chunks(1)),
    "MLPs in 3 chunks": Choice({"mlp_chunks": "3"}, _mlp_chunks(3)),
    "2 pieces": Choice({"tp_pieces": "2"}, _pieces(2)),
    "4 pieces": Choice({"tp_pieces": "4"}, _pieces(4)),
    **{name: _recipe(name) for name in ("fp8-row", "fp8-tensor", "fp8-block", "mxfp8")},
    "fp8-tensor, weights gathered whole": Choice(
        {"precision": "fp8-tensor", "gather": "compute"},
        lambda p: p.gather_dtype is None and _recipe("fp8-tensor").there(p),
    ),
    "prefetch 0": Choice({"prefetch": "0"}, lambda plan: plan.prefetch == 0),
    "prefetch 2": Choice({"prefetch": "2"}, lambda plan: plan.prefetch == 2),
    "bucket": Choice({"bucket": "1MiB"}, lambda plan: plan.bucket_bytes == 1 << 20),
    "two levels": Choice({"all_reduce": "two-level"}, lambda plan: plan.all_reduce is not None),
    "reduce float32": Choice(
        {"reduce": "float32"}, lambda plan: plan.reduce_dtype == "float32", "_half"
    ),
    "reduce bfloat16": Choice(
        {"reduce": "bfloat16"}, lambda plan: plan.reduce_dtype == "bfloat16", "_half"
    ),
    "cuDNN's attention": _kernel({"attention": "cudnn"}, "attention by cudnn"),
    "FlashAttention": _kernel({"attention": "flash"}, "attention by flash"),
    "Triton": _kernel({"kernels": "triton"}, "gated_activation by triton"),
    "Triton's loss head": _kernel(
        {"kernels": "triton", "loss_chunks": "2"}, "linear_cross_entropy by triton"
    ),
    "tokens in 2 pieces": Choice({"ep": "2", "expert_pieces": "2"}, _routed(2)),
    "tokens in 4 pieces": Choice({"ep": "2", "expert_pieces": "4"}, _routed(4)),
    "shared experts beside": Choice({"ep": "2", "shared_experts": "beside"}, _beside),
    "shared experts beside 2 pieces": Choice(
        {"ep": "2", "shared_experts": "beside", "expert_pieces": "2"},
        lambda p: _beside(p) and _routed(2)(p),
    ),
    "2 slices": Choice({"seq_slices": "2"}, lambda plan: plan.seq_slices == 2),
    "4 slices": Choice({"seq_slices": "4"}, lambda plan: plan.seq_slices == 4),
    "chunks, pieces": Choice(
        {"tp_pieces": "2", "loss_chunks": "3"}, lambda p: _pieces(2)(p) and _chunks(3)(p)
    ),
    "chunks, pieces, prefetch 2": Choice(
        {"tp_pieces": "2", "loss_chunks": "3", "prefetch": "2"},
        lambda p: _pieces(2)(p) and _chunks(3)(p) and p.prefetch == 2,
    ),
}
KNOWN: Mapping[str, Sequence[str]] = {
    "prefetch": ("this layout keeps parameters whole",),
    "bucket": ("FSDP2 moves whole units", "no ranks hold the same parameters"),
    "all_reduce": (
        "FSDP2 reduces by collectives of its own",
        "no ranks of tp=4 hold the same parameters",
        "so each has one of them",
        "this layout has 2 stages",
    ),
    "reduce": ("FSDP2 reduces nothing at ZeRO 0",),
    "mlp_chunks": ("the model has no feed-forward part",),
    "tp_pieces": ("no gather or sum over tensor-parallel ranks stands alone",),
    "ep": ("the model has no layer of experts", "which do not make up 2 of 4 devices"),
    "shared_experts": (
        "nothing may run beside",
        "no tokens travel to experts along one axis",
        "none has one whose ranks have tokens of their own to send",
    ),
    "expert_pieces": (
        "no tokens travel to experts along one axis",
        "pieces are equal",
        "none has one whose ranks have tokens of their own to send",
    ),
    "precision": ("no layer's pieces are multiples of 128",),
    "attention": ("it has a mask that is a tensor",),
    "dp_replicate": ("leaves no two stages",),
    "dp_shard": ("leaves no two stages",),
    "tp": ("leaves no two stages",),
    "seq_slices": ("needs more of its sequences than the slices up to its own",),
    "kernels": ("the plan has nothing that runs by it, for logits are made whole",),
}
"""By the pin that a refusal names, parts of reasons that are right."""
NOWHERE = {
    ("t5", "cuDNN's attention"),
    ("t5", "FlashAttention"),
    ("gpt", "Triton"),
    ("t5", "Triton"),
    ("mixture", "Triton"),
    ("mixture", "MLPs at once but made again"),
    ("mixture", "MLPs in 3 chunks"),
    *(("t5", f"{n} slices") for n in (2, 4)),
    *((dense, f"tokens in {n} pieces") for dense in ("gpt", "llama", "t5") for n in (2, 4)),
}
"""Choices that a model has no op for; T5's attention has its biases as a mask."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    model: str
    choice: str
    layout: str

    @property
    def pins(self) -> dict[str, str]:
        turn = [*CHOICES].index(self.choice) + [*LAYOUTS].index(self.layout)
        recompute = RECOMPUTE[turn % len(RECOMPUTE)]
        return {**LAYOUTS[self.layout], "recompute": recompute, **CHOICES[self.choice].fix}


class Planner:
    """Plans cases; captures a model once."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._captured: dict[str, tuple[Workload, Captured]] = {}
        self._clusters: dict[str, Cluster] = {}
        for number, text in enumerate((CORES, GPUS)):
            file = home / f"cluster_{number}.yaml"
            file.write_text(text)
            self._clusters[text] = load_cluster(file)

    def plan(self, case: Case, to: Path) -> str:
        """Writes the case's plan; says what became of it where there is none."""
        choice = CHOICES[case.choice]
        model = f"{FILE}:{case.model}{choice.model}"
        if model not in self._captured:
            workload = load_workload(model)
            self._captured[model] = workload, capture(workload)
        workload, captured = self._captured[model]
        cluster = self._clusters[choice.cluster]
        try:
            write_plan(captured, workload, cluster, model, case.pins, to)
        except UserError as error:
            return str(error)
        except Exception as error:  # a row of its own: the others go on
            last = traceback.extract_tb(error.__traceback__)[-1]
            return f"crashed: {error!r} at {Path(last.filename).name}:{last.lineno}"
        return "" if choice.there(read_plan(to)) else "the plan has not what was pinned"


def known(reason: str) -> bool:
    """Whether a refusal is right."""
    return any(f"--fix {pin}=" in reason and w in reason for pin in KNOWN for w in KNOWN[pin])


def checked(cases: Sequence[Case], home: Path, most: int | None) -> list[dict[str, Any]]:
    """A row a case, of which so many are verified."""
    planner, rows, folders = Planner(home), list[dict[str, Any]](), list[Path]()
    for number, case in enumerate(cases):
        if most is not None and len(folders) == most:
            break
        to = home / f"plan_{number}"
        reason = planner.plan(case, to)
        pins = ",".join(f"{name}={value}" for name, value in case.pins.items())
        row = {"model": case.model, "choice": case.choice, "layout": case.layout, "fix": pins}
        rows.append({**row, "outcome": _unverified(reason), "reason": reason})
        if not reason:
            folders.append(to)
    made = (row for row in rows if not row["reason"])
    for row, verified in zip(made, _verified(folders), strict=True):
        row.update(verified)
    return rows


def _unverified(reason: str) -> str:
    if reason.startswith("crashed"):
        return "crashed"
    return "refused" if known(reason) else "refused otherwise"


def _verified(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """What becomes of each plan; where a job of several fails, of halves of them."""
    if not folders:
        return []
    try:
        return [_judged(result) for result in verify_many(folders)]
    except UserError as error:
        if len(folders) == 1:
            return [{"outcome": "crashed", "reason": str(error)}]
        half = len(folders) // 2
        return _verified(folders[:half]) + _verified(folders[half:])


def _judged(result: VerifyResult) -> dict[str, Any]:
    seen = [*result.collective_differences, *result.recompute_differences, result.first_difference]
    if result.narrow is not None and not result.narrow.passed(TOLERANCE):
        seen.append(f"8 bits: {result.narrow}")
    return {
        "outcome": "right" if result.passed and not any(seen) else "WRONG",
        "reason": "; ".join(filter(None, seen)),
        "error": result.exact.largest,
    }


def drawn(cases: Sequence[Case], seed: int) -> list[Case]:
    """In the order in which a sample takes them: every choice of every model once, then again."""
    shuffled = random.Random(seed).sample(cases, len(cases))
    taken = Counter[tuple[str, str]]()
    turns = []
    for case in shuffled:
        turns.append(taken[case.model, case.choice])
        taken[case.model, case.choice] += 1
    return [shuffled[i] for i in sorted(range(len(turns)), key=turns.__getitem__)]


SHOWN = 60
"""Letters of a reason in a table."""
OUTCOMES = ("right", "WRONG", "refused", "refused otherwise", "crashed")


def lines(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a choice of a model; ``--json`` has every row."""

    def of(row: Mapping[str, Any]) -> tuple[str, str]:
        return row["model"], row["choice"]

    shown = []
    for (model, choice), group in groupby(sorted(rows, key=of), of):
        mine = list(group)
        counts = {name: sum(row["outcome"] == name for row in mine) for name in OUTCOMES}
        worst = max((row["error"] for row in mine if "error" in row), default=None)
        reasons = dict.fromkeys(_short(row["reason"]) for row in mine if row["reason"])
        shown.append(
            {"choice": f"{model}, {choice}", **counts, "error": worst, "why": " | ".join(reasons)}
        )
    return shown


def _short(reason: str) -> str:
    """What it says behind the pins and places that it names."""
    parts = re.sub(r"--fix \S+=\S+:? ?| at \S+ \(.*?\)", "", reason)
    return textwrap.shorten(parts, SHOWN, placeholder="...")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--choices", default=";".join(CHOICES), help="by semicolons")
    parser.add_argument("--layouts", default=";".join(LAYOUTS), help="by semicolons")
    parser.add_argument("--sample", type=int, help="how many to verify; all where it is left out")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn by")
    parser.add_argument("--keep", type=Path, help="where plans and programs stay")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    every = product(given.models.split(","), given.choices.split(";"), given.layouts.split(";"))
    cases = [Case(*words) for words in every]
    if given.sample is not None:
        cases = drawn(cases, given.seed)
    with tempfile.TemporaryDirectory() as scratch:
        home = given.keep or Path(scratch)
        home.mkdir(parents=True, exist_ok=True)
        rows = checked(cases, home, given.sample)
    count = {name: sum(row["outcome"] == name for row in rows) for name in OUTCOMES}
    targets = [
        Target("plans that are wrong, or move other bytes than priced", count["WRONG"], 0),
        Target("plans or programs that crash", count["crashed"], 0),
        Target("refusals that are not known to be right", count["refused otherwise"], 0),
    ]
    if given.sample is None and given.layouts == ";".join(LAYOUTS):
        asked = {(case.model, case.choice) for case in cases} - NOWHERE
        right = {(row["model"], row["choice"]) for row in rows if row["outcome"] == "right"}
        targets.append(Target("choices of a model that no layout has", len(asked - right), 0))
    show(rows if given.json else lines(rows), targets, given.json)
    sys.exit(0 if all(target.met for target in targets) else 1)


if __name__ == "__main__":
    main()
