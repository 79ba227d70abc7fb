"""Errors in how JAX programs of several stages are written and played, one small change each."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.planting import Case, Planted, in_emission, in_runtime

CASES: Mapping[str, Case] = {
    "jax stages": Case("jax_gpt", {"pp": "2", "tp": "2", "schedule": "1f1b", "microbatch": "2"}),
    "jax stages in halves": Case(
        "jax_gpt", {"pp": "2", "dp_shard": "2", "zero": "1", "schedule": "zb-h1"}
    ),
    "jax stages both ways": Case("jax_gpt", {"pp": "2", "schedule": "chimera"}),
}


ERRORS: tuple[Planted, ...] = (
    in_runtime("a stage reads the first microbatch (jax)", "stages",
        "stage_step:StageStep._known", "entry[number]", "entry[0]"),
    in_runtime("backward begins with two (jax)", "stages",
        "stage_step:StageStep._gradients", "else 1", "else 2"),
    in_runtime("a stage has the gradients of its last microbatch (jax)", "stages",
        "stage_step:StageStep._backward", "g + own[k]", "own[k]"),
    in_runtime("the loss of the last microbatch alone (jax)", "stages",
        "stage_step:_loss_of_all", "sum(wide[1:], wide[0])", "wide[-1]"),
    in_runtime("the norm of the first stage alone (jax)", "stages",
        "totals:Totals.of", "sum(moved[1:], moved[0])", "moved[0]"),
    in_runtime("the second half adds nothing (jax)", "stages in halves",
        "stage_step:StageStep._backward_weight", "g + own[k]", "g"),
    in_runtime("layers of a loop are one in the second half (jax)", "stages in halves",
        "halves:_second_loop", "row[1])", "jax.tree.map(jnp.zeros_like, row[1]))"),
    in_runtime("copies of a parameter step by their own gradients (jax)", "stages both ways",
        "joint:Joint.adding", "lax.psum(x[0], PIPELINE)", "x[0]"),
    in_runtime("the norm counts copies of stages (jax)", "stages both ways",
        "gradients:_left", "if not again:", "if True:"),
    in_emission("gradients of stages count twice (jax)", "stages in halves",
        "staged:sums", 'own = f"reduced(', 'own = f"2 * reduced('),
    in_emission("a stage gives what it took (jax)", "stages",
        "stages:_stages", "LOSS if name == loss else name", "name if name == loss else name"),
)  # fmt: skip
