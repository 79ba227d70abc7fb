"""The ops that `autopar profile` measures, as a training step runs them.

A case is a chain of calls of one op: each takes what the one before it made, with operands of its
own, as layers do; one backward pass then runs through all of them. So results are kept until
backward, operands come from where the op before has left them, and the framework's own work for
each call is in the figures. What the calls compute is what emitted programs call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from autopar.nouns.graph import Op, Role
from autopar.nouns.graph import Tensor as GraphTensor
from autopar.rules.extents import ONE_DEVICE, WHOLE_OP
from autopar.rules.registry import bind
from autopar.rules.work import Work, op_work
from autopar.runtime.pytorch.layers import attention
from autopar.runtime.pytorch.norms import rms_norm, rotary
from autopar.runtime.pytorch.vocabulary import cross_entropy

CHAIN_BYTES = 24e6
"""What a chain's forward touches: more than the caches that a core has for itself."""
LONGEST = 24

Shape = tuple[int, ...]
Call = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One op at one size; the first operand is an activation.

    trained: operands that are parameters; ``below``: operands that hold indices, with their ends.
    chained: the result can be the next call's first operand, with gradients that stay normal.
    """

    kind: str
    operands: tuple[Shape, ...]
    result: Shape
    call: Call
    trained: tuple[int, ...] = ()
    below: Mapping[int, int] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    chained: bool = True

    @property
    def name(self) -> str:
        """``256x768,768x768``: the shapes of the operands."""
        return ",".join("x".join(map(str, shape)) for shape in self.operands)

    def work(self, dtype: str) -> Work:
        """What the rules say of one call in ``dtype`` (``"float32"``)."""
        tensors = {}
        for i, shape in enumerate(self.operands):
            role: Role = "parameter" if i in self.trained else "activation"
            counted = "int64" if i in self.below else dtype
            grad = i not in self.below and (i == 0 or i in self.trained)
            tensors[f"in{i}"] = GraphTensor(f"in{i}", shape, counted, role, grad)
        op = Op(self.kind, tuple(tensors), ("out",), dict(self.attrs))
        tensors["out"] = GraphTensor("out", self.result, dtype, "activation", True)
        return op_work(op, bind(op, tensors), WHOLE_OP, ONE_DEVICE, tensors)


class Chain:
    """A case with its tensors: `forward` makes the results, `backward` uses them up."""

    def __init__(
        self,
        case: Case,
        dtype: torch.dtype,
        device: torch.device,
        chain_bytes: float = CHAIN_BYTES,
    ) -> None:
        """``chain_bytes``: what the forward of the chain touches."""
        touched = case.work(str(dtype).removeprefix("torch.")).forward_bytes
        self.calls = int(min(LONGEST, max(2, chain_bytes // touched)))
        self.case = case
        self._made: list[torch.Tensor] = []
        make = partial(_operand, case, dtype=dtype, device=device)
        lanes = 1 if case.chained else self.calls
        self._firsts = [make(0) for _ in range(lanes)]
        self._others = [[make(i) for i in range(1, len(case.operands))] for _ in range(self.calls)]

    def forward(self) -> None:
        call = self.case.call
        if not self.case.chained:
            pairs = zip(self._firsts, self._others, strict=True)
            self._made = [call(x, *others) for x, others in pairs]
            return
        x = self._firsts[0]
        for others in self._others:
            x = call(x, *others)
        self._made = [x]

    def backward(self) -> None:
        torch.autograd.backward(self._made, [torch.ones_like(x) for x in self._made])
        self._made = []

    def clear(self) -> None:
        """Forgets gradients, as a step does before it starts."""
        for x in [*self._firsts, *(x for others in self._others for x in others)]:
            x.grad = None


def _operand(case: Case, position: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    shape = case.operands[position]
    if position in case.below:
        return torch.randint(0, case.below[position], shape, device=device)
    # Positive, and scaled so that a chain neither vanishes into denormal numbers nor overflows.
    made = torch.rand(shape, device=device, dtype=dtype) + 0.5
    if position in case.trained and case.kind in ("linear", "conv"):
        made = made / math.prod(shape[1:])
    return made.requires_grad_(position == 0 or position in case.trained)


def cases(scale: int) -> Iterator[Case]:
    """Every op at its sizes; ``scale`` multiplies rows where devices are wide.

    The first case of each class of ops stands for those kinds of the class that are not here.
    """
    for rows, width in ((4, 1024), (64, 256), (256, 256), (256, 768), (1024, 512)):
        yield _linear(rows * scale, width)
    for batch, seq in ((4, 64), (4, 128), (2, 512)):
        for causal in (False, True):
            yield _attention(batch, 8, seq * scale, 32, causal)
    for elements in (1 << 14, 1 << 17, 1 << 20, 1 << 22):
        rows = elements // 256 * scale
        yield from _streams(rows, 256)
    for rows, width in ((64, 256), (256, 384), (1024, 1024)):
        yield from _norms(rows * scale, width)
    for rows in (256, 1024):
        yield _embedding(rows * scale, 4096, 256)
        yield _cross_entropy(rows * scale, 4096)
    for batch in (1, 4, 16):
        yield _conv(batch * scale)


def _linear(rows: int, width: int) -> Case:
    weight = (width, width)
    return Case("linear", ((rows, width), weight), (rows, width), F.linear, trained=(1,))


def _attention(batch: int, heads: int, seq: int, dim: int, causal: bool) -> Case:
    shape = (batch, heads, seq, dim)
    return Case(
        "attention",
        (shape, shape, shape),
        shape,
        partial(attention, causal=causal),
        trained=(1, 2),
        attrs={"causal": causal},
        chained=False,
    )


def _streams(rows: int, width: int) -> Iterator[Case]:
    shape = (rows, width)
    # A residual: its input is read twice, so that its gradient is a sum.
    yield Case("add", (shape, shape), shape, lambda x, _: x + x, trained=(1,))
    yield Case("mul", (shape, shape), shape, torch.mul, trained=(1,))
    for kind, call in (("gelu", F.gelu), ("silu", F.silu), ("relu", F.relu)):
        yield Case(kind, (shape,), shape, call)
    normed = partial(F.softmax, dim=-1)
    yield Case("softmax", (shape,), shape, normed, attrs={"dim": -1}, chained=False)
    heads = (rows // 64, 8, 64, 32) if rows >= 64 else (1, 8, rows, 32)
    angles = (1, *heads[2:])
    yield Case("rotary", (heads, angles, angles), heads, _rotary)


def _rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rotary(x, cos, sin)


def _norms(rows: int, width: int) -> Iterator[Case]:
    shape, vector = (rows, width), (width,)
    normed = partial(_layer_norm, width=width)
    yield Case("layer_norm", (shape, vector, vector), shape, normed, trained=(1, 2))
    yield Case("rms_norm", (shape, vector), shape, partial(rms_norm, eps=1e-6), trained=(1,))
    yield Case("add", (shape, vector), shape, _biased, trained=(1,), chained=False)


def _biased(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """What a bias adds to the product that it is one call with: the product is next to nothing."""
    return F.linear(x.detach()[:, :1], bias.detach()[:, None], bias)


def _layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, width: int
) -> torch.Tensor:
    return F.layer_norm(x, (width,), weight, bias)


def _embedding(rows: int, vocabulary: int, width: int) -> Case:
    return Case(
        "embedding",
        ((rows,), (vocabulary, width)),
        (rows, width),
        F.embedding,
        trained=(1,),
        below={0: vocabulary},
        chained=False,
    )


def _cross_entropy(tokens: int, vocabulary: int) -> Case:
    return Case(
        "cross_entropy",
        ((tokens, vocabulary), (tokens,)),
        (),
        cross_entropy,
        below={1: vocabulary},
        chained=False,
    )


def _conv(batch: int) -> Case:
    image = (batch, 32, 32, 32)
    call = partial(F.conv2d, padding=1)
    return Case(
        "conv", (image, (32, 32, 3, 3)), image, call, trained=(1,), attrs={"padding": (1, 1)}
    )


class Update:
    """One step of AdamW on ``elements`` parameters, as the trainer makes it."""

    kind = "adamw"

    def __init__(self, elements: int, device: torch.device) -> None:
        pieces = [torch.randn(elements // 8, device=device) for _ in range(8)]
        self._held = [torch.nn.Parameter(piece) for piece in pieces]
        for held in self._held:
            held.grad = torch.randn_like(held)
        self._optimizer = torch.optim.AdamW(self._held, lr=1e-4, fused=True)

    def step(self) -> None:
        self._optimizer.step()
