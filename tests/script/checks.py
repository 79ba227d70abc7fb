"""What four ranks do in a user's own script; `tests.script.test_on_ranks` reads what they saw."""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.nouns.errors import UserError
from autopar.runtime.first_rank import first_rank_makes
from autopar.runtime.pytorch.checkpoint import load_plain
from autopar.runtime.pytorch.checkpoint_pieces import Piece
from autopar.runtime.pytorch.portions import even_split
from autopar.runtime.pytorch.training.load import start
from autopar.runtime.pytorch.weights import contents, load_weights, save_weights
from tests.plans import cluster
from tests.sampling import some
from tests.script.models import Dropping, Exact, Points, Words, points, words


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.script.plan.first_rank_makes", lambda make, folder: make())
        return plan()


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


LAYOUTS: dict[str, dict[str, object]] = {
    "zero 1": {"dp_shard": 4, "zero": 1, "microbatch": 2},
    "zero 3 x tp": {"dp_shard": 2, "tp": 2, "zero": 3, "microbatch": 4, "loss_chunks": 3},
    "replicate": {"dp_replicate": 4, "microbatch": 2, "loss_chunks": 2},
    "pipeline": {"pp": 2, "dp_shard": 2, "zero": 2, "microbatch": 2},
    "pipeline of slices": {
        "pp": 2, "dp_shard": 2, "microbatch": 2, "seq_slices": 2, "schedule": "1f1b"
    },
    "interleaved x tp": {
        "pp": 2, "tp": 2, "interleave": 2, "microbatch": 2, "schedule": "interleaved-1f1b"
    },
}  # fmt: skip
EVALUATED = some(LAYOUTS, 3)
SIZES = (1, 3, 16, 21)
"""Samples of batches where 16 were planned."""


@functools.cache
def plan_of(layout: str, make: type[nn.Module], folder: Path, **more: Any) -> Any:
    data = points if make is Points else words
    return autopar.plan(make, data(16), cluster(4), LAYOUTS[layout], folder=folder, **more)


def plain(trainer: Any, model: nn.Module, folder: Path) -> nn.Module:
    """``model`` with the weights of the trainer, on one device."""
    trainer.save(folder)
    load_plain(folder, model)
    return model


def evaluated(folder: Path, layout: str) -> dict[str, Any]:
    """Evaluation between steps leaves no trace, and gives the loss of one device; so does a step
    of fewer samples."""
    made = plan_of(layout, Dropping, folder / "plan")
    losses: list[list[float]] = []
    weights: list[list[torch.Tensor]] = []
    off: list[float] = []
    for evaluates in (False, True):
        trainer: Any = autopar.load(made, model=Dropping)
        losses.append([])
        for step in range(3):
            losses[-1].append(float(trainer.step(words(16, step))))
            for size in SIZES if evaluates else ():
                trainer.evaluate(words(size, size))
        weights.append([h.leaf.detach() for h in trainer.held])
    model = Dropping().eval()
    plain(trainer, model, folder / "saved")
    for size in SIZES:
        with torch.no_grad():
            off.append(abs(float(trainer.evaluate(words(size, size)) - model(**words(size, size)))))
    predicted = [predictions_apart(trainer, model, words(size, size)) for size in SIZES]
    trainer.model.eval()  # dropout is off in the steps too from here on
    short = [compare_gradients(trainer, model, words(size, 9)) for size in (3, 11, 15)]
    same = all(map(torch.equal, *weights)) and losses[0] == losses[1]
    figures = {"off": max(off), "short": max(short), "predicted": max(predicted)}
    return {"same": all(everywhere(same)), **figures}


def predictions_apart(trainer: Any, model: Words, batch: dict[str, torch.Tensor]) -> float:
    """How far logits are from those of one device: of all samples, and each data rank's own."""
    with torch.no_grad():
        wanted = model.logits(batch["tokens"])
        inside = model.layers[0](model.tokens(batch["tokens"]))
        deep = model.layers[1](inside)
    whole, own = trainer.predict(batch, gather=True), trainer.predict(batch, "head")
    layers = [trainer.predict(batch, f"layers.{i}", gather=True) for i in range(2)]
    rows = even_split(len(wanted), trainer.data_size, trainer.data_rank)
    assert whole.shape == wanted.shape
    assert own.shape[0] == len(rows)
    away = (own - wanted[rows.start : rows.stop]).abs()
    apart = [(whole - wanted).abs().max(), away.max() if len(rows) else torch.zeros(())]
    apart += [(a - b).abs().max() for a, b in zip(layers, (inside, deep), strict=True)]
    largest: float = max(everywhere(max(map(float, apart))))
    return largest


def compare_gradients(trainer: Any, model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """How far loss and gradients of a step are from those of one device, by the largest number."""
    loss = trainer.backward(batch)
    model.zero_grad()
    wanted = model(**batch)
    wanted.backward()
    apart = [float((loss - wanted).detach().abs())]
    for held in trainer.held:
        grad = model.get_parameter(held.name).grad
        if grad is not None and held.leaf.grad is not None:
            apart += (held.leaf.grad - grad[held.region]).abs().reshape(-1).tolist()
    largest: float = max(everywhere(max(apart)))
    return largest


def mean_of_squares(folder: Path) -> float:
    """The same where the divisor of the loss stands in the program."""
    trainer: Any = autopar.load(plan_of("zero 1", Points, folder / "plan"), model=Points)
    model = plain(trainer, Points(), folder / "saved")
    batches = [points(size, size) for size in SIZES]
    with torch.no_grad():
        off = [abs(float(trainer.evaluate(batch) - model(**batch))) for batch in batches]
    return max(*off, *(compare_gradients(trainer, model, points(size)) for size in (1, 7, 13)))


DATA = [{name: value[0] for name, value in words(1, seed).items()} for seed in range(29)]


def loaded(folder: Path) -> dict[str, Any]:
    """An epoch with a short last batch, by the trainer's loader, by local batches and as one."""
    losses = []
    made = plan_of("interleaved x tp", Words, folder / "plan")
    for how in ("global", "loader", "local"):
        trainer: Any = autopar.load(made, model=Words)
        batches = given(trainer, how)
        losses.append([float(trainer.step(batch, local=how == "local")) for batch in batches])
    return {"losses": losses, "disagree": disagree(folder)}


def given(trainer: Any, how: str) -> Any:
    if how == "loader":
        return trainer.loader(DATA)
    wholes = [DATA[:16], DATA[16:]]
    if how == "local":
        wholes = [whole[trainer.data_rank :: trainer.data_size] for whole in wholes]
    return [{n: torch.stack([row[n] for row in whole]) for n in DATA[0]} for whole in wholes]


def disagree(folder: Path) -> list[list[str]]:
    """Ranks of one data rank with other samples; a rank that is one batch ahead."""
    trainer: Any = autopar.load(plan_of("zero 3 x tp", Words, folder / "other"), model=Words)
    weights = [h.leaf.detach().clone() for h in trainer.held]
    rank = dist.get_rank()
    told = [message(lambda: trainer.step(words(8, rank), local=True))]
    loader = trainer.loader(DATA, batch_size=8)
    batches = iter(loader)
    first = next(batches)
    told.append(message(lambda: trainer.step(next(batches) if rank == 3 else first)))
    told.append(message(lambda: trainer.evaluate(words(8, rank), local=True)))
    same = all(torch.equal(h.leaf, w) for h, w in zip(trainer.held, weights, strict=True))
    return everywhere([*told, same])


def weights_travel(folder: Path) -> list[bool]:
    """Weights saved under ZeRO 3 and tp, in files of 1 KB, are read under a pipeline."""
    one: Any = autopar.load(plan_of("zero 3 x tp", Words, folder / "one"), model=Words)
    one.step(words(16))
    save_weights(folder / "weights", one.state.weights()[0], shard_bytes=1000)
    two: Any = autopar.load(plan_of("pipeline", Words, folder / "two"), model=Words)
    two.load_weights(folder / "weights")
    two.save_weights(folder / "again")
    model = plain(one, Words(), folder / "saved")
    read = {name: there for name, there in contents(folder / "again").items()}
    load_weights(folder / "again", whole := {
        name: Piece.whole(torch.zeros(there.shape)) for name, there in read.items()
    }, {}, frozenset())  # fmt: skip
    return everywhere(all(torch.equal(model.get_parameter(n), p.tensor) for n, p in whole.items()))


def optimizer_travels(folder: Path) -> list[float]:
    """A user's optimizer with groups, saved in one layout and gone on with in others."""
    kept: list[float] = []
    for layout in ("zero 1", "pipeline", "zero 3 x tp"):
        torch.manual_seed(3)
        model = Exact()
        groups = [
            {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.2},
            {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 0.03},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.8)
        made = plan_of(layout, Exact, folder / layout)
        trainer: Any = autopar.load(made, model=model, optimizer=optimizer)
        if layout == "zero 1":
            trainer.step(words(16, 0))
            trainer.save(folder / "saved")
        else:
            trainer.load(folder / "saved")
        kept.append([float(trainer.step(words(16, step))) for step in (1, 2)][-1])
    return kept


def overflows(folder: Path) -> list[Any]:
    """One rank's gradient overflows: all of them leave the step out, and take the next one."""
    made = plan_of("pipeline", Words, folder / "plan", precision="float16", clip_norm=1.0)
    trainer: Any = autopar.load(made, model=Words)
    before = [h.leaf.detach().clone() for h in trainer.held]
    losses = [float(trainer.backward(words(16)))]
    if dist.get_rank() == 1:
        trainer.held[0].leaf.grad.view(-1)[0] = torch.inf
    norm = trainer.update()
    same = all(torch.equal(h.leaf, w) for h, w in zip(trainer.held, before, strict=True))
    left = [float(norm), trainer.step_number, trainer.loss_scale.scale, same]
    losses += [float(trainer.step(words(16))), float(trainer.step(words(16)))]
    return everywhere([*left, losses, trainer.step_number])


CHECKS: dict[str, Callable[[Path], Any]] = {
    "planned once": planned_once,
    "refused everywhere": refused_everywhere,
    "other weights": other_weights,
    **{f"evaluated: {layout}": functools.partial(evaluated, layout=layout) for layout in EVALUATED},
    "mean of squares": mean_of_squares,
    "loaded": loaded,
    "overflows": overflows,
    "weights travel": weights_travel,
    "optimizer travels": optimizer_travels,
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
