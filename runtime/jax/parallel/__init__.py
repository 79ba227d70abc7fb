"""What emitted JAX programs stand on: these modules, put together as ``parallel.py`` beside them.

They import jax and numpy and each other, so that a program trains where nothing else is installed.
`autopar run` and `autopar verify` run the ``parallel.py`` of the program; of these modules, `Step`
is there for texts of programs that are in no folder.
"""

from __future__ import annotations

from autopar.runtime.jax.parallel.attention_rows import attention
from autopar.runtime.jax.parallel.blocks import Stack, derivative, layer, layers
from autopar.runtime.jax.parallel.collectives import (
    all_reduce,
    all_to_all,
    copy_to,
    gather,
    in_transit,
    keep_first,
    pad,
    reduce_scatter,
    scatter,
    shard,
    turns_of,
    whole,
)
from autopar.runtime.jax.parallel.gradients import (
    clipped,
    join_pieces,
    norm_of,
    own_pieces,
    squares_of,
)
from autopar.runtime.jax.parallel.grouped import experts, grouped_linear
from autopar.runtime.jax.parallel.kept import restore, save
from autopar.runtime.jax.parallel.layout import (
    Layout,
    Leaf,
    MissingParameters,
    by_name,
    paths_of,
    stacked,
)
from autopar.runtime.jax.parallel.leaving import leave_at_once
from autopar.runtime.jax.parallel.loss_head import linear_cross_entropy
from autopar.runtime.jax.parallel.loss_scale import (
    SCALE_SPECS,
    first_scale,
    next_scale,
    overflowed,
    scaled_norm,
    settled,
)
from autopar.runtime.jax.parallel.ops import (
    clamp,
    conv,
    cross_entropy,
    embedding,
    layer_norm,
    linear,
    rms_norm,
)
from autopar.runtime.jax.parallel.optimizer import SLOTS, optimizer_step
from autopar.runtime.jax.parallel.outputs import OutputKinds, Outputs
from autopar.runtime.jax.parallel.part import Held, Part
from autopar.runtime.jax.parallel.pipeline import Pipeline
from autopar.runtime.jax.parallel.placing import make_mesh, placed, put
from autopar.runtime.jax.parallel.ring_attention import ring_attention
from autopar.runtime.jax.parallel.stage_step import StageStep, held_of
from autopar.runtime.jax.parallel.start import (
    batch_of,
    initial_parameters,
    read_constants,
    read_draws,
    read_workload,
    see_devices,
)
from autopar.runtime.jax.parallel.step import Step
from autopar.runtime.jax.parallel.tables import (
    BF16,
    FP16,
    FP32,
    LOSS,
    Array,
    Arrays,
    Block,
    Parameter,
    Settings,
    Stage,
    State,
    Value,
)
from autopar.runtime.jax.parallel.units import gathered, reducing

__all__ = [
    "BF16", "FP16", "FP32", "LOSS", "SCALE_SPECS", "SLOTS", "Array", "Arrays", "Block", "Held",
    "Layout", "Leaf", "MissingParameters", "OutputKinds", "Outputs", "Parameter", "Part",
    "Pipeline", "Settings", "Stack", "Stage", "StageStep", "State", "Step", "Value",
    "all_reduce", "all_to_all", "attention", "batch_of", "by_name", "clamp", "clipped", "conv",
    "copy_to", "cross_entropy", "derivative", "embedding", "experts", "first_scale", "gather",
    "gathered", "grouped_linear", "held_of", "in_transit", "initial_parameters", "join_pieces",
    "keep_first", "layer", "layer_norm", "layers", "leave_at_once", "linear",
    "linear_cross_entropy", "make_mesh", "next_scale", "norm_of", "optimizer_step",
    "overflowed", "own_pieces", "pad", "paths_of", "placed", "put", "read_constants",
    "read_draws", "read_workload", "reduce_scatter", "reducing", "restore", "ring_attention",
    "rms_norm", "save", "scaled_norm", "scatter", "see_devices", "settled", "shard",
    "squares_of", "stacked", "turns_of", "whole",
]  # fmt: skip
