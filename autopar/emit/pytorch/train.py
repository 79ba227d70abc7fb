"""``train.py``: one training step around the model, each thing that happens in it on a line.

`autopar run` and `autopar verify` call the `hold`, `backward` and `update` that are written here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.emit.constants import literal
from autopar.emit.text import Lines, docstring, lines_of
from autopar.nouns.axes import BATCH, PIPELINE, REPLICATE, SEQUENCES, SLICE
from autopar.nouns.mesh import Mesh
from autopar.nouns.style import Style
from autopar.nouns.zero import ZERO, over

FILE = "train.py"
RUNTIME = (
    "Batch Program Ranks Replicated Sharded Stages Storage all_reduce_async check_alike clip "
    "cut_batch global_batch initialize make_optimizer rank_of_job read reduce_late running "
    "seed_draws step_from_host total_counts"
).split()


@dataclass(frozen=True, slots=True)
class How:
    """What decides about the text of a step.

    staged:    whether the program is a pipeline of several stages.
    counts:    whether the program divides by what is counted in the whole batch.
    late:      whether gradients may be partial sums when backward ends: parameters that are
               ``tp:D``, and scalars, which FSDP2 leaves alone.
    tied:      whether stages share parameters.
    optimizer: ``adamw`` or ``sgd``, "" where that is not known.
    offloads:  whether the optimizer's state is in host memory.
    scales:    whether gradients are those of a multiple of the loss: in float16.
    style:     what of forward and backward is compiled into fused kernels.
    carries:   whether the forward updates buffers by itself.
    limits:    whether the forward keeps parameters between limits.
    two_level, seq_slices: as `Settings` has them.
    about:     lines of the docstring.
    """

    mesh: Mesh
    zero: int
    microbatches: int
    clip_norm: float | None
    staged: bool
    counts: bool = True
    late: bool = True
    tied: bool = True
    optimizer: str = ""
    schedule: str = ""
    offloads: bool = False
    scales: bool = False
    style: Style = "eager"
    carries: bool = False
    limits: bool = False
    two_level: int = 0
    seq_slices: int = 1
    about: tuple[str, ...] = ("One training step.",)

    @property
    def data(self) -> tuple[str, ...]:
        return self.mesh.batch_axes

    @property
    def shares(self) -> bool:
        """Whether ranks have shares of the loss."""
        return bool(self.mesh.batch_axes)

    @property
    def shards(self) -> bool:
        """Whether FSDP2 holds the state."""
        return over(self.zero, self.mesh.ways(self.mesh.sharing())).optimizer

    @property
    def holder(self) -> str:
        """The class of the runtime that holds the state."""
        if self.staged:
            return "Stages"
        return "Sharded" if self.shards else "Replicated" if self.data else "Storage"

    @property
    def model_axes(self) -> tuple[str, ...]:
        return tuple(a for a in self.mesh.axes if a not in (*BATCH, PIPELINE))


_COMPILES = {
    "layers": ('state.compile("layers")', "torch.compile of each layer; the rest is a call an op"),
    "compiled": ("state.compile()", "torch.compile: forward and backward as fused kernels"),
}


def train_text(how: How) -> str:
    """The file."""
    body = "\n\n\n".join("\n".join(part) for part in (_hold(how), _backward(how), _update(how)))
    body += "\n\n\n" + "\n".join(_main(how))
    used = [name for name in RUNTIME if re.search(rf"(?<![\w.]){name}\b", body)]
    head = [
        docstring(how.about),
        "",
        "from __future__ import annotations",
        "",
        "import argparse",
        "from pathlib import Path",
        "",
        "import torch",
        "from torch import Tensor",
        "",
        "from autopar.runtime.pytorch.training import (",
        *(f"    {name}," for name in sorted(used, key=lambda n: (n[0].islower(), n))),
        ")",
    ]
    return "\n".join(head) + "\n\n\n" + body + "\n"


def _hold(how: How) -> list[str]:
    lines = Lines(4)
    lines.add(f'"""{_held(how)}"""')
    given = "program.model(), ranks, program.settings"
    if how.staged:
        given = (
            "program.stages, program.values, program.ties, program.lists, program.settings, ranks"
        )
    if how.style != "eager":
        lines.add(f"state = {how.holder}({given})")
        lines.add(*_COMPILES[how.style])
        lines.add("return state")
    else:
        lines.add(f"return {how.holder}({given})")
    return [f"def hold(program: Program, ranks: Ranks) -> {how.holder}:", *lines.lines]


def _held(how: How) -> str:
    if how.staged:
        return "This rank's stages of the pipeline: their parameters, and who sends what to whom."
    if not how.shards:
        if how.data:
            return f"Every rank of {_and(how.data)} holds all that it computes with (DDP)."
        return "Every parameter stays as it is: no axis splits the batch."
    does = {
        1: "gathers all parameters once a step; splits the optimizer's state.",
        2: "gathers all parameters once a step; splits gradients and state.",
        3: "gathers a layer's parameters for its forward, again for backward.",
    }[how.zero]
    return f"FSDP2 over {_and(how.mesh.sharing())}: {does}"


def _backward(how: How) -> list[str]:
    lines = Lines(4)
    lines.add('"""The loss of a global batch; `grad` of every piece is then the gradient of it."""')
    lines.add("state.zero_grad()")
    if how.limits:
        lines.add("state.limit()", "the forward keeps parameters between SETTINGS.limits")
    samples = how.mesh.sample_axes
    cut = _and(("microbatch", *samples) if how.microbatches > 1 else samples)
    split = tuple(a for a in how.mesh.batch_axes if a in SEQUENCES)
    along = _and((SLICE, *split) if how.seq_slices > 1 else split)
    cuts = [f"dim 0 by {cut}"] if cut else []
    cuts += [f"dim 1 of sequences by {along}"] if along else []
    lines.add(
        "microbatches = cut_batch(batch, state.ranks, state.settings)",
        ", ".join(cuts),
    )
    given = "microbatch"
    if how.counts:
        over = f": an all_reduce over {_and(how.data)}" if how.data else ""
        lines.add(
            "counts = total_counts(state, microbatches)",
            f"labels of the whole batch{over}",
            above=True,
        )
        given += ", counts"
    if how.staged:
        _play(how, lines)
    elif how.microbatches == 1:
        lines.add("(microbatch,) = microbatches")
        lines.add(f"share = state.forward({given})", "model.py")
        if how.shares:
            lines.add(f"loss = {_summed(how, 'share')}")
        lines.add(f"state.backward({_scaled(how)})", _reduced(how, "here"), above=how.scales)
    else:
        _loop(how, lines, given)
    _late(how, lines)
    lines.add("return loss.wait()" if how.shares or how.staged else "return share.detach()")
    if not how.shares and how.microbatches > 1 and not how.staged:
        lines.lines[-1] = "    return loss"
    return [f"def backward(state: {how.holder}, batch: Batch) -> Tensor:", *lines.lines]


def _loop(how: How, lines: Lines, given: str) -> None:
    lines.add("so_far = torch.zeros((), device=state.ranks.device)")
    lines.add("for i, microbatch in enumerate(microbatches):")
    inner = Lines(8)
    inner.add("last = i == len(microbatches) - 1")
    inner.add("with state.microbatch(last):", _reduced(how, "loop"), above=True)
    deep = Lines(12)
    deep.add(f"share = state.forward({given})", "model.py")
    deep.add("so_far = so_far + share.detach()")
    if how.shares:
        deep.add("if last:")
        deep.lines.append(f"                loss = {_summed(how, 'so_far')}")
    deep.add(f"state.backward({_scaled(how)})", "adds to the gradients there are")
    lines.lines += [*inner.lines, *deep.lines]
    if not how.shares:
        lines.lines = [line.replace("so_far", "loss") for line in lines.lines]


def _play(how: How, lines: Lines) -> None:
    given = "microbatches, counts" if how.counts else "microbatches"
    given += ", scale=state.loss_scale.scale" if how.scales else ""
    if how.schedule:
        lines.add(f"# forwards and backwards as schedule.txt orders them ({how.schedule});")
        lines.add("# what each stage is, takes and gives stands in model.py")
    lines.add(f"share = state.play({given})")
    lines.add(f"loss = {_summed(how, 'share')}")


def _scaled(how: How) -> str:
    return "share * state.loss_scale.scale" if how.scales else "share"


def _summed(how: How, value: str) -> str:
    axes = (*((PIPELINE,) if how.staged else ()), *how.mesh.batch_axes)
    return f"all_reduce_async({', '.join((value, 'state.ranks', *map(literal, axes)))})"


def _reduced(how: How, where: str) -> str:
    """What happens to gradients over the data axes, meanwhile."""
    if not how.data:
        return ""
    if not how.shards:
        axes = _and(how.data)
        axes += f", {how.two_level} by {how.two_level}, then across" if how.two_level else ""
        if where == "here":
            return f"DDP meanwhile adds gradients up over {axes}"
        return f"DDP adds gradients up over {axes} in the last"
    whole = REPLICATE in how.data
    if where == "here":
        more = ", then all-reduces over dp_replicate" if whole else ""
        return f"FSDP2 meanwhile reduce-scatters over {_and(how.mesh.sharing())}{more}"
    often = "each" if ZERO[how.zero].gradients else "the last"
    more = ", all-reduces over dp_replicate in the last" if whole else ""
    return f"FSDP2 reduce-scatters over {_and(how.mesh.sharing())} in {often}{more}"


def _late(how: How, lines: Lines) -> None:
    model = [f"`{axis}:D`" for axis in how.model_axes]
    partial = f"gradients that are partial sums, {_and(model)} in model.py" if model else ""
    rows = (
        (
            how.shards or how.staged,
            "state.collect()",
            "from here on `grad` is this rank's piece",
        ),
        (how.late, "reduce_late(state.pieces, state.ranks)", partial),
        (how.staged and how.tied, "state.ties.sum()", "parameters that several stages hold"),
        (how.carries, "state.carry()", "buffers hold what the forward left in them"),
        (
            how.scales,
            "state.loss_scale.undo(state.pieces)",
            "float16 would lose small gradients",
        ),
    )
    for holds, text, comment in rows:
        if holds:
            lines.add(text, comment, above=True)


def _update(how: How) -> list[str]:
    lines = Lines(4)
    done = "Clips by the norm of the whole gradient, and steps" if how.clip_norm else "Steps"
    lines.add(f'"""{done}; every rank updates its own pieces."""')
    if how.scales:
        lines.add(
            "if state.loss_scale.skips(state.pieces, state.ranks):",
            "an overflow on any rank; the scale is halved",
        )
        lines.add("    return" + ("" if how.clip_norm is None else " torch.tensor(torch.inf)"))
    if how.clip_norm is not None:
        over = ", state.norm_over" if how.staged else ""
        lines.add(
            f"norm = clip(state.pieces, state.ranks, {literal(how.clip_norm)}{over})",
            "one all_reduce of the sum of squares" if how.mesh.device_count > 1 else "",
        )
    if how.offloads:
        lines.add("step_from_host(optimizer)", "its state comes from the host, and returns")
    else:
        lines.add("optimizer.step()")
    if how.clip_norm is not None:
        lines.add("return norm")
    result = "None" if how.clip_norm is None else "Tensor"
    head = f"def update(state: {how.holder}, optimizer: torch.optim.Optimizer) -> {result}:"
    return [head, *lines.lines]


def _main(how: How) -> list[str]:
    name = {"adamw": "AdamW", "sgd": "SGD"}.get(how.optimizer, "the optimizer")
    return [
        "def main(device: torch.device, steps: int) -> None:",
        *lines_of(
            4,
            ('"""What every rank runs."""',),
            ("folder = Path(__file__).resolve().parents[1]",),
            ("program, workload = read(folder)", "model.py, and the file that was planned"),
            (
                "ranks = Ranks(program.mesh, device)",
                f"this process's place in {_shape(how.mesh)}",
            ),
            ("with running(ranks, program.settings.precision):",),
        ),
        *lines_of(
            8,
            ("state = hold(program, ranks)",),
            (
                "initialize(workload.model, workload.seed, state.targets())",
                "each rank its pieces of the model's initial weights",
                True,
            ),
            (
                "optimizer = make_optimizer(workload, state.pieces)",
                f"{name} of this rank's pieces",
            ),
            ("seed_draws(workload, ranks)", "dropout: others for other samples"),
            ("for step in range(steps):",),
        ),
        *lines_of(
            12,
            ("batch = global_batch(workload, step)", "all of it, on every rank"),
            ("check_alike(batch)",),
            ("loss = backward(state, batch)",),
            ("update(state, optimizer)",),
            ("if ranks.rank == 0:",),
        ),
        '                print(f"step {step}  loss {float(loss):.6f}", flush=True)',
        "",
        "",
        'if __name__ == "__main__":',
        "    parser = argparse.ArgumentParser()",
        '    parser.add_argument("--steps", type=int, default=10)',
        "    arguments = parser.parse_args()",
        "    with rank_of_job() as device:  # torchrun's process group: NCCL on GPUs, else gloo",
        "        main(device, arguments.steps)",
    ]


def _shape(mesh: Mesh) -> str:
    return f"the mesh {mesh}" if mesh.axes else "a mesh of one rank"


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
