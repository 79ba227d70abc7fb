"""JAX programs: variables have names of the source; what is read once stands where it is read."""

from __future__ import annotations

import re

import pytest

from autopar.frontends.jax import capture
from autopar.nouns.kinds import KINDS
from autopar.nouns.mesh import Mesh
from tests.emit.following import following
from tests.emit.test_sizes import JAX_PRODUCTS, MESH, jax_text
from tests.jax import families, models

MODELS = {"gpt": models.gpt_scan, "llama": models.llama, "t5": families.t5}
OWN = frozenset({"cos", "sin", "embedding", "attention"})  # what they are, too
ROTARY = """\
    a, b = jnp.split(q, (4,), axis=3)
"""
ROTATED = "jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=3)"


def text(name: str, mesh: Mesh = MESH) -> str:
    model = MODELS[name]()
    captured = capture(model.loss, model.params, model.batch)
    return jax_text(captured, following(captured, mesh, JAX_PRODUCTS, "D", micro=2), 2)


def test_a_llama_reads_like_its_source() -> None:
    found = text("llama")
    for part in (ROTARY, f"    q = {ROTATED}  # ", f"    k = {ROTATED}  # "):
        assert part in found, found


@pytest.mark.parametrize("name", MODELS)
def test_no_variable_is_called_after_a_kind_of_op(name: str) -> None:
    targets = re.findall(r"^    ([\w, ]+) = ", text(name), re.MULTILINE)
    assert targets
    named = {re.sub(r"\d+$", "", part) for target in targets for part in target.split(", ")}
    assert not named & (set(KINDS) - OWN)


def test_layers_that_stand_apart_share_their_table() -> None:
    found = text("gpt")
    assert found.count("Block(") == 2
    assert 'parameters=BLOCKS["blocks"].parameters)' in found


def test_what_layers_share_has_a_name_and_a_type() -> None:
    made = text("t5")
    assert "shared0" not in made
    assert "def encoder_layer(p: dict[str, Array], mask: Array, x: Array) -> Array:" in made
    assert re.search(
        r"def decoder_layer\([^)]*mask: Array, (context|memory): Array, x: Array", made
    )
    assert "def loss(params: dict[str, Array | Stack], input_ids: Array, labels: Array)" in made


def test_arguments_stand_in_the_order_of_the_batch() -> None:
    made = text("llama")
    assert "tokens: Array, labels: Array) -> Array:" in made
    assert made.index('"tokens": P(') < made.index('"labels": P(')


def test_the_legend_has_the_words_of_the_program_and_no_others() -> None:
    made = text("t5")
    head = made.partition('"""\n\nfrom')[0]
    for word in ('`Parameter(..., P("tp"))`', '`deferred=("tp",)`', "`copy_to`", "`layers("):
        assert word in head, head
    assert "`gather" not in head
    assert "`tp:" not in text("llama", Mesh.parse("dp_shard=2")).partition("from __future__")[0]
