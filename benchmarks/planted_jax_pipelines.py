"""Errors in how JAX programs of several stages are written and played, one small change each."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.planting import CARRIED, Case, Planted

CASES: Mapping[str, Case] = {
    "jax stages": Case("jax_gpt", {"pp": "2", "tp": "2", "schedule": "1f1b", "microbatch": "2"}),
    "jax stages in halves": Case(
        "jax_gpt", {"pp": "2", "dp_shard": "2", "zero": "1", "schedule": "zb-h1"}
    ),
    "jax stages both ways": Case("jax_gpt", {"pp": "2", "schedule": "chimera"}),
}


def _emission(name: str, case: str, where: str, old: str, new: str) -> Planted:
    return Planted(name, "emission", f"jax {case}", f"emit.jax.{where}", old, new)


def _runtime(name: str, case: str, where: str, old: str, new: str) -> Planted:
    place = f"{CARRIED}{where}"
    return Planted(name, "runtime", f"jax {case}", place, old, new, planned=False)


ERRORS: tuple[Planted, ...] = (
    _runtime("a stage reads the first microbatch (jax)", "stages",
        "stage_step:StageStep._known", "entry[number]", "entry[0]"),
    _runtime("backward begins with two (jax)", "stages",
        "stage_step:StageStep._gradients", "else 1", "else 2"),
    _runtime("a stage has the gradients of its last microbatch (jax)", "stages",
        "stage_step:StageStep._backward", "g + own[k]", "own[k]"),
    _runtime("the loss of the last microbatch alone (jax)", "stages",
        "stage_step:_loss_of_all", "sum(wide[1:], wide[0])", "wide[-1]"),
    _runtime("the norm of the first stage alone (jax)", "stages",
        "pipeline:Pipeline._shared", "lambda a, b: a + b", "lambda a, b: a"),
    _runtime("the second half adds nothing (jax)", "stages in halves",
        "stage_step:StageStep._backward_weight", "g + own[k]", "g"),
    _runtime("layers of a loop are one in the second half (jax)", "stages in halves",
        "halves:_second_loop", "row[1])", "jax.tree.map(jnp.zeros_like, row[1]))"),
    _runtime("copies of a parameter step by their own gradients (jax)", "stages both ways",
        "joint:Joint.adding", "lax.psum(x[0], PIPELINE)", "x[0]"),
    _runtime("the norm counts copies of stages (jax)", "stages both ways",
        "gradients:_left", "if not again:", "if True:"),
    _emission("gradients of stages stay where they are (jax)", "stages in halves",
        "staged:sums", 'own = "reduced(leaves[name], g)"', 'own = "g"'),
    _emission("a stage gives what it took (jax)", "stages",
        "stages:_stages", "LOSS if name in loss else name", "name if name in loss else name"),
)  # fmt: skip
