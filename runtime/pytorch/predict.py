"""Results of the forward pass beside the loss, such as logits, under every plan.

The program's forward is run with a probe behind each of its results, as verification does, and the
one that was asked for is put together over the model axes. Its methods stand in for the program's
own while that lasts, so parameters, hooks and ZeRO are as in evaluation.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.emit.marks import instrumented
from autopar.files import plan_folder
from autopar.lowering.of_plan import batch_dims, plan_cut, planned_graph
from autopar.nouns.axes import MICROBATCH, PIPELINE, SAMPLES, SLICE, TIMES
from autopar.nouns.errors import UserError, did_you_mean
from autopar.nouns.graph import Graph, Op
from autopar.nouns.plan import key as plan_key
from autopar.nouns.sharding import Placement, Sharding
from autopar.nouns.workload import Workload
from autopar.runtime.pytorch.agreement import of_first, together
from autopar.runtime.pytorch.portions import Microbatch, weight_of
from autopar.runtime.pytorch.probe import listen, recording
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.zigzag import from_gathered
from autopar.runtime.shared.edits import edits_of, program_of
from autopar.runtime.shared.program_module import run_program

PROBE = "autopar.runtime.pytorch.probe.probe"
VIEWS = ("reshape", "cast", "transpose", "expand", "slice", "detach")


class NoResult(UserError):
    """A result that the model does not have."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The key of a result, and the text of the program with a probe behind every result.

    layer: the path of the layer that has it, of those that repeat; "" outside of them.
    """

    key: str
    text: str
    layer: str = ""


def asked(folder: Path, workload: Workload, module: str | None) -> Asked:
    """What gives the result of ``module``, see `Trainer.predict`. A collective call: the first rank
    captures the model. Raises `NoResult` on all of them."""
    return of_first(together(lambda: _asked(folder, workload, module) if _is_first() else None))  # type: ignore[return-value]


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _asked(folder: Path, workload: Workload, module: str | None) -> Asked:
    from autopar.frontends.pytorch import capture

    made, captured = plan_folder.read_plan(folder), capture(workload)
    key, layer = _result_of(captured.graph, module) if module else (_scores(captured.graph), "")
    edited = edits_of(folder, made, captured)
    plan = made
    if not _has(planned_graph(made, captured.graph), key):
        if edited:
            what = (
                f"makes its logits in {made.loss_chunks} chunks, and cannot be asked for all of "
                "them"
                if key in captured.graph.tensors
                else "runs it inside a kernel, and cannot be asked for it"
            )
            raise NoResult(f"predict({module!r}): the program {what} once it is changed. {edited}")
        plan = replace(made, loss_chunks=None, kernels={})  # views of logits are then whole
    if key in plan_cut(plan, planned_graph(plan, captured.graph), batch_dims(captured.batch)).apart:
        raise NoResult(
            f"predict({module!r}): its result has samples and tokens in one dim, of which ranks "
            "along cp have pieces here and there; ask for a module before they are joined"
        )
    if not edited:
        return Asked(key, program_of(plan, captured, probes=True), layer)
    own = plan_folder.code_of(folder, plan_folder.MODEL).read_text()
    return Asked(key, instrumented(own, program_of(plan, captured, marks=True), PROBE), layer)


def _has(graph: Graph, key: str) -> bool:
    """Whether it makes the tensor of a plan's ``key``."""
    scope, _, name = key.rpartition("::")
    return name in (graph.blocks[scope].body if scope else graph).tensors


def _result_of(graph: Graph, module: str) -> tuple[str, str]:
    """The key of the last op of a module, and its layer."""
    own = [op for op in graph.ops if _lies_in(op, module)]
    if own and own[-1].kind != "block":
        return own[-1].name, ""
    layer = own[-1].attrs["instance"] if own else ""
    for block in graph.blocks.values():
        of_layer = layer or next((i for i in block.instances if module.startswith(f"{i}.")), "")
        if of_layer not in block.instances:
            continue
        inner = module.removeprefix(f"{of_layer}.") if not layer else ""
        body = block.body
        ops = [op for op in body.ops if (_lies_in(op, inner) if inner else _gives(body, op))]
        if ops and ops[-1].kind != "block":
            return plan_key(block.name, ops[-1].name), of_layer
    there = dict.fromkeys(
        name
        for op in graph.ops
        for name in ([op.attrs["instance"]] if op.kind == "block" else [op.source.module])
    )
    names = [name for name in there if name]
    inside = [
        f"{i}.{op.source.module}"
        for block in graph.blocks.values()
        for i in block.instances
        for op in block.body.ops
        if op.source.module
    ]
    raise NoResult(
        f"predict({module!r}): the model's forward has no such module. "
        f"{did_you_mean(module, [*names, *dict.fromkeys(inside)])}"
        f"There are {', '.join(names)}, and modules in these; without a name it is what the "
        "cross-entropy reads"
    )


def _lies_in(op: Op, module: str) -> bool:
    own = str(op.attrs["instance"]) if op.kind == "block" else op.source.module
    return own == module or own.startswith(f"{module}.")


def _gives(body: Graph, op: Op) -> bool:
    return body.outputs[0] in op.outputs


def _scores(graph: Graph) -> str:
    """What the loss's cross-entropy reads, before it is reshaped."""
    makers = {name: op for op in graph.ops for name in op.outputs}
    loss = next((op for op in reversed(graph.ops) if op.kind == "cross_entropy"), None)
    made = None if loss is None else makers.get(loss.inputs[0])
    while made is not None and made.kind in VIEWS:
        made = makers.get(made.inputs[0])
    if made is None or made.kind == "block":
        raise NoResult(
            "predict(): the model has no cross-entropy, whose logits could be meant; name the "
            "module whose result is asked for, as in trainer.predict(batch, 'head')"
        )
    return made.name


@contextmanager
def probed(own: nn.Module, text: str) -> Iterator[None]:
    """Inside, modules of the program that ``own`` is of run by the methods in ``text``."""
    other = vars(run_program(text, "<probed>"))
    kept: list[tuple[type, str, Any]] = []
    for kind in _classes(own):
        for name, function in vars(other.get(kind.__name__, object)).items():
            if isinstance(function, FunctionType) and not name.startswith("__"):
                kept.append((kind, name, vars(kind).get(name)))
    try:
        for kind, name, _ in kept:
            setattr(kind, name, vars(other[kind.__name__])[name])
        yield
    finally:
        for kind, name, before in kept:
            if before is None:
                delattr(kind, name)
            else:
                setattr(kind, name, before)


def _classes(own: nn.Module) -> list[type]:
    """The classes of the program's file."""
    names = {kind.__module__ for m in own.modules() for kind in type(m).__mro__}
    files = [vars(sys.modules[name]) for name in names if name.startswith("autopar_program_")]
    return [
        value
        for file in files
        for value in file.values()
        if isinstance(value, type) and value.__module__ == file["__name__"]
    ]


@contextmanager
def _heard(model: nn.Module, layer: str) -> Iterator[None]:
    """Inside, what is recorded is recorded while ``layer`` runs alone."""
    if not layer:
        yield
        return
    listen(False)
    hooks = []
    for name, module in model.named_modules():
        if name == layer or re.fullmatch(rf"\d+\.{re.escape(layer)}", name):  # of a stage
            hooks.append(module.register_forward_pre_hook(lambda *_: listen(True)))
            hooks.append(module.register_forward_hook(lambda *_: listen(False)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def result(
    run: Callable[[], object],
    want: Asked,
    model: nn.Module,
    microbatches: Sequence[Microbatch],
    ranks: Ranks,
    gather: bool,
    slices: int = 1,
) -> torch.Tensor:
    """The result of all samples of this data rank, or of all of them. ``run`` evaluates;
    ``slices``: into which the sequences of each sample are cut."""
    with probed(model, want.text), recording(only=want.key) as seen, _heard(model, want.layer):
        run()
    own = None
    if seen:
        rows = [bool(weight_of(part)) for part in microbatches]
        calls = len(seen) // len(rows)
        last = seen[calls - 1 :: calls] if calls else []
        sharding = Sharding.parse(last[0].sharding)
        parts = [_whole(one.value, sharding, ranks) for one in last]
        if slices > 1:
            parts, rows = _of_slices(parts, sharding.on(SLICE), slices), rows[::slices]
        dim = _batch_dim(sharding)
        if dim is None and any(a in (MICROBATCH, *SAMPLES) for a, _ in sharding.placements):
            raise NoResult(f"{want.key} is no result of each sample: a sum over the batch")
        dim = dim or 0
        own = torch.cat(
            [p if full else p.narrow(dim, 0, 0) for p, full in zip(parts, rows, strict=True)], dim
        )
        if gather:
            for axis in reversed(ranks.sample_axes):
                own = _joined(own, dim, ranks.group(axis))
    return _of_stage(own, ranks)


def _of_slices(parts: list[torch.Tensor], over: Placement, slices: int) -> list[torch.Tensor]:
    """What slices of a microbatch gave, put together; what is whole in each they have alike."""
    several = [parts[i : i + slices] for i in range(0, len(parts), slices)]
    if over.kind == "S":
        return [torch.cat(some, over.dim) for some in several]
    if over.kind == "P":
        return [torch.stack(some).sum(0) for some in several]
    return [some[0] for some in several]


def _batch_dim(sharding: Sharding) -> int | None:
    over = (p for a, p in sharding.placements if a in (MICROBATCH, *SAMPLES))
    return next((p.dim for p in over if p.kind == "S"), None)


def _whole(x: torch.Tensor, sharding: Sharding, ranks: Ranks) -> torch.Tensor:
    """Put together over the model axes, innermost first."""
    for axis, placement in reversed(sharding.placements):
        group = None if axis in (*TIMES, *SAMPLES) else ranks.group(axis)
        if group is not None and placement.kind == "S":
            x = _joined(x, placement.dim, group)
            if placement.zigzag:
                x = from_gathered(x, placement.dim, ranks.size(axis))
        elif group is not None and placement.kind == "P":
            x = x.clone()
            dist.all_reduce(x, group=group)
    return x


def _joined(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Pieces of a group along ``dim``, which may be of unequal size."""
    if group is None:
        return x
    size = torch.tensor([x.shape[dim]], device=x.device)
    sizes = [torch.empty_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    counts = [int(n) for n in sizes]
    shape = list(x.shape)
    shape[dim] = max(counts)
    padded = x.new_zeros(shape)
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    pieces = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(pieces, padded, group=group)
    return torch.cat([p.narrow(dim, 0, n) for p, n in zip(pieces, counts, strict=True)], dim)


def _of_stage(own: torch.Tensor | None, ranks: Ranks) -> torch.Tensor:
    """On all ranks of a pipeline what the last of them that has it has."""
    group = ranks.group(PIPELINE)
    if group is None:
        assert own is not None
        return own
    every: list[Any] = [None] * group.size()
    about = None if own is None else (tuple(own.shape), own.dtype)
    dist.all_gather_object(every, about, group=group)
    place = max(i for i, held in enumerate(every) if held is not None)
    shape, dtype = every[place]
    if own is None or group.rank() != place:
        own = torch.empty(shape, dtype=dtype, device=ranks.device)
    own = own.contiguous()
    dist.broadcast(own, dist.get_global_rank(group, place), group=group)
    return own
