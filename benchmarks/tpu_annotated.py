"""Bytes on the wire of a plan's step and of annotated steps, as the TPU's compiler makes them.

    python -m benchmarks.tpu_annotated [--only v5e-4x4] [--json]

Llama 3 8B, a sample of 4,096 tokens for each device of a described slice. By hand: a plain step
under `jax.jit` whose parameters, optimizer state and batch are annotated, in the two ways that are
usual: parameters split over all devices, and over all but two of them beside Megatron's tensor
parallelism of two with rows of activations split. The plan sums gradients in bfloat16, as
annotations do of weights that are cast. No TPU is needed, but libtpu is: `pip install libtpu`, of
the version that the installed jax names. A compilation takes minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.cost_models.slices import find_slice
from autopar.files.plan_folder import read_plan
from autopar.nouns.scatters import in_turn
from autopar.runtime.ahead.described import Described, devices_of, environment
from benchmarks.figures import Target, show
from benchmarks.jax_by_hand import wire_bytes

CHILD = "AUTOPAR_TPU_ANNOTATED"
HEADS, GROUPS = 32, 8


@dataclass(frozen=True, slots=True)
class Case:
    """A slice, the workload of `benchmarks.jax_llama3` for it, and its cluster file."""

    slice: str
    workload: str
    cluster: str


CASES = (
    Case("v5e-4x4", "on_16", "examples/clusters/tpu_v5e_16.yaml"),
    Case("v5e-16x16", "on_256", "examples/clusters/tpu_v5e_256.yaml"),
)


def described(case: Case) -> Described:
    one = find_slice(case.slice)
    name = case.slice.replace("-", ":")
    return Described("tpu", one.device_count, name, one.generation.wraps(one.shape))


def sent(rows: Iterable[Mapping[str, Any]], mesh: Mapping[str, int]) -> float:
    """GiB that a device sends, each collective by a ring."""
    of = 0.0
    for row in rows:
        devices = math.prod(mesh[axis] for axis in row["axis"].split("+"))
        of += row["count"] * wire_bytes(row["kind"], row["size_bytes"], devices)
    return of / 2**30


def planned(case: Case) -> tuple[float, str]:
    """Of the plan's step."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "autopar", "plan"]
        command += [f"benchmarks/jax_llama3.py:{case.workload}", "--cluster", case.cluster]
        command += ["--fix", "reduce=bfloat16", "--compile", "--json", "-o", f"{scratch}/plan"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        plan = read_plan(f"{scratch}/plan")
    report = json.loads(done.stdout)
    mesh = {axis: ways for axis, ways in report["degrees"].items() if ways > 1}
    layout = " x ".join(f"{axis} {ways}" for axis, ways in mesh.items())
    for axis, first in plan.scatters.items():
        mesh |= dict(in_turn(axis, first, mesh))
    return sent(report["compiled"]["issued"], mesh), layout


def annotated(case: Case, tp: int) -> float:
    """Of a step by hand; in a process whose environment is that of the compiler."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from autopar.runtime.verify.jax import counting
    from benchmarks import jax_llama3
    from benchmarks.jax_models import attention, feed_forward, rms_norm, rotary, token_loss

    devices = devices_of(described(case))
    names = ("data", "tp")
    mesh = Mesh(np.array(devices).reshape(-1, tp), names, axis_types=(AxisType.Auto, AxisType.Auto))

    def placed(*spec: str | None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*spec))

    rows, into, out = placed("data", "tp"), (None, "data", "tp"), (None, "tp", "data")
    specs = {
        "embed": placed("tp", "data"),
        "layers": {
            "norm1": placed(None, "data"),
            "norm2": placed(None, "data"),
            **{name: placed(*into) for name in ("q", "k", "v", "gate", "up")},
            **{name: placed(*out) for name in ("o", "down")},
        },
        "norm": placed("data"),
        "head": placed("data", "tp"),
    }

    def block(x: Any, p: Any) -> tuple[Any, None]:
        b, s, _ = x.shape
        h = rms_norm(p["norm1"], x)
        q = rotary((h @ p["q"]).reshape(b, s, HEADS, -1))
        k = rotary((h @ p["k"]).reshape(b, s, GROUPS, -1))
        v = (h @ p["v"]).reshape(b, s, GROUPS, -1)
        x = jax.lax.with_sharding_constraint(x + attention(q, k, v, causal=True) @ p["o"], rows)
        x = x + feed_forward(p, rms_norm(p["norm2"], x))
        return jax.lax.with_sharding_constraint(x, rows), None

    def loss(params: Any, batch: Any) -> Any:
        cast = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        x = jax.lax.with_sharding_constraint(cast["embed"][batch["tokens"]], rows)
        x, _ = jax.lax.scan(jax.checkpoint(block), x, cast["layers"])
        logits = rms_norm(cast["norm"], x) @ cast["head"]
        return token_loss(logits.astype(jnp.float32), batch["labels"])

    optimizer = optax.adamw(1e-3)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    workload = getattr(jax_llama3, case.workload)
    shapes = jax.eval_shape(workload.init, jax.random.key(0))
    params = jax.tree.map(lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s), shapes,
                          specs)  # fmt: skip
    state = optax.tree_map_params(
        optimizer,
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=spec),
        jax.eval_shape(optimizer.init, shapes),
        specs,
        transform_non_params=lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=placed()
        ),
    )
    batch = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed("data"))
        for name, leaf in workload.batch(0).items()
    }
    made = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch).compile()
    sizes = dict(zip(names, mesh.devices.shape, strict=True))
    issued = counting.collectives(made.as_text(), sizes)
    listed = [
        {"kind": r.kind, "axis": r.axis, "size_bytes": r.size_bytes, "count": r.count}
        for r in issued
    ]
    return sent(listed, sizes)


def child(case: Case, tp: int) -> float:
    """`annotated`, in a process of its own: the environment must be there before jax is."""
    added = environment(described(case)) | {CHILD: f"{case.slice} {tp}"}
    command = [sys.executable, "-m", "benchmarks.tpu_annotated"]
    done = subprocess.run(
        command, env={**os.environ, **added}, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def main() -> int:
    if of := os.environ.get(CHILD):
        name, tp = of.split()
        print(annotated(next(case for case in CASES if case.slice == name), int(tp)))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="slices whose name has this text")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    targets: list[Target] = []
    for case in (case for case in CASES if given.only in case.slice):
        whole, megatron = child(case, 1), child(case, 2)
        gib, layout = planned(case)
        rows.append(
            {
                "slice": case.slice,
                "plan": layout,
                "plan GiB": round(gib, 2),
                "annotated GiB": round(whole, 2),
                "with tp 2 GiB": round(megatron, 2),
            }
        )
        targets.append(
            Target(f"{case.slice}: wire, plan / annotated", gib / min(whole, megatron), 1)
        )
    show(rows, targets, given.json)
    return 0 if all(target.met for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
