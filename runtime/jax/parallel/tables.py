"""What the tables of ``model.py`` are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

Array = Any
Arrays = Mapping[str, Array]
State = dict[str, Any]
"""``params`` and one dict of arrays for each slot of the optimizer, what is ``frozen``, and the
number of ``step``s; in float16 the loss's ``scale``."""

SHARD = "dp_shard"
"""A mesh axis that splits samples and shares the state of parameters."""
MOVED = "moved"
"""The name that layers keep gathered activations by: parameters are gathered over the same axis,
and again for backward."""
PIPELINE = "pp"
"""The mesh axis along which stages lie."""
SAMPLE_AXES = ("dp_replicate", SHARD, "ep")
"""The mesh axes that split samples."""
SEQUENCE_AXES = ("cp_outer", "cp", "cp_head")
"""Those that split the tokens of each sample."""
DATA_AXES = (*SAMPLE_AXES, *SEQUENCE_AXES)
"""Those that split the batch."""
SHARING = DATA_AXES[1:]
"""Those whose ranks share the state of what they do not split."""

FP32, BF16, FP16 = map(jnp.dtype, ("float32", "bfloat16", "float16"))
"""Dtypes as ``model.py`` names them; a check in float64 puts that in their place."""

WHOLE = PartitionSpec()


@dataclass(frozen=True)
class Settings:
    """How a step runs.

    zero:         what ``dp_shard`` splits between steps: 0 nothing, 1 the optimizer's state, 2
                  gradients too, 3 parameters too (Rajbhandari et al. 2020, "ZeRO", section 5).
    microbatches: of a step, their gradients added up.
    precision:    dtype of compute; ``float32`` computes in the dtypes that parameters have.
    recompute:    what is made again for backward: ``none`` keeps the results of products and the
                  like, ``compute`` those of collectives, ``full`` a layer's input.
    whole_inputs: batch entries that every microbatch and device gets uncut.
    counts:       batch entries that are numbers of the whole batch, in their own dtype.
    order:        how pieces of sequences lie: ``contiguous``, or in ``zigzag``.
    reduce_dtype: in which axes that share state sum gradients; None: as they are stored.
    scatters:     axes over which a reduce-scatter is two, with the ranks of the first, see
                  `scatter`; ``"dp_shard+cp"`` are two as one group.
    """

    zero: int = 0
    microbatches: int = 1
    precision: str = "float32"
    recompute: str = "none"
    whole_inputs: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    order: str = "contiguous"
    reduce_dtype: str | None = None
    scatters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Parameter:
    """A parameter: global shape, the model axes on its dims, stored dtype.

    ``spec``:     may be shorter than the shape; the dims that it leaves out are whole.
    ``deferred``: axes on which every rank has all of it and a part of its gradient.
    ``frozen``:   an array that the loss closes over: no gradient, no optimizer state.
    ``buffer``:   one that ``dp_shard`` does not cut, in its own dtype.
    """

    shape: tuple[int, ...]
    spec: PartitionSpec = WHOLE
    dtype: str = "float32"
    deferred: tuple[str, ...] = ()
    frozen: bool = False
    buffer: bool = False


@dataclass(frozen=True)
class Block:
    """A block: the module paths of its layers, and one layer's parameters by name. The layers are
    stored stacked along a first dim."""

    layers: tuple[str, ...]
    parameters: Mapping[str, Parameter]


@dataclass(frozen=True)
class Value:
    """What travels between stages: the piece of one device, for one microbatch.

    ``gradient``: whether one comes back; integers have none.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    gradient: bool = True


@dataclass(frozen=True)
class Stage:
    """A part of the model that the devices of one place on ``pp`` run.

    ``function``:   of its parameters and of what it takes; gives one array, or a tuple.
    ``rank``:       the place on ``pp``.
    ``takes``:      entries of the batch, and values of earlier stages.
    ``gives``:      values, ``loss``, its share of that of a microbatch, and names of ``OUTPUTS``.
    ``parameters``: names of those in no block. ``layers``: of each block, the module paths.
    ``recompute``:  where it is not that of ``SETTINGS``.
    """

    function: Callable[..., Any]
    rank: int
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    recompute: str | None = None


LOSS = "loss"
"""The name under which a stage gives its share of the loss."""
AGAIN = " again"
"""Behind the names of what a second pipeline through the same parts gives."""
