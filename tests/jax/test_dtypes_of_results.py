"""Every result of an emitted program has the dtype that its op has in the graph.

In float64, where programs are verified, all are alike: a product of halves that the model wants in
float32, and that a program gives in halves, shows nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.emit.jax import emit
from autopar.emit.jax.site import Site
from autopar.emit.marks import instrumented
from autopar.nouns.plan import key
from autopar.runtime.jax.programs import run_program, step_alone
from autopar.runtime.verify.jax import probe
from autopar.runtime.verify.jax.locate import PROBE
from tests.jax import models
from tests.jax.planned import Made, made, made_of

HALF = jnp.bfloat16
NONE: Mapping[str, str] = {}
COUNTED = dict.fromkeys(("mul", "sum", "div"), "float32")
"""In halves a mask that is counted stays as it is, and with it what it is multiplied with."""
WIDE: dict[str, Any] = {"preferred_element_type": jnp.float32}


def products(form: Callable[[Any, Any], Any]) -> models.Model:
    """A product of halves whose result is wide, and another that is not."""

    def loss(params: Any, batch: Any) -> Any:
        x = jnp.tanh(batch["x"].astype(HALF) @ params["first"])
        return jnp.square(form(x, params["second"])).mean()

    params = {"first": (models.W, models.W), "second": (models.W, models.F)}
    shapes = {name: jax.ShapeDtypeStruct(shape, HALF) for name, shape in params.items()}
    return models.Model(loss, shapes, {"x": models.shape(models.B, models.S, models.W)})


def convolved(x: Any, w: Any) -> Any:
    kernel = w.reshape(models.F, models.W, 1)
    return lax.conv_general_dilated(x.transpose(0, 2, 1), kernel, (1,), "SAME", **WIDE)


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "linear_t": lambda x, w: jnp.matmul(x, w, **WIDE),
    "linear": lambda x, w: jnp.einsum("bsk,nk->bsn", x, w.reshape(models.F, models.W), **WIDE),
    "matmul": lambda x, w: jnp.matmul(x, x.transpose(0, 2, 1), **WIDE) * w.sum(),
    "einsum": lambda x, w: jnp.einsum("bsk,btk,kn->nst", x, x, w, **WIDE),
    "conv": convolved,
    "whole numbers": lambda x, w: (
        jnp.matmul(
            (40 * x).astype(jnp.int8), (40 * w).astype(jnp.int8), preferred_element_type=jnp.int32
        )
        * x.sum()
    ),
}


def dtypes_of(program: Made, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """By op, as the program is traced."""
    planned, seen = program.planned, dict[str, str]()

    def noted(name: str, x: Any, sharding: str = "R") -> Any:
        del sharding
        seen[name] = str(jnp.result_type(x))
        return x

    monkeypatch.setattr(probe, "probe", noted)
    text = emit(planned.lowered, program.plan, program.captured, probes=True)["model.py"]
    step = step_alone(run_program(instrumented(text, text, PROBE)), program.workload)
    batch, draws = dict(program.workload.batch(0)), program.captured.draws
    batch |= {} if draws is None else draws.counted(batch)
    step.step.lower(*step.shapes(batch))
    return seen


def declared(program: Made) -> dict[str, str]:
    graph = program.planned.graph
    parts = [(None, graph), *((name, block.body) for name, block in graph.blocks.items())]
    return {
        key(scope, name): tensor.dtype
        for scope, part in parts
        for name, tensor in part.tensors.items()
    }


def compared(
    program: Made, monkeypatch: pytest.MonkeyPatch, others: Mapping[str, str] = NONE
) -> dict[str, str]:
    """The dtype of each op, which is the graph's but for ``others``."""
    seen, wanted = dtypes_of(program, monkeypatch), declared(program)
    assert len(seen) > 3
    assert {name: dtype for name, dtype in seen.items() if wanted[name] != dtype} == others
    return seen


@pytest.mark.parametrize("form", FORMS)
def test_products_that_are_wider_than_their_operands(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = made_of(f"wide {form}", products(FORMS[form]), {"dp_replicate": "2", "tp": "4"})
    assert program.text.count("preferred_element_type=") == 1
    dtypes = set(compared(program, monkeypatch).values())
    assert dtypes >= {"bfloat16", "int32" if form == "whole numbers" else "float32"}
    errors, _ = program.exact()
    assert errors.largest <= 1e-9


def test_a_result_of_another_dtype_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Site, "preferred", [])
    program = made_of("narrow", products(FORMS["linear_t"]), {"dp_replicate": "8"})
    with pytest.raises(AssertionError, match="linear_t"):
        compared(program, monkeypatch)


def test_logits_that_are_wider_in_chunks() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = params["words"][batch["tokens"]]
        logits = jnp.matmul(x, params["head"], **WIDE)
        rows = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(rows, batch["labels"][..., None], -1).mean()

    shapes = {"words": (models.V, models.W), "head": (models.W, models.V)}
    params = {name: jax.ShapeDtypeStruct(shape, HALF) for name, shape in shapes.items()}
    model = models.Model(loss, params, models.gpt_scan().batch)
    program = made_of("wide logits", model, {"dp_shard": "8", "loss_chunks": "2"})
    assert "wide=True" in program.text
    errors, _ = program.exact()
    assert errors.largest <= 1e-9
    step = step_alone(program.program(), program.workload)
    assert program.workload.init is not None
    tree, batch = program.workload.init(None), program.workload.batch(0)
    right, gradients = jax.value_and_grad(loss)(jax.tree.map(jnp.asarray, tree), batch)
    state = step.initial(lambda own: own.gather_names(tree), tree)
    ours = float(step.step(state, step.cut(batch))[1])
    np.testing.assert_allclose(ours, right, rtol=1e-5)  # by halves 1e-3 off
    assert gradients["head"].dtype == HALF


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "a sum": lambda y: jnp.sum(y, -1, dtype=jnp.float32),
    "a mean": lambda y: jnp.mean(y, -1, dtype=jnp.float32),
    "a mean of halves": lambda y: jnp.mean(y, -1),
    "a running sum": lambda y: jnp.cumsum(y, 1, dtype=jnp.float32),
    "a running product": lambda y: jnp.cumprod(y, 1, dtype=jnp.float32),
    "a product": lambda y: jnp.prod(y, -1, dtype=jnp.float32),
    "a variance": lambda y: jnp.var(y, -1, dtype=jnp.float32),
    "a deviation": lambda y: jnp.std(y, -1),
    "a softmax in float32": lambda y: jax.nn.softmax(y.astype(jnp.float32)).astype(HALF),
    "a logarithm of sums": lambda y: jax.nn.logsumexp(y, -1),
    "an rms norm": lambda y: y * lax.rsqrt(
        jnp.square(y.astype(jnp.float32)).mean(-1, keepdims=True)
    ).astype(HALF),
    "with places": lambda y: y + jnp.arange(models.F, dtype=jnp.float32),
    "one hot": lambda y: jax.nn.one_hot(jnp.argmax(y, -1), models.F, dtype=jnp.float32) * y,
    "an average": lambda y: jnp.average(y, -1),
    "a norm": lambda y: jnp.linalg.norm(y, axis=-1),
    "sorted": lambda y: jnp.sort(y, -1),
    "rows of segments": lambda y: jax.ops.segment_sum(
        y.reshape(-1, models.F), jnp.arange(models.B * models.S) // 4, num_segments=32
    ),
    "a wide carry": lambda y: lax.scan(
        lambda c, x: (c + x.astype(jnp.float32), x), jnp.zeros(y.shape[1:], jnp.float32), y
    )[0],
}  # fmt: skip


@pytest.mark.some(6)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_halves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = products(lambda x, w: FUNCTIONS[name](x @ w))
    compared(made_of(f"of halves {name}", model, {"dp_replicate": "8"}), monkeypatch)


@pytest.mark.some(8)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", models.MODELS)
def test_all_of_a_model(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = COUNTED if (name, precision) == ("masked", "bfloat16") else NONE
    compared(made(name, {"dp_replicate": "8"}, precision=precision), monkeypatch, others)
