"""Experts on several ranks, tokens gathered or rows dispatched: exactly what they make on one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.runtime.pytorch import ranks as rank_state
from autopar.runtime.pytorch import transport
from autopar.runtime.pytorch.dispatch import routes_of_each
from autopar.runtime.pytorch.experts import experts
from autopar.runtime.shared.settings import ProgramError
from tests.emit import simulated
from tests.runtime import expert_cases
from tests.runtime.expert_cases import (
    EACH,
    EXPERTS,
    FORMS,
    INNER,
    ROUTINGS,
    WIDTH,
    Case,
    Form,
    case,
    furthest,
    layouts,
    own_part,
)
from tests.runtime.test_pieces import Alone

LIMIT = 1e-9
LAYOUTS = layouts()


def checked(of: Case) -> list[tuple[str, str, int]]:
    """Runs it on simulated ranks, and gives what the first of them issued."""
    parts, world = simulated.run(of.layout.mesh, lambda here: own_part(of, here.rank))
    assert max(furthest(of, parts).values()) < LIMIT
    return world.log


@pytest.mark.parametrize("tokens", ["even", "odd", "none"])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.some(165)
def test_ranks_together_compute_the_whole(layout: str, routing: str, tokens: str) -> None:
    checked(case(LAYOUTS[layout], Form(), routing, tokens))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("layout", ["gathered over 2", "dispatched over 4", "dispatched, width"])
def test_however_matrices_are_stored(layout: str, form: Form) -> None:
    checked(case(LAYOUTS[layout], form, "drawn", "odd"))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))]
    _, ways = layout.place(0, layout.of_tokens)
    tokens = tuple(draw(st.lists(st.integers(0, 4), min_size=ways, max_size=ways)))
    of_one = st.lists(st.integers(0, EXPERTS - 1), min_size=EACH, max_size=EACH)
    rows = draw(st.lists(of_one, min_size=sum(tokens), max_size=sum(tokens)))
    index = torch.tensor(rows, dtype=torch.int64).reshape(-1, EACH)
    form = Form(bias=not (layout.width or layout.halves))
    return Case(layout, form, tokens, index, draw(st.integers(1, 4)))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_whatever_the_routes_are(of: Case) -> None:
    checked(of)


def test_what_a_rank_issues() -> None:
    """Counts ahead along every axis, then n k rows out and back, forward and backward."""
    of = case(LAYOUTS["dispatched over 2 x 2"], Form(), "drawn", "odd")
    rows = of.tokens[0] * EACH * WIDTH * 8
    inner, outer = ("all_to_all", "tp", rows), ("all_to_all", "ep", rows)
    assert checked(of) == [
        ("all_to_all", "tp", EXPERTS * 8),
        ("all_to_all", "ep", EXPERTS // 2 * 8),
        *(inner, outer, outer, inner),
        *(inner, outer, outer, inner),
    ]
    assert checked(case(LAYOUTS["gathered over 4"], Form(), "drawn")) == []


def test_what_a_rank_issues_in_pieces() -> None:
    """Counts of all pieces ahead at once, then the rows of each."""
    of = case(LAYOUTS["dispatched over 4"], Form(), "drawn", "even")
    rows = of.tokens[0] // 2 * EACH * WIDTH * 8
    assert of.tokens[0] % 2 == 0
    assert checked(replace(of, pieces=2)) == [
        ("all_to_all", "ep", 2 * EXPERTS * 8),
        *[("all_to_all", "ep", rows)] * 8,
    ]


def test_rows_of_a_piece_travel_while_another_is_computed_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Begun (b) and waited for (w) are exchanges, around the gates (p) of each of three pieces:
    the next piece has set out before one is computed with, forward, and in backward all gradients
    have before any is waited for."""
    of = replace(case(LAYOUTS["dispatched over 2"], Form("all"), "drawn", "even"), pieces=3)
    monkeypatch.setattr(torch, "tanh", partial(noted, "p"))
    forward = "b" + "bwpb" * 2 + "wpb" + "www"
    backward = "bbb" + "wpb" * 2 + "w" + "wpb" + "ww"
    assert order_of(of) == forward + backward


def test_what_runs_beside_hides_the_first_way_out_and_the_last_way_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Likewise, with what runs beside (s): between the first pieces' leaving and arriving, and in
    backward between those of its gradients."""
    of = case(LAYOUTS["dispatched over 2"], Form("all"), "drawn", "even")
    monkeypatch.setattr(torch, "tanh", partial(noted, "p"))
    own: Any = experts

    def beside(x: torch.Tensor, *others: Any, **how: Any) -> torch.Tensor:
        routed, shared = own(x, *others, **how, beside=lambda: noted("s", x))
        assert torch.equal(shared, x)
        made: torch.Tensor = routed + 0 * shared
        return made

    monkeypatch.setattr(expert_cases, "experts", beside)
    assert order_of(of) == "bs" + "wpbw" + "bwpb" + "sw"
    assert (
        order_of(replace(of, pieces=2))
        == "bs" + "bwpb" + "wpb" + "ww" + "bb" + "wpb" + "wpbw" + "sw"
    )


SEEN: list[str] = []
"""Of the first rank: begun (b) and waited for (w) are exchanges, all else as it is `noted`."""


def note(what: str) -> None:
    if transport.index("ep") == 0:
        SEEN.append(what)


def noted(what: str, h: torch.Tensor) -> torch.Tensor:
    """``h``, and a note now and in backward."""

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
            note(what)
            return h.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            note(what)
            return grad

    made: torch.Tensor = Noted.apply(h)  # type: ignore[no-untyped-call]
    return made


def order_of(of: Case) -> str:
    """What the first of two ranks does, in its order."""

    def noting(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def then(*arguments: Any) -> Any:
            note(what)
            return call(*arguments)

        return then

    def task(here: Any) -> Any:
        if here.rank:
            return own_part(of, here.rank)
        with pytest.MonkeyPatch.context() as patch:  # of what stands for the transport meanwhile
            for name, what in (("begin_all_to_all_rows", "b"), ("wait", "w")):
                patch.setattr(transport, name, noting(what, getattr(transport, name)))
            return own_part(of, here.rank)

    SEEN.clear()
    simulated.run(of.layout.mesh, task)
    return "".join(SEEN)


def test_halves_are_traded_once_each_way() -> None:
    """Of the rows of an even share both pieces of a rank's columns, forward and backward."""
    of = case(LAYOUTS["halves over 4"], Form(), "drawn", "odd")
    columns = 2 * INNER // 4
    assert checked(of) == [("all_to_all", "ep", of.index.numel() * columns * 8)] * 2


def test_nothing_is_computed_for_the_experts_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    of = case(LAYOUTS["gathered over 4"], Form("all"), "drawn", "even")
    seen: list[int] = []
    gate = torch.tanh

    def counted(h: torch.Tensor) -> torch.Tensor:
        seen.append(len(h))
        return gate(h)

    monkeypatch.setattr(torch, "tanh", counted)
    simulated.run(of.layout.mesh, lambda here: own_part(of, here.rank))
    assert sum(seen) == of.index.numel()


# -- no values, no ranks, wrong calls --------------------------------------------------------------


class Dry(Alone):
    """A rank whose collectives need no other one: nothing has memory."""

    def group(self, *axes: str) -> Any:
        return SimpleNamespace(group_name="dry run")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_values_shapes_are_those_of_a_run(layout: str) -> None:
    """A dry run: every rank sends as many rows to each, as near as they divide."""
    of = case(LAYOUTS[layout], Form(), "drawn", "odd")
    _, pieces = of.layout.place(0, of.layout.of_experts)
    own = EXPERTS // pieces
    _, cut = of.layout.place(0, of.layout.halves)
    shapes = ((5, WIDTH), (5, EACH), (own, 16 // cut, WIDTH), (own, WIDTH, 8 // cut))
    leaves = [torch.empty(s, device="meta", requires_grad=True) for s in shapes]
    index = torch.empty(5, EACH, dtype=torch.int64, device="meta")
    x, weights, *matrices = leaves
    with rank_state.using(Dry(of.layout.mesh, of.layout.mesh.device_count - 1)):
        made = experts(
            *(x, index, weights, *matrices),
            gate=of.form.gate,
            held=of.layout.held,
            dispatch=of.layout.dispatch,
            halves=of.layout.halves,
        )
        gradients = torch.autograd.grad(made.sum(), leaves)
    assert made.shape == (5, WIDTH)
    assert [g.shape for g in gradients] == [leaf.shape for leaf in leaves]


def _one_rank(**axes: Any) -> None:
    of = case(LAYOUTS["gathered over 2"], Form(), "drawn")
    tensors = [torch.ones(s, dtype=torch.float64) for s in ((1, 5), (4, 16, 5), (4, 5, 8))]
    experts(
        *(tensors[0], torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), *tensors[1:]),
        *axes.pop("biases", ()),
        gate=of.form.gate,
        **axes,
    )


@pytest.mark.parametrize("wrong", [-1, EXPERTS])
@pytest.mark.parametrize("layout", ["gathered over 2", "dispatched over 2"])
def test_a_route_to_no_expert_is_an_error(layout: str, wrong: int) -> None:
    of = case(LAYOUTS[layout], Form(), "drawn")
    of.index[0, 0] = wrong
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        simulated.run(of.layout.mesh, lambda here: _routes(of))


def _routes(of: Case) -> None:
    index = of.index[: of.tokens[0]]
    routes_of_each((index,), EXPERTS // 2, held=of.layout.held, dispatch=of.layout.dispatch)


def test_an_axis_is_gathered_or_dispatched() -> None:
    mesh = LAYOUTS["dispatched over 2 x 2"].mesh
    with pytest.raises(ProgramError, match=r"held='ep' and dispatch=.'ep', 'tp'. name one axis"):
        simulated.run(mesh, lambda here: _one_rank(held="ep", dispatch=("ep", "tp")))


def test_biases_are_of_the_same_experts() -> None:
    with pytest.raises(ProgramError, match=r"of \[4, 4, 8, 8\] experts"):
        _one_rank(biases=(torch.ones(8, 16), torch.ones(8, 5)))


def test_axes_of_one_rank_are_none() -> None:
    mesh = LAYOUTS["gathered over 2"].mesh
    with pytest.raises(ProgramError, match="no mesh is in use"):
        _one_rank(held="tp")
    simulated.run(mesh, lambda here: _one_rank(dispatch="tp"))


# -- on real processes -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from tests.warm_ranks import results_of

    return results_of("tests.runtime.dispatch_checks", tmp_path_factory.mktemp("dispatch"))


@pytest.mark.gloo
def test_processes_compute_the_whole(measured: dict[str, Any]) -> None:
    assert len(measured["cases"]) > 100
    wrong = {k: v for k, v in measured["cases"].items() if not max(v.values()) < LIMIT}
    assert not wrong


@pytest.mark.gloo
@pytest.mark.parametrize("how", ["all", "collectives kept", "routes kept"])
def test_what_runs_again_computes_the_same(measured: dict[str, Any], how: str) -> None:
    assert max(max(v.values()) for v in measured["again"][how].values()) < LIMIT


@pytest.mark.gloo
def test_counted_is_what_is_issued(measured: dict[str, Any]) -> None:
    """By a rank as much as its own tokens say; over all ranks as much as really travels, of which
    4 x d x rows to others' experts cross a link."""
    for issued in measured["issued"]:
        assert issued["counted"] == issued["formula"]
        assert sum(issued["given_bytes"]) == sum(issued["counted_bytes"])
        assert sum(issued["crossing_bytes"]) == 4 * issued["rows_to_others"] * WIDTH * 8
    assert any(i["rows_to_others"] for i in measured["issued"])


def test_the_cases_are_many() -> None:
    """Forms, routings and layouts differ from one another, so that none hides behind another."""
    every = itertools.product(LAYOUTS.values(), ROUTINGS)
    texts = {str((c.layout, c.index.tolist())) for c in (case(la, Form(), r) for la, r in every)}
    assert len(texts) == len(LAYOUTS) * len(ROUTINGS)
