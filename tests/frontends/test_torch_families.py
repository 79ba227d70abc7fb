"""Captured library models compute what the models compute: loss and all gradients in float64."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

import pytest

from autopar.frontends.pytorch import capture
from autopar.nouns.text.graph import from_text, to_text
from autopar.rules.table import TABLE
from benchmarks.zoo_models import EXPERTS, ZOO, routed
from tests.frontends.torch_referee import compare

BY_INDEX = set(EXPERTS)  # the best experts of a token are found by a call of torch


@pytest.mark.parametrize("family", ZOO)
@pytest.mark.some(12)
def test_graph_equals_model(family: str) -> None:
    compared = compare(ZOO[family]())
    assert compared.worst <= 1e-12
    graph = compared.captured.graph
    assert from_text(to_text(graph)) == graph
    bodies = [graph, *(b.body for b in graph.blocks.values())]
    calls = {op.kind for g in bodies for op in g.ops if "::" in op.kind}
    assert bool(calls) == (family in BY_INDEX)
    assert calls <= set(TABLE)


DECODERS = ["llama", "mistral", "qwen2", "qwen3", "olmo2", "granite"]


@pytest.mark.parametrize("family", DECODERS)
def test_decoder_idioms(family: str) -> None:
    """Masks, norms, rotary and grouped heads of the usual decoder leave no small ops behind."""
    (block,) = capture(ZOO[family]()).graph.blocks.values()
    kinds = [op.kind for op in block.body.ops]
    assert kinds.count("rms_norm") in (2, 4)
    assert kinds.count("rotary") == 2
    assert kinds.count("attention") == 1
    assert not {"cos", "neg", "rsqrt", "pow", "expand", "repeat_heads", "mean"} & set(kinds)
    (attention,) = (op for op in block.body.ops if op.kind == "attention")
    assert attention.attrs["causal"] is True
    assert len(attention.inputs) == 3
    shapes = [block.body.tensors[name].shape[1] for name in attention.inputs]
    assert shapes == [4, 2, 2]


def test_sliding_layers_are_a_block_of_their_own() -> None:
    graph = capture(ZOO["gemma3"]()).graph
    (block,) = graph.blocks.values()
    assert block.instances == ("model.layers.0", "model.layers.1", "model.layers.3")
    (sliding,) = (op for op in block.body.ops if op.kind == "attention")
    assert len(sliding.inputs) == 3
    assert (sliding.attrs["causal"], sliding.attrs["window"]) == (True, 8)
    (full,) = (op for op in graph.ops if op.kind == "attention")
    assert full.attrs["causal"] is True
    assert "window" not in full.attrs
    assert len(full.inputs) == 3


def test_tied_embeddings_are_one_tensor() -> None:
    captured = capture(ZOO["llama_tied"]())
    assert captured.tied == (("model.embed_tokens.weight", "lm_head.weight"),)
    names = [name for name, _ in captured.graph.parameters()]
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names))


def test_capture_does_not_depend_on_the_order_of_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3 makes its rotary angles in the order of a set of strings."""
    module = importlib.import_module("transformers.models.gemma3.modeling_gemma3")
    orders: list[list[str]] = []
    fingerprints = set()
    for backwards in (False, True):

        def ordered(items: Iterable[str], backwards: bool = backwards) -> list[str]:
            orders.append(sorted({*items}, reverse=backwards))
            return orders[-1]

        monkeypatch.setattr(module, "set", ordered, raising=False)
        fingerprints.add(capture(ZOO["gemma3"]()).fingerprint())
    assert ["full_attention", "sliding_attention"] in orders
    assert ["sliding_attention", "full_attention"] in orders
    assert len(fingerprints) == 1


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen2_moe"])
@pytest.mark.some(1)
def test_layers_whose_insides_a_loss_reads_are_folded(family: str) -> None:
    """The library hands router logits on from inside of a layer, past what its forward returns."""
    compared = compare(routed(family, output_router_logits=True, router_aux_loss_coef=0.5)())
    assert compared.worst <= 1e-12
    (block,) = compared.captured.graph.blocks.values()
    assert len(block.instances) == 3
    assert len(block.body.outputs) == 2
