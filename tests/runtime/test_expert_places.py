"""Pieces whose experts lie otherwise than in the model: what files, initial values and comparisons
have of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar.nouns.expert_placement import inverse
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Sharding
from autopar.runtime.pytorch.checkpoint import read, write
from autopar.runtime.pytorch.checkpoint_pieces import Piece, Pieces
from autopar.runtime.pytorch.expert_places import (
    in_places,
    layer_of,
    name_layers,
    rows_of,
    runs,
)
from autopar.runtime.pytorch.held import Held
from autopar.runtime.pytorch.initialize import Target
from autopar.runtime.pytorch.parameters import Declared, Parameter, declared_in
from autopar.runtime.pytorch.saved_names import Part, in_parts
from autopar.runtime.pytorch.weights import load_weights, save_weights
from autopar.runtime.shared.settings import ProgramError, Settings
from tests.emit import simulated

EXPERTS, WIDTH = 6, 4
ORDER = (4, 5, 0, 2, 3, 1)
OTHER = (1, 0, 3, 2, 5, 4)
SHAPE = (EXPERTS, WIDTH, 2)
WHOLE = torch.arange(float(EXPERTS * WIDTH * 2)).reshape(SHAPE)


def region(first: int, last: int, columns: slice = slice(0, WIDTH)) -> tuple[slice, ...]:
    return slice(first, last), columns, slice(0, 2)


def placed(first: int, last: int, order: tuple[int, ...]) -> Piece:
    """What a rank of these places has, with values."""
    own = torch.stack([WHOLE[e] for e in order[first:last]])
    return Piece(own, region(first, last), SHAPE, order)


def empty_like(piece: Piece) -> Piece:
    return Piece(torch.full_like(piece.tensor, -1.0), piece.region, piece.shape, piece.order)


def test_runs_are_of_neighbours_that_are_neighbours_in_the_model() -> None:
    made = [(rows, own[0]) for rows, own in runs(region(0, 6), ORDER)]
    assert made == [
        (slice(0, 2), slice(4, 6)),
        (slice(2, 3), slice(0, 1)),
        (slice(3, 5), slice(2, 4)),
        (slice(5, 6), slice(1, 2)),
    ]
    assert [*runs(region(2, 2), ORDER)] == []


@pytest.mark.parametrize("shape", [(), (EXPERTS,)])
def test_what_lies_in_order_is_one_part_a_scalar_too(shape: tuple[int, ...]) -> None:
    leaf = nn.Parameter(torch.ones(shape))
    whole = tuple(slice(0, size) for size in shape)
    known = Declared(shape, leaf.dtype, Sharding(()))
    assert Held("scale", known, leaf, whole, (), ()).parts(leaf) == [(whole, leaf)]
    piece = Piece.whole(leaf.detach())
    assert piece.parts() == [piece]


@pytest.mark.parametrize("order", [ORDER, OTHER, None])
@pytest.mark.parametrize("places", [(0, 6), (0, 3), (2, 5), (3, 3)])
def test_a_piece_is_its_parts(order: tuple[int, ...] | None, places: tuple[int, int]) -> None:
    own = region(*places, slice(1, 3))
    expected = torch.stack([WHOLE[e, 1:3] for e in (order or range(EXPERTS))])[slice(*places)]
    assert torch.equal(rows_of(WHOLE, own, order), expected)
    again = torch.full_like(expected, -1.0)
    for part in Piece(again, own, SHAPE, order).parts():
        part.tensor.copy_(WHOLE[part.region])
    assert torch.equal(again, expected)
    target = torch.empty_like(expected)
    Target(target, own, order=order).take(WHOLE)
    assert torch.equal(target, expected)


def test_checkpoints_are_of_the_model_whoever_held_what(tmp_path: Path) -> None:
    write(tmp_path / "c", {"model.up": placed(0, 6, ORDER)})
    plain = Piece.whole(torch.zeros(SHAPE))
    read(tmp_path / "c", {"model.up": plain})
    assert torch.equal(plain.tensor, WHOLE)
    for first, last in ((0, 6), (3, 6), (1, 2)):
        wanted = placed(first, last, OTHER)
        given = empty_like(wanted)
        read(tmp_path / "c", {"model.up": given})
        assert torch.equal(given.tensor, wanted.tensor)


def test_a_checkpoint_that_was_written_in_order_is_read_by_place(tmp_path: Path) -> None:
    write(tmp_path / "c", {"model.up": Piece.whole(WHOLE)})
    given = empty_like(placed(2, 6, ORDER))
    read(tmp_path / "c", {"model.up": given})
    assert torch.equal(given.tensor, placed(2, 6, ORDER).tensor)


# One tensor an expert, as transformers saves them; both halves of all at once.
PARTS = (
    tuple(Part(f"{e}.w", (slice(e, e + 1), *region(0, 6)[1:]), (0,)) for e in range(EXPERTS)),
    (
        Part("gate", region(0, 6, slice(0, 2)), ()),
        Part("value", region(0, 6, slice(2, 4)), ()),
    ),
)


@pytest.mark.parametrize("parts", PARTS, ids=["an expert each", "halves"])
def test_weights_are_of_the_model(tmp_path: Path, parts: tuple[Part, ...]) -> None:
    save_weights(tmp_path, {"up": placed(0, 6, ORDER)}, parts={"up": parts})
    for part in parts:
        plain = {part.name: Piece.whole(torch.zeros(part.shape))}
        load_weights(tmp_path, plain, {}, frozenset())
        assert torch.equal(plain[part.name].tensor, WHOLE[part.region].reshape(part.shape))
    given: Pieces = {"up": empty_like(placed(1, 5, OTHER))}
    load_weights(tmp_path, given, {}, frozenset(), {"up": parts})
    assert torch.equal(given["up"].tensor, placed(1, 5, OTHER).tensor)


def test_a_name_comes_as_often_as_a_rank_has_pieces_of_it() -> None:
    names = [name for name, _ in in_parts({"up": placed(0, 3, ORDER)}, {"up": PARTS[1]})]
    assert sorted(names) == ["gate", "gate", "value", "value"]


class Experts(nn.Module):
    """As a program declares them, on one of three ranks."""

    def __init__(self, marked: bool = True) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.up = Parameter(SHAPE, "ep:S0", placed=marked)
        self.layer.router = Parameter((EXPERTS, WIDTH))
        self.other = nn.Module()


MESH = Mesh(("ep",), (3,))
RANKS = ((4, 5), (0, 2), (3, 1))


def test_only_what_is_marked_lies_by_place_and_routes_have_the_models_numbers() -> None:
    def task(here: Any) -> Any:
        model = Experts()
        declared, _ = declared_in(model)
        placed = {"layer": RANKS, "of.another.stage": RANKS}
        return model, name_layers(model, placed, declared, here.mesh)

    ((model, orders), *others), _ = simulated.run(MESH, task)
    assert [orders, *(own for _, own in others)] == [{"layer.up": ORDER}] * 3
    index = torch.tensor([[0, 4], [5, 1]])
    assert in_places(index, model.layer).tolist() == [
        [inverse(ORDER)[e] for e in row] for row in index.tolist()
    ]
    assert in_places(index, model.other) is index
    assert in_places(index, None) is index
    layer = layer_of(model.layer)
    assert layer is not None
    assert layer.name == "layer"


@pytest.mark.parametrize(
    ("ranks", "marked", "text"),
    [
        (((0, 1), (2, 3)), True, "4 experts on 2 ranks for layer.up, of which 3 ranks hold 6"),
        (RANKS, False, "none of whose parameters is declared with placed=True"),
    ],
)
def test_a_table_that_the_parameters_do_not_fit_is_refused(
    ranks: tuple[tuple[int, ...], ...], marked: bool, text: str
) -> None:
    def task(here: Any) -> None:
        model = Experts(marked)
        declared, _ = declared_in(model)
        with pytest.raises(ProgramError, match=text):
            name_layers(model, {"layer": ranks}, declared, here.mesh)

    simulated.run(MESH, task)


def test_settings_take_all_experts_once() -> None:
    with pytest.raises(ProgramError, match="each of the experts 0 to 3 once"):
        Settings(placed={"layer": ((0, 1), (1, 2))})
