"""What `predict` puts together of ranks' pieces is in the order of the whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.nouns.axes import SEQUENCES
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Sharding
from autopar.runtime.pytorch import predict
from autopar.runtime.pytorch.collectives import own_piece
from autopar.runtime.pytorch.zigzag import own_zigzag
from tests.emit import simulated


@pytest.mark.parametrize(
    ("mesh", "sharding"),
    [
        ("cp=4", "cp:S1"),
        ("cp=4", "cp:S1z"),
        ("cp=2 x cp_head=2", "cp:S1z cp_head:S1z"),
        ("cp=2 x tp=2", "cp:S1z tp:S1"),
        ("cp=2 x tp=2", "cp:S1z tp:S2"),
    ],
)
def test_pieces_are_in_order(mesh: str, sharding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(2 * 16 * 4).view(2, 16, 4)
    held = Sharding.parse(sharding)

    def joined(x: Tensor, dim: int, axis: str) -> Tensor:
        return torch.cat(simulated._here.world.exchange(x, axis), dim)

    monkeypatch.setattr(predict, "_joined", joined)

    def task(here: Any) -> Tensor:
        x = whole
        along = [a for a, p in held.placements if a in SEQUENCES and p.zigzag]
        if along:
            x = own_zigzag(x, 1, here.index(*along), here.mesh.ways(along))
        for axis, placement in held.placements:
            if axis not in along:
                x = own_piece(x, placement.dim, axis)
        ranks: Any = SimpleNamespace(group=lambda axis: axis, size=here.mesh.size)
        return predict._whole(x, held, ranks)

    results, _ = simulated.run(Mesh.parse(mesh), task)
    assert all(torch.equal(x, whole) for x in results)
