"""The program of a model, framework-neutral: tensors, ops, blocks.

A `Graph` is one forward pass from inputs to the scalar loss. Repeated layers appear once, as a
`Block` whose body is itself a `Graph`; every occurrence is an op of kind ``"block"``. PyTorch and
JAX frontends produce the same op kinds; what a backend needs to emit an op again is in its attrs.

Names are keys. A tensor is named after the op that makes it, ``<module path>/<kind>``, relative to
its block, so that plans stay valid when unrelated lines of the model change. A parameter is named
by its path: the full one at top level, relative to the instance inside a block.

`autopar.nouns.text.graph` is the text of a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

Role = Literal["parameter", "buffer", "input", "activation", "output"]

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "bool": 1,
        "uint8": 1,
        "int8": 1,
        "int16": 2,
        "uint16": 2,
        "float16": 2,
        "bfloat16": 2,
        "int32": 4,
        "uint32": 4,
        "float32": 4,
        "int64": 8,
        "uint64": 8,
        "float64": 8,
        "complex64": 8,  # of buffers only: what computes with them takes real views
        "complex128": 16,
    }
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One value: ``shape`` is global (unsharded); ``dtype`` is a key of `DTYPE_BYTES`.

    ``differentiable`` says that the loss's gradient flows through it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role = "activation"
    differentiable: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Source:
    """Where the user wrote it: module path, file and line (line 0: unknown).

    ``owner`` is the class of that module: it names the top one, which has no path.
    """

    module: str = ""
    file: str = ""
    line: int = 0
    owner: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file else "?"
        return f"{self.module or self.owner or '<top>'} ({place})"


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: ``inputs`` and ``outputs`` are tensor names, ``attrs`` JSON-like values."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    source: Source = Source()

    @property
    def name(self) -> str:
        """The op's key: the name of its first result."""
        return self.outputs[0]


@dataclass(frozen=True, slots=True)
class Block:
    """A sub-graph that repeats. ``instances`` are the module paths where it occurs, in call order.

    The body's ``inputs`` line up with the inputs of each call op, its ``outputs`` with the outputs.
    ``apart``: False of a part of a model that elsewhere calls an instance twice, see `units`.
    """

    name: str
    body: Graph
    instances: tuple[str, ...]
    apart: bool = True

    @property
    def units(self) -> tuple[str, ...]:
        """Instances whose parameters are gathered and reduced by themselves, each once.

        None where one is called twice: what is dropped after a call would be gathered for the next.
        Their parameters then travel with the root's, as those do that every call is handed.
        """
        if not self.apart or not any(t.role == "parameter" for t in self.body.tensors.values()):
            return ()
        once = tuple(dict.fromkeys(self.instances))
        return once if len(once) == len(self.instances) else ()


@dataclass(frozen=True, slots=True)
class Graph:
    """Ops in topological order over named tensors. Inside a body ``blocks`` is empty."""

    tensors: Mapping[str, Tensor]
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    blocks: Mapping[str, Block] = field(default_factory=dict)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every trainable or frozen parameter of the unfolded model with its full name, once."""
        seen: set[str] = set()
        for tensor in self.tensors.values():
            if tensor.role == "parameter" and tensor.name not in seen:
                seen.add(tensor.name)
                yield tensor.name, tensor
        for block in self.blocks.values():
            for instance in dict.fromkeys(block.instances):
                for tensor in block.body.tensors.values():
                    full = f"{instance}.{tensor.name}"
                    if tensor.role == "parameter" and full not in seen:
                        seen.add(full)
                        yield full, tensor

    def consumers(self) -> dict[str, list[tuple[Op, int]]]:
        """For each tensor, the (op, operand position) pairs that read it, in order."""
        uses: dict[str, list[tuple[Op, int]]] = {name: [] for name in self.tensors}
        for op in self.ops:
            for position, name in enumerate(op.inputs):
                uses[name].append((op, position))
        return uses


def with_ops(graph: Graph, of: Callable[[Graph, Op], Op]) -> Graph:
    """The graph with every op, inside of blocks too, as ``of`` has it: of the top level or body in
    which it stands, and the op."""
    return replace(
        graph,
        ops=tuple(of(graph, op) for op in graph.ops),
        blocks={
            name: replace(block, body=with_ops(block.body, of))
            for name, block in graph.blocks.items()
        },
    )


def without_sources(graph: Graph) -> Graph:
    """The graph as it would be if its source were unknown."""
    return with_ops(graph, lambda part, op: replace(op, source=Source()))


def unique(name: str, taken: Iterable[str]) -> str:
    """``name``, or ``name_1``, ``name_2``, ... if it is taken."""
    used = set(taken)
    if name not in used:
        return name
    number = 1
    while f"{name}_{number}" in used:
        number += 1
    return f"{name}_{number}"


def freeze(value: Any) -> Any:
    """JSON-like ``value`` with lists turned into tuples, so that round trips compare equal."""
    if isinstance(value, Mapping):
        return {k: freeze(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(freeze(v) for v in value)
    return value
