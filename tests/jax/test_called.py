"""Primitives without a kind that programs call again, split by the rules of Shardy's pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.frontends.jax import capture
from autopar.frontends.jax.calls import call_again
from autopar.frontends.jax.draft import Uniform, Value
from autopar.nouns.text.graph import from_text, to_text
from autopar.rules.registry import bind
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import LAYOUTS, made_of
from tests.jax.test_capture import equal


def _places(h: Any, count: int) -> Any:
    """Of every sample and row; some occur twice."""
    return (jnp.arange(h.shape[0] * h.shape[1]).reshape(h.shape[:2]) * 5) % count


def _counter(h: Any) -> Any:
    """A number that is known when the program runs alone."""
    return jnp.sum(_places(h, 7)) % 4


def _rows_at(h: Any) -> Any:
    def step(i: Any, made: Any) -> Any:
        row = lax.dynamic_slice_in_dim(h, i, 1, axis=1)
        return lax.dynamic_update_slice_in_dim(made, jnp.sin(row), 5 - i, axis=1)

    return lax.fori_loop(0, 6, step, jnp.zeros_like(h))


def _each(of: Callable[[Any, Any], Any], count: int) -> Callable[[Any], Any]:
    return lambda h: jax.vmap(of)(h, _places(h, count))


def _grouped(h: Any) -> Any:
    """Rows of all samples in three groups, as routed tokens are."""
    weights = jnp.arange(1.0, 4)[:, None, None] * jnp.eye(8) + 0.1
    sizes = jnp.array([10, 20, 18])
    return lax.ragged_dot(h.reshape(48, 8), weights, sizes).reshape(h.shape)


def _in_order(h: Any) -> Any:
    """Rows of each sample by what they weigh, the two heaviest set to one."""
    mask = jnp.zeros(h.shape[:2]).at[jnp.arange(8)[:, None], lax.top_k(h.sum(-1), 2)[1]].set(1.0)
    return h * mask[..., None]


def _positive(h: Any) -> Any:
    return h.mT @ h + jnp.eye(8)


FORMS: dict[str, Callable[[Any], Any]] = {
    "lax.scatter(": lambda h: h.at[:, 2:4].set(0.5) * h,
    "lax.scatter_add(": lambda h: h.at[:, jnp.array([0, 2, 2])].add(h[:, :3] * 2),
    "lax.scatter_mul(": lambda h: h.at[..., -1].multiply(3.0),
    "lax.scatter_max(": _each(lambda x, i: jnp.zeros((4, 8)).at[i].max(x), 4),
    "lax.scatter_min(": _each(lambda x, i: x.at[i[:2]].min(0.0), 4),
    "jnp.zeros(": _each(lambda x, i: jax.ops.segment_sum(x, i, num_segments=3), 3),
    "scatter_indices_batching_dims": _in_order,
    "lax.gather(": lambda h: h[:, jnp.array([0, 1, 2]), jnp.array([3, 4, 5])],
    "fill_value=0.5": lambda h: h.at[:, jnp.array([0, 9])].get(mode="fill", fill_value=0.5),
    "slice_sizes=": lambda h: jax.vmap(lambda x, i: lax.dynamic_slice_in_dim(x, i, 2))(
        h, _places(h, 4)[:, 0]
    ),
    "jnp.take_along_axis(": lambda h: h[jnp.arange(8)[:, None], _places(h, 6)] * h,
    "row, 5, axis=1": _rows_at,
    "lax.dynamic_slice_in_dim(": lambda h: lax.dynamic_slice_in_dim(h, _counter(h), 2, axis=1),
    "lax.dynamic_slice(": lambda h: lax.dynamic_slice(h, (0, _counter(h), 3), (8, 2, 4)),
    "lax.dynamic_update_slice_in_dim(": lambda h: lax.dynamic_update_slice_in_dim(
        h, h[:, :2] * 3, _counter(h), axis=1
    ),
    "lax.ragged_dot_general(": _grouped,
    "lax.top_k(": lambda h: jnp.where(h >= lax.top_k(h, 3)[0][..., -1:], h, 0),
    "jnp.einsum(": lambda h: jax.image.resize(h.reshape(8, 6, 4, 2), (8, 12, 8, 2), "bilinear"),
    "jnp.broadcast_to(": lambda h: jnp.tile(h, (1, 2, 1)),
    "lax.reduce_prod(": lambda h: jnp.prod(h + 2, axis=1),
    "lax.conv_general_dilated(": lambda h: lax.conv_transpose(
        h.reshape(8, 6, 4, 2), jnp.ones((3, 3, 2, 2)), (2, 2), "SAME"
    ),
    "groups=4": lambda h: lax.conv_general_dilated(
        h,
        jnp.ones((3, 1, 8)),
        (1,),
        "SAME",
        feature_group_count=8,
        dimension_numbers=("NHC", "HIO", "NHC"),
    ),
    "lax.shift_right_arithmetic(": lambda h: h * ((_places(h, 9) >> 1) & 1)[..., None],
    "lax.lt_to_p.bind(": lambda h: jnp.interp(h, jnp.linspace(-1, 1, 5), jnp.arange(5.0) ** 2),
    "lax.linalg.triangular_solve(": lambda h: jax.scipy.linalg.solve_triangular(
        jnp.tril(_positive(h)), h.mT, lower=True
    ),
    "lax.linalg.lu(": lambda h: jnp.linalg.solve(_positive(h), h.mT),
    "lax.linalg.eigh(": lambda h: jnp.linalg.eigh(_positive(h) + jnp.diag(jnp.arange(8.0)))[0],
    "lax.linalg.qr(": lambda h: jnp.linalg.qr(h.mT[..., :3] + jnp.eye(8)[:, :3])[1],
}
PARAMS = {"a": models.shape(8, 8), "b": models.shape(8, 8)}
BATCH = {"x": models.shape(8, 6, 8)}
EVERYWHERE = ("lax.scatter_add(", "jnp.zeros(", "lax.dynamic_update_slice_in_dim(", "lax.gather(")


def _loss(form: str) -> Callable[[Any, Any], Any]:
    def loss(params: Any, batch: Any) -> Any:
        made = FORMS[form](jnp.tanh(batch["x"] @ params["a"]))
        return jnp.mean(jnp.square(made) * jnp.cos(jnp.arange(made.shape[-1]))) + jnp.mean(
            jnp.square(batch["x"] @ params["b"])
        )

    return loss


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.some(10)
def test_programs_call_them_as_the_loss_does(form: str) -> None:
    """Split over data and model ranks, beside `jax.grad` on one device."""
    model = models.Model(_loss(form), PARAMS, BATCH)
    for layout in LAYOUTS if form in EVERYWHERE else ["tp"]:
        program = made_of(form, model, LAYOUTS[layout])
        assert program.exact()[0].largest <= TOLERANCE, layout
        assert form in program.text
        text = to_text(program.captured.graph)
        assert to_text(from_text(text)) == text


def test_a_sum_into_zeros_over_the_batch_is_a_share_of_every_rank() -> None:
    def loss(params: Any, batch: Any) -> Any:
        h = jnp.tanh(batch["x"] @ params["a"]).reshape(48, 8)
        sums = jax.ops.segment_sum(h, jnp.arange(48) * 7 % 5, num_segments=5)
        return jnp.mean(jnp.tanh(sums @ params["b"]) ** 2)

    equal(loss, PARAMS, BATCH)
    graph = capture(loss, PARAMS, BATCH).graph
    (op,) = (op for op in graph.ops if op.kind == "jax::scatter-add")
    assert str(bind(op, graph.tensors)) == "i0+ 1, i0+ i1 -> i2! i1"
    program = made_of("sums", models.Model(loss, PARAMS, BATCH), LAYOUTS["tp"])
    assert program.exact()[0].largest <= TOLERANCE


def test_what_is_made_of_constants_alone_runs_whole() -> None:
    """How often each row is repeated; the rows themselves are split."""

    def loss(params: Any, batch: Any) -> Any:
        h = jnp.tanh(batch["x"] @ params["a"])
        counts = jnp.array([1, 0, 2, 1, 1, 1])
        return jnp.mean((jnp.repeat(h, counts, axis=1, total_repeat_length=6) @ params["b"]) ** 2)

    equal(loss, PARAMS, BATCH)
    model = models.Model(loss, PARAMS, BATCH)
    program = made_of("repeated", model, LAYOUTS["tp"])
    assert program.exact()[0].largest <= TOLERANCE
    assert not program.plan.replicated_ops


def test_a_reduction_over_no_dim_is_what_it_reads() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(lax.reduce_max(batch["x"] @ params["a"], ()) @ params["b"])

    graph = equal(loss, PARAMS, BATCH)
    assert [op.kind for op in graph.ops] == ["linear_t", "linear_t", "mean"]


X = Value((8, 6), "float32")
PLACES = Value((3, 1), "int32")


def test_what_does_not_trace_to_the_same_equation_is_not_written() -> None:
    numbers = lax.GatherDimensionNumbers((0,), (1,), (1,))
    given = {
        "dimension_numbers": numbers,
        "slice_sizes": (8, 1),
        "mode": lax.GatherScatterMode.CLIP,
        "fill_value": None,
        "indices_are_sorted": False,
        "unique_indices": False,
    }
    made = call_again("gather", given, [X, PLACES])
    assert made is not None
    assert made.attrs == {
        "call": "lax.gather({0}, {1}, dimension_numbers=lax.GatherDimensionNumbers("
        'offset_dims=(0,), collapsed_slice_dims=(1,), start_index_map=(1,)), mode="clip", '
        "slice_sizes={window})",
        "window": (-1, 1),
        "rule": "i0 i1!, i2 1 -> i0 i2",
    }
    assert call_again("gather", {**given, "hidden": 3}, [X, PLACES]) is None
    assert call_again("gather", {**given, "fill_value": object()}, [X, PLACES]) is None
    assert call_again("no_such_primitive", {}, [X]) is None
    assert call_again("bitcast_convert_type", {"new_dtype": np.dtype("int32")}, [X]) is None


def test_numbers_that_places_start_at_are_written() -> None:
    start = Value((), "int32")
    params = {"slice_sizes": (8, 2)}
    made = call_again("dynamic_slice", params, [X, Uniform(0, "int32"), start])
    assert made is not None
    assert made.operands == (0, 2)
    assert (
        made.text == "lax.dynamic_slice_in_dim({0}, {1}, 2, axis=1, allow_negative_indices=False)"
    )
    made = call_again("dynamic_slice", {"slice_sizes": (2, 2)}, [X, Uniform(3, "int32"), start])
    assert made is not None
    assert (made.operands, made.window) == ((0, 2), (2, 2))
    assert "(jnp.int32(3), jnp.int32({1}))" in made.text
