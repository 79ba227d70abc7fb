"""Emitted programs compute what the loss function computes, and move what was priced."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from autopar.emit import text as layout
from autopar.emit.jax import UnevenPieces, emit
from autopar.frontends.jax import paths_of
from autopar.lowering.spread import lower
from autopar.rules.cut import batch_cut
from autopar.runtime.jax.parallel import by_name
from autopar.runtime.jax.parallel import units as jax_units
from autopar.runtime.jax.programs import step_alone
from autopar.runtime.verify.collectives import differences
from autopar.runtime.verify.jax.compiled import issued_collectives
from autopar.runtime.verify.jax.locate import compared, on_one_device
from autopar.runtime.verify.jax.record import in_float64
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import made, made_of

Fix = dict[str, str]
CLIPPED = {"clip_norm": 0.5}
PLANS: dict[str, tuple[str, Fix, dict[str, Any]]] = {
    "replicate": ("mlp", {"dp_replicate": "8"}, {}),
    "shard_zero1": ("gpt_unrolled", {"dp_shard": "8", "zero": "1"}, CLIPPED),
    "tensor": ("gpt_scan", {"tp": "4", "dp_replicate": "2"}, CLIPPED),
    "all_zero2": (
        "llama",
        {"dp_replicate": "2", "dp_shard": "2", "tp": "2", "zero": "2", "microbatch": "1"},
        CLIPPED,
    ),
    "all_zero3": (
        "gpt_scan",
        {"dp_replicate": "2", "dp_shard": "2", "tp": "2", "zero": "3", "microbatch": "1"},
        CLIPPED,
    ),
    "mlp_tensor": ("mlp", {"tp": "8"}, {"optimizer": "sgd"}),
    "mixed": ("mixed", {"dp_replicate": "2", "tp": "4"}, {}),
    "masked": ("masked", {"dp_replicate": "4", "tp": "2"}, {}),
    "contrastive": ("contrastive", {"dp_replicate": "8"}, {}),
    "convnet": ("convnet", {"dp_shard": "4", "dp_replicate": "2", "zero": "1"}, {}),
    "two_layers_zero3": ("gpt_two_layers", {"dp_shard": "4", "tp": "2", "zero": "3"}, {}),
    "uneven_zero1": ("uneven", {"dp_shard": "4", "dp_replicate": "2", "zero": "1"}, CLIPPED),
    "uneven_zero3": ("uneven", {"dp_shard": "4", "tp": "2", "zero": "3"}, CLIPPED),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.some(6)
def test_program_equals_loss_function_and_moves_what_was_priced(name: str) -> None:
    model, fix, options = PLANS[name]
    program = made(model, fix, **options)
    degrees = {axis: int(n) for axis, n in fix.items() if axis in program.plan.degrees}
    assert degrees.items() <= program.plan.degrees.items()
    ast.parse(program.text)
    assert max(map(len, program.text.splitlines())) <= 100
    errors, issued = program.exact()
    assert errors.largest <= TOLERANCE
    assert issued
    assert differences(program.priced_in_float64(), issued) == []


def test_what_a_loss_returns_beside_is_priced_and_moves_no_gradient() -> None:
    model = models.mlp()

    def loss(params: Any, batch: Any) -> Any:
        h = jax.nn.relu(batch["x"] @ params["up"]["weight"].T + params["up"]["bias"])
        y = h @ params["down"]["weight"].T + params["down"]["bias"]
        return ((y - batch["y"]) ** 2).mean(), {"size": (y**2).mean(0), "outputs": y}

    fix = {"dp_shard": "2", "dp_replicate": "2", "tp": "2", "zero": "2", "microbatch": "1"}
    program = made_of("aux", replace(model, loss=loss), fix, clip_norm=0.5, has_aux=True)
    assert 'OUTPUTS = (0, "sum")' in program.text
    errors, _ = program.exact()
    assert errors.output is not None
    assert errors.largest <= TOLERANCE
    wrong, _ = program.changed('(0, "sum")', "(0, None)").exact()
    assert (wrong.gradient, wrong.worst_output) == (errors.gradient, "size")
    assert (wrong.output or 0.0) > 0.1
    step = step_alone(program.program(), program.workload)
    issued = issued_collectives(step, program.workload.batch(0))
    assert differences(program.priced(), issued) == []
    assert any(row.size_bytes == 4 * models.W for row in program.priced())


def test_parameters_that_are_gathered_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large ones are; those of the other tests travel together."""
    monkeypatch.setattr(jax_units, "SMALL_BYTES", 0)
    program = made("gpt_two_layers", {"dp_shard": "4", "tp": "2", "zero": "3"})
    errors, _ = program.exact()
    assert errors.largest <= TOLERANCE


@pytest.mark.parametrize("zero", ["1", "3"])
def test_bfloat16_program_moves_what_was_priced(zero: str) -> None:
    """ZeRO 1 gathers what is stored, ZeRO 3 what is computed with."""
    fix = {"dp_shard": "4", "tp": "2", "zero": zero}
    program = made("mlp", fix, precision="bfloat16", **CLIPPED)
    step = step_alone(program.program(), program.workload)
    issued = issued_collectives(step, program.workload.batch(0))
    assert differences(program.priced(), issued) == []


def test_gelu_in_half_precision_has_exact_constants() -> None:
    program = made_of("mixed_gelu", models.mixed(jax.nn.gelu), {"tp": "8"})
    errors, _ = program.exact()
    assert errors.largest <= TOLERANCE


@pytest.mark.parametrize("name", ["all_zero2", "masked", "convnet"])
@pytest.mark.some(1)
def test_probes_see_what_one_device_computes(name: str) -> None:
    """In layers, loops and microbatches, forward and backward; and what is wrong in one layer."""
    model, fix, options = PLANS[name]
    program = made(model, fix, **options)

    with jax.enable_x64(True):
        tree = program.workload.init(None)  # type: ignore[misc]
        wide = jax.tree.map(lambda a: np.asarray(a, np.float64), tree)
        batch = {n: in_float64(a) for n, a in program.workload.batch(0).items()}
        if program.captured.draws is not None:
            batch |= program.captured.draws.counted(batch, wide=True)
        named = by_name(paths_of(wide), program.captured.stacks)
        given = (program.plan, program.captured, program.workload, named, batch)
        right = on_one_device(*given)

    def difference(text: str) -> str:
        with jax.enable_x64(True):
            return compared(text, right, *given)

    assert "in no result and no gradient of one" in difference(program.text)
    if "jax.nn.silu(" in program.text:
        wrong = program.text.replace("jax.nn.silu(", "jnp.tanh(", 1)
        wrong = wrong.replace("import jax\n", "import jax\nimport jax.numpy as jnp\n", 1)
        assert re.match(
            r"first difference: forward, layers::\S+ in .*0.*: value\[", difference(wrong)
        )


def test_breaking_lines_changes_no_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    """However narrow the page."""
    llama = made("llama", {"tp": "2", "dp_shard": "4"})

    def text(columns: int) -> str:
        monkeypatch.setattr(layout, "COLUMNS", columns)
        program = emit(llama.planned.lowered, llama.plan, llama.captured)["model.py"]
        tree = ast.parse(program)
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node):
                del node.body[0]
        return ast.dump(tree)

    unbroken = text(10**6)
    for columns in (1, 20, 40, 60, 80, 100):
        assert text(columns) == unbroken, columns


def test_a_split_into_one_part() -> None:
    def loss(params: Any, batch: Any) -> Any:
        import jax.numpy as jnp

        (whole,) = jnp.split(jnp.tanh(batch["x"] @ params["up"]), 1, axis=-1)
        return jnp.mean(whole**2)

    params = {"up": models.shape(6, 16)}
    model = models.Model(loss, params, {"x": models.shape(8, 6)})
    errors, _ = made_of("split", model, {"dp_replicate": "8"}).exact()
    assert errors.largest <= TOLERANCE


def test_sizes_that_axes_do_not_divide_stay_whole() -> None:
    """JAX cuts evenly only: the planner splits something else than 4098 over 8 ranks."""

    def loss(params: Any, batch: Any) -> Any:
        import jax.numpy as jnp

        return jnp.mean(jnp.square(jnp.tanh(batch["x"] @ params["up"]) @ params["down"]))

    params = {"up": models.shape(1024, 4098), "down": models.shape(4098, 1024)}
    model = models.Model(loss, params, {"x": models.shape(1 << 14, 1024)})
    program = made_of("odd", model, {"tp": "8"})
    (spread,) = program.planned.plan.spreads
    assert (spread.parameters.get("up"), spread.parameters.get("down")) == ("tp:S0", "tp:S1")
    ops = {"linear_t": "tp:n", "tanh": "tp:e1", "linear_t_1": "tp:k"}
    uneven = replace(spread, ops=ops, parameters={"up": "tp:S1", "down": "tp:S0"})
    graph = program.planned.graph
    cut = lower(graph, uneven, 1, batch_cut(graph, {"x": 0}))
    with pytest.raises(UnevenPieces, match="4098, which tp = 8 does not divide"):
        emit(cut, program.planned.plan, program.captured)
