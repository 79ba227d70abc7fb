"""Rules that Shardy's pass gives: its text, what it says of primitives, and ours beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.frontends.dispatch import executor
from autopar.frontends.jax import calls, capture, primitives, shardy
from autopar.frontends.jax.draft import Value
from autopar.frontends.jax.finish import graph_of
from autopar.frontends.jax.jaxprs import draft_of
from autopar.frontends.jax.shardy import NotRead, parsed, rule_of
from autopar.planner.ask.unruled import check_allowed, unruled
from autopar.rules.binding import bind_rule
from autopar.rules.notation import BoundRule, Rule
from autopar.rules.registry import UnruledOp, bind
from tests.jax.models import ids, shape

Case = tuple[Callable[..., Any], tuple[Any, ...]]
X = shape(8, 6, 4)

SAID: dict[str, tuple[Case, str]] = {
    "gather": (
        (lambda x, i: jnp.take(x, i, axis=1, mode="clip"), (X, ids(3))),
        "i0 i1! i2, i3 -> i0 i3 i2",
    ),
    "scatter-add": (
        (lambda x, i, u: x.at[:, i].add(u), (X, ids(3), shape(8, 3, 4))),
        "i0 i1! i2, i3!, i0 i3! i2 -> i0 i1! i2",
    ),
    "dynamic_slice": (
        (lambda x, i: lax.dynamic_slice_in_dim(x, i, 2, 1), (X, ids())),
        "i0 i1! i2,  -> i0 i3! i2",
    ),
    "dynamic_update_slice": (
        (lambda x, u, i: lax.dynamic_update_slice_in_dim(x, u, i, 1), (X, shape(8, 2, 4), ids())),
        "i0 i1! i2, i0 i3! i2,  -> i0 i1! i2",
    ),
    "pad": ((lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 0))), (X,)), "i0 i1! i2 -> i0 i3! i2"),
    "sort": ((lambda x: jnp.sort(x, 1), (X,)), "i0 i1! i2 -> i0 i1! i2"),
    "argmin": ((lambda x: jnp.argmin(x, 1), (X,)), "i0 i1! i2 -> i0 i2"),
    "reduce_window": (
        (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 1), (1, 2, 1), "VALID"), (X,)),
        "i0 i1! i2 -> i0 i3! i2",
    ),
    "fft": ((lambda x: jnp.fft.fft(x).real, (X,)), "i0 i1 i2! -> i0 i1 i2!"),
    "lu": ((lax.linalg.lu, (shape(8, 5, 5),)), "i0 i1! i2! -> i0 i3! i4!, i0 i5!, i0 i6!"),
    "ragged_dot": (
        (lax.ragged_dot, (shape(12, 6), shape(3, 6, 4), ids(3))),
        "i0! i1!, i2! i1! i3, i2! -> i0! i3",
    ),
    "while": ((lambda x: lax.fori_loop(0, 3, lambda i, y: jnp.sin(y), x), (X,)),
              "i0 i1 i2 -> i0 i1 i2"),
    "while that sums": (
        (lambda x: lax.while_loop(lambda y: y.sum() < 9, lambda y: y + 1, x), (X,)),
        "",
    ),
    "cond": (
        (lambda p, x: lax.cond(p, jnp.sin, lambda y: y.cumsum(1), x), (ids(), X)),
        ", i0 i1! i2 -> i0 i1! i2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_the_text_of_the_pass_is_the_one_that_was_read(name: str) -> None:
    """Where this fails, jaxlib's pass writes another text, or says something else of an op: read
    what it writes now (`shardy.parsed`), then put the version into `shardy.READ`."""
    (function, shapes), expected = SAID[name]
    assert jax.__version__.startswith(shardy.READ), f"jax {jax.__version__}: see above"
    assert rule_of(function, shapes) == expected


def test_sums_of_a_scatter_may_be_split_where_it_adds_to_zeros_alone() -> None:
    def total(x: Any, i: Any) -> Any:
        return jnp.zeros((3, 4)).at[i].add(x)

    shapes = (shape(12, 4), ids(12))
    assert rule_of(total, shapes) == "i0! i1, i0! -> i2! i1"
    assert rule_of(total, shapes, sums=True) == "i0+ i1, i0+ -> i2! i1"


def test_another_text_is_not_read() -> None:
    rule = parsed("#sdy.op_sharding_rule<([i, z_1], [j])->([i, jk]) {i=2, j=3, k=4, z_1=5} "
                  "reduction={z_1} need_replication={j}>")  # fmt: skip
    assert rule.operands == ((("i",), ("z_1",)), (("j",),))
    assert rule.results == ((("i",), ("j", "k")),)
    assert rule.sizes == {"i": 2, "j": 3, "k": 4, "z_1": 5}
    assert rule.flagged == frozenset(("z_1", "j"))
    assert rule.summed == frozenset(("z_1",))
    with pytest.raises(NotRead):
        parsed("#sdy.op_sharding_rule[i -> i]")


def _multiplied(params: Any, batch: Any) -> Any:
    return jnp.mean(jnp.prod(batch["x"] @ params["w"], axis=1) ** 2)


PARAMS, BATCH = {"w": shape(8, 8)}, {"x": shape(4, 8)}


def _planned() -> None:
    graph = capture(_multiplied, PARAMS, BATCH).graph
    check_allowed(graph, unruled(graph, executor("jax")), ())


@pytest.fixture
def _anew() -> Any:
    """Without the rules that were seen before, or that a test makes."""
    calls._called.cache_clear()
    yield
    calls._called.cache_clear()


@pytest.mark.usefixtures("_anew")
@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (shardy, "PASS", "no-such-pass"),
        (shardy, "RULE", "sdy.other"),
        (shardy, "parsed", lambda text: (_ for _ in ()).throw(NotRead(text))),
    ],
    ids=["no pass", "no rules", "another text"],
)
def test_without_the_pass_an_op_without_a_rule_is_refused(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: Any
) -> None:
    monkeypatch.setattr(module, name, value)
    with pytest.raises(UnruledOp, match="no rule says how op 'jax::reduce_prod'"):
        _planned()


@pytest.mark.usefixtures("_anew")
def test_a_rule_of_the_pass_that_does_not_hold_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def running(params: Any, batch: Any) -> Any:
        return jnp.mean(lax.rev_p.bind(batch["x"] @ params["w"], dimensions=(1,)))

    monkeypatch.setattr(primitives, "TABLE", {**primitives.TABLE, "rev": lambda *_: None})
    monkeypatch.setattr(calls, "rule_of", lambda *_: "i0 i1 -> i0 i1")
    graph = capture(running, PARAMS, BATCH).graph
    with pytest.raises(UnruledOp, match=r"(?s)not confirmed: split 2 ways over i1.*jax::rev"):
        check_allowed(graph, unruled(graph, executor("jax")), ())
    check_allowed(graph, unruled(graph, executor("jax")), ("jax::rev",))


# -- ours beside it ------------------------------------------------------------------------------

OURS: dict[str, Case] = {
    "add": (jnp.add, (X, X)),
    "exp": (jnp.exp, (X,)),
    "where": (lambda x: jnp.where(x > 0, x, 1.0), (X,)),
    "sum": (lambda x: x.sum(1), (X,)),
    "max": (lambda x: x.max((0, 2)), (X,)),
    "einsum": (lambda x, y: jnp.einsum("bsk,bnk->bsn", x, y), (X, shape(8, 3, 4))),
    "matmul": (lambda x, w: x @ w, (X, shape(4, 5))),
    "transpose": (lambda x: x.transpose(2, 0, 1), (X,)),
    "cumsum": (lambda x: jnp.cumsum(x, 1), (X,)),
    "cumprod": (lambda x: lax.cumprod(x, 1), (X,)),
    "sort": (lambda x: jnp.sort(x, 1), (X,)),
    "argmax": (lambda x: jnp.argmax(x, 1), (X,)),
    "argmin": (lambda x: jnp.argmin(x, 1), (X,)),
    "flip": (lambda x: x[:, ::-1], (X,)),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0))), (X,)),
    "cat": (lambda x, y: jnp.concatenate([x, y], 1), (X, X)),
    "slice": (lambda x: x[:, 1:3], (X,)),
    "embedding": (lambda i, w: w[i], (ids(8, 6), shape(16, 4))),
    "gather": (lambda x, i: jnp.take_along_axis(x, i, 1), (X, ids(8, 3, 4))),
    "index_select": (lambda x, i: x[:, i], (X, ids(3))),
    "conv": (lambda x, w: lax.conv(x, w, (1,), "SAME"), (X, shape(5, 6, 3))),
    "reduce_window": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID"), (X,),
    ),
    "cholesky": (lax.linalg.cholesky, (shape(8, 5, 5),)),
}  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_our_rules_split_what_the_pass_lets_through(name: str) -> None:
    function, shapes = OURS[name]
    closed = jax.make_jaxpr(function)(*shapes)
    values = [Value(s.shape, str(s.dtype), "input", f"x{i}") for i, s in enumerate(shapes)]
    graph, _ = graph_of(draft_of(closed, values))
    theirs = rule_of(function, shapes)
    results = [graph.tensors[n].shape for n in graph.outputs]
    bound = bind_rule(Rule(theirs), [s.shape for s in shapes], results)
    whole = {f"x{i}": {(i, d): {(i, d)} for d in range(len(s.shape))} for i, s in enumerate(shapes)}
    ours = _passing(graph, whole)
    said = _pairs(bound)
    assert ours == said


Dim = tuple[int, int]


def _pairs(bound: BoundRule) -> set[tuple[Dim, int, int]]:
    """(operand and dim, result, its dim) that have a factor in common which may be split."""
    return {
        ((i, d), j, e)
        for f in bound.factors.values()
        if f.kind == "parallel"
        for i, term in enumerate(bound.operands)
        for d, dim in enumerate(term)
        for j, other in enumerate(bound.results)
        for e, theirs in enumerate(other)
        if f.name in dim and f.name in theirs
    }


def _passing(graph: Any, known: Any) -> set[tuple[Dim, int, int]]:
    """The same for a graph of a few ops: dims of its inputs followed through each."""
    at: dict[tuple[str, int], set[Dim]] = {
        (name, d): set(of) for name, dims in known.items() for (_, d), of in dims.items()
    }
    for op in graph.ops:
        for (i, d), j, e in _pairs(bind(op, graph.tensors)):
            at.setdefault((op.outputs[j], e), set()).update(at.get((op.inputs[i], d), ()))
    return {
        (dim, j, e)
        for j, name in enumerate(graph.outputs)
        for e in range(len(graph.tensors[name].shape))
        for dim in at.get((name, e), ())
    }
