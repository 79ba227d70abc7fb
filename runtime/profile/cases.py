"""The ops that `autopar profile` measures: what each is given, and how many are called in a row.

A case is measured as a chain of calls of one op: each takes what the one before it made, with
operands of its own, as layers do; one backward pass then runs through all of them. So results are
kept until backward, and operands come from where the op before has left them. What a case calls is
what emitted programs of a framework call (`ops`, `jax.ops`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.nouns.graph import Op, Role
from autopar.nouns.graph import Tensor as GraphTensor
from autopar.rules.extents import ONE_DEVICE, WHOLE_OP
from autopar.rules.registry import bind
from autopar.rules.work import Work, op_work

CHAIN_BYTES = 24e6
"""What a chain's forward touches: more than the caches that a core has for itself."""
LONGEST = 24
WAYS = ("forward", "backward")
UPDATED = "adamw"
"""The optimizer whose step is measured; it moves a parameter and two slots both ways, and the
gradient once."""
UPDATE_MOVES = 7

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One op at one size; the first operand is an activation.

    trained: operands that are parameters; ``below``: operands that hold indices, with their ends.
    chained: the result can be the next call's first operand, with gradients that stay normal.
    """

    kind: str
    operands: tuple[Shape, ...]
    result: Shape
    trained: tuple[int, ...] = ()
    below: Mapping[int, int] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    chained: bool = True

    @property
    def name(self) -> str:
        """``256x768,768x768``: the shapes of the operands."""
        return ",".join("x".join(map(str, shape)) for shape in self.operands)

    @property
    def called(self) -> str:
        """The kind, or ``bias`` for a sum with one."""
        biased = self.kind == "add" and len(self.operands[1]) == 1
        return "bias" if biased else self.kind

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

    def calls(self, dtype: str, chain_bytes: float, most: int = LONGEST) -> int:
        """How many make a chain whose forward touches so much, ``most`` at most."""
        return int(min(most, max(2, chain_bytes // self.work(dtype).forward_bytes)))

    def over(self, position: int) -> int:
        """What an operand is divided by, so that a chain neither vanishes nor overflows."""
        weighs = position in self.trained and self.kind in ("linear", "conv")
        return math.prod(self.operands[position][1:]) if weighs else 1


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


def least_cases() -> Iterator[Case]:
    """Every op on next to nothing: what a call takes whatever it is of. An eager call takes as long
    as the smallest of `cases`, a compiled one less."""
    yield _linear(8, 16)
    yield _attention(1, 2, 8, 8, True)
    yield from _streams(8, 16)
    yield from _norms(8, 16)
    yield _embedding(8, 32, 16)
    yield _cross_entropy(8, 32)
    yield _conv(1, 4)


def middle_cases(largest: int) -> Iterator[Case]:
    """The middle one of the sizes of each kind of op, two of products, whose operands have at most
    ``largest`` elements."""
    by_kind: dict[str, list[Case]] = {}
    for case in cases(1):
        if max(map(math.prod, case.operands)) <= largest:
            by_kind.setdefault(case.called, []).append(case)
    for kind, sizes in by_kind.items():
        middle = len(sizes) // 2
        yield from sizes[middle : middle + 2] if kind == "linear" else [sizes[middle]]


def _linear(rows: int, width: int) -> Case:
    return Case("linear", ((rows, width), (width, width)), (rows, width), trained=(1,))


def _attention(batch: int, heads: int, seq: int, dim: int, causal: bool) -> Case:
    shape = (batch, heads, seq, dim)
    return Case(
        "attention",
        (shape, shape, shape),
        shape,
        trained=(1, 2),
        attrs={"causal": causal},
        chained=False,
    )


def _streams(rows: int, width: int) -> Iterator[Case]:
    shape = (rows, width)
    # A residual: its input is read twice, so that its gradient is a sum.
    yield Case("add", (shape, shape), shape, trained=(1,))
    yield Case("mul", (shape, shape), shape, trained=(1,))
    for kind in ("gelu", "silu", "relu"):
        yield Case(kind, (shape,), shape)
    yield Case("softmax", (shape,), shape, attrs={"dim": -1}, chained=False)
    heads = (rows // 64, 8, 64, 32) if rows >= 64 else (1, 8, rows, 32)
    angles = (1, *heads[2:])
    yield Case("rotary", (heads, angles, angles), heads)


def _norms(rows: int, width: int) -> Iterator[Case]:
    shape, vector = (rows, width), (width,)
    yield Case("layer_norm", (shape, vector, vector), shape, trained=(1, 2))
    yield Case("rms_norm", (shape, vector), shape, trained=(1,))
    yield Case("add", (shape, vector), shape, trained=(1,), chained=False)


def _embedding(rows: int, vocabulary: int, width: int) -> Case:
    return Case(
        "embedding",
        ((rows,), (vocabulary, width)),
        (rows, width),
        trained=(1,),
        below={0: vocabulary},
        chained=False,
    )


def _cross_entropy(tokens: int, vocabulary: int) -> Case:
    return Case(
        "cross_entropy",
        ((tokens, vocabulary), (tokens,)),
        (),
        below={1: vocabulary},
        chained=False,
    )


def _conv(batch: int, side: int = 32) -> Case:
    image = (batch, 32, side, side)
    return Case("conv", (image, (32, 32, 3, 3)), image, trained=(1,), attrs={"padding": (1, 1)})
