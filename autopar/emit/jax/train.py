"""``train.py``: one training step around the loss, each thing that happens in it on a line.

`autopar run` and `autopar verify` compile the `hold`, `prepared`, `backward` and `update` that are
written here.
"""

from __future__ import annotations

import re

from autopar.emit.constants import literal
from autopar.emit.jax import staged
from autopar.emit.jax.how import How, axes_text, overflowing
from autopar.emit.text import Lines, Row, docstring, lines_of
from autopar.nouns.axes import BATCH, PIPELINE

FILE = "train.py"
RUNTIME = (
    "Array Arrays Held LOSS Layout Leaf OutputKinds Part Pipeline SCALE_SPECS StageStep State "
    "Step batch_of clipped first_scale gathered in_transit initial_parameters join_pieces "
    "leave_at_once make_mesh next_scale norm_of optimizer_step overflowed own_pieces "
    "read_constants read_draws read_workload reducing restore save scaled_norm scatter "
    "see_devices settled squares_of turns_of"
).split()


def train_text(how: How) -> str:
    """The file."""
    parts = [_hold(how), *_kept(how), _prepared(how)]
    parts += [staged.summed(how)] if how.staged else [_backward(how)]
    parts += [_reduced(how), staged.totals(how), _update(how), _main(how)]
    body = "\n\n\n".join("\n".join(part) for part in parts if part)
    head = [docstring(how.about), "", "from __future__ import annotations", ""]
    head += ["import argparse", "import sys"]
    head += ["from collections.abc import Mapping"] * how.sums_in_turn
    head += ["from pathlib import Path"]
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
    where = "its place of pp" if how.staged else "it"
    lines.add(
        f'"""The mesh, and how each array of the state lies on {where} (of a batch: BATCH)."""'
    )
    axes = ", ".join(
        f"{axis}={size}" for axis, size in zip(how.mesh.axes, how.mesh.sizes, strict=True)
    )
    lines.add(f"mesh = make_mesh({axes or 'dp_shard=1'})")
    model = " and ".join(a for a in how.mesh.axes if a not in (*BATCH, PIPELINE))
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
    if how.reduce:
        more += ", reduce=step.reduces_in"
    if how.in_turn:
        more += ", scatters=step.scatters"
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
    given = f"step: {'Part' if how.staged else 'Step'}, leaves: dict[str, Leaf], arrays: Arrays"
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
    staged.sums(how, lines)
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


def _reduced(how: How) -> list[str]:
    if not how.differs:
        return []
    lines = Lines(4)
    lines.add('"""A gradient, summed over all devices that have parts of it."""')
    rest = how.rest
    if how.shards:
        every = "leaf.summed" if how.pieces else axes_text(how.data)
        if how.deferred:
            batch = "*leaf.summed" if how.pieces else ", ".join(map(literal, how.data))
            every = f"({batch}, *leaf.parameter.deferred)"
        shared = " and ".join(how.sharing)
        divides = "divides" if len(how.sharing) == 1 else "divide"
        lines.add("if leaf.cut is None:", f"no dim that {shared} {divides}: whole on every device")
        lines.lines.append(f"        return lax.psum(gradient, {every})")
    narrow = how.casts_sums
    if narrow:
        lines.add("moved = in_transit(gradient, dtype)", f"{how.reduce}, by SETTINGS of model.py")
    name = "moved" if narrow else "gradient"
    if how.shards and not how.split.gradients:
        over = axes_text(how.sharing) if how.plain else "leaf.sharing"
        turns, note = "", "a reduce-scatter"
        if how.sums_in_turn:
            turns, note = f", first=turns_of(scatters, {over})", "two reduce-scatters"
        lines.add(f"{name} = scatter({name}, leaf.dim, {over}{turns})", note)
    if rest:
        over = "leaf.summed" if how.pieces and not how.shards else axes_text(rest)
        lines.add(f"{name} = lax.psum({name}, {over})")
    if narrow:
        lines.add("gradient = moved.astype(gradient.dtype)")
    if how.deferred:
        lines.add("if leaf.parameter.deferred:", "model axes whose devices have parts of it")
        lines.lines.append("        gradient = lax.psum(gradient, leaf.parameter.deferred)")
    lines.add("return gradient")
    *before, last, _ = lines.lines
    if last.startswith("    gradient = "):  # what is returned at once needs no name
        lines.lines = [*before, last.replace("gradient =", "return", 1)]
    given = "leaf: Leaf, gradient: Array" + ", dtype: str | None" * narrow
    given += ", scatters: Mapping[str, int]" * how.sums_in_turn
    return [f"def reduced({given}) -> Array:", *lines.lines]


def _update(how: How) -> list[str]:
    name = {"adamw": "AdamW", "sgd": "SGD"}.get(how.optimizer, how.optimizer)
    shared = " and ".join(how.sharing)
    lines = Lines(4)
    done = f"Steps {name}"
    if how.clip_norm is not None:
        done = f"Clips by the norm of the whole gradient, and steps {name}"
    lines.add(f'"""{done}; every device its own pieces."""')
    if how.staged:
        staged.from_all(how, lines)
    elif how.clip_norm is not None:
        lines.add(
            "norm = norm_of(step.layout, gradients)",
            "one psum of the sum of squares" if how.mesh.device_count > 1 else "",
        )
    if how.clip_norm is not None:
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
        if not how.staged:
            given = overflowing(how)
            lines.add(f"overflow = overflowed({given})", "then the step is left out", above=True)
        lines.add(f"after = settled(overflow, state, {made})")
        lines.add('state = {**after, "scale": next_scale(state["scale"], overflow)}')
    if how.scales and how.clip_norm is not None:
        lines.add(f"return state, scaled_norm(overflow, norm, {literal(how.clip_norm)})")
    elif how.clip_norm is None:
        lines.add("return state, jnp.zeros(())", "no norm: nothing is clipped")
    else:
        lines.add("return state, norm")
    head = Lines(0)
    given = f"step: {how.within}, state: State, gradients: Arrays" + staged.from_others(how)
    head.add(f"def update({given}) -> tuple[State, Array]:")
    return [*head.lines, *lines.lines]


_COMMAND_LINE = (
    'if __name__ == "__main__":',
    "    parser = argparse.ArgumentParser()",
    '    parser.add_argument("--steps", type=int, default=10)',
    '    parser.add_argument("--save", type=Path, help="folder, where it goes on from, too")',
    '    parser.add_argument("--every", type=int, default=1000, help="steps between saves")',
    '    parser.add_argument("--distributed", action="store_true", help="of many processes")',
    "    arguments = parser.parse_args()",
    "    if arguments.distributed:",
    "        jax.distributed.initialize()  # Slurm, TPU pods and the like say who is there",
    "        leave_at_once()  # should it fail: others wait for its part of collectives",
    "    main(arguments.steps, arguments.save, arguments.every)",
)


def _main(how: How) -> list[str]:
    given = "workload" + ", model.STACKS" * how.stacks
    start = f"initial_parameters({given})"
    made = "# jax.jit of jax.shard_map over the mesh: `backward`, then `update`, the state donated"
    step = "step = Step(model, workload, sys.modules[__name__])"
    if how.staged:
        made = (
            "# of each stage jax.jit of jax.shard_map over its devices, called as schedule.txt says"
        )
        schedule = '(home / "schedule.txt").read_text()'
        step = f"step = Pipeline(model, workload, sys.modules[__name__], {schedule})"
    if how.frozen:
        start += ', read_constants(home / "constants.npz", step.layout)'
    batch = "batch_of(workload, number)"
    inside: list[Row] = [
        ("home = Path(__file__).resolve().parent",),
        ("see_devices(model.MESH)", "as many CPUs where there is no accelerator"),
        ('workload = read_workload(home / "workload", WORKLOAD)',),
        (made,),
        (step,),
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
        *_COMMAND_LINE,
    ]
