"""What plain torch code becomes: idioms, masks, in-place ops, batch statistics, no_grad."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontends.pytorch import Captured
from autopar.frontends.pytorch.capture import capture
from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.nouns.workload import Workload
from tests.frontends.torch_referee import compare

B, S, H, D = 4, 6, 2, 8


class Wrapped(nn.Module):
    """A linear layer, then ``body``; the loss is what it makes, squared and averaged."""

    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem = nn.Linear(D, D)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, D))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(self.stem(x), self.weight) + 0 * self.weight.sum()).square().mean()


def lifted(body: Callable[[Tensor, Tensor], Tensor]) -> list[str]:
    """The op kinds of ``body``; its graph equals it in value and gradient."""
    return [op.kind for op in captured(lambda: Wrapped(body)).graph.ops]


def captured(model: Callable[[], nn.Module], **shapes: tuple[int, ...]) -> Captured:
    generator = torch.Generator().manual_seed(0)
    batch = {
        n: torch.randn(s, generator=generator) for n, s in (shapes or {"x": (B, S, D)}).items()
    }
    compared = compare(Workload(model=model, batch=lambda: batch))
    assert compared.worst <= 1e-12
    return compared.captured


IDIOMS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "rms_norm": (
        "rms_norm",
        lambda x, w: w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)),
    ),
    "rms_norm by square": (
        "rms_norm",
        lambda x, w: x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-6) * w,
    ),
    "rms_norm with an offset": (
        "rms_norm",
        lambda x, w: (
            (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6))
            * (1.0 + w.float())
        ),
    ),
    "gelu by tanh": (
        "gelu",
        lambda x, w: (
            0.5
            * x
            * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        ),
    ),
    "gelu by erf": ("gelu", lambda x, w: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    "silu": ("silu", lambda x, w: x * torch.sigmoid(x)),
}


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom(name: str) -> None:
    kind, body = IDIOMS[name]
    kinds = lifted(body)
    assert kind in kinds
    assert not {"rsqrt", "tanh", "erf", "sigmoid", "pow"} & set(kinds)


NO_IDIOMS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "mean over the wrong dim": (
        "rms_norm",
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * w,
    ),
    "norm of another tensor": (
        "rms_norm",
        lambda x, w: x * torch.rsqrt(x.abs().pow(2).mean(-1, keepdim=True) + 1e-6) * w,
    ),
    "another cubic": (
        "gelu",
        lambda x, w: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.05 * x**3))),
    ),
    "powers of two": (
        "rms_norm",
        lambda x, w: x * torch.rsqrt((2**x).mean(-1, keepdim=True) + 1e-6) * w,
    ),
    "powers of three": (
        "gelu",
        lambda x, w: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * 3**x))),
    ),
    "gate of another tensor": ("silu", lambda x, w: x * torch.sigmoid(2 * x)),
}


@pytest.mark.parametrize("name", NO_IDIOMS)
def test_no_idiom(name: str) -> None:
    kind, body = NO_IDIOMS[name]
    assert kind not in lifted(body)


def heads(x: Tensor) -> Tensor:
    return x.view(B, S, H, D // H).transpose(1, 2)


def attend(mask: Callable[[], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def body(x: Tensor, w: Tensor) -> Tensor:
        q = heads(x)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask()).transpose(1, 2).flatten(2)

    return body


CAUSAL: dict[str, Callable[[], Tensor]] = {
    "tril": lambda: torch.tril(torch.ones(S, S, dtype=torch.bool)),
    "tril of numbers": lambda: torch.tril(torch.ones(S, S)).bool().view(1, 1, S, S),
    "not triu": lambda: ~torch.triu(torch.ones(S, S, dtype=torch.bool), 1),
    "additive": lambda: torch.triu(torch.full((S, S), -torch.inf), 1),
    "where": lambda: torch.where(torch.tril(torch.ones(S, S)) == 1, 0.0, -torch.inf),
    "masked_fill": lambda: torch.zeros(S, S).masked_fill(
        torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf
    ),
    "positions": lambda: torch.arange(S)[None, :] <= torch.arange(S)[:, None],
    "two halves": lambda: (torch.arange(S)[:, None] - torch.arange(S)[None, :] >= 0).expand(
        B, 1, S, S
    ),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_mask_becomes_an_attribute(name: str) -> None:
    graph = captured(lambda: Wrapped(attend(CAUSAL[name]))).graph
    (attention,) = (op for op in graph.ops if op.kind == "attention")
    assert len(attention.inputs) == 3
    assert attention.attrs["causal"] is True
    assert not {"arange", "full", "tril", "triu"} & {op.kind for op in graph.ops}


WINDOWS: dict[str, Callable[[], Tensor]] = {
    "triu": lambda: torch.tril(torch.ones(S, S, dtype=torch.bool)).triu(-2),
    "added": lambda: (
        torch.full((S, S), -torch.inf).triu(1) + torch.full((S, S), -torch.inf).tril(-3)
    ),
    "where": lambda: torch.where(torch.ones(S, S).tril().triu(-2) == 1, 0.0, -torch.inf),
    "positions": lambda: (
        (torch.arange(S)[None] <= torch.arange(S)[:, None])
        & (torch.arange(S)[:, None] - torch.arange(S)[None] < 3)
    ).expand(B, 1, S, S),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_becomes_an_attribute(name: str) -> None:
    graph = captured(lambda: Wrapped(attend(WINDOWS[name]))).graph
    (attention,) = (op for op in graph.ops if op.kind == "attention")
    assert len(attention.inputs) == 3
    assert attention.attrs["causal"] is True
    assert attention.attrs["window"] == 3


def test_a_window_of_all_is_causal() -> None:
    graph = captured(lambda: Wrapped(attend(lambda: torch.ones(S, S).tril().triu(1 - S) > 0))).graph
    (attention,) = (op for op in graph.ops if op.kind == "attention")
    assert attention.attrs["causal"] is True
    assert "window" not in attention.attrs


OTHER_MASKS: dict[str, Callable[[], Tensor]] = {
    "one more": lambda: torch.tril(torch.ones(S, S, dtype=torch.bool), 1),
    "both ways": lambda: torch.tril(torch.ones(S, S, dtype=torch.bool), 1).triu(-1),
    "not itself": lambda: torch.tril(torch.ones(S, S, dtype=torch.bool), -1).triu(-2),
    "weak": lambda: torch.triu(torch.full((S, S), -3.0), 1),
}


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_other_masks_stay(name: str) -> None:
    graph = captured(lambda: Wrapped(attend(OTHER_MASKS[name]))).graph
    (attention,) = (op for op in graph.ops if op.kind == "attention")
    assert len(attention.inputs) == 4
    assert attention.attrs["causal"] is False


def test_a_mask_that_hides_nothing_goes() -> None:
    every = {"x": lambda: torch.ones(S, S, dtype=torch.bool)}
    graph = captured(lambda: Wrapped(attend(every["x"]))).graph
    (attention,) = (op for op in graph.ops if op.kind == "attention")
    assert len(attention.inputs) == 3
    assert attention.attrs["causal"] is False


def _fill_slices(x: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 1:] = x[:, :-1]
    out[:, 0] = w
    return out


def _through_a_view(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1.5
    part = y[:, 2:4]
    part.mul_(2.0)
    part += w
    return y


def _read_after(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1.5
    view = y.view(B, S * D)
    y.add_(w)
    return view.view(B, S, D) * 2


def _masked(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y.masked_fill_(torch.arange(D) > 3, 0.5)
    return F.relu_(y) + x


def _every_second(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y[..., ::2] = -x[..., 1::2]
    y[:, 1::3] += w
    return y


def _every_second_of_a_part(x: Tensor, w: Tensor) -> Tensor:
    y = x * 2
    y[:, 1:][..., 1:7:2] = w[:3]
    y[:1, 0, ::4] = 0.0
    return y


def _turned(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y.transpose(1, 2)[:, :3] = x.transpose(1, 2)[:, 3:6]
    y.permute(2, 0, 1)[1::2] *= 3
    y.movedim(0, -1)[0].add_(1)
    return y + w


def _by_numbers(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y[:, [0, 2]] = x[:, 1:3] * 2
    y[:, torch.tensor([1])] = w
    y[..., 3] = 0.5
    y[x > 1] = 0.25
    return y


def _masks_by_masks(x: Tensor, w: Tensor) -> Tensor:
    keep = x > 0
    keep &= w > 0
    keep |= x.abs() > 2
    keep[:, 0] ^= True
    return torch.where(keep, x, 0.5)


WRITES = [_masks_by_masks, _fill_slices, _through_a_view, _read_after, _masked]
WRITES += [_every_second, _every_second_of_a_part, _turned, _by_numbers]


@pytest.mark.parametrize("body", WRITES)
def test_writing_in_place(body: Callable[[Tensor, Tensor], Tensor]) -> None:
    lifted(body)


SHAPES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, w: x.repeat(1, 2, 1),
    lambda x, w: x.repeat_interleave(3, dim=1),
    lambda x, w: x.unflatten(-1, (2, 4)).movedim(2, 1).flatten(2),  # type: ignore[no-untyped-call]
    lambda x, w: torch.stack(x.unbind(1), dim=2) * 2,
    lambda x, w: torch.cat(x.split([1, 2, 5], dim=-1)[::-1], dim=-1),  # type: ignore[no-untyped-call]
    lambda x, w: x.roll(2, 1).flip(-1)[:, ::2, 1:-1],
    lambda x, w: F.pad(x, (1, 2, 0, 1), value=0.5),
    lambda x, w: F.pad(x, (-1, 2, 1, -1)) + F.pad(x, (0, 1, -1, 1), value=2.0),
    lambda x, w: x.clamp(-0.5, 0.5) + x.clamp(min=0.1),
    lambda x, w: torch.logsumexp(x, dim=-1) + x.std(-1) + x.amax(-1) + x.max(dim=-1).values,
    lambda x, w: 2 - x + 1 / (x.square() + 1) + torch.add(x, w, alpha=2) + x**2,
    lambda x, w: torch.einsum("bsd,btd->bst", x, x) @ x,
    lambda x, w: torch.matmul(x, x.mT),
    lambda x, w: F.softplus(x) + F.elu(x) + F.leaky_relu(x) + F.hardtanh(x) + F.mish(x),
    lambda x, w: x[:, torch.tensor([2, 0, 1])] + x.select(1, 0).unsqueeze(1),
    lambda x, w: torch.softmax(x, -1).cumsum(-1) + F.log_softmax(x, dim=1),
    lambda x, w: torch.where(x > 0, x, 0.1) + torch.maximum(x, w) + torch.minimum(x, w),
    lambda x, w: torch.gather(x, 2, x.argmax(-1, keepdim=True)) * x.detach(),
    lambda x, w: F.group_norm(x.mT, 4).mT + F.layer_norm(x, (S, D)) + F.rms_norm(x, (D,), w),
    lambda x, w: F.batch_norm(x.mT, None, None, w, training=True) * x.mT,
    lambda x, w: F.batch_norm(x.mT, None, None, None, w, training=True) * x.mT,
    lambda x, w: F.max_pool1d(x, 2).sum((1, 2), keepdim=True) + F.avg_pool1d(x, 3),
]


@pytest.mark.parametrize("place", range(len(SHAPES)))
def test_op_table(place: int) -> None:
    kinds = lifted(SHAPES[place])
    assert not [kind for kind in kinds if "::" in kind]


NOISE: list[tuple[str, Callable[[Tensor, Tensor], Tensor]]] = [
    ("uniform", lambda x, w: x * (0.9 + torch.rand(B, 1, 1)).floor_()),
    ("uniform", lambda x, w: x * torch.rand_like(x)),
    ("uniform", lambda x, w: x * x.new_empty(B, S, 1).uniform_(-0.5, 2)),
    ("uniform", lambda x, w: x * torch.bernoulli(x.sigmoid())),
    ("uniform", lambda x, w: x * torch.empty_like(x).bernoulli_(x.detach().sigmoid())),
    ("normal", lambda x, w: x + torch.randn(S, D) * torch.randn_like(x)),
    ("normal", lambda x, w: x + torch.zeros_like(x).normal_(mean=0.5, std=2)),
    ("normal", lambda x, w: x + torch.normal(x.detach(), torch.ones(D))),
    ("normal", lambda x, w: x + torch.normal(x.detach(), 2.0) + torch.normal(0.5, 2.0, (S, D))),
    ("bernoulli", lambda x, w: x * torch.empty(B, 1, 1).bernoulli_(0.8)),
    ("exponential", lambda x, w: F.gumbel_softmax(x * 3, tau=0.7)),
    ("integers", lambda x, w: x * torch.randint(2, 9, (B, 1, 1))),
    ("integers", lambda x, w: x * torch.randint(9, (S, 1)) * torch.randint_like(x, 5)),
]


@pytest.mark.parametrize("place", range(len(NOISE)))
def test_noise(place: int) -> None:
    """With the stand-ins it is what the model computes."""
    distribution, body = NOISE[place]
    ops = captured(lambda: Wrapped(body)).graph.ops
    assert not [op.kind for op in ops if "::" in op.kind]
    noise = [op for op in ops if op.kind == "noise"]
    assert {op.attrs["distribution"] for op in noise} == {distribution}
    assert not any(op.inputs for op in noise)


def test_dropout_of_features_and_of_single_numbers() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        rows = torch.feature_dropout(x[..., 0], 0.5, True)  # one number is a feature
        return F.dropout1d(x, 0.5) + F.dropout2d(x.unsqueeze(-1), 0.5)[..., 0] + rows.unsqueeze(-1)

    ops = captured(lambda: Wrapped(body)).graph.ops
    assert [op.attrs.get("features") for op in ops if op.kind == "dropout"] == [None, True, True]


def test_a_generator_of_its_own_is_refused() -> None:
    """Its state is no part of a program."""
    generator = torch.Generator().manual_seed(0)
    model = Wrapped(lambda x, w: x * torch.rand(B, 1, 1, generator=generator))
    with pytest.raises(UnsupportedOpError, match="without generator=") as caught:
        capture(Workload(model=lambda: model, batch=lambda: {"x": torch.randn(B, S, D)}))
    assert "test_torch_lifting.py" in str(caught.value)


def test_no_gradient_flows_through_an_op_that_has_no_derivative() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.histc(x, 8)

    graph = captured(lambda: Wrapped(body)).graph
    by_kind = {op.kind: graph.tensors[op.outputs[0]].differentiable for op in graph.ops}
    assert not by_kind["aten::histc"]
    assert by_kind["mul"]


def test_an_op_without_a_kind_keeps_its_name_and_can_be_run() -> None:
    assert "aten::kthvalue" in lifted(lambda x, w: torch.kthvalue(x, 2, dim=-1).values)


def test_gradients_stop_at_no_grad_and_detach() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.used(x).abs()
            return (self.used(x) * scale * x.detach()).sum()  # type: ignore[no-any-return]

    graph = captured(Model).graph
    by_kind = {op.kind: graph.tensors[op.outputs[0]].differentiable for op in graph.ops}
    assert not by_kind["abs"]
    assert by_kind["sum"]
    assert [t.differentiable for n, t in graph.parameters()] == [True, True]


def test_batch_norm_says_that_it_updates_its_buffers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, D, 3, padding="same")
            self.norm = nn.BatchNorm2d(D)

        def forward(self, x: Tensor) -> Tensor:
            return F.adaptive_avg_pool2d(self.norm(self.conv(x)), 1).square().mean()

    lifted = captured(Model, x=(B, 3, 6, 6))
    (norm,) = (op for op in lifted.graph.ops if op.kind == "batch_norm")
    assert norm.attrs["updates_buffers"] is True
    assert norm.inputs[3:] == ("norm.running_mean", "norm.running_var")
    counter = lifted.tensors["norm.num_batches_tracked"]
    assert counter.role == "buffer"
    assert not counter.used


def test_sources_name_the_module_and_the_users_line() -> None:
    graph = captured(lambda: Wrapped(lambda x, w: torch.tanh(x))).graph
    linear = next(op for op in graph.ops if op.kind == "linear")
    assert linear.source.module == "stem"
    assert linear.name == "stem/linear"
    tanh = next(op for op in graph.ops if op.kind == "tanh")
    assert tanh.source.file == __file__
    with open(__file__) as file:
        assert "torch.tanh(x)" in file.read().splitlines()[tanh.source.line - 1]


class Cubed(torch.autograd.Function):
    """A hand-written backward that is the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        squared: Tensor = x * x
        return 3 * squared * grad


def test_a_derivative_written_by_hand_is_kept() -> None:
    kinds = lifted(lambda x, w: Cubed.apply(x))  # type: ignore[no-untyped-call]
    assert f"{__name__}.Cubed" in kinds
    assert "pow" not in kinds


def test_bias_is_an_add_that_says_so() -> None:
    graph = captured(lambda: Wrapped(lambda x, w: x)).graph
    linear, add = graph.ops[:2]
    assert linear.inputs == ("x", "stem.weight")
    assert add.inputs == ("stem/linear", "stem.bias")
    assert add.attrs["bias"] is True
    assert add.attrs["torch"]["target"] == "aten.add.Tensor"


def _placed(x: Tensor) -> Tensor:
    """A permutation of the batch, from the values."""
    return x.detach()[:, 0, 0].argsort()


LOOKUPS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "index_put": (
        "aten::index_put",
        lambda x, w: torch.zeros_like(x).index_put((_placed(x),), x * w),
    ),
    "index_put in place, through a view": (
        "aten::index_put",
        lambda x, w: _written(x, w, lambda y: y[1].index_put_((torch.arange(S),), x[0] * w)),
    ),
    "x[mask] = 1": (
        "where",
        lambda x, w: _written(x, w, lambda y: y.__setitem__(x.detach() > 0, 1.0)),
    ),
    "rows x[mask] = 1": (
        "where",
        lambda x, w: _written(x, w, lambda y: y.__setitem__(x.detach()[..., 0] > 0, 1.0)),
    ),
    "scatter of a number": (
        "scatter",
        lambda x, w: (x * w).scatter(2, x.detach().argmax(2, keepdim=True), 0.5),
    ),
    "index_add": (
        "aten::index_add",
        lambda x, w: torch.zeros_like(x).index_add_(0, _placed(x) // 2, x * w, alpha=2),
    ),
    "scatter_add": (
        "aten::scatter_add",
        lambda x, w: (x * 2).scatter_add_(2, (x.detach() > 0).long(), x * w),
    ),
    "scatter_add into zeros": (
        "scatter_sum",
        lambda x, w: torch.zeros_like(x).scatter_add_(2, (x.detach() > 0).long(), x * w),
    ),
    "scatter_add of a part into zeros": (
        "aten::scatter_add",
        lambda x, w: torch.zeros_like(x).scatter_add_(2, (x.detach() > 0).long()[:1], x[:1] * w),
    ),
    "cdist": ("aten::cdist", lambda x, w: torch.cdist(x, x * w + 1)),
    "counts in a dtype of their own": (
        "aten::histc",
        lambda x, w: x * w * torch.histc(x.detach(), 4, -1, 1).cumsum(0, dtype=torch.int32)[-1],
    ),
    "avg_pool2d over what is padded": (
        "aten::avg_pool2d",
        lambda x, w: F.avg_pool2d(
            (x * w)[:, None], 3, 2, padding=1, ceil_mode=True, count_include_pad=False
        ),
    ),
}


def _written(x: Tensor, w: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    y = x * w
    write(y)
    return y


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_and_writes_by_index(name: str) -> None:
    kind, body = LOOKUPS[name]
    assert kind in lifted(body)


@pytest.mark.parametrize(("number", "lifts"), [(-1e9, False), (0.1, True), (-1.7e308, True)])
def test_a_mask_keeps_numbers_that_float32_has_not(number: float, lifts: bool) -> None:
    """A choice between two numbers is one of float32: 0.1 would be rounded, -1.7e308 infinite."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        mask = torch.full((S, S), number, dtype=torch.float64).triu(1)
        return x.double() + torch.softmax(mask, -1).sum(-1, keepdim=True)[:, :1]

    kinds = lifted(lambda x, w: body(x, w).float())
    assert ("triu" in kinds) == lifts
    assert ("where" in kinds) != lifts
