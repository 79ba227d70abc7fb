"""What the four processes of `test_pipelines` do: many schedules and layouts in one start."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.pipeline.actions import Schedule
from autopar.pipeline.check import held
from autopar.pipeline.schedules.table import SCHEDULES, schedule
from autopar.runtime.pytorch import ranks as rank_state
from autopar.runtime.pytorch.checkpoint import load_plain
from autopar.runtime.pytorch.pipeline.log import Sent
from autopar.runtime.pytorch.pipeline.stages import Stages
from autopar.runtime.pytorch.training.load import start
from autopar.runtime.pytorch.training.program import Program
from autopar.runtime.pytorch.training.trainer import Trainer
from autopar.runtime.shared.settings import Settings
from autopar.runtime.verify.pytorch.comparison import Comparison
from autopar.runtime.verify.pytorch.modes import exact
from autopar.runtime.verify.pytorch.reference import Reference, random_batch, reference
from autopar.runtime.verify.pytorch.steps import compared_steps
from tests.runtime import pipelined_models, torch_pipelines
from tests.runtime.drawn_once import initialize
from tests.runtime.live_memory import LiveMemory
from tests.runtime.pipelined_models import BATCH, MODELS, Whole
from tests.sampling import some

CPU = torch.device("cpu")
MICROBATCHES = 8
"""Of four ranks; two have half as many, so either play warm-up, steady state and end."""
INSIDE: dict[str, tuple[dict[str, int], tuple[int, ...]]] = {
    "tp": ({"tp": 2}, (0,)),
    "zero 0": ({"dp_shard": 2}, (0,)),
    "zero 1": ({"dp_shard": 2}, (1,)),
    "zero 2": ({"dp_shard": 2}, (2,)),
    "zero 3": ({"dp_shard": 2}, (3,)),
    "zero by stage, offload": ({"dp_shard": 2}, (3, 1, 2)),
}
"""Axes inside of a stage, and ZeRO levels of the stages, over and over."""
PLAYED = [("gpt", name) for name in SCHEDULES] + some([("unet", name) for name in SCHEDULES], 4)
SPLIT = some([(i, name) for i in INSIDE for name in ("1f1b", "zb-v", "chimera")], 9)
TORCH_PLAYS = some([name for name in SCHEDULES if name != "chimera"], 4)
"""It has one route through its stages."""


def make(
    model: str,
    name: str,
    pp: int = 4,
    inside: str = "",
    microbatches: int = MICROBATCHES,
    lift: torch.dtype | None = torch.float64,
    rows: int = 0,
    tied: bool = True,
    **more: Any,
) -> Trainer:
    workload, write = MODELS[model]
    mesh, zeros = INSIDE[inside] if inside else ({}, (0,))
    planned = lists_of(name, pp, microbatches)
    rows = rows or BATCH // microbatches // mesh.get("dp_shard", 1)
    stages, values, ties = write(planned, rows, **more)
    if len(zeros) > 1:
        stages = tuple(
            replace(stage, zero=zero) for stage, zero in zip(stages, cycle(zeros), strict=False)
        )
    offload = "optimizer" if inside.endswith("offload") else "none"
    settings = Settings(
        zero=max(zeros), offload=offload, microbatches=microbatches, units=("layers.*",)
    )
    make_model = workload.model
    assert make_model is not None
    return Trainer(
        Program(
            {"pp": pp, "tp": 1, **mesh},
            settings,
            stages=stages,
            values=values,
            ties=ties if tied else {},
            lists=planned.lists,
        ),
        workload,
        lambda targets: initialize(make_model, workload.seed, targets),
        lift=lift,
    )


def lists_of(name: str, pp: int, microbatches: int) -> Schedule:
    interleave = 2 if name in ("interleaved-1f1b", "breadth-first", "zb-interleaved") else 1
    return schedule(name, pp, microbatches, interleave)


class Given:
    """References on rank 0, by model."""

    def __init__(self) -> None:
        self.batch = {m: random_batch(w) for m, (w, _) in MODELS.items()}
        self.wanted: dict[str, Reference | None] = dict.fromkeys(MODELS)
        if dist.get_rank() == 0:
            for model, (workload, _) in MODELS.items():
                self.wanted[model] = reference(workload, self.batch[model], CPU)


def agrees(given: Given, model: str, name: str, **more: Any) -> dict[str, Any]:
    """Errors of two steps against one device, and whether the ranks held what the lists say."""
    trainer = make(model, name, **more)
    stages = trainer.storage
    assert isinstance(stages, Stages)
    wanted = given.wanted[model]
    compared = Comparison(wanted)
    norms = compared_steps(trainer, given.batch[model], wanted, compared, exact)
    errors = compared.errors()
    seen = [float(n) for n in norms if n is not None]
    right = [wanted.gradients_norm(i) for i in range(len(seen))] if wanted else seen
    return {
        "loss": errors.loss,
        "gradient": errors.gradient,
        "weight": errors.weight,
        "norm": max(abs(a - b) / b for a, b in zip(seen, right, strict=True)),
        "played": all(everywhere(_played_right(stages))),
        "most_held": everywhere(stages.interpreter.most_held),
    }


def _played_right(stages: Stages) -> bool:
    """The log has the actions of this rank, and what each sent with its bytes."""
    traffic = stages.traffic
    sends = traffic.sends(stages.ranks.index("pp"))
    wanted = []
    for number, action in enumerate(stages.interpreter.actions):
        sent = [(traffic.edges[m.edge].value, m) for m in sends.get(number, ())]
        rows = tuple(
            Sent(v, m.kind == "gradient", m.microbatch, m.target, stages.mail.size_bytes(v))
            for v, m in sent
        )
        wanted.append((action, rows))
    return [(p.action, p.sent) for p in stages.log] == wanted


def everywhere(own: Any) -> list[Any]:
    """What every rank has, by rank."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    return by_rank


def memory(name: str) -> dict[str, Any]:
    """By number of microbatches and rank: the most microbatches held, and the most bytes of
    tensors that a step makes."""
    counts: dict[str, list[int]] = {}
    peaks: dict[str, list[int]] = {}
    few_and_many = (8, 16)
    for microbatches in few_and_many:
        trainer = make("gpt", name, microbatches=microbatches, rows=2)
        stages = trainer.storage
        assert isinstance(stages, Stages)
        batch = {
            n: v.repeat(2 * microbatches // BATCH, 1) for n, v in pipelined_models.batch().items()
        }
        inner, live = stages.interpreter.play, LiveMemory()

        def watched(*args: Any, inner: Any = inner, live: LiveMemory = live) -> Any:
            with live:
                return inner(*args)

        stages.interpreter.play = watched  # type: ignore[assignment, method-assign]
        with exact():
            trainer.backward(batch)
        counts[str(microbatches)] = everywhere(stages.interpreter.most_held)
        peaks[str(microbatches)] = everywhere(live.peak)
    planned = {str(m): [int(h) for h in held(lists_of(name, 4, m))] for m in few_and_many}
    return {"held": counts, "planned": planned, "bytes": peaks}


def checkpoints(folder: Path) -> dict[str, float]:
    """Saved by one pipeline, loaded by others, by one stage and by a plain model: the next two
    losses."""
    workload, _ = MODELS["gpt"]
    saver = make("gpt", "zb-v")
    for step in range(2):
        saver.step(pipelined_models.batch(step))
    saver.save(folder)

    def onwards(trainer: Trainer) -> list[float]:
        return [float(trainer.step(pipelined_models.batch(2 + i))) for i in range(2)]

    wanted = onwards(saver)
    errors: dict[str, float] = {}
    loaders: dict[str, Callable[[], Trainer]] = {
        "four stages": lambda: make("gpt", "1f1b"),
        "eight stages": lambda: make("gpt", "interleaved-1f1b"),
        "chimera": lambda: make("gpt", "chimera"),
        "two stages, zero 3": lambda: make("gpt", "zb-h1", pp=2, inside="zero 3"),
        "one stage, zero 1": lambda: Trainer(
            Program({"dp_shard": 4, "tp": 1}, Settings(zero=1, microbatches=2), Whole),
            workload,
            lambda targets: initialize(pipelined_models.GPT, workload.seed, targets),
            lift=torch.float64,
        ),
    }
    for name, load in loaders.items():
        trainer = load()
        trainer.load(folder)
        assert trainer.step_number == 2
        got = onwards(trainer)
        errors[name] = max(abs(a - b) / b for a, b in zip(got, wanted, strict=True))
    if dist.get_rank() == 0:
        plain = pipelined_models.GPT().double()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=workload.learning_rate)
        assert load_plain(folder, plain, optimizer) == 2
        loss = float(plain(**pipelined_models.batch(2)).detach())
        errors["plain"] = abs(loss - wanted[0]) / wanted[0]
    dist.barrier()
    loaders["one stage, zero 1"]().save(folder)  # and back
    trainer = make("gpt", "zb-v")
    trainer.load(folder)
    first = make("gpt", "1f1b").step(pipelined_models.batch(2))  # from the same initial weights
    errors["from one stage"] = abs(float(trainer.step(pipelined_models.batch(2)) - first)) / float(
        first
    )
    return errors


def dropped() -> dict[str, Any]:
    """Norm of the gradient with dropout, by what must not change it."""
    norms: dict[str, float] = {}
    for name in ("1f1b", "gpipe", "zb-h2", "recomputes", "again"):
        again = (0, 1, 2, 3) if name == "recomputes" else ()
        played = name if name in SCHEDULES else "1f1b"
        trainer = make("gpt", played, drop=0.3, recompute=again)
        trainer.backward(pipelined_models.batch())
        if name == "again":  # another step draws other numbers
            trainer.backward(pipelined_models.batch())
        norms[name] = float(trainer.gradient_norm())
    return norms


def by_torch(name: str, batch: dict[str, Any]) -> float:
    """The largest difference of a gradient from that of torch's runtime on the same lists, over
    the largest gradient; ties not added up."""
    planned = lists_of(name, 4, MICROBATCHES)
    trainer = make("gpt", name, tied=False)
    stages = trainer.storage
    assert isinstance(stages, Stages)
    with exact():
        trainer.backward(batch)
        own = {
            f"{n}.{h.name}": h.leaf.grad.clone()
            for n, run in stages.runs.items()
            for h in run.storage.held.values()
            if h.leaf.grad is not None
        }
        with rank_state.using(trainer.ranks):
            right = torch_pipelines.gradients(planned, stages, batch, BATCH // MICROBATCHES)
    assert own.keys() == right.keys()
    largest = max(float(g.abs().max()) for g in right.values())
    errors: list[float] = everywhere(
        max(float((own[n] - g).abs().max()) for n, g in right.items()) / largest
    )
    return max(errors)


def main() -> None:
    results = Path(sys.argv[1])
    start("cpu", timeout_s=60)
    given = Given()
    checks: dict[str, Callable[[], Any]] = {}
    for model, name in PLAYED:
        checks[f"{model}: {name}"] = partial(agrees, given, model, name)
    for inside, name in SPLIT:
        model = "unet" if name == "chimera" else "gpt"
        checks[f"inside: {inside}, {name}"] = partial(
            agrees, given, model, name, pp=2, inside=inside, microbatches=MICROBATCHES // 2
        )
    for name in ("1f1b", "zb-v", "zb-h2"):
        checks[f"recomputes: {name}"] = partial(agrees, given, "gpt", name, recompute=(0, 2))
    for name in ("gpipe", "1f1b", "zb-v"):
        checks[f"memory: {name}"] = partial(memory, name)
    for name in TORCH_PLAYS:
        checks[f"torch: {name}"] = partial(by_torch, name, given.batch["gpt"])
    checks["checkpoints"] = partial(checkpoints, results / "checkpoint")
    checks["dropped"] = dropped
    only = sys.argv[2:]
    results_of: dict[str, Any] = {}
    for name, check in checks.items():
        if only and not any(word in name for word in only):
            continue
        begin = time.perf_counter()
        try:
            results_of[name] = check()
        except Exception:  # whatever a check raises: told with its name
            results_of[name] = {"failed": traceback.format_exc()}
            if dist.get_rank() != 0:
                raise
            break
        if only and dist.get_rank() == 0:
            print(
                name,
                "failed" if "failed" in str(results_of[name]) else results_of[name],
                f"{time.perf_counter() - begin:.2f} s",
                flush=True,
            )
    if dist.get_rank() == 0:
        (results / "results.json").write_text(json.dumps(results_of))
        if only:
            print(*(f["failed"] for f in results_of.values() if "failed" in str(f)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
