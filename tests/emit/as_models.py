"""Calls of ops and modules as small models, under stages that are drawn.

The first dim of a call's first tensor is the batch, and so is the first one of every other tensor
that is as long; what is left are parameters or buffers. Numbers are scaled by a parameter, so its
gradient is wrong where any other one is; the loss is made of all that the call makes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.frontends.pytorch.capture import capture
from autopar.frontends.shared.captured import Captured
from autopar.nouns.axes import SAMPLES
from autopar.nouns.errors import UserError
from autopar.nouns.mesh import Mesh
from autopar.nouns.workload import Workload
from autopar.rules.batch import batch_flow
from autopar.rules.registry import bind
from autopar.rules.strategies import choices
from tests.emit.harness import check, emitted
from tests.emit.random_stage import random_stage
from tests.outcomes import Outcome, crash

RANKS = 4
STAGES = (
    (Mesh(("dp_replicate", "tp"), (2, 2)), 0),
    (Mesh(("dp_replicate",), (4,)), 0),
    (Mesh(("tp",), (4,)), 0),
    (Mesh(("dp_replicate", "tp"), (2, 2)), 1),
    (Mesh(("tp",), (4,)), 1),
)
"""Meshes, and what a stage there is drawn by."""


class CalledModel(nn.Module):
    """``build`` gives what is called with ``arguments`` (args, kwargs); ``entries`` are the batch;
    ``leaves`` says where each argument comes from. ``alone``: no tensor but the first has samples.
    """

    def __init__(self, build: Callable[[], Any], arguments: Any, alone: bool = False) -> None:
        super().__init__()
        self.called = build()
        self.scale = nn.Parameter(torch.ones(1))
        leaves, tree = pytree.tree_flatten(arguments)
        self.arguments = lambda leaves: pytree.tree_unflatten(leaves, tree)
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        count = tensors[0].shape[0] if tensors and tensors[0].dim() else None
        self.entries: dict[str, Tensor] = {}
        self.leaves: list[tuple[str, Any]] = []
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                self.leaves.append(("constant", leaf))
            elif leaf.dim() and leaf.shape[0] == count and not (alone and self.entries):
                self.entries[f"x{place}"] = _enough(leaf.detach())
                self.leaves.append(("entry", f"x{place}"))
            else:
                self._hold(f"held{place}", leaf)
                self.leaves.append(("held", f"held{place}"))

    def _hold(self, name: str, leaf: Tensor) -> None:
        own = leaf.detach().clone()
        if leaf.requires_grad:
            setattr(self, name, nn.Parameter(own))
        else:
            self.register_buffer(name, own)

    def run(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        leaves = []
        for kind, leaf in self.leaves:
            value = getattr(self, leaf) if kind == "held" else leaf
            if kind == "entry":
                value = batch[leaf]
                value = value * self.scale if value.is_floating_point() else value
            leaves.append(value)
        args, kwargs = self.arguments(leaves)  # type: ignore[no-untyped-call]
        loss = self.scale.sum() * 0.5
        for made in pytree.tree_leaves(self.called(*args, **kwargs)):
            if isinstance(made, Tensor):
                real = (made.abs() if made.is_complex() else made).to(torch.float32)
                loss = loss + (real * real).mean() * self.scale.sum()
        return {"loss": loss}


def workload_of(build: Callable[[], Any], arguments: Any, alone: bool = False) -> Workload:
    """Of a `CalledModel` whose forward names its entries."""
    first = CalledModel(build, arguments, alone)
    names = list(first.entries)
    given, passed = ", ".join(names), ", ".join(f"{n}={n}" for n in names)
    scope: dict[str, Any] = {}
    exec(f"def forward(self, {given}):\n    return self.run(dict({passed}))", scope)
    model = type("Called", (CalledModel,), {"forward": scope["forward"]})
    return Workload(
        model=partial(model, build, arguments, alone),
        batch=lambda: {key: value.clone() for key, value in first.entries.items()},
    )


def tried(
    name: str, number: int, given: Workload, stages: Sequence[tuple[Mesh, int]]
) -> Iterator[Outcome]:
    assert given.model is not None
    model, batch = given.model(), given.batch()
    if why := _not_run(given.model(), batch):
        yield Outcome(name, number, "", "not run", why)
        return
    try:
        captured = capture(given)
    except UserError as error:
        yield Outcome(name, number, "", "no plan", str(error))
        return
    except Exception as error:  # what this is for
        yield Outcome(name, number, "", "WRONG", crash(error))
        return
    for mesh, seed in stages:
        made = _checked(captured, mesh, seed, model, batch)
        yield Outcome(name, number, f"{mesh} {seed}", *made)


def quietly() -> None:
    """For a whole process: one thread, and no warnings of what is called as its own tests do."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def _not_run(model: nn.Module, batch: Mapping[str, Tensor]) -> str:
    """Why the model itself does not train, in words."""
    try:
        loss = model(**batch)["loss"]
        loss.backward()
    except (RuntimeError, IndexError, ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return "" if all(t.isfinite().all() for t in (loss, *gradients)) else "no finite number"


def _divides(captured: Captured, mesh: Mesh) -> bool:
    """Whether the batch may be cut into as many pieces as the mesh wants: a channel that is taken
    for a sample may be one of a group."""
    ways = mesh.ways(SAMPLES)
    dims = {e.name: e.batch_dim for e in captured.batch if e.batch_dim is not None}
    flow = batch_flow(captured.graph, dims).choices
    for op in captured.graph.ops:
        if op.kind == "block":
            continue
        bound = bind(op, captured.graph.tensors)
        if flow[op.name] in bound.factors and flow[op.name] not in choices(bound, ways, False):
            return False
    return True


def _checked(
    captured: Captured, mesh: Mesh, seed: int, model: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[str, str]:
    try:
        if not _divides(captured, mesh):
            return "no plan", "the batch cannot be cut so"
        # In float64 what is half as wide moves in eight bytes, too.
        narrow = {t.dtype for t in captured.graph.tensors.values()} & {"bfloat16", "float16"}
        made = emitted(captured, random_stage(captured, mesh, 1, seed))
        check(made, model, batch, issued=not narrow)
    except UserError as error:
        return "no plan", str(error)
    except AssertionError as error:
        return "WRONG", str(error)
    except Exception as error:  # what this is for
        return "WRONG", crash(error)
    return "right", ""


def _enough(x: Tensor) -> Tensor:
    """As many samples that `RANKS` divide them: more that are others."""
    parts = [x]
    while sum(p.shape[0] for p in parts) % RANKS:
        more = x.flip(0) if len(parts) % 2 else x
        parts.append(more * (1 - 0.1 * len(parts)) if x.is_floating_point() else more)
    return torch.cat(parts) if len(parts) > 1 else x.clone()
