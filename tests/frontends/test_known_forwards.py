"""Methods of transformers' classes that read values, against what stands for them in a trace."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.frontends.pytorch import capture
from autopar.frontends.pytorch.experts_known import digest_of
from autopar.frontends.pytorch.known_forwards import KNOWN, known_forward, known_forwards
from benchmarks.census_workloads import workload_of

LIMIT = 1e-12
WIDTH, CHANNELS, EXPERTS = 8, 6, 4


def _attention_experts() -> Any:
    config = importlib.import_module("transformers.models.jetmoe.configuration_jetmoe")
    models = importlib.import_module("transformers.models.jetmoe.modeling_jetmoe")
    own = {"hidden_size": WIDTH, "kv_channels": CHANNELS, "num_key_value_heads": 2}
    made = models.JetMoeMoA(config.JetMoeConfig(**own, num_local_experts=EXPERTS)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(generator=generator)
    return made


def _there_and_back(module: Any, x: Tensor, **computes: Any) -> list[Tensor]:
    """What an attention's experts make of x and of its projection, and the gradients."""
    there, back = (computes.get(name, getattr(type(module), name)) for name in ("map", "reduce"))
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    made, logits, routes = there(module, leaf)
    result = back(module, made.tanh(), routes)
    (result.square().sum() + logits.sin().sum()).backward()
    grads = [p.grad for p in (leaf, *module.parameters())]
    return [t.detach() for t in (made, logits, result, *grads) if t is not None]


def test_an_attentions_experts_multiply_every_token_alike() -> None:
    module = _attention_experts()
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(2, 5, WIDTH, generator=draw, dtype=torch.float64)
    row = known_forward(module)
    assert row is not None
    assert row.dense
    wanted = _there_and_back(module, x)
    got = _there_and_back(module, x, **row.computes)
    assert len(wanted) == len(got) == 8
    for right, made in zip(wanted, got, strict=True):
        assert float((made - right).norm() / right.norm()) < LIMIT


def test_a_router_gives_all_that_the_librarys_does() -> None:
    module = _attention_experts().router
    x = torch.randn(7, WIDTH, dtype=torch.float64)
    row = known_forward(module)
    assert row is not None
    for right, made in zip(module(x), row.computes["forward"](module, x), strict=True):
        if isinstance(right, list):
            assert made.tolist() == right
        else:
            assert torch.equal(made, right)


@pytest.mark.parametrize("name", KNOWN)
def test_the_librarys_text_is_the_known_one(name: str) -> None:
    """Where this fails, the library was changed: compare, test, and take the digest anew."""
    module = name.rpartition(".")[0]
    importlib.import_module(module)
    assert digest_of(module, KNOWN[name].reads) == KNOWN[name].digest


def test_methods_are_replaced_in_a_trace_alone_and_put_back() -> None:
    module = _attention_experts()
    before = dict(vars(type(module)))
    with known_forwards(nn.ModuleList([module])) as dense:
        assert dense == ("0",)
        made, _, routes = module.map(torch.randn(1, 3, WIDTH, dtype=torch.float64))
        assert isinstance(routes[-1], list)  # the library's own: no trace is taken here
    assert dict(vars(type(module))) == before
    assert made.shape == (1, 3, 2, 2 * CHANNELS)


def test_a_class_is_not_known_where_a_hook_would_not_be_called() -> None:
    module = _attention_experts()
    module.router.register_forward_hook(lambda *given: None)
    assert known_forward(module) is not None
    module.input_linear.register_forward_hook(lambda *given: None)
    assert known_forward(module) is None


def test_a_capture_names_the_products_of_all_experts() -> None:
    (note,) = (n for n in capture(workload_of("jetmoe")).notes if "Every expert multiplies" in n)
    assert "layers.0.self_attention.experts" in note
