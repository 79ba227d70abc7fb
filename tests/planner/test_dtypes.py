"""What is priced of models that mix dtypes, against what PyTorch does in a step of the program."""

from __future__ import annotations

import types
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from autopar.emit.pytorch import emit
from autopar.files.cluster_file import cluster_from_text
from autopar.frontends.dispatch import capture
from autopar.frontends.shared.captured import Captured
from autopar.lowering.lowered import Lowered
from autopar.nouns.graph import DTYPE_BYTES
from autopar.planner.planning import PlanResult, plan_captured
from autopar.pricing.units.activations import activation_lives, saved_parameters
from autopar.pricing.utilization import model_flops, peak_time_s
from autopar.report.notes import notes
from autopar.rules.work import PRODUCTS, op_work
from autopar.runtime.pytorch.initialize import initialize
from autopar.runtime.pytorch.probe import recording
from autopar.runtime.pytorch.training.program import Program
from autopar.runtime.pytorch.training.trainer import Trainer
from tests.planner.dtype_mixes import MIXES, Mix

ONE = cluster_from_text(
    "groups: [{device: A100, count: 1}]\n"
    "levels: [{name: alone, span: 1, bandwidth: 1 GB/s, latency: 1 us}]"
)
STATISTICS = 0.03
"""Of what is saved: in float64 and half precision norms keep their statistics in another dtype
on a CPU than on accelerators."""


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """FLOPs of the products that run, by the dtype of their operands."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: Counter[str] = Counter()
        self.attention: set[str] = set()

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        (*dtypes,) = {_name(t.dtype) for t in given if t.is_floating_point()}
        if func._overloadpacket in flop_registry:
            (dtype,) = dtypes  # the kernels take no mixtures
            count = flop_registry[func._overloadpacket]
            self.flops[dtype] += count(*args, **(kwargs or {}), out_val=result)
        elif "flash_attention_for_cpu" in str(func):
            # Its log-sum-exp is float32 at least; q comes last in the order of backward's first.
            self.attention.add(_name(given[0].dtype))
        return result


@dataclass
class Step:
    """One real step: bytes by what holds them, and the dtype of every value by its key."""

    flops: dict[str, float]
    attention: set[str]
    parameters: int
    gradients: int
    optimizer: int
    saved: int
    dtypes: dict[str, str]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _real(mix: Mix, planned: PlanResult, captured: Captured) -> Step:
    text = emit(planned.lowered, planned.plan, captured, True)["model.py"]
    module = types.ModuleType("emitted")
    exec(compile(text, "emitted/model.py", "exec"), module.__dict__)
    workload = mix.workload()
    trainer = Trainer(Program.of(module), workload, lambda t: initialize(mix.make, 0, t))
    state = [h.leaf for h in trainer.held] + list(trainer.model.buffers())
    own = {t.untyped_storage().data_ptr() for t in state}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with recording() as values, Products() as products, hooks:
        trainer.step(workload.batch())
    slots = [v for held in trainer.optimizer.state.values() for k, v in held.items() if k != "step"]
    return Step(
        dict(products.flops),
        products.attention,
        sum(map(_size, state)),
        sum(_size(h.leaf.grad) for h in trainer.held if h.leaf.grad is not None),
        sum(map(_size, slots)),
        sum(t.untyped_storage().nbytes() for at, t in saved.items() if at not in own),
        {value.name: _name(value.value.dtype) for value in values},
    )


def _priced(lowered: Lowered, *costs: str) -> dict[str, float]:
    """FLOPs by the dtype that they are priced in."""
    flops: dict[str, float] = defaultdict(float)
    for op in lowered.ops:
        if op.bound is not None and op.bound.rule.cost in costs:
            work = op_work(op.op, op.bound, op.strategy, lowered.mesh, lowered.graph.tensors)
            flops[work.dtype] += work.forward_flops + work.backward_flops
    return dict(flops)


@cache
def _plan(mix: Mix) -> tuple[Captured, PlanResult]:
    captured = capture(mix.workload())
    return captured, plan_captured(captured, mix.workload(), ONE, "m.py:M", {"recompute": "none"})


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
@pytest.mark.some(14)
def test_prices_are_of_the_dtypes_that_run(mix: Mix) -> None:
    captured, planned = _plan(mix)
    real = _real(mix, planned, captured)
    assert _priced(planned.lowered, "matmul", "conv") == real.flops
    assert set(_priced(planned.lowered, "attention")) == real.attention
    losses = {op.op.name for op in planned.lowered.ops if op.op.kind == "cross_entropy"}
    dtypes = {name: planned.graph.tensors[name].dtype for name in real.dtypes}
    assert len(real.dtypes) > 5
    assert {n: d for n, d in dtypes.items() if n not in losses} == {
        n: d for n, d in real.dtypes.items() if n not in losses
    }
    memory = planned.plan.prediction.memory_bytes
    assert memory.parameters == real.parameters
    assert memory.gradients == real.gradients
    assert memory.optimizer == real.optimizer
    casts = 0
    if mix.precision != "float32":
        casts = saved_parameters(planned.lowered).get("float32", 0) * DTYPE_BYTES[mix.precision]
    kept = activation_lives(planned.lowered)["none"].saved + casts
    assert kept == pytest.approx(real.saved, rel=STATISTICS)


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_utilization_is_of_the_peak_of_each_dtype(mix: Mix) -> None:
    _, planned = _plan(mix)
    device = ONE.device
    by_dtype = _priced(planned.lowered, *PRODUCTS)
    assert model_flops(planned.graph) == by_dtype
    at_peak_s = sum(flops / device.peak(dtype) for dtype, flops in by_dtype.items())
    prediction = planned.plan.prediction
    assert peak_time_s(planned.graph, device) == pytest.approx(at_peak_s, rel=1e-12)
    assert prediction.mfu == pytest.approx(at_peak_s / prediction.step_time_s, rel=1e-12)
    assert 0 < prediction.mfu <= 1


def test_parameters_trained_in_half_precision_are_told() -> None:
    for mix in MIXES:
        _, planned = _plan(mix)
        parameters = [t for _, t in planned.graph.parameters() if t.differentiable]
        remarks = [n for n in notes(planned.lowered, planned.plan, ONE, 4) if "rounded away" in n]
        narrow = {t.dtype for t in parameters} & {"bfloat16", "float16"}
        assert len(remarks) == len(narrow), mix.name
        for dtype in narrow:
            assert any(f"are {dtype}, and so are their" in note for note in remarks)
    (mix,) = (mix for mix in MIXES if mix.name == "bfloat16 parameters")
    _, planned = _plan(mix)
    (only,) = (n for n in notes(planned.lowered, planned.plan, ONE, 4) if "rounded away" in n)
    assert "33.5 KiB then, 16.8 KiB now" in only  # 2,144 parameters of 16 and of 8 bytes


@pytest.mark.parametrize(("dtype", "lost"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_smaller_updates_are_lost_as_the_note_says(dtype: torch.dtype, lost: float) -> None:
    one = torch.ones((), dtype=dtype)
    assert one + torch.tensor(0.99 * lost, dtype=dtype) == one
    assert one + torch.tensor(1.01 * lost, dtype=dtype) > one
