"""Architecture figures read from captured models, and models that are no transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.frontends.dispatch import capture
from autopar.frontends.family.arch import Arch
from autopar.frontends.family.products import STREAM, Products
from autopar.frontends.family.read import Derived, NotOfFamily, arch_of
from autopar.frontends.loading import load_workload
from autopar.nouns.graph import Graph, Op, Tensor
from benchmarks.own_models import MODELS
from benchmarks.zoo_models import FAMILIES, _library
from benchmarks.zoo_models import _ids as ids
from tests.planner.graphs import gpt

ROOT = Path(__file__).parents[2]
LLAMA = Arch("m", 3, 32, 4, 2, 64, vocab=101, seq=16)
GPT2 = replace(LLAMA, kv_heads=4, ffn=128, gated=False, tied=True, positions=True)


def derived(family: str) -> Derived:
    captured = capture(FAMILIES[family]())
    return arch_of(captured.graph, captured.samples, "m")


@pytest.mark.parametrize(
    ("family", "arch"),
    [
        ("llama", LLAMA),
        ("llama_tied", replace(LLAMA, tied=True)),
        ("qwen3", LLAMA),
        ("phi", replace(LLAMA, gated=False)),  # attention and feed-forward side by side
        ("gpt2", GPT2),
        ("gpt_neox", replace(LLAMA, kv_heads=4, gated=False)),
        ("opt", replace(GPT2, ffn=64)),
        ("mixtral", replace(LLAMA, experts=4, top_k=2)),
        ("granitemoe", replace(LLAMA, experts=4, top_k=2)),
        ("olmoe", replace(LLAMA, experts=8, top_k=2)),
    ],
)
def test_figures_of_library_models(family: str, arch: Arch) -> None:
    figures = derived(family)
    assert figures.arch == arch
    assert figures.notes == ()


def test_an_encoder_has_no_causal_mask() -> None:
    settings = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6}
    bert = _library(
        "BertForMaskedLM",
        "BertConfig",
        ids(),
        vocab_size=101,
        num_attention_heads=4,
        max_position_embeddings=512,
        **settings,
    )
    captured = capture(bert())
    arch = arch_of(captured.graph, captured.samples, "m").arch
    assert arch == Arch(
        "m", 6, 64, 4, 4, 256, 101, 16, gated=False, tied=True, causal=False, positions=True
    )


def test_a_window_that_some_layers_have() -> None:
    figures = derived("gemma3")
    assert (figures.arch.layers, figures.arch.causal) == (4, True)
    assert (figures.arch.window, figures.arch.windowed_layers) == (8, 3)
    assert figures.notes == ()


def test_a_mask_of_documents_is_noted() -> None:
    figures = derived("llama_packed")
    assert figures.notes == ("3 of 3 layers have a mask of their own, priced as only causal",)


def test_both_frontends_give_the_same_figures() -> None:
    pytest.importorskip("jax")
    archs = []
    for example in ("02_gpt", "05_gpt_jax"):
        captured = capture(load_workload(str(ROOT / f"examples/{example}.py")))
        archs.append(arch_of(captured.graph, captured.samples, "m").arch)
    assert (
        archs[0]
        == archs[1]
        == Arch("m", 4, 128, 4, 4, 512, vocab=256, seq=128, gated=False, positions=True)
    )


def test_experts_of_einsums() -> None:
    captured = capture(MODELS["Mixtral-like"]())
    arch = arch_of(captured.graph, captured.samples, "m").arch
    assert arch == Arch("m", 32, 4096, 32, 8, 14336, 32000, 4096, experts=8, top_k=2)
    assert arch.parameters / sum(t.numel for _, t in captured.graph.parameters()) == pytest.approx(
        1, rel=1e-6
    )


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("resnet", "none of its ops is known as attention"),
        ("vit", "no table of tokens with rows of 32"),
        ("t5", "9 attentions, and as feed-forward parts 6 of width 64"),
        # A transform before its head is 3.8 % of so small a model.
        ("bert", "28,320 weights in matrices, and the model has 29,408: more than 2% apart"),
    ],
)
def test_what_the_family_does_not_have_is_refused(family: str, message: str) -> None:
    with pytest.raises(NotOfFamily, match=message):
        derived(family)


def test_a_graph_drawn_by_hand() -> None:
    graph = gpt(layers=5, heads=8)
    samples = next(t for t in graph.tensors.values() if t.role == "input").shape[0]
    arch = arch_of(graph, samples, "drawn").arch
    assert (arch.layers, arch.heads, arch.kv_heads, arch.gated) == (5, 8, 8, False)
    with pytest.raises(NotOfFamily, match=f"the batch has {samples + 1} samples"):
        arch_of(graph, samples + 1, "drawn")


def test_parameters_that_no_layer_accounts_for_are_refused_with_both_counts() -> None:
    graph = gpt(layers=5, heads=8)
    samples = next(t for t in graph.tensors.values() if t.role == "input").shape[0]
    more = with_matrix(graph, 10_000)
    with pytest.raises(NotOfFamily, match=r"make [\d,]+ weights .* the model has 1\d\d,\d+,\d+"):
        arch_of(more, samples, "drawn")


def with_matrix(graph: Graph, size: int) -> Graph:
    """The same with a square matrix that is read and comes to nothing."""
    matrix = Tensor("extra", (size, size), "float32", "parameter", True)
    total = Tensor("extra/sum", (), "float32")
    op = Op("sum", ("extra",), ("extra/sum",), {"dims": (0, 1), "keepdim": False})
    return replace(
        graph,
        tensors={**graph.tensors, "extra": matrix, "extra/sum": total},
        ops=(*graph.ops, op),
    )


@pytest.mark.parametrize(
    ("kind", "equation", "weight", "sizes"),
    [
        ("linear", "", (5, 4), (4, 5, 1)),
        ("linear_t", "", (4, 5), (4, 5, 1)),
        ("matmul", "", (3, 4, 5), (4, 5, 3)),
        ("einsum", "bsd,dhk->bshk", (4, 2, 3), (4, 6, 1)),  # a projection into heads
        ("einsum", "becd,edf->becf", (3, 4, 5), (4, 5, 3)),  # experts
        ("einsum", "edf,becd->becf", (3, 4, 5), (4, 5, 3)),
        ("some::grouped_mm", "", (3, 4, 5), (4, 5, 3)),
    ],
)
def test_sizes_of_products(
    kind: str, equation: str, weight: tuple[int, ...], sizes: tuple[int, int, int]
) -> None:
    operands = ("w", "x") if equation.startswith("edf") else ("x", "w")
    tensors = [
        Tensor("x", (2, 3, 4), "float32", "input"),
        Tensor("w", weight, "float32", "parameter"),
        Tensor("y", (2, 3, 5), "float32"),
        Tensor("z", (2, 3, 5), "float32"),
    ]
    ops = (
        Op(kind, operands, ("y",), {"equation": equation}),
        Op("gelu", ("y",), ("z",)),
    )
    products = Products(Graph({t.name: t for t in tensors}, ops, ("x",), ("z",)))
    (product,) = products.all.values()
    assert (product.inputs, product.outputs, product.count) == sizes
    assert (product.operand, product.weight) == ("x", "w")
    assert products.sources("z") == {"y"}
    assert products.sources("x") == {STREAM}
    assert products.following("y") == set()
