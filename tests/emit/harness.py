"""Emitting a captured model under given decisions and comparing it with the model itself."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.frontends.pytorch.capture import capture
from autopar.frontends.pytorch.captured import Captured
from autopar.lowering import Lowered, activation_collectives, lower
from autopar.nouns.mesh import DATA_AXES, Mesh
from autopar.nouns.plan import Plan, Stage
from autopar.planner.precision import at_precision
from autopar.rules.batch import batch_flow
from autopar.runtime import program as runtime_program
from autopar.runtime.emit_torch import emit
from autopar.runtime.parameters import declared_in, lifted
from autopar.runtime.storage import materialise
from autopar.workload import Workload
from tests.emit import simulated
from tests.plans import plan as some_plan

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Emitted:
    captured: Captured
    plan: Plan
    lowered: Lowered
    text: str


def emitted(
    captured: Captured, stage: Stage, microbatches: int = 1, probes: bool = False, **changes: Any
) -> Emitted:
    """The program of ``captured`` under ``stage``."""
    dims = {e.name: e.batch_dim for e in captured.batch if e.batch_dim is not None}
    flow = batch_flow(captured.graph, dims)
    graph = at_precision(captured.graph, changes.get("precision", "float32"))
    lowered = lower(graph, stage, microbatches, flow.choices, dims)
    plan = replace(
        some_plan(),
        stages=(stage,),
        microbatches=microbatches,
        **{"zero": 0, "precision": "float32", "recompute": "none", **changes},
    )
    return Emitted(captured, plan, lowered, emit(lowered, plan, captured, probes)["model.py"])


def load(text: str) -> types.ModuleType:
    module = types.ModuleType("emitted")
    exec(compile(text, "emitted/model.py", "exec"), module.__dict__)
    return module


@dataclass(frozen=True)
class Result:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    log: list[tuple[str, str, int]]


def reference(model: nn.Module, batch: Tensors) -> Result:
    """The model on one device in float64."""
    model = model.double()
    model.zero_grad()
    loss = loss_of(model(**batch))
    torch.autograd.backward(loss)
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Result(loss.detach(), found, [])


def loss_of(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result.loss


def run(made: Emitted, model: nn.Module, batch: Tensors) -> Result:
    """The emitted program on simulated ranks in float64, gradients put together.

    Checks on the way that ranks agree where the plan says that they do.
    """
    runtime_program.FP32 = torch.float64
    try:
        module = load(made.text)
    finally:
        runtime_program.FP32 = torch.float32
    mesh = made.plan.stages[0].mesh.trimmed()
    whole = dict(model.double().state_dict(keep_vars=True))
    whole.update({n: b for n, b in model.named_buffers() if n not in whole})
    whole = {n: t.detach() for n, t in whole.items()}
    micro = made.plan.microbatches
    batch = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}

    def task(ranks: Any) -> Any:
        program = module.Model()
        parameters, buffers = declared_in(program)
        materialise(program, torch.device("cpu"))
        with torch.no_grad():
            for name, parameter in program.named_parameters():
                region = parameters[name].region(mesh, ranks.coordinates)
                parameter.copy_(whole[name][region])
            for path, owner in program.named_modules():
                for name, buffer in owner._buffers.items():
                    full = f"{path}.{name}" if path else name
                    region = buffers[full].region(mesh, ranks.coordinates)
                    owner._buffers[name] = whole[full][region].clone()
                    assert buffer is not None
        pieces = cut(batch, made.captured, mesh, ranks.coordinates, micro)
        extra = {}
        if hasattr(program, "counts"):
            every = [cut(batch, made.captured, mesh, place, micro) for place in data_places(mesh)]
            found = [program.counts(p) for pieces_ in every for p in pieces_]
            extra["counts"] = {k: sum(f[k] for f in found) for k in found[0]}
        loss = torch.zeros((), dtype=torch.float64)
        for piece in pieces:
            share = program(**piece, **extra)
            torch.autograd.backward(share)
            loss = loss + share.detach()
        gradients = {n: p.grad for n, p in program.named_parameters()}
        return loss, gradients, parameters

    with lifted(torch.float64):
        results, world = simulated.run(mesh, task)
    data = [a for a in mesh.axes if a in DATA_AXES]
    losses = summed(mesh, [r[0] for r in results], data)
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=1e-12, atol=1e-12)
    gradients = {}
    for name, declared in results[0][2].items():
        if results[0][1][name] is None and all(r[1][name] is None for r in results):
            continue
        pieces = [r[1][name] for r in results]
        shapes = [r.shape for r in pieces if r is not None]
        pieces = [torch.zeros(shapes[0], dtype=torch.float64) if p is None else p for p in pieces]
        pieces = summed(mesh, pieces, [*data, *declared.deferred_axes()])
        full = torch.full(declared.shape, float("nan"), dtype=torch.float64)
        for rank, piece in enumerate(pieces):
            place = {a: rank // mesh.stride(a) % mesh.size(a) for a in mesh.axes}
            region = declared.region(mesh, place)
            if not full[region].isnan().any():
                torch.testing.assert_close(
                    full[region], piece, rtol=1e-9, atol=1e-12, msg=f"{name}: ranks disagree"
                )
            full[region] = piece
        gradients[name] = full
    return Result(losses[0], gradients, world.log)


def summed(mesh: Mesh, values: list[torch.Tensor], axes: list[str]) -> list[torch.Tensor]:
    """On each rank the sum over ``axes``."""
    for axis in axes:
        stride, size = mesh.stride(axis), mesh.size(axis)
        firsts = [r - r // stride % size * stride for r in range(len(values))]
        values = [sum(values[f + i * stride] for i in range(size)) for f in firsts]  # type: ignore[misc]
    return values


def data_places(mesh: Mesh) -> list[dict[str, int]]:
    """Coordinates of one rank for each place along the data axes."""
    found = []
    for place in simulated.coordinates(mesh):
        named = dict(zip(mesh.axes, place, strict=True))
        if all(i == 0 for a, i in named.items() if a not in DATA_AXES):
            found.append(named)
    return found


def cut(
    batch: Tensors, captured: Captured, mesh: Mesh, place: Mapping[str, int], micro: int
) -> list[dict[str, torch.Tensor]]:
    """The microbatches of the rank at ``place``."""
    data = [a for a in mesh.axes if a in DATA_AXES]
    whole = {e.name for e in captured.batch if e.batch_dim is None}
    pieces: list[dict[str, torch.Tensor]] = [{} for _ in range(micro)]
    for name, tensor in batch.items():
        for i, part in enumerate(tensor.chunk(micro) if name not in whole else [tensor] * micro):
            for axis in data if name not in whole else ():
                part = part.chunk(mesh.size(axis))[place[axis]]
            pieces[i][name] = part
    return pieces


def check(
    made: Emitted, model: nn.Module, batch: Tensors, tolerance: float = 1e-9, issued: bool = True
) -> Result:
    """Loss and every gradient within ``tolerance``; ``issued``: the collectives are as priced."""
    wanted = reference(
        model, {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
    )
    found = run(made, model, batch)
    assert relative(found.loss, wanted.loss) < tolerance, (found.loss, wanted.loss)
    assert set(found.gradients) == set(wanted.gradients)
    total = torch.stack([g.norm() for g in wanted.gradients.values()]).norm()
    for name, gradient in wanted.gradients.items():
        # A gradient that is zero in theory (a bias that softmax or batch norm takes out again) has
        # no norm of its own to compare with.
        error = float(
            (found.gradients[name] - gradient).norm() / gradient.norm().clamp(min=total * 1e-6)
        )
        assert error < tolerance, f"gradient of {name}: {error:.2e}"
    if issued:
        moved, expected = Counter(found.log), Counter(priced(made))
        assert moved == expected, f"{moved - expected} not priced, {expected - moved} not issued"
    return found


def priced(made: Emitted) -> list[tuple[str, str, int]]:
    """What rank 0 should issue in float64: float32 is twice as large as priced."""
    found = []
    for entry in activation_collectives(made.lowered):
        block, _, name = entry.key.rpartition("::")
        graph = made.lowered.blocks[block].graph if block else made.lowered.graph
        wide = 2 if graph.tensors[name].dtype == "float32" else 1
        move = entry.collective
        found += [(move.kind, move.axis, move.size_bytes * wide)] * entry.count
    return found


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


def capture_of(model: Callable[[], nn.Module], batch: Callable[[], Tensors]) -> Captured:
    return capture(Workload(model=model, batch=batch))
