# mypy: disable-error-code="no-any-return"
"""Small models that compute in more than one dtype, for the tests of what is priced of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.nouns.workload import Workload

D, HEADS, VOCAB, B, S = 16, 2, 32, 4, 8
HALF, WIDE = torch.bfloat16, torch.float64


class Model(nn.Module):
    """Embedding, norm, attention, products and a loss over logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D)
        self.norm = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.head = nn.Linear(D, VOCAB, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.mix(self.normed(x))
        return self.loss(self.head(x), labels)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def normed(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.view(B, -1, HEADS, D // HEADS).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class NormInFloat32(Model):
    """The parameters of the norm too."""

    def normed(self, x: Tensor) -> Tensor:
        norm = self.norm
        wide = F.layer_norm(x.float(), (D,), norm.weight.float(), norm.bias.float())
        return wide.to(x.dtype)


class NormKeptInFloat32(Model):
    """A norm of float32 in a model of another dtype."""

    def normed(self, x: Tensor) -> Tensor:
        return self.norm(x.float()).to(x.dtype)


class LossInFloat32(Model):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits.float(), labels)


class LossInHalf(Model):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits.to(HALF), labels)


class AttentionInFloat16(Model):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended = super().attend(*(t.to(torch.float16) for t in (q, k, v)))
        return attended.to(q.dtype)


class AttentionInFloat32(Model):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q.float(), k.float(), v.float()).to(q.dtype)


class HeadInHalf(Model):
    """One product in bfloat16, its parameter cast where it is used."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.mix(self.normed(x))
        return self.loss(F.linear(x.to(HALF), self.head.weight.to(HALF)), labels)


class HalfEmbedding(Model):
    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens).float()


class WideHead(Model):
    """The head alone in float64."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.mix(self.normed(x))
        return self.loss(self.head(x.double()), labels)


class Promoting(Model):
    """Adds a float32 parameter to a narrower stream, which widens it."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(S, D))

    def normed(self, x: Tensor) -> Tensor:
        return self.norm(x + self.place)


class ParameterFirst(Model):
    """Products whose first operand is a parameter or a buffer, and of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.ones(4, D) / D)
        self.up = nn.Parameter(torch.ones(D, 4) / D)
        self.rows = nn.Parameter(torch.ones(S, S) / S)
        self.fixed: Tensor
        self.register_buffer("fixed", torch.eye(S))

    def normed(self, x: Tensor) -> Tensor:
        x = torch.matmul(self.rows, self.norm(x))
        x = torch.matmul(self.fixed.to(x.dtype), x)
        return x @ (self.up @ self.down)


class Buffered(Model):
    """A buffer of another dtype that scales the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", torch.ones(D, dtype=WIDE))

    def normed(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.scales.to(x.dtype)


class Frozen(Model):
    """Only the head is trained."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.embedding, self.norm, self.qkv, self.out):
            part.requires_grad_(False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.mix(self.normed(self.head.weight[:1] + x))
        return self.loss(self.head(x), labels)


class Convolved(Model):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, D, 3, padding=1)

    def normed(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(x).transpose(1, 2)).transpose(1, 2)


class FromIntegers(Model):
    """Integer inputs that become numbers of the model."""

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * (1 + labels_like(tokens)).to(self.embedding.weight.dtype)


def labels_like(tokens: Tensor) -> Tensor:
    return (tokens % 3)[..., None]


@dataclass(frozen=True)
class Mix:
    """A model, what is done to its parameters before training, and the dtype of compute."""

    name: str
    make: Callable[[], nn.Module]
    precision: str = "float32"

    def workload(self, optimizer: str = "adamw") -> Workload:
        return Workload(
            model=self.make,
            batch=lambda: {
                "tokens": torch.zeros(B, S, dtype=torch.long),
                "labels": torch.zeros(B, S, dtype=torch.long),
            },
            optimizer=optimizer,
            precision=self.precision,
        )


def stored(kind: type[Model], dtype: torch.dtype, **parts: torch.dtype) -> Callable[[], Model]:
    """Makes ``kind`` with parameters and buffers in ``dtype``, those of ``parts`` in their own."""

    def make() -> Model:
        model = kind().to(dtype)
        for name, own in parts.items():
            part = getattr(model, name)
            setattr(model, name, part.to(own) if isinstance(part, nn.Module) else part)
            if isinstance(part, nn.Parameter):
                setattr(model, name, nn.Parameter(part.detach().to(own)))
        return model

    return make


F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64

MIXES = (
    Mix("float32", stored(Model, F32)),
    Mix("bfloat16 parameters", stored(Model, BF16)),
    Mix("float16 parameters", stored(Model, F16)),
    Mix("float64 parameters", stored(Model, F64)),
    Mix("float32 in bfloat16", stored(Model, F32), "bfloat16"),
    Mix("float32 in float16", stored(Model, F32), "float16"),
    Mix("float32 in float64", stored(Model, F32), "float64"),
    Mix("bfloat16 in bfloat16", stored(Model, BF16), "bfloat16"),
    Mix("float64 in bfloat16", stored(Model, F64), "bfloat16"),
    Mix("norm cast to float32", stored(NormInFloat32, BF16)),
    Mix("norm kept in float32", stored(NormKeptInFloat32, BF16, norm=F32)),
    Mix("norm kept in float32, in bfloat16", stored(NormKeptInFloat32, BF16, norm=F32), "bfloat16"),
    Mix("loss in float32", stored(LossInFloat32, BF16)),
    Mix("loss in bfloat16", stored(LossInHalf, F32)),
    Mix("attention in float16", stored(AttentionInFloat16, F32)),
    Mix("attention in float32", stored(AttentionInFloat32, BF16)),
    Mix("head in bfloat16", stored(HeadInHalf, F32)),
    Mix("head in float64", stored(WideHead, F32, head=F64)),
    Mix("embedding in bfloat16", stored(HalfEmbedding, F32, embedding=BF16)),
    Mix(
        "embedding in bfloat16, in bfloat16", stored(HalfEmbedding, F32, embedding=BF16), "bfloat16"
    ),
    Mix(
        "a parameter widens the stream",
        stored(Promoting, BF16, place=F32, norm=F32, qkv=F32, out=F32, head=F32),
    ),
    Mix("parameters first", stored(ParameterFirst, F32)),
    Mix("parameters first, in bfloat16", stored(ParameterFirst, F32), "bfloat16"),
    Mix("buffer of float64", stored(Buffered, F32)),
    Mix("buffer of float64, in bfloat16", stored(Buffered, F32), "bfloat16"),
    Mix("frozen float32 in bfloat16", stored(Frozen, F32), "bfloat16"),
    Mix("convolution in bfloat16", stored(Convolved, F32), "bfloat16"),
    Mix("integers", stored(FromIntegers, F32), "bfloat16"),
)
