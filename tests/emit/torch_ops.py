"""Every op of PyTorch's own test database as a small model, under stages that are drawn.

    python -m tests.emit.torch_ops [--only NAME]... [--part 0/2] [--dtype float32] [--in-place]

The first dim of an op's first tensor is the batch, and so is the first one of every other tensor
that is as long; what is left are parameters or buffers. Numbers are scaled by a parameter, so its
gradient is wrong where any other one is. Of two samples an op, captured once, a line for each of
five stages of simulated ranks: right; WRONG; no plan, with what it says; not run, where the op
itself does not take a batch or has no derivative.
"""

from __future__ import annotations

import argparse
import sys
import traceback
import unittest
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
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

EXTENT = 4
"""What the database calls S, as many as there are ranks; its M is twice that, its L three times."""
STAGES = (
    (Mesh(("dp_replicate", "tp"), (2, 2)), 0),
    (Mesh(("dp_replicate",), (4,)), 0),
    (Mesh(("tp",), (4,)), 0),
    (Mesh(("dp_replicate", "tp"), (2, 2)), 1),
    (Mesh(("tp",), (4,)), 1),
)
"""Meshes, and what a stage there is drawn by."""
UNDEFINED = {
    "empty_like": "what lies in memory that nobody has written",
    "new_empty": "the same",
    **dict.fromkeys(
        ("svd_lowrank", "pca_lowrank"),
        "bases of random products, which have one direction where one number stands for all draws",
    ),
}
"""Ops whose results are not the same twice."""
_ALONE = ("conv", "linear", "bilinear", "prelu", "embedding")
"""Functions of which no tensor but the first has samples."""


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    sample: int
    stage: str
    outcome: str
    why: str = ""


@cache
def database() -> dict[str, Any]:
    """`OpInfo` by name and variant."""
    # What stands there tests with a package that these do not need.
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.testing._internal.common_methods_invocations as ops
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal") and isinstance(getattr(module, "S", 0), int):
            for times, extent in enumerate("SML", 1):
                if hasattr(module, extent):
                    setattr(module, extent, times * EXTENT)
    # Those that draw are called through it.
    vars(ops)["wrapper_set_seed"] = lambda op, *args, **kwargs: op(*args, **kwargs)
    return {
        f"{op.name}:{op.variant_test_name}" if op.variant_test_name else op.name: op
        for op in ops.op_db
    }


def samples(name: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Two of the database's of that dtype, if the op takes it, that have many dims and settings."""
    op = database()[name]
    if dtype not in op.dtypes:
        return []
    torch.manual_seed(0)
    grad = op.supports_autograd and dtype.is_floating_point
    made: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in _until_it_fails(op.sample_inputs("cpu", dtype, requires_grad=grad)):
            tensors = _tensors(sample)
            if _is_flat(op, tensors):
                sample.input, sample.args, sample.kwargs = pytree.tree_map_only(
                    Tensor,
                    lambda t: t.detach().reshape(EXTENT, -1),
                    (sample.input, sample.args, sample.kwargs),
                )
                tensors = _tensors(sample)
            dense = all(t.layout == torch.strided for t in tensors)
            if dense and tensors and tensors[0].dim() and tensors[0].numel():
                made.setdefault(str(_plain(sample)), sample)
    found = sorted(
        made.values(),
        key=lambda s: (-min(_tensors(s)[0].dim(), 3), -len(s.args) - len(s.kwargs)),
    )
    return [found[0], found[len(found) // 2]] if len(found) > 2 else found


def _until_it_fails(made: Iterable[Any]) -> Iterator[Any]:
    """Some samples have extents of their own, which those of `EXTENT` do not suffice for."""
    left = iter(made)
    while True:
        try:
            yield next(left)
        except (RuntimeError, IndexError, StopIteration):
            return


def workload(name: str, sample: Any, in_place: bool = False) -> Workload:
    op = _in_place(database()[name]) if in_place else database()[name].op
    first = _OpModel(op, name, sample)
    names = list(first.entries)
    given, passed = ", ".join(names), ", ".join(f"{n}={n}" for n in names)
    scope: dict[str, Any] = {}
    exec(f"def forward(self, {given}):\n    return self.run(dict({passed}))", scope)
    model = type("OpModel", (_OpModel,), {"forward": scope["forward"]})
    return Workload(
        model=partial(model, op, name, sample),
        batch=lambda: {key: value.clone() for key, value in first.entries.items()},
    )


def _in_place(op: Any) -> Any:
    return lambda first, *args, **kwargs: op.inplace_variant(first.clone(), *args, **kwargs)


class _OpModel(nn.Module):
    """``entries`` are the batch; ``leaves`` says where each argument comes from."""

    def __init__(self, op: Any, name: str, sample: Any) -> None:
        super().__init__()
        self.op = op
        self.scale = nn.Parameter(torch.ones(1))
        leaves, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.arguments = lambda leaves: pytree.tree_unflatten(leaves, tree)
        count = next(t for t in leaves if isinstance(t, Tensor)).shape[0]
        alone = name.removeprefix("nn.functional.").startswith(_ALONE)
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

    def run(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = []
        for kind, leaf in self.leaves:
            value = getattr(self, leaf) if kind == "held" else leaf
            if kind == "entry":
                value = batch[leaf]
                value = value * self.scale if value.is_floating_point() else value
            leaves.append(value)
        first, args, kwargs = self.arguments(leaves)  # type: ignore[no-untyped-call]
        loss = self.scale.sum() * 0.5
        for made in pytree.tree_leaves(self.op(first, *args, **kwargs)):
            if isinstance(made, Tensor):
                real = (made.abs() if made.is_complex() else made).to(torch.float32)
                loss = loss + (real * real).mean() * self.scale.sum()
        return {"loss": loss}


def outcomes(
    name: str,
    dtype: torch.dtype = torch.float32,
    in_place: bool = False,
    stages: Sequence[tuple[Mesh, int]] = STAGES,
) -> Iterator[Outcome]:
    if in_place and database()[name].inplace_variant is None:
        return
    for number, sample in enumerate(samples(name, dtype)):
        given = workload(name, sample, in_place)
        assert given.model is not None
        model, batch = given.model(), given.batch()
        if why := _not_run(model, batch):
            yield Outcome(name, number, "", "not run", why)
            continue
        try:
            captured = capture(given)
        except UserError as error:
            yield Outcome(name, number, "", "no plan", str(error))
            continue
        except Exception as error:  # what this is for
            yield Outcome(name, number, "", "WRONG", _crash(error))
            continue
        for mesh, seed in stages:
            made = _checked(captured, mesh, seed, model, batch)
            yield Outcome(name, number, f"{mesh} {seed}", *made)


def _not_run(model: nn.Module, batch: Mapping[str, Tensor]) -> str:
    """Why the model itself does not train, in words."""
    try:
        loss = model(**batch)["loss"]
        loss.backward()
    except (RuntimeError, IndexError, ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return "" if all(t.isfinite().all() for t in (loss, *gradients)) else "no finite number"


def _divides(captured: Captured, mesh: Mesh) -> bool:
    """Whether the batch may be cut into as many pieces as the mesh wants: a channel that is taken
    for a sample may be one of a group."""
    ways = mesh.ways(SAMPLES)
    dims = {e.name: e.batch_dim for e in captured.batch if e.batch_dim is not None}
    flow = batch_flow(captured.graph, dims).choices
    for op in captured.graph.ops:
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
        return "WRONG", _crash(error)
    return "right", ""


def _crash(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {last.filename}:{last.lineno}: {error}"


def _tensors(sample: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [t for t in leaves if isinstance(t, Tensor)]


def _is_flat(op: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether the sample is one dim that may be cut into samples: of ops element by element."""
    shapes = {t.shape for t in tensors}
    if len(shapes) != 1 or not hasattr(op, "ref") or "Info" not in type(op).__name__:
        return False
    (shape,) = shapes
    pointwise = type(op).__name__ in ("UnaryUfuncInfo", "BinaryUfuncInfo")
    return pointwise and len(shape) == 1 and shape[0] > 0 and shape[0] % EXTENT == 0


def _plain(sample: Any) -> Any:
    """The sample with shapes for tensors, by which equal ones are told."""
    return pytree.tree_map_only(
        Tensor, lambda t: t.shape, (sample.input, sample.args, sample.kwargs)
    )


def _enough(x: Tensor) -> Tensor:
    """As many samples that `EXTENT` ranks divide them: more that are others."""
    parts = [x]
    while sum(p.shape[0] for p in parts) % EXTENT:
        more = x.flip(0) if len(parts) % 2 else x
        parts.append(more * (1 - 0.1 * len(parts)) if x.is_floating_point() else more)
    return torch.cat(parts) if len(parts) > 1 else x.clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--part", default="0/1", help="of all ops, as 0/2 and 1/2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--in-place", action="store_true", help="of each op that form")
    given = parser.parse_args()
    first, step = map(int, given.part.split("/"))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of ops that are called as their own tests call them
    counts: Counter[str] = Counter()
    ops: dict[str, set[str]] = {}
    for name in given.only or [*database()][first::step]:
        for row in (
            () if name in UNDEFINED else outcomes(name, getattr(torch, given.dtype), given.in_place)
        ):
            counts[row.outcome] += 1
            ops.setdefault(row.outcome, set()).add(name)
            if row.outcome in ("WRONG", "no plan"):
                why = row.why.partition("\n")[0][:200]
                print(f"{row.name} {row.sample} {row.stage}: {row.outcome}: {why}", flush=True)
    for outcome, names in sorted(ops.items()):
        print(f"{outcome}: {counts[outcome]} of {len(names)} ops")


if __name__ == "__main__":
    main()
