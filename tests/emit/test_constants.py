# mypy: disable-error-code="no-any-return"
"""Whatever number a model has, its program has it too: infinite, no number, a zero with a sign."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.emit.constants import literal, number, same
from autopar.emit.text import PRODUCT, SUM, UNARY, constant
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from autopar.nouns.text import graph as graph_text
from autopar.runtime.jobs.launch import verify_many
from benchmarks.planned import planned_in
from tests.emit import masked
from tests.emit.harness import capture_of, check, emitted, load
from tests.emit.random_stage import random_stage
from tests.sampling import some

CLUSTER = Path(__file__).parents[2] / "examples/clusters/cpu_4.yaml"
INF, NAN = float("inf"), float("nan")
FLOATS = [torch.finfo(d) for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
INTEGERS = [torch.iinfo(getattr(torch, n)) for n in ("uint8", "int8", "int16", "int32", "int64")]
LIMITS = [
    *(getattr(info, n) for info in FLOATS for n in ("min", "max", "tiny", "eps")),
    *(getattr(info, n) for info in INTEGERS for n in ("min", "max")),
]
EDGES = [*LIMITS, INF, -INF, NAN, 0.0, -0.0, 5e-324, -5e-324, 2**63, -(2**63), 2**64, 10**400]
EDGES += [-1e9, 1e6, 1e22, 32**-0.5, 1 / math.sqrt(32), -(32**-0.5), np.float64(0.1), True, False]
NUMBERS = st.sampled_from(EDGES) | st.floats() | st.integers() | st.booleans()
COMPLEX = st.builds(complex, st.sampled_from([INF, -0.0, NAN, -1.5, 0.0]), st.floats())
VALUES = st.recursive(
    NUMBERS | COMPLEX | st.none() | st.text(), lambda inner: st.lists(inner).map(tuple)
)


def alike(value: object, other: object) -> bool:
    """Equal with type and sign; nan is nan."""
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(alike, value, other))
    if isinstance(value, complex) and isinstance(other, complex):
        return alike((value.real, value.imag), (other.real, other.imag))
    if isinstance(value, float) and isinstance(other, float):
        signs = math.copysign(1, value) == math.copysign(1, other)
        return (math.isnan(value) and math.isnan(other)) or (value == other and signs)
    return type(value) is type(other) and value == other


def program_names() -> dict[str, object]:
    """What text in a program means: the names of one."""
    made = capture_of(lambda: models_of_one(lambda x: x), lambda: {"x": torch.zeros(4, 8)})
    return vars(load(emitted(made, Spread(Mesh((), ()))).text))


def models_of_one(function: Callable[[Tensor], Tensor]) -> nn.Module:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return function(self.fc(x)).square().mean()

    return One()


NAMES = program_names()


@given(VALUES)
def test_a_constant_reads_back_where_a_program_runs(value: object) -> None:
    assert alike(eval(literal(value), dict(NAMES)), value)
    if not isinstance(value, tuple):
        assert alike(eval(number(value), dict(NAMES)), value)


@given(st.integers(2, 10**6))
def test_roots_and_round_numbers_read_back(square: int) -> None:
    for value in (square**-0.5, 1 / math.sqrt(square), square * 1e6, -square * 1e9):
        assert alike(eval(number(value)), value)


def test_numbers_as_a_person_writes_them() -> None:
    values = (32**-0.5, 1 / math.sqrt(32), 0.125, 1e-5, -1e9, 0.1767, 3, 4294967296.5, -INF)
    written = ["32**-0.5", "1 / 32**0.5", "0.125", "1e-05", "-1e9", "0.1767", "3", "4294967296.5"]
    assert [*map(number, values)] == [*written, 'float("-inf")']


@given(NUMBERS, st.sampled_from([1.5, -2.0, 3]))
@example(-0.0, 0.5)
@example(1 / math.sqrt(32), 0.25)
def test_a_constant_is_an_operand_of_anything(value: float, x: float) -> None:
    try:
        wanted = [x - value, x * value, -value, float(value).is_integer()]
    except OverflowError:  # Python's own, of numbers that no tensor has
        return
    written = constant(value)
    texts = [
        f"x - {written.within(SUM + 1)}",
        f"x * {written.within(PRODUCT + 1)}",
        f"-{written.within(UNARY + 1)}",
        f"float({written.text}).is_integer()",
    ]
    for text, result in zip(texts, wanted, strict=True):
        assert alike(eval(text, {"x": x}), result), text


def test_what_has_no_text_is_not_written() -> None:
    for value in (torch.float32, np.float32(1), {"a": 1}, object()):
        with pytest.raises(TypeError, match="has no text"):
            literal(value)


def test_a_zero_has_a_sign() -> None:
    for one, other in ((1, 1.0), (NAN, NAN), (0, 0.0), (-0.0, -0.0), (None, None)):
        assert same(one, other)
    for one, other in ((0, -0.0), (NAN, 0), (None, 0), (INF, -INF)):
        assert not same(one, other)


# -- constants of models -----------------------------------------------------------------------

FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "a difference": lambda h: (h - INF).exp() + h,
    "a filled tensor": lambda h: torch.full_like(h, INF).reciprocal() + h,
    "a filled row": lambda h: h.new_full((8,), -INF).exp() + h,
    "a bound": lambda h: torch.maximum(h, torch.full((8,), -INF)).clamp(min=-INF, max=INF),
    "a choice": lambda h: torch.where(h > 0, h, INF).amin(-1).clamp(max=9.0),
    "no number": lambda h: torch.where(torch.where(h > 0.3, NAN, h).isnan(), -1.0, h),
    "minus zero, filled": lambda h: h + (torch.ones(8) / torch.full((8,), -0.0)).clamp(-5, 5),
    "minus zero, padded": lambda h: h + (1 / F.pad(torch.ones(6), (1, 1), value=-0.0)).clamp(-5, 5),
    "minus zero, a factor": lambda h: h + (1 / (h.detach().abs() * -0.0)).clamp(-3, 3),
    "minus zero, listed": lambda h: h + (1 / torch.tensor([-0.0, 0.0] * 4)).clamp(-2, 2),
    "padded with less than all": lambda h: F.pad(h, (1, 1), value=-INF).amax(-1),
    "a sum of exponentials": lambda h: h.masked_fill(torch.eye(8).bool(), -INF).logsumexp(-1),
    "the highest of float32": lambda h: h.masked_fill(h > 0.3, FLOATS[2].max).clamp(max=2.0),
    "the lowest of float64": lambda h: h.masked_fill(h > 0.3, FLOATS[3].min).clamp(min=-2.0),
    "less than anything": lambda h: h + 5e-324,
    "a negative before a product": lambda h: (-2.0 - h) * -(0.5**0.5),
    "an infinite bound": lambda h: F.hardtanh(h, -2.0, INF),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_model_s_constants_are_its_program_s(name: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return models_of_one(FUNCTIONS[name])

    batch = {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(1))}
    made = capture_of(model, lambda: batch)
    for mesh in ("1", "dp_shard=2 x tp=2"):
        check(emitted(made, random_stage(made, Mesh.parse(mesh), 1, 0)), model(), batch)
    again = graph_text.from_text(graph_text.to_text(made.graph))
    assert graph_text.to_text(again) == graph_text.to_text(made.graph)


# -- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", masked.MODELS)
def test_every_way_of_writing_a_mask(way: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return masked.MODELS[way]()

    made = capture_of(model, masked.batch)
    for seed, mesh in enumerate(("1", "dp_replicate=4", "dp_shard=2 x tp=2", "dp_shard=2 x tp=2")):
        spread = random_stage(made, Mesh.parse(mesh), 1, seed)
        check(emitted(made, spread), model(), masked.batch())


LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "data": {"dp_replicate": "4"},
    "tensors": {"tp": "2", "dp_shard": "2"},
    "stages": {"pp": "2", "dp_shard": "2"},
    "stages, split backward": {"pp": "2", "dp_shard": "2", "zero": "1", "schedule": "zb-h1"},
}


@pytest.mark.gloo
def test_masked_models_train_as_planned(tmp_path: Path) -> None:
    """All in one start of processes."""
    folders = {}
    for name in ("every", "encoder", "padded"):
        # padded has no layers to cut between
        layouts = {h: fix for h, fix in LAYOUTS.items() if name != "padded" or "pp" not in fix}
        made, refused = planned_in(
            f"{masked.__file__}:{name}", tmp_path / name, layouts, str(CLUSTER)
        )
        assert not refused
        folders.update({(name, how): folder for how, folder in made.items()})
    few = some(folders, 5)
    verified = verify_many([folders[label] for label in few])
    for label, result in zip(few, verified, strict=True):
        assert result.exact.largest < 1e-9, label
        assert result.passed, label
