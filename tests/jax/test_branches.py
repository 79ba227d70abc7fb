"""Branches and loops whose bodies run as they are, on the pieces of each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.frontends.dispatch import executor
from autopar.frontends.jax import capture
from autopar.frontends.jax.errors import ControlFlow
from autopar.nouns.text.graph import from_text, to_text
from autopar.planner.ask.unruled import check_allowed, unruled
from autopar.rules.registry import UnruledOp, bind
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import LAYOUTS, made_of
from tests.jax.test_capture import equal

Form = Callable[[Any, Any], Any]


def _counter(h: Any) -> Any:
    return jnp.sum(jnp.arange(h.shape[0]) * 5 % 7) % 4


def _chosen(h: Any, w: Any) -> Any:
    """By a number of the whole batch, with a weight in one branch alone."""
    return lax.cond(jnp.mean(h) > 0, lambda x: jnp.tanh(x @ w), lambda x: x * 2, h)


def _switched(h: Any, w: Any) -> Any:
    branches = [jnp.sin, lambda x: jax.nn.softmax(x, -1), lambda x: jnp.zeros_like(x) + x[:, :1]]
    return lax.switch(_counter(h), branches, h @ w)


def _several(h: Any, w: Any) -> Any:
    both = (lambda x, y: (x + y, jnp.cumsum(y, -1)), lambda x, y: (x, y * 2))
    a, b = lax.cond(_counter(h) > 1, *both, h, h @ w)
    return a * b[..., :1]


def _counted(h: Any, w: Any) -> Any:
    """A loop whose length is known when it runs, whose counter is no gradient's."""
    step = lax.fori_loop(0, _counter(h), lambda i, x: x * 0.5 + i, h @ w)
    return (h @ w) * lax.stop_gradient(step)


def _until(h: Any, w: Any) -> Any:
    """Each body has constants of its own."""
    limit, decay = _counter(h) + 2.0, jnp.eye(8) * 0.5

    def step(carry: Any) -> Any:
        return carry[0] + 1, jnp.sin(carry[1]) @ decay

    start = lax.stop_gradient((0.0, h @ w))
    return (h @ w) * lax.while_loop(lambda carry: carry[0] < limit, step, start)[1]


def _until_each(h: Any, w: Any) -> Any:
    """A loop that every sample stops for itself."""
    begin, rates = lax.stop_gradient((h @ w, jnp.linspace(0.3, 0.7, h.shape[0])))

    def one(x: Any, rate: Any) -> Any:
        return lax.while_loop(lambda y: jnp.abs(y).sum() > rate, lambda y: y * rate, x)

    return (h @ w) * jax.vmap(one)(begin, rates)


@jax.custom_vjp  # type: ignore[untyped-decorator]
def _tripled(x: Any) -> Any:
    """Its derivative is no derivative of what it computes, and has a shape of its own."""
    return x * jnp.full(x.shape, 2.0)


_tripled.defvjp(lambda x: (_tripled(x), None), lambda _, g: (g * jnp.full(g.shape, 3.0),))


def _own(h: Any, w: Any) -> Any:
    return lax.cond(_counter(h) > 1, jnp.sin, lambda x: _tripled(x @ w), h)


def _made(h: Any, w: Any) -> Any:
    """Of no operand: both sides are made in the branch."""
    both = (lambda: jnp.full((8, 6, 8), 2.0), lambda: jnp.ones((8, 6, 8)))
    return (h @ w) * lax.cond(_counter(h) > 1, *both)


def _nested(h: Any, w: Any) -> Any:
    def inner(x: Any) -> Any:
        return lax.cond(_counter(h) == 1, jnp.cos, lambda y: y.at[:, 0].set(0.5), x)

    return lax.cond(_counter(h) > 0, inner, jnp.sin, h @ w)


FORMS: dict[str, tuple[Form, str]] = {
    "a number of the batch": (_chosen, "lax.switch("),
    "three branches": (_switched, "(branch_0, branch_1, branch_2)"),
    "several results": (_several, "(branch_0, branch_1)"),
    "a loop of so many steps": (_counted, "goes_on(*carry)"),
    "a loop until": (_until, "goes_on("),
    "a loop of each sample": (_until_each, "goes_on("),
    "a derivative of its own": (_own, "@derivative(tripled_backward)"),
    "of no operand": (_made, "lax.switch("),
    "a branch in a branch": (_nested, "lax.scatter("),
}
PARAMS = {"a": models.shape(8, 8), "b": models.shape(8, 8)}
BATCH = {"x": models.shape(8, 6, 8)}


def _loss(form: Form) -> Callable[[Any, Any], Any]:
    def loss(params: Any, batch: Any) -> Any:
        made = form(jnp.tanh(batch["x"] @ params["a"]), params["b"])
        return jnp.mean(jnp.square(made) * jnp.cos(jnp.arange(made.shape[-1])))

    return loss


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.some(4)
def test_they_compute_what_the_loss_does(name: str) -> None:
    """Captured, beside `jax.grad` on one device; then split over data and model ranks."""
    form, text = FORMS[name]
    graph = equal(_loss(form), PARAMS, BATCH)
    assert from_text(to_text(graph)) == graph
    for layout, fix in LAYOUTS.items():
        program = made_of(name, models.Model(_loss(form), PARAMS, BATCH), fix)
        assert program.exact()[0].largest <= TOLERANCE, layout
        assert text in program.text


def _rule(form: Form) -> str:
    graph = capture(_loss(form), PARAMS, BATCH).graph
    check_allowed(graph, unruled(graph, executor("jax")), ())
    (op,) = (op for op in graph.ops if op.kind in ("jax::cond", "jax::while"))
    return str(bind(op, graph.tensors))


def test_what_any_body_pairs_is_whole_and_a_counter_lacks_what_is_split() -> None:
    assert _rule(_several) == ", i0 i1 i2!, i0 i1 i2! -> i0 i1 i2!, i0 i1 i2!"
    assert _rule(_counted) == ", , i0 i1 i2 -> , , i0 i1 i2"
    assert _rule(_until_each) == "i0, i0 i1! i2! -> i0 i1! i2!"
    assert _rule(lambda h, w: lax.cond(_counter(h) > 1, lambda x: x[:, ::-1], jnp.sin, h @ w)) == (
        ", i0 i1! i2 -> i0 i1! i2"
    )


def test_a_number_beside_keeps_whole_what_it_lacks() -> None:
    """The gradient of ``w`` by one result would be a share, by the other one all of it."""

    def both(h: Any, w: Any) -> Any:
        sides = (lambda x, v: (x * v, v.sum()), lambda x, v: (x, v.mean()))
        made, number = lax.cond(_counter(h) > 1, *sides, h, w[0])
        return made + number

    with pytest.raises(UnruledOp, match="no dim of a branch can be split"):
        _rule(both)


def _of_all(h: Any, w: Any) -> Any:
    """Samples meet in one branch."""
    return lax.cond(_counter(h) > 1, lambda x: x - x.mean(0), jnp.sin, h @ w)


def _while_any(h: Any, w: Any) -> Any:
    start = lax.stop_gradient(h @ w)
    return (h @ w) * lax.while_loop(lambda x: x.max() > 0.1, lambda x: x * 0.5, start)


def _sorted(h: Any, w: Any) -> Any:
    y = (h @ w).reshape(-1)
    return lax.cond(_counter(h) > 1, jnp.sort, jnp.sin, y)


@pytest.mark.parametrize(("form", "kind"), [(_sorted, "jax::cond"), (_while_any, "jax::while")])
def test_what_has_no_dim_to_split_is_refused_or_runs_whole(form: Form, kind: str) -> None:
    with pytest.raises(UnruledOp, match=rf"(?s)test_branches\.py:\d+.*--allow-replicated {kind}"):
        _rule(form)
    model = models.Model(_loss(form), PARAMS, BATCH)
    program = made_of(kind, model, {"dp_replicate": "8"}, (kind,))
    assert program.exact()[0].largest <= TOLERANCE


def test_a_branch_in_which_samples_meet_has_them_all() -> None:
    assert _rule(_of_all) == ", i0! i1 i2 -> i0! i1 i2"
    program = made_of("of all", models.Model(_loss(_of_all), PARAMS, BATCH), LAYOUTS["tp"])
    assert program.exact()[0].largest <= TOLERANCE


def test_a_loop_that_the_gradient_flows_through_is_refused_with_its_line() -> None:
    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"] @ params["a"] @ params["b"]
        return jnp.mean(lax.fori_loop(0, _counter(h), lambda i, x: jnp.sin(x), h))

    with pytest.raises(ControlFlow, match=r"test_branches\.py:\d+.*static length"):
        capture(loss, PARAMS, BATCH)
