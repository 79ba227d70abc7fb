"""Loss heads in chunks: which ops become one, what stands against it, and that programs compute
the model's loss and gradients wherever the vocabulary and the rows lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.nouns.mesh import Mesh
from autopar.rules.loss_heads import KIND, LossHead, NoHead, in_chunks, loss_heads
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage

BATCH, WORDS, WIDTH, CLASSES = 4, 6, 8, 12
Loss = Callable[[Any, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """``loss``: of the head's logits [b, s, v] and the labels."""

    def __init__(self, loss: Loss, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.loss = loss
        self.words = nn.Embedding(CLASSES, WIDTH)
        self.into, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self, self.head(self.into(self.words(ids)).tanh()), labels)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, CLASSES, (BATCH, WORDS), generator=generator) for _ in "ab")
    labels[0, 2] = labels[3, 5] = -100
    return {"ids": ids, "labels": labels}


def _flat(m: Any, z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten())


def _shifted(m: Any, z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z[:, :-1].reshape(-1, CLASSES), y[:, 1:].reshape(-1))


def _classes_second(m: Any, z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.transpose(1, 2), y)


def _in_float32(m: Any, z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.float().view(-1, CLASSES), y.view(-1), label_smoothing=0.1)


def _capped(m: Any, z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((torch.tanh(z / 3.0) * 3.0).view(-1, CLASSES), y.view(-1))


def _scaled(m: Any, z: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy((z * 0.0625).flatten(0, 1), y.flatten(), reduction="sum")
    return loss / 7


def _scaled_and_capped(m: Any, z: Tensor, y: Tensor) -> Tensor:
    return _capped(m, z / 4, y)


HEADS: dict[str, tuple[Callable[[], Model], float, float | None]] = {
    **{
        f.__name__.lstrip("_"): (partial(Model, f), scale, cap)
        for f, scale, cap in (
            (_flat, 1.0, None),
            (_shifted, 1.0, None),
            (_classes_second, 1.0, None),
            (_in_float32, 1.0, None),
            (_capped, 1.0, 3.0),
            (_scaled, 0.0625, None),
            (_scaled_and_capped, 0.25, 3.0),
        )
    },
    "a bias": (partial(Model, _flat, bias=True), 1.0, None),
    "a bias, capped": (partial(Model, _capped, bias=True), 1.0, 3.0),
    "tied": (partial(Model, _shifted, tied=True), 1.0, None),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.some(5)
def test_programs_compute_the_same(name: str) -> None:
    model, scale, cap = HEADS[name]
    torch.manual_seed(0)
    own = model()
    captured = capture_of(model, batch)
    (head,) = loss_heads(captured.graph)
    assert isinstance(head, LossHead)
    assert (head.scale, head.cap, bool(head.bias)) == (scale, cap, "bias" in name)
    made = replace(captured, graph=in_chunks(captured.graph, 3))
    assert not [op for op in made.graph.ops if op.kind == "cross_entropy"]
    split = 0
    for mesh, microbatches in (("tp=4", 1), ("dp_shard=2 x tp=2", 2), ("tp2=2 x tp=2", 1)):
        for seed in range(3):
            spread = random_stage(made, Mesh.parse(mesh), microbatches, seed)
            program = emitted(made, spread, microbatches)
            check(program, own, batch())
            split += "vocabulary=" in program.text
    assert split, "no spread splits the vocabulary"


def _read_twice(m: Any, z: Tensor, y: Tensor) -> Tensor:
    return _flat(m, z, y) + 1e-3 * z.logsumexp(-1).square().mean()


def _of_each_row(m: Any, z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").square().mean()


def _gated(m: Any, z: Tensor, y: Tensor) -> Tensor:
    return _flat(m, z.relu(), y)


def _part_of_the_vocabulary(m: Any, z: Tensor, y: Tensor) -> Tensor:
    return _flat(m, z[..., 2:], (y - 2).clamp(min=0))


NONE = {
    "read elsewhere": (_read_twice, "its logits are read elsewhere too, at "),
    "each row": (_of_each_row, "it gives a loss for each row"),
    "another op": (_gated, "between its product and it relu stands"),
    "a slice of columns": (_part_of_the_vocabulary, "slice moves the vocabulary"),
}


@pytest.mark.parametrize("name", NONE)
def test_others_stay_as_they_are_and_say_why(name: str) -> None:
    loss, reason = NONE[name]
    graph = capture_of(partial(Model, loss), batch).graph
    (head,) = loss_heads(graph)
    assert isinstance(head, NoHead)
    assert reason in head.reason
    assert in_chunks(graph, 4) == graph


def test_views_of_logits_become_views_of_what_the_product_reads() -> None:
    graph = in_chunks(capture_of(partial(Model, _shifted), batch).graph, 2)
    (loss,) = (op for op in graph.ops if op.kind == KIND)
    assert graph.tensors[loss.inputs[0]].shape == (BATCH * (WORDS - 1), WIDTH)
    assert graph.tensors[loss.inputs[2]].shape == (CLASSES, WIDTH)
    whole = capture_of(partial(Model, _shifted), batch).graph
    assert "head/linear" not in graph.tensors
    for name in graph.tensors.keys() & whole.tensors.keys():  # a name is one value
        assert graph.tensors[name].shape == whole.tensors[name].shape
