"""Methods of transformers' classes that read values, against what stands for them in a trace."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopar.frontends.pytorch import capture, known_indexer
from autopar.frontends.pytorch.constant_values import constant_of
from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.frontends.pytorch.known_forwards import KNOWN, known_forward, known_forwards
from autopar.frontends.pytorch.known_rows import digest_of
from autopar.nouns.workload import Workload
from autopar.torch_private.modes import without_modes, without_torch_function
from benchmarks.census_workloads import workload_of

LIMIT = 1e-12
WIDTH, CHANNELS, EXPERTS = 8, 6, 4
_INDEXER = "transformers.models.qwen4_exp.modeling_qwen4_exp.Qwen4ExpTextQSAIndexer"


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


def _indexer() -> Any:
    """Of one head, half of whose scores are zero, so that many blocks are as good as others."""
    config = importlib.import_module("transformers.models.qwen4_exp.configuration_qwen4_exp")
    models = importlib.import_module("transformers.models.qwen4_exp.modeling_qwen4_exp")
    own = {"indexer_n_heads": 1, "indexer_kv_heads": 1, "indexer_head_dim": WIDTH}
    sizes = {"indexer_budget": 4, "indexer_compress_ratio": 2, "hidden_size": WIDTH, "head_dim": 8}
    return models.Qwen4ExpTextQSAIndexer(config.Qwen4ExpTextConfig(**own, **sizes), 0).double()


def _indexed(length: int) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, None]:
    draw = torch.Generator().manual_seed(length)
    x, cos, sin = torch.randn(3, 4, length, WIDTH, generator=draw, dtype=torch.float64)
    mask = torch.ones(length, length, dtype=torch.bool).tril().expand(4, 1, -1, -1)
    return x, (cos, sin), mask, None


@pytest.mark.parametrize("length", [1, 3, 8, 15])
def test_an_indexer_chooses_what_the_librarys_does(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, given = _indexer(), _indexed(length)
    monkeypatch.setattr(known_indexer, "_is_causal", lambda mask, size: size == length)
    row = known_forward(module)
    assert row is not None
    with torch.no_grad():
        assert torch.equal(row.computes["forward"](module, *given), module(*given))


def test_an_indexer_of_another_mask_is_refused() -> None:
    module, given = _indexer(), _indexed(3)
    with pytest.raises(UnsupportedOpError, match="the mask is not causal alone"):
        KNOWN[_INDEXER].computes["forward"](module, *given)  # no trace says what is in it


class Masked(nn.Module):
    """Calls of one layer, given masks that are made of numbers."""

    def __init__(self, places: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Half() for _ in places)
        self.places = places

    def forward(self, x: Tensor) -> Tensor:
        masks = {place: torch.arange(WIDTH) < place for place in set(self.places)}
        for layer, place in zip(self.layers, self.places, strict=True):
            x = layer(x, masks[place])
        return x.square().mean()


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        with without_torch_function():
            values = constant_of(mask) if get_proxy_mode() is not None else mask
        assert values is not None
        with without_modes(), without_torch_function():
            count = int(values.sum())
        made: Tensor = x + self.linear(x * mask) * count
        return made


@pytest.mark.parametrize(("places", "alike"), [((2, 2, 2, 2), "123"), ((2, 2, 3, 2), "13")])
def test_layers_that_read_constants_are_alike_where_these_are(
    places: tuple[int, ...], alike: str
) -> None:
    batch = {"x": torch.randn(2, 3, WIDTH)}
    captured = capture(Workload(model=lambda: Masked(places), batch=lambda: batch))
    (several,) = (b for b in captured.graph.blocks.values() if len(b.instances) > 1)
    assert several.instances == tuple(f"layers.{i}" for i in alike)


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
