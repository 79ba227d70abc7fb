"""``train.py``: one training step around the loss, each thing that happens in it on a line.

`autopar run` and `autopar verify` compile the `hold`, `prepared`, `backward` and `update` that are
written here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autopar.emit.constants import literal
from autopar.emit.text import Lines, Row, docstring, lines_of, tuple_text
from autopar.nouns.axes import BATCH, SHARD
from autopar.nouns.mesh import Mesh
from autopar.nouns.zero import Zero, over

FILE = "train.py"
RUNTIME = (
    "Array Arrays Held Layout Leaf OutputKinds SCALE_SPECS State Step batch_of clipped first_scale "
    "gathered initial_parameters join_pieces make_mesh next_scale norm_of optimizer_step "
    "overflowed own_pieces read_constants read_draws read_workload reducing restore save "
    "scaled_norm scatter see_devices settled"
).split()


@dataclass(frozen=True, slots=True)
class How:
    """What decides about the text of a step.

    deferred:  whether some gradients are partial sums over model axes when backward ends.
    pieces:    whether axes that split the batch split some parameters, too: their gradients are
               sums over the others.
    slots:     what the optimizer keeps of every parameter.
    frozen:    whether there are parameters without gradients.
    outputs:   whether the loss function returns more than the loss.
    about:     lines of the docstring.
    precision: dtype of compute.
    draws:     whether `draws.bin` adds to a batch: random numbers, counts of the whole batch.
    stacks:    whether leaves of the user's tree hold several layers.
    workload:  the file in ``workload/``, with a name in it where it has several.
    """

    mesh: Mesh
    zero: int
    microbatches: int
    clip_norm: float | None
    deferred: bool = True
    optimizer: str = "adamw"
    slots: tuple[str, ...] = ("m", "v")
    frozen: bool = True
    outputs: bool = False
    about: tuple[str, ...] = ("One training step.",)
    precision: str = "float32"
    draws: bool = False
    stacks: bool = False
    workload: str = ""
    pieces: bool = False

    @property
    def data(self) -> tuple[str, ...]:
        return self.mesh.batch_axes

    @property
    def split(self) -> Zero:
        """What the axes that share state split."""
        return over(self.zero, self.mesh.ways(self.sharing))

    @property
    def sharing(self) -> tuple[str, ...]:
        """The axes of the batch that share the state of parameters."""
        return self.mesh.sharing()

    @property
    def plain(self) -> bool:
        """Whether that is ``dp_shard`` alone, which calls do not say."""
        return self.sharing in ((), (SHARD,))

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled for backward."""
        return self.precision == "float16"

    @property
    def pairs(self) -> bool:
        """Whether gradients are of pieces of parameters that devices hold whole."""
        return self.split.gradients and not self.split.parameters

    @property
    def shards(self) -> bool:
        """Whether any axis cuts state at all."""
        return self.split.optimizer

    @property
    def joins(self) -> bool:
        """Whether devices hold whole parameters over these axes and update pieces of them."""
        return self.shards and not self.split.parameters


def train_text(how: How) -> str:
    """The file."""
    parts = [_hold(how), *_kept(how), _prepared(how)]
    parts += [_backward(how), _reduced(how), _update(how), _main(how)]
    body = "\n\n\n".join("\n".join(part) for part in parts if part)
    head = [docstring(how.about), "", "from __future__ import annotations", ""]
    head += ["import argparse", "import sys", "from pathlib import Path"]
    head += ["from types import ModuleType"] * how.outputs + [""]
    code = re.sub(r"#.*", "", body)
    used = [name for name in RUNTIME if re.search(rf"(?<![\w.\"]){name}\b", code)]
    head += ["import jax"] * bool(re.search(r"\bjax\.", code))
    head += ["import jax.numpy as jnp"] * ("jnp." in code)
    head += ["from jax import lax"] * bool(re.search(r"\blax\.", code))
    head += ["from jax.sharding import PartitionSpec as P", ""]
    head += ["from parallel import ("]
    head += [f"    {name}," for name in sorted(used, key=lambda n: (n[0].islower(), n))] + [")"]
    lines = Lines(0)
    lines.add(f"WORKLOAD = {literal(how.workload)}", "in workload/, as it was when it was planned")
    constants = "\n".join(lines.lines)
    return "\n".join(head) + f"\n\n{constants}\n\n\n" + body + "\n"


def _hold(how: How) -> list[str]:
    lines = Lines(4)
    lines.add('"""The mesh, and how each array of the state lies on it (of a batch: BATCH)."""')
    axes = ", ".join(
        f"{axis}={size}" for axis, size in zip(how.mesh.axes, how.mesh.sizes, strict=True)
    )
    lines.add(f"mesh = make_mesh({axes or 'dp_shard=1'})")
    model = " and ".join(a for a in how.mesh.axes if a not in BATCH)
    shared = " and ".join(how.sharing)
    over = f"over {model} as model.py says" if model else "whole on every device"
    if not how.shards:
        lines.add("params = layout.specs()", over)
        moments = "params"
    else:
        whole = f"{over}, whole over {shared}" if model else "whole on every device"
        cut = f"a dim of each over {shared}" + (" too" if model else "")
        if how.joins:
            lines.add("params = layout.specs()", whole)
            lines.add("pieces = layout.specs(cut=True)", cut)
            moments = "pieces"
        else:
            lines.add("params = layout.specs(cut=True)", cut)
            moments = "params"
    entries = ['"params": params', *(f'"{slot}": {moments}' for slot in how.slots)]
    entries += ['"frozen": layout.frozen_specs()'] * how.frozen + ['"step": P()']
    entries += ['"scale": SCALE_SPECS'] * how.scales
    lines.add(f"return mesh, {{{', '.join(entries)}}}")
    return ["def hold(layout: Layout) -> Held:", *lines.lines]


def _kept(how: How) -> list[list[str]]:
    """What a step has beside parameters and loss."""
    made = []
    if how.scales:
        lines = Lines(4)
        lines.add('"""Beside the number of the step: by what the loss is multiplied in float16."""')
        lines.add('return {"scale": first_scale()}')
        made.append(["def counters() -> State:", *lines.lines])
    if how.outputs:
        lines = Lines(4)
        lines.add('"""What `loss` returns beside the loss, and which devices have parts of it."""')
        lines.add("return OutputKinds(program.OUTPUTS, layout.data_axes)")
        made.append(
            ["def outputs_of(program: ModuleType, layout: Layout) -> OutputKinds:", *lines.lines]
        )
    return made


def _prepared(how: How) -> list[str]:
    """Of a layer, or of what is in no layer."""
    lines = Lines(4)
    cast = how.precision != "float32"
    cuts, more = ["cuts = {name: leaf.cut for name, leaf in leaves.items()}"], ""
    if not how.plain:
        cuts.append("sharing = {name: leaf.sharing for name, leaf in leaves.items()}")
        more = ", sharing=sharing"
    if how.split.parameters:
        over = " and ".join(how.sharing)
        lines.add(f'"""A unit\'s parameters for the model, all-gathered over {over}."""')
        lines.lines += lines_of(4, *((line,) for line in cuts))
        lines.add("dtypes = step.dtypes(leaves, arrays)", "of compute")
        frozen = ""
        if how.frozen:
            lines.add("frozen = [name for name, leaf in leaves.items() if leaf.parameter.frozen]")
            frozen = ", frozen"
        lines.add(f"return gathered(arrays, cuts, dtypes{frozen}{more})")
    elif how.pairs:
        lines.add('"""A unit\'s parameters for the model; their gradients are reduce-scattered."""')
        lines.lines += lines_of(4, *((line,) for line in cuts))
        made = f"reducing(arrays, cuts{more})"
        lines.add(f"return step.cast(leaves, {made})" if cast else f"return {made}")
    else:
        lines.add('"""A unit\'s parameters for the model."""')
        lines.add("return step.cast(leaves, arrays)" if cast else "return dict(arrays)")
    head = Lines(0)
    given = "step: Step, leaves: dict[str, Leaf], arrays: Arrays"
    head.add(f"def prepared({given}) -> dict[str, Array]:")
    return [*head.lines, *lines.lines]


def _backward(how: How) -> list[str]:
    lines = Lines(4)
    made = "loss, gradients, outputs" if how.outputs else "loss, gradients"
    lines.add('"""On one device: the loss of a global batch, and its pieces of the gradients."""')
    given, more = "state, microbatch", ""
    if how.pairs:
        lines.add('own = own_pieces(step.layout, state["params"])', "what gradients are of")
        more = ", own"
    given += more
    if how.scales:
        given += ', scale=state["scale"]["scale"]'
    if how.microbatches == 1:
        lines.add("microbatch = {name: entry[0] for name, entry in batch.items()}")
        lines.add(f"{made} = step.value_and_grad({given})", _moved(how), above=True)
        if how.outputs:
            lines.add("outputs = tuple(output[None] for output in outputs)")
    else:
        lines.blank()
        kept = "tuple[Array, ...]" if how.outputs else "None"
        lines.add(f"def add(so_far: Arrays, microbatch: Arrays) -> tuple[Arrays, {kept}]:")
        inner = Lines(8)
        into = "loss, gradients, outputs" if how.outputs else "more"
        inner.add(f"{into} = step.value_and_grad({given})", _moved(how), above=True)
        summed = "(loss, gradients)), outputs" if how.outputs else "more), None"
        inner.add(f"return jax.tree.map(jnp.add, so_far, {summed}")
        lines.lines += [*inner.lines, ""]
        kept = "outputs" if how.outputs else "_"
        lines.add(f"zeros = step.zeros(state, batch{more})")
        lines.add(f"(loss, gradients), {kept} = lax.scan(add, zeros, batch)")
    if how.outputs:
        lines.add("outputs = step.outputs.reduced(outputs)", "shares of all devices are summed")
    if how.data:
        lines.add(f"loss = lax.psum(loss, {_names(how.data)})")
    own = f"lax.psum(g, {_names(how.data)})" if how.data else "g"
    if _differs(how):
        lines.add("leaves = step.layout.leaves")
        own = "reduced(leaves[name], g)"
    if own != "g":
        lines.add(f"gradients = {{name: {own} for name, g in gradients.items()}}")
    lines.add(f"return {made}")
    gives = "tuple[Array, Arrays, tuple[Array, ...]]" if how.outputs else "tuple[Array, Arrays]"
    return [
        f"def backward(step: Step, state: State, batch: Arrays) -> {gives}:",
        *lines.lines,
    ]


def _moved(how: How) -> str:
    """What the derivative of the loss moves over axes of the batch by itself."""
    over = " and ".join(how.sharing)
    if not how.split.gradients:
        return "`loss` of model.py"
    if not how.split.parameters:
        return f"`loss` of model.py; gradients are reduce-scattered over {over}, layer by layer"
    return f"`loss` of model.py; parameters are all-gathered over {over}, layer by layer, twice"


def _names(axes: tuple[str, ...]) -> str:
    return literal(axes[0]) if len(axes) == 1 else tuple_text(axes)


def _differs(how: How) -> bool:
    """Whether gradients are not all reduced alike."""
    return how.shards or how.deferred or how.pieces


def _reduced(how: How) -> list[str]:
    if not _differs(how):
        return []
    lines = Lines(4)
    lines.add('"""A gradient, summed over all devices that have parts of it."""')
    rest = how.data
    if how.shards:
        rest = tuple(axis for axis in how.data if axis not in how.sharing)
        every = "leaf.summed" if how.pieces else _names(how.data)
        if how.deferred:
            batch = "*leaf.summed" if how.pieces else ", ".join(map(literal, how.data))
            every = f"({batch}, *leaf.parameter.deferred)"
        shared = " and ".join(how.sharing)
        divides = "divides" if len(how.sharing) == 1 else "divide"
        lines.add("if leaf.cut is None:", f"no dim that {shared} {divides}: whole on every device")
        lines.lines.append(f"        return lax.psum(gradient, {every})")
        if not how.split.gradients:
            over = _names(how.sharing) if how.plain else "leaf.sharing"
            lines.add(f"gradient = scatter(gradient, leaf.dim, {over})", "a reduce-scatter")
    if rest:
        over = "leaf.summed" if how.pieces and not how.shards else _names(rest)
        lines.add(f"gradient = lax.psum(gradient, {over})")
    if how.deferred:
        lines.add("if leaf.parameter.deferred:", "model axes whose devices have parts of it")
        lines.lines.append("        gradient = lax.psum(gradient, leaf.parameter.deferred)")
    lines.add("return gradient")
    *before, last, _ = lines.lines
    if last.startswith("    gradient = "):  # what is returned at once needs no name
        lines.lines = [*before, last.replace("gradient =", "return", 1)]
    return ["def reduced(leaf: Leaf, gradient: Array) -> Array:", *lines.lines]


def _update(how: How) -> list[str]:
    name = {"adamw": "AdamW", "sgd": "SGD"}.get(how.optimizer, how.optimizer)
    shared = " and ".join(how.sharing)
    lines = Lines(4)
    done = f"Steps {name}"
    if how.clip_norm is not None:
        done = f"Clips by the norm of the whole gradient, and steps {name}"
    lines.add(f'"""{done}; every device its own pieces."""')
    if how.clip_norm is not None:
        lines.add(
            "norm = norm_of(step.layout, gradients)",
            "one psum of the sum of squares" if how.mesh.device_count > 1 else "",
        )
        lines.add(f"gradients = clipped(gradients, norm, {literal(how.clip_norm)})")
    given = 'state["params"]'
    if how.joins:
        lines.add(f"pieces = own_pieces(step.layout, {given})", f"a part of each along {shared}")
        given = "pieces"
    lines.add('number = state["step"] + 1')
    lines.add(f"params, slots = optimizer_step(step.workload, number, {given}, gradients, state)")
    if how.joins:
        lines.add("params = join_pieces(step.layout, params)", f"all-gathers over {shared}")
    made = '{**state, **slots, "params": params, "step": number}'
    if not how.scales:
        lines.add(f"state = {made}")
    else:
        axes = tuple(a for a, size in zip(how.mesh.axes, how.mesh.sizes, strict=True) if size > 1)
        given = f"gradients, {tuple_text(axes)}" if axes else "gradients"
        lines.add(f"overflow = overflowed({given})", "then the step is left out", above=True)
        lines.add(f"after = settled(overflow, state, {made})")
        lines.add('state = {**after, "scale": next_scale(state["scale"], overflow)}')
    if how.scales and how.clip_norm is not None:
        lines.add(f"return state, scaled_norm(overflow, norm, {literal(how.clip_norm)})")
    elif how.clip_norm is None:
        lines.add("return state, jnp.zeros(())", "no norm: nothing is clipped")
    else:
        lines.add("return state, norm")
    return [
        "def update(step: Step, state: State, gradients: Arrays) -> tuple[State, Array]:",
        *lines.lines,
    ]


def _main(how: How) -> list[str]:
    given = "workload, step.layout" + ", model.STACKS" * how.stacks
    start = f"initial_parameters({given})"
    if how.frozen:
        start += ', read_constants(home / "constants.npz", step.layout)'
    batch = "batch_of(workload, number)"
    inside: list[Row] = [
        ("home = Path(__file__).resolve().parent",),
        ("see_devices(model.MESH)", "as many CPUs where there is no accelerator"),
        ('workload = read_workload(home / "workload", WORKLOAD)',),
        ("# jax.jit of jax.shard_map over the mesh: `backward`, then `update`, the state donated",),
        ("step = Step(model, workload, sys.modules[__name__])",),
        (f"state = step.initial({start})", "each device makes its pieces", True),
    ]
    if how.draws:
        inside.append(('draw = read_draws(home / "draws.bin")',))
        batch = f"draw({batch})"
    lines = Lines(4)
    lines.add('"""What every process runs. ``folder``: where it saves, and goes on from."""')
    lines.add("import model", "beside this file")
    lines.blank()
    lines.lines += lines_of(
        4,
        *inside,
        ("if folder is not None:",),
        ("    state = restore(folder, state)",),
        ('for number in range(int(state["step"]), steps):',),
    )
    return [
        "def main(steps: int, folder: Path | None = None, every: int = 1000) -> None:",
        *lines.lines,
        *lines_of(
            8,
            (f"batch = {batch}",),
            ("state, loss, *_ = step.step(state, step.cut(batch))",),
            ('print(f"step {number}  loss {float(loss):.6f}", flush=True)',),
            ("if folder is not None and (number + 1) % every == 0:",),
            ("    save(folder, state)",),
        ),
        "",
        "",
        'if __name__ == "__main__":',
        "    parser = argparse.ArgumentParser()",
        '    parser.add_argument("--steps", type=int, default=10)',
        '    parser.add_argument("--save", type=Path, help="folder, where it goes on from, too")',
        '    parser.add_argument("--every", type=int, default=1000, help="steps between saves")',
        '    parser.add_argument("--distributed", action="store_true", help="of many processes")',
        "    arguments = parser.parse_args()",
        "    if arguments.distributed:",
        "        jax.distributed.initialize()  # Slurm, TPU pods and the like say who is there",
        "    main(arguments.steps, arguments.save, arguments.every)",
    ]
