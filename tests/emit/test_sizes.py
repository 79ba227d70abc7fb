"""Sizes that follow from the batch have names, and no other size has one of them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.emit.jax import emit as emit_jax
from autopar.emit.sizes import GLOBAL, LENGTH, LOCAL, Size, product
from autopar.frontends.jax import capture as capture_jax
from autopar.frontends.shared.captured import Captured
from autopar.lowering.spread import lower
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from autopar.rules.cut import batch_cut
from tests import plans
from tests.emit import models
from tests.emit.following import following
from tests.emit.harness import capture_of, emitted
from tests.emit.test_numbers import MEGATRON
from tests.jax import models as jax_models

MESH = Mesh.parse("dp_shard=2 x tp=2")
JAX_PRODUCTS = {"linear_t": "n", "linear": "n"}
Make = Callable[[int, int], Captured]


def llama(samples: int, length: int) -> Captured:
    return capture_of(models.Llama, lambda: models.llama_batch(samples, length))


def of_jax(model: jax_models.Model) -> Make:
    def make(samples: int, length: int) -> Captured:
        batch = {name: jax_models.ids(samples, length) for name in model.batch}
        return capture_jax(model.loss, model.params, batch)

    return make


def jax_text(captured: Captured, spread: Spread, micro: int) -> str:
    dims = {e.name: e.batch_dim for e in captured.batch if e.batch_dim is not None}
    lowered = lower(captured.graph, spread, micro, batch_cut(captured.graph, dims))
    plan = plans.plan(framework="jax", spreads=(spread,), microbatches=micro, style="compiled")
    return emit_jax(lowered, plan, captured)["model.py"]


def code(text: str) -> tuple[dict[str, int], str]:
    """Numbers at the top by name, and the statements without them; of a JAX batch no comments."""
    tree, numbers = ast.parse(text), {}
    for node in [*tree.body]:
        match node:
            case ast.Assign([ast.Name(name)], ast.Constant(int(value))):
                numbers[name] = value
                tree.body.remove(node)
    for part in ast.walk(tree):
        if isinstance(part, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            part
        ):
            del part.body[0]
    return numbers, ast.unparse(tree)


@pytest.mark.parametrize("stream", ["D", "S1"])
@pytest.mark.parametrize(
    ("make", "given"),
    [
        (llama, MEGATRON),
        (of_jax(jax_models.gpt_scan()), JAX_PRODUCTS),
        (of_jax(jax_models.llama()), JAX_PRODUCTS),
    ],
    ids=["llama", "gpt_jax", "llama_jax"],
)
def test_a_program_of_another_batch_differs_in_the_numbers_at_the_top(
    make: Make, given: Mapping[str, str], stream: str
) -> None:
    """Twice the samples, and half as many more tokens."""
    found = []
    for samples, length in ((8, 16), (16, 24)):
        captured = make(samples, length)
        spread = following(captured, MESH, given, stream, micro=2)
        if make is llama:
            text = emitted(captured, spread, 2).text
        else:
            text = jax_text(captured, spread, 2)
        found.append(code(text))
    (few, one), (many, other) = found
    assert one == other
    assert set(few) == set(many)
    assert LENGTH in few
    assert {name: (few[name], many[name]) for name in few} == {
        name: (8, 16) if name == GLOBAL else (16, 24) for name in few
    }


class Four(nn.Module):
    """Samples, tokens, heads and their size: every number is 4."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(4, 16)
        self.up = nn.Linear(16, 16)
        self.experts = nn.Parameter(torch.ones(4, 16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.places(ids) + self.places(torch.arange(ids.shape[1]))
        heads = self.up(x).view(*ids.shape, 4, 4).transpose(1, 2).reshape(16, 16)
        kinds = F.one_hot(torch.arange(4), 4).float() @ self.experts
        ones = torch.ones(ids.shape[0], 1, 4) * torch.ones(4, 1)
        loss: Tensor = (heads * kinds.sum()).sum() + ones.mean() * x.mean()
        return loss


def test_numbers_that_are_equal_by_chance_are_no_sizes_of_the_batch() -> None:
    ids = torch.zeros(4, 4, dtype=torch.long)
    text = emitted(capture_of(Four, lambda: {"ids": ids}), Spread(Mesh((), ()))).text
    numbers, body = code(text)
    assert numbers == {GLOBAL: 4, LENGTH: 4}, text
    assert f"heads.reshape({GLOBAL} * 4, {LENGTH} * 4)" in body
    assert ".unflatten(2, (4, 4))" in body
    assert body.count(f"torch.arange({LENGTH}, ") == 1
    assert "F.one_hot(torch.arange(4, " in body
    assert "torch.ones((4, 1, 4), " in body  # nothing but the number says that these are samples


def test_a_name_is_lost_where_the_number_is_another() -> None:
    local, length = Size(4, LOCAL), Size(8, f'{LENGTH} // MESH["tp"]')
    assert str(product([1, local])) == LOCAL
    assert str(product([local, 3])) == f"{LOCAL} * 3"
    assert str(product([local, length])) == f'{LOCAL} * ({LENGTH} // MESH["tp"])'
    assert product([local, length]) == 32
    assert [str(local + 1), str(local * 2)] == ["5", "8"]
    assert str(product([2, 3])) == "6"
