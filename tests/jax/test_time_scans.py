"""Scans over time that are one op with a body, whose steps run on the pieces of each rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.frontends.dispatch import executor
from autopar.frontends.jax import capture
from autopar.frontends.jax.time_scans import MOST_STEPS, MOST_WRITTEN
from autopar.nouns.graph import Graph, Op
from autopar.nouns.text.graph import from_text, to_text
from autopar.planner.ask.unruled import check_allowed, unruled
from autopar.rules.registry import UnruledOp, bind
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import LAYOUTS, cluster, made_of
from tests.jax.test_capture import equal

STEPS = MOST_WRITTEN + 8
B, W, N = 16, 8, 4
Form = Callable[[Any, Any], Any]


def _rows(x: Any) -> Any:
    """[batch, time, width] -> [time, batch, width]"""
    return jnp.moveaxis(x, 1, 0)


def _zeros(x: Any) -> Any:
    return jnp.zeros((x.shape[0], W), x.dtype)


def _rnn(p: Any, x: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ p["a"] + h @ p["b"])
        return h, h

    return _rows(lax.scan(step, _zeros(x), _rows(x))[1])


def _last(p: Any, x: Any) -> Any:
    """The last carry alone; it begins with what is learned."""

    def step(h: Any, x: Any) -> Any:
        return jnp.tanh(x + h @ p["b"]), None

    return lax.scan(step, jnp.broadcast_to(p["a"][0], (x.shape[0], W)), _rows(x))[0]


def _gru(p: Any, x: Any) -> Any:
    """Gates outside of the scan, which has rows of three kinds."""
    gates = tuple(_rows(x @ p[name]) for name in ("a", "b", "c"))

    def step(h: Any, rows: Any) -> Any:
        update, reset, value = rows
        z, r = jax.nn.sigmoid(update + h @ p["d"]), jax.nn.sigmoid(reset + h)
        h = (1 - z) * h + z * jnp.tanh(value + (r * h) @ p["c"])
        return h, h

    return _rows(lax.scan(step, _zeros(x), gates)[1])


def _lstm(p: Any, x: Any) -> Any:
    """Two carries, of which one is read afterwards too."""

    def step(carry: Any, x: Any) -> Any:
        h, c = carry
        gates = jnp.split(x @ p["wide"] + jnp.tile(h @ p["b"], 4), 4, axis=-1)
        i, f, g, o = gates
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), (h, c.sum(-1))

    (_, c), (hs, sums) = lax.scan(step, (_zeros(x), _zeros(x)), _rows(x))
    return _rows(hs) * c[:, None] + _rows(sums)[..., None]


def _both_ways(p: Any, x: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = jnp.sin(x + h @ p["b"])
        return h, h

    ahead, back = (lax.scan(step, _zeros(x), _rows(x), reverse=r)[1] for r in (False, True))
    return _rows(ahead) * _rows(back)


def _selective(p: Any, x: Any) -> Any:
    """A state [batch, width, N], whose width may be split: nothing pairs its entries."""
    delta = jax.nn.softplus(x * p["a"][0])
    writes, reads = x @ p["a"][:, :N], x @ p["b"][:, :N]
    decay = -jnp.exp(p["c"][:, :N])

    def step(state: Any, rows: Any) -> Any:
        x, delta, write, read = rows
        state = jnp.exp(delta[..., None] * decay) * state + (delta * x)[..., None] * write[:, None]
        return state, jnp.einsum("bdn,bn->bd", state, read) + p["d"][0] * x

    rows = tuple(map(_rows, (x, delta, writes, reads)))
    return _rows(lax.scan(step, jnp.zeros((x.shape[0], W, N)), rows)[1])


def _nested(p: Any, x: Any) -> Any:
    """A scan in the step of a scan, the inner one long and over rows of its own."""
    inner_rows = jnp.cos(jnp.arange(STEPS * W, dtype=x.dtype)).reshape(STEPS, W)

    def inner(h: Any, row: Any) -> Any:
        return h * 0.9 + row * p["a"][0], None

    def step(h: Any, x: Any) -> Any:
        h = jnp.tanh(lax.scan(inner, h, inner_rows)[0] + x @ p["b"])
        return h, h

    return _rows(lax.scan(step, _zeros(x), _rows(x))[1])


def _clocked(p: Any, x: Any) -> Any:
    """Counters beside the state, one of them of floats; no rows."""

    def step(carry: Any, _: Any) -> Any:
        h, i, t = carry
        h = jnp.where(i % 3 == 0, jnp.sin(h @ p["b"]), h) * jnp.cos(t)
        return (h, i + 1, t + 0.25), t

    (h, i, _), ts = lax.scan(step, (x[:, 0] @ p["a"], 0, 0.0), None, length=STEPS)
    return h * i + ts.sum()


def _masked(p: Any, x: Any) -> Any:
    """Rows that are a mask, and one sample's end: numbers, as dropout has them, from outside."""
    keep = jnp.cos(jnp.arange(STEPS))[:, None, None] * _rows(x) > 0

    def step(h: Any, rows: Any) -> Any:
        x, kept = rows
        h = jnp.where(kept, jnp.tanh(x @ p["a"] + h @ p["b"]), h)
        return h, h

    return _rows(lax.scan(step, _zeros(x), (_rows(x), keep))[1])


def _mapped(p: Any, x: Any) -> Any:
    """No carry: each sample by itself, so that samples may be split."""
    many = x.reshape(-1, W)
    return lax.map(lambda row: jax.nn.softmax(row @ p["a"]) * p["b"][0], many)


def _checkpointed(p: Any, x: Any) -> Any:
    @jax.checkpoint  # type: ignore[untyped-decorator]
    def step(h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ p["a"] + h @ p["b"])
        return h, h

    return _rows(lax.scan(step, _zeros(x), _rows(x))[1])


@jax.custom_vjp  # type: ignore[untyped-decorator]
def _clipped(x: Any) -> Any:
    return x * 1.0


_clipped.defvjp(lambda x: (x * 1.0, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


def _clipping(p: Any, x: Any) -> Any:
    """Its derivative is of whole gradients alone, those of a sample."""

    def step(h: Any, x: Any) -> Any:
        h = _clipped(jnp.tanh(x @ p["a"] + h @ p["b"]))
        return h, h

    return _rows(lax.scan(step, _zeros(x), _rows(x))[1])


def _branching(p: Any, x: Any) -> Any:
    """A branch in the step, by a number that all samples share."""

    def step(h: Any, row: Any) -> Any:
        x, i = row
        h = lax.cond(i % 2 == 0, lambda h: jnp.sin(h @ p["b"]), lambda h: h * 0.5, h) + x
        return h, h

    return _rows(lax.scan(step, _zeros(x), (_rows(x), jnp.arange(STEPS)))[1])


FORMS: dict[str, tuple[Form, str]] = {
    "rnn": (_rnn, "lax.scan(\n"),
    "its last state": (_last, "jnp.tanh("),
    "gru": (_gru, "x, x_1, x_2 = row"),
    "lstm": (_lstm, "carry: tuple[Array, Array]"),
    "both ways": (_both_ways, "reverse=True"),
    "selective": (_selective, "jnp.einsum"),
    "a scan in a scan": (_nested, "step_("),
    "clocks": (_clocked, "length=40"),
    "masks": (_masked, "jnp.where("),
    "no carry": (_mapped, "carry: object"),
    "checkpointed": (_checkpointed, "jax.checkpoint(step)"),
    "clipped gradients": (_clipping, "@derivative(clipped_backward)"),
    "a branch in a step": (_branching, "lax.switch("),
}
PARAMS = {name: models.shape(W, W) for name in "abcd"} | {"wide": models.shape(W, 4 * W)}
BATCH = {"x": models.shape(B, STEPS, W)}


def _loss(form: Form) -> Callable[[Any, Any], Any]:
    def loss(params: Any, batch: Any) -> Any:
        made = form(params, jnp.tanh(batch["x"] @ params["d"]))
        return jnp.mean(jnp.square(made) * jnp.cos(jnp.arange(made.shape[-1]) + 1.0))

    return loss


def _scans(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if op.kind == "jax::scan"]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.some(6)
def test_they_compute_what_the_loss_does(name: str) -> None:
    """Captured, beside `jax.grad` on one device; then split over data and model ranks."""
    form, text = FORMS[name]
    graph = equal(_loss(form), PARAMS, BATCH)
    assert _scans(graph)
    assert from_text(to_text(graph)) == graph
    for layout, fix in LAYOUTS.items():
        program = made_of(name, models.Model(_loss(form), PARAMS, BATCH), fix)
        assert program.exact()[0].largest <= TOLERANCE, layout
        assert text in program.text, program.text


def _rule(form: Form) -> str:
    graph = capture(_loss(form), PARAMS, BATCH).graph
    check_allowed(graph, unruled(graph, executor("jax")), ())
    (op,) = _scans(graph)
    return str(bind(op, graph.tensors))


def test_time_is_whole_and_what_steps_pair() -> None:
    assert _rule(_last) == "i0! i0!, i1 i0!, i2! i1 i0! -> i1 i0!"
    assert _rule(_selective) == (
        "i0 i1!, i2! i0, i3 i0 i1!, i4! i3 i0, i5! i3 i0, i6! i3 i1!, i7! i3 i1! -> "
        "i3 i0 i1!, i8! i3 i0"
    )
    assert _rule(_clocked) == "i0! i0!, i1 i0!, ,  -> i1 i0!, , , i2!"
    assert _rule(_mapped) == "i0! i1!, i2! i1!, i3 i0! -> i3 i1!"


def _met(x: Any) -> Any:
    return x - x.mean(0)


def _placed(x: Any) -> Any:
    """By the place of a sample among all."""
    return x + jnp.cos(jnp.arange(x.shape[0], dtype=x.dtype))[:, None]


def _turned(x: Any) -> Any:
    return x[::-1]


def _sorted(x: Any) -> Any:
    return jnp.sort(x, axis=0)


@pytest.mark.parametrize("change", [_met, _placed, _turned, _sorted])
def test_samples_that_meet_in_a_step_are_split_by_nothing(change: Callable[[Any], Any]) -> None:
    """So a scan that is no longer than that is written out, a longer one stays whole."""

    def form(p: Any, x: Any, steps: int = STEPS) -> Any:
        def step(h: Any, _: Any) -> Any:
            return jnp.sin(change(h) * p["a"][0]), None

        return lax.scan(step, x[:, 0], None, length=steps)[0]

    assert not _scans(capture(_loss(form), PARAMS, BATCH).graph)
    rule = _rule(partial(form, steps=2 * MOST_STEPS))
    assert rule == "i0! i1, i2! i1 -> i2! i1"
    model = models.Model(_loss(partial(form, steps=2 * MOST_STEPS)), PARAMS, BATCH)
    program = made_of(change.__name__, model, LAYOUTS["tp"])
    assert program.exact()[0].largest <= TOLERANCE


def _beside(p: Any, x: Any, steps: int) -> Any:
    """A result without samples, whose gradient to a weight is whole on every rank."""

    def step(h: Any, _: Any) -> Any:
        return jnp.tanh(h @ p["a"]), p["a"].sum()

    h, sums = lax.scan(step, x[:, 0], None, length=steps)
    return h + sums.sum()


def test_a_result_that_lacks_samples_keeps_them_whole() -> None:
    assert not _scans(capture(_loss(partial(_beside, steps=STEPS)), PARAMS, BATCH).graph)
    with pytest.raises(UnruledOp, match="no dim of a scan of 2000 steps over time") as error:
        _rule(partial(_beside, steps=2000))
    assert "jax.lax.associative_scan" in str(error.value)
    assert "test_time_scans.py" in str(error.value)
    assert "matmul at" in str(error.value)
    assert "--allow-replicated jax::scan" in str(error.value)
    model = models.Model(_loss(partial(_beside, steps=2000)), PARAMS, BATCH)
    program = made_of("beside", model, {"dp_replicate": "8"}, ("jax::scan",))
    assert program.exact()[0].largest <= TOLERANCE


def _clipped_weight(p: Any, x: Any, steps: int = STEPS) -> Any:
    """The clipped gradient is of a weight: by a share of it, it would be clipped apart."""

    def step(h: Any, _: Any) -> Any:
        return jnp.tanh(h * _clipped(p["a"][0] * 2)), None

    return lax.scan(step, x[:, 0], None, length=steps)[0]


def test_a_clipped_gradient_of_a_weight_keeps_samples_whole() -> None:
    assert not _scans(capture(_loss(_clipped_weight), PARAMS, BATCH).graph)
    assert _rule(partial(_clipped_weight, steps=2000)) == "i0! i1, i2! i1 -> i2! i1"
    model = models.Model(_loss(partial(_clipped_weight, steps=2000)), PARAMS, BATCH)
    for layout in ("tp", "dp"):
        program = made_of("clipped weight", model, LAYOUTS[layout])
        assert program.exact()[0].largest <= TOLERANCE


def test_steps_that_run_again_are_not_told_to_be_left_out() -> None:
    """They keep what they carry alone: rows of time, 4 bytes each."""
    captured = capture(_loss(_checkpointed), PARAMS, BATCH)
    assert not [note for note in captured.notes if "jax.checkpoint" in note]
    (again,), (usual,) = (
        _scans(capture(_loss(form), PARAMS, BATCH).graph) for form in (_checkpointed, _rnn)
    )
    assert again.attrs["keeps"] == ((4 * W * STEPS, ("i2",)),)
    assert usual.attrs["keeps"] == ((2 * 4 * W * STEPS, ("i2",)),)  # and tanh its result
    assert usual.attrs["flops"] == ((2 * 2.0 * W * W * STEPS, ("i2",)),)


def _layer(p: Any, x: Any) -> Any:
    """A state in float32, whatever the precision is."""

    def step(s: Any, row: Any) -> Any:
        s = s * jax.nn.sigmoid(p["f"]).astype(jnp.float32) + row.astype(jnp.float32)
        return s, s.astype(row.dtype) * row

    start = jnp.zeros((x.shape[0], W), jnp.float32)
    ys = lax.scan(step, start, _rows(x @ p["a"]))[1]
    return x + jnp.tanh(_rows(ys) @ p["b"])


def _listed(params: Any, batch: Any) -> Any:
    x = batch["x"]
    for p in params["layers"]:
        x = _layer(p, x)
    return jnp.mean(jnp.square(x))


def _stacked(params: Any, batch: Any) -> Any:
    x = lax.scan(lambda x, p: (_layer(p, x), None), batch["x"], params["layers"])[0]
    return jnp.mean(jnp.square(x))


@pytest.mark.parametrize("loss", [_listed, _stacked])
def test_layers_with_scans_over_time_are_layers(loss: Callable[[Any, Any], Any]) -> None:
    """In half precision a state is in the dtype that the loss asks for; in microbatches too."""
    one = {"a": models.shape(W, W), "b": models.shape(W, W), "f": models.shape(W)}
    layers: Any = {name: models.shape(3, *s.shape) for name, s in one.items()}
    model = models.Model(loss, {"layers": [one] * 3 if loss is _listed else layers}, BATCH)
    fix = {"dp_replicate": "4", "tp": "2", "microbatch": "2"}
    program = made_of(loss.__name__, model, fix, precision="bfloat16")
    assert program.exact()[0].largest <= TOLERANCE
    assert program.text.count("lax.scan(") == 1
    assert "layers(" in program.text
    (body,) = (block.body for block in program.planned.lowered.graph.blocks.values())
    (op,) = _scans(body)
    assert [body.tensors[name].dtype for name in op.outputs] == ["float32", "bfloat16"]


def test_a_long_scan_costs_what_its_steps_do() -> None:
    """Twice the steps take twice the time; fewer samples on a rank less, but for launches."""

    def form(p: Any, x: Any, steps: int) -> Any:
        def step(h: Any, _: Any) -> Any:
            return jnp.tanh(h @ p["a"]), None

        return lax.scan(step, x[:, 0], None, length=steps)[0]

    taken = []
    for steps in (2048, 4096):
        model = models.Model(_loss(partial(form, steps=steps)), PARAMS, BATCH)
        program = made_of(f"{steps} steps", model, LAYOUTS["dp"])
        taken.append(program.plan.prediction.step_time_s)
    assert taken[1] == pytest.approx(2 * taken[0], rel=0.05)
    assert taken[0] > 2048 * 4 * cluster().device.launch_overhead_s


def test_short_scans_and_those_over_layers_are_written_out() -> None:
    def short(p: Any, x: Any) -> Any:
        return _rnn(p, x[:, :MOST_WRITTEN])

    def layers(p: Any, x: Any) -> Any:
        """Stacked parameters, cast before they are gone over."""
        stack = p["stack"].astype(jnp.float16).astype(x.dtype)
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), h), x[:, 0], stack)[1]

    for form in (short, layers):
        params = PARAMS | {"stack": models.shape(STEPS, W, W)}
        assert not _scans(capture(_loss(form), params, BATCH).graph)
