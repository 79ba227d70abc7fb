"""Emitting a captured model under given decisions and comparing it with the model itself."""

from __future__ import annotations

import copy
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.emit.pytorch import emit
from autopar.frontends.pytorch.capture import capture
from autopar.frontends.shared.captured import Captured
from autopar.lowering.counts import label_collectives
from autopar.lowering.issued import activation_collectives
from autopar.lowering.lowered import Lowered
from autopar.nouns.axes import BATCH, SAMPLES, SEQUENCES
from autopar.nouns.expert_placement import inverse
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Plan, Spread
from autopar.nouns.workload import Workload
from autopar.runtime.pytorch import program as runtime_program
from autopar.runtime.pytorch.carried import write_carried
from autopar.runtime.pytorch.expert_places import name_layers, rows_of
from autopar.runtime.pytorch.materialise import materialise
from autopar.runtime.pytorch.parameters import Declared, computing, declared_in, lifted
from autopar.runtime.pytorch.zigzag import own_zigzag
from autopar.runtime.verify.pytorch.modes import Exact, FixedDraws, exact
from autopar.runtime.verify.pytorch.reference import loss_of
from tests.emit import simulated
from tests.emit.decided import decided

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Emitted:
    captured: Captured
    plan: Plan
    lowered: Lowered
    text: str


def emitted(
    captured: Captured,
    spread: Spread,
    microbatches: int = 1,
    probes: bool = False,
    marks: bool = False,
    **changes: Any,
) -> Emitted:
    """The program of ``captured`` under ``spread``."""
    lowered, plan = decided(captured, spread, microbatches, **changes)
    text = emit(lowered, plan, captured, probes, marks)["model.py"]
    return Emitted(captured, plan, lowered, text)


def load(text: str, half: bool = False) -> types.ModuleType:
    """The program as a module; in float64 unless ``half``."""
    module = types.ModuleType("emitted")
    runtime_program.FP32 = torch.float32 if half else torch.float64
    try:
        exec(compile(text, "emitted/model.py", "exec"), module.__dict__)
    finally:
        runtime_program.FP32 = torch.float32
    return module


@dataclass(frozen=True)
class Result:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    log: list[tuple[str, str, int]]
    buffers: dict[str, torch.Tensor]


def reference(model: nn.Module, batch: Tensors) -> Result:
    """A copy of the model on one device in float64, and so is what it makes and casts inside."""
    model = copy.deepcopy(model).double()
    batch = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
    with exact():
        loss = loss_of(model(**batch))
    torch.autograd.backward(loss)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Result(loss.detach(), gradients, [], dict(_unstepped(model)))


def _unstepped(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What the forward alone may change."""
    yield from model.named_buffers()
    yield from ((n, p) for n, p in model.named_parameters() if not p.requires_grad)


def run(made: Emitted, model: nn.Module, batch: Tensors, half: bool = False) -> Result:
    """The emitted program on simulated ranks, gradients put together.

    In float64, or with ``half`` in the plan's own precision. Checks on the way that ranks agree
    where the plan says that they do.
    """
    mesh = made.plan.program_mesh
    micro = made.plan.microbatches
    module = load(made.text, half)
    whole = {**model.state_dict(), **dict(model.named_buffers())}
    whole = {n: t.detach() for n, t in whole.items()}
    wanted = getattr(torch, made.plan.precision) if half else torch.float64
    batch = {n: t.to(wanted) if t.is_floating_point() else t for n, t in batch.items()}

    data = [a for a in mesh.axes if a in BATCH]

    def task(ranks: Any) -> Any:
        program = module.Model()
        parameters, buffers = declared_in(program)
        orders = name_layers(program, module.SETTINGS.placed, parameters, mesh)
        materialise(program, torch.device("cpu"))
        with torch.no_grad():
            for name, parameter in program.named_parameters():
                region = parameters[name].region(mesh, ranks.coordinates)
                parameter.copy_(rows_of(whole[name], region, orders.get(name)))
            for path, owner in program.named_modules():
                for name in owner._buffers:
                    full = f"{path}.{name}" if path else name
                    region = buffers[full].region(mesh, ranks.coordinates)
                    owner._buffers[name] = whole[full][region].to(buffers[full].dtype).clone()
        extra = {}
        if hasattr(program, "counts"):
            own = cut(batch, made, mesh, ranks.coordinates, micro)
            counts = [program.counts(piece) for piece in own]
            extra["counts"] = {
                k: simulated.total(sum(f[k] for f in counts), data) for k in counts[0]
            }
        loss = torch.zeros((), dtype=torch.float32 if half else torch.float64)
        for piece in cut(batch, made, mesh, ranks.coordinates, micro):
            with FixedDraws() if half else Exact():  # each rank's thread has modes of its own
                share = program(**piece, **extra)
            torch.autograd.backward(share)
            loss = loss + share.detach()
        gradients = {n: p.grad for n, p in program.named_parameters() if p.grad is not None}
        write_carried(program)
        kept = {n: b.detach() for n, b in program.named_buffers()}
        return loss, gradients, parameters, kept, buffers, orders

    wide = nullcontext() if half else exact()
    with wide, lifted(None if half else torch.float64), computing(wanted if half else None):
        results, world = simulated.run(mesh, task)
    losses = summed(mesh, [r[0] for r in results], data)
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=1e-12, atol=1e-12)
    gradients = {}
    for name, declared in results[0][2].items():
        given = [r[1].get(name) for r in results]
        if any(g is not None for g in given):
            some = next(g for g in given if g is not None)
            pieces = [torch.zeros_like(some) if g is None else g for g in given]
            whole_on = [a for a in data if declared.sharding.on(a).kind != "S"]
            pieces = summed(mesh, pieces, [*dict.fromkeys([*whole_on, *declared.deferred_axes()])])
            made_of = assembled(name, declared, pieces, mesh)
            order = results[0][5].get(name)
            gradients[name] = made_of if order is None else made_of[list(inverse(order))]
    buffers = {
        n: assembled(n, d, [r[3][n] for r in results], mesh) for n, d in results[0][4].items()
    }
    return Result(losses[0], gradients, world.log, buffers)


def assembled(
    name: str, declared: Declared, pieces: list[torch.Tensor], mesh: Mesh
) -> torch.Tensor:
    """The whole tensor of all ranks' pieces; fails where two ranks differ on one."""
    full = torch.full(declared.shape, -7, dtype=pieces[0].dtype)
    seen = torch.zeros(declared.shape, dtype=torch.bool)
    for rank, piece in enumerate(pieces):
        place = {a: rank // mesh.stride(a) % mesh.size(a) for a in mesh.axes}
        region = declared.region(mesh, place)
        if seen[region].all():
            tight = 1e-9 if piece.dtype is torch.float64 else 1e-2
            torch.testing.assert_close(
                full[region], piece, rtol=tight, atol=tight**1.2, msg=f"{name}: ranks disagree"
            )
        full[region], seen[region] = piece, True
    assert seen.all(), f"{name}: some part is on no rank"
    return full


def summed(mesh: Mesh, values: list[torch.Tensor], axes: list[str]) -> list[torch.Tensor]:
    """On each rank the sum over ``axes``."""
    for axis in axes:
        stride, size = mesh.stride(axis), mesh.size(axis)
        firsts = [r - r // stride % size * stride for r in range(len(values))]
        values = [sum(values[f + i * stride] for i in range(size)) for f in firsts]  # type: ignore[misc]
    return values


def cut(
    batch: Tensors, made: Emitted, mesh: Mesh, place: Mapping[str, int], micro: int
) -> list[dict[str, torch.Tensor]]:
    """The microbatches of the rank at ``place``."""
    data = [a for a in mesh.axes if a in SAMPLES]
    whole = {e.name for e in made.captured.batch if e.batch_dim is None}
    pieces: list[dict[str, torch.Tensor]] = [{} for _ in range(micro)]
    for name, tensor in batch.items():
        for i, part in enumerate(tensor.chunk(micro) if name not in whole else [tensor] * micro):
            for axis in data if name not in whole else ():
                part = part.chunk(mesh.size(axis))[place[axis]]
            for axis in (a for a in mesh.axes if a in SEQUENCES):
                along = made.lowered.tensors[name].produced.on(axis)
                if along.kind == "S" and made.lowered.zigzag is not None:
                    part = own_zigzag(part, along.dim, place[axis], mesh.size(axis))
                elif along.kind == "S":
                    part = part.chunk(mesh.size(axis), along.dim)[place[axis]]
            pieces[i][name] = part
    return pieces


def check(
    made: Emitted, model: nn.Module, batch: Tensors, tolerance: float = 1e-9, issued: bool = True
) -> Result:
    """Loss, every gradient and running statistics within ``tolerance`` of the model's.

    ``issued``: the collectives are those that are priced.
    """
    wanted = reference(model, batch)
    result = run(made, model, batch)
    assert relative(result.loss, wanted.loss) < tolerance, (result.loss, wanted.loss)
    assert set(result.gradients) == set(wanted.gradients)
    total = torch.stack([g.norm() for g in wanted.gradients.values()]).norm()
    for name, gradient in wanted.gradients.items():
        # A gradient that is zero in theory (a bias that softmax or batch norm takes out again) has
        # no norm of its own to compare with.
        norm = gradient.norm().clamp(min=total * 1e-6)
        error = float((result.gradients[name] - gradient).norm() / norm)
        assert error < tolerance, f"gradient of {name}: {error:.2e}"
    for name, buffer in wanted.buffers.items():
        last = name.rpartition(".")[2]
        given = dict(_unstepped(model))[name]
        changed = given.isnan().any() or not torch.equal(buffer.to(given.dtype), given)
        if changed and last != "num_batches_tracked":
            assert name in result.buffers, f"{name} is not updated"
        if name in result.buffers and (made.plan.microbatches == 1 or "running" not in last):
            got = result.buffers[name].to(buffer.dtype)
            apart = torch.where(got == buffer, 0, got - buffer) if changed else got != buffer
            size = buffer.to(torch.complex128)[buffer.isfinite()].norm().clamp(min=1e-30)
            assert float(apart.to(torch.complex128).norm() / size) < tolerance, name
    if issued:
        check_issued(made, result)
    return result


def check_issued(made: Emitted, result: Result, wide: int = 2) -> None:
    """The collectives of ``found`` are those priced; float32 values are ``wide`` times as large."""
    moved, expected = Counter(result.log), Counter(priced(made, wide))
    assert moved == expected, f"{moved - expected} not priced, {expected - moved} not issued"


def priced(made: Emitted, wide: int = 2) -> list[tuple[str, str, int]]:
    """What rank 0 should issue; float32 counts ``wide`` times, 2 in float64.

    In half precision a parameter moves in half precision, however it is stored.
    """
    moves = []
    for entry in activation_collectives(made.lowered):
        block = next((b for b in made.lowered.blocks if entry.key.startswith(f"{b}::")), "")
        name = entry.key.removeprefix(f"{block}::")
        graph = made.lowered.blocks[block].graph if block else made.lowered.graph
        tensor = graph.tensors[name]
        times: float = wide if entry.dtype == "float32" else 1
        if made.plan.precision == "bfloat16" and tensor.role == "parameter":
            times = 0.5
        move = entry.collective
        moves += [(move.kind, move.axis, int(move.size_bytes * times))] * entry.count
    for _, move in label_collectives(made.lowered):
        moves += [(move.kind, move.axis, move.size_bytes)] * made.plan.microbatches
    return moves


def relative(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((actual - wanted).norm() / wanted.norm().clamp(min=1e-30))


def capture_of(model: Callable[[], nn.Module], batch: Callable[[], Tensors]) -> Captured:
    return capture(Workload(model=model, batch=batch))
