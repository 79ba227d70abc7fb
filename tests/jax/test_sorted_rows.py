"""Rows sorted by expert, multiplied by `lax.ragged_dot` and put back: as ops of each row."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.frontends.jax import capture
from autopar.frontends.jax.sorted_rows import GROUPED
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import made_of
from tests.jax.test_capture import equal

TOKENS, WIDTH, INNER, EXPERTS = 48, 8, 16, 4
PARAMS = {
    "first": models.shape(WIDTH, WIDTH),
    "gate": models.shape(WIDTH, EXPERTS),
    "up": models.shape(EXPERTS, WIDTH, INNER),
    "bias": models.shape(EXPERTS, INNER),
    "down": models.shape(EXPERTS, INNER, WIDTH),
}
BATCH = {"x": models.shape(8, 6, WIDTH)}


def _routed(params: Any, x: Any, each: int) -> tuple[Any, Any]:
    weights, chosen = lax.top_k(jax.nn.softmax(x @ params["gate"]), each)
    return weights, chosen


def _experts(params: Any, rows: Any, sizes: Any, more: Any = 0.0) -> Any:
    h = jax.nn.silu(lax.ragged_dot(rows, params["up"], sizes) + more)
    return lax.ragged_dot(h, params["down"], sizes)


def _mixed(out: Any, weights: Any) -> Any:
    return jnp.einsum("tkm,tk->tm", out.reshape(*weights.shape, -1), weights)


def as_maxtext(params: Any, x: Any) -> Any:
    weights, chosen = _routed(params, x, 2)
    flat = jnp.ravel(chosen)
    order = jnp.argsort(flat)
    rows = jnp.take(x, indices=order // 2, axis=0)
    out = _experts(params, rows, jnp.bincount(flat, length=EXPERTS))
    return _mixed(jnp.take(out, indices=jnp.argsort(order), axis=0), weights)


def said_in_float32(params: Any, x: Any) -> Any:
    """The dtype of what a product gives, which it has anyway."""
    weights, chosen = _routed(params, x, 2)
    flat = jnp.ravel(chosen)
    order, sizes = jnp.argsort(flat), jnp.bincount(flat, length=EXPERTS)
    product = partial(lax.ragged_dot, group_sizes=sizes, preferred_element_type=jnp.float32)
    out = product(jax.nn.silu(product(x[order // 2], params["up"])), params["down"])
    return _mixed(jnp.take(out, indices=jnp.argsort(order), axis=0), weights)


def repeated_and_put_back(params: Any, x: Any) -> Any:
    weights, chosen = _routed(params, x, 2)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=False)
    rows = jnp.repeat(x, 2, axis=0)[order]
    out = _experts(params, rows, jax.nn.one_hot(flat, EXPERTS, dtype=jnp.int32).sum(0))
    return _mixed(jnp.zeros_like(out).at[order].set(out), weights)


def sorted_with_their_places(params: Any, x: Any) -> Any:
    """Biases by the sorted experts, counts by comparison."""
    weights, chosen = _routed(params, x, 2)
    flat = chosen.reshape(-1)
    experts, order = lax.sort_key_val(flat, jnp.arange(flat.size))
    sizes = jnp.sum(flat[:, None] == jnp.arange(EXPERTS), axis=0, dtype=jnp.int32)
    out = _experts(params, x[order // 2], sizes, params["bias"][experts])
    return _mixed(out[jnp.argsort(order)], weights)


def one_each(params: Any, x: Any) -> Any:
    weights, chosen = _routed(params, x, 1)
    flat = chosen[:, 0]
    order = jnp.argsort(flat)
    sizes = jnp.zeros(EXPERTS, jnp.int32).at[flat].add(1)
    return _experts(params, x[order], sizes)[jnp.argsort(order)] * weights


def weighed_and_added(params: Any, x: Any) -> Any:
    """Weights in the order of rows, then rows added to their tokens."""
    weights, chosen = _routed(params, x, 2)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    out = _experts(params, x[order // 2], jnp.bincount(flat, length=EXPERTS))
    out = out * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // 2].add(out)


def halves_of_one_product(params: Any, x: Any) -> Any:
    """Gate and up are one matrix."""
    weights, chosen = _routed(params, x, 2)
    flat = jnp.ravel(chosen)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=EXPERTS)
    gate, up = jnp.split(lax.ragged_dot(x[order // 2], params["up"], sizes), 2, axis=-1)
    out = lax.ragged_dot(jax.nn.silu(gate) * up, params["down"][:, : INNER // 2], sizes)
    return _mixed(out[jnp.argsort(order)], weights)


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    f.__name__: f
    for f in (
        as_maxtext,
        said_in_float32,
        repeated_and_put_back,
        sorted_with_their_places,
        one_each,
        weighed_and_added,
        halves_of_one_product,
    )
}
LAYOUTS = (
    {"dp_replicate": "4"},
    {"dp_shard": "2", "tp": "2", "zero": "3", "microbatch": "2"},
)


NAMED = ("as_maxtext", "said_in_float32", "repeated_and_put_back")
"""Those that are experts as one op; in the others biases, or where rows are weighed, differ."""
SHARED = (
    {"ep": "4", "tp": "1", "pp": "1"},
    {"ep": "2", "tp": "2", "pp": "1"},
    {"ep": "2", "pp": "2"},
)


def loss_of(form: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def loss(params: Any, batch: Any) -> Any:
        x = jnp.tanh(batch["x"] @ params["first"]).reshape(TOKENS, WIDTH)
        return jnp.mean((form(params, x) + x) ** 2 * jnp.cos(jnp.arange(WIDTH)))

    return loss


def params_of(name: str) -> dict[str, Any]:
    return {n: p for n, p in PARAMS.items() if n != "bias" or name == "sorted_with_their_places"}


def ungated() -> dict[str, Any]:
    return {n: p for n, p in PARAMS.items() if n not in ("bias", "gate")}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.some(3)
def test_each_row_by_the_matrix_of_its_expert(name: str) -> None:
    """No sort is left of which every rank would need all rows, and samples are split."""
    loss, params = loss_of(FORMS[name]), params_of(name)
    if name != "said_in_float32":  # which no trace in float64 has
        equal(loss, params, BATCH)
    kinds = [op.kind for op in capture(loss, params, BATCH).graph.ops]
    assert kinds.count(GROUPED) == (0 if name in NAMED else 2)
    assert kinds.count("experts") == (1 if name in NAMED else 0)
    assert "jax::sort" not in kinds
    # One op, and so one program, whichever form it was.
    for fix in (*LAYOUTS, *(SHARED if name == NAMED[0] else ())):
        program = made_of(name, models.Model(loss, params, BATCH), fix)
        assert program.exact()[0].largest <= TOLERANCE
        assert ("experts(" if name in NAMED else "grouped_linear(") in program.text
        if "ep" in fix:
            assert "held=" in program.text
            assert re.search(r'"up": Parameter\(\(4, 8, 16\), P\(.?"(ep|tp)"', program.text)
            continue
        assert "gather(" not in program.text.partition("def ")[2] or "zero" in fix


def _picked(x: Any) -> Any:
    """An expert for each token, by no parameter: these would have no gradient."""
    return jnp.argmax(x[:, :EXPERTS], axis=-1)


def by_place(params: Any, x: Any) -> Any:
    """Where rows lie in the order counts."""
    flat = _picked(x)
    order = jnp.argsort(flat)
    out = _experts(params, x[order], jnp.bincount(flat, length=EXPERTS))
    return (out * jnp.arange(1.0, 1 + TOKENS)[:, None])[jnp.argsort(order)]


def before_it(params: Any, x: Any) -> Any:
    """What was summed up before a row in the order counts."""
    flat = _picked(x)
    order = jnp.argsort(flat)
    rows = jnp.cumsum(x[order], axis=0)
    return _experts(params, rows, jnp.bincount(flat, length=EXPERTS))[jnp.argsort(order)]


def by_other_counts(params: Any, x: Any) -> Any:
    """Groups are of other sizes than there are rows of each expert."""
    flat = _picked(x)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(EXPERTS - 1 - flat, length=EXPERTS)
    return _experts(params, x[order], sizes)[jnp.argsort(order)]


def by_another_order(params: Any, x: Any) -> Any:
    """Put back by what another sort says."""
    flat = _picked(x)
    order = jnp.argsort(flat)
    out = _experts(params, x[order], jnp.bincount(flat, length=EXPERTS))
    return out[jnp.argsort(jnp.argsort((flat + 1) % EXPERTS))]


def not_put_back(params: Any, x: Any) -> Any:
    flat = _picked(x)
    order = jnp.argsort(flat)
    return _experts(params, x[order], jnp.bincount(flat, length=EXPERTS))


@pytest.mark.parametrize(
    "form", [by_place, before_it, by_other_counts, by_another_order, not_put_back]
)
def test_what_hangs_on_the_order_stays_as_it_is_written(form: Callable[[Any, Any], Any]) -> None:
    loss, params = loss_of(form), ungated()
    graph = equal(loss, params, BATCH)
    assert GROUPED not in [op.kind for op in graph.ops]
    assert "jax::sort" in [op.kind for op in graph.ops]


def test_experts_that_are_none_make_nothing() -> None:
    """Routes to a number behind the last expert: rows of zeros, as of a ragged product."""

    def form(params: Any, x: Any) -> Any:
        flat = _picked(x) + 1
        order = jnp.argsort(flat)
        return _experts(params, x[order], jnp.bincount(flat, length=EXPERTS))[jnp.argsort(order)]

    model = models.Model(loss_of(form), ungated(), BATCH)
    program = made_of("none", replace(model), {"dp_replicate": "2"})
    assert "grouped_linear(" in program.text
    assert program.exact()[0].largest <= TOLERANCE


def test_matrices_of_experts_are_split_beside_them() -> None:
    model = models.Model(loss_of(as_maxtext), params_of(""), BATCH)
    program = made_of("matrices", model, {"ep": "2", "etp": "2", "tp": "2", "pp": "1"})
    assert '"up": Parameter((4, 8, 16), P("ep", None, "tp")' in program.text
    assert '"down": Parameter((4, 16, 8), P("ep", "tp")' in program.text
    assert program.exact()[0].largest <= TOLERANCE
