"""Regions of parameters, cutting of batches, settings: arithmetic without processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Sharding
from autopar.nouns.workload import Workload
from autopar.runtime.pytorch import ranks as rank_state
from autopar.runtime.pytorch.batches import cut_batch
from autopar.runtime.pytorch.materialise import materialise
from autopar.runtime.pytorch.optimizer import make_optimizer
from autopar.runtime.pytorch.parameters import (
    Buffer,
    Declared,
    Parameter,
    computing,
    cut,
    declared_in,
    lifted,
    local,
    region_shape,
)
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.units import unit_modules
from autopar.runtime.shared.planned_batch import OtherBatch
from autopar.runtime.shared.settings import ProgramError, Settings


class Alone(Ranks):
    """A rank of a mesh whose other ranks do not exist."""

    def __init__(self, mesh: Mesh, rank: int = 0) -> None:
        self.mesh, self.named = mesh.trimmed(), mesh.axes
        self.device = torch.device("cpu")
        self.rank = rank
        self.coordinates = {a: self._coordinate(rank, a) for a in self.mesh.axes}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_rank_without_a_row_has_nothing_to_update(optimizer: str) -> None:
    make_optimizer(Workload(model=nn.Identity, batch=dict, optimizer=optimizer), []).step()


@given(st.integers(0, 40), st.integers(1, 7))
def test_cut_is_torch_chunk(size: int, pieces: int) -> None:
    whole = torch.arange(size)
    chunks = [list(c) for c in whole.chunk(pieces)] if size else []
    cuts = [whole[cut((slice(0, size),), 0, pieces, i)] for i in range(pieces)]
    assert [list(c) for c in cuts if c.numel()] == chunks
    assert sum(c.numel() for c in cuts) == size


@given(st.integers(1, 3), st.integers(1, 3), st.integers(9, 30))
def test_two_axes_on_one_dim_cut_the_outer_first(outer: int, inner: int, size: int) -> None:
    mesh = Mesh(("cp", "tp"), (outer, inner))
    declared = Declared((size, 2), torch.float32, Sharding.parse("cp:S0 tp:S0"))
    whole = torch.arange(size)
    for i, part in enumerate(whole.chunk(outer)):
        for j, piece in enumerate(part.chunk(inner)):
            region = declared.region(mesh, {"cp": i, "tp": j})
            assert torch.equal(whole[region[0]], piece)
            assert region_shape(region)[1] == 2


def build(make: type[nn.Module], mesh: str = "tp=2", rank: int = 0) -> nn.Module:
    with rank_state.using(Alone(Mesh.parse(mesh), rank)):
        return make()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Parameter((5, 4), "tp:S0")
        self.second = self.first
        self.frozen = Parameter((4,), trainable=False)
        self.table = Buffer((6,), "tp:S0", "int64", persistent=False)


@pytest.mark.parametrize(("rank", "rows"), [(0, 3), (1, 2)])
def test_parameters_are_local_pieces_without_memory(rank: int, rows: int) -> None:
    model = build(Tied, rank=rank)
    assert model.first.is_meta
    parameters, buffers = declared_in(model)
    assert parameters["first"].shape == (5, 4)
    assert isinstance(model.first, torch.Tensor)
    assert tuple(model.first.shape) == (rows, 4)
    assert set(parameters) == {"first", "frozen"}
    assert buffers["table"].dtype is torch.int64
    assert not model.frozen.requires_grad
    assert "table" not in model.state_dict()
    materialise(model, torch.device("cpu"))
    assert model.first is model.second
    assert not model.first.is_meta


def test_lifting_changes_floats_only() -> None:
    with lifted(torch.float64):
        model = build(Tied)
    parameters, buffers = declared_in(model)
    assert parameters["first"].dtype is torch.float64
    assert buffers["table"].dtype is torch.int64


def test_local_replaces_float32_only() -> None:
    wide, narrow = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))
    assert local(wide) is wide
    with computing(torch.bfloat16):
        assert local(wide).dtype is torch.bfloat16
        assert local(narrow) is narrow
        local(wide).sum().backward()  # type: ignore[no-untyped-call]
    assert wide.grad is not None
    assert wide.grad.dtype is torch.float32


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


def test_parameters_of_another_make_are_refused() -> None:
    with pytest.raises(ProgramError, match="weight of the program was not made by Parameter"):
        declared_in(Foreign())


@pytest.mark.parametrize("sharding", ["dp_shard:S0", "tp:P"])
def test_shardings_that_no_parameter_has(sharding: str) -> None:
    with rank_state.using(Alone(Mesh.parse("tp=2"))), pytest.raises(ProgramError, match="sharding"):
        Parameter((4, 4), sharding)


def test_a_rank_without_rows_is_refused() -> None:
    with (
        rank_state.using(Alone(Mesh.parse("tp=4"), 3)),
        pytest.raises(ProgramError, match="no rows"),
    ):
        Parameter((9, 4), "tp:S0")  # 3 + 3 + 3 + 0


def test_a_program_outside_of_a_trainer_says_what_to_do() -> None:
    with pytest.raises(ProgramError, match=r"autopar\.load"):
        Parameter((2,))


@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 2))
def test_batch_is_cut_into_microbatches_first(
    micro: int, outer: int, inner: int, rows: int
) -> None:
    mesh = Mesh(("dp_replicate", "dp_shard", "tp"), (outer, inner, 2))
    samples = torch.arange(micro * outer * inner * rows)
    seen = []
    for m in range(micro):
        for rank in range(0, mesh.device_count, 2):
            pieces = cut_batch({"x": samples}, Alone(mesh, rank), Settings(microbatches=micro))
            other = cut_batch({"x": samples}, Alone(mesh, rank + 1), Settings(microbatches=micro))
            assert torch.equal(pieces[m]["x"], other[m]["x"])
            seen.append(pieces[m]["x"])
    assert torch.equal(torch.cat(seen), samples)


def test_whole_inputs_and_constants_are_not_cut() -> None:
    settings = Settings(microbatches=2, whole_inputs=("positions",))
    batch = {"x": torch.arange(8), "positions": torch.arange(3), "flag": True}
    pieces = cut_batch(batch, Alone(Mesh.parse("dp_shard=2")), settings)
    assert [p["x"].tolist() for p in pieces] == [[0, 1], [4, 5]]
    assert all(p["positions"].tolist() == [0, 1, 2] and p["flag"] is True for p in pieces)


@pytest.mark.parametrize(
    "wrong", [{"zero": 4}, {"microbatches": 0}, {"precision": "int8"}], ids=lambda w: next(iter(w))
)
def test_settings_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ProgramError, match=next(iter(wrong))):
        Settings(**wrong)  # type: ignore[arg-type]


def test_units_match_one_path_component() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Sequential(nn.ReLU()) for _ in range(2))})
    assert unit_modules(model, ["layers.*"]) == list(model["layers"])  # type: ignore[call-overload]
    with pytest.raises(ProgramError, match=r"blocks\.\*"):
        unit_modules(model, ["blocks.*"])


def test_numbers_that_a_program_was_made_for_are_asked_of_every_sample() -> None:
    settings = Settings(alike={"grid": (2, 3)})
    grid = torch.tensor([[2, 3]] * 4)
    alone = Alone(Mesh.parse("dp_shard=2"))
    assert [len(p["grid"]) for p in cut_batch({"grid": grid}, alone, settings)] == [2]
    grid[3, 1] = 4  # of the other rank
    with pytest.raises(OtherBatch, match=r"\[2, 4\] at sample 3"):
        cut_batch({"grid": grid}, alone, settings)
