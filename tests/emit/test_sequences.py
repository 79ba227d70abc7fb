"""Models that do things with the tokens of a sample, split along sequences: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontends.shared.captured import Captured
from autopar.lowering.lowered import LoweringError
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from autopar.rules.pieces import BatchMixed
from tests.emit.harness import capture_of, check, emitted, reference, relative, run

BATCH, LENGTH, WIDTH, HEADS, WORDS = 4, 8, 8, 2, 11
MESHES = (
    Mesh(("dp_shard",), (2,)),
    Mesh(("cp",), (2,)),
    Mesh(("cp",), (4,)),
    Mesh(("dp_replicate", "dp_shard", "cp"), (1, 2, 2)),
    Mesh(("dp_replicate", "cp", "tp"), (2, 2, 2)),
)
Body = Callable[[Any, Any], Any]


class Model(nn.Module):
    """tokens [b, s], labels [b, s] -> a mean over labels, with what ``body`` does between."""

    def __init__(self, body: Body, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.loss = body, loss
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.over = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(places)
        return self.loss(self.head(x + self.body(self, x)), labels)


def _heads(m: Any, x: Any) -> Any:
    return (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (m.q, m.k, m.v))


def _attention(m: Any, x: Any, **options: Any) -> Any:
    mixed = F.scaled_dot_product_attention(*_heads(m, x), **options)
    return mixed.transpose(1, 2).flatten(2)


def _masked(m: Any, x: Any) -> Any:
    rows = torch.arange(LENGTH)
    near = (rows[:, None] >= rows) & (rows[:, None] - rows < 3)
    return _attention(m, x, attn_mask=near)


def _by_hand(m: Any, x: Any) -> Any:
    q, k, v = _heads(m, x)
    scores = q @ k.mT + torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def _shifted(m: Any, x: Any) -> Any:
    """As RWKV mixes each token with the one before it."""
    return m.q(F.pad(x, (0, 0, 1, 0))[:, :-1]) * m.k(x).sigmoid()


def _running_mean(m: Any, x: Any) -> Any:
    return m.q(x).cumsum(1) / torch.arange(1, LENGTH + 1)[:, None]


def _convolved(m: Any, x: Any) -> Any:
    return m.over(x.mT)[..., :LENGTH].mT


def _pooled(m: Any, x: Any) -> Any:
    return x * m.q(x.mean(1, keepdim=True)).sigmoid()


def _normed_over_tokens(m: Any, x: Any) -> Any:
    return m.q(x).softmax(1)


def _joined(m: Any, x: Any) -> Any:
    """As layers of experts take their tokens."""
    rows = x.reshape(-1, WIDTH)
    return (m.q(rows).softmax(-1) * m.k(rows)).view(x.shape)


def _joined_and_sorted(m: Any, x: Any) -> Any:
    rows = m.q(x).reshape(-1, WIDTH)
    return rows.sort(0).values.view(x.shape)


def _joined_and_attended(m: Any, x: Any) -> Any:
    """Of a table, the tokens of the first sample see the first rows alone."""
    q, k, _ = _heads(m, x.reshape(1, -1, WIDTH))
    rows = m.places.weight.expand(1, -1, -1).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q + k, rows, rows, is_causal=True)
    return mixed.transpose(1, 2).flatten(2).view(x.shape)


def _joined_and_summed(m: Any, x: Any) -> Any:
    rows = m.q(x).reshape(-1, WIDTH)
    return x * (rows - rows.mean(0)).view(x.shape)


def _turned(m: Any, x: Any) -> Any:
    return m.q(x.flip(1))


def _tokens_first(m: Any, x: Any) -> Any:
    return m.q(x.transpose(0, 1)).tanh().transpose(0, 1)


def _first_token(m: Any, x: Any) -> Any:
    return x * m.q(x[:, :1])


def _halves(m: Any, x: Any) -> Any:
    """The sequence as two: a rank with a piece of it has one of them, or none."""
    return m.q(x.unflatten(1, (2, -1)).flip(1).flatten(1, 2))


def _mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _classes_second(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.mT, labels)


def _shifted_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """As transformers shifts them."""
    return _mean(logits, F.pad(labels, (0, 1), value=-100)[:, 1:])


def _shifted_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _own_mean(logits: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(logits.mT, labels.clamp(min=0), reduction="none")
    kept = (labels >= 0).float()
    return (each * kept).sum() / kept.sum()


def _moved_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Not as they are given: what is moved was made of them."""
    kept = torch.where(labels == 3, -100, labels)
    return _mean(logits, F.pad(kept, (0, 1), value=-100)[:, 1:])


def _labels_of_others(logits: Tensor, labels: Tensor) -> Tensor:
    """Each sample learns the labels of the next one."""
    return _mean(logits, torch.cat([labels[1:], torch.full_like(labels[:1], -100)]))


def _last_token(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, -1], labels[:, -1].clamp(min=0))


BODIES: dict[str, Body] = {
    "causal": partial(_attention, is_causal=True),
    "not causal": _attention,
    "dropout": partial(_attention, is_causal=True, dropout_p=0.2),
    "masked": _masked,
    "by hand": _by_hand,
    "shifted": _shifted,
    "running mean": _running_mean,
    "convolved": _convolved,
    "pooled": _pooled,
    "normed over tokens": _normed_over_tokens,
    "joined": _joined,
    "joined and sorted": _joined_and_sorted,
    "joined and attended": _joined_and_attended,
    "joined and summed": _joined_and_summed,
    "turned": _turned,
    "tokens first": _tokens_first,
    "first token": _first_token,
    "halves": _halves,
}
LOSSES = {
    loss.__name__.strip("_"): loss
    for loss in (
        *(_classes_second, _shifted_labels, _shifted_logits, _own_mean, _last_token),
        *(_moved_labels, _labels_of_others),
    )
}
REFUSED = {"joined and attended", "joined and sorted"}
"""What must be refused, since samples and tokens lie in one dim of which it needs the whole."""


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(WORDS, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(WORDS, (BATCH, LENGTH), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return {"tokens": tokens, "labels": labels}


@cache
def captured_of(body: Body, loss: Callable[[Tensor, Tensor], Tensor]) -> Captured:
    return capture_of(lambda: Model(body, loss), batch)


def right(body: Body, loss: Callable[[Tensor, Tensor], Tensor], mesh: Mesh, micro: int) -> None:
    made = emitted(captured_of(body, loss), Spread(mesh), micro)
    torch.manual_seed(0)
    check(made, Model(body, loss), batch())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", sorted(BODIES.keys() - REFUSED))
@pytest.mark.some(40)
def test_what_is_done_with_tokens(name: str, mesh: Mesh) -> None:
    apart = mesh.size("dp_shard") > 1 and name != "joined and summed"  # a mean over all samples
    right(BODIES[name], _mean, mesh, 2 if apart else 1)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_over_tokens(name: str, mesh: Mesh) -> None:
    body = BODIES["causal"]
    if name == "labels_of_others" and len([a for a in mesh.batch_axes if mesh.size(a) > 1]) > 1:
        with pytest.raises(LoweringError, match="need other samples"):
            right(body, LOSSES[name], mesh, 1)
        return
    right(body, LOSSES[name], mesh, 1)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_needs_all_of_a_joined_dim_is_refused(name: str) -> None:
    with pytest.raises(BatchMixed, match="do not lie one behind the other"):
        right(BODIES[name], _mean, MESHES[1], 1)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_in_half_precision(mesh: Mesh) -> None:
    """Numbers apart, every rank computes in it, and what backward needs is there."""
    captured = capture_of(lambda: Model(BODIES["causal"], _mean), batch)
    made = emitted(captured, Spread(mesh), precision="bfloat16")
    torch.manual_seed(0)
    model = Model(BODIES["causal"], _mean)
    wanted, got = reference(model, batch()), run(made, model, batch(), half=True)
    assert relative(got.loss, wanted.loss) < 0.02
    assert got.gradients.keys() == wanted.gradients.keys()
