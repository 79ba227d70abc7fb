"""Checkpoints on one process: whole or not at all, and errors that say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autopar.runtime.pytorch import checkpoint
from autopar.runtime.pytorch.checkpoint import load_plain, read, write
from autopar.runtime.pytorch.checkpoint_pieces import Piece
from autopar.runtime.shared.checkpoint_folder import CheckpointError, find


def pieces(value: float, rows: int = 4) -> dict[str, Piece]:
    return {"model.a": Piece.whole(torch.full((rows, 2), value))}


def test_reads_any_region_of_what_was_written(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    halves = {
        f"half{i}": Piece(whole[i * 3 : i * 3 + 3], (slice(i * 3, i * 3 + 3), slice(0, 4)), (6, 4))
        for i in range(2)
    }
    write(tmp_path / "c", {"model.a": Piece.whole(whole), **{n: p for n, p in halves.items() if 0}})
    region = (slice(1, 5), slice(2, 3))
    target = Piece(torch.zeros(4, 1), region, (6, 4))
    empty = Piece(torch.zeros(0, 4), (slice(6, 6), slice(0, 4)), (6, 4))
    read(tmp_path / "c", {"model.a": target})
    assert torch.equal(target.tensor, whole[region])
    read(tmp_path / "c", {"model.a": empty})


def test_a_cut_off_write_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "c"
    write(folder, pieces(1.0))

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save", fail)
        with pytest.raises(CheckpointError, match="no space"):
            write(folder, pieces(2.0))
    loaded = pieces(0.0)
    read(folder, loaded)
    assert set(loaded["model.a"].tensor.flatten().tolist()) == {1.0}
    # and dying between the two renames leaves the old one under its other name
    folder.rename(tmp_path / ".c.old")
    read(folder, loaded)
    assert set(loaded["model.a"].tensor.flatten().tolist()) == {1.0}
    write(folder, pieces(3.0))
    read(folder, loaded)
    assert set(loaded["model.a"].tensor.flatten().tolist()) == {3.0}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_folder_with_other_things_is_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        write(tmp_path, pieces(1.0))
    assert (tmp_path / "thesis.txt").exists()


def test_errors_name_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        find(tmp_path / "none")
    write(tmp_path / "c", pieces(1.0))
    target = {**pieces(0.0), "model.b": Piece.whole(torch.zeros(1))}
    with pytest.raises(CheckpointError, match=r"has no model\.b \(1 of 2 tensors\)"):
        read(tmp_path / "c", target)
    assert set(target["model.a"].tensor.flatten().tolist()) == {0.0}
    with pytest.raises(CheckpointError, match=r"shape \[4, 2\] in .* and \[5, 2\] in the model"):
        read(tmp_path / "c", pieces(0.0, rows=5))


def test_tied_parameters_are_found_under_any_name(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2, bias=False)})
    model["b"] = torch.nn.Linear(2, 2, bias=False)
    model["b"].weight = model["a"].weight
    values = torch.arange(4.0).reshape(2, 2)
    step = Piece.whole(torch.tensor(7))
    write(tmp_path / "c", {"model.b.weight": Piece.whole(values), "step": step})
    assert load_plain(tmp_path / "c", model) == 7
    weight = model["a"].weight
    assert isinstance(weight, torch.Tensor)
    assert torch.equal(weight.detach(), values)
