"""Running a `Graph` op by op with torch: the referee for what the frontend lifts.

It computes from kinds and attrs alone, and looks at ``attrs["torch"]`` only for kinds that are an
aten op's own name. Slow and plain on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from autopar.frontends.pytorch.execute import call_again
from autopar.nouns import graph as nouns
from autopar.nouns.graph import Graph, Op
from tests.frontends.torch_kernels import KERNELS, Call

Observer = Callable[[str, Op, Tensor], None]


def interpret(
    graph: Graph,
    tensors: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    *,
    wide: bool = False,
    dropout: bool = False,
    observe: Observer | None = None,
) -> Tensor:
    """The loss of ``graph`` on ``batch``, differentiable in ``tensors``.

    tensors: parameters and buffers by full name. Batch norms write into their running buffers.
    wide:    computes in float64 what the graph computes in float32 (casts, constants, softmax).
    dropout: False puts what stands in for it in the place of every draw, `frontends.shared.noise`.
    observe: called with the full name of every tensor that an op makes, the op and the value.
    """
    run = _Run(tensors, wide, dropout, observe)
    (loss,) = run.graph(graph, "", [batch[name] for name in graph.inputs], graph)
    return loss


class _Run:
    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        wide: bool,
        dropout: bool,
        observe: Observer | None,
    ) -> None:
        self.tensors, self.wide, self.dropout, self.observe = tensors, wide, dropout, observe

    def graph(
        self, graph: Graph, prefix: str, inputs: Iterable[Tensor], whole: Graph
    ) -> list[Tensor]:
        """Results of ``graph``; its own tensors are found under ``prefix``."""
        values = dict(zip(graph.inputs, inputs, strict=True))
        for name, tensor in graph.tensors.items():
            if tensor.role in ("parameter", "buffer") and name not in values:
                values[name] = self.tensors[prefix + name]
        for op in graph.ops:
            operands = [values[name] for name in op.inputs]
            if op.kind == "block":
                body = whole.blocks[op.attrs["block"]].body
                made = self.graph(body, f"{op.attrs['instance']}.", operands, whole)
            else:
                made = self.op(op, operands, graph)
            for name, value in zip(op.outputs, made, strict=True):
                values[name] = value
                if self.observe is not None:
                    self.observe(prefix + name, op, value)
        return [values[name] for name in graph.outputs]

    def op(self, op: Op, operands: list[Tensor], graph: Graph) -> list[Tensor]:
        results = [graph.tensors[name] for name in op.outputs]
        return run_op(op, operands, results, wide=self.wide, dropout=self.dropout)


def run_op(
    op: Op,
    operands: list[Tensor],
    results: list[nouns.Tensor],
    *,
    wide: bool = False,
    dropout: bool = False,
) -> list[Tensor]:
    """What ``op`` makes of ``operands``; ``results`` give the shapes. See `interpret`."""
    call = Call(op, operands, results, wide, dropout)
    kernel = KERNELS.get(op.kind)
    made = kernel(call) if kernel is not None else call_again(op, operands, wide)
    made = [made] if isinstance(made, Tensor) else list(made)
    for tensor, value in zip(results, made, strict=True):
        if tuple(value.shape) != tensor.shape:
            raise ValueError(
                f"{op.kind} {op.name} at {op.source} makes {list(value.shape)}, the graph says "
                f"{list(tensor.shape)}"
            )
        wanted = call.dtype(tensor.dtype)
        floating = value.dtype.is_floating_point and wanted.is_floating_point
        if value.dtype != wanted and not floating:
            raise ValueError(
                f"{op.kind} {op.name} at {op.source} makes {value.dtype}, the graph says {wanted}"
            )
    return made
