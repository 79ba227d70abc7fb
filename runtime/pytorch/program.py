"""Everything that emitted programs import.

``FP32`` is the dtype of what the model computes in float32 whatever its own dtype is;
`autopar.runtime.verify.pytorch.verify` replaces it before it loads a program.
"""

from __future__ import annotations

import torch

from autopar.runtime.pytorch.batch_norm import batch_norm
from autopar.runtime.pytorch.carried import carry
from autopar.runtime.pytorch.collectives import (
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
from autopar.runtime.pytorch.ctc import ctc_loss
from autopar.runtime.pytorch.dropout import dropout
from autopar.runtime.pytorch.experts import experts
from autopar.runtime.pytorch.feed_forward import feed_forward
from autopar.runtime.pytorch.gated_activation import gated_activation
from autopar.runtime.pytorch.held_layers import (
    BatchNorm,
    Conv,
    Embedding,
    GroupNorm,
    LayerNorm,
    Linear,
    RMSNorm,
)
from autopar.runtime.pytorch.layers import (
    Modules,
    Weights,
    attention,
    device,
    repeat_heads,
    scatter_sum,
)
from autopar.runtime.pytorch.loss_head import linear_cross_entropy
from autopar.runtime.pytorch.norms import rms_norm, rotary
from autopar.runtime.pytorch.own_functions import own_function
from autopar.runtime.pytorch.parameters import Buffer, Parameter, local
from autopar.runtime.pytorch.pieces import (
    copied_linear,
    copied_linears,
    gathered_linear,
    gathered_linears,
    linear_reduced,
    linear_scattered,
)
from autopar.runtime.pytorch.placed_rows import place_rows
from autopar.runtime.pytorch.probe import probe
from autopar.runtime.pytorch.recomputing import recompute
from autopar.runtime.pytorch.ring_attention import ring_attention
from autopar.runtime.pytorch.row_places import row_places
from autopar.runtime.pytorch.scaled_products import scaled_linear
from autopar.runtime.pytorch.sliced_attention import sliced_attention
from autopar.runtime.pytorch.stage import Stage, Value
from autopar.runtime.pytorch.vocabulary import cross_entropy, embedding
from autopar.runtime.shared.settings import Settings

FP32 = torch.float32

__all__ = [
    "FP32", "BatchNorm", "Buffer", "Conv", "Embedding", "GroupNorm", "LayerNorm", "Linear",
    "Modules", "Parameter", "RMSNorm", "Settings", "Stage", "Value", "Weights", "all_reduce",
    "all_to_all", "attention", "batch_norm", "carry", "copied_linear", "copied_linears", "copy_to",
    "cross_entropy", "ctc_loss", "device", "dropout", "embedding", "experts", "feed_forward",
    "gated_activation",
    "gather", "gathered_linear", "gathered_linears", "keep_first", "linear_cross_entropy",
    "linear_reduced", "linear_scattered", "local", "own_function",
    "pad", "place_rows", "probe", "recompute", "reduce_scatter", "repeat_heads", "ring_attention",
    "rms_norm", "rotary", "row_places",
    "scaled_linear", "scatter_sum", "shard", "sliced_attention", "whole",
]  # fmt: skip
