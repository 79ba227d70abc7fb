"""The expert layout of a transformer is found, not written: tp=8 on one NVLink node.

Megatron-LM (Shoeybi et al. 2019, section 3; Narayanan et al. 2021): the first products of attention
and MLP are split by columns, the last by rows, attention by heads, embedding and head over the
vocabulary. Where the norms between them split the sequence (Korthikanti et al. 2022), the products
are split the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from autopar import Workload
from autopar.files.cluster_file import load_cluster
from autopar.files.plan_checks import from_json
from autopar.frontends.dispatch import capture
from autopar.frontends.shared.captured import Captured
from autopar.nouns.plan import to_json
from autopar.planner.options import Options
from autopar.planner.planning import plan_captured

CLUSTER = load_cluster("examples/clusters/h100_8.yaml")
LAYER = "LlamaDecoderLayer::"

# Op -> the factor that tp splits; weight -> the dim that tp splits (a weight is [out, in]).
COLUMN = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
ROW = ("self_attn.o_proj", "mlp.down_proj")
OPS = {
    **{f"{LAYER}{name}/linear": "tp:n" for name in COLUMN},
    **{f"{LAYER}{name}/linear": "tp:k" for name in ROW},
    f"{LAYER}self_attn/attention": "tp:g",
    "model.embed_tokens/embedding": "tp:v",
    "cross_entropy": "tp:v",  # with its product, in chunks of rows
}
PARAMETERS = {
    **{f"{LAYER}{name}.weight": "tp:S0" for name in COLUMN},
    **{f"{LAYER}{name}.weight": "tp:S1" for name in ROW},
    "model.embed_tokens.weight": "tp:S0",
}


@pytest.fixture(scope="module")
def llama() -> tuple[Workload, Captured]:
    """Eight layers of Llama-3-70B's width with the embedding tied to the head; never allocated."""
    transformers = pytest.importorskip("transformers")
    import torch

    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=8,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        use_cache=False,
    )

    def batch() -> Mapping[str, torch.Tensor]:
        tokens = torch.zeros(1, 4096, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens.clone()}

    workload = Workload(
        model=lambda: transformers.LlamaForCausalLM(config).to(torch.bfloat16),
        batch=batch,
        optimizer="adamw",
        precision="bfloat16",
    )
    return workload, capture(workload)


@pytest.mark.parametrize("searcher", ["elimination", "portfolio", "mcts"])
def test_the_expert_layout_is_found(llama: tuple[Workload, Captured], searcher: str) -> None:
    workload, captured = llama
    made = plan_captured(captured, workload, CLUSTER, "llama", {"tp": "8"}, Options(searcher))
    (spread,) = from_json(to_json(made.plan)).spreads
    assert {name: spread.ops.get(name) for name in OPS} == OPS
    assert {name: spread.parameters.get(name) for name in PARAMETERS} == PARAMETERS
