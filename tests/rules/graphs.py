"""Small graphs, written one op a line."""

from __future__ import annotations

from typing import Any

from autopar.nouns.graph import Block, Graph, Op, Source, Tensor


class Drawing:
    """A graph under construction; every method returns the name of the tensor it adds."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self.inputs: list[str] = []

    def parameter(self, name: str, *shape: int) -> str:
        self.tensors[name] = Tensor(name, shape, "float32", "parameter", True)
        return name

    def given(self, name: str, *shape: int, dtype: str = "float32", grad: bool = False) -> str:
        self.tensors[name] = Tensor(name, shape, dtype, "input", grad)
        self.inputs.append(name)
        return name

    def op(
        self,
        kind: str,
        inputs: tuple[str, ...],
        *shape: int,
        name: str = "",
        dtype: str = "float32",
        **attrs: Any,
    ) -> str:
        name = name or f"{kind}_{len(self.ops)}"
        grad = dtype == "float32" and any(self.tensors[n].differentiable for n in inputs)
        self.ops.append(Op(kind, inputs, (name,), attrs, Source("model", "model.py", 7)))
        self.tensors[name] = Tensor(name, shape, dtype, "activation", grad)
        return name

    def call(self, block: str, inputs: tuple[str, ...], *shape: int) -> str:
        name = f"call_{len(self.ops)}"
        self.ops.append(Op("block", inputs, (name,), {"block": block, "instance": name}))
        self.tensors[name] = Tensor(name, shape, "float32", "activation", True)
        return name

    def graph(self, *outputs: str, **blocks: Graph) -> Graph:
        blocks_by_name = {n: Block(n, body, ("0", "1")) for n, body in blocks.items()}
        return Graph(self.tensors, tuple(self.ops), tuple(self.inputs), outputs, blocks_by_name)
