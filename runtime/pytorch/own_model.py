"""A user's `nn.Module` object: the same without memory, its weights as initial ones, and whether it
is the one that was planned."""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.nouns.batch import BatchEntry
from autopar.nouns.errors import UserError
from autopar.nouns.graph import Graph, without_sources
from autopar.nouns.text.graph import to_text
from autopar.nouns.workload import WorkloadError
from autopar.runtime.pytorch.initialize import Target, fill
from autopar.runtime.pytorch.recording import named_tensors
from autopar.runtime.shared.planned_workload import is_module

SMALL = 1 << 14
"""Elements; larger buffers are made without values. As in `frontends.pytorch.build`."""


class WeightsDiffer(UserError):
    """The ranks of one job start from different weights."""


class WithoutWeights(UserError):
    """A model on the meta device has no weights to start from."""


def skeleton(module: nn.Module) -> nn.Module:
    """A copy of ``module`` whose parameters, and large buffers, lie on the meta device; ties and
    modes stay."""
    kept: dict[int, object] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        kept[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        if buffer.numel() > SMALL:
            kept[id(buffer)] = torch.empty_like(buffer, device="meta")
    made: nn.Module = copy.deepcopy(module, kept)
    return made


def zeros(entries: Iterable[BatchEntry]) -> Mapping[str, torch.Tensor]:
    """A batch of the shapes that were planned for."""
    return {e.name: torch.zeros(e.shape, dtype=getattr(torch, e.dtype)) for e in entries}


def fields(model: Any, entries: Sequence[BatchEntry]) -> Mapping[str, Any]:
    """Those of a `Workload` of ``model``, a module, or a class or function that makes one, for
    batches of ``entries``. Raises `WorkloadError`."""
    if not callable(model):
        raise WorkloadError(
            f"load(plan, model={type(model).__name__}): give an nn.Module, a class or function "
            "that makes one, or an autopar.Workload"
        )
    make = partial(skeleton, model) if is_module(model) else model
    return {"model": make, "batch": lambda: zeros(entries)}


def start_from(module: nn.Module, targets: Mapping[str, Target]) -> None:
    """Fills every target with its piece of ``module``'s current weights.

    A collective call. Raises `WithoutWeights`, and `WeightsDiffer` on every rank where they hold
    others: pieces of different models would make no model.
    """
    tensors = dict(named_tensors(module))
    empty = [name for name, tensor in tensors.items() if tensor.is_meta and name in targets]
    if empty:
        raise WithoutWeights(
            f"the model lies on the meta device ({empty[0]} has no values): give load its class or "
            "a function that makes it, and where its weights come "
            "from a folder, call trainer.load_weights(folder) afterwards"
        )
    _check_alike(tensors)
    fill(tensors, targets)


def _check_alike(tensors: Mapping[str, torch.Tensor]) -> None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own = {name: _digest(tensor) for name, tensor in tensors.items()}
    total = zlib.crc32(repr(sorted(own.items())).encode())
    every = [total] * dist.get_world_size()
    dist.all_gather_object(every, total)
    if len(set(every)) == 1:
        return
    tables = [own] * dist.get_world_size()
    dist.all_gather_object(tables, own)
    rank = next(r for r, t in enumerate(tables) if t != tables[0])
    name = next((n for n in own if tables[rank].get(n) != tables[0].get(n)), "its parameters")
    raise WeightsDiffer(
        f"the model of rank {rank} does not start from the weights of rank 0 ({name} differs): "
        "call torch.manual_seed with one number on all ranks before the model is made, load the "
        "same weights into it, or give load the class"
    )


def _digest(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data)


def difference(now: Graph, planned: Graph) -> str:
    """What the model that was captured ``now`` has otherwise than the planned one, in words: its
    parameters, else the first line of the forward; empty: nothing."""
    own, theirs = dict(now.parameters()), dict(planned.parameters())
    more = [name for name in own if name not in theirs]
    less = [name for name in theirs if name not in own]
    parts = [f"it has {_listed(more)}, the planned one has not"] if more else []
    parts += [f"it lacks {_listed(less)}, which the planned one has"] if less else []
    for name, tensor in own.items():
        was = theirs.get(name, tensor)
        if (was.shape, was.dtype) != (tensor.shape, tensor.dtype):
            shown = f"{tensor.dtype} {list(tensor.shape)}"
            parts.append(f"{name} is {shown} and was {was.dtype} {list(was.shape)}")
    if parts:
        return "; ".join(parts[:3])
    lines = [to_text(without_sources(graph)).splitlines() for graph in (now, planned)]
    pairs = itertools.zip_longest(*lines, fillvalue="nothing")
    return next((f"`{a.strip()}` was `{b.strip()}`" for a, b in pairs if a != b), "")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
