"""Small models with the shapes of real ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.down(F.gelu(self.up(x))), y, label_smoothing=0.1)


def mlp_batch() -> dict[str, Tensor]:
    y = torch.randint(0, 6, (8,))
    y[3] = -100
    return {"x": torch.randn(8, 8), "y": y}


class Attention(nn.Module):
    """``groups`` kv heads; rotary angles come from outside."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, groups * self.size, bias=False)
        self.v_proj = nn.Linear(width, groups * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, self.heads, self.size).transpose(1, 2)
        k = self.k_proj(x).view(b, s, self.groups, self.size).transpose(1, 2)
        v = self.v_proj(x).view(b, s, self.groups, self.size).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeats = self.heads // self.groups
        k = k[:, :, None].expand(b, self.groups, repeats, s, self.size).reshape(q.shape)
        v = v[:, :, None].expand(b, self.groups, repeats, s, self.size).reshape(q.shape)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(b, s, -1))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6))


class GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.self_attn = Attention(width, heads, groups)
        self.mlp = GatedMLP(width, 2 * width)
        self.input_layernorm = RMSNorm(width)
        self.post_attention_layernorm = RMSNorm(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """Llama's block; ``tied`` shares the embedding with the head."""

    inv_freq: Tensor

    def __init__(
        self, vocabulary: int = 27, width: int = 16, heads: int = 4, groups: int = 2,
        layers: int = 2, tied: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, groups) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        size = width // heads
        self.register_buffer(
            "inv_freq", 1.0 / 10000 ** (torch.arange(0, size, 2) / size), persistent=False
        )

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        places = torch.arange(input_ids.shape[1], dtype=torch.float32)
        angles = places[:, None] * self.inv_freq
        angles = torch.cat((angles, angles), -1)[None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.norm(x))
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def llama_batch(samples: int = 8, length: int = 8, vocabulary: int = 27) -> dict[str, Tensor]:
    ids = torch.randint(0, vocabulary, (samples, length))
    labels = ids.clone()
    labels[1, 3] = labels[5] = -100
    return {"input_ids": ids, "labels": labels}


class ConvNet(nn.Module):
    """Batch statistics, a grouped convolution, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.conv3 = nn.Conv2d(8, 8, 1)
        self.fc = nn.Linear(8, 5)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 2)
        x = F.relu(self.bn2(self.conv2(x)))
        x = F.relu(self.conv3(x))
        return F.cross_entropy(self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1)), labels)


def conv_batch() -> dict[str, Tensor]:
    return {"images": torch.randn(8, 3, 8, 8), "labels": torch.randint(0, 5, (8,))}
