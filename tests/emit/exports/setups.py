"""What the exports are tried on: the GPT example under a plan, and layouts with every axis."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from autopar.emit.exports.from_plan import setup_of
from autopar.emit.exports.setup import Figures, Machines, Setup
from autopar.files.cluster_file import load_cluster
from autopar.frontends.dispatch import capture
from autopar.frontends.loading import load_workload
from autopar.nouns.layout import Layout
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Fingerprints, Spread, Stage
from autopar.nouns.recompute import Recompute
from autopar.nouns.workload import training
from tests import plans

ROOT = Path(__file__).parents[3]
MEGATRON_STYLE = {
    "attention.q.weight": "tp:S0",
    "attention.k.weight": "tp:S0",
    "attention.v.weight": "tp:S0",
    "attention.q.bias": "tp:S0",
    "attention.k.bias": "tp:S0",
    "attention.v.bias": "tp:S0",
    "attention.out.weight": "tp:S1",
    "up.weight": "tp:S0",
    "up.bias": "tp:S0",
    "down.weight": "tp:S1",
}
"""Columns, then rows, in attention and MLP."""


LLAMA = Figures(32, 4096, 14336, 128256, heads=32, kv_heads=8, head_dim=128)
MIXTRAL = replace(LLAMA, vocab=32000, experts=8, top_k=2)


@functools.cache
def gpt(example: str = "02_gpt.py", zero: int = 3, microbatches: int = 2) -> Setup:
    """An example under dp_shard 2 x tp 2, its layers split as Megatron splits them."""
    workload = load_workload(str(ROOT / "examples" / example))
    captured = capture(workload)
    (block,) = captured.graph.blocks
    parameters = {f"{block}::{name}": text for name, text in MEGATRON_STYLE.items()}
    shared = {f"{block}::x": "tp:S1", f"{block}::add": "tp:S1"}
    spread = Spread(Mesh(("dp_shard", "tp"), (2, 2)), {}, shared, parameters)
    fingerprints = Fingerprints("m", "c", "p", "t", training=training(workload))
    plan = plans.plan(
        workload=f"examples/{example}",
        framework=workload.framework,
        spreads=(spread,),
        stages=(Stage(zero=zero),),
        microbatches=microbatches,
        fingerprints=fingerprints,
        clip_norm=1.0,
    )
    cluster = load_cluster(ROOT / "examples/clusters/h100_8.yaml")
    return setup_of(plan, captured.graph, captured.batch, cluster)


def layout(**changes: object) -> Setup:
    """Llama 3 8B on 2 x 8 H100 with pp 2, cp 2, or as ``changes`` say."""
    settings: dict[str, Any] = {
        "name": "llama3_8b.yaml",
        "framework": "",
        "global_batch": 32,
        "sequence": 8192,
        "machines": Machines(2, 8, "H100"),
        "dp_shard": 2,
        "tp": 2,
        "cp": 2,
        "pp": 2,
        "zero": 3,
        "microbatches": 16,
        "recompute": "full",
        "schedule": "1f1b",
        "sequence_parallel": True,
        "precision": "bfloat16",
        "layers": 32,
        "figures": LLAMA,
    }
    settings |= changes
    names = [field.name for field in fields(Layout) if field.name in settings]
    choices: dict[str, Any] = {name: settings.pop(name) for name in names}
    ranks = choices["dp_shard"] * choices.get("dp_replicate", 1) * settings.pop("microbatches")
    choices |= {"recompute": Recompute(choices["recompute"])}
    choices |= {"microbatch": choices["global_batch"] // ranks}
    return Setup(layout=Layout(**choices), **settings)


def experts(**changes: object) -> Setup:
    """Mixtral 8x7B with cp 2 and ep 4, whose ranks are those of dp_shard."""
    ours: dict[str, object] = {
        "name": "mixtral_8x7b.yaml",
        "pp": 1,
        "schedule": "none",
        "microbatches": 8,
        "dp_shard": 4,
        "ep": 4,
        "figures": MIXTRAL,
    }
    return layout(**{**ours, **changes})


CASES: dict[str, Callable[[], Setup]] = {
    "gpt": gpt,
    "gpt_jax": functools.partial(gpt, "05_gpt_jax.py"),
    "pp_cp": layout,
    "cp_ep": experts,
}


def golden(case: str, target: str) -> Path:
    return Path(__file__).parent / "golden" / case / target


def write_golden() -> None:
    """Writes every golden file again: ``python -m tests.emit.exports.setups``."""
    from autopar.emit.exports.targets import TARGETS
    from autopar.nouns.errors import UserError

    for case, make in CASES.items():
        for name, export in TARGETS.items():
            folder = golden(case, name)
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.iterdir():
                old.unlink()
            try:
                made = export(make())
            except UserError as error:
                (folder / "refused.txt").write_text(f"{error}\n")
                continue
            for file, text in made.files.items():
                (folder / f"{file}.golden").write_text(text)
            (folder / "said.json").write_text(
                json.dumps({"left_out": made.left_out, "start": made.start}, indent=1) + "\n"
            )


if __name__ == "__main__":
    write_golden()
