"""The reference run: lifting, fixed draws, random batches, and comparing."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar.files import plan_folder
from autopar.frontends.shared.noise import dropout_factor
from autopar.lowering.collectives import Row
from autopar.nouns.workload import Workload
from autopar.runtime.verify.collectives import compare_priced, differences
from autopar.runtime.verify.pytorch.comparison import Comparison, Piece
from autopar.runtime.verify.pytorch.modes import FixedDraws, exact
from autopar.runtime.verify.pytorch.reference import (
    Reference,
    VerifyError,
    loss_of,
    random_batch,
    reference,
)
from autopar.runtime.verify.verified import TOLERANCE, Errors, VerifyResult


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.float(),
        lambda x: x.half(),
        lambda x: x.to(torch.float32),
        lambda x: x.to(dtype=torch.bfloat16),
        lambda x: x.type(torch.float32),
        lambda x: torch.softmax(x, -1, dtype=torch.float32),
        lambda x: torch.zeros(3, dtype=torch.float32) + torch.ones(3),
        lambda x: torch.arange(3, dtype=torch.float32).outer(torch.linspace(0, 1, 3)),
    ],
)
def test_every_floating_dtype_is_lifted(make: Any) -> None:
    with exact():
        assert make(torch.ones(3, dtype=torch.float64)).dtype is torch.float64
    assert torch.get_default_dtype() is torch.float32


def test_lifting_leaves_integers() -> None:
    with exact():
        assert torch.arange(3).dtype is torch.int64
        assert torch.ones(3, dtype=torch.float64).long().dtype is torch.int64


def test_an_rms_norm_keeps_the_epsilon_of_float32() -> None:
    """torch's own is that of the dtype; programs have that of the model as it trains."""
    x = torch.full((2, 4), 1e-4, dtype=torch.float64)
    wanted = F.rms_norm(x, (4,), None, torch.finfo(torch.float32).eps)
    with exact():
        assert torch.equal(F.rms_norm(x, (4,)), wanted)
        assert torch.equal(nn.RMSNorm(4).double()(x), wanted)
        assert not torch.equal(F.rms_norm(x, (4,), None, 1e-8), wanted)


@pytest.mark.parametrize("mode", [FixedDraws, exact])
def test_dropout_is_a_factor_of_its_share(mode: Any) -> None:
    x = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    mixed = F.scaled_dot_product_attention(x, x, x)
    with mode():
        drawn = {
            (0.5, False): (F.dropout(x, 0.5), F.dropout(x), torch.dropout(x, 0.5, True)),
            (0.9, False): (nn.Dropout(0.9)(x), F.dropout(x.clone(), 0.9, inplace=True)),
            (0.2, True): (nn.Dropout2d(0.2)(x), torch.feature_dropout(x, 0.2, True)),
            (1.0, False): (F.dropout(x, 1.0),),
        }
        for given, every in drawn.items():
            for tensor in every:
                torch.testing.assert_close(tensor, x * dropout_factor(*given))
        torch.testing.assert_close(F.dropout1d(x[0, 0], 0.2), x[0, 0] * dropout_factor(0.2, True))
        for nothing in (F.dropout(x, 0.5, False), nn.Dropout(0.5).eval()(x), F.alpha_dropout(x)):
            assert nothing is x
        for share in (
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.7),
            F.scaled_dot_product_attention(x, x, x, None, 0.7),
        ):
            torch.testing.assert_close(share, mixed * dropout_factor(0.7))
        y = x.clone()
        F.dropout(y, 0.5, True, True)
        assert not torch.equal(x, y)


def test_every_factor_tells_its_dropout_from_others() -> None:
    """From none, from one that is there twice, and from its scale alone, to better than 1e-3."""
    for p in (0.01, 0.1, 0.5, 0.9):
        own, whole = dropout_factor(p), dropout_factor(p, features=True)
        others = (1.0, own * own, 1 - p, 1 / (1 - p), own / (1 - p), whole, dropout_factor(p / 2))
        assert all(abs(own - other) > 1e-3 for other in others), p


@pytest.mark.parametrize("mode", [FixedDraws, exact])
def test_random_numbers_are_fixed_ones(mode: Any) -> None:
    x, aten = torch.full((2, 3), 0.4), torch.ops.aten
    with mode():
        drawn = {
            0.5: (torch.rand(2, 3), torch.rand_like(x), torch.empty(2).uniform_(-1, 2)),
            1.0: (torch.randn(2), torch.randn_like(x), torch.zeros(2).long().bernoulli_(0.8)),
            2.0: (torch.zeros(2).exponential_(0.5), aten.normal.float_float(1.5, 0.5, [2])),
            1.4: (torch.normal(x, 1.0), torch.normal(1.0, x)),
            0.9: (torch.bernoulli(x, 0.81), x.bernoulli(0.81), torch.zeros(2).bernoulli_(0.81)),
            0.0: (torch.bernoulli(x), torch.zeros(2).bernoulli_(x[0, :2])),
            4.0: (torch.randint(10, (2,)), torch.randint(low=3, high=6, size=(2,))),
        }
        for value, every in drawn.items():
            for tensor in every:
                wanted = torch.full_like(tensor, value)
                torch.testing.assert_close(tensor, wanted, rtol=1e-6, atol=0)
        assert torch.equal(F.gumbel_softmax(x, hard=True).sum(-1), torch.ones(2))
    assert not torch.equal(torch.rand(3), torch.rand(3))


@pytest.mark.parametrize(
    "layer",
    [
        nn.MultiheadAttention(8, 2, dropout=0.9, batch_first=True),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.9, batch_first=True),
        nn.LSTM(8, 8, 2, dropout=0.9),
        nn.GRU(8, 8, 2, dropout=0.9),
        nn.RNN(8, 8, 2, dropout=0.9),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_drop_out_inside_are_fixed(layer: nn.Module) -> None:
    """They draw nothing, and their shares show."""
    x = torch.randn(3, 4, 8)
    given = (x, x, x) if isinstance(layer, nn.MultiheadAttention) else (x,)
    with FixedDraws():
        output, again = layer.train()(*given), layer(*given)
        without = layer.eval()(*given)
    torch.testing.assert_close(output, again, rtol=0, atol=0)
    with torch.enable_grad():  # with gradients there is no other path of evaluation
        torch.testing.assert_close(without, layer(*given))
    change = (output[0] - without[0]).detach().norm() / without[0].detach().norm()
    assert float(change) > 1e-2


def test_what_attention_drops_inside_is_what_it_drops_written_out() -> None:
    """Scores that are asked for are dropped ones, as without the mode."""
    layer = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True)
    q, k, v = torch.randn(3, 2, 4, 8)
    factor = dropout_factor(0.4)
    with FixedDraws():
        output, scores = layer(q, k, v)
        alone, _ = layer(q, k, v, need_weights=False)
    plain, whole = layer.eval()(q, k, v)
    bias = layer.out_proj.bias
    torch.testing.assert_close(output, (plain - bias) * factor + bias)
    torch.testing.assert_close(alone, output)
    torch.testing.assert_close(scores, whole * factor)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("both", [False, True])
def test_stacks_drop_between_layers(kind: Any, both: bool) -> None:
    layer = kind(8, 8, 2, dropout=0.4, bidirectional=both)
    parts = [kind(8, 8, bidirectional=both), kind(16 if both else 8, 8, bidirectional=both)]
    weights = list(layer.parameters())
    for part, place in zip(parts, (0, len(weights) // 2), strict=True):
        for to, given in zip(part.parameters(), weights[place:], strict=False):
            to.data.copy_(given.data)
    x = torch.randn(3, 4, 8)
    with FixedDraws():
        output = layer(x)[0]
    wanted = parts[1](parts[0](x)[0] * dropout_factor(0.4))[0]
    torch.testing.assert_close(output, wanted)


def test_packed_sequences_and_aten_ops_are_fixed() -> None:
    x, layer = torch.randn(2, 4, 8), nn.LSTM(8, 8, 2, dropout=0.9, batch_first=True)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 4]), batch_first=True)
    states, weights = [torch.zeros(2, 2, 8)] * 2, list(layer.parameters())
    aten = torch.ops.aten
    with FixedDraws():
        wanted = layer(x)[0]
        output = nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)[0]
        called = aten.lstm.input(x, states, weights, True, 2, 0.9, True, False, True)[0]
        named = torch.lstm(
            x, hx=states, params=tuple(weights), has_biases=True, num_layers=2, dropout=0.9,
            train=True, bidirectional=False, batch_first=True,
        )[0]  # fmt: skip
        for dropped in (aten.dropout.default(x, 0.9, True), torch.native_dropout(x, 0.9, True)[0]):
            torch.testing.assert_close(dropped, x * dropout_factor(0.9))
    for each in (output, called, named):
        torch.testing.assert_close(each, wanted)
    assert not torch.allclose(layer.eval()(x)[0], wanted)


@pytest.mark.parametrize("by_method", [True, False])
def test_what_backward_recomputes_is_lifted_too(by_method: bool) -> None:
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    seen = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        seen.append((x * weight).float().dtype)
        return F.dropout(x * weight, 0.9) * weight

    with exact():
        x = torch.ones(3, requires_grad=True)
        loss = checkpoint(layer, x, use_reentrant=False).sum()
        if by_method:
            loss.backward()
        else:
            torch.autograd.backward(loss, torch.full_like(loss, 1.0))
    assert seen == [torch.float64, torch.float64]
    assert weight.grad is not None
    assert weight.grad.tolist() == pytest.approx([2 * dropout_factor(0.9)] * 3)


def test_random_batches_are_distinct_and_valid() -> None:
    tokens = torch.arange(4, 44).reshape(8, 5)
    labels = tokens.clone()
    labels[:2] = -100
    mask = torch.ones(8, 5, dtype=torch.long)
    mask[0, :3] = 0
    real = {
        "tokens": tokens,
        "again": tokens,
        "labels": labels,
        "mask": mask,
        "places": torch.arange(5),
        "images": torch.randn(8, 3),
        "flag": True,
    }
    workload = Workload(model=nn.Identity, batch=lambda: real, whole_inputs=("places",))
    made = random_batch(workload)
    assert torch.equal(random_batch(workload)["tokens"], made["tokens"])
    assert not torch.equal(made["tokens"], made["again"])
    assert made["tokens"].min() >= 4
    assert made["tokens"].max() <= 43
    assert int((made["labels"] == -100).sum()) == 10
    assert made["labels"][made["labels"] >= 0].min() >= 14
    assert sorted(made["mask"].sum(1).tolist()) == sorted(mask.sum(1).tolist())
    assert torch.equal(made["places"], torch.arange(5))
    assert made["images"].dtype is torch.float64
    assert made["flag"] is True


def test_numbers_that_stand_for_rows_stay_where_samples_have_them() -> None:
    ids = torch.tensor([[9, 9, 1, 2, 3], [4, 9, 9, 5, 6], [7, 1, 9, 2, 9]])
    workload = Workload(model=nn.Identity, batch=lambda: {"ids": ids, "labels": ids})
    seen = [random_batch(workload, seed, {"ids": {9}}) for seed in range(20)]
    places = {tuple(map(tuple, (made["ids"] == 9).tolist())) for made in seen}
    rows = sorted((ids == 9).tolist())
    assert all(sorted(map(list, of)) == rows for of in places)
    assert len(places) > 1
    assert len({tuple(made["ids"][:, 3].tolist()) for made in seen}) > 3
    assert any((made["labels"] == 9).sum() != 6 for made in seen)


def test_a_random_batch_keeps_to_what_a_model_can_take() -> None:
    """Ids of several tables side by side, and targets between 0 and 1."""
    ids = torch.tensor([[0, 500, -100], [3, 900, 7], [1, 0, 8]])
    shares = torch.tensor([[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]])
    rows = torch.arange(4, 8).repeat(3, 1)
    workload = Workload(model=nn.Identity, batch=lambda: {"i": ids, "s": shares, "r": rows})
    seen = [random_batch(workload, seed) for seed in range(20)]
    drawn = torch.cat([made["i"] for made in seen])
    assert set(drawn[:, 0].tolist()) == {0, 1, 2, 3}
    assert drawn[:, 1].max() > 3
    assert {int(n) for n in drawn[:, 2]} == {-100, 7, 8}
    assert all(torch.equal(made["s"].sum(1), torch.ones(3).double()) for made in seen)
    assert {int(n) for made in seen for n in made["r"][:, 0]} == {4, 5, 6, 7}


def test_the_only_scalar_of_a_tuple_is_its_loss() -> None:
    loss = torch.ones(())
    assert loss_of((torch.ones(2, 3), loss)) is loss
    assert loss_of([None, loss, torch.tensor(3)]) is loss


@pytest.mark.parametrize(
    "result",
    [torch.ones(2), {"logits": torch.ones(())}, 3.0, (torch.ones(()), torch.ones(())), (None,)],
)
def test_a_result_without_a_loss(result: Any) -> None:
    with pytest.raises(VerifyError, match="without a loss"):
        loss_of(result)


class Logarithm(nn.Module):
    """Takes numbers above 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.log() * self.scale).mean()


def test_numbers_that_are_never_negative_stay_so() -> None:
    real = torch.arange(1.0, 13.0).reshape(4, 3)
    workload = Workload(model=Logarithm, batch=lambda: {"x": real})
    made = random_batch(workload)
    assert sorted(made["x"].flatten().tolist()) == real.flatten().tolist()
    reference(workload, made, torch.device("cpu"))


def test_a_loss_that_is_no_number_is_nothing_to_compare_with() -> None:
    workload = Workload(model=Logarithm, batch=lambda: {"x": torch.randn(4, 3)})
    with pytest.raises(VerifyError, match="own loss on one device is nan in step 0, so there is"):
        reference(workload, random_batch(workload), torch.device("cpu"))


class Upcast(nn.Module):
    """Casts to float32 inside; the second parameter's gradient is zero in theory."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.shift = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.softmax((x * self.scale).float() + self.shift, -1)[:, 0].mean()}


def small() -> tuple[Workload, Reference]:
    workload = Workload(
        model=Upcast,
        batch=lambda: {"x": torch.arange(12.0).reshape(4, 3).sin()},
        learning_rate=0.1,
        clip_norm=0.01,
    )
    return workload, reference(workload, random_batch(workload), torch.device("cpu"))


def test_reference_is_what_one_would_write_by_hand() -> None:
    workload, record = small()
    x = random_batch(workload)["x"]
    scale = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    shift = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([scale, shift], lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss = torch.softmax(x * scale + shift, -1)[:, 0].mean()
        loss.backward()  # type: ignore[no-untyped-call]
        assert record.losses[step] == pytest.approx(float(loss.detach()), rel=1e-14)
        assert scale.grad is not None
        torch.testing.assert_close(record.gradients[step]["scale"], scale.grad)
        nn.utils.clip_grad_norm_([scale, shift], 0.01)
        optimizer.step()
    torch.testing.assert_close(record.weights["scale"], scale.detach())


def compare(wanted: Reference, scale: float = 0.0, shift: float = 0.0) -> Errors:
    """The errors of a run that is off by these shares."""
    comparison = Comparison(wanted)
    for step in range(2):
        comparison.loss(step, wanted.losses[step])
        gradients = wanted.gradients[step]
        comparison.gradients(
            step,
            [
                ("scale", (slice(0, 2),), gradients["scale"][:2] * (1 + scale)),
                ("scale", (slice(2, 3),), gradients["scale"][2:]),
                ("shift", (slice(0, 1),), gradients["shift"] + shift),
            ],
        )
    comparison.weights([(n, (slice(0, t.numel()),), t) for n, t in wanted.weights.items()])
    return comparison.errors()


def test_errors_are_relative_to_each_tensor() -> None:
    _, wanted = small()
    assert compare(wanted).largest == 0
    off = compare(wanted, scale=1e-3)
    assert 1e-4 < off.gradient <= 1e-3
    assert off.worst_gradient == "scale"


def test_rounding_where_the_gradient_is_zero_in_theory_does_not_count() -> None:
    _, wanted = small()
    norm = wanted.gradients_norm(0)
    assert float(wanted.gradients[0]["shift"].abs().max()) < 1e-12 * norm
    assert compare(wanted, shift=1e-16 * norm).gradient < TOLERANCE
    for wrong in (1e-13, 1e-11, 1e-3):
        assert compare(wanted, shift=wrong * norm).gradient > TOLERANCE


class Vanishing(nn.Module):
    """The gradient of ``faint`` is 1e-14 of the whole one, and right to its last digits."""

    def __init__(self) -> None:
        super().__init__()
        self.faint = nn.Parameter(torch.tensor([0.5, -0.25]))
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).exp().mean() + 1e-14 * (x[:, :2] * self.faint).sin().mean()


def test_a_gradient_that_is_small_but_no_rounding_is_held_to_its_own_norm() -> None:
    batch = {"x": torch.arange(12.0).reshape(4, 3).cos()}
    workload = Workload(model=Vanishing, batch=lambda: batch)
    wanted = reference(workload, random_batch(workload), torch.device("cpu"))
    assert wanted.gradients[0]["faint"].norm() < 1e-12 * wanted.gradients_norm(0)
    for share, right in ((1e-12, True), (1e-6, False), (1.0, False)):
        comparison = Comparison(wanted)
        for step, gradients in enumerate(wanted.gradients):
            off = gradients | {"faint": gradients["faint"] * (1 - share)}
            comparison.gradients(step, [(n, (slice(None),), g) for n, g in off.items()])
        assert (comparison.errors().gradient < TOLERANCE) is right, share


def test_rounding_in_a_buffer_that_is_zero_in_theory_does_not_count() -> None:
    """As is the mean of a convolution's results behind a normalisation with no bias yet."""
    _, wanted = small()
    named = replace(wanted, weights=wanted.weights | {"mean": torch.full((3,), 1e-14)})
    for off, right in ((1e-13, True), (1e-8, False)):
        comparison = Comparison(named)
        pieces = {n: t + off if n == "mean" else t for n, t in named.weights.items()}
        comparison.weights([(n, (slice(0, t.numel()),), t) for n, t in pieces.items()])
        assert (comparison.errors().weight < TOLERANCE) is right


def test_a_missing_or_infinite_gradient_is_no_small_error() -> None:
    _, wanted = small()
    whole = (slice(0, 3),)
    scale = ("scale", whole, wanted.gradients[0]["scale"])
    shift = ("shift", (slice(0, 1),), wanted.gradients[0]["shift"])
    first = ("scale", (slice(0, 1),), wanted.gradients[0]["scale"][:1])
    cases: tuple[tuple[list[Piece], str], ...] = (
        ([scale], "shift (the ranks hold 0 of 1 elements)"),
        ([first, first, first, shift], "scale (the ranks hold 1 of 3 elements)"),
        ([scale, first, shift], "scale (the ranks hold 4 elements, of 3 each as often)"),
        ([scale, shift, ("other", whole, torch.ones(3))], "other (the model has none)"),
        ([("scale", whole, torch.ones(2)), shift], "scale (a rank holds [2] for [3])"),
        ([("scale", whole, torch.full((3,), torch.nan)), shift], "scale"),
    )
    for pieces, worst in cases:
        comparison = Comparison(wanted)
        comparison.gradients(0, pieces)
        assert comparison.errors().gradient == float("inf")
        assert comparison.errors().worst_gradient == worst


def test_tables_of_collectives_are_compared_by_bytes() -> None:
    one = [Row("all_reduce", "tp", 400, 2, "a"), Row("all_gather", "dp_shard", 8, 1)]
    two = [Row("all_reduce", "tp", 100, 8), Row("all_gather", "dp_shard", 8, 1)]
    assert differences(one, two) == []
    lines = differences(one, [*two, Row("all_reduce", "dp_replicate", 4, 1)])
    assert lines == ["all_reduce over dp_replicate: priced 0 bytes a step, issued 4"]


def test_the_table_of_a_folder(tmp_path: Path) -> None:
    moved = [Row("all_reduce", "tp", 400, 2, "a")]
    assert compare_priced(tmp_path, moved) == (None, [])
    file = tmp_path / plan_folder.COLLECTIVES
    file.write_text(json.dumps({"format": 1, "rows": [asdict(moved[0])]}))
    assert compare_priced(tmp_path, moved) == (True, [])
    assert compare_priced(tmp_path, [])[0] is False
    file.write_text('{"format": 9, "rows": []}')
    with pytest.raises(plan_folder.PlanFolderError, match="format 9"):
        compare_priced(tmp_path, moved)


def test_a_result_reads_back_and_judges() -> None:
    good = Errors(0.0, 1e-12, 1e-13, "a", "b")
    rows = (asdict(Row("all_reduce", "tp", 4, 1)),)
    result = VerifyResult("plan", 4, good, good, "float32", True, (), rows, 1.0)
    assert VerifyResult.read(asdict(result)) == result
    assert result.passed
    assert result.to_json()["max_grad_rel_err"] == 1e-12
    assert not replace(result, collectives_match=False).passed
    assert not replace(result, exact=replace(good, gradient=1e-8)).passed
