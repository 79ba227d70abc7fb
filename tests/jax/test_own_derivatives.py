# mypy: disable-error-code="untyped-decorator"
"""Derivatives that functions have of their own are kept as given, or refused: never replaced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.frontends.dispatch import executor
from autopar.frontends.jax import capture
from autopar.frontends.jax.errors import RuleFailed
from autopar.nouns.errors import UserError
from autopar.nouns.text.graph import from_text, to_text
from autopar.planner.ask.unruled import check_allowed, unruled
from autopar.rules.registry import UnruledOp, bind
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.interpreter import compare
from tests.jax.own_derivatives import FUNCTIONS, leaky, reversal, safe_norm, scaled, weighted
from tests.jax.planned import made_of
from tests.jax.test_capture import equal

PARAMS = {"w": models.shape(8, 8)}
BATCH = {"x": models.shape(4, 8)}


def over(function: Any) -> Any:
    return lambda params, batch: jnp.mean(function(batch["x"] @ params["w"]) * 1.5)


@pytest.mark.parametrize("part", range(3))
def test_rules_are_applied_as_given(part: int) -> None:
    """A third of the functions in one loss, each on a parameter of its own name."""
    chosen = dict(list(FUNCTIONS.items())[part::3])

    def loss(params: Any, batch: Any) -> Any:
        return sum(
            jnp.mean(function(batch["x"] @ params[name]) * 1.5) for name, function in chosen.items()
        )

    graph = equal(loss, dict.fromkeys(chosen, PARAMS["w"]), BATCH)
    assert from_text(to_text(graph)) == graph
    assert unruled(graph, executor("jax")) == {}, "all of them split the batch"


def test_rules_are_tried_where_a_number_in_the_function_makes_a_corner() -> None:
    """That of logaddexp gives a half where both are equal, differentiating its maximum one."""

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(jnp.logaddexp(2.0, batch["x"] * params["w"][0] + 2.0) * 1.5)

    params, batch = {"w": np.zeros((1, 8), np.float32)}, {"x": np.ones((4, 8), np.float32)}
    compare(capture(loss, params, batch), loss, params, batch)


def test_a_function_whose_body_has_no_derivative_is_kept_as_given() -> None:
    graph = capture(over(lambda y: jax.scipy.special.zeta(y * y + 2, 1.5)), PARAMS, BATCH).graph
    assert "custom::zeta" in [op.kind for op in graph.ops]


def test_what_jax_has_an_op_for_is_that_op() -> None:
    def loss(params: Any, batch: Any) -> Any:
        y = batch["x"] @ params["w"]
        return jnp.mean(jax.nn.relu(y) + jax.nn.softplus(y) + jax.nn.silu(y) + jax.nn.softmax(y))

    graph = capture(loss, PARAMS, BATCH).graph
    assert {"relu", "softplus", "silu", "softmax"} <= {op.kind for op in graph.ops}
    assert not any("::" in op.kind for op in graph.ops)


def rule_of(function: Any) -> str:
    graph = capture(over(function), PARAMS, BATCH).graph
    (op,) = (op for op in graph.ops if op.kind.startswith("custom::"))
    return str(bind(op, graph.tensors))


def test_dims_that_the_rule_pairs_stay_whole() -> None:
    assert rule_of(leaky) == "i0 i1 -> i0 i1"
    assert rule_of(safe_norm) == "i0 i1! -> i0"
    turned = jax.custom_vjp(lambda x: x * 2)  # the rule alone moves entries of a row
    turned.defvjp(lambda x: (x * 2, None), lambda _, g: (g[:, ::-1],))
    assert rule_of(turned) == "i0 i1! -> i0 i1!"
    assert rule_of(lambda x: weighted(x, jnp.sin(x[0]))) == "i0 i1, i1 -> i0 i1"


@pytest.mark.parametrize(
    ("backward", "defers"),
    [
        (lambda g: 3 * g * jnp.cos(g.shape[0]), True),
        (lambda g: jnp.where(jnp.arange(8) > 3, g / 2 + g, -g), True),
        (lambda g: jnp.where(jnp.arange(8) > 3, g, 0), True),
        (lambda g: jnp.where(jnp.arange(8) > 3, g, 1), False),
        (lambda g: jnp.clip(g, -1, 1), False),
        (lambda g: g * g, False),
        (lambda g: jnp.sign(g), False),
        (lambda g: g + 1, False),
        (lambda g: 1 / g, False),
        (lambda g: jnp.where(g > 0, g, 0), False),
    ],
    ids="scaled where masked filled clip square sign shifted inverse rectified".split(),
)
def test_what_is_not_linear_in_the_gradient_gets_no_partial_sums(
    backward: Any, defers: bool
) -> None:
    function = jax.custom_vjp(lambda x: x * 2)
    function.defvjp(lambda x: (x * 2, None), lambda _, g: (backward(g),))
    graph = capture(over(function), PARAMS, BATCH).graph
    (op,) = (op for op in graph.ops if op.kind.startswith("custom::"))
    assert bind(op, graph.tensors).rule.defers is defers


def _with(backward: Any) -> Any:
    function = jax.custom_vjp(lambda x, w: x * w)
    function.defvjp(lambda x, w: (x * w, (x, w)), backward)
    return lambda x: function(x, jnp.sin(x[0]))


def test_a_gradient_that_is_no_sum_over_the_batch_keeps_the_batch_whole() -> None:
    """Every rank would add its own; and what is summed must be all that the gradient is."""
    constant = _with(lambda r, g: (g, jnp.ones_like(r[1])))
    assert rule_of(constant) == "i0! i1, i1 -> i0! i1"
    after = _with(lambda r, g: (g, jnp.tanh((g * r[0]).sum(0))))
    assert rule_of(after) == "i0! i1, i1 -> i0! i1"
    both = _with(lambda r, g: (g / jnp.abs(g).sum(0), (g * r[0]).sum(0)))
    assert rule_of(both) == "i0! i1, i1 -> i0! i1"
    zero = _with(lambda r, g: (g, jnp.zeros_like(r[1])))
    assert rule_of(zero) == "i0 i1, i1 -> i0 i1"
    scaled_sum = _with(lambda r, g: (g, -3 * (g * r[0]).sum(0)))
    assert rule_of(scaled_sum) == "i0 i1, i1 -> i0 i1"


@jax.custom_vjp
def clipped_by_norm(x: Any) -> Any:
    return x * 2


clipped_by_norm.defvjp(
    lambda x: (x * 2, None), lambda _, g: (g / jnp.maximum(1.0, jnp.sqrt(jnp.sum(g * g))),)
)


def test_a_rule_that_pairs_everything_is_refused_or_runs_whole() -> None:
    graph = equal(over(clipped_by_norm), PARAMS, BATCH)
    with pytest.raises(UnruledOp, match=r"clipped_by_norm can be split.*own_derivatives\.py:\d+"):
        check_allowed(graph, unruled(graph, executor("jax")), ())
    check_allowed(graph, unruled(graph, executor("jax")), ("custom::clipped_by_norm",))


def linear_call(x: Any) -> Any:
    return jax.custom_derivatives.linear_call(lambda r, x: x * r, lambda r, g: g * r * 9, 2.0, x)


def linear_solve(x: Any) -> Any:
    return jax.lax.custom_linear_solve(lambda v: 2 * v, x, lambda mv, b: b / 2, symmetric=True)


def root(x: Any) -> Any:
    def solve(f: Any, y: Any) -> Any:
        return jax.lax.while_loop(lambda y: jnp.sum(f(y)) > 1, lambda y: y - f(y), y)

    return jax.lax.custom_root(lambda y: y**3 - x, x, solve, lambda g, y: y / g(jnp.ones_like(y)))


def test_a_solve_is_differentiated_by_another_solve() -> None:
    """Not by what it computes its own by, which may be anything."""
    equal(over(linear_solve), PARAMS, BATCH)
    assert rule_of(linear_solve) == "i0 i1 -> i0 i1"


@pytest.mark.parametrize("function", [linear_call, root])
def test_other_derivatives_are_refused(function: Any) -> None:
    """Whatever is not known to be one of the primitives has no rule, so is never split or run."""

    def planned() -> None:
        graph = capture(over(function), PARAMS, BATCH).graph
        check_allowed(graph, unruled(graph, executor("jax")), ())

    with pytest.raises(UserError, match="own_derivatives"):
        planned()


def test_a_rule_that_fails_is_told_with_function_and_line() -> None:
    @jax.custom_vjp
    def broken(x: Any) -> Any:
        return x

    broken.defvjp(lambda x: (x, x), lambda x, g: (g[:1],))
    with pytest.raises(RuleFailed, match=r"own_derivatives\.py:\d+.*derivative of .*broken"):
        capture(over(broken), PARAMS, BATCH)


def test_layers_with_rules_of_their_own_numbers_do_not_fold() -> None:
    """Functions of one name whose rules differ in one number, by layer."""

    def scaled_by(number: float) -> Any:
        function = jax.custom_vjp(lambda x: jnp.tanh(x))
        function.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * number,))
        return function

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for p, number in zip(params["layers"], (2.0, 2.0, 5.0, 2.0), strict=True):
            x = scaled_by(number)(x @ p["w"])
        return jnp.mean(x)

    graph = equal(loss, {"layers": [PARAMS] * 4}, BATCH)
    assert [b.instances for b in graph.blocks.values()] == [("layers.0", "layers.1")]


def several(last: Any) -> models.Model:
    def layer(x: Any, p: Any) -> Any:
        y = scaled(x @ p["up"])
        return x + weighted(leaky(y @ p["down"]), p["scale"]), None

    def loss(params: Any, batch: Any) -> Any:
        x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
        norm = safe_norm(x)
        x = reversal(x)  # gives back what it is given
        return jnp.mean(last(x) * norm[:, None]) + jnp.mean(weighted(x, params["last"]))

    layers = {"up": models.shape(3, 8, 16), "down": models.shape(3, 16, 8)}
    layers["scale"] = models.shape(3, 8)
    return models.Model(
        loss, {"layers": layers, "last": models.shape(8)}, {"x": models.shape(8, 8)}
    )


PLANS: dict[str, tuple[Any, dict[str, str], tuple[str, ...]]] = {
    "rows": (jax.vmap(clipped_by_norm), {"dp_replicate": "2", "tp": "4"}, ()),
    "shards": (jax.vmap(clipped_by_norm), {"dp_shard": "8", "zero": "3"}, ()),
    "whole": (clipped_by_norm, {"tp": "8"}, ("custom::clipped_by_norm",)),
}


@pytest.mark.parametrize("name", PLANS)
def test_programs_have_the_rules(name: str) -> None:
    """On pieces of the batch and of the features, in a scan over layers, and one whole."""
    last, fix, whole = PLANS[name]
    program = made_of(f"own_{name}", several(last), fix, whole)
    assert "@derivative(scaled_backward)" in program.text
    errors, _ = program.exact()
    assert errors.largest <= TOLERANCE
    if name == "rows":  # verification sees another rule
        wrong = program.changed("19.0", "18.0")
        assert wrong.text != program.text
        assert wrong.exact()[0].gradient > 1e-3
