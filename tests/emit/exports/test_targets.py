"""What is exported is given to the target itself, where it is installed."""

from __future__ import annotations

import dataclasses
import json
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from autopar.emit.exports import accelerate, deepspeed, torchtitan, transformers
from autopar.emit.exports.setup import Figures, Setup
from tests.emit.exports.setups import experts, gpt, layout


def installed(name: str, version: str = "") -> Any:
    """The package, imported with whatever it warns of; the test is skipped where it is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = name.partition(".")[0]
        why = f"{name} is not there; `pip install {package}{version}` to give it the files"
        return pytest.importorskip(name, reason=why, exc_type=ImportError)


def executed(text: str, name: str) -> Any:
    module = types.ModuleType(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module


INTERLEAVED = layout(
    pp=2, cp=1, dp_shard=4, interleave=2, schedule="interleaved-1f1b", microbatches=8
)
SELECTIVE = layout(
    pp=1,
    schedule="none",
    recompute="selective",
    sequence_parallel=False,
    dp_replicate=2,
    microbatches=8,
    zero=2,
)
QWEN = experts(figures=Figures(48, 2048, 768, 151936, 128), layers=48)


@pytest.mark.parametrize("setup", [gpt(), layout(), INTERLEAVED, SELECTIVE, QWEN])
def test_torchtitan_makes_its_configuration(setup: Setup) -> None:
    installed("torchtitan", "==0.3.0")
    installed("torchtitan.trainer", "; pip install triton")
    recipe = executed(torchtitan.export(setup).files["autopar_recipe.py"], "autopar_recipe")
    config = recipe.run()
    dataclasses.replace(config)  # its own checks run again, with every field in place
    p, t = config.parallelism, config.training
    assert p.data_parallel_shard_degree == setup.layout.dp_shard
    assert p.tensor_parallel_degree == setup.layout.tp
    assert p.pipeline_parallel_degree == setup.layout.pp
    ranks = setup.layout.dp
    if setup.layout.pp > 1:
        assert t.local_batch_size == setup.layout.microbatch * setup.layout.microbatches
        names = [name for part in p.module_fqns_per_model_part for name in part]
        wanted = [f"layers.{n}" for n in range(32)]
        assert names == ["tok_embeddings", *wanted, "norm", "lm_head"]
        assert len(p.module_fqns_per_model_part) == setup.stages
        from torch.distributed.pipelining.schedules import get_schedule_class

        get_schedule_class(p.pipeline_parallel_schedule)
    else:
        assert t.global_batch_size == t.local_batch_size * ranks * setup.layout.microbatches


@pytest.mark.parametrize(
    "setup",
    [
        gpt(),
        layout(pp=1, tp=1, schedule="none", microbatches=8, dp_shard=4, recompute="none"),
        experts(cp=1, zero=2),
    ],
)
def test_deepspeed_reads_its_configuration(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("deepspeed", ">=0.19")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepspeed.runtime.config import DeepSpeedConfig

        settings = json.loads(deepspeed.export(setup).files["deepspeed.json"])
        config = DeepSpeedConfig(settings)
    assert config.train_micro_batch_size_per_gpu == setup.layout.microbatch
    assert config.gradient_accumulation_steps == setup.layout.microbatches
    assert config.zero_config.stage == setup.layout.zero
    if setup.layout.tp > 1:
        tensor = config.tensor_parallel_config
        assert tensor.autotp_size == setup.layout.tp
        if setup.parameters:
            specs = tensor.get_partition_config_object()
            kinds = {
                name: specs.find_matching_spec(f"blocks.3.{name}.weight").partition_type.value
                for name in ("attention.q", "attention.out", "up", "down")
            }
            rows = {"attention.out": "row", "down": "row"}
            assert kinds == {"attention.q": "column", "up": "column", **rows}
    if setup.layout.ep > 1:
        assert config.expert_parallel_config.autoep_size == setup.layout.ep


@pytest.mark.parametrize("setup", [gpt(), layout(pp=1, schedule="none", microbatches=8)])
def test_accelerate_reads_its_configuration(setup: Setup, tmp_path: Path) -> None:
    installed("accelerate", ">=1.15")
    from accelerate import ParallelismConfig
    from accelerate.commands.config.config_args import ClusterConfig

    text = accelerate.export(setup).files["accelerate.yaml"]
    (tmp_path / "accelerate.yaml").write_text(text)
    config = ClusterConfig.from_yaml_file(str(tmp_path / "accelerate.yaml"))
    assert config.num_processes == setup.layout.device_count
    prefix = "parallelism_config_"
    sizes = {name.removeprefix(prefix): size for name, size in config.parallelism_config.items()}
    assert ParallelismConfig(**sizes).total_size == setup.layout.device_count


@pytest.mark.parametrize("setup", [gpt(), experts(cp=1)])
def test_transformers_makes_its_configuration(setup: Setup, tmp_path: Path) -> None:
    installed("transformers")
    installed("accelerate", ">=1.15")
    text = transformers.export(setup).files["autopar_distributed.py"]
    made = executed(text, "autopar_distributed")
    config = made.distributed_config()
    assert (config.tp_size, config.fsdp_size, config.ep_size) == (
        setup.layout.tp,
        setup.layout.dp_shard,
        setup.layout.ep,
    )
    if setup.precision == "float32":
        arguments = made.training_arguments(str(tmp_path))
        assert arguments.per_device_train_batch_size == setup.layout.microbatch
        assert arguments.gradient_accumulation_steps == setup.layout.microbatches


def test_maxtext_knows_the_keys(tmp_path: Path) -> None:
    from autopar.emit.exports import maxtext

    base = Path(str(installed("maxtext").__file__)).parent / "configs" / "base.yml"
    known = yaml.safe_load(base.read_text())
    for setup in (gpt(), layout(), experts()):
        settings = yaml.safe_load(maxtext.export(setup).files["autopar.yml"])
        assert set(settings) - {"base_config"} <= set(known)
