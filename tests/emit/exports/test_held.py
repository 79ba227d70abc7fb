"""Where a trainer keeps other state than was priced, an export says so, and whether it fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

from autopar.cli.exports import Asked, setup
from autopar.emit.exports.from_plan import setup_of
from autopar.emit.exports.held import DEEPSPEED, FLOAT32, MEGATRON, Held, as_stored, held
from autopar.emit.exports.held import state_note as note
from autopar.emit.exports.setup import Setup
from autopar.emit.exports.targets import TARGETS
from autopar.emit.exports.text import not_carried
from autopar.files.cluster_file import load_cluster
from autopar.frontends.dispatch import capture
from autopar.nouns.buckets import MIB
from autopar.nouns.choices import asides
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread, Stage
from autopar.nouns.workload import Workload
from autopar.nouns.zero import over
from tests import plans
from tests.emit.exports.setups import ROOT, gpt, layout

GIB = 1 << 30
ONE = {"pp": 1, "cp": 1, "schedule": "none", "dp_shard": 4, "microbatches": 8}


def of_dtype(dtype: str, limit: int = 80 * GIB, total: int = 30 * GIB) -> Held:
    """A billion numbers over four ranks of ZeRO 3."""
    return held([{dtype: 10**9}], over(3, 4), 4, 2.0, (total, limit))


def left_out(target: str, kept: Held | None, **changes: object) -> str:
    made = TARGETS[target](layout(**{**ONE, "held": kept, **changes}))
    return "\n".join(made.left_out)


def test_state_is_that_of_the_rank_where_it_grows_most() -> None:
    numbers = 10**6
    known = held(
        [{"bfloat16": numbers}, {"bfloat16": 3 * numbers}], over(1, 4), 4, 2.0, (10**9, 10**9)
    )
    planned = (2 + 2 + 2 * 2 / 4) * 3 * numbers
    megatron = (2 + 4 + (4 + 2 * 4) / 4) * 3 * numbers
    assert known.by_keeper["megatron"] - 10**9 == megatron - planned
    assert known.by_keeper["float32"] - 10**9 == (4 + 4 + 2 * 4 / 4) * 3 * numbers - planned
    assert as_stored("float32").state_bytes(8, over(0, 1), 1, 2.0) == 16 * 8


def test_the_note_has_the_bytes_and_whether_it_fits() -> None:
    more = 0.25 * (2 + 4 + 12 - 8) * 10**9 / GIB
    text = note(of_dtype("bfloat16"), MEGATRON, "Megatron")
    assert "bfloat16 weights, gradients and moments, without float32 masters" in text
    assert f"at most {30 + more:.1f} GiB a device in place of 30.0 GiB (+{more:.1f} GiB)" in text
    assert text.endswith("which fits in 80.0 GiB")
    tight = note(of_dtype("bfloat16", limit=31 * GIB), MEGATRON, "Megatron")
    assert f"does not fit by {more - 1:.1f} GiB in 31.0 GiB" in tight
    assert note(of_dtype("float32"), FLOAT32, "any") == ""
    assert note(None, DEEPSPEED, "any") == ""


@pytest.mark.parametrize("target", ["megatron", "megatron-bridge", "deepspeed", "accelerate"])
def test_trainers_with_masters_say_what_a_plan_without_them_becomes(target: str) -> None:
    if target == "deepspeed":
        text = left_out(target, of_dtype("bfloat16"), tp=1)
    else:
        text = left_out(target, of_dtype("bfloat16"))
    assert "without float32 masters" in text
    assert "GiB a device in place of 30.0 GiB" in text


@pytest.mark.parametrize("target", ["torchtitan", "accelerate", "maxtext", "levanter"])
def test_float32_parameters_are_what_these_keep(target: str) -> None:
    assert "priced" not in left_out(target, of_dtype("float32"))
    assert "priced" in left_out("megatron", of_dtype("float32"))  # 16-bit copies beside them


def test_those_that_can_keep_bfloat16_alone_are_told_to() -> None:
    kept = of_dtype("bfloat16")
    for target, line in (
        ("torchtitan", '    t.dtype = "bfloat16"'),
        ("maxtext", "weight_dtype: bfloat16"),
        ("levanter", "mp: p=bfloat16,c=bfloat16"),
    ):
        made = TARGETS[target](layout(**{**ONE, "held": kept}))
        assert any(line in text for text in made.files.values()), target
        assert "priced" not in "\n".join(made.left_out)
        plain = TARGETS[target](layout(**{**ONE, "held": of_dtype("float32")}))
        assert not any(line in text for text in plain.files.values()), target
    assert "dtype=torch.bfloat16" in left_out("transformers", kept)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(torch.relu(self.first(x.bfloat16())))
        return made.float().square().mean()


def of_stages(stages: tuple[Stage, ...]) -> Setup:
    workload = Workload(
        model=lambda: Two().bfloat16(), batch=lambda: {"x": torch.zeros(8, 64)}, optimizer="adamw"
    )
    captured = capture(workload)
    mesh = Mesh(("dp_shard",), (2,))
    plan = plans.plan(spreads=(Spread(mesh),), stages=stages)
    cluster = load_cluster(ROOT / "examples/clusters/h100_8.yaml")
    return setup_of(plan, captured.graph, captured.batch, cluster)


def test_a_plan_knows_the_dtypes_of_every_stage() -> None:
    total = plans.prediction().memory_bytes.total
    whole = of_stages((Stage(zero=0),)).held
    assert whole is not None
    assert whole.kept == "bfloat16"
    assert whole.by_keeper["float32"] == total + 8 * (64 * 64 + 64 * 8)
    cut = of_stages((Stage(zero=0), Stage(first="second/linear", device=2, zero=0))).held
    assert cut is not None
    assert cut.by_keeper["float32"] == total + 8 * 64 * 64


ARCH = """
layers: 12
hidden: 1024
heads: 16
kv_heads: 4
ffn: 4096
vocab: 50000
sequence: 2048
"""


def test_what_no_layout_holds_is_not_left_out_in_silence() -> None:
    made = plans.plan(
        loss_chunks=4, bucket_bytes=8 * MIB, reduce_dtype="bfloat16", all_reduce="two-level of 2"
    )
    notes = " ".join(asides(made))
    for text in ("loss_chunks=4", "bucket=8MiB", "reduce=bfloat16", "all_reduce=two-level of 2"):
        assert text in notes
    assert not [*asides(plans.plan())]
    setup = replace(gpt(), aside=("loss_chunks=4 (logits are never whole)",))
    assert "loss_chunks=4 (logits are never whole)" in not_carried(setup)


def of_arch(folder: Path, fix: str, more: str = "") -> Setup:
    (folder / "sizes.yaml").write_text(ARCH + more)
    cluster = str(ROOT / "examples/clusters/h100_8.yaml")
    return setup(Asked(None, str(folder / "sizes.yaml"), cluster, (fix,), 64))


def test_sizes_of_an_architecture_file_go_where_there_are_fields(tmp_path: Path) -> None:
    made = of_arch(tmp_path, "dp_shard=8,zero=3")
    shell = TARGETS["megatron"](made).files["megatron_args.sh"]
    for words in (
        *("--num-layers 12 --hidden-size 1024 --vocab-size 50000", "--ffn-hidden-size 4096"),
        *("--num-attention-heads 16 --kv-channels 64", "--num-query-groups 4", "--swiglu"),
        *("--seq-length 2048", "--disable-bias-linear", "--position-embedding-type rope"),
        "--normalization RMSNorm",
    ):
        assert words in shell
    sizes = yaml.safe_load(TARGETS["maxtext"](made).files["autopar.yml"])
    assert sizes["model_name"] == "default"
    assert (sizes["base_emb_dim"], sizes["base_num_kv_heads"]) == (1024, 4)
    assert (sizes["base_mlp_dim"], sizes["vocab_size"]) == (4096, 50000)
    model = yaml.safe_load(TARGETS["levanter"](made).files["levanter.yaml"])["model"]
    assert (model["type"], model["hidden_dim"], model["num_kv_heads"]) == ("llama", 1024, 4)
    assert (model["head_dim"], model["max_seq_len"]) == (64, 2048)
    assert model["tie_word_embeddings"] is False
    bridge = TARGETS["megatron-bridge"](made).files["autopar_recipe.py"]
    assert "cfg.model.num_query_groups = 4\n" in bridge
    assert "cfg.model.share_embeddings_and_output_weights = False\n" in bridge
    assert "hidden-dropout" in "\n".join(TARGETS["megatron"](made).left_out)
    for target in ("torchtitan", "deepspeed", "accelerate", "axlearn"):
        text = "\n".join(TARGETS[target](made).left_out)
        assert "(12 layers, hidden 1024, 16 heads of 64, 4 of keys, ffn 4096, voc" in text, target


def test_shared_embeddings_and_experts_are_said(tmp_path: Path) -> None:
    made = of_arch(tmp_path, "dp_shard=8,zero=3", "tied: true\n")
    model = yaml.safe_load(TARGETS["levanter"](made).files["levanter.yaml"])["model"]
    assert model["tie_word_embeddings"] is True
    assert "untie" not in TARGETS["megatron"](made).files["megatron_args.sh"]
    made = of_arch(tmp_path, "dp_shard=8,zero=3", "experts: 8\ntop_k: 2\n")
    sizes = yaml.safe_load(TARGETS["maxtext"](made).files["autopar.yml"])
    assert sizes["base_moe_mlp_dim"] == sizes["base_mlp_dim"] == 4096
    assert (sizes["num_experts"], sizes["num_experts_per_tok"]) == (8, 2)


def test_what_is_no_llama_is_told_to_maxtext(tmp_path: Path) -> None:
    made = of_arch(tmp_path, "dp_shard=8,zero=3", "positions: true\ngated: false\n")
    assert "biases, norms and positions" in "\n".join(TARGETS["maxtext"](made).left_out)
    assert "RMSNorm" not in TARGETS["megatron"](made).files["megatron_args.sh"]


def test_sizes_that_no_field_has_are_named(tmp_path: Path) -> None:
    made = of_arch(tmp_path, "dp_shard=8,zero=3", "window: 512\nwindowed_layers: 6\n")
    for target in ("megatron", "maxtext"):
        text = "\n".join(TARGETS[target](made).left_out)
        assert "attention of 6 layers to the last 512 tokens of the model: no " in text


@pytest.mark.parametrize(("fix", "keeps"), [("dp_shard=8,zero=1", "megatron"), ("zero=3", "fsdp")])
def test_a_layout_is_priced_with_what_the_trainer_keeps(
    tmp_path: Path, fix: str, keeps: str
) -> None:
    made = of_arch(tmp_path, fix)
    assert made.held is not None
    assert made.held.kept == {"megatron": "megatron", "fsdp": "float32"}[keeps]
    same, other = ("megatron", "torchtitan") if keeps == "megatron" else ("torchtitan", "megatron")
    assert "priced" not in "\n".join(TARGETS[same](made).left_out)
    assert "the state as it was priced" in "\n".join(TARGETS[other](made).left_out)
    assert made.held.by_keeper["megatron"] != made.held.by_keeper["float32"]
