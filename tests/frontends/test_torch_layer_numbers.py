"""A layer's own number, read in every way: the capture is right or refused, never wrong.

Three layers are built alike and count themselves; a table tells them a number by that count, which
is another one in the first, the middle or the last. Uses are what torch is asked with the number,
sources are how the layer comes by it.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from enum import Enum
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontends.pytorch import recording
from autopar.frontends.pytorch.errors import CaptureError
from autopar.nouns.workload import Workload
from tests.frontends.torch_referee import Compared, compare

B, D, DEPTH = 2, 4, 3
Use = Callable[["Layer", Tensor, int], Any]
Source = Callable[["Layer"], int]


class Layer(nn.Module):
    """``use`` is given the number that ``source`` finds."""

    def __init__(self, index: int, source: Source, use: Use) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(D, D))
        self.index, self.source, self.use = index, source, use

    def forward(self, x: Tensor) -> Any:
        return self.use(self, self.inner(x), self.source(self))


class Model(nn.Module):
    def __init__(self, source: Source, use: Use, prepare: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i, source, use) for i in range(DEPTH))
        prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            made = layer(x)
            x = x + (made if isinstance(made, Tensor) else made[0] * made[1])
        return x.square().mean()


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(B, D, generator=torch.Generator().manual_seed(0))}


def compared(source: Source, use: Use, prepare: Callable[[nn.Module], None]) -> Compared | None:
    """None where the capture is refused with a message."""
    try:
        return compare(Workload(model=lambda: Model(source, use, prepare), batch=batch))
    except CaptureError:
        return None


class Scale(torch.autograd.Function):
    """A forward without the factor, a backward with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


class Ratio(Enum):
    ONE, TWO = 1, 2


STATE = SimpleNamespace(number=1, seen=0, table=[1] * DEPTH, kept=[], array=np.ones(D))
NUMBER: ContextVar[int] = ContextVar("NUMBER", default=1)
LISTED = [torch.relu, torch.tanh, torch.sigmoid]


def _reduced(layer: Layer, h: Tensor, n: int) -> Tensor:
    with torch.no_grad() if n == 2 else torch.enable_grad():
        g = h * 2
    return g + h


def _repeated(layer: Layer, h: Tensor, n: int) -> Tensor:
    for _ in range(n):
        h = torch.tanh(h)
    return h


def _unseen(layer: Layer, h: Tensor, n: int) -> Tensor:
    with torch._C.DisableTorchFunction():
        return h * n


def _unseen_in_place(layer: Layer, h: Tensor, n: int) -> Tensor:
    g = h * 1
    with torch._C.DisableTorchFunction():
        g.mul_(n)
    return g


def _caught(layer: Layer, h: Tensor, n: int) -> Tensor:
    try:
        return h.view(D, B * n) if n == 2 else h * n
    except RuntimeError:
        return h * 3


def _swallowed(layer: Layer, h: Tensor, n: int) -> Tensor:
    try:
        return h * n
    except Exception:
        return h


def _remembered(layer: Layer, h: Tensor, n: int) -> Tensor:
    STATE.kept.append(h * n)
    return STATE.kept.pop()  # type: ignore[no-any-return]


def _in_array(layer: Layer, h: Tensor, n: int) -> Tensor:
    STATE.array[:] = n
    return h * torch.tensor(STATE.array.tolist())


def _asked(layer: Layer, h: Tensor, n: int) -> Tensor:
    return h * 2 if h.requires_grad and n == 2 else h


def _assigned(layer: Layer, h: Tensor, n: int) -> Tensor:
    g = h * 1
    g[:, n:] = 0
    return g


def _seeded(layer: Layer, h: Tensor, n: int) -> Tensor:
    np.random.seed(n)
    return h[:, torch.tensor(np.random.permutation(D).tolist())]


USES: dict[str, Use] = {
    "roll": lambda m, h, n: torch.roll(h, n, 1),
    "times": lambda m, h, n: h * n,
    "reflected": lambda m, h, n: n - h,
    "power": lambda m, h, n: h.abs() ** (n + 1),
    "alpha": lambda m, h, n: torch.add(h, h, alpha=n),
    "slice": lambda m, h, n: h - F.pad(h[:, n:], (n, 0)),
    "full": lambda m, h, n: h * torch.full((D,), n, dtype=h.dtype),
    "arange": lambda m, h, n: h * torch.arange(n, n + D),
    "tensor": lambda m, h, n: h * torch.tensor([n, 1, 1, 1]),
    "legacy tensor": lambda m, h, n: h * torch.Tensor([n, 1, 1, 1]),
    "from numpy": lambda m, h, n: h * torch.from_numpy(np.full(D, n)),
    "numpy scalar": lambda m, h, n: h * cast(Any, np.int64(n)),
    "list": lambda m, h, n: LISTED[n](h),
    "callable": lambda m, h, n: (torch.tanh if n == 2 else torch.sin)(h),
    "method by name": lambda m, h, n: getattr(h, ("", "sin", "cos")[n])(),
    "calls": _repeated,
    "float": lambda m, h, n: h * (0.1 * n),
    "bits of a float": lambda m, h, n: h + (1.0 / h.new_tensor(-0.0 if n == 2 else 0.0)).sign(),
    "bool": lambda m, h, n: h.std(1, unbiased=n == 2, keepdim=True) * h,
    "string": lambda m, h, n: F.gelu(h, approximate="tanh" if n == 2 else "none"),
    "formatted": lambda m, h, n: h * float("%d.5" % n),  # noqa: UP031
    "equation": lambda m, h, n: torch.einsum("ij,kj->ik" if n == 2 else "ij,jk->ik",
                                             h, m.inner[0].weight),
    "dim": lambda m, h, n: F.softmax(h, n - 1),
    "tuple": lambda m, h, n: torch.roll(h, (n, 1), (0, 1)),
    "dtype": lambda m, h, n: h * torch.tensor(
        7.6, dtype=torch.int64 if n == 2 else torch.float64),
    "index list": lambda m, h, n: h[:, [0, n, 1, 3]],
    "epsilon": lambda m, h, n: F.layer_norm(h, (D,), eps=n * 1e-2),
    "clamp": lambda m, h, n: h.clamp(min=-0.2 * n),
    "masked": lambda m, h, n: h.masked_fill(h > 0.3, n),
    "no_grad": _reduced,
    "detached": lambda m, h, n: h + (h.detach() if n == 2 else h),
    "in place": lambda m, h, n: (h * 1).mul_(n),
    "assigned": _assigned,
    "returned": lambda m, h, n: (h, n),
    "past torch functions": _unseen,
    "in place past them": _unseen_in_place,
    "caught": _caught,
    "swallowed": _swallowed,
    "state": _remembered,
    "array": _in_array,
    "own derivative": lambda m, h, n: cast(Any, Scale).apply(h, n),
    "requires_grad": _asked,
    "seed": _seeded,
    "size": lambda m, h, n: h * h.new_ones(n, 1, D).sum(0),
    "enum": lambda m, h, n: h * Ratio(n).value,
    "closure": lambda m, h, n: (lambda g: g * n)(h),
    "partial": lambda m, h, n: functools.partial(torch.mul, other=n)(h),
    "weight": lambda m, h, n: h @ cast(Tensor, m.inner[0].weight).roll(n, 0),
}  # fmt: skip


def _counted(layer: Layer) -> int:
    STATE.seen += 1
    return int(STATE.table[(STATE.seen - 1) % DEPTH])


def _in_context(layer: Layer) -> int:
    NUMBER.set(STATE.table[layer.index])
    return NUMBER.get()


def _drawn(layer: Layer) -> int:
    return 1 + random.Random(STATE.table[layer.index]).randrange(1000)


def _iterated(layer: Layer) -> int:
    return int(next(layer.numbers))  # type: ignore[call-overload]


def _none(model: nn.Module) -> None: ...


def _set(name: str, make: Callable[[int], Any]) -> Callable[[nn.Module], None]:
    """Gives every layer an attribute made of its number."""

    def prepare(model: nn.Module) -> None:
        for i, layer in enumerate(model.layers):  # type: ignore[arg-type]
            setattr(layer, name, make(STATE.table[i]))

    return prepare


def _buffers(model: nn.Module) -> None:
    for i, layer in enumerate(model.layers):  # type: ignore[arg-type]
        layer.register_buffer("number", torch.tensor(STATE.table[i]))


def _iterator(model: nn.Module) -> None:
    numbers = itertools.cycle(STATE.table)
    for layer in model.layers:  # type: ignore[union-attr]
        layer.numbers = numbers


def _shared_config(model: nn.Module) -> None:
    config = SimpleNamespace(numbers=list(STATE.table))
    for layer in model.layers:  # type: ignore[union-attr]
        layer.config = config


class Opaque:
    """Compared by identity, and the same for all layers."""

    def __init__(self, table: list[int]) -> None:
        self.table = table

    def __call__(self, index: int) -> int:
        return self.table[index]


def _opaque(model: nn.Module) -> None:
    one = Opaque(list(STATE.table))
    for layer in model.layers:  # type: ignore[union-attr]
        layer.of = one


SOURCES: dict[str, tuple[Source, Callable[[nn.Module], None]]] = {
    "global": (lambda m: STATE.table[m.index], _none),
    "counter": (_counted, _none),
    "context": (_in_context, _none),
    "seeded": (_drawn, _none),
    "iterator": (_iterated, _iterator),
    "configuration": (lambda m: m.config.numbers[m.index], _shared_config),  # type: ignore
    "callable object": (lambda m: m.of(m.index), _opaque),  # type: ignore
    "buffer": (lambda m: m.number, _buffers),  # type: ignore
    "value of a buffer": (lambda m: int(m.number), _buffers),  # type: ignore
    "int": (lambda m: m.own, _set("own", int)),  # type: ignore
    "float": (lambda m: m.own, _set("own", float)),  # type: ignore
    "string": (lambda m: int(m.own[1:]), _set("own", "n{}".format)),  # type: ignore
    "tuple": (lambda m: m.own[1], _set("own", lambda n: (0, n))),  # type: ignore
    "closure": (lambda m: m.own(), _set("own", lambda n: lambda: n)),  # type: ignore
    "partial": (lambda m: m.own(1), _set("own", lambda n: functools.partial(max, n))),  # type: ignore
    "numpy": (lambda m: m.own.item(), _set("own", np.int64)),  # type: ignore
    "submodule": (lambda m: m.inner[0].own, lambda model: [  # type: ignore
        setattr(m.inner[0], "own", STATE.table[i]) for i, m in enumerate(model.layers)]),  # type: ignore
}  # fmt: skip


NOT_FOLDED = {  # though the numbers are equal: what cannot be compared is not folded
    "legacy tensor", "from numpy", "past torch functions", "in place past them", "numpy",
}  # fmt: skip
WRITES = {"in place", "assigned", "in place past them", "state", "array", "seed"}
PLACES = {"none": None, "first": 0, "middle": 1, "last": 2}
EACH_WITH_ONE = [
    pytest.param(use, place, id=f"{use}-{name}")
    for use, one in zip(USES, itertools.cycle(list(PLACES)[1:]), strict=False)
    for name, place in PLACES.items()
    if name in ("none", one) or use in NOT_FOLDED | WRITES
]
"""Which place is told apart how is seen with every source: a use has one of them, but all where it
writes what a later layer may read, or where nothing is folded anyhow."""


@pytest.fixture(params=list(PLACES.values()), ids=list(PLACES))
def other(request: pytest.FixtureRequest) -> Iterator[int | None]:
    """The layer whose number is 2 while the others' is 1."""
    STATE.table = [2 if i == request.param else 1 for i in range(DEPTH)]
    STATE.seen, STATE.number = 0, 1
    yield request.param
    STATE.kept.clear()


REFUSED = {"value of a buffer"}


def check(name: str, one: Compared | None, other: int | None) -> None:
    """Right or refused; and folded where the numbers are equal, so that the others show it."""
    if one is None:
        assert name in REFUSED
        return
    assert one.worst <= 1e-12
    instances = [i for b in one.captured.graph.blocks.values() for i in b.instances]
    if other is not None:
        assert len(instances) < DEPTH or len(one.captured.graph.blocks) > 1
    elif name in NOT_FOLDED:
        assert not instances
    else:
        assert len(instances) >= DEPTH - 1


@pytest.mark.parametrize(("use", "other"), EACH_WITH_ONE, indirect=["other"])
@pytest.mark.some(50)
def test_uses(use: str, other: int | None) -> None:
    check(use, compared(lambda m: STATE.table[m.index], USES[use], _none), other)


@pytest.mark.parametrize("source", list(SOURCES))
@pytest.mark.some(34)
def test_sources(source: str, other: int | None) -> None:
    find, prepare = SOURCES[source]
    check(source, compared(find, lambda m, h, n: h * n, prepare), other)


@pytest.mark.parametrize("use", ["roll", "slice", "power", "string", "callable", "seed"])
def test_without_the_comparison_these_are_wrong(use: str, monkeypatch: Any) -> None:
    """The cases above can fail: taken as alike, the layers compute something else."""
    monkeypatch.setattr(recording.Replayer, "_matches", _anything)
    STATE.table = [1, 2, 1]
    one = compared(lambda m: STATE.table[m.index], USES[use], _none)
    assert one is not None
    assert one.worst > 1e-6


def _anything(replayer: recording.Replayer, func: Any, args: Any, kwargs: Any) -> bool:
    replayer._place += 1
    return True


def test_a_failed_call_that_the_forward_catches_is_no_op() -> None:
    STATE.table = [2, 2, 2]
    one = compared(lambda m: STATE.table[m.index], _caught, _none)
    assert one is not None
    assert one.worst <= 1e-12
