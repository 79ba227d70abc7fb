"""JAX plans whose axes split sequences: what programs say, what they compute, what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.nouns.errors import UserError
from autopar.nouns.workload import Workload
from autopar.runtime.jax.programs import run_program, step_alone
from autopar.runtime.verify.collectives import differences
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import made, made_of

ROWS = {"cp_ring": "4", "tp": "2"}
MIX = {"cp_ring": "2", "cp_head": "2", "dp_shard": "2", "zero": "3"}
LEVELS = {"cp_ring": "4", "cp_outer": "2", "dp_shard": "2", "zero": "2"}
RING = {"cp": "2", "dp_shard": "4", "zero": "2", "microbatch": "1"}


@pytest.mark.parametrize(
    ("name", "fix"),
    [("llama", ROWS), ("llama", MIX), ("gpt_two_layers", RING), ("llama", LEVELS)],
)
@pytest.mark.some(2)
def test_programs_compute_what_the_model_does(name: str, fix: Mapping[str, str]) -> None:
    program = made(name, fix)
    errors, moved = program.exact()
    assert errors.largest <= TOLERANCE
    assert not differences(program.priced_in_float64(), moved)


def test_what_a_program_says() -> None:
    text = made("llama", ROWS).text
    assert 'order="zigzag")' in text
    assert '"tokens": P(None, None, "cp"),' in text
    assert 'gather(k, dim=2, axis="cp", backward="reduce_scatter", order="zigzag")' in text
    assert re.search(r'rows="cp",\s+order="zigzag"', text)
    ring = made("gpt_two_layers", RING).text
    assert 'ring_attention(q, k, v, causal=True, ring="cp", order="zigzag")' in ring
    assert re.search(r'ring=\("cp_outer", "cp"\),\s+order="zigzag"', made("llama", LEVELS).text)
    mixed = made("llama", MIX).text
    assert '"tokens": P(None, "dp_shard", ("cp", "cp_head")),' in mixed
    assert 'all_to_all(q, split=1, concat=2, axis="cp_head", zigzag=2)' in mixed


def test_a_batch_is_cut_in_zigzag_and_its_samples_as_ever() -> None:
    program = made("llama", MIX)
    step = step_alone(run_program(program.text), program.workload)
    tokens = np.arange(models.B * models.S, dtype=np.int32).reshape(models.B, models.S)
    cut = step.cut({"tokens": tokens, "labels": tokens})["tokens"]
    first = cut.addressable_shards[0].data
    assert first.shape == (1, models.B // 2, models.S // 4)
    assert first[0, 0].tolist() == [0, 1, 14, 15]


def test_state_is_shared_by_ranks_of_a_sequence_too() -> None:
    layout = step_alone(run_program(made("llama", MIX).text), Workload(
        loss=lambda p, b: 0.0, init=lambda key: {}, batch=dict)).layout  # fmt: skip
    leaf = layout.leaves["embed"]
    assert leaf.sharing == ("dp_shard", "cp", "cp_head")
    assert layout.spec(leaf, cut=True)[0] == ("dp_shard", "cp", "cp_head")


# --- labels that the loss shifts ------------------------------------------------------------------


def shifting() -> models.Model:
    """Labels are those of the next token, which the loss shifts itself."""

    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        logits = jnp.tanh(params["embed"][batch["tokens"]]) @ params["head"]
        labels = jnp.roll(batch["labels"], -1, axis=1)
        likely = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(likely, labels[..., None], axis=-1))

    v, w = models.V, models.W
    params = {"embed": models.shape(v, w), "head": models.shape(w, v)}
    return models.Model(loss, params, models.TOKENS)


def test_labels_are_shifted_whole_and_then_cut() -> None:
    program = made_of("shifting", shifting(), {"cp": "4", "dp_replicate": "2"})
    assert '"labels": P(None, "dp_replicate"),' in program.text
    assert program.exact()[0].largest <= TOLERANCE


def test_labels_that_are_cut_before_they_are_shifted_are_called_wrong() -> None:
    program = made_of("shifting", shifting(), {"cp": "4", "dp_replicate": "2"})
    text = program.text.replace(
        '"labels": P(None, "dp_replicate")', '"labels": P(None, "dp_replicate", "cp")'
    )
    text, count = re.subn(r'shard\((\w+), dim=1, axis="cp"\)', r"\1", text)
    assert count == 1
    errors, _ = replace(program, files={**program.files, "model.py": text}).exact()
    assert errors.largest > 1e-2


# --- refused --------------------------------------------------------------------------------------


def refused(model: models.Model, fix: Mapping[str, str], **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        made_of("refused", model, fix, **options)
    return str(caught.value)


def test_inputs_and_labels_of_one_array_are_refused() -> None:
    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        given, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        likely = jax.nn.log_softmax(params["embed"][given] @ params["head"])
        return -jnp.mean(jnp.take_along_axis(likely, labels[..., None], axis=-1))

    model = shifting()
    model = replace(model, loss=loss, batch={"tokens": models.ids(models.B, models.S)})
    text = refused(model, {"cp": "2"})
    assert "would have all of them and compute everything" in text
    assert "as entries of their own" in text


def test_values_of_tokens_beside_the_loss_are_refused() -> None:
    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        likely = jax.nn.log_softmax(params["embed"][batch["tokens"]] @ params["head"])
        each = -jnp.take_along_axis(likely, batch["labels"][..., None], axis=-1)[..., 0]
        return each.mean(), each

    text = refused(replace(shifting(), loss=loss), {"cp": "2"}, has_aux=True)
    assert "return sums over the batch" in text


def test_ranks_that_cannot_have_samples_share_some_where_nothing_is_pinned() -> None:
    tokens = {name: models.ids(2, models.S) for name in ("tokens", "labels")}
    program = made_of("few samples", replace(models.llama(), batch=tokens), {"tp": "2", "pp": "1"})
    assert program.plan.degrees["cp"] == 2
    assert program.exact()[0].largest < TOLERANCE


def test_lengths_that_do_not_divide_are_refused() -> None:
    text = refused(shifting(), {"cp": "8", "dp_replicate": "1", "cp_head": "3"})
    assert "cp_head" in text
    short = {name: models.ids(models.B, 12) for name in models.TOKENS}
    assert "8 ranks do not divide the 12 tokens" in refused(
        replace(shifting(), batch=short), {"cp": "8"}
    )


# --- experts --------------------------------------------------------------------------------------


def experts(groups: bool) -> models.Model:
    """Of four experts: each the tokens that chose it, with places for two of a sample; or all."""
    w, f, v = models.W, models.F, models.V

    def routed(params: Any, x: Any, weights: Any) -> Any:
        chosen = jax.nn.one_hot(weights.argmax(-1), 4)
        place = jnp.cumsum(chosen, axis=1) * chosen - 1
        sent = chosen[..., None] * jax.nn.one_hot(place.max(-1).astype(jnp.int32), 2)[:, :, None]
        given = jnp.einsum("gsm,gsec->egcm", x, sent)
        made = jax.nn.relu(jnp.einsum("egcm,emf->egcf", given, params["up"]))
        made = jnp.einsum("egcf,efm->egcm", made, params["down"])
        return jnp.einsum("egcm,gsec->gsm", made, sent * weights.max(-1)[..., None, None])

    def of_all(params: Any, x: Any, weights: Any) -> Any:
        made = jax.nn.relu(jnp.einsum("gsm,emf->gsef", x, params["up"]))
        made = jnp.einsum("gsef,efm->gsem", made, params["down"])
        return jnp.einsum("gsem,gse->gsm", made, weights)

    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        x = params["embed"][batch["tokens"]]
        weights = jax.nn.softmax(x @ params["gate"], axis=-1)
        x = x + (routed if groups else of_all)(params, x, weights)
        likely = jax.nn.log_softmax(x @ params["head"])
        return -jnp.mean(jnp.take_along_axis(likely, batch["labels"][..., None], axis=-1))

    shapes = {"embed": (v, w), "gate": (w, 4), "up": (4, w, f), "down": (4, f, w), "head": (w, v)}
    params = {name: models.shape(*sizes) for name, sizes in shapes.items()}
    return models.Model(loss, params, models.TOKENS)


@pytest.mark.parametrize(
    ("groups", "fix"),
    [
        (True, {"ep": "4", "dp_shard": "8", "zero": "1"}),
        (True, {"ep": "2", "dp_shard": "4", "zero": "3", "cp": "2"}),
        (False, {"ep": "4", "dp_shard": "8", "zero": "2"}),
    ],
)
def test_experts_are_where_their_matrices_are(groups: bool, fix: Mapping[str, str]) -> None:
    program = made_of(f"experts {groups}", experts(groups), fix)
    assert program.plan.program_mesh.size("ep") == int(fix["ep"])
    assert re.search(r'"up": Parameter\(\(4, 32, 64\), P\("ep"\)', program.text)
    assert program.exact()[0].largest <= TOLERANCE
    if groups:
        assert 'all_to_all(given, split=1, concat=0, axis="ep")' in program.text


def test_groups_of_rows_are_no_experts_that_ranks_share() -> None:
    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        x = params["embed"][batch["tokens"]].reshape(-1, models.W)
        sizes = jnp.bincount(batch["labels"].ravel() % 4, length=4)
        return jnp.mean(jax.lax.ragged_dot(x, params["up"], sizes) ** 2)

    given = experts(True)
    model = replace(given, loss=loss, params={n: given.params[n] for n in ("embed", "up")})
    text = refused(model, {"ep": "2"})
    assert "groups of rows" in text
    assert "are shared" in text


def test_a_pipeline_has_the_experts_that_are_asked_for() -> None:
    """Stages of data ranks alone took the place of those with experts of their own."""
    program = made_of("experts in stages", experts(True), {"ep": "4", "pp": "2", "tp": "1"})
    assert program.plan.program_mesh.size("ep") == 4
