"""Products of JAX: ``dot_general`` as an einsum, convolutions with their dims in torch's order."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from autopar.frontends.jax.draft import Builder, Operand, Shape

Outs = Sequence[tuple[Shape, str]]


def dot_general(params: Any, inputs: list[Operand], outs: Outs, builder: Builder) -> list[Operand]:
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    a, b = (builder.tensor(x) for x in inputs)
    letters = iter(string.ascii_lowercase)
    in_a = [next(letters) for _ in a.shape]
    in_b = [""] * len(b.shape)
    for i, j in (*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)):
        in_b[j] = in_a[i]
    in_b = [letter or next(letters) for letter in in_b]
    result = [in_a[i] for i in left_batch]
    result += [x for i, x in enumerate(in_a) if i not in (*left, *left_batch)]
    result += [x for j, x in enumerate(in_b) if j not in (*right, *right_batch)]
    equation = f"{''.join(in_a)},{''.join(in_b)}->{''.join(result)}"
    return [builder.op("einsum", (a, b), *outs[0], equation=equation)]


def conv(params: Any, inputs: list[Operand], outs: Outs, builder: Builder) -> list[Operand] | None:
    numbers = params["dimension_numbers"]
    dilated = any(d != 1 for d in params["lhs_dilation"]) or params["batch_group_count"] != 1
    if dilated:
        return None
    x = builder.transpose(inputs[0], tuple(numbers.lhs_spec))
    weight = builder.transpose(inputs[1], tuple(numbers.rhs_spec))
    shape = tuple(outs[0][0][d] for d in numbers.out_spec)
    y = builder.op(
        "conv",
        (x, weight),
        shape,
        outs[0][1],
        stride=tuple(map(int, params["window_strides"])),
        padding=tuple((int(a), int(b)) for a, b in params["padding"]),
        dilation=tuple(map(int, params["rhs_dilation"])),
        groups=int(params["feature_group_count"]),
    )
    back = [0] * len(shape)
    for i, d in enumerate(numbers.out_spec):
        back[d] = i
    return [builder.transpose(y, tuple(back))]
