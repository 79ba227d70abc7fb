"""Captured graphs mean what the loss function means, and say it with the ops of the vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar.frontends.jax import capture
from autopar.nouns.graph import Graph
from autopar.nouns.text.graph import from_text, to_text
from autopar.rules.registry import bind
from tests.jax import families, models
from tests.jax.interpreter import compare, interpret


def kinds(graph: Graph) -> list[str]:
    return [op.kind for op in graph.ops]


def equal(loss: Callable[..., Any], params: Any, batch: Any) -> Graph:
    """Captures at declared precision, compares value and gradients in float64."""
    captured = capture(loss, params, batch)
    largest = 10 if "label" in batch else models.V
    with jax.enable_x64(True):
        given = [models.concrete(t, "float64", largest=largest) for t in (params, batch)]
    compare(captured, loss, params, batch, given)
    return captured.graph


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.some(6)
def test_graph_equals_loss_function(name: str) -> None:
    model = models.MODELS[name]()
    graph = equal(model.loss, model.params, model.batch)
    assert not [k for k in kinds(graph) if k.startswith("jax::")]
    assert from_text(to_text(graph)) == graph
    assert all(op.source.file.endswith("models.py") and op.source.line for op in graph.ops)


@pytest.mark.parametrize("family", [families.resnet, families.t5])
@pytest.mark.some(1)
def test_graph_of_a_family_equals_its_loss_function(family: Callable[[], models.Model]) -> None:
    model = family()
    graph = equal(model.loss, model.params, model.batch)
    assert from_text(to_text(graph)) == graph


def test_gpt_is_made_of_idioms() -> None:
    model = models.gpt_scan()
    graph = capture(model.loss, model.params, model.batch).graph
    body = graph.blocks["blocks"].body
    assert Counter(kinds(body)) == {
        "layer_norm": 2, "linear": 6, "add": 8, "reshape": 4, "transpose": 4, "attention": 1,
        "gelu": 1,
    }  # fmt: skip
    assert kinds(graph) == [
        "embedding", "arange", "embedding", "add", "block", "block", "block", "layer_norm",
        "linear", "reshape", "reshape", "cross_entropy",
    ]  # fmt: skip
    attention = next(op for op in body.ops if op.kind == "attention")
    assert dict(attention.attrs) == {"causal": True, "scale": None, "dropout_p": 0.0}
    assert attention.name == "attention/attention"
    names = {name for name, _ in graph.parameters()}
    assert {"blocks.2.attention.q.weight", "tokens.weight", "head.weight"} <= names


def test_unrolled_layers_fold_into_the_graph_of_the_scan() -> None:
    scan, unrolled = models.gpt_scan(), models.gpt_unrolled()
    a = capture(scan.loss, scan.params, scan.batch).graph
    b = capture(unrolled.loss, unrolled.params, unrolled.batch).graph

    def without_source(graph: Graph) -> Any:
        return [(op.kind, op.inputs, op.outputs, dict(op.attrs)) for op in graph.ops]

    assert without_source(a) == without_source(b)
    assert without_source(a.blocks["blocks"].body) == without_source(b.blocks["blocks"].body)
    assert a.blocks["blocks"].instances == b.blocks["blocks"].instances
    assert dict(a.tensors) == dict(b.tensors)


def test_a_layer_that_differs_stands_by_itself() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for i, p in enumerate(params["layers"]):
            x = x + (jnp.tanh if i != 2 else jnp.sin)(x @ p["weight"])
        return jnp.mean(jnp.square(x))

    layers = [{"weight": models.shape(8, 8)} for _ in range(6)]
    graph = equal(loss, {"layers": layers}, {"x": models.shape(4, 8)})
    assert [b.instances for b in graph.blocks.values()] == [
        ("layers.0", "layers.1"),
        ("layers.3", "layers.4", "layers.5"),
    ]
    assert kinds(graph)[2:5] == ["linear_t", "sin", "add"]


def test_outputs_of_inner_layers_that_are_read_later_are_not_folded_away() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x, seen = batch["x"], []
        for p in params["layers"]:
            x = jnp.tanh(x @ p["weight"])
            seen.append(x)
        return sum(jnp.mean(jnp.square(y)) for y in seen)

    layers = [{"weight": models.shape(8, 8)} for _ in range(4)]
    equal(loss, {"layers": layers}, {"x": models.shape(4, 8)})


def test_masks_made_outside_of_a_scan_are_seen_in_it() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        s = x.shape[1]
        causal, scale = jnp.tril(jnp.ones((s, s), bool)), jnp.float32(0.5)
        turn = jnp.cos(jnp.arange(8.0))

        def step(x: Any, w: Any) -> Any:
            h = (x @ w) * scale * turn
            scores = jnp.where(causal, jnp.einsum("bsd,btd->bst", h, h), -jnp.inf)
            return x + jnp.einsum("bst,btd->bsd", jax.nn.softmax(scores), h), None

        x, _ = jax.lax.scan(step, x, params["w"])
        return jnp.mean(jnp.square(x))

    graph = equal(loss, {"w": models.shape(3, 8, 8)}, {"x": models.shape(2, 4, 8)})
    (block,) = graph.blocks.values()
    attention = next(op for op in block.body.ops if op.kind == "attention")
    assert attention.attrs["causal"] is True
    assert attention.attrs["scale"] == 1.0
    assert block.body.inputs == ("shared", "x")  # the angles are computed once
    assert block.instances == ("layer.0", "layer.1", "layer.2")


def test_scan_over_activations_is_unrolled() -> None:
    def loss(params: Any, batch: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            h = jnp.tanh(x @ params["w"] + h @ params["u"])
            return h, h

        _, hs = jax.lax.scan(step, jnp.zeros((4, 8)), batch["x"].transpose(1, 0, 2))
        return jnp.mean(jnp.square(hs))

    params = {"w": models.shape(8, 8), "u": models.shape(8, 8)}
    graph = equal(loss, params, {"x": models.shape(4, 5, 8)})
    assert kinds(graph).count("tanh") == 5
    assert not graph.blocks


FORMS: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "gelu": (jax.nn.gelu, "gelu", {"approximate": "tanh"}),
    "gelu_exact": (lambda x: jax.nn.gelu(x, approximate=False), "gelu", {"approximate": "none"}),
    "gelu_by_hand": (
        lambda x: 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3))),
        "gelu",
        {"approximate": "tanh"},
    ),
    "silu": (jax.nn.silu, "silu", {}),
    "swish_by_hand": (lambda x: x * jax.nn.sigmoid(x), "silu", {}),
    "relu": (jax.nn.relu, "relu", {}),
    "softmax": (lambda x: jax.nn.softmax(x), "softmax", {"dim": 1}),
    "softmax_by_hand": (
        lambda x: (
            jnp.exp(x - x.max(-1, keepdims=True))
            / jnp.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)
        ),
        "softmax",
        {"dim": 1},
    ),
    "log_softmax": (jax.nn.log_softmax, "log_softmax", {"dim": 1}),
    "log_softmax_by_hand": (
        lambda x: x - jax.nn.logsumexp(x, -1, keepdims=True),
        "log_softmax",
        {"dim": 1},
    ),
    "layer_norm": (
        lambda x: jax.nn.standardize(x, axis=-1, epsilon=1e-5),
        "layer_norm",
        {"dims": 1, "eps": 1e-5},
    ),
    "rms_norm": (
        lambda x: x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6),
        "rms_norm",
        {"eps": 1e-6, "upcast": False, "scale_offset": 0},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_idioms(name: str) -> None:
    form, kind, attrs = FORMS[name]

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(form(batch["x"] @ params["w"]) * batch["y"])

    batch = {"x": models.shape(4, 8), "y": models.shape(4, 8)}
    graph = equal(loss, {"w": models.shape(8, 8)}, batch)
    assert [(op.kind, dict(op.attrs)) for op in graph.ops[1:]] == [
        (kind, attrs),
        ("mul", {}),
        ("mean", {"dims": (0, 1), "keepdim": False}),
    ]


def test_jnp_maximum_stays_a_maximum() -> None:
    """Its derivative where the operands are equal is a half; that of relu is zero."""

    def loss(params: Any, batch: Any) -> Any:
        return jnp.sum(jnp.maximum(params["w"] - params["w"], 0) * batch["x"] + params["w"])

    graph = equal(loss, {"w": models.shape(4)}, {"x": models.shape(3, 4)})
    assert "maximum" in kinds(graph)


def attend(order: str, mask: bool, causal: bool, heads: int) -> Callable[..., Any]:
    """Attention by hand over [b, s, h, d] or [b, h, s, d], with or without repeated kv heads."""

    def run(q: Any, k: Any, v: Any, keep: Any) -> Any:
        if heads != q.shape[2]:
            k, v = (jnp.repeat(t, q.shape[2] // heads, axis=2) for t in (k, v))
        if order == "bhsd":
            q, k, v = (t.swapaxes(1, 2) for t in (q, k, v))
            logits = q @ k.swapaxes(2, 3) * q.shape[-1] ** -0.5
        else:
            logits = jnp.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
        s = logits.shape[-1]
        if causal:
            rows, columns = jnp.arange(s)[:, None], jnp.arange(s)[None]
            logits = logits + jnp.where(rows >= columns, 0.0, -1e9)
        if mask:
            logits = jnp.where(keep[:, None, None, :], logits, -1e30)
        weights = jax.nn.softmax(logits, axis=-1)
        if order == "bhsd":
            return (weights @ v).swapaxes(1, 2)
        return jnp.einsum("bhst,bthd->bshd", weights, v)

    return run


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("mask", "causal"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_attention_by_hand(order: str, mask: bool, causal: bool) -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        q, k, v = (jnp.einsum("bsk,khd->bshd", x, params[n]) for n in "qkv")
        keep = batch["length"][:, None] > jnp.arange(x.shape[1])
        y = attend(order, mask, causal, 3)(q, k, v, keep)
        return jnp.mean(jnp.square(y))

    params = {name: models.shape(8, 3, 4) for name in "qkv"}
    batch = {"x": models.shape(2, 6, 8), "length": models.ids(2)}
    graph = equal(loss, params, batch)
    (attention,) = [op for op in graph.ops if op.kind == "attention"]
    assert attention.attrs["causal"] is causal
    assert len(attention.inputs) == 3 + mask
    assert graph.tensors[attention.inputs[0]].shape == (2, 3, 6, 4)
    assert "softmax" not in kinds(graph)


def test_cross_entropy_forms_agree() -> None:
    def forms(logits: Any, labels: Any) -> dict[str, Any]:
        likelihood = jax.nn.log_softmax(logits)
        hot = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
        picked = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
        return {
            "gather": -jnp.take_along_axis(likelihood, labels[:, None], 1).mean(),
            "index": -likelihood[jnp.arange(len(labels)), labels].mean(),
            "one_hot": -(hot * likelihood).sum(-1).mean(),
            "logsumexp": (jax.nn.logsumexp(logits, -1) - picked).mean(),
            "sum": -jnp.take_along_axis(likelihood, labels[:, None], 1).sum(),
        }

    def of_optax(params: Any, batch: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels
        return losses(batch["x"] @ params["w"], batch["label"]).mean()

    params = {"w": models.shape(8, 10)}
    for rows in ((6,), (3, 5)):
        batch = {"x": models.shape(*rows, 8), "label": models.ids(*rows)}
        made = kinds(equal(of_optax, params, batch))
        assert [kind for kind in made if kind != "reshape"] == ["linear_t", "cross_entropy"]
    batch = {"x": models.shape(6, 8), "label": models.ids(6)}
    for name in ("gather", "index", "one_hot", "logsumexp", "sum"):

        def loss(params: Any, batch: Any, name: str = name) -> Any:
            return forms(batch["x"] @ params["w"], batch["label"])[name]

        graph = equal(loss, params, batch)
        assert kinds(graph) == ["linear_t", "cross_entropy"], name
        assert graph.ops[-1].attrs["reduction"] == ("sum" if name == "sum" else "mean")


@pytest.mark.parametrize(
    ("form", "labels"),
    [
        ("gather", (0, 9, -1, -10, 3, 3)),  # negative ones count from the end
        ("logsumexp", (0, 9, -1, -10, 3, 3)),
        ("index", (0, 9, -1, -10, 3, 3)),
        ("one_hot", (0, 9, -1, -100, 10, 99)),  # what is no class is a row of zeros
        ("one_hot masked", (0, 9, -1, -100, 10, 99)),
    ],
)
def test_labels_of_no_class_pick_what_they_pick_in_the_users_function(
    form: str, labels: tuple[int, ...]
) -> None:
    def loss(params: Any, batch: Any) -> Any:
        logits, label = batch["x"] @ params["w"], batch["label"]
        likelihood = jax.nn.log_softmax(logits)
        hot = jax.nn.one_hot(label, logits.shape[-1], dtype=logits.dtype)
        if form == "gather":
            return -jnp.take_along_axis(likelihood, label[:, None], 1).mean()
        if form == "index":
            return -likelihood[jnp.arange(len(label)), label].mean()
        if form == "logsumexp":
            picked = jnp.take_along_axis(logits, label[:, None], 1)[:, 0]
            return (jax.nn.logsumexp(logits, -1) - picked).mean()
        rows = -(hot * likelihood).sum(-1)
        return rows.mean() if form == "one_hot" else (rows * (label >= 0)).sum() / 3

    params = {"w": models.concrete(models.shape(8, 10), "float32", seed=0)}
    batch = {
        "x": models.concrete(models.shape(6, 8), "float32", seed=1),
        "label": np.array(labels, np.int32),
    }
    captured = capture(loss, params, batch)
    run = interpret(captured.graph)
    right, slopes = jax.value_and_grad(loss)(params, batch)
    own, ours = jax.value_and_grad(lambda p: run(p, batch))(params)
    assert np.isfinite(right)
    assert abs(own - right) < 1e-6 * abs(right)
    assert np.abs(ours["w"] - slopes["w"]).max() < 1e-6
    fused = "cross_entropy" in kinds(captured.graph)
    assert fused == (form != "one_hot masked")


def test_an_index_that_much_arithmetic_makes_is_captured() -> None:
    """Each value is read twice by the next: no walk may go down both ways."""

    def loss(params: Any, batch: Any) -> Any:
        index = batch["label"]
        for _ in range(80):
            index = index + index * 2 - 2 * index
        return jnp.mean(jnp.tanh(params["w"])[index])

    captured = capture(loss, {"w": models.shape(10, 8)}, {"label": models.ids(4)})
    assert "embedding" in kinds(captured.graph)


def test_unknown_primitives_keep_their_name() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(jnp.sort(batch["x"] @ params["w"], axis=-1))

    graph = capture(loss, {"w": models.shape(8, 8)}, {"x": models.shape(4, 8)}).graph
    assert "jax::sort" in kinds(graph)


def test_named_scopes_are_modules() -> None:
    def loss(params: Any, batch: Any) -> Any:
        with jax.named_scope("tail"):
            return jnp.mean(jnp.square(jnp.tanh(batch["x"] @ params["w"])))

    graph = capture(loss, {"w": models.shape(8, 8)}, {"x": models.shape(4, 8)}).graph
    assert [op.name for op in graph.ops] == ["linear_t", "tail/tanh", "tail/square", "tail/mean"]


def test_vmapped_lookups_can_be_written_into_a_plan() -> None:
    """`jax.vmap` counts dims in numpy integers."""

    def one(params: Any, tokens: Any) -> Any:
        scores = jax.nn.log_softmax(params["table"][tokens])
        return -jnp.take_along_axis(scores, tokens[:, None], -1).mean()

    def loss(params: Any, batch: Any) -> Any:
        return jax.vmap(one, (None, 0))(params, batch["tokens"]).mean()

    params, batch = {"table": models.shape(models.V, models.V)}, {"tokens": models.ids(4, 6)}
    graph = equal(loss, params, batch)
    assert from_text(to_text(graph)) == graph


def test_remainders_and_finite_numbers_are_elementwise() -> None:
    """Integers: ``%`` and ``//`` of both signs, by numbers and by arrays that broadcast."""

    def loss(params: Any, batch: Any) -> Any:
        i, j = batch["i"] - 9, batch["j"] + 1
        weights = (i % 4)[:, None] + i[:, None] // j + (7 // j) % 3 + j // 2
        y = batch["x"] @ params["w"]
        return jnp.mean(y * weights) + jnp.mean(jax.nn.logsumexp(y, -1) + jnp.fmod(y, 0.75)[:, 0])

    batch = {"x": models.shape(4, 8), "i": models.ids(4), "j": models.ids(4, 8)}
    graph = equal(loss, {"w": models.shape(8, 8)}, batch)
    assert {k for k in kinds(graph) if "::" in k} == {"jax::rem", "jax::div", "jax::is_finite"}
    assert all(bind(op, graph.tensors).factors for op in graph.ops if "::" in op.kind)


@pytest.mark.filterwarnings("error")
def test_limits_of_a_dtype_stay_those_of_the_dtype() -> None:
    """In float64, where constants are looked up, ``finfo`` has limits that float32 has not."""

    def loss(params: Any, batch: Any) -> Any:
        y = batch["x"] @ params["w"]
        return jnp.mean(jax.nn.softmax(jnp.where(y > 0, y / 3, jnp.finfo(y.dtype).min)))

    graph = capture(loss, {"w": models.shape(8, 8)}, {"x": models.shape(4, 8)}).graph
    (mask,) = (op for op in graph.ops if op.kind == "where")
    assert mask.attrs["b"] == pytest.approx(float(jnp.finfo("float32").min))


@pytest.mark.parametrize("axis", [-1, 0])
def test_top_k_keeps_its_dim_whole(axis: int) -> None:
    def loss(params: Any, batch: Any) -> Any:
        values, places = jax.lax.top_k(batch["x"] @ params["w"], 2, axis=axis)
        return jnp.sum(values * (1 + places))

    graph = equal(loss, {"w": models.shape(6, 8)}, {"x": models.shape(4, 6)})
    (op,) = (op for op in graph.ops if op.kind == "jax::top_k")
    assert dict(op.attrs) == {"k": 2, "dim": axis % 2}
    assert [graph.tensors[name].dtype for name in op.outputs] == ["float32", "int32"]
    factors = bind(op, graph.tensors).factors.values()
    split = [f for f in factors if f.kind == "parallel"]
    assert [f.size for f in split] == [4 if axis else 8]


@pytest.mark.parametrize("same", [True, False])
def test_arrays_closed_over_have_their_own_numbers(same: bool) -> None:
    """Not the decimals that a float32 would be shown by."""
    rows = np.full((8,), 0.1, np.float32) if same else np.linspace(0.1, 0.9, 8, dtype=np.float32)

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((batch["x"] @ params["w"]) * rows)

    equal(loss, {"w": models.shape(8, 8)}, {"x": models.shape(4, 8)})


LAYERS: dict[str, Callable[[int, Any], Any]] = {
    "number": lambda i, x: x * (1, 1, 3, 1)[i],
    "roll": lambda i, x: jnp.roll(x, i == 2, axis=1),
    "slice": lambda i, x: jnp.pad(x[:, int(i == 2) :], ((0, 0), (0, int(i == 2)))),
    "array": lambda i, x: x * np.arange(1 + (i == 2), 9 + (i == 2), dtype=np.float32),
    "power": lambda i, x: x ** (2 + (i == 2)),
    "dtype": lambda i, x: x.astype("bfloat16" if i == 2 else "float32").astype("float32"),
}


@pytest.mark.parametrize("part", range(2))
def test_layers_that_differ_in_a_number_do_not_fold(part: int) -> None:
    """The third of four, in each way on parameters of its own; the first two are one block."""
    chosen = dict(list(LAYERS.items())[part::2])

    def loss(params: Any, batch: Any) -> Any:
        total = 0.0
        for name, change in chosen.items():
            x = batch["x"]
            for i, p in enumerate(params[name]):
                x = jnp.tanh(change(i, x @ p["w"]))
            total = total + jnp.mean(x)
        return total

    params = {name: [{"w": models.shape(8, 8)} for _ in range(4)] for name in chosen}
    graph = equal(loss, params, {"x": models.shape(4, 8)})
    folded = [block.instances for block in graph.blocks.values()]
    assert not any(name.endswith((".2", ".3")) for layers in folded for name in layers)


@pytest.mark.parametrize("what", ["signed zero", "two carries"])
def test_layers_whose_difference_is_easily_overlooked_do_not_fold(what: str) -> None:
    def loss(params: Any, batch: Any) -> Any:
        x, y = batch["x"], batch["x"] * 2
        for i, p in enumerate(params):
            if what == "signed zero":
                x = jnp.tanh(x @ p["w"]) * jnp.sign(1 / (jnp.abs(x) * (-0.0 if i == 2 else 0.0)))
            else:
                given = (y, x) if i == 2 else (x, y)
                x = jnp.tanh(given[0] @ p["w"])
                y = given[1] + x
        return jnp.mean(x + 2 * y)

    graph = equal(loss, [{"w": models.shape(8, 8)} for _ in range(4)], {"x": models.shape(4, 8)})
    folded = [block.instances for block in graph.blocks.values()]
    assert not any({"1", "2"} <= set(layers) for layers in folded)
