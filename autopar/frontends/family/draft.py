"""A graph under construction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autopar.nouns.graph import Block, Graph, Op, Role, Tensor


@dataclass(slots=True)
class Draft:
    """A graph under construction; every method returns the name of the tensor that it adds."""

    dropout: float
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)

    def add(self, name: str, shape: tuple[int, ...], role: Role, dtype: str, grad: bool) -> str:
        self.tensors[name] = Tensor(name, shape, dtype, role, grad)
        return name

    def parameter(self, name: str, *shape: int) -> str:
        return self.add(name, shape, "parameter", "float32", True)

    def given(self, name: str, *shape: int, dtype: str, grad: bool = False) -> str:
        self.inputs.append(name)
        return self.add(name, shape, "input", dtype, grad)

    def op(
        self,
        kind: str,
        module: str,
        inputs: tuple[str, ...],
        shape: tuple[int, ...],
        result: str = "float32",
        /,
        **attrs: Any,
    ) -> str:
        """``result``: its dtype."""
        name = self._free(f"{module}/{kind}" if module else kind)
        attrs |= {"dtype": result} if kind in ("arange", "cast") else {}
        self.ops.append(Op(kind, inputs, (name,), attrs))
        return self.add(name, shape, "activation", result, self._grad(inputs))

    def several(
        self,
        kind: str,
        module: str,
        inputs: tuple[str, ...],
        results: tuple[tuple[tuple[int, ...], str], ...],
        **attrs: Any,
    ) -> tuple[str, ...]:
        """An op with several results: the shape and dtype of each; integers have no gradient."""
        stem = self._free(f"{module}/{kind}" if module else kind, ".0")
        names = tuple(f"{stem}.{i}" for i in range(len(results)))
        self.ops.append(Op(kind, inputs, names, attrs))
        grad = self._grad(inputs)
        for name, (shape, dtype) in zip(names, results, strict=True):
            self.add(name, shape, "activation", dtype, grad and dtype != "int64")
        return names

    def _free(self, stem: str, suffix: str = "") -> str:
        name, count = stem, 0
        while name + suffix in self.tensors:
            count += 1
            name = f"{stem}_{count}"
        return name

    def _grad(self, inputs: tuple[str, ...]) -> bool:
        return any(self.tensors[name].differentiable for name in inputs)

    def product(self, name: str, x: str, outputs: int, bias: bool) -> str:
        """``x`` times the weight called ``name``, with a bias where there is one."""
        *rows, inputs = self.tensors[x].shape
        weight = self.parameter(f"{name}.weight", outputs, inputs)
        y = self.op("linear", name, (x, weight), (*rows, outputs))
        if not bias:
            return y
        added = self.parameter(f"{name}.bias", outputs)
        return self.op("add", name, (y, added), (*rows, outputs), bias=True)

    def norm(self, name: str, x: str, root_mean_square: bool) -> str:
        """Over the last dim of ``x``, with a weight; with a bias where it is a layer norm."""
        shape = self.tensors[x].shape
        weight = self.parameter(f"{name}.weight", shape[-1])
        if root_mean_square:
            how = {"eps": 1e-6, "scale_offset": 0, "upcast": True}
            return self.op("rms_norm", name, (x, weight), shape, **how)
        bias = self.parameter(f"{name}.bias", shape[-1])
        return self.op("layer_norm", name, (x, weight, bias), shape, dims=1, eps=1e-5)

    def dropped(self, module: str, x: str, shape: tuple[int, ...]) -> str:
        """``x`` behind dropout, where there is any."""
        return self.op("dropout", module, (x,), shape, p=self.dropout) if self.dropout else x

    def graph(self, output: str, blocks: dict[str, Block]) -> Graph:
        last = self.tensors[output]
        self.add(output, last.shape, "output", last.dtype, last.differentiable)
        return Graph(self.tensors, tuple(self.ops), tuple(self.inputs), (output,), blocks)
