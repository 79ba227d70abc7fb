"""Everything that emitted programs import.

``FP32`` is the dtype of what the model computes in float32 whatever its own dtype is;
`autopar.runtime.verify` replaces it before it loads a program.
"""

from __future__ import annotations

import torch

from autopar.runtime.batch_norm import batch_norm
from autopar.runtime.collectives import (
    all_reduce,
    all_to_all,
    copy_to,
    gather,
    keep_first,
    pad,
    reduce_scatter,
    shard,
    whole,
)
from autopar.runtime.dropout import dropout
from autopar.runtime.layers import (
    Weights,
    attention,
    device,
    repeat_heads,
)
from autopar.runtime.norms import rms_norm, rotary
from autopar.runtime.own_functions import own_function
from autopar.runtime.parameters import Buffer, Parameter, local
from autopar.runtime.probe import probe
from autopar.runtime.recomputing import recompute
from autopar.runtime.settings import Settings
from autopar.runtime.vocabulary import cross_entropy, embedding

FP32 = torch.float32

__all__ = [
    "FP32",
    "Buffer",
    "Parameter",
    "Settings",
    "Weights",
    "all_reduce",
    "all_to_all",
    "attention",
    "batch_norm",
    "copy_to",
    "cross_entropy",
    "device",
    "dropout",
    "embedding",
    "gather",
    "keep_first",
    "local",
    "own_function",
    "pad",
    "probe",
    "recompute",
    "reduce_scatter",
    "repeat_heads",
    "rms_norm",
    "rotary",
    "shard",
    "whole",
]
