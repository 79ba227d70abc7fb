"""Small models whose every part matters to the loss, for errors that are planted on purpose."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from benchmarks.zoo_models import FAMILIES, routed

B, S, C, H, V = 8, 6, 16, 4, 20


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(C), nn.LayerNorm(C)
        self.q, self.k, self.v = (nn.Linear(C, C) for _ in range(3))
        self.out = nn.Linear(C, C)
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (p(h).view(-1, S, H, C // H).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(-1, S, C))
        up = F.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        return x + F.dropout(self.down(up), 0.1)


class GPT(nn.Module):
    """Labels are smoothed, and some of them ignored, unequally many on the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(V, C, padding_idx=3)
        self.positions = nn.Parameter(torch.randn(S, C) / 4)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(C)
        self.head = nn.Linear(C, V, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(
            logits.view(-1, V), labels.view(-1), ignore_index=-100, label_smoothing=0.1
        )


def _tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, V, (B, S), generator=generator) for _ in range(2))
    labels[:2, :4] = -100
    labels[5, 0] = -100
    return {"tokens": tokens, "labels": labels}


class Along(nn.Module):
    """Causal attention over a length that ranks can have in zigzag. Dropping scores it needs whole
    keys and values, which a ring does not have."""

    length = 8

    def __init__(self, heads: int, dropped: float) -> None:
        super().__init__()
        self.heads, self.dropped = heads, dropped
        self.tokens, self.places = nn.Embedding(V, C), nn.Embedding(self.length, C)
        self.q, self.k, self.v, self.out = (nn.Linear(C, C) for _ in range(4))
        self.head = nn.Linear(C, V)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(self.length, device=tokens.device))
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, None, self.dropped, True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _along() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    tokens, labels = (torch.randint(V, (B, Along.length), generator=generator) for _ in range(2))
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return {"tokens": tokens, "labels": labels}


class Narrow(nn.Module):
    """Rows that two ranks do not divide, so that they split what is wide."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(V, C)
        self.norm = nn.LayerNorm(C)
        self.up, self.down = nn.Linear(C, 32 * C), nn.Linear(32 * C, C)
        self.head = nn.Linear(C, V)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = self.norm(x + self.down(F.relu(self.up(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Llama(nn.Module):
    """What libraries write out by hand: norms, rotations, grouped heads, gates, masks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(V, C)
        self.scale = nn.Parameter(1 + torch.randn(C) / 8)
        self.q = nn.Linear(C, C, bias=False)
        self.k, self.v = (nn.Linear(C, C // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(C, 2 * C, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * C, C, bias=False)
        self.head = nn.Linear(C, V, bias=False)
        angles = torch.outer(torch.arange(S), 1.0 / 10 ** torch.linspace(0, 1, C // H // 2))
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos()[None])
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin()[None])

    def turned(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        quarter = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.cos[:, None] + quarter * self.sin[:, None]

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens)
        b = x.shape[0]
        h = x.float()
        h = self.scale * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-2)).to(x.dtype)
        q = self.turned(self.q(h).view(b, S, H, -1).transpose(1, 2))
        k = self.turned(self.k(h).view(b, S, H // 2, -1).transpose(1, 2))
        v = self.v(h).view(b, S, H // 2, -1).transpose(1, 2)
        spread = (b, H // 2, 2, S, C // H)
        k, v = (t[:, :, None].expand(spread).reshape(b, H, S, C // H) for t in (k, v))
        places = torch.arange(S)
        mask = (places[None, :] <= places[:, None]).expand(b, 1, S, S)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.4)
        x = x + mixed.transpose(1, 2).reshape(b, S, C)
        gate = self.gate(x)
        x = x + self.down(gate * torch.sigmoid(gate) * self.up(x))
        return F.cross_entropy(self.head(x).view(-1, V), labels.view(-1))


class Ops(nn.Module):
    """One of many kinds of ops, all of which the loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(C, C), nn.Linear(C, C)
        self.table = nn.Parameter(torch.randn(5, C) / 2)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        a, b = self.first(x), self.second(x)
        up, low = a.chunk(2, -1)
        moved = torch.cat([low, up.roll(1, 1)], -1)
        best = torch.where(a > 0.3, a, b.clamp(-0.4, 0.7)).masked_fill(x > 1.5, 0.25)
        picked = a.gather(1, places[:, :, None].expand(-1, -1, C) % S) + self.table[places]
        spread = b.var(-1, keepdim=True) + b.amax(1, keepdim=True)
        running = torch.cumsum(1.5 - moved, 1) / (2 + b.square())
        lse = torch.logsumexp(picked, -1)[..., None]
        written = 0.5 * b * (1 + torch.erf(b / 2**0.5))
        strided = F.pad(picked[:, 1::2], (0, 0, 1, 2), value=0.5)
        total = best * spread + running.tril(9) + lse * torch.sub(a, b, alpha=3) + written + strided
        soft = total.softmax(1) * F.elu(total, 0.7)
        norms: Tensor = soft.norm(dim=-1)
        return F.mse_loss(soft, F.leaky_relu(x, 0.2)) + norms.mean()


def _numbers() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "x": torch.randn(B, S, C, generator=generator),
        "places": torch.randint(0, 5, (B, S), generator=generator),
    }


class Images(nn.Module):
    """Convolutions and norms over the batch, with statistics that are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8, momentum=0.2)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.groups = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(images))), 2)
        x = F.dropout2d(self.groups(self.second(x)), 0.2)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def _images() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "images": torch.randn(B, 3, 8, 8, generator=generator),
        "labels": torch.randint(0, 4, (B,), generator=generator),
    }


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(C)
        self.up, self.down = nn.Linear(C, 2 * C), nn.Linear(2 * C, C)
        self.scale: Tensor
        self.register_buffer("scale", 1 + torch.rand(C), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        moved: Tensor = self.down(torch.tanh(self.up(self.norm(x) * self.scale)))
        return x + moved


class Reused(nn.Module):
    """One cell, called again and again, and numbers that are neither round nor finite."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.head = nn.Linear(C, C), Cell(), nn.Linear(C, C)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        y = self.first(x) + 12345678.0 / (9e6 + places[..., None])
        for _ in range(6):
            y = self.cell(y)
        later = F.pad(y[:, 1:], (0, 0, 0, 1), value=float("-inf"))
        return F.mse_loss(self.head(torch.maximum(y, later)), x)


def _workload(model: Any, batch: Any, **more: Any) -> autopar.Workload:
    return autopar.Workload(model=model, batch=batch, learning_rate=1e-2, **more)


gpt = _workload(GPT, _tokens, clip_norm=0.5)
narrow = _workload(Narrow, lambda: {n: t[:7, :5] for n, t in _tokens().items()})
llama = _workload(Llama, _tokens, clip_norm=0.5)
ops = _workload(Ops, _numbers, optimizer="sgd", weight_decay=0.1)
images = _workload(Images, _images, clip_norm=0.1)
half = _workload(GPT, _tokens, clip_norm=0.5, precision="float16")
double = _workload(GPT, _tokens, clip_norm=0.5, precision="float64")
reused = _workload(Reused, _numbers)
mixture = routed("mixtral")()
shared = routed("qwen2_moe")()
rows = _workload(partial(Along, H, 0.1), _along, clip_norm=0.5)
ring = _workload(partial(Along, 2, 0.0), _along, clip_norm=0.5)
decoder = FAMILIES["llama"]()
many = routed("olmoe")()
packed = FAMILIES["llama_packed"]()
sunk = routed("gpt_oss")()
windowed = FAMILIES["mistral_windowed"]()
