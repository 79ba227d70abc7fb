"""``train.py``: one training step around the loss, each thing that happens in it on a line.

`autopar run` and `autopar verify` compile the `hold`, `backward` and `update` that are written
here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autopar.emit.constants import literal
from autopar.emit.text import Lines, docstring, lines_of, tuple_text
from autopar.nouns.axes import SAMPLES, SHARD
from autopar.nouns.mesh import Mesh
from autopar.nouns.zero import Zero, over

FILE = "train.py"
RUNTIME = (
    "Array Arrays Held Layout Leaf State Step clipped cpu_devices global_batch join_pieces "
    "make_mesh messages norm_of optimizer_step own_pieces read scatter"
).split()


@dataclass(frozen=True, slots=True)
class How:
    """What decides about the text of a step.

    deferred: whether some gradients are partial sums over model axes when backward ends.
    slots:    what the optimizer keeps of every parameter.
    frozen:   whether there are parameters without gradients.
    outputs:  whether the loss function returns more than the loss.
    about:    lines of the docstring.
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

    @property
    def data(self) -> tuple[str, ...]:
        return self.mesh.sample_axes

    @property
    def split(self) -> Zero:
        """What ``dp_shard`` splits."""
        return over(self.zero, self.mesh.size(SHARD))

    @property
    def shards(self) -> bool:
        """Whether ``dp_shard`` cuts state at all."""
        return self.split.optimizer

    @property
    def joins(self) -> bool:
        """Whether devices hold whole parameters over ``dp_shard`` and update pieces of them."""
        return self.shards and not self.split.parameters


def train_text(how: How) -> str:
    """The file."""
    parts = [_hold(how), _backward(how), _reduced(how), _update(how), _main(how)]
    body = "\n\n\n".join("\n".join(part) for part in parts if part)
    head = [docstring(how.about), "", "from __future__ import annotations", ""]
    head += ["import argparse", "import sys", "from pathlib import Path", ""]
    code = re.sub(r"#.*", "", body)
    used = [name for name in RUNTIME if re.search(rf"(?<![\w.\"]){name}\b", code)]
    head += ["import jax"] * bool(re.search(r"\bjax\.", code))
    head += ["import jax.numpy as jnp"] * ("jnp." in code)
    head += ["from jax import lax"] * bool(re.search(r"\blax\.", code))
    head += ["from jax.sharding import PartitionSpec as P", ""]
    head += ["from autopar.runtime.jax.training import ("]
    head += [f"    {name}," for name in sorted(used, key=lambda n: (n[0].islower(), n))] + [")"]
    return "\n".join(head) + "\n\n\n" + body + "\n"


def _hold(how: How) -> list[str]:
    lines = Lines(4)
    lines.add('"""The mesh, and how each array of the state lies on it (of a batch: BATCH)."""')
    axes = ", ".join(
        f"{axis}={size}" for axis, size in zip(how.mesh.axes, how.mesh.sizes, strict=True)
    )
    lines.add(f"mesh = make_mesh({axes or 'dp_shard=1'})")
    model = " and ".join(a for a in how.mesh.axes if a not in SAMPLES)
    over = f"over {model} as model.py says" if model else "whole on every device"
    if not how.shards:
        lines.add("params = layout.specs()", over)
        moments = "params"
    else:
        whole = f"{over}, whole over dp_shard" if model else "whole on every device"
        cut = "a dim of each over dp_shard" + (" too" if model else "")
        if how.joins:
            lines.add("params = layout.specs()", whole)
            lines.add("pieces = layout.specs(cut=True)", cut)
            moments = "pieces"
        else:
            lines.add("params = layout.specs(cut=True)", cut)
            moments = "params"
    entries = ['"params": params', *(f'"{slot}": {moments}' for slot in how.slots)]
    entries += ['"frozen": layout.frozen_specs()'] * how.frozen + ['"step": P()']
    lines.add(f"return mesh, {{{', '.join(entries)}}}")
    return ["def hold(layout: Layout) -> Held:", *lines.lines]


def _backward(how: How) -> list[str]:
    lines = Lines(4)
    made = "loss, gradients, outputs" if how.outputs else "loss, gradients"
    lines.add('"""On one device: the loss of a global batch, and its pieces of the gradients."""')
    if how.microbatches == 1:
        lines.add("microbatch = {name: entry[0] for name, entry in batch.items()}")
        lines.add(f"{made} = step.value_and_grad(state, microbatch)", _moved(how), above=True)
        if how.outputs:
            lines.add("outputs = tuple(output[None] for output in outputs)")
    else:
        lines.blank()
        kept = "tuple[Array, ...]" if how.outputs else "None"
        lines.add(f"def add(so_far: Arrays, microbatch: Arrays) -> tuple[Arrays, {kept}]:")
        inner = Lines(8)
        into = "loss, gradients, outputs" if how.outputs else "more"
        inner.add(f"{into} = step.value_and_grad(state, microbatch)", _moved(how), above=True)
        summed = "(loss, gradients)), outputs" if how.outputs else "more), None"
        inner.add(f"return jax.tree.map(jnp.add, so_far, {summed}")
        lines.lines += [*inner.lines, ""]
        kept = "outputs" if how.outputs else "_"
        lines.add(f"(loss, gradients), {kept} = lax.scan(add, step.zeros(state, batch), batch)")
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
    """What the derivative of the loss moves over ``dp_shard`` by itself."""
    if not how.split.gradients:
        return "`loss` of model.py"
    if not how.split.parameters:
        return "`loss` of model.py; gradients are reduce-scattered over dp_shard, layer by layer"
    return "`loss` of model.py; parameters are all-gathered over dp_shard, layer by layer, twice"


def _names(axes: tuple[str, ...]) -> str:
    return literal(axes[0]) if len(axes) == 1 else tuple_text(axes)


def _differs(how: How) -> bool:
    """Whether gradients are not all reduced alike."""
    return how.shards or how.deferred


def _reduced(how: How) -> list[str]:
    if not _differs(how):
        return []
    lines = Lines(4)
    lines.add('"""A gradient, summed over all devices that have parts of it."""')
    rest = how.data
    if how.shards:
        rest = tuple(axis for axis in how.data if axis != SHARD)
        every = _names(how.data)
        if how.deferred:
            every = f"({', '.join(map(literal, how.data))}, *leaf.parameter.deferred)"
        lines.add("if leaf.cut is None:", "no dim that dp_shard divides: whole on every device")
        lines.lines.append(f"        return lax.psum(gradient, {every})")
        if not how.split.gradients:
            lines.add('gradient = scatter(gradient, leaf.dim, "dp_shard")', "a reduce-scatter")
    if rest:
        lines.add(f"gradient = lax.psum(gradient, {_names(rest)})")
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
        lines.add(f"pieces = own_pieces(step.layout, {given})", "a part of each along dp_shard")
        given = "pieces"
    lines.add('number = state["step"] + 1')
    lines.add(f"params, slots = optimizer_step(step.workload, number, {given}, gradients, state)")
    if how.joins:
        lines.add("params = join_pieces(step.layout, params)", "all-gathers over dp_shard")
    lines.add('state = {**state, **slots, "params": params, "step": number}')
    if how.clip_norm is None:
        lines.add("return state, jnp.zeros(())", "no norm: nothing is clipped")
    else:
        lines.add("return state, norm")
    return [
        "def update(step: Step, state: State, gradients: Arrays) -> tuple[State, Array]:",
        *lines.lines,
    ]


def _main(how: How) -> list[str]:
    rest = "*_" if how.outputs else "_"
    count = how.mesh.device_count
    return [
        "def main(steps: int) -> None:",
        *lines_of(
            4,
            ('"""What the one process runs; it sees all devices."""',),
            ("folder = Path(__file__).resolve().parents[1]",),
            ("program = read(folder)", "model.py, and the file that was planned"),
            (
                "# jax.jit of jax.shard_map over the mesh: `backward`, then `update`, the state "
                "donated",
            ),
            ("step = Step(program.model, program.workload, sys.modules[__name__])",),
            (
                "state = step.initial(program.parameters(step.layout), program.constants)",
                "each device makes its pieces",
                True,
            ),
            ("for number in range(steps):",),
        ),
        *lines_of(
            8,
            ("batch = global_batch(program, number)",),
            (f"state, loss, {rest} = step.step(state, step.cut(batch))",),
            ('print(f"step {number}  loss {float(loss):.6f}", flush=True)',),
        ),
        "",
        "",
        'if __name__ == "__main__":',
        "    parser = argparse.ArgumentParser()",
        '    parser.add_argument("--steps", type=int, default=10)',
        "    arguments = parser.parse_args()",
        "    with messages():",
        f"        cpu_devices({count})  # where there is no accelerator",
        "        main(arguments.steps)",
    ]
