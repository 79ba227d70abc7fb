"""Forward and backward of a `torch.autograd.Function` as two graphs of op kinds.

Both are cut out of one trace, taken below autograd on fake tensors: ``forward`` maps operands to
results; ``backward`` maps operands and the results' gradients to the operands' gradients, and
computes again what it needs of the forward. So nothing has to be known of what a function saves.

Where only some results are read, autograd hands zeros, or None where the function asks for that, in
the place of the other gradients. So there is a backward for every choice of results, side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.frontends.pytorch import ir
from autopar.frontends.pytorch.errors import CaptureError
from autopar.frontends.pytorch.function_parts import parts
from autopar.frontends.pytorch.ir import Node, Value
from autopar.frontends.pytorch.lift import lift
from autopar.frontends.pytorch.noting import Sources
from autopar.frontends.pytorch.quiet import quiet_fake_tensors
from autopar.frontends.pytorch.trace import Trace
from autopar.nouns.graph import Graph, Op, Role, Source
from autopar.nouns.graph import Tensor as Described
from autopar.torch_private.modes import without_modes, without_torch_function

MOST_RESULTS = 3
"""Results with a gradient of a function whose choices are all traced."""


class Untraceable(Exception):
    """A function that has no graphs here; the message is for whoever debugs this."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """``gradients``: for each output of ``backward`` the operand whose gradient it is.

    graded: by result, whether a gradient flows into it.
    """

    forward: Graph
    backward: Graph
    gradients: tuple[int, ...]
    graded: tuple[bool, ...]


def graphs_of(
    apply: Callable[..., Any], args: Sequence[Any], shapes: Sequence[Sequence[int]], fake: Any
) -> Pulled:
    """``apply`` on ``args``, its tensors in ``shapes`` instead of their own.

    ``fake`` is the mode that fakes. Raises `Untraceable`.
    """
    try:
        with quiet_fake_tensors():
            return _cut(*_traced(apply, args, shapes, fake))
    except (Untraceable, CaptureError) as error:
        raise Untraceable(str(error)) from error
    except Exception as error:  # a user's function, on sizes of our own
        raise Untraceable(f"{type(error).__name__}: {error}") from error


@dataclass(slots=True)
class _Ends:
    """How many operands go in; the rest as of `Pulled`."""

    operands: int
    graded: tuple[bool, ...] = ()
    gradients: tuple[int, ...] = ()


def _traced(
    apply: Callable[..., Any], args: Sequence[Any], shapes: Sequence[Sequence[int]], fake: Any
) -> tuple[Any, _Ends]:
    """The fx graph of results and gradients together."""
    with without_modes(), without_torch_function(), fake:
        tensors = [a for a in args if isinstance(a, Tensor)]
        given = [_fresh(t, s) for t, s in zip(tensors, shapes, strict=True)]
        ends = _Ends(len(given))
        with torch.enable_grad():
            results = _results(apply, args, given)
        ends.graded = tuple(r.requires_grad for r in results)
        incoming = [torch.empty_like(r) for r in results if r.requires_grad]
        if not incoming or len(incoming) > MOST_RESULTS:
            raise Untraceable(f"{len(incoming)} of its results have a gradient")

        def joint(*inside: Tensor) -> list[Tensor]:
            leaves = list(inside[: len(given)])
            with torch.enable_grad():
                made = _results(apply, args, leaves)
            flowing = [r for r in made if r.requires_grad]
            pulled = list(_pulled(leaves, flowing, inside[len(given) :]))
            ends.gradients = tuple(i for i, _ in pulled)
            return [*made, *(g for _, g in pulled)]

        return make_fx(joint, decomposition_table=parts())(*given, *incoming), ends


def _fresh(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    made = torch.empty(tuple(shape), dtype=tensor.dtype)
    return made.requires_grad_(tensor.dtype.is_floating_point)


def _results(apply: Callable[..., Any], args: Sequence[Any], given: Sequence[Tensor]) -> list[Any]:
    """The tensors that ``apply`` makes of ``args`` with ``given`` in their tensors' place."""
    put = iter(given)
    made = apply(*[next(put) if isinstance(a, Tensor) else a for a in args])
    listed = made if isinstance(made, tuple | list) else (made,)
    return [r for r in listed if isinstance(r, Tensor)]


def _pulled(
    leaves: Sequence[Tensor], results: Sequence[Tensor], incoming: Sequence[Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """(position of an operand, its gradient) for every choice of results."""
    wanted = [i for i, t in enumerate(leaves) if t.requires_grad]
    places = range(len(results))
    for count in range(len(results), 0, -1):
        for chosen in combinations(places, count):
            gradients = torch.autograd.grad(
                [results[i] for i in chosen],
                [leaves[i] for i in wanted],
                [incoming[i] for i in chosen],
                allow_unused=True,
                retain_graph=True,
            )
            yield from ((i, g) for i, g in zip(wanted, gradients, strict=True) if g is not None)


def _cut(traced: Any, ends: _Ends) -> Pulled:
    """The two graphs of a trace; a result without a gradient is given one that nobody reads."""
    names = [f"x{i}" for i in range(ends.operands)]
    names += [f"g{i}" for i, graded in enumerate(ends.graded) if graded]
    sources = Sources.all_at(Source())
    walk = lift(
        Trace(
            *(traced.graph, traced, tuple(names), {}, {}, [], [], []),
            *(sources, {}, {}, {}, frozenset()),
        )
    )
    made: list[Value] = [walk.read(node) for node in walk.result]  # type: ignore[union-attr]
    count = len(ends.graded)
    operands, incoming = walk.inputs[: ends.operands], iter(walk.inputs[ends.operands :])
    arriving = [
        next(incoming) if graded else Value(r.shape, r.dtype, "input", f"g{i}")
        for i, (r, graded) in enumerate(zip(made[:count], ends.graded, strict=True))
    ]
    return Pulled(
        _graph(walk.nodes, operands, made[:count]),
        _graph(walk.nodes, [*operands, *arriving], made[count:]),
        ends.gradients,
        ends.graded,
    )


def _graph(nodes: Sequence[Node], inputs: Sequence[Value], outputs: Sequence[Value]) -> Graph:
    """The ops that ``outputs`` need; each output is made by an op, and is no other output."""
    nodes, outputs = list(nodes), list(outputs)
    for i, value in enumerate(outputs):
        if value in inputs or value in outputs[:i]:
            outputs[i] = Value(value.shape, value.dtype)
            nodes.append(Node("identity", [value], [outputs[i]]))
    names: dict[Value, str] = {v: v.name for v in inputs}
    ops = []
    for number, node in enumerate(ir.drop_dead(nodes, outputs)):
        for place, value in enumerate(node.outputs):
            names[value] = f"t{number}" + (f".{place}" if node.outputs[1:] else "")
        read, made = (tuple(names[v] for v in side) for side in (node.inputs, node.outputs))
        ops.append(Op(node.kind, read, made, dict(node.attrs)))

    def described(value: Value, name: str) -> Described:
        role: Role = "output" if value in outputs else value.role
        return Described(name, value.shape, value.dtype, role, value.is_float)

    return Graph(
        {name: described(value, name) for value, name in names.items()},
        tuple(ops),
        tuple(names[v] for v in inputs),
        tuple(names[v] for v in outputs),
    )
