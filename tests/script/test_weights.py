"""Weights in Hugging Face's files: bytes of pieces, and whole models both ways; one process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar.nouns.errors import UserError
from autopar.runtime.pytorch.checkpoint_pieces import Piece
from autopar.runtime.pytorch.saved_names import Part, in_parts
from autopar.runtime.pytorch.weights import _runs, contents, load_weights, save_weights
from tests.plans import cluster


@st.composite
def regions(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    ends = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in shape]
    return shape, tuple(slice(a, b) for a, b in ends)


@given(regions())
def test_runs_are_the_bytes_of_a_region_in_order(
    case: tuple[tuple[int, ...], tuple[slice, ...]],
) -> None:
    shape, region = case
    places = torch.arange(math.prod(shape)).reshape(shape)
    runs = [i for start, size in _runs(shape, region, 2) for i in range(start, start + size)]
    assert runs[::2] == [2 * i for i in places[region].reshape(-1).tolist()]


def llama(tied: bool, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def ids() -> dict[str, torch.Tensor]:
    tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def carried(given: Any, other: Any, folder: Path) -> float:
    """The loss of ``given``, whose weights go through files into a trainer of ``other`` and out
    into files again."""
    given.save_pretrained(folder / "in")
    plan = autopar.plan(other, ids(), cluster(1), folder=folder / "plan")
    trainer: Any = autopar.load(plan, model=other)
    trainer.load_weights(folder / "in")
    with torch.no_grad():
        wanted = float(given(**ids()).loss)
    assert float(trainer.evaluate(ids())) == pytest.approx(wanted, rel=1e-6)
    trainer.save_weights(folder / "out", given.config)
    return wanted


@pytest.mark.parametrize("tied", [False, True])
def test_both_ways_bit_for_bit(tied: bool, tmp_path: Path) -> None:
    given, other = llama(tied), llama(tied, seed=9)
    wanted = carried(given, other, tmp_path)
    back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert all(map(torch.equal, back.parameters(), given.parameters()))
    assert (back.lm_head.weight is back.model.embed_tokens.weight) is tied
    with torch.no_grad():
        assert float(back(**ids()).loss) == wanted


def moe(kind: str) -> Any:
    """Two layers of four experts, which transformers stacks in memory and not in files."""
    sizes = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2,
        "eos_token_id": 1,
    }  # fmt: skip
    if kind == "mixtral":
        config: Any = transformers.MixtralConfig(num_local_experts=4, **sizes)
        return transformers.MixtralForCausalLM(config)
    config = transformers.Qwen3MoeConfig(num_experts=4, moe_intermediate_size=8, **sizes)
    return transformers.Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_experts_have_the_names_and_parts_of_hugging_face(kind: str, tmp_path: Path) -> None:
    given = moe(kind)
    carried(given, moe(kind), tmp_path)
    theirs, ours = contents(tmp_path / "in"), contents(tmp_path / "out")
    assert any("experts.3." in name for name in theirs)
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}
    back = type(given).from_pretrained(tmp_path / "out")
    assert all(map(torch.equal, back.parameters(), given.parameters()))


@given(regions(), st.integers(1, 3), st.integers(0, 3))
def test_pieces_in_parts_are_the_parts_of_pieces(
    case: tuple[tuple[int, ...], tuple[slice, ...]], step: int, dim: int
) -> None:
    shape, region = case
    if dim >= len(shape):
        return
    parts = []
    for start in range(0, shape[dim], step):
        own = [slice(0, n) for n in shape]
        own[dim] = slice(start, min(start + step, shape[dim]))
        parts.append(Part(f"part.{start}", tuple(own), (dim,) if step == 1 else ()))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    made = dict(in_parts({"x": Piece(whole[region].clone(), region, shape)}, {"x": parts}))
    assert sum(piece.tensor.numel() for piece in made.values()) == whole[region].numel()
    for part in parts:
        if part.name in made:
            right = whole[part.region].reshape(part.shape)
            assert made[part.name].shape == part.shape
            assert torch.equal(made[part.name].tensor, right[made[part.name].region])


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, Piece]:
    return {name: Piece.whole(tensor) for name, tensor in tensors.items()}


def test_large_models_go_into_several_files(tmp_path: Path) -> None:
    tensors = {f"layer.{i}": torch.randn(3, i + 1).to(torch.bfloat16) for i in range(6)}
    save_weights(tmp_path, whole(tensors), shard_bytes=40)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert len(set(index["weight_map"].values())) > 2
    from safetensors.torch import load_file

    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], tensor)
    into = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in tensors.items()}
    load_weights(tmp_path, whole(into), {}, frozenset())
    assert all(torch.equal(into[name], tensors[name].float()) for name in tensors)
    save_weights(tmp_path, whole({"one": torch.ones(2)}))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors"]


def test_what_a_folder_lacks_is_said_before_anything_changes(tmp_path: Path) -> None:
    save_weights(tmp_path, whole({"a": torch.ones(2, 3), "b": torch.ones(4)}))
    a, c = torch.zeros(2, 3), torch.zeros(1)
    for pieces, text in (
        ({"a": a, "c": c}, r"has no c: it has 2 tensors, such as a, b"),
        ({"a": a, "b": c}, r"b is \[4\] in .* and \[1\] in the model"),
    ):
        with pytest.raises(UserError, match=text):
            load_weights(tmp_path, whole(pieces), {}, frozenset())
        assert not a.any()
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        load_weights(tmp_path / "nothing", {}, {}, frozenset())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match="was cut off"):
        load_weights(tmp_path, whole({"b": torch.zeros(4)}), {}, frozenset())
    file.write_bytes(b"\xff" * 20)
    with pytest.raises(UserError, match="is no safetensors file"):
        contents(tmp_path)


def test_buffers_that_are_not_saved_are_not_written(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("kept", torch.full((3,), 2.0))
            self.register_buffer("passing", torch.full((3,), 3.0), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale: Any = self.weight * self.kept  # type: ignore[operator]
            made: torch.Tensor = (x * scale * self.passing).square().mean()
            return made

    model = Scaled()
    plan = autopar.plan(model, {"x": torch.ones(4, 3)}, cluster(1), folder=tmp_path / "plan")
    trainer: Any = autopar.load(plan, model=model)
    trainer.save_weights(tmp_path / "out")
    assert sorted(contents(tmp_path / "out")) == ["kept", "weight"]
