"""Every target by the name that ``--to`` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from autopar.emit.exports import (
    accelerate,
    axlearn,
    deepspeed,
    launchers,
    levanter,
    maxtext,
    megatron,
    megatron_bridge,
    partition_specs,
    torchtitan,
    transformers,
)
from autopar.emit.exports.setup import Setup
from autopar.emit.exports.text import Export
from autopar.nouns.errors import UserError, did_you_mean

TARGETS: Mapping[str, Callable[[Setup], Export]] = MappingProxyType(
    {
        "torchtitan": torchtitan.export,
        "megatron": megatron.export,
        "megatron-bridge": megatron_bridge.export,
        "deepspeed": deepspeed.export,
        "accelerate": accelerate.export,
        "transformers": transformers.export,
        "maxtext": maxtext.export,
        "levanter": levanter.export,
        "axlearn": axlearn.export,
        "partition-specs": partition_specs.export,
        "slurm": launchers.slurm,
        "kubeflow": launchers.kubeflow,
        "ray": launchers.ray,
        "skypilot": launchers.skypilot,
    }
)


def target(name: str) -> Callable[[Setup], Export]:
    """Raises `UserError` for a name that is none."""
    if name not in TARGETS:
        raise UserError(
            f"--to {name}: there is no such target. {did_you_mean(name, TARGETS)}"
            f"Choose among {', '.join(TARGETS)}"
        )
    return TARGETS[name]
