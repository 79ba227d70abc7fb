"""Mixtures of experts with losses for balance, with experts that no token ever meets, and of
classes that the library's table of experts does not know."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import autopar
from benchmarks.census_workloads import workload_of
from benchmarks.zoo_models import BATCH, LENGTH, VOCAB, routed


def padded() -> dict[str, Any]:
    """Sequences of unequal length: data ranks have unequal numbers of tokens."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    lengths = torch.tensor([16, 3, 9, 12, 1, 16, 7, 5])
    mask = (torch.arange(LENGTH) < lengths.unsqueeze(1)).long()
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def partly_used(family: str) -> autopar.Workload:
    """A model whose routers never name every second expert."""
    whole = routed(family)()

    def build() -> Any:
        import torch

        assert whole.model is not None
        model = whole.model()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name.endswith(("e_score_correction_bias", "router.bias")):
                    tensor[1::2] = -50.0
        return model

    return replace(whole, model=build)


mixtral_balanced = routed("mixtral", output_router_logits=True)()
olmoe_balanced = routed("olmoe", output_router_logits=True)()
qwen2_moe_balanced = routed("qwen2_moe", output_router_logits=True)()
mixtral_padded = routed("mixtral", padded, output_router_logits=True)()
gpt_oss_partly_used = partly_used("gpt_oss")
deepseek_v3_partly_used = partly_used("deepseek_v3")
dbrx = workload_of("dbrx")
llama4 = workload_of("llama4_text")
longcat = workload_of("longcat_flash")
