"""The zoo's plans against `jax.value_and_grad` on one device, by nothing of what verifies plans.

    python -m benchmarks.jax_zoo_gradients [--only NAME]... [--framework NAME]... [--json]

Every kind is planned in float64 under the six layouts, `autopar.load` gives the trainer, and its
`value_and_grad` of a batch is compared, leaf by leaf, with that of the user's own loss on the same
weights and batch. Where the loss computes in float32 in spite of its arguments, or cannot be
traced for float64, that is the precision. A kind is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import autopar
from benchmarks import quick_xla
from benchmarks.figures import Target, show
from benchmarks.jax_zoo import chosen, cluster_in, layouts
from benchmarks.jax_zoo_models import Kind, kinds
from benchmarks.planned import planned_in

LIMIT = {"float64": 1e-9, "float32": 2e-4}
"""Largest distance of a leaf's gradient, relative to its norm, by what the loss computes in."""
SMALL = 1e-4
"""Of the norm of all gradients: a leaf with less is held against so much."""
NARROW = "computes in float32"
_MODEL = "from benchmarks.jax_zoo_models import workload_of\n\nworkload = workload_of({!r}, {!r})\n"


def precision_of(kind: Kind) -> str:
    """What the loss computes in when its arguments are float64."""
    wide = kind.workload("float64")
    assert wide.loss is not None
    assert wide.init is not None
    try:
        params, batch = jax.eval_shape(wide.init, jax.random.key(0)), wide.batch(0)
        text = str(jax.make_jaxpr(wide.loss)(params, batch))
    except TypeError:  # float32 beside float64, where jax wants one dtype
        return "float32"
    return "float32" if "f32[" in text else "float64"


def single(loss: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """The user's loss differentiated as users do, on one device."""
    both = jax.jit(jax.value_and_grad(loss, has_aux=has_aux))

    def run(params: Any, batch: Mapping[str, Any]) -> tuple[float, Any]:
        value, gradients = both(params, dict(batch))
        return float(value[0] if has_aux else value), jax.device_get(gradients)

    return run


def distance(ours: Any, theirs: Any) -> float:
    """The largest one of a leaf, relative."""
    left, right = (dict(jax.tree_util.tree_leaves_with_path(t)) for t in (ours, theirs))
    if left.keys() != right.keys():
        return float("inf")
    norms = {path: float(np.linalg.norm(g)) for path, g in right.items()}
    least = SMALL * float(np.linalg.norm(list(norms.values())))
    return max(
        float(np.linalg.norm(np.asarray(left[p]) - right[p])) / max(norms[p], least) for p in right
    )


def row(name: str) -> dict[str, Any]:
    """The largest distance of each plan of a kind; text where there is no plan."""
    kind = kinds()[0][name]
    wide = bool(jax.config.read("jax_enable_x64"))
    precision = precision_of(kind) if wide else "float32"
    if wide and precision == "float32":
        return {NARROW: True}
    workload = kind.workload(precision)
    assert workload.loss is not None
    assert workload.init is not None
    own = single(workload.loss, workload.has_aux)
    batch = workload.batch(0)
    distances: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model.py"
        model.write_text(_MODEL.format(name, precision))
        home = Path(scratch)
        plans, refused = planned_in(str(model), home / "plans", layouts(kind), cluster_in(home))
        for layout, folder in plans.items():
            trainer = autopar.load(folder)
            # The trainer's: what an `init` draws in float32 rounds otherwise outside of a jit.
            value, gradients = own(trainer.params, batch)
            loss, grads = trainer.value_and_grad(batch)
            loss = float(loss[0] if workload.has_aux else loss)
            far = distance(jax.device_get(grads), gradients)
            distances[layout] = max(far, abs(loss - value) / abs(value))
        distances |= dict.fromkeys(refused, "refused")
    return {"kind": name, "precision": precision, **{n: distances[n] for n in layouts(kind)}}


def in_process(name: str, wide: bool = True) -> dict[str, Any]:
    """`row` where jax sees 8 devices and has 64 bits, unless the loss is of float32."""
    flags = ("--xla_force_host_platform_device_count=8", *quick_xla.FLAGS)
    env = {**os.environ, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    env["JAX_ENABLE_X64"] = str(int(wide))
    arguments = [sys.executable, "-m", __spec__.name, "--one", name]
    done = subprocess.run(arguments, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"kind": name, "precision": "crashed", **dict.fromkeys(layouts(kinds()[0][name]))}
    made: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return in_process(name, wide=False) if NARROW in made else made


def is_right(made: Mapping[str, Any]) -> bool:
    """Whether every plan of a row that there is has the gradients of one device."""
    limit = LIMIT.get(made["precision"], 0.0)
    figures = [v for k, v in made.items() if k not in ("kind", "precision") and v != "refused"]
    return all(v is not None and v <= limit for v in figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="what names begin by")
    parser.add_argument("--framework", action="append", default=[], help="such as Equinox")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(row(given.one)))
        return
    some, missing = chosen(given.only, given.framework)
    if missing:
        print(f"not installed, so left out: {', '.join(missing)}", file=sys.stderr)
    made = []
    for kind in some:
        made.append(in_process(kind.name))
        print(made[-1], file=sys.stderr, flush=True)
    wrong = sum(not is_right(each) for each in made)
    met = [Target("kinds whose gradients are not those of one device", wrong, 0)]
    show(made, met, given.json)
    sys.exit(0 if wrong == 0 else 1)


if __name__ == "__main__":
    main()
