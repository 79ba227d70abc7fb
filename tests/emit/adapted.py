# mypy: disable-error-code="no-any-return"
"""A Llama with fewer heads of keys and values, frozen, with adapters of every make on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

WIDTH, WORDS = 32, 64


class Lora(nn.Module):
    """As `peft` wraps a linear layer: what belongs to one adapter is found by its name."""

    def __init__(self, base: nn.Module, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base
        self.in_features, self.out_features = sizes_of(base)
        down = nn.Linear(self.in_features, rank, bias=False)
        up = nn.Linear(rank, self.out_features, bias=False)
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.lora_A, self.lora_B = nn.ModuleDict({"default": down}), nn.ModuleDict({"default": up})
        self.scaling = 0.5

    def forward(self, x: Tensor) -> Tensor:
        down = self.lora_A["default"](self.lora_dropout["default"](x))
        return self.base_layer(x) + self.lora_B["default"](down) * self.scaling


class Merged(nn.Module):
    """The adapter is added to the weight."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base
        self.a = nn.Parameter(0.02 * torch.randn(rank, base.in_features))
        self.b = nn.Parameter(0.02 * torch.randn(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base_layer.weight + 0.5 * (self.b @ self.a))


class Chunked(nn.Module):
    """Sizes of an instance in its forward: the heads of a norm, the groups of a sum."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer, self.heads = base, base.out_features // 8
        self.gain = nn.Parameter(torch.ones(self.heads, 8))
        self.mix = nn.Parameter(torch.eye(self.heads) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.base_layer(x).unflatten(-1, (self.heads, 8)) * self.gain
        return torch.einsum("bthd,hg->btgd", heads, self.mix).flatten(2)


def sizes_of(base: nn.Module) -> tuple[int, int]:
    assert isinstance(base, nn.Linear | Lora)
    return base.in_features, base.out_features


Wrap = Callable[[nn.Module, int], nn.Module]
WRAPS: Mapping[str, Mapping[str, Wrap]] = {
    "q and v": dict.fromkeys("qv", lambda base, layer: Lora(base)),
    "ranks": {"q": lambda base, layer: Lora(base), "v": lambda base, layer: Lora(base, 8)},
    "ranks by layer": dict.fromkeys("qv", lambda base, layer: Lora(base, 4 * layer + 4)),
    "merged": dict.fromkeys("qv", lambda base, layer: Merged(base)),  # type: ignore[arg-type]
    "nested": dict.fromkeys("qv", lambda base, layer: Lora(Lora(base), 2)),
    "chunked": dict.fromkeys("qv", lambda base, layer: Chunked(base)),  # type: ignore[arg-type]
    "all": dict.fromkeys("qkvo", lambda base, layer: Lora(base)),
}


class Adapted(nn.Module):
    def __init__(self, wraps: str, layers: int = 2) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            use_cache=False,
        )
        self.llama = LlamaForCausalLM(config).requires_grad_(False)
        for number, layer in enumerate(self.llama.model.layers):
            for name, wrap in WRAPS[wraps].items():
                base = getattr(layer.self_attn, f"{name}_proj")
                setattr(layer.self_attn, f"{name}_proj", wrap(base, number))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.llama(input_ids=input_ids, labels=labels).loss


def batch(step: int = 0) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (4, 8), generator=draws)
    return {"input_ids": ids, "labels": ids.clone()}


WORKLOADS = {n: autopar.Workload(model=partial(Adapted, n), batch=batch) for n in WRAPS}
vars().update({n.replace(" ", "_"): workload for n, workload in WORKLOADS.items()})
