"""What the four processes of `test_distributed` do: many checks in one start.

Each check returns numbers or texts that the tests judge; rank 0 writes them as JSON.
"""

from __future__ import annotations

import errno
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.lowering.collectives import Row
from autopar.lowering.state import Stored, state_collectives
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Sharding
from autopar.runtime.pytorch.batches import BatchesDiffer
from autopar.runtime.pytorch.checkpoint import load_plain
from autopar.runtime.pytorch.counting import Counting
from autopar.runtime.pytorch.gradients import reduce_late, total_norm
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.training.load import PlansDiffer, check_same, start
from autopar.runtime.pytorch.training.program import Program
from autopar.runtime.pytorch.training.trainer import Trainer
from autopar.runtime.shared.checkpoint_folder import CheckpointError
from autopar.runtime.shared.settings import ProgramError, Settings
from autopar.runtime.verify.collectives import differences
from autopar.runtime.verify.pytorch.comparison import Comparison
from autopar.runtime.verify.pytorch.locate import Probed, locate
from autopar.runtime.verify.pytorch.modes import exact
from autopar.runtime.verify.pytorch.reference import Reference, random_batch, reference
from autopar.runtime.verify.pytorch.steps import compared_steps
from tests.runtime import folders, tiny_gpt, tiny_gpt_program
from tests.runtime.damages import failing
from tests.runtime.drawn_once import initialize
from tests.runtime.wrong_optimizers import WRONG
from tests.sampling import some

WORKLOAD = tiny_gpt.workload
CPU = torch.device("cpu")
LAYOUTS: dict[str, tuple[dict[str, int], int, int]] = {
    "replicate": ({"dp_replicate": 4}, 0, 2),
    "zero0": ({"dp_shard": 4}, 0, 1),
    "zero1": ({"dp_shard": 4}, 1, 2),
    "zero2": ({"dp_shard": 4}, 2, 2),
    "zero3": ({"dp_shard": 4}, 3, 2),
    "tp": ({"tp": 4}, 0, 2),
    "shard x tp, zero 1": ({"dp_shard": 2, "tp": 2}, 1, 2),
    "shard x tp, zero 3": ({"dp_shard": 2, "tp": 2}, 3, 1),
    "replicate x tp": ({"dp_replicate": 2, "tp": 2}, 0, 2),
    "hybrid, zero 0": ({"dp_replicate": 2, "dp_shard": 2}, 0, 2),
    "hybrid, zero 1": ({"dp_replicate": 2, "dp_shard": 2}, 1, 2),
    "hybrid, zero 2": ({"dp_replicate": 2, "dp_shard": 2}, 2, 2),
    "hybrid, zero 3": ({"dp_replicate": 2, "dp_shard": 2}, 3, 2),
    "axes of size 1": ({"dp_replicate": 1, "dp_shard": 4, "tp": 1}, 3, 1),
}


def make(
    layout: str, lift: torch.dtype | None = torch.float64, precision: str = "float32"
) -> Trainer:
    mesh, zero, micro = LAYOUTS[layout]
    settings = Settings(zero=zero, microbatches=micro, precision=precision, units=("layers.*",))
    return Trainer(
        Program({**mesh, "tp": mesh.get("tp", 1)}, settings, tiny_gpt_program.Model),
        WORKLOAD,
        lambda targets: initialize(tiny_gpt.GPT, WORKLOAD.seed, targets),
        lift=lift,
    )


@dataclass
class Given:
    """The reference on rank 0."""

    batch: dict[str, Any]
    wanted: Reference | None


def agrees(given: Given, layout: str, wrong: str = "") -> dict[str, Any]:
    """Loss, gradients, norm before clipping and weights of two steps against one device; with an
    optimizer that is ``wrong``."""
    trainer = make(layout)
    if wrong:
        WRONG[wrong](trainer)
    compared = Comparison(given.wanted)
    given_norms = compared_steps(trainer, given.batch, given.wanted, compared, exact)
    norms = [float(norm) for norm in given_norms if norm is not None]
    errors = compared.errors()
    right = [given.wanted.gradients_norm(i) for i in range(len(norms))] if given.wanted else norms
    return {
        "loss": errors.loss,
        "gradient": errors.gradient,
        "weight": errors.weight,
        "norm": max((abs(a - b) / b for a, b in zip(norms, right, strict=True)), default=-1),
    }


def issued(layout: str, precision: str) -> list[str]:
    """Where the collectives of a step are not those that `state_collectives` says.

    DDP settles its buckets in the second step: the third is counted. FSDP prepares itself in the
    first: that and the next are counted. The program's own ones are gathers and scatters over tp
    alone.
    """
    trainer = make(layout, lift=None, precision=precision)
    mesh, zero, micro = LAYOUTS[layout]
    counted_steps = (0, 1) if zero else (2,)
    issued_rows = []
    for step in range(counted_steps[-1] + 1):
        with Counting(trainer.ranks) as counted:
            trainer.step(tiny_gpt.batch(step))
        if step in counted_steps:
            issued_rows.append(counted.rows())
    own = {("all_gather", "tp"), ("reduce_scatter", "tp")}
    stored = [
        Stored(
            held.name,
            held.declared.shape,
            "float32",
            Sharding(tuple((a, p) for a, p in held.declared.sharding.placements if a in mesh)),
            held.leaf.requires_grad,
            ".".join(held.name.split(".")[:2]) if held.name.startswith("layers.") else "",
        )
        for held in trainer.held
    ]
    axes = Mesh(tuple(mesh), tuple(mesh.values()))
    priced = [
        Row(s.collective.kind, s.collective.axis, s.collective.size_bytes, s.count, s.what)
        for s in state_collectives(stored, axes, zero, micro, precision, clips=True, counts=1)
    ]
    return [
        f"step {step}: {difference}"
        for step, rows in zip(counted_steps, issued_rows, strict=True)
        for difference in differences(priced, [r for r in rows if (r.kind, r.axis) not in own])
    ]


def lower_precision(layout: str) -> dict[str, Any]:
    """In bfloat16: which dtypes parameters, gradients and the values in compute have."""
    trainer = make(layout, lift=None, precision="bfloat16")
    seen: set[str] = set()
    hook = trainer.model.layers[0].register_forward_hook(  # type: ignore[index, union-attr]
        lambda module, args, result: seen.add(str(result.dtype))
    )
    losses = [float(trainer.step(tiny_gpt.batch(0))) for _ in range(3)]
    hook.remove()
    grads = {str(h.leaf.grad.dtype) for h in trainer.held if h.leaf.grad is not None}
    return {
        "compute": sorted(seen),
        "stored": sorted({str(h.leaf.dtype) for h in trainer.held}),
        "gradients": sorted(grads),
        "losses": losses,
    }


def checkpoints(folder: Path) -> dict[str, Any]:
    """Saved by one layout, loaded by others and by a plain model: the next two losses."""
    saver = make("shard x tp, zero 3")
    for step in range(2):
        saver.step(tiny_gpt.batch(step))
    saver.save(folder)
    saver.save(folder)  # replaces the first

    def onwards(trainer: Trainer) -> list[float]:
        return [float(trainer.step(tiny_gpt.batch(2 + i))) for i in range(2)]

    wanted = onwards(saver)
    errors: dict[str, float] = {}
    for layout in ("replicate", "tp", "zero3", "hybrid, zero 1", "replicate x tp"):
        trainer = make(layout)
        trainer.load(folder)
        assert trainer.step_number == 2
        got = onwards(trainer)
        errors[layout] = max(abs(a - b) / b for a, b in zip(got, wanted, strict=True))
    if dist.get_rank() == 0:
        model = tiny_gpt.GPT().double()
        optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=WORKLOAD.learning_rate
        )
        assert load_plain(folder, model, optimizer) == 2
        got = []
        for step in (2, 3):
            optimizer.zero_grad()
            loss = model(**tiny_gpt.batch(step))
            loss.backward()
            got.append(float(loss.detach()))
            assert WORKLOAD.clip_norm is not None
            torch.nn.utils.clip_grad_norm_(model.parameters(), WORKLOAD.clip_norm)
            optimizer.step()
        errors["plain"] = max(abs(a - b) / b for a, b in zip(got, wanted, strict=True))
    return errors


def random_state(folder: Path) -> bool:
    """The random numbers after a load go on where they stopped, on every rank."""
    trainer = make("replicate")
    trainer.save(folder)
    wanted = torch.rand(3)
    torch.manual_seed(99)
    trainer.load(folder)
    same = torch.tensor(int(torch.equal(torch.rand(3), wanted)))
    dist.all_reduce(same)
    return int(same) == 4


def other_model(folder: Path) -> str:
    trainer = make("replicate")
    trainer.storage.held["positions.weight"].declared = replace(
        trainer.storage.held["positions.weight"].declared, shape=(13, 24)
    )
    try:
        trainer.load(folder)
    except CheckpointError as error:
        return str(error)
    return ""


def damaged(folder: Path) -> dict[str, Any]:
    """A load and a save that fail on one rank: what every rank was told, and what is left."""
    trainer = make("hybrid, zero 3")
    trainer.step(tiny_gpt.batch(0))
    trainer.save(folder)
    before = {name: piece.tensor.clone() for name, piece in trainer._pieces().items()}

    def errors_of(do: Callable[[], None]) -> list[str]:
        try:
            do()
            message = ""
        except CheckpointError as error:
            message = str(error)
        every = [""] * dist.get_world_size()
        dist.all_gather_object(every, message)
        return every

    whole = errors_of(lambda: trainer.load(folder))
    shard = folder / "__3_0.distcp"
    raw = shard.read_bytes()
    dist.barrier()
    if dist.get_rank() == 1:
        shard.write_bytes(raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:])
    dist.barrier()
    flipped = errors_of(lambda: trainer.load(folder))
    if dist.get_rank() == 1:
        shard.write_bytes(raw)
    full = OSError(errno.ENOSPC, "No space left on device")
    with failing(folder.parent, 2 if dist.get_rank() == 2 else -1, full):
        refused = errors_of(lambda: trainer.save(folder))
    after = {name: piece.tensor for name, piece in trainer._pieces().items()}
    same = all(torch.equal(before[name], after[name]) for name in before)
    return {
        "whole": whole,
        "flipped": flipped,
        "refused": refused,
        "same": same,
        "again": errors_of(lambda: trainer.load(folder)),
        "left": sorted(f.name for f in folder.parent.iterdir()),
    }


def late_overlap() -> float:
    """`reduce_late` over several buckets and dtypes equals one sum a tensor."""
    from autopar.runtime.pytorch import gradients

    trainer = make("tp")
    trainer.backward(tiny_gpt.batch(0))
    late = [h for h in trainer.held if h.reduce]
    generator = torch.Generator().manual_seed(dist.get_rank())
    wanted = []
    for held in late:
        held.leaf.grad = torch.randn(held.leaf.shape, generator=generator, dtype=torch.float64)
        whole = held.leaf.grad.clone()
        dist.all_reduce(whole)
        wanted.append(whole)
    before, gradients.BUCKET_BYTES = gradients.BUCKET_BYTES, 700
    try:
        reduce_late(trainer.held, trainer.ranks)
    finally:
        gradients.BUCKET_BYTES = before
    gaps = [h.leaf.grad - w for h, w in zip(late, wanted, strict=True) if h.leaf.grad is not None]
    return max(float(gap.abs().max()) for gap in gaps)


def norm_without_group() -> float:
    """A mesh that replicates everything needs no collective for the norm."""
    trainer = make("replicate", lift=None)
    trainer.backward(tiny_gpt.batch(0))
    with Counting(trainer.ranks) as counted:
        total_norm(trainer.held, trainer.ranks)
    return float(len(counted.rows()))


def wrong_world() -> str:
    try:
        Ranks({"tp": 8})
    except ProgramError as error:
        return str(error)
    return ""


def indivisible() -> str:
    trainer = make("replicate")
    try:
        trainer.step({k: v[:10] for k, v in tiny_gpt.batch(0).items()})
    except ProgramError as error:
        return str(error)
    return ""


def batches_differ() -> list[list[str]]:
    """In the first step and in a later one: what the last rank is told, and whether it updated."""
    messages = []
    for steps in (0, 2):
        trainer = make("tp")
        for step in range(steps):
            trainer.step(tiny_gpt.batch(step))
        before = [held.leaf.detach().clone() for held in trainer.held]
        batch = tiny_gpt.batch(steps)
        if dist.get_rank() == 2:
            batch["targets"][3] = batch["targets"][3].flip(0)
        try:
            trainer.step(batch)
        except BatchesDiffer as error:
            kept = zip(before, trainer.held, strict=True)
            same = all(torch.equal(was, held.leaf.detach()) for was, held in kept)
            messages.append(f"{error}" if same else "updated")
    every: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, messages)
    return every


def plans_differ(folder: Path) -> str:
    """Rank 3 is given a plan of its own."""
    from autopar.files import plan_folder

    odd = dist.get_rank() == 3
    place = folder / ("odd" if odd else "same")
    if dist.get_rank() in (0, 3):
        folders.write(place, {"dp_shard": 4}, zero=1 if odd else 3, fingerprint="m")
    dist.barrier()
    try:
        check_same(plan_folder.read_plan(place), place)
    except PlansDiffer as error:
        return str(error)
    return ""


def first_wrong(given: Given) -> dict[str, str]:
    """What `locate` says of programs with one mistake each."""
    text = (folders.HERE / "tiny_gpt_program.py").read_text()
    text = text.replace(
        "import collectives as c",
        "import collectives as c\nfrom autopar.runtime.pytorch.probe import probe",
    )
    axes = "dp_shard:S0 tp:S1"
    text = text.replace(
        "        return x + scattered(F.linear(h, local(self.down.weight)))"
        " + local(self.down.bias)",
        f'        h = probe("Layer::up/gelu", h, "dp_shard:S0 tp:S2")\n'
        "        x = x + scattered(F.linear(h, local(self.down.weight))) + local(self.down.bias)\n"
        f'        return probe("Layer::/add", x, "{axes}")',
    ).replace("x = scattered(x)", f'x = probe("tokens/embedding", scattered(x), "{axes}")')
    mesh = 'MESH = {"dp_shard": 2, "tp": 2}'
    assert mesh in text
    single = text.replace(mesh, 'MESH = {"tp": 1}').replace("zero=3, microbatches=2", "zero=0")
    places = {
        "Layer::/add": [f"layers.{i} (tiny_gpt.py:47)" for i in range(tiny_gpt.LAYERS)],
        "Layer::up/gelu": [f"layers.{i}.up (tiny_gpt.py:47)" for i in range(tiny_gpt.LAYERS)],
    }
    spread = text.replace("zero=3, microbatches=2", "zero=3")
    wrong = {
        "right": spread,
        "forward": spread.replace(
            "scattered(F.linear(h, local(self.down.weight)))",
            "scattered(F.linear(h, local(self.down.weight)) * (1 + 1e-7 * current().index('tp')))",
        ),
        "backward": spread.replace(
            'h = F.gelu(self.up(gathered(self.norm2(x), 1, "reduce_scatter")))',
            'h = F.gelu(self.up(gathered(self.norm2(x), 1, "slice")))',
        ),
    }
    return {
        name: locate(Probed(program, single, places, ""), WORKLOAD, given.batch, CPU)
        for name, program in wrong.items()
    }


def drawn() -> list[list[float]]:
    """What every rank draws first, by rank."""
    make("replicate x tp")
    numbers = torch.rand(4)
    by_rank = [torch.empty_like(numbers) for _ in range(4)]
    dist.all_gather(by_rank, numbers)
    return [t.tolist() for t in by_rank]


def main() -> None:
    results = Path(sys.argv[1])
    start("cpu", timeout_s=60)
    batch = random_batch(WORKLOAD)
    wanted = reference(WORKLOAD, batch, CPU) if dist.get_rank() == 0 else None
    given = Given(batch, wanted)
    checks: dict[str, Callable[[], Any]] = {}
    for layout in LAYOUTS:
        checks[f"agrees: {layout}"] = lambda layout=layout: agrees(given, layout)  # type: ignore[misc]
    for layout in some(LAYOUTS, 7):
        precision = "bfloat16" if "3" in layout else "float32"
        checks[f"issued: {layout}"] = lambda layout=layout, p=precision: issued(layout, p)  # type: ignore[misc]
    for wrong in WRONG:
        checks[f"wrong: {wrong}"] = lambda wrong=wrong: agrees(given, "hybrid, zero 1", wrong)  # type: ignore[misc]
    for layout in ("replicate x tp", "zero2"):
        checks[f"bfloat16: {layout}"] = lambda layout=layout: lower_precision(layout)  # type: ignore[misc]
    checks |= {
        "checkpoints": lambda: checkpoints(results / "checkpoint"),
        "random state": lambda: random_state(results / "random"),
        "other model": lambda: other_model(results / "checkpoint"),
        "damaged": lambda: damaged(results / "damaged" / "c"),
        "late": late_overlap,
        "norm without group": norm_without_group,
        "wrong world": wrong_world,
        "indivisible": indivisible,
        "batches differ": batches_differ,
        "plans differ": lambda: plans_differ(results),
        "first wrong": lambda: first_wrong(given),
        "drawn": drawn,
    }
    results_of: dict[str, Any] = {}
    for name, check in checks.items():
        try:
            results_of[name] = check()
        except Exception:  # whatever a check raises: told with its name
            results_of[name] = {"failed": traceback.format_exc()}
            if dist.get_rank() != 0:
                raise
            break
    if dist.get_rank() == 0:
        (results / "results.json").write_text(json.dumps(results_of))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
