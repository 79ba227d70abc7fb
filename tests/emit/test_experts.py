"""Mixtures of experts as a library builds them: planned, emitted, and compared with the library's
own loop over experts, loss and all gradients in float64, on simulated ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from autopar.emit.pytorch import emit
from autopar.emit.pytorch.classes import Library
from autopar.files.cluster_file import load_cluster
from autopar.frontends.pytorch import capture
from autopar.frontends.pytorch.experts import chosen_experts
from autopar.frontends.pytorch.experts_tried import differs
from autopar.frontends.shared.captured import Captured
from autopar.nouns.errors import UserError
from autopar.nouns.mesh import Mesh
from autopar.nouns.workload import Workload
from autopar.planner.planning import plan_captured
from autopar.runtime.pytorch import experts as runtime_experts
from benchmarks.expert_models import padded, partly_used
from benchmarks.zoo_models import EXPERTS, VOCAB, routed
from tests.emit.harness import (
    Emitted,
    check,
    check_issued,
    emitted,
    reference,
    relative,
    run,
)
from tests.emit.random_stage import random_stage

CLUSTER = load_cluster("examples/clusters/cpu_4.yaml")
FIXES = (
    *("dp_replicate=4", "tp=2,dp_replicate=2", "tp=4", "pp=1"),
    *(
        "ep=4,dp_shard=4",
        "ep=2,dp_shard=2,tp=2",
        "ep=4,dp_shard=2,tp=2",
        "ep=2,cp=2",
        "cp=2,tp=2,ep=4",
        "cp_ring=2,cp_head=2",
    ),
)
ALIKE = ("granitemoe", "olmoe", "qwen2_moe")
"""Families whose experts are mixtral's but for the router."""
FEW = ("tp=4", "ep=2,dp_shard=2,tp=2")
BESIDE = ("tp=2,dp_replicate=2", "pp=1", "ep=4,dp_shard=4", "ep=2,dp_shard=2,tp=2")
"""Layouts each part of which another one has: of one family that is enough."""
FIXES_OF = {"mixtral": FIXES, **dict.fromkeys(ALIKE, FEW)}
AUXILIARY = ("mixtral", "olmoe", "qwen2_moe")


@cache
def _captured(workload: Workload) -> Captured:
    return capture(workload)


def _checked(workload: Workload, fix: str) -> Emitted:
    """The plan under ``fix``, whose program computes what the model does."""
    captured = _captured(workload)
    settings = dict(pair.split("=") for pair in fix.split(","))
    planned = plan_captured(captured, workload, CLUSTER, "m.py", settings)
    text = emit(planned.lowered, planned.plan, captured)["model.py"]
    made = Emitted(captured, planned.plan, planned.lowered, text)
    torch.manual_seed(0)
    assert workload.model is not None
    check(made, workload.model(), workload.batch())
    return made


@cache
def _family(name: str) -> Workload:
    return routed(name)()


@pytest.mark.parametrize(
    ("family", "fix"),
    [(f, x) for f in EXPERTS for x in FIXES_OF.get(f, [x for x in FIXES if x not in BESIDE])],
)
@pytest.mark.some(12)
def test_every_family_under_every_layout(family: str, fix: str) -> None:
    made = _checked(_family(family), fix)
    assert "experts(" in made.text
    assert sum(op.op.kind == "experts" for b in made.lowered.blocks.values() for op in b.ops) >= 1


@pytest.mark.parametrize("family", EXPERTS)
def test_half_precision(family: str) -> None:
    """Tokens that are almost as well off with another expert go there: gradients are near."""
    workload = replace(_family(family), precision="bfloat16")
    captured = _captured(_family(family))
    planned = plan_captured(captured, workload, CLUSTER, "m.py", {"dp_replicate": "4"})
    text = emit(planned.lowered, planned.plan, captured)["model.py"]
    made = Emitted(captured, planned.plan, planned.lowered, text)
    torch.manual_seed(0)
    assert workload.model is not None
    model = workload.model()
    low, exact = run(made, model, workload.batch(), half=True), reference(model, workload.batch())
    assert relative(low.loss, exact.loss) < 1e-3
    pairs = [(low.gradients[name].double(), g) for name, g in exact.gradients.items()]
    error = torch.stack([(a - b).norm() for a, b in pairs]).norm()
    assert error < 0.1 * torch.stack([b.norm() for _, b in pairs]).norm()
    check_issued(made, low, 1)


def test_ranks_of_which_each_has_its_experts_need_not_share_state() -> None:
    made = _checked(_family("mixtral"), "ep=4,dp_shard=4,zero=0")
    assert made.plan.stages[0].zero == 0
    assert 'dispatch="ep"' in made.text


def test_what_a_program_says_of_experts() -> None:
    text = _checked(_family("mixtral"), "dp_replicate=4").text
    assert "from autopar.runtime.pytorch.program import" in text
    assert (
        "def gate_of_experts(gate: Tensor, up: Tensor) -> Tensor:\n"
        '    """What an expert does between its two products, element by element."""\n'
        "    return F.silu(gate) * up\n"
    ) in text
    text = _checked(_family("gpt_oss"), "dp_replicate=4").text
    assert (
        "    gate = gate.clamp(max=7.0)\n"
        "    return (up.clamp(min=-7.0, max=7.0) + 1) * (gate * (gate * 1.702).sigmoid())\n"
    ) in text
    assert 'gate=gate_of_experts,\n            reads="pairs",\n            transposed=True,' in text


def test_experts_stand_where_the_model_calls_them() -> None:
    (block,) = _captured(_family("mixtral")).graph.blocks.values()
    (op,) = (op for op in block.body.ops if op.kind == "experts")
    assert op.source.file.endswith("modeling_mixtral.py")
    assert op.source.module == "mlp.experts"


def test_two_gates_have_two_names() -> None:
    library = Library()
    texts = ["(h: Tensor) -> Tensor:\n    return h", "(h: Tensor) -> Tensor:\n    return -h"]
    names = [library.define("gate_of_experts", text) for text in (*texts, *texts)]
    assert names == ["gate_of_experts", "gate_of_experts2"] * 2
    assert list(library.functions.values()) == texts


def test_attention_with_sinks_is_split_over_heads() -> None:
    text = _checked(_family("gpt_oss"), "tp=2,dp_replicate=2").text
    assert 'self.sinks = Parameter((4,), "tp:S0")' in text


# -- the library's table ---------------------------------------------------------------------------

TABLE: Any = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS


def test_the_reference_is_the_librarys_own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a kernel that a config names nor our own function, whose errors it would share."""

    def named(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("called by its name")

    monkeypatch.setitem(TABLE._local_mapping, "grouped_mm", named)
    workload = _family("mixtral")
    assert workload.model is not None
    reference(workload.model(), workload.batch())
    plain = runtime_experts.one_by_one

    def wrong(x: Tensor, rows: Any, *rest: Any) -> Tensor:
        return plain(x, [*rows[1:], rows[0]], *rest)

    monkeypatch.setattr(runtime_experts, "one_by_one", wrong)
    with pytest.raises(AssertionError):
        _checked(workload, "dp_replicate=4")


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_a_graph_does_not_hang_on_the_implementation_that_a_config_names(
    implementation: str,
) -> None:
    own = routed("olmoe", experts_implementation=implementation)()
    assert own.model is not None
    assert own.model().config._experts_implementation == implementation
    assert capture(own).graph == _captured(_family("olmoe")).graph


def test_the_table_is_left_as_it_was() -> None:
    capture(_family("mixtral"))
    assert "get_interface" not in vars(TABLE)
    with chosen_experts(lambda own: "outer"):
        with chosen_experts(lambda own: "inner"):
            assert TABLE.get_interface("grouped_mm", None) == "inner"
        assert TABLE.get_interface("grouped_mm", None) == "outer"
    assert "get_interface" not in vars(TABLE)


# -- losses for balance ---------------------------------------------------------------------------


@cache
def _balanced(family: str, masked: bool) -> Workload:
    batch = padded if masked else None
    return routed(family, batch, output_router_logits=True, router_aux_loss_coef=0.7)()


@pytest.mark.parametrize(
    ("family", "masked", "fix"),
    [
        *(("mixtral", masked, "dp_replicate=4") for masked in (False, True)),
        *((family, True, "tp=2,dp_replicate=2") for family in AUXILIARY),
    ],
)
@pytest.mark.some(2)
def test_a_loss_for_balance_is_of_the_whole_batch(family: str, masked: bool, fix: str) -> None:
    """A product of two means: that of each rank's own would be another number."""
    _checked(_balanced(family, masked), fix)


@pytest.mark.parametrize("fix", ["microbatch=1", "pp=2,microbatch=1"])
def test_a_loss_for_balance_is_not_cut_into_microbatches(fix: str) -> None:
    workload = _balanced("mixtral", False)
    settings = dict(pair.split("=") for pair in fix.split(","))
    with pytest.raises(UserError, match=r"modeling_mixtral.*sum over the batch"):
        plan_captured(_captured(workload), workload, CLUSTER, "m.py", settings)


# -- experts that nobody uses ---------------------------------------------------------------------


@pytest.mark.parametrize("fix", ["dp_replicate=4", "tp=2,dp_replicate=2"])
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_experts_that_nobody_uses_get_zeros(family: str, fix: str) -> None:
    _checked(partly_used(family), fix)


# -- other forms ----------------------------------------------------------------------------------

HIDDEN, INNER, COUNT = 16, 24, 4
FORMS: Mapping[str, Mapping[str, bool]] = {
    "plain": {},
    "transposed": {"is_transposed": True},
    "no gate": {"has_gate": False},
    "pairs": {"is_concatenated": False, "is_transposed": True},
    "pairs and biases": {"is_concatenated": False, "has_bias": True},
}
library: Any = transformers.integrations


def _experts_class(form: Mapping[str, bool], scale: float = 1.0) -> type[nn.Module]:
    """Experts as a modelling file of the library writes them; its own forward is token by token.

    ``scale``: what that does beside what the decorator says.
    """
    gated, turned = form.get("has_gate", True), form.get("is_transposed", False)
    first = "gate_up_proj" if gated else "up_proj"

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.act_fn = nn.ReLU()
            self.num_experts = COUNT
            wide = (1 + gated) * INNER
            for name, outputs, inputs in ((first, wide, HIDDEN), ("down_proj", HIDDEN, INNER)):
                shape = (COUNT, inputs, outputs) if turned else (COUNT, outputs, inputs)
                setattr(self, name, nn.Parameter(torch.randn(shape) * 0.2))
                if form.get("has_bias"):
                    setattr(self, f"{name}_bias", nn.Parameter(torch.randn(COUNT, outputs)))

        def product(self, name: str, x: Tensor, index: Tensor) -> Tensor:
            matrices = getattr(self, name)[index]
            made = torch.einsum("nio,ni->no" if turned else "noi,ni->no", matrices, x)
            return made + getattr(self, f"{name}_bias")[index] if form.get("has_bias") else made

        def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            total = torch.zeros_like(x)
            for chosen, weight in zip(index.unbind(1), weights.unbind(1), strict=True):
                h = self.product(first, x, chosen)
                h = self._apply_gate(h) if gated else self.act_fn(h)
                total = total + self.product("down_proj", h, chosen) * weight.unsqueeze(1)
            return total * scale

        if not form.get("is_concatenated", True):

            def _apply_gate(self, h: Tensor) -> Tensor:
                return (h[..., 1::2] + 1) * torch.sigmoid(h[..., ::2])

    made: type[nn.Module] = library.use_experts_implementation(Experts, **form)
    return made


class Routed(nn.Module):
    """One layer of experts between a table and a head."""

    def __init__(self, form: str, scale: float = 1.0) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, HIDDEN)
        self.router = nn.Linear(HIDDEN, COUNT)
        config = SimpleNamespace(_experts_implementation="grouped_mm")
        self.experts = _experts_class(FORMS[form], scale)(config)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids)
        weights, index = self.router(x).softmax(-1).flatten(0, 1).topk(2)
        x = x + self.experts(x.flatten(0, 1), index, weights).view_as(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.some(3)
def test_every_form_under_random_decisions(form: str) -> None:
    """The width between the products is split where the matrices' storage allows it."""
    torch.manual_seed(0)
    model, batch = Routed(form), padded()
    given = {name: batch[name].clamp(min=0) for name in ("input_ids", "labels")}
    captured = capture(Workload(model=partial(Routed, form), batch=lambda: given))
    tried = set()
    for mesh, seed in product(("tp=4", "dp_shard=2 x tp=2", "tp=3"), range(5)):
        spread = random_stage(captured, Mesh.parse(mesh), 1, seed)
        made = emitted(captured, spread)
        check(made, model, given)
        (op,) = (o for o in made.lowered.ops if o.op.kind == "experts")
        tried.add(op.strategy.on("tp"))
    assert ("f" in tried) == (form in ("no gate", "pairs"))
    assert "n" in tried


class Normed(nn.Module):
    """What lies between the products is not element by element."""

    def __init__(self) -> None:
        super().__init__()
        self.routed = Routed("plain")
        self.routed.experts.act_fn = nn.Softmax(-1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.routed(input_ids, labels)
        return loss


def test_a_gate_that_mixes_is_refused() -> None:
    batch = {name: padded()[name] for name in ("input_ids", "labels")}
    with pytest.raises(UserError, match="between the products of Experts stands 'softmax'"):
        capture(Workload(model=Normed, batch=lambda: batch))
    assert "get_interface" not in vars(TABLE)


@pytest.mark.parametrize("form", FORMS)
def test_experts_that_do_more_than_their_decorator_says_are_refused(form: str) -> None:
    """Training them would give other numbers than the library's own forward does."""
    batch = {name: padded()[name] for name in ("input_ids", "labels")}
    with pytest.raises(UserError, match=r"Experts.forward computes something else .*: on drawn"):
        capture(Workload(model=partial(Routed, form, 1.01), batch=lambda: batch))


def test_nothing_is_said_of_experts_that_run_on_their_own_widths_alone() -> None:
    module: Any = Routed("plain").experts
    shapes = {name: p.shape for name, p in module.named_parameters()}
    with chosen_experts(lambda own: own):
        error = differs(module, shapes)
        assert error is not None
        assert error < 1e-5
        module.act_fn = nn.LayerNorm(INNER)
        assert differs(module, shapes) is None
