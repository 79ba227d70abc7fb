"""Rehearsals: right programs without a finding, and mistakes in them that are found by their line.

    python -m benchmarks.rehearsals [--families llama,examples/02_gpt.py] [--jobs 2] [--json]
    python -m benchmarks.rehearsals --all [--families ...] [--jobs 2] [--json]
    python -m benchmarks.rehearsals --planted [--json]

The first takes each model under some of the layouts and schedules of `benchmarks.zoo` and
`benchmarks.pipelines`, other ones than the model before it, so that several models meet each; the
second all of them. The third changes programs, one line at a time, to mix devices, to make the host
wait, to read what a stream has not waited for, or to give NCCL what it refuses.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from autopar.files import plan_folder
from autopar.pipeline.schedules.table import SCHEDULES
from autopar.runtime.rehearsal.findings import Finding
from autopar.runtime.rehearsal.rehearse import order_of_groups, stage_ranks
from benchmarks.figures import Target, show
from benchmarks.in_processes import each
from benchmarks.planned import planned_in
from benchmarks.train_files import LAYOUTS
from benchmarks.zoo import EXAMPLES
from benchmarks.zoo_models import ZOO

EVERY: Mapping[str, Mapping[str, str]] = {
    **LAYOUTS,
    **{n: {"pp": "4", "schedule": n, "microbatch": "1"} for n in SCHEDULES if n != "none"},
    "stages, ZeRO 1": {"pp": "2", "dp_shard": "2", "zero": "1", "schedule": "zb-h1"},
    "stages, recompute": {"pp": "2", "dp_replicate": "2", "recompute": "full", "schedule": "1f1b"},
}
FAMILIES = (*ZOO, *(name for name in EXAMPLES if "script" not in name and "jax" not in name))
EACH = 4
"""How many of `EVERY` a model meets by default."""
LIMIT_S = 200.0
"""Seconds that a rank may take, on a machine with other work too."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """``new`` in the place of ``old`` in a file of the program of ``plan``, a layout of `PLANS`;
    ``kind`` of finding that it is."""

    name: str
    kind: str
    file: str
    old: str
    new: str
    plan: str = "sharded"


PLANS: Mapping[str, Mapping[str, str]] = {
    "sharded": {"dp_shard": "2", "tp": "2", "zero": "2"},
    "stages": {"pp": "2", "dp_replicate": "2", "schedule": "1f1b", "microbatch": "2"},
}
_SHARE = "    share = state.forward(microbatch, counts)  # model.py\n"
_OF = "torch.get_device_module(share.device)"
_LABELS = "        labels = targets.flatten()  # [1024]\n"
_DIST = "    import torch.distributed as dist\n\n"
_PLACES = "places = torch.arange(SEQUENCE, device=device())"


def _behind_share(*lines: str) -> tuple[str, str, str]:
    return "train.py", _SHARE, _SHARE + "".join(f"    {line}\n" for line in lines)


MISTAKES: tuple[Mistake, ...] = (
    Mistake("a loss as a number", "waits", *_behind_share("float(share)")),
    Mistake("a loss as a list", "waits", *_behind_share("share.detach().tolist()")),
    Mistake("a loss on the host", "waits", *_behind_share("share.detach().cpu()")),
    Mistake("a loss decides", "waits", *_behind_share("if share > 100:", "    share = share * 2")),
    Mistake("the device is waited for", "waits", *_behind_share(f"{_OF}.synchronize()")),
    Mistake("an event is waited for", "waits",
        *_behind_share(f"{_OF}.current_stream().record_event().synchronize()")),
    Mistake("a list becomes a tensor in the step", "waits",
        *_behind_share("share = share * torch.tensor([1.0], device=share.device)[0]")),
    Mistake("places of labels", "waits", "model.py", _LABELS,
        _LABELS + "        labels.nonzero()\n"),
    Mistake("labels by a mask", "waits", "model.py", _LABELS,
        _LABELS + "        labels[labels >= 0].sum()\n"),
    Mistake("a gradient as a number", "waits",
        *_behind_share("share.register_hook(lambda gradient: gradient.item())")),
    Mistake("a gradient on the host", "mixes",
        *_behind_share("share.register_hook(lambda gradient: gradient + torch.ones(1))")),
    Mistake("a hook that fails", "fails",
        *_behind_share("share.register_hook(lambda gradient: gradient.view(7))")),
    Mistake("positions on the host", "mixes", "model.py", _PLACES,
        "places = torch.arange(SEQUENCE)"),
    Mistake("a mask on the host", "mixes", "model.py", _LABELS,
        _LABELS + "        logits = logits * torch.ones(logits.shape[0], 1)\n"),
    Mistake("a vector of the host", "mixes",
        *_behind_share("share = (share + torch.ones(2)).sum()")),
    Mistake("the loss is not waited for", "races", "train.py", "    state.backward(share)",
        "    loss.value.mul(2)\n    state.backward(share)"),
    Mistake("another stream begins at once", "races", *_behind_share(
        f"side = {_OF}.Stream()", f"with {_OF}.stream(side):", "    share = share * 2",
        f"{_OF}.current_stream().wait_stream(side)")),
    Mistake("another stream is not waited for", "races", *_behind_share(
        f"side = {_OF}.Stream()", f"side.wait_stream({_OF}.current_stream())",
        f"with {_OF}.stream(side):", "    share = share * 2")),
    Mistake("an event is recorded too early", "races", *_behind_share(
        f"side, done = {_OF}.Stream(), {_OF}.Event()",
        f"side.wait_stream({_OF}.current_stream())", "done.record(side)",
        f"with {_OF}.stream(side):", "    share = share * 2",
        f"{_OF}.current_stream().wait_event(done)")),
    Mistake("16-bit integers", "refused", "train.py", _SHARE, _DIST + _SHARE
        + "    dist.all_reduce(torch.zeros(3, dtype=torch.int16, device=share.device))\n"),
    Mistake("half of the columns are sent", "refused", "train.py", "    state.zero_grad()\n",
        _DIST + "    x = torch.zeros(4, 4, device=state.ranks.device)\n"
        + "    dist.isend(x[:, :2], 1)\n    state.zero_grad()\n", "stages"),
    Mistake("every second column", "refused", "train.py", _SHARE, _DIST + _SHARE
        + "    dist.all_reduce(torch.zeros(4, 4, device=share.device)[:, ::2])\n"),
    Mistake("too small for what is gathered", "refused", "train.py", _SHARE, _DIST + _SHARE
        + "    z = torch.zeros(2, device=share.device)\n"
        + "    dist.all_gather_into_tensor(z.new_zeros(6), z)\n"),
    Mistake("a group of one rank's own", "refused", "train.py",
        "    state.zero_grad()\n",
        _DIST + "    if state.ranks.rank == 0:\n        dist.new_group([0, 1])\n"
        + "    state.zero_grad()\n", "stages"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """Of a plan: what is found of its ranks, and the CPU seconds of all of them."""

    findings: list[Finding]
    cpu_s: float


def layouts_of(
    family: str, all_of_them: bool = False, later: int = 0
) -> dict[str, Mapping[str, str]]:
    """Those of `EVERY` that a model of `FAMILIES` meets: the next `EACH` behind those of the model
    before it, or of the model that is ``later`` in the list. Any other model, and with
    ``all_of_them`` every one, meets all."""
    names = list(EVERY)
    if family in FAMILIES and not all_of_them:
        first = (FAMILIES.index(family) + later) * EACH
        names = [names[(first + n) % len(names)] for n in range(EACH)]
    return {name: EVERY[name] for name in names}


def found(tasks: Sequence[Path], jobs: int, trainer: bool = True) -> list[Found]:
    """What is found of plans that are rehearsed, each rank in a process of its own; without
    ``trainer`` of their ``train.py`` alone."""
    ranks = [stage_ranks(plan_folder.read_plan(folder)) for folder in tasks]
    names = [f"{r} {folder}" for folder, own in zip(tasks, ranks, strict=True) for r in own]
    rows = dict(
        each(
            names,
            partial(_rehearsed, trainer),
            _lost,
            jobs,
            LIMIT_S,
            ["autopar.runtime.rehearsal.worker"],
        )
    )
    made = []
    for folder, own in zip(tasks, ranks, strict=True):
        mine = [rows[f"{rank} {folder}"] for rank in own]
        every = [Finding(**finding) for row in mine for finding in row["findings"]]
        groups = order_of_groups([row["groups"] for row in mine], own)
        wrong = [f for f in (*every, *groups) if not f.reason]
        made.append(Found(wrong, round(sum(row["cpu_s"] for row in mine), 1)))
    return made


def _rehearsed(trainer: bool, name: str) -> tuple[str, dict[str, Any]]:
    from autopar.runtime.rehearsal import worker

    rank, _, folder = name.partition(" ")
    sys.stdout = sys.stderr = open(os.devnull, "w")
    row = worker.rehearse(Path(folder), int(rank), trainer)
    return name, {**row, "cpu_s": time.process_time()}


def _lost(name: str, why: str, seconds: float) -> tuple[str, dict[str, Any]]:
    return name, {"findings": [asdict(Finding("fails", why, name))], "groups": [], "cpu_s": seconds}


def planted(home: Path, jobs: int, mistakes: Sequence[Mistake] = MISTAKES) -> list[dict[str, Any]]:
    """A row a right plan, and a row a mistake in one of them."""
    folders, refused = planned_in("examples/02_gpt.py", home, PLANS)
    assert not refused, refused
    tasks = []
    for number, mistake in enumerate(mistakes):
        folder = home / f"mistake_{number}"
        shutil.copytree(folders[mistake.plan], folder)
        file = folder / "program" / mistake.file
        text = file.read_text()
        assert text.count(mistake.old) == 1, f"{mistake.name}: {mistake.old!r}"
        file.write_text(text.replace(mistake.old, mistake.new))
        tasks.append(folder)
    # A mistake in train.py or model.py is met by train.py's own steps.
    made = found(list(folders.values()), jobs) + found(tasks, jobs, trainer=False)
    rows = [
        {"case": f"none: {name}", "kind": "none", "found": not plan.findings, "cpu_s": plan.cpu_s}
        | {"where": plan.findings[0].what if plan.findings else ""}
        for name, plan in zip(folders, made, strict=False)
    ]
    for mistake, plan in zip(mistakes, made[len(folders) :], strict=True):
        mine = [f for f in plan.findings if f.kind == mistake.kind]
        line = mine[0].where.rpartition("/")[2] if mine else ""
        row = {"case": mistake.name, "kind": mistake.kind, "found": bool(mine)}
        rows.append({**row, "cpu_s": plan.cpu_s, "where": line})
    return rows


def right(
    families: Sequence[str], home: Path, jobs: int, all_of_them: bool = False
) -> list[dict[str, Any]]:
    """A row a plan: what was found of a right program."""
    rows = []
    for number, family in enumerate(families):
        for later in range(len(EVERY) // EACH):  # until one is not refused, as many samples are
            layouts = layouts_of(family, all_of_them, later)
            folders, _ = planned_in(family, home / f"{number}_{later}", layouts)
            if folders:
                break
        made = found(list(folders.values()), jobs)
        for name, plan in zip(folders, made, strict=True):
            said = [f"{f.kind} {f.what} at {f.where}" for f in plan.findings[:1]]
            row = {"family": family, "plan": name, "findings": len(plan.findings)}
            rows.append({**row, "cpu_s": plan.cpu_s, "first": "".join(said)})
        bad = [row for row in rows if row["family"] == family and row["findings"]]
        told = [f"{family}: {len(folders)} plans, {len(bad)} with findings"]
        told += [f"  {row['plan']}: {row['first']}" for row in bad]
        print("\n".join(told), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--all", action="store_true", help="each model under all layouts")
    parser.add_argument("--planted", action="store_true", help="mistakes instead")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if given.planted:
            rows = planted(Path(scratch), given.jobs)
            missed = sum(not row["found"] for row in rows)
            targets = [
                Target("mistakes that are not found, or right programs with findings", missed, 0),
                Target("mistakes below 20", max(0, 20 - len(MISTAKES)), 0),
            ]
        else:
            families = given.families.split(",")
            rows = right(families, Path(scratch), given.jobs, given.all)
            missing = len(set(families) - {row["family"] for row in rows})
            wrong = sum(bool(row["findings"]) for row in rows)
            targets = [
                Target("right programs with findings", wrong, 0),
                Target("families without a plan", missing, 0),
            ]
    cpu_s = sum(row["cpu_s"] for row in rows)
    print(f"{cpu_s:.0f} CPU s of ranks, beside planning and imports", file=sys.stderr)
    show(rows, targets, given.json)
    sys.exit(0 if all(target.met for target in targets) else 1)


if __name__ == "__main__":
    main()
