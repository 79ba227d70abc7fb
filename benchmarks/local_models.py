"""Four models that four CPU processes train in well under a second a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import autopar

BATCH = 16


def _tokens(length: int, vocab: int) -> Callable[[], Mapping[str, Any]]:
    def batch() -> Mapping[str, Any]:
        import torch

        ids = torch.randint(0, vocab, (BATCH, length))
        return {"input_ids": ids, "labels": torch.randint(0, vocab, (BATCH, length))}

    return batch


def _images() -> Mapping[str, Any]:
    import torch

    return {
        "pixel_values": torch.randn(BATCH, 3, 64, 64),
        "labels": torch.randint(0, 10, (BATCH,)),
    }


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            use_cache=False,
        )
    )


def _bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=4096,
            hidden_size=384,
            intermediate_size=1536,
            num_hidden_layers=4,
            num_attention_heads=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=8,
            image_size=64,
            patch_size=4,
            num_labels=10,
        )
    )


def _mlp() -> Any:
    from torch import Tensor, nn
    from torch.nn import functional

    class Net(nn.Module):
        """Wide layers on few samples: parameters are moved for little arithmetic."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1536, 1536) for _ in range(6))
            self.head = nn.Linear(1536, 10)

        def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
            x = pixel_values.flatten(1)[:, :1536]
            for layer in self.layers:
                x = functional.relu(layer(x))
            return functional.cross_entropy(self.head(x), labels)

    return Net()


llama = autopar.Workload(model=_llama, batch=_tokens(64, 8192))
bert = autopar.Workload(model=_bert, batch=_tokens(64, 4096))
vit = autopar.Workload(model=_vit, batch=_images)
mlp = autopar.Workload(model=_mlp, batch=_images)
