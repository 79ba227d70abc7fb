"""What a JAX step moves: the plan's table, the emitted program, and steps written by hand.

    python -m benchmarks.jax_collectives [--only gpt] [--json]

Tiny models of `benchmarks.jax_models` on 4 and 8 devices, each under pins, beside the same kind of
step of `benchmarks.jax_by_hand`; under ``tp`` beside the better of Megatron's two. All three are
MiB that a device sends in a step by rings: of the plan by its ``collectives.json``, of programs as
XLA compiled them for this machine's virtual devices. The steps by hand are right: each takes two
and has the losses of one device.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.figures import Target, show

CHILD = "AUTOPAR_JAX_COLLECTIVES_CHILD"
FLAGS = ("--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0")
PINS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "dp": ("dp_replicate={n}", ("dp",)),
    "zero 1": ("dp_shard={n},zero=1", ("zero 1",)),
    "zero 3": ("dp_shard={n},zero=3", ("zero 3",)),
    "tp": ("tp={n}", ("megatron", "megatron, sequence")),
}
DEVICES = (4, 8)
HEADS = 8
ROUNDING = 1e-3
"""Relative, of losses after a step in float32."""


def models() -> dict[str, Callable[[], Any]]:
    from benchmarks import jax_models as m

    return {
        "gpt": lambda: m.gpt(4, 256, HEADS, 1024, samples=8, length=128),
        "llama": lambda: m.llama(4, 256, HEADS, HEADS, 512, 1024, samples=8, length=128),
        "moe": lambda: m.llama(4, 256, HEADS, HEADS, 256, 1024, samples=8, length=128, experts=8),
        "vit": lambda: m.vit(3, 256, HEADS, samples=8),
    }


def emitted(workload: Any, fix: str, devices: int) -> tuple[float, float]:
    """MiB that a device sends by the plan, and by the program."""
    from autopar.emit.jax import emit
    from autopar.frontends.jax.capture import capture_workload
    from autopar.lowering.collectives import priced_collectives
    from autopar.planner.planning import plan_captured
    from autopar.runtime.jax.programs import run_program, step_alone
    from benchmarks.jax_memory import roomy

    cluster = roomy()
    (group,) = cluster.groups
    levels = (replace(cluster.levels[0], span=devices), *cluster.levels[1:])
    cluster = replace(cluster, groups=(replace(group, count=devices),), levels=levels)
    captured = capture_workload(workload)
    pins = dict(part.split("=") for part in fix.format(n=devices).split(","))
    planned = plan_captured(captured, workload, cluster, "benchmarks/jax_models.py:model", pins)
    stored = {name: tensor.dtype for name, tensor in captured.tensors.items()}
    library = cluster.levels[0].library
    rows = priced_collectives(planned.lowered, planned.plan, stored, False, library)
    text = emit(planned.lowered, planned.plan, captured)["model.py"]
    step = step_alone(run_program(text), workload)
    compiled = step.step.lower(*step.shapes(workload.batch())).compile()
    return sent(rows, devices), counted(compiled, step.layout.mesh, devices)


def by_hand(workload: Any, kind: str, way: str, devices: int) -> float:
    """MiB that a device sends. Raises `AssertionError` for a step that is wrong."""
    import jax
    import jax.numpy as jnp

    from benchmarks import jax_by_hand as hand

    shapes = jax.eval_shape(workload.init, jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(shapes))))

    def fresh() -> Any:
        return jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape) * 0.02, shapes)

    def drawn(spec: Any) -> Any:
        if spec.dtype == "int32":
            return jax.random.randint(jax.random.key(1), spec.shape, 0, 1000)
        return jax.random.normal(jax.random.key(1), spec.shape)

    batch = {name: drawn(spec) for name, spec in workload.batch().items()}
    params = fresh()
    zeros = jax.tree.map(jnp.zeros_like, params)

    def copied(tree: Any) -> Any:
        return jax.tree.map(jnp.copy, tree)

    def losses(step: Any) -> list[float]:
        state = (copied(params), copied(zeros), copied(zeros))
        made = []
        for _ in range(2):
            *state, value = step(*state, batch)
            made.append(float(value))
        return made

    step = hand.step_of(kind, HEADS, hand.WAYS[way], shapes, devices)
    alone = losses(hand.step_of(kind, HEADS, hand.Way(), shapes, 1))
    shared = losses(step)
    off = max(abs(a / b - 1) for a, b in zip(shared, alone, strict=True))
    assert off < ROUNDING, f"{kind} by hand, {way}: losses {shared} for {alone}"
    compiled = step.lower(params, zeros, zeros, batch).compile()
    return counted(compiled, {hand.AXIS: devices}, devices)


def counted(compiled: Any, mesh: Mapping[str, int], devices: int) -> float:
    from autopar.runtime.verify.jax.counting import collectives

    return sent(collectives(compiled.as_text(), mesh), devices)


def sent(rows: Any, devices: int) -> float:
    from benchmarks.jax_by_hand import wire_bytes

    bytes_sent = (wire_bytes(row.kind, row.size_bytes, devices) * row.count for row in rows)
    return float(sum(bytes_sent)) / 2**20


def row(model: str, devices: int, name: str) -> dict[str, Any]:
    fix, ways = PINS[name]
    workload = models()[model]()
    plan, program = emitted(workload, fix, devices)
    known = {
        way: by_hand(workload, model, way, devices)
        for way in ways
        if not (way.endswith("sequence") and model == "vit" and 196 % devices)
    }
    best = min(known, key=lambda way: known[way])
    return {
        "model": model,
        "devices": devices,
        "pins": fix.format(n=devices),
        "plan MiB": plan,
        "program MiB": program,
        "by hand MiB": known[best],
        "which": best,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="models whose name has this")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if CHILD not in os.environ:  # the devices must be there before jax is
        flags = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", CHILD: "1"}
        command = [sys.executable, "-m", "benchmarks.jax_collectives", *sys.argv[1:]]
        return subprocess.run(command, env=environment).returncode
    rows = [
        row(model, devices, name)
        for model in models()
        if given.only in model
        for devices in DEVICES
        for name in PINS
    ]
    targets = (
        Target(
            "program beside plan, largest relative difference",
            max(abs(r["program MiB"] / r["plan MiB"] - 1) for r in rows),
            1e-9,
        ),
        Target(
            "program over the best by hand, largest",
            max(r["program MiB"] / r["by hand MiB"] for r in rows),
            1.0,
        ),
    )
    show(rows, targets, given.json)
    return 0 if all(target.met for target in targets) else 1


if __name__ == "__main__":
    raise SystemExit(main())
