"""Hand-written derivatives: planned and right against autograd itself, or refused by name."""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-call, no-any-return"
import copy
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.frontends.pytorch.derivatives import run
from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.frontends.pytorch.execute import execute
from autopar.frontends.shared.captured import Captured
from autopar.nouns.mesh import Mesh
from autopar.planner.ask.unruled import check_allowed, check_registered, unruled
from autopar.rules.kept_whole import keep_whole
from autopar.rules.notation import RuleError
from autopar.rules.own_functions import FUNCTION, LINEAR
from autopar.rules.registry import UnruledOp, register, unregister
from autopar.runtime.pytorch.own_functions import gradients_scaled, own_function
from autopar.torch_private.modes import FakeTensorMode
from tests.emit import own_functions as own
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage

B, D = 8, 6
Body = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    """A linear layer, ``body``, a linear layer."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, D))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(self, self.first(x))
        return (self.last(h) * self.weight).square().mean(-1).mean()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {"x": 2 * torch.randn(B, D)}


def apply(function: Any, *args: Any) -> Body:
    return lambda m, h: function.apply(h, *args)


def _checkpointed(m: Any, h: Tensor) -> Tensor:
    outputs = checkpoint(own.Reversed.apply, h, 0.3, use_reentrant=False)
    return outputs


def _both(m: Any, h: Tensor) -> Tensor:
    low, rest = own.Quantised.apply(h)
    return low + rest


def _labels(h: Tensor) -> Tensor:
    return h.argmax(-1)


ALONE: dict[str, Body] = {  # need no rule: element by element
    "round": apply(own.Round),
    "clipped sign": apply(own.ClippedSign),
    "binarise": apply(own.Binarise, 0.1),
    "reversed": apply(own.Reversed, 2.0),
    "scaled": apply(own.Scaled),
    "clipped gradient": apply(own.ClippedGradient, 2e-3),
    "sign of the gradient": apply(own.SignOfGradient),
    "penalised": apply(own.Penalised),
    "exp": apply(own.SafeExp),
    "sigmoid": apply(own.Sigmoid),
    "swish": apply(own.Swish),
    "gelu": apply(own.Gelu),
    "mish": apply(own.Mish),
    "softplus": apply(own.Softplus),
    "two results": _both,
    "a pair": lambda m, h: own.Pair.apply(h, h.sin())[0] * own.Pair.apply(h, h.cos())[1],
    "no gradient for one": lambda m, h: own.HalfBlind.apply(h, h.sin()),
    "nested": apply(own.Nested),
    "checkpointed": _checkpointed,
    "of a weight": lambda m, h: F.linear(h, own.FakeQuantised.apply(m.last.weight, 4)),
    "under no_grad": lambda m, h: h * torch.no_grad()(own.Round.apply)(h),
}

RULED: dict[str, tuple[Body, dict[str, str]]] = {
    "linear": (
        lambda m, h: own.Linear.apply(h, m.last.weight, m.last.bias),
        {"Linear": "b k!, n! k!, n! -> b n!"},
    ),
    "linear without bias": (
        lambda m, h: own.Linear.apply(h, m.last.weight, None),
        {"Linear": "b k+, n k+ -> b n"},
    ),
    "layer norm": (
        lambda m, h: own.LayerNorm.apply(h, m.weight, 1e-5),
        {"LayerNorm": "b c!, c! -> b c!"},
    ),
    "rms norm": (apply(own.RMSNorm), {"RMSNorm": "b c! -> b c!"}),
    "cross entropy": (
        lambda m, h: h * own.CrossEntropy.apply(h, _labels(h))[:, None],
        {"CrossEntropy": "b c!, b -> b"},
    ),
}


@contextmanager
def rules(texts: dict[str, str]) -> Iterator[None]:
    with ExitStack() as stack:
        for name, text in texts.items():
            kind = f"{own.__name__}.{name}"
            register(kind, text)
            stack.callback(unregister, kind)
        yield


def unbatched(captured: Captured) -> Captured:
    """As planned where no data axis may split the batch."""
    return replace(captured, batch=tuple(replace(e, batch_dim=None) for e in captured.batch))


def compared(body: Body, mesh: str, seed: int, micro: int = 1, batched: bool = True) -> str:
    """The program under random decisions, which computes what the model computes."""
    torch.manual_seed(0)
    captured = capture_of(lambda: Model(body), batch)
    captured = captured if batched else unbatched(captured)
    spread = random_stage(captured, Mesh.parse(mesh), micro, seed)
    made = emitted(captured, spread, micro)
    torch.manual_seed(0)
    check(made, Model(body), batch())
    return made.text


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.some(10)
def test_element_by_element(name: str) -> None:
    for seed, mesh in enumerate(("dp_shard=1", "dp_shard=2 x tp=2")):
        text = compared(ALONE[name], mesh, seed, 1 + seed)
    assert ("own_function(" in text) == (name != "under no_grad")


@pytest.mark.parametrize("name", RULED)
def test_by_a_rule(name: str) -> None:
    body, texts = RULED[name]
    captured = capture_of(lambda: Model(body), batch)
    with rules(texts):
        assert check_registered(captured.graph, execute) == []
        assert "own_function(" in compared(body, "dp_shard=2 x tp=2", 1)


def test_without_a_rule() -> None:
    """The advice is what held on drawn numbers."""
    captured = capture_of(lambda: Model(apply(own.AboveSecond)), batch)
    ((kind, advice),) = unruled(captured.graph, execute).items()
    assert f"autopar.register_rule({kind!r}, 'a b!" in advice
    with pytest.raises(UnruledOp, match=f"--allow-replicated {kind}"):
        check_allowed(captured.graph, {kind: advice}, ())
    with rules({"AboveSecond": "b c! -> b c!"}):
        assert check_registered(captured.graph, execute) == []
        assert "own_function(" in compared(apply(own.AboveSecond), "dp_shard=2 x tp=2", 1)


def test_kept_whole_where_the_user_says_so() -> None:
    """All its operands are gathered, from data ranks too."""
    captured = capture_of(lambda: Model(apply(own.RMSNorm)), batch)
    kind = f"{own.__name__}.RMSNorm"
    whole = replace(captured, graph=keep_whole(captured.graph, [kind]))
    alone = unbatched(whole)
    made = emitted(alone, random_stage(alone, Mesh.parse("tp=2"), 1, 0))
    check(made, Model(apply(own.RMSNorm)), batch())
    made = emitted(whole, random_stage(whole, Mesh.parse("dp_shard=2"), 1, 0))
    check(made, Model(apply(own.RMSNorm)), batch())


def test_a_gradient_of_the_function_s_own_is_not_linear_in_what_comes_in() -> None:
    """Trainers that scale gradients, as DDP's mean wants, must undo that around it."""

    def body(m: Any, h: Tensor) -> Tensor:
        return h * own.Wrapped.apply(h.square().mean(), h)

    graph = capture_of(lambda: Model(body), batch).graph
    (op,) = [op for op in graph.ops if FUNCTION in op.attrs]
    assert not op.attrs[FUNCTION][LINEAR]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda m, h: own.Dirty.apply(h * 1), "writes into a tensor that it is given"),
        (apply(own.Noisy), "draws random numbers (rand_like)"),
        (apply(own.Peeking), "must not read values"),
        (apply(own.Reversed, torch.nn.Identity()), "a Identity as argument 1"),
        (lambda m, h: _local(h), "at the top level of the model's file"),
    ],
)
def test_refused_by_name(body: Body, words: str) -> None:
    with pytest.raises(UnsupportedOpError, match=re.escape(words)) as caught:
        capture_of(lambda: Model(body), batch)
    assert "torch.autograd.Function" in str(caught.value)


def _local(h: Tensor) -> Tensor:
    class Local(own.Round):
        pass

    return Local.apply(h)


def test_a_clipped_gradient_of_a_weight_is_whole_where_it_is_clipped() -> None:
    """Shares of it, as data ranks have, would each be clipped by themselves: they are added up
    before, and every rank clips the sum."""

    def body(m: Any, h: Tensor) -> Tensor:
        return F.linear(h, own.ClippedWeight.apply(m.last.weight))

    for seed in range(3):
        compared(body, "tp=2", seed, batched=False)
        compared(body, "dp_shard=2", seed)


def test_a_backward_that_is_not_linear_gets_the_plain_gradient() -> None:
    """DDP's trainer scales the loss by its ranks."""
    x = torch.randn(5, requires_grad=True)
    weight = torch.tensor([1e-4, 1e-2, -3.0, 0.5, -1e-3])
    own.ClippedGradient.apply(x, 2e-3).backward(weight)
    wanted, x.grad = x.grad, None
    assert wanted is not None
    with gradients_scaled(4.0):
        path = f"{own.__name__}:ClippedGradient"
        made = own_function(path, x, 2e-3, whole_gradient=True)
        made.backward(4.0 * weight)
    torch.testing.assert_close(x.grad, 4.0 * wanted)


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down, self.number = nn.Linear(D, D), nn.Linear(D, D), number

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(own.Gelu.apply(self.up(x)))


class NumberedLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(own.Reversed.apply(self.up(x), self.number))


class Stack(nn.Module):
    def __init__(self, layer: type[Layer]) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.layers = nn.ModuleList(map(layer, range(3)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean(-1).mean()


@pytest.mark.parametrize(("layer", "blocks"), [(Layer, 1), (NumberedLayer, 0)])
def test_in_a_repeated_layer(layer: type[Layer], blocks: int) -> None:
    """A layer's own number as an argument keeps the layers apart."""
    torch.manual_seed(0)
    model = Stack(layer)
    captured = capture_of(lambda: copy.deepcopy(model), batch)
    assert len(captured.graph.blocks) == blocks
    made = emitted(captured, random_stage(captured, Mesh.parse("dp_shard=2 x tp=2"), 1, 0))
    check(made, model, batch())


def test_what_a_plain_linear_op_does_not_show() -> None:
    """Each way in which a backward meets its gradient, and whether that is linear."""
    linear = {"Round", "ClippedSign", "Reversed", "Mish", "FakeQuantised", "Nested", "Swish"}
    other = {"ClippedGradient", "SignOfGradient", "Penalised"}
    arguments = {"Reversed": (2.0,), "FakeQuantised": (4,), "ClippedGradient": (0.1,)}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for name in linear | other:
        args = (torch.empty(3, 4), *arguments.get(name, ()))
        seen = run(getattr(own, name).apply, args, lambda n: n, mode)
        assert seen.linear == (name in linear), name


def test_a_rule_that_the_backward_does_not_follow_is_refused() -> None:
    """Its forward treats every sample by itself; its backward reads the size of the batch."""
    captured = capture_of(lambda: Model(apply(own.ByBatch)), batch)
    with rules({"ByBatch": "b d -> b d"}), pytest.raises(RuleError, match="the gradient of"):
        check_registered(captured.graph, execute)
