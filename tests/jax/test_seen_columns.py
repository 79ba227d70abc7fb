"""What attention of JAX says of the columns that a row sees, however a loss has it: masks made of
places, masks that are arrays, and what `jax.nn.dot_product_attention` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.frontends.jax import capture
from autopar.frontends.jax.draft import Builder, Uniform, Value
from autopar.frontends.jax.known_arrays import made_of_places
from autopar.nouns.graph import Op
from autopar.runtime.verify.collectives import differences
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.interpreter import interpret
from tests.jax.planned import made_of

B, S, H, D, SEEN = 2, 24, 4, 4, 6
Mask = Callable[[], Any]


def rows_and_columns() -> tuple[Any, Any]:
    return jnp.arange(S)[:, None], jnp.arange(S)[None, :]


def compared() -> Any:
    i, j = rows_and_columns()
    return (j <= i) & (j > i - SEEN)


def subtracted() -> Any:
    i, j = rows_and_columns()
    return (i - j >= 0) & (i - j < SEEN)


def negated() -> Any:
    i, j = rows_and_columns()
    return ~((j > i) | (j <= i - SEEN))


WINDOWS: Mapping[str, Mask] = {
    "compared": compared,
    "subtracted": subtracted,
    "two triangles": lambda: (
        jnp.tril(jnp.ones((S, S), bool)) & ~jnp.tril(jnp.ones((S, S), bool), -SEEN)
    ),
    "a triangle of one": lambda: jnp.triu(jnp.tril(jnp.ones((S, S), bool)), 1 - SEEN),
    "of floats": lambda: jnp.tril(jnp.triu(jnp.ones((S, S)), 1 - SEEN)) > 0,
    "of numpy": lambda: jnp.asarray(np.triu(np.tri(S, dtype=bool), 1 - SEEN)),
    "counted by python": lambda: (
        (jnp.array(range(S))[:, None] >= jnp.array(range(S)))
        & (jnp.array(range(S))[:, None] < jnp.array(range(S)) + SEEN)
    ),
}


def given() -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(0)
    params = {n: rng.normal(size=(H * D, H * D)).astype("float32") for n in "qkvo"}
    numbers = rng.integers(0, 3, (B, S)).astype("int32")
    x = rng.normal(size=(B, S, H * D)).astype("float32")
    return params, {"x": x, "documents": numbers, "lengths": np.array([5, 24], "int32")}


def heads(params: Any, batch: Any, groups: int) -> tuple[Any, Any, Any]:
    q, k, v = (batch["x"] @ params[n] for n in "qkv")
    k, v = (x[..., : groups * D].reshape(B, S, groups, D) for x in (k, v))
    return q.reshape(B, S, H, D), k, v


def attention_of(loss: Callable[[Any, Any], Any]) -> tuple[Op, list[tuple[int, ...]]]:
    """The one attention of a loss whose graph computes what it does, and shapes of its masks."""
    params, batch = given()
    graph = capture(loss, params, batch).graph
    value = interpret(graph)(params, batch)
    np.testing.assert_allclose(value, loss(params, batch), rtol=2e-5)
    (op,) = [op for op in graph.ops if op.kind == "attention"]
    return op, [graph.tensors[name].shape for name in op.inputs[3:]]


@pytest.mark.parametrize("way", WINDOWS)
@pytest.mark.parametrize("added", [False, True])
def test_a_window_is_no_mask(way: str, added: bool) -> None:
    def loss(params: Any, batch: Any) -> Any:
        q, k, v = heads(params, batch, H)
        scores = jnp.einsum("bshd,bthd->bhst", q, k) * D**-0.5
        shown = WINDOWS[way]()
        scores = scores + jnp.where(shown, 0.0, -1e9) if added else jnp.where(shown, scores, -1e30)
        mixed = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, -1), v)
        return jnp.sum(jnp.square(mixed.reshape(B, S, -1) @ params["o"]))

    op, masks = attention_of(loss)
    assert (op.attrs["causal"], op.attrs["window"], masks) == (True, SEEN, [])


def documents(batch: Any) -> Any:
    return batch["documents"][:, None, :, None] == batch["documents"][:, None, None, :]


BACK = (SEEN - 1, 0)
TAKES: Mapping[str, tuple[Mapping[str, Any], dict[str, Any], list[tuple[int, ...]]]] = {
    "nothing": ({}, {"causal": False}, []),
    "causal": ({"is_causal": True}, {"causal": True}, []),
    "a window": ({"local_window_size": BACK}, {"causal": True, "window": SEEN}, []),
    "causal, both sides": (
        {"is_causal": True, "local_window_size": SEEN - 1}, {"causal": True, "window": SEEN}, [],
    ),
    "as wide as all": ({"local_window_size": (S, 0)}, {"causal": True}, []),
    "both sides": ({"local_window_size": 3}, {"causal": False}, [(1, 1, S, S)]),
    "a mask": ({"mask": documents}, {"causal": False}, [(B, 1, S, S)]),
    "a mask, causal": ({"mask": documents, "is_causal": True}, {"causal": True}, [(B, 1, S, S)]),
    "a mask, a window": (
        {"mask": documents, "local_window_size": BACK}, {"causal": True, "window": SEEN},
        [(B, 1, S, S)],
    ),
    "a bias": (
        {"bias": lambda b: jnp.where(documents(b), 0.5, -1e9)}, {"causal": False}, [(B, 1, S, S)],
    ),
    "a bias and a mask": (
        {"bias": lambda b: 0.1 * documents(b), "mask": documents, "is_causal": True},
        {"causal": True}, [(B, 1, S, S)],
    ),
    "a bias by head": (
        {"bias": lambda b: jnp.arange(H * S).reshape(1, H, 1, S) * 0.1},
        {"causal": False}, [(1, H, 1, S)],
    ),
    "lengths": ({"key_value_seq_lengths": lambda b: b["lengths"]}, {"causal": False},
                [(B, 1, 1, S)]),
}  # fmt: skip


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("takes", TAKES)
@pytest.mark.some(20)
def test_attention_of_jax_itself_is_one_op(takes: str, groups: int) -> None:
    options, expected, shapes = TAKES[takes]

    def loss(params: Any, batch: Any) -> Any:
        own = {name: o(batch) if callable(o) else o for name, o in options.items()}
        mixed = jax.nn.dot_product_attention(*heads(params, batch, groups), **own)
        return jnp.sum(jnp.square(mixed.reshape(B, S, -1) @ params["o"]))

    op, masks = attention_of(loss)
    said = {name: op.attrs[name] for name in ("causal", "window") if name in op.attrs}
    assert (said, masks) == (expected, shapes)


def test_one_key_for_all_heads_by_einsum() -> None:
    def loss(params: Any, batch: Any) -> Any:
        q, k, v = heads(params, batch, 1)
        scores = jnp.einsum("bshd,btd->bhst", q, k[:, :, 0]) * D**-0.5
        scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -1e30)
        mixed = jnp.einsum("bhst,btd->bshd", jax.nn.softmax(scores, -1), v[:, :, 0])
        return jnp.sum(jnp.square(mixed.reshape(B, S, -1) @ params["o"]))

    op, masks = attention_of(loss)
    assert (op.attrs["causal"], masks) == (True, [])


def test_rows_of_another_dim_than_the_masks_are_not_called_causal() -> None:
    """A mask over heads and columns, as many as there are rows."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"] @ params["q"]
        q = x.reshape(B, S, 1, H * D) * jnp.linspace(0.5, 1.5, S)[:, None]  # S heads of the rows
        k = batch["x"] @ params["k"]
        scores = jnp.einsum("bshd,btd->bhst", q, k) * D**-0.5
        heads_and_columns = jnp.tril(jnp.ones((S, S), bool))[:, None, :]
        scores = jnp.where(heads_and_columns, scores, -1e30)
        mixed = jnp.einsum("bhst,btd->bshd", jax.nn.softmax(scores, -1), k)
        return jnp.sum(jnp.square(mixed @ params["o"]))

    params, batch = given()
    graph = capture(loss, params, batch).graph
    value = interpret(graph)(params, batch)
    np.testing.assert_allclose(value, loss(params, batch), rtol=2e-5)


# --- arrays -------------------------------------------------------------------------------------


def band(s: int, t: int, first: int, last: int) -> np.ndarray:
    back = np.arange(t) - np.arange(s)[:, None]
    return (back >= first) & (back <= last)


ARRAYS: Mapping[str, np.ndarray] = {
    "counted": np.arange(5, 45, 4),
    "counted down": np.arange(9, -1, -1, dtype="int32"),
    "along a dim": np.broadcast_to(np.arange(7)[:, None, None], (2, 7, 1, 3)),
    "a window": band(12, 12, -3, 0),
    "both sides": band(12, 9, -3, 2),
    "before": band(9, 12, -100, -2),
    "behind": band(9, 12, 3, 100),
    "added": np.where(band(9, 9, -100, 0), 0, -np.inf)[None].astype("float32"),
    "a number that hides": np.where(band(9, 9, -2, 0), 0, -1e9)[None, None],
}
DATA: Mapping[str, np.ndarray] = {
    "a few": np.arange(4),
    "along two dims": np.arange(12).reshape(3, 4),
    "nearly": np.array([0, 1, 2, 3, 4, 5, 6, 8]),
    "a hole": band(9, 9, -100, 0) & (np.arange(9) != 4),
    "one more": band(9, 9, -100, 0) | np.eye(9, k=3, dtype=bool),
    "a jump": np.tri(9, dtype=bool)[[0, 1, 2, 4, 4, 5, 6, 7, 8]],
    "by sample": np.stack([band(9, 9, -100, 0), band(9, 9, -2, 0)]),
    "nothing seen": np.zeros((9, 9), bool),
    "minus zero": np.where(band(9, 9, -100, 0), -0.0, -np.inf),
    "a small number": np.where(band(9, 9, -100, 0), 0, -5.0),
    "floats": np.linspace(0, 1, 12),
}


NUMPY: Mapping[str, Callable[..., Any]] = {
    "arange": lambda a: np.arange(a["start"], a["stop"], a["step"]),
    "reshape": lambda a, x: x.reshape(a["shape"]),
    "expand": lambda a, x: np.broadcast_to(x, a["shape"]),
    "add": lambda a, x, y: x + y,
    "ge": lambda a, x, y: x >= y,
    "le": lambda a, x, y: x <= y,
    "and": lambda a, x, y: x & y,
    "where": lambda a, c, x, y: np.where(c, x, y),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_places_is_ops(name: str) -> None:
    array, builder = ARRAYS[name], Builder()
    made = made_of_places(array, builder)
    assert made is not None
    assert made.dtype == str(array.dtype)
    values: dict[Value, Any] = {}

    def of(x: Any) -> Any:
        return x.value if isinstance(x, Uniform) else values[x]

    for node in builder.nodes:
        values[node.out] = NUMPY[node.kind](node.attrs, *map(of, node.inputs))
        assert values[node.out].shape == node.out.shape
    np.testing.assert_array_equal(of(made), array)


@pytest.mark.parametrize("name", DATA)
def test_data_stay_arrays(name: str) -> None:
    assert made_of_places(DATA[name], Builder()) is None


# --- programs -----------------------------------------------------------------------------------


def windowed(far: Any = None) -> models.Model:
    """Two layers whose heads share keys; the second one's rows see all columns, or ``far``."""

    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        x = params["embed"][batch["tokens"]]
        b, s, w = x.shape
        for layer, seen in ((params["near"], (2, 0)), (params["far"], far)):
            q = (x @ layer["q"]).reshape(b, s, 4, -1)
            k, v = ((x @ layer[n]).reshape(b, s, 2, -1) for n in "kv")
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=seen)
            x = x + mixed.reshape(b, s, w) @ layer["o"]
        likely = jax.nn.log_softmax(x @ params["embed"].T)
        return -jnp.mean(jnp.take_along_axis(likely, batch["labels"][..., None], axis=-1))

    v, w = models.V, models.W
    layer = {n: models.shape(w, w // 2 if n in "kv" else w) for n in "qkvo"}
    params = {"embed": models.shape(v, w), "near": layer, "far": dict(layer)}
    return models.Model(loss, params, models.TOKENS)


ALIKE = {"dp_shard": "4", "zero": "2", "microbatch": "1"}
PROGRAMS: Sequence[tuple[Any, Mapping[str, str], str]] = [
    (None, {"tp": "2", "dp_shard": "4", "zero": "3"}, "causal=True, window=3)"),
    (None, {"cp": "4", "tp": "2"}, 'window=3, rows="cp", order="zigzag"'),
    (None, {"cp": "2", **ALIKE}, 'window=3, ring="cp", order="zigzag"'),
    ((4, 0), {"cp": "2", **ALIKE}, 'window=5, ring="cp"'),
    (None, {"cp_ring": "2", "cp_head": "2", "dp_shard": "2"}, 'window=3, ring="cp"'),
    (None, {"pp": "2", "cp": "2", "dp_shard": "2"}, 'window=3, ring="cp"'),
]


@pytest.mark.parametrize(("far", "fix", "said"), PROGRAMS)
@pytest.mark.some(3)
def test_programs_compute_what_the_model_does(far: Any, fix: Mapping[str, str], said: str) -> None:
    made = made_of(f"windowed {far}", windowed(far), fix)
    assert said in " ".join(made.text.split())
    errors, moved = made.exact()
    assert errors.largest <= TOLERANCE
    assert not differences(made.priced_in_float64(), moved)


def test_a_narrower_window_in_the_program_is_called_wrong() -> None:
    made = made_of("windowed", windowed(), PROGRAMS[0][1])
    errors, _ = made.changed("window=3", "window=2").exact()
    assert errors.largest > 1e-3
