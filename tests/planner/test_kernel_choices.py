"""By which kernels plans run their ops: what is chosen, what may be pinned, what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.files.cluster_file import load_cluster
from autopar.files.plan_folder import PlanFolderError
from autopar.lowering.lowered import LoweringError
from autopar.lowering.of_plan import planned_graph
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.nouns.grammar import Grammar
from autopar.nouns.layout import Pins
from autopar.planner import plan
from autopar.planner.options import Options
from autopar.planner.planning import PlanResult
from autopar.rules.implementations.kernels import GATED, register_kernel, unregister
from autopar.runtime.jobs.launch import verify_many
from tests.plans import gpus

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
import autopar

H = 4


class Layer(nn.Module):
    def __init__(self, mask, width):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(width, width) for _ in range(3))
        self.mask = mask

    def forward(self, x):
        q, k, v = (f(x).unflatten(2, (H, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        given = {"is_causal": True}
        if self.mask:
            given = {"attn_mask": torch.rand(x.shape[1], x.shape[1]) < 0.5}
        mixed = F.scaled_dot_product_attention(q, k, v, **given)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class _Model(nn.Module):
    def __init__(self, mask, width):
        super().__init__()
        self.layers = nn.ModuleList(Layer(mask, width) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def workload(precision, mask=False, samples=16, length=256, width=512):
    return autopar.Workload(
        model=lambda: _Model(mask, width), batch=lambda: {"x": torch.randn(samples, length, width)},
        optimizer="adamw", precision=precision,
    )


half, single, masked = workload("bfloat16"), workload("float32"), workload("bfloat16", True)
brief = workload("bfloat16", samples=8, length=32, width=128)  # which processes on cores compute
"""


H100 = gpus("H100")


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "model.py").write_text(MODEL)
    return folder


def planned(
    where: Path, *pins: str, on: Cluster = H100, model: str = "half", options: Options | None = None
) -> PlanResult:
    fix = dict(pin.split("=") for pin in ("dp_shard=4", *pins))
    return plan(f"{where / 'model.py'}:{model}", on, fix, options)


def kernels(where: Path, *pins: str, on: Cluster = H100, model: str = "half") -> set[str]:
    return set(planned(where, *pins, on=on, model=model).plan.kernels.values())


def test_the_fastest_that_all_devices_have(where: Path) -> None:
    assert kernels(where) == {"attention by cudnn", "gated_activation by triton"}
    for other in (("A100-80GB",), ("H100", "A100-80GB")):  # cuDNN's is no faster there than torch's
        assert kernels(where, on=gpus(*other)) == {"gated_activation by triton"}
    assert kernels(where, on=gpus("MI300X")) == set()
    assert kernels(where, model="single") == {"gated_activation by triton"}
    assert kernels(where, model="masked") == {"gated_activation by triton"}


def test_pins_take_away_and_give(where: Path) -> None:
    by = {pin: planned(where, *pin.split()).plan for pin in (
        "attention=cudnn", "attention=torch", "attention=flash", "kernels=torch",
    )}  # fmt: skip
    step_s = {pin: p.prediction.step_time_s for pin, p in by.items()}
    assert "gated_activation by triton" not in by["kernels=torch"].kernels.values()
    assert set(by["attention=flash"].kernels.values()) >= {"attention by flash"}
    assert step_s["attention=cudnn"] < step_s["attention=flash"] == step_s["attention=torch"]
    assert step_s["attention=cudnn"] < step_s["kernels=torch"]


def test_compiled_programs_name_attention_alone(where: Path) -> None:
    compiled = planned(where, options=Options(style="compiled")).plan
    assert set(compiled.kernels.values()) == {"attention by cudnn"}


def test_rows_that_are_split_run_by_calls_of_their_own(where: Path) -> None:
    fix = {"cp": "4", "cp_ring": "4"}
    made = plan(f"{where / 'model.py'}:half", H100, fix)
    assert set(made.plan.kernels.values()) == {"gated_activation by triton"}
    with pytest.raises(UserError, match="its rows are split over cp"):
        plan(f"{where / 'model.py'}:half", H100, {**fix, "attention": "cudnn"})
    heads = plan(f"{where / 'model.py'}:half", H100, {"cp": "4", "cp_head": "4"})
    assert "attention by cudnn" in heads.plan.kernels.values()


REFUSED = {
    "a device": (("attention=cudnn",), "A100-80GB", "half", "Hopper, Blackwell, not on A100-80GB"),
    "one of the devices": (("attention=cudnn",), "H100 A100-80GB", "half", "not on A100-80GB"),
    "AMD": (("kernels=triton",), "MI300X", "half", "triton runs on Ampere"),
    "a dtype": (("attention=flash",), "H100", "single", "the op reads float32"),
    "a mask": (("attention=flash",), "H100", "masked", "it has a mask that is a tensor"),
    "no such kernel": (("attention=cudn",), "H100", "half", "Did you mean cudnn"),
    "of another op": (("kernels=cudnn",), "H100", "half", "There are torch or triton"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_kernel_that_cannot_run_is_an_error(where: Path, name: str) -> None:
    pins, on, model, reason = REFUSED[name]
    with pytest.raises(UserError, match=reason):
        planned(where, *pins, on=gpus(*on.split()), model=model)


def test_compiled_programs_leave_the_rest_to_the_compiler(where: Path) -> None:
    with pytest.raises(UserError, match="leave kernels to the compiler"):
        planned(where, "kernels=triton", options=Options(style="compiled"))


def test_a_plan_is_read_back_and_an_edited_one_refused(where: Path) -> None:
    made = planned(where)
    folder = where / "plan"
    plan_folder.write(folder, plan_files(made, folder)[0])
    assert plan_folder.read_plan(folder).kernels == made.plan.kernels
    file = folder / "plan.json"
    data = json.loads(file.read_text())
    name = next(iter(data["kernels"]))
    for text, error in (("oracle", PlanFolderError), ("attention by oracle", LoweringError)):
        data["kernels"][name] = text
        file.write_text(json.dumps(data))
        with pytest.raises(error, match=name):
            planned_graph(plan_folder.read_plan(folder), made.captured.graph)


def test_pins_read_back() -> None:
    pins = Pins(attention="cudnn", kernels="torch")
    assert Grammar().read(pins.texts()) == pins
    assert replace(pins, attention=None).texts() == {"kernels": "torch"}


def test_the_choice_is_the_fastest_of_all_pinned(where: Path) -> None:
    def step_s(*pins: str) -> float:
        return planned(where, *pins).plan.prediction.step_time_s

    every = [
        step_s(f"attention={one}", f"kernels={other}")
        for one in ("torch", "flash", "cudnn", "flash3")
        for other in ("torch", "triton")
    ]
    assert step_s() == min(every)


OWN = """
def swiglu(gate, up, activation):
    return torch.nn.functional.silu(gate) * up


def attend(q, k, v, causal, scale):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


autopar.register_kernel("gated_activation", swiglu, devices=("cpu", "hopper"), speed=2.0)
autopar.register_kernel("attention", attend, devices=("gpu",), dtypes=("bfloat16",))
half = workload("bfloat16")
"""


@pytest.fixture
def own(where: Path) -> Iterator[str]:
    (where / "own.py").write_text(MODEL + OWN)
    yield f"{where / 'own.py'}:half"
    unregister(GATED, "own:swiglu")
    unregister("attention", "own:attend")


def test_a_kernel_of_ones_own(own: str, where: Path) -> None:
    fix = {"dp_shard": "4"}
    made = plan(own, H100, fix).plan
    assert set(made.kernels.values()) == {"attention by cudnn", "gated_activation by own:swiglu"}
    by_triton = plan(own, H100, {**fix, "kernels": "triton"}).plan
    assert made.prediction.step_time_s < by_triton.prediction.step_time_s
    a100 = plan(own, gpus("A100-80GB"), fix).plan
    assert set(a100.kernels.values()) == {"gated_activation by triton"}
    pinned = plan(own, H100, {**fix, "attention": "own:attend"}).plan
    assert "attention by own:attend" in pinned.kernels.values()
    other = plan(f"{where / 'model.py'}:half", H100, fix).plan
    assert set(other.kernels.values()) == {"attention by cudnn", "gated_activation by triton"}
    cpu = plan(own, load_cluster("examples/clusters/cpu_4.yaml"), {}).plan
    assert set(cpu.kernels.values()) == {"gated_activation by own:swiglu"}


def test_what_cannot_be_registered() -> None:
    def kernel() -> None: ...

    for arguments, reason in (
        (("rms_norm", plan), "kernels run attention or gated_activation"),
        (("attention", "own:attend"), "give a function of a module"),
        (("attention", kernel), "give a function of a module"),
    ):
        with pytest.raises(UserError, match=reason):
            register_kernel(*arguments)
    for name, value, reason in (
        ("dtypes", ("int8",), "'int8' is no dtype of a kernel"),
        ("speed", 0, "a number above 0"),
    ):
        with pytest.raises(UserError, match=reason):
            register_kernel("attention", plan, **{name: value})  # type: ignore[arg-type]


@pytest.mark.gloo
def test_plans_with_kernels_compute_the_model_and_verify_says_what_did_not_run(where: Path) -> None:
    folders = []
    for i, fix in enumerate(
        (
            {"tp": "2", "dp_shard": "2", "zero": "3", "recompute": "full"},
            {"pp": "2", "tp": "2", "schedule": "zb-h1", "microbatch": "4"},
            {"dp_replicate": "4", "microbatch": "2"},
            {"cp": "4", "cp_head": "4"},
        )
    ):
        made = plan(f"{where / 'model.py'}:brief", H100, fix)
        assert set(made.plan.kernels.values()) == {
            "attention by cudnn",
            "gated_activation by triton",
        }
        folders.append(where / f"verified{i}")
        plan_folder.write(folders[-1], plan_files(made, folders[-1])[0])
    for result in verify_many(folders):
        assert result.passed
        (sentence,) = result.unchecked
        assert "attention by cudnn and gated_activation by triton: these run on GPUs" in sentence


LOGITS = """
import torch
import torch.nn.functional as F
from torch import nn
import autopar

V, D = 65536, 256


class Model(nn.Module):
    def __init__(self, twice):
        super().__init__()
        self.words, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.twice = twice

    def forward(self, ids):
        z = self.head(self.words(ids))
        loss = F.cross_entropy(z.flatten(0, 1), ids.flatten())
        return loss + z.square().mean() if self.twice else loss


def workload(twice):
    return autopar.Workload(
        model=lambda: Model(twice), batch=lambda: {"ids": torch.zeros(16, 64, dtype=torch.long)},
        optimizer="adamw", precision="bfloat16",
    )


once, twice = workload(False), workload(True)
"""


def test_loss_heads_in_chunks_run_by_a_kernel(where: Path) -> None:
    (where / "logits.py").write_text(LOGITS)

    def made(name: str = "once", **fix: str) -> PlanResult:
        return plan(f"{where / 'logits.py'}:{name}", H100, {"dp_replicate": "4", **fix})

    by_kernel = made(loss_chunks="2")
    assert set(by_kernel.plan.kernels.values()) == {"linear_cross_entropy by triton"}
    (folder := where / "logits").mkdir()
    text = plan_files(by_kernel, folder)[0]["program/model.py"]
    assert 'chunks=2, kernel="triton"' in " ".join(text.split())
    by_torch = made(loss_chunks="2", kernels="torch")
    assert not by_torch.plan.kernels
    buffers = [r.plan.prediction.memory_bytes.total for r in (by_kernel, by_torch)]
    assert buffers[0] < buffers[1]  # no copy of a chunk in float32
    assert not made(loss_chunks="none").plan.kernels
    assert not made("twice").plan.kernels
    graph = planned_graph(by_kernel.plan, by_kernel.captured.graph)
    assert graph == by_kernel.graph
    with pytest.raises(UserError, match="the model has no"):
        made("twice", kernels="triton")
    with pytest.raises(UserError, match="nothing that runs by it"):
        made(loss_chunks="none", kernels="triton")
