"""Features of images among the embeddings of words: programs place those of their own samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontends.shared.captured import Captured
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage

BATCH, WORDS, WIDTH, ROWS, IMAGE = 4, 6, 8, 2, 9
Place = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, place: Place) -> None:
        super().__init__()
        self.words, self.features = nn.Embedding(IMAGE + 1, WIDTH), nn.Linear(5, WIDTH)
        self.head = nn.Linear(WIDTH, IMAGE)
        self.place = place

    def forward(self, ids: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        x = self.place(self.words(ids), ids == IMAGE, self.features(images))
        return F.cross_entropy(self.head(x.tanh()).flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    """Each sample has its images' places elsewhere."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randint(0, IMAGE, (BATCH, *shape), generator=generator)

    order = torch.rand(BATCH, WORDS, generator=generator).argsort(1)
    ids = torch.where(order < ROWS, IMAGE, draw(WORDS))
    images = torch.randn(BATCH, ROWS, 5, generator=generator)
    return {"ids": ids, "images": images, "labels": draw(WORDS)}


def _expanded(x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return x.masked_scatter(mask.unsqueeze(-1).expand_as(x), y)


def _broadcast(x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return x.masked_scatter(mask.unsqueeze(-1), y.reshape(-1, WIDTH))


def _written(x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[mask] = y.flatten(0, 1)
    return x


def _by_entries(x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """A mask of its own for every entry, of which every sample hides as many."""
    return x.masked_scatter(mask.unsqueeze(-1) & (torch.arange(WIDTH) % 2 == 0), y[..., ::2])


def _checked(x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """As transformers does."""
    torch._check_tensor_all(mask.sum() * WIDTH == y.numel())  # type: ignore[no-untyped-call]
    return _broadcast(x, mask, y)


SPELLINGS = {
    f.__name__.lstrip("_"): f for f in (_expanded, _broadcast, _written, _by_entries, _checked)
}


def made(name: str) -> Captured:
    return capture_of(partial(Model, SPELLINGS[name]), batch)


@pytest.mark.parametrize("name", SPELLINGS)
def test_numbers(name: str) -> None:
    torch.manual_seed(0)
    captured, model = made(name), Model(SPELLINGS[name])
    kinds = [op.kind for op in captured.graph.ops]
    assert kinds.count("place_rows") == 1
    assert not {"cumsum", "index_select"} & {*kinds}
    for mesh in ("dp_shard=2 x tp=2", "dp_replicate=4"):
        for seed in (0, 1):
            stage = random_stage(captured, Mesh.parse(mesh), 2 if seed else 1, seed)
            check(emitted(captured, stage), model, batch())


def test_rows_may_be_more_where_no_samples_are_apart() -> None:
    """Torch takes the first of them; of samples, and of what is assigned, they are as many."""
    texts = {name: emitted(made(name), Spread(Mesh((), ()))).text for name in SPELLINGS}
    assert all("place_rows(" in text for text in texts.values())
    assert not any("more=True" in text for text in texts.values())
    flat = capture_of(partial(Model, _flat), batch)
    assert "more=True)" in emitted(flat, Spread(Mesh((), ()))).text


def _flat(x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """Tokens of all samples in one row."""
    rows = x.flatten(0, 1).masked_scatter(mask.flatten().unsqueeze(-1), y)
    return rows.view_as(x)
