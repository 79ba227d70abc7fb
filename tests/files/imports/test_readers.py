"""Settings as people have them: scripts with variables, older files, and what is not understood."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.files.imports.readers import READERS, read
from autopar.files.imports.settings import NotImported

TITAN_TOML = """
[training]
local_batch_size = 4
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "selective"
"""
TITAN_PY = """
from torchtitan.config import ParallelismConfig, TrainingConfig
def run():
    c = llama3_8b()
    c.parallelism = ParallelismConfig(tensor_parallel_degree=2, context_parallel_degree=2)
    p, t = c.parallelism, c.training
    t.local_batch_size, t.global_batch_size = 2, 64
    p.fsdp_reshard_after_forward = "always"
    c.activation_checkpoint = FullAC.Config()
    return c
"""
MEGATRON = """
#!/bin/bash
TP=8  # inside a node
PP=4
MODEL_ARGS=(--num-layers 80 --hidden-size 8192)
PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP --sequence-parallel
    --pipeline-model-parallel-size=${PP}
    --num-layers-per-virtual-pipeline-stage 10
    --micro-batch-size ${MBS:-2}
    --global-batch-size 512
    --bf16
    --use-distributed-optimizer
    --recompute-activations
)
torchrun pretrain_gpt.py "${MODEL_ARGS[@]}"
"""
ACCELERATE_FSDP1 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_activation_checkpointing: true}
"""


@pytest.mark.parametrize(
    ("file", "text", "fix", "batch"),
    [
        (
            "run.toml",
            TITAN_TOML,
            "tp=8,pp=4,zero=2,microbatch=1,schedule=interleaved-1f1b,interleave=2,recompute=selective",
            None,
        ),
        ("run.py", TITAN_PY, "tp=2,cp=2,zero=3,microbatch=2,recompute=full", 64),
        (
            "run.sh",
            MEGATRON,
            "tp=8,pp=4,zero=1,microbatch=2,schedule=interleaved-1f1b,interleave=2,recompute=selective",
            512,
        ),
        ("fsdp1.yaml", ACCELERATE_FSDP1, "zero=2,recompute=full", None),
        (
            "ds.json",
            '{"train_batch_size": 256, "gradient_accumulation_steps": 4, '
            '"zero_optimization": {"stage": 3}}',
            "zero=3,microbatches=4",
            256,
        ),
    ],
)
def test_settings_as_people_have_them(
    tmp_path: Path, file: str, text: str, fix: str, batch: int | None
) -> None:
    (tmp_path / file).write_text(text)
    settings = read(tmp_path / file)
    assert str(settings.pins) == fix
    assert settings.global_batch == batch


@pytest.mark.parametrize(
    ("trainer", "file", "text", "message"),
    [
        ("torchtitan", "a.py", "p = c.parallelism\np.tensor_parallel_degre = 2", "Did you mean"),
        (
            "torchtitan",
            "a.py",
            "c.training.num_tokens_per_train_step = 4",
            r"development branch.*reads 0.2 and 0.3.0",
        ),
        ("torchtitan", "a.py", "c.parallelism.tensor_parallel_degree = N", "is 'N'.*the number"),
        ("torchtitan", "a.py", "def (", "a.py:1: no Python"),
        ("torchtitan", "a.py", "x = 1", r"sets no field of torchtitan's parallelism"),
        ("torchtitan", "a.toml", "= 1", "no TOML"),
        (
            "torchtitan",
            "a.py",
            "p = c.parallelism\np.pipeline_parallel_degree = 2\n"
            'p.pipeline_parallel_schedule = "Zigzag"',
            "Zigzag has no price",
        ),
        (
            "megatron",
            "a.sh",
            "--model-parallel-size 8 --micro-batch-size 1",
            "old Megatron.*--tensor",
        ),
        (
            "megatron",
            "a.sh",
            "--micro-batch-size 1 --tensor-model-paralel-size 8",
            "Did you mean tensor-model-parallel-size",
        ),
        (
            "megatron",
            "a.sh",
            "--tensor-model-parallel-size $TP",
            r"--tensor-model-parallel-size is '\$TP'",
        ),
        ("megatron", "a.sh", "echo 'hello", "no shell text"),
        ("megatron", "a.sh", "echo hello", "none of Megatron's arguments"),
        (
            "megatron",
            "a.sh",
            '--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout "Et|t|tL"',
            "3 stages, which pp 2 does not divide",
        ),
        ("accelerate", "a.yaml", "a: b", "no distributed_type"),
        ("accelerate", "a.yaml", "a: [", "a.yaml"),
        ("accelerate", "a.yaml", "distributed_type: MOON", "MOON is not read"),
        (
            "accelerate",
            "a.yaml",
            "distributed_type: FSDP\nparallelism_config: {parallelism_config_pp_size: 2}",
            "which Accelerate 1.15 does not",
        ),
        (
            "accelerate",
            "a.yaml",
            "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}",
            "give that file",
        ),
        ("deepspeed", "a.json", "{", "no JSON"),
        ("deepspeed", "a.json", "{}", "none of DeepSpeed's keys"),
        ("deepspeed", "a.json", '{"zero_optimization": {"stage": 4}}', "stage 4"),
        ("deepspeed", "a.json", '{"zero_optimization": 3}', "takes an object"),
        (
            "deepspeed",
            "a.json",
            '{"zero_optimization": {"stage": 3, "mics_shard_size": 8}}',
            "MiCS was removed in 0.19",
        ),
    ],
)
def test_what_is_not_understood_is_told(trainer: str, file: str, text: str, message: str) -> None:
    with pytest.raises(NotImported, match=message):
        READERS[trainer](text, file)


def test_files_and_trainers_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotImported, match=r"cannot read .*torchtitan recipe"):
        read(tmp_path / "none.json")
    with pytest.raises(NotImported, match="Did you mean megatron"):
        read(tmp_path / "none.json", "megatorn")
    (tmp_path / "a.json").write_bytes(b"\xff\xfe")
    with pytest.raises(NotImported, match="no text"):
        read(tmp_path / "a.json")
