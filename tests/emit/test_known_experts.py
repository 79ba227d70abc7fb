"""Experts that transformers' table does not know: each class by itself, and models of them as
planned programs, against the library's own forward in float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.emit.pytorch import emit
from autopar.files.cluster_file import load_cluster
from autopar.frontends.pytorch import capture, experts_known
from autopar.frontends.pytorch.experts_known import KNOWN, known
from autopar.frontends.pytorch.known_rows import digest_of
from autopar.frontends.shared.captured import Captured
from autopar.nouns.errors import UserError
from autopar.nouns.workload import Workload
from autopar.planner.planning import plan_captured
from autopar.runtime.pytorch.experts import experts
from benchmarks.census_workloads import workload_of
from tests.emit.harness import Emitted, check, reference, relative, run

LIMIT = 1e-9
TOKENS, WIDTH, INNER, EXPERTS = 12, 8, 6, 4
CLUSTER = load_cluster("examples/clusters/cpu_4.yaml")


def library(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}")


# -- each class by itself --------------------------------------------------------------------------


def _dbrx() -> nn.Module:
    config = library("dbrx.configuration_dbrx").DbrxFFNConfig(
        hidden_size=WIDTH, ffn_hidden_size=INNER, moe_num_experts=EXPERTS
    )
    made: nn.Module = library("dbrx.modeling_dbrx").DbrxExperts(config)
    return made


def _llama4(each: int) -> nn.Module:
    config = library("llama4.configuration_llama4").Llama4TextConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_local_experts=EXPERTS,
        num_experts_per_tok=each,
    )
    made: nn.Module = library("llama4.modeling_llama4").Llama4TextMoe(config)
    return made


def _longcat(zero: int) -> nn.Module:
    config = library("longcat_flash.configuration_longcat_flash").LongcatFlashConfig(
        hidden_size=WIDTH,
        expert_ffn_hidden_size=INNER,
        n_routed_experts=EXPERTS,
        zero_expert_num=zero,
    )
    made: nn.Module = library("longcat_flash.modeling_longcat_flash").LongcatFlashExperts(config)
    return made


def _jetmoe() -> nn.Module:
    config = library("jetmoe.configuration_jetmoe").JetMoeConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=EXPERTS
    )
    made: nn.Module = library("jetmoe.modeling_jetmoe").JetMoeMoE(config)
    return made


def _switch() -> nn.Module:
    config = library("switch_transformers.configuration_switch_transformers")
    own = config.SwitchTransformersConfig(
        d_model=WIDTH, d_ff=INNER, num_experts=EXPERTS, dropout_rate=0.0
    )
    modelling = library("switch_transformers.modeling_switch_transformers")
    made: nn.Module = modelling.SwitchTransformersExperts(own)
    return made


def _nllb() -> nn.Module:
    config = library("nllb_moe.configuration_nllb_moe").NllbMoeConfig(
        d_model=WIDTH, num_experts=EXPERTS, activation_dropout=0.0, moe_token_dropout=0.0
    )
    made: nn.Module = library("nllb_moe.modeling_nllb_moe").NllbMoeExperts(config, INNER)
    return made


def _draw() -> tuple[torch.Generator, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return draw, torch.randn(TOKENS, WIDTH, generator=draw, dtype=torch.float64)


def _routed(count: int, samples: int = 0) -> list[Tensor]:
    draw, x = _draw()
    index = torch.rand(TOKENS, count, generator=draw).topk(2).indices
    index[:5] %= 2  # some have none
    x = x.view(samples, -1, WIDTH) if samples else x
    return [x, index, torch.rand(TOKENS, 2, generator=draw, dtype=torch.float64)]


def _one_hot() -> list[Tensor]:
    draw, x = _draw()
    chosen = nn.functional.one_hot(torch.arange(TOKENS) % 3, EXPERTS).unsqueeze(1)
    chosen[::4] = 0  # no room
    return [x, chosen, torch.rand(TOKENS, 1, generator=draw, dtype=torch.float64)]


def _mask() -> list[Tensor]:
    draw, x = _draw()
    mask = nn.functional.one_hot(torch.arange(TOKENS) % EXPERTS, EXPERTS)
    mask[::4] = 0
    return [x, mask, torch.rand(TOKENS, EXPERTS, generator=draw, dtype=torch.float64)]


CLASSES: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], list[Tensor]]]] = {
    "dbrx": (_dbrx, partial(_routed, EXPERTS, 2)),
    "jetmoe": (_jetmoe, lambda: [_draw()[1].view(2, -1, WIDTH)]),
    "llama4": (partial(_llama4, 1), lambda: [_draw()[1].view(2, -1, WIDTH)]),
    "llama4, two a token": (partial(_llama4, 2), lambda: [_draw()[1].view(2, -1, WIDTH)]),
    "longcat": (partial(_longcat, 3), partial(_routed, EXPERTS + 3)),
    "longcat, more that give back": (partial(_longcat, 9), partial(_routed, EXPERTS + 9)),
    "longcat, none": (partial(_longcat, 0), partial(_routed, EXPERTS)),
    "switch": (_switch, _one_hot),
    "nllb": (_nllb, _mask),
}


def _made(
    module: nn.Module, given: list[Tensor], how: Callable[..., Any]
) -> tuple[dict[str, Tensor], list[str]]:
    """Results and gradients, and the parameters that nothing came to."""
    module.zero_grad()
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in given]
    made = how(*leaves)
    results = made if isinstance(made, tuple) else (made,)
    draw = torch.Generator().manual_seed(5)
    grads = [torch.randn(r.shape, generator=draw, dtype=r.dtype) for r in results]
    torch.autograd.backward(results, grads)
    tensors = {f"result {i}": r.detach() for i, r in enumerate(results)}
    tensors |= {f"input {i}": t.grad for i, t in enumerate(leaves) if t.grad is not None}
    held = dict(module.named_parameters())
    tensors |= {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in held.items()}
    return tensors, [k for k, p in held.items() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize("name", CLASSES)
def test_a_row_computes_what_its_class_does(name: str) -> None:
    make, draw = CLASSES[name]
    module = make().double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
    row = known(module)
    assert row is not None
    run = partial(
        experts,
        gate=lambda h: row.between(module, h),
        reads="all",
        transposed=row.transposed,
    )
    wanted, idle = _made(module, draw(), module)
    got, still = _made(module, draw(), partial(row.computes, module, run))
    assert wanted.keys() == got.keys()
    assert idle == still
    assert len(idle) < len(list(module.parameters()))
    for key, right in wanted.items():
        apart = float((got[key] - right).norm() / right.norm().clamp_min(1e-30))
        assert apart < LIMIT, key


@pytest.mark.parametrize("name", KNOWN)
def test_the_librarys_text_is_the_known_one(name: str) -> None:
    """Where this fails, the library was changed: compare, test, and take the digest anew."""
    module = name.rpartition(".")[0]
    importlib.import_module(module)
    assert digest_of(module, KNOWN[name].reads) == KNOWN[name].digest


def test_a_class_that_reads_otherwise_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _dbrx()
    assert known(module) is not None

    def forward(self: Any, *tensors: Tensor) -> Tensor:
        return 2 * tensors[0]

    monkeypatch.setattr(type(module), "forward", forward)
    assert known(module) is None


def test_a_class_is_not_known_where_a_hook_would_not_be_called() -> None:
    module: Any = _llama4(1)
    seen: list[Any] = []
    module.router.register_forward_hook(lambda *given: seen.append(given[-1]))
    row = known(module)
    assert row is not None
    _, logits = row.computes(module, lambda x, *rest: x, torch.ones(1, 3, WIDTH))
    assert seen[0][1] is logits
    module.experts.register_forward_pre_hook(lambda *given: None)
    assert known(module) is None


# -- models ----------------------------------------------------------------------------------------


def _seq2seq(name: str, **own: Any) -> Workload:
    """Encoders and decoders, with masks that the library asks for where nothing has values. Every
    expert has tokens: the parameters of one that has none have no gradient on one device, where
    AdamW leaves them as they are, and zeros in a program."""
    import transformers

    config: Any = getattr(transformers, f"{name}Config")
    model: Any = getattr(transformers, f"{name}ForConditionalGeneration")

    def batch() -> Mapping[str, Any]:
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 60, (8, 12), generator=draw)
        labels = torch.randint(3, 60, (8, 12), generator=draw)
        ones = torch.ones(8, 12, dtype=torch.long)
        return {"input_ids": ids, "labels": labels, "attention_mask": ones}

    def build() -> nn.Module:
        made: nn.Module = model(config(**own))
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if name.endswith("classifier.weight"):
                    parameter.normal_()
        return made

    return Workload(model=build, batch=batch)


def _switch_model() -> Workload:
    return _seq2seq(
        "SwitchTransformers",
        **{"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2},
        **{"num_layers": 2, "num_decoder_layers": 2, "num_experts": 4, "expert_capacity": 4},
        **{"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        **{"dropout_rate": 0.0, "decoder_start_token_id": 0},
    )


def _nllb_model() -> Workload:
    """Of two experts, which are all that the library ever uses."""
    sides = ("encoder", "decoder")
    return _seq2seq(
        "NllbMoe",
        **{"vocab_size": 64, "d_model": 16, "num_experts": 2, "expert_capacity": 20},
        **{f"{side}_layers": 2 for side in sides},
        **{f"{side}_attention_heads": 2 for side in sides},
        **{f"{side}_ffn_dim": 24 for side in sides},
        **{f"{side}_sparse_step": 2 for side in sides},
        **{f"{side}_layerdrop": 0.0 for side in sides},
        **{"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
        **{"moe_token_dropout": 0.0, "max_position_embeddings": 32, "decoder_start_token_id": 2},
    )


MODELS: Mapping[str, Callable[[], Workload]] = {
    "dbrx": partial(workload_of, "dbrx"),
    "jetmoe": partial(workload_of, "jetmoe"),
    "llama4": partial(workload_of, "llama4_text"),
    "longcat": partial(workload_of, "longcat_flash"),
    "nllb": _nllb_model,
    "switch": _switch_model,
}
FIXES = ("dp_replicate=4", "tp=2,dp_replicate=2", "tp=4")


@cache
def _captured(name: str) -> tuple[Workload, Captured]:
    workload = MODELS[name]()
    return workload, capture(workload)


@pytest.mark.parametrize("fix", FIXES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.some(7)
def test_models_are_planned_and_exact(name: str, fix: str) -> None:
    workload, captured = _captured(name)
    settings = dict(pair.split("=") for pair in fix.split(","))
    planned = plan_captured(captured, workload, CLUSTER, "m.py", settings)
    text = emit(planned.lowered, planned.plan, captured)["model.py"]
    assert "experts(" in text
    made = Emitted(captured, planned.plan, planned.lowered, text)
    torch.manual_seed(0)
    assert workload.model is not None
    check(made, workload.model(), workload.batch())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.some(2)
def test_half_precision(name: str) -> None:
    """Tokens that are almost as well off with another expert go there: gradients are near."""
    workload = replace(MODELS[name](), precision="bfloat16")
    captured = capture(workload)
    planned = plan_captured(captured, workload, CLUSTER, "m.py", {"dp_replicate": "4"})
    text = emit(planned.lowered, planned.plan, captured)["model.py"]
    made = Emitted(captured, planned.plan, planned.lowered, text)
    torch.manual_seed(0)
    assert workload.model is not None
    model = workload.model()
    low, exact = run(made, model, workload.batch(), half=True), reference(model, workload.batch())
    assert relative(low.loss, exact.loss) < 1e-3
    pairs = [(low.gradients[key].double(), g) for key, g in exact.gradients.items()]
    error = torch.stack([(a - b).norm() for a, b in pairs]).norm()
    assert error < 0.1 * torch.stack([b.norm() for _, b in pairs]).norm()


def test_what_drops_between_products_is_refused() -> None:
    workload = _seq2seq("SwitchTransformers", num_layers=2, dropout_rate=0.1)
    with pytest.raises(UserError, match=r"SwitchTransformersExperts drops 0.1 of what lies"):
        capture(workload)


def test_forwards_are_left_as_they_were() -> None:
    kinds = [type(make()) for make, _ in CLASSES.values()]
    before = [vars(kind)["forward"] for kind in kinds]
    _captured("dbrx")
    _captured("llama4")
    assert [vars(kind)["forward"] for kind in kinds] == before
    assert experts_known.KNOWN is KNOWN
