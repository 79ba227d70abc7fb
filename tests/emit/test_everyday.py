"""What people write by hand every day: losses with their reductions, library layers, masks.

Each is captured, cut by random legal decisions on data and model axes, and compared with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from autopar.frontends.shared.captured import Captured
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from autopar.rules.batch import batch_flow
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage

MESHES = ("dp_shard=2 x tp=2", "dp_replicate=4", "tp=4")
CLASSES, SAMPLES = 6, 8
Loss = Callable[[Tensor, Tensor], Tensor]


def _hot(y: Tensor) -> Tensor:
    return F.one_hot(y, CLASSES).float()


def _focal(x: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(x, y, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def _masked(x: Tensor, y: Tensor) -> Tensor:
    keep = (y > 1).float()
    return (F.cross_entropy(x, y, reduction="none") * keep).sum() / keep.sum()


def _per_pixel(x: Tensor, y: Tensor) -> Tensor:
    """[b, c, s] against [b, s]"""
    places = torch.stack((y, (y + 1) % CLASSES), 1)
    each = F.cross_entropy(x.unsqueeze(2) * torch.ones(2), places, reduction="none")
    return (each.mean(1) ** 2).mean()


def _ignored(x: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, CLASSES)
    return F.cross_entropy(x, y, weight=weight, ignore_index=2)


LOSSES: dict[str, Loss] = {
    "focal": _focal,
    "masked mean": _masked,
    "per pixel": _per_pixel,
    "class weights, some ignored": _ignored,
    "soft labels": lambda x, y: F.cross_entropy(x, F.softmax(_hot(y), -1), label_smoothing=0.1),
    "nll of log_softmax": lambda x, y: F.nll_loss(F.log_softmax(x, -1), y, ignore_index=1),
    "nll of a view": lambda x, y: F.nll_loss(F.log_softmax(x[:, None], -1).flatten(0, 1), y),
    "nll alone": lambda x, y: F.nll_loss(x.sigmoid().log(), y, ignore_index=1),
    "nll, a sum": lambda x, y: F.nll_loss(x, y, reduction="sum") / SAMPLES,
    "binary": lambda x, y: F.binary_cross_entropy(x.sigmoid(), _hot(y)),
    "binary logits": lambda x, y: F.binary_cross_entropy_with_logits(x, _hot(y)),
    "positive weights": lambda x, y: F.binary_cross_entropy_with_logits(
        x, _hot(y), pos_weight=torch.linspace(1, 3, CLASSES)
    ),
    "weights and positive weights": lambda x, y: F.binary_cross_entropy_with_logits(
        x, _hot(y), _hot(y) + 0.5, pos_weight=torch.linspace(1, 3, CLASSES)
    ),
    "mse": lambda x, y: F.mse_loss(x, _hot(y)),
    "l1": lambda x, y: F.l1_loss(x, _hot(y), reduction="sum"),
    "smooth l1": lambda x, y: F.smooth_l1_loss(x, _hot(y), beta=0.5),
    "huber": lambda x, y: F.huber_loss(x, _hot(y), delta=0.3),
    "distillation": lambda x, y: F.kl_div(
        F.log_softmax(x / 2, -1), F.softmax(x.detach().roll(1, -1), -1), reduction="batchmean"
    ),
    "cosine": lambda x, y: (1 - F.cosine_similarity(x, _hot(y) + 0.1, dim=-1)).mean(),
    "normalised": lambda x, y: (F.normalize(x, dim=-1) * _hot(y)).sum(-1).square().mean(),
    "triplet": lambda x, y: F.triplet_margin_loss(x, x.roll(1, -1), x.roll(2, -1) * 1.5),
    "distance": lambda x, y: F.pairwise_distance(x, _hot(y)).mean().sum(),
    "least and where": lambda x, y: (
        (x.min(-1).values - torch.hstack([x, x]).argmin(-1) * x.min(1, keepdim=True)[0].squeeze(1))
        .square()
        .mean()
    ),
    "vectors": lambda x, y: (
        (x @ torch.linspace(0, 1, CLASSES) * (torch.arange(4.0) @ torch.ones(4))).square().mean()
    ),
    "grid": lambda x, y: (
        (x * sum(torch.meshgrid(torch.arange(1), torch.arange(6), indexing="ij"))).square().mean()
    ),
    "log sigmoid": lambda x, y: -F.logsigmoid(x * (2 * _hot(y) - 1)).mean(),
}


class Classifier(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.down(torch.tanh(self.up(x))), y)


def _labelled(*shape: int) -> dict[str, Tensor]:
    return {"x": torch.randn(SAMPLES, *shape), "y": torch.arange(SAMPLES) % CLASSES}


def _verified(made: Captured, model: nn.Module, batch: dict[str, Tensor], mesh: str) -> None:
    for seed in range(2):
        spread = random_stage(made, Mesh.parse(mesh), 1, seed)
        check(emitted(made, spread), model, batch)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.some(13)
def test_losses(name: str) -> None:
    torch.manual_seed(0)
    model, batch = Classifier(LOSSES[name]), _labelled(4)
    made = capture_of(lambda: Classifier(LOSSES[name]), lambda: _labelled(4))
    for mesh in MESHES[:2]:
        _verified(made, model, batch, mesh)


def test_losses_of_single_tokens_are_split_over_the_vocabulary() -> None:
    """As the mean is; and they pass through batches in pieces."""
    made = capture_of(lambda: Classifier(_focal), lambda: _labelled(4))
    ops = {"down/linear": "tp:n", "down/add": "tp:e1", "cross_entropy": "tp:v"}
    stored = {"down.weight": "tp:S0", "down.bias": "tp:S0"}
    mesh = Mesh.parse("dp_shard=2 x tp=2")
    program = emitted(made, Spread(mesh, ops=ops, parameters=stored), 2)
    assert 'count=None, vocabulary=6, axis="tp")' in program.text
    torch.manual_seed(0)
    result = check(program, Classifier(_focal), _labelled(4))
    assert {kind for kind, _, _ in result.log} == {"all_reduce"}


class Telling(Classifier):
    """As nanoGPT does: what was predicted goes along with the loss."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self.down(torch.tanh(self.up(x)))
        return logits, self.loss(logits, y)


def test_the_only_scalar_of_a_tuple_is_the_loss() -> None:
    torch.manual_seed(0)
    made = capture_of(lambda: Telling(_focal), lambda: _labelled(4))
    _verified(made, Telling(_focal), _labelled(4), MESHES[0])


class Contrasting(nn.Module):
    """Every sample meets every other; the labels are the samples' own numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 6), nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = F.normalize(self.left(x), dim=-1), F.normalize(self.right(x.cos()), dim=-1)
        scores = self.scale.exp() * a @ b.T
        own = torch.arange(SAMPLES)
        pushed = F.logsigmoid(scores * (2 * torch.eye(SAMPLES) - 1)).mean()
        return F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own) / 2 - pushed


@pytest.mark.parametrize("mesh", MESHES)
def test_contrastive_losses(mesh: str) -> None:
    torch.manual_seed(0)
    made = capture_of(Contrasting, lambda: _labelled(4))
    _verified(made, Contrasting(), _labelled(4), mesh)


# -- layers ----------------------------------------------------------------------------------------


class Attending(nn.Module):
    """nn.MultiheadAttention turns batch and sequence around inside."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.weights = weights

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.mix(x, x, x, need_weights=self.weights)[0]
        return F.cross_entropy(out.mean(1)[:, :CLASSES], y)


class OneHead(nn.Module):
    """Attention over batch, sequence, width: no dim of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        seen = (x[:, :, 0] > -1.0)[:, None, :] | torch.eye(4, dtype=torch.bool)
        x = F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=seen)
        x = x + F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True)
        return F.cross_entropy(x.mean(1)[:, :CLASSES], y)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.cells = kind(8, 8, **options)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.cells.batch_first
        out = self.cells(x if first else x.transpose(0, 1))[0]
        return F.cross_entropy(out[:, -1] if first else out[-1], y)


class Stepwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], 8)
        for t in range(3):
            h, c = self.cell(x[:, t], (h, c))
        return F.cross_entropy(h, y)


class Experts(nn.Module):
    """Sequentials in a list: modules whose children are numbers that are no list."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Hardswish(), nn.Linear(8, 8)) for _ in range(2)
        )
        self.experts[1].extra = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1)
        parts = [share[..., i : i + 1] * e(x) for i, e in enumerate(self.experts)]
        return F.cross_entropy((sum(parts) * self.experts[1].extra).mean(1), y)


class Bags(nn.Module):
    """Every sample looks up bags of one size."""

    def __init__(self) -> None:
        super().__init__()
        modes = ("sum", "mean", "max")
        self.tables = nn.ModuleList(nn.EmbeddingBag(5, CLASSES, mode=mode) for mode in modes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        ids = torch.stack((y % 5, (y * 2 + 1) % 5), 1)
        bags = torch.stack([table(ids) for table in self.tables])
        return F.cross_entropy(bags.sum(0) * x[:, 0, :CLASSES], y)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 4, 2, stride=2)
        self.norm = nn.InstanceNorm2d(4, affine=True)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.grow = nn.Upsample(scale_factor=2, mode="bilinear")
        self.out = nn.Conv2d(4, 4, 2, stride=2)
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm(self.down(x.view(SAMPLES, 4, 2, 4).transpose(1, 2)))
        x = self.shuffle(self.out(self.grow(F.silu(self.up(x)))))
        return F.cross_entropy(x.flatten(1)[:, :CLASSES], y)


class Wide(nn.Module):
    """The sequentials of all layers are alike, and numbers that are no list name their parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
            for _ in range(3)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(x.mean(1)[:, :CLASSES], y)


class Placed(nn.Module):
    """One layer: what it is handed says where the tokens stand."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, places: Tensor, scale: Tensor) -> Tensor:
        more: Tensor = self.outer(torch.tanh(self.inner(x * scale + places)))
        return x + more


class Handed(nn.Module):
    """A buffer and a parameter go into every layer as they are."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.rand(4, 8))
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(Placed() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.places, self.scale)
        return F.cross_entropy(x.mean(1)[:, :CLASSES], y)


class Twice(nn.Module):
    """The same layers for all of a sample and for half of it: no block has two shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Placed() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        means = []
        for part in (x, x[:, :2], self.first(x)):
            for layer in self.layers:
                part = layer(part, torch.ones(8), part.cos())
            means.append(part.mean(1))
        return F.cross_entropy((means[0] * means[1] + means[2])[:, :CLASSES], y)


class Shifted(nn.Module):
    """One buffer is added to two results that are cut in the same way."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.register_buffer("shift", torch.randn(16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(2):
            x = self.down(F.relu(self.up(x) + self.shift))
        return F.cross_entropy(x.mean(1)[:, :CLASSES], y)


class Translating(nn.Module):
    """Masks come without a word on whether they are causal, which torch would look up in them."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Transformer(8, 2, 1, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(4)
        out = self.core(x, x.cos(), tgt_mask=mask)
        return F.cross_entropy(out[:, -1, :CLASSES], y)


class Picking(nn.Module):
    """One place of every sample, counted from the front, from the end, or found."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, rows = torch.tanh(self.inner(x)), torch.arange(SAMPLES)
        picked = x[rows, y % 4] + x[rows, -1 - y % 4] + x[rows, x[:, :, 0].argmax(1)]
        return F.cross_entropy(picked[:, :CLASSES], y) + x[:, 0][rows, y].square().mean()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = weight_norm(nn.Linear(8, 8))
        self.whole = weight_norm(nn.Conv1d(4, 4, 3, padding=1), dim=-1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.whole(torch.tanh(self.rows(x))).mean(1)[:, :CLASSES], y)


class Turning(nn.Module):
    """A rotary embedding of complex numbers, from a table and made on the spot."""

    turns: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("turns", torch.polar(torch.ones(9, 2), torch.rand(9, 2)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(4.0), torch.tensor([1.0, 0.1]))
        made = torch.polar(torch.ones_like(angles), angles)
        places = torch.arange(4)
        parts = []
        for linear, turns in ((self.q, self.turns[:4]), (self.k, made.conj())):
            heads = linear(x).view(SAMPLES, 4, 2, 2, 2)
            turned = torch.view_as_complex(heads) * turns[places].unsqueeze(1)
            parts.append(torch.view_as_real(turned * 0.5 * angles[:, None]).flatten(3))
        scores = (parts[0] * parts[1]).sum((1, 2))
        return F.cross_entropy(scores @ torch.ones(4, CLASSES) * x[:, 0, :CLASSES], y)


class Deep(nn.Module):
    """Stochastic depth in the ways of Hugging Face and of timm and torchvision."""

    def __init__(self, ways: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2 * ways))
        self.out = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            h = torch.tanh(layer(x))
            shape, kept = (x.shape[0],) + (1,) * (x.ndim - 1), 0.9 - 0.1 * i
            if i % 2:
                mask = (kept + torch.rand(shape, dtype=h.dtype, device=h.device)).floor_()
                x = x + h.div(kept) * mask
            else:
                x = x + h * h.new_empty(shape).bernoulli_(kept).div_(kept)
        return F.cross_entropy(self.out(x.flatten(1)), y)


class Dropping(nn.Module):
    """Single numbers, features of sequences, of images and of volumes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.conv = nn.Linear(8, 16), nn.Conv2d(4, 8, 1)
        self.drops = nn.ModuleList(
            kind(0.4) for kind in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
        )
        self.out = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        plain, line, image, volume = self.drops
        h = line(plain(self.up(x)))
        h = image(self.conv(h.unflatten(2, (4, 4))))
        h = volume(h.unflatten(2, (2, 2)) * 2).flatten(1)
        return F.cross_entropy(self.out(torch.tanh(h)), y)


class Autoencoder(nn.Module):
    """Variational."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 12), nn.Linear(6, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean, spread = self.encode(x).chunk(2, -1)
        drawn = mean + torch.randn_like(spread) * (0.5 * spread).exp()
        apart: Tensor = -0.5 * (1 + spread - mean.square() - spread.exp()).sum((1, 2))
        return F.mse_loss(self.decode(torch.tanh(drawn)), x) + (apart * (y + 1)).mean()


class Hiding(nn.Module):
    """As masked autoencoders do: the places with the smallest numbers stay; times are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(8, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        order = torch.rand(x.shape[0], x.shape[1], device=x.device).argsort(dim=1)
        kept = order[:, :2].unsqueeze(-1).expand(-1, -1, 8)
        times = torch.randint(0, 10, (x.shape[0],), device=x.device)
        h = self.up(x.gather(1, kept)) * (times / 10)[:, None, None]
        hits = torch.bernoulli(h.sigmoid())
        return F.cross_entropy(self.out(F.gumbel_softmax(h * hits, dim=-1)).mean(1), y)


class Inverted(nn.Module):
    """An op of checks alone, which gives nothing, stands behind the inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        whole = torch.linalg.inv(h @ h.transpose(1, 2) + torch.eye(4))
        return F.cross_entropy(self.down(whole.flatten(1)), y)


class Folded(nn.Module):
    """Patches are put back among others by an index with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        patches = F.unfold(self.up(x).unsqueeze(1), 2, stride=2)
        back = F.fold(torch.tanh(patches), (4, 8), 2, stride=2)
        return F.cross_entropy(self.down(back.flatten(1)), y)


class Named(nn.Module):
    """Several of ``a`` would be called by a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a = self.up(x)
        turned = torch.stack(a.flatten(1).unbind(1)[::-1], 1)
        return F.cross_entropy(self.down(turned), y)


class Standardised(nn.Module):
    """Weights brought to mean 0 and variance 1 by a batch norm that has a weight and no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down = nn.Conv1d(4, 8, 3, padding=1), nn.Linear(64, CLASSES)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 8)[:, None, None])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = self.conv.weight.reshape(1, 8, -1)
        gain = (self.gain * 12**-0.5).view(-1)
        rows = F.batch_norm(rows, None, None, weight=gain, training=True, momentum=0.0)
        h = F.conv1d(x, rows.reshape_as(self.conv.weight), self.conv.bias, padding=1)
        return F.cross_entropy(self.down(torch.tanh(h).flatten(1)), y)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "standardised weights": Standardised,
    "inverses": Inverted,
    "folded patches": Folded,
    "names of keywords": Named,
    "attention": lambda: Attending(False),
    "attention with weights": lambda: Attending(True),
    "attention without heads": OneHead,
    "lstm": lambda: Recurrent(nn.LSTM, num_layers=2, batch_first=True),
    "gru, time first": lambda: Recurrent(nn.GRU, bidirectional=True),
    "rnn": lambda: Recurrent(nn.RNN, batch_first=True),
    "lstm cell": Stepwise,
    "experts": Experts,
    "bags": Bags,
    "images": Images,
    "complex rotary": Turning,
    "sequentials": Wide,
    "a table for every layer": Handed,
    "layers with two shapes": Twice,
    "a buffer cut twice": Shifted,
    "transformer with a mask": Translating,
    "one place of every sample": Picking,
    "weight norm": Normed,
    "stochastic depth": Deep,
    "dropout of features": Dropping,
    "variational autoencoder": Autoencoder,
    "masked autoencoder": Hiding,
}


def test_noise_is_drawn_whole_on_model_axes_and_for_the_own_samples_on_data_axes() -> None:
    made = capture_of(Autoencoder, lambda: _labelled(4, 8))
    (noise,) = (op.name for op in made.graph.ops if op.kind == "noise")
    mesh = Mesh.parse("dp_shard=2 x tp=2")
    drawn = "torch.randn((LOCAL_BATCH, 4, 6), dtype=FP32, device=device())"
    whole = emitted(made, Spread(mesh)).text
    assert f"{drawn} *" in whole
    split = emitted(made, Spread(mesh, ops={noise: "tp:c"})).text
    assert f'shard( {drawn}, dim=2, axis="tp" )' in " ".join(split.split())


def test_ranks_that_hold_pieces_drop_apart() -> None:
    made = capture_of(Dropping, lambda: _labelled(4, 8))
    plain, *_, volume = (op.name for op in made.graph.ops if op.kind == "dropout")
    mesh = Mesh.parse("dp_shard=2 x tp=2")
    whole = emitted(made, Spread(mesh)).text
    assert all(f"F.dropout{n}(" in whole for n in ("", "1d", "2d", "3d"))
    split = emitted(made, Spread(mesh, ops={plain: "tp:e2", volume: "tp:c"})).text
    assert '0.4, self.training, axis="tp")' in split
    assert "F.dropout(" not in split
    # a feature whose parts are on several ranks is dropped by all of them
    assert "F.dropout3d(" in split


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.some(12)
def test_layers(name: str) -> None:
    def batch() -> dict[str, Tensor]:
        return _labelled(4, 8)

    torch.manual_seed(0)
    model, given = LAYERS[name](), batch()
    made = capture_of(LAYERS[name], batch)
    dims = {e.name: e.batch_dim for e in made.batch if e.batch_dim is not None}
    assert not batch_flow(made.graph, dims).obstacles  # the samples stay apart all the way
    for mesh in MESHES:
        _verified(made, model, given, mesh)
