"""The arithmetic that a model needs, whatever the layout: the numerator of MFU.

Matrix products, attention and convolutions of forward and backward, each counted once: recomputed
and replicated work does not count (Chowdhery et al. 2022, PaLM, appendix B). Each is divided by the
device's peak in the dtype that it computes in, so that

    MFU = sum over ops of FLOPs / peak(dtype) / (step time * devices)

is at most 1 for any mix of dtypes. Where all compute in one it is what others call MFU.
"""

from __future__ import annotations

from autopar.nouns.cluster import Cluster, Device
from autopar.nouns.graph import Graph
from autopar.rules.flops import flops
from autopar.rules.registry import bind
from autopar.rules.work import PRODUCTS, arithmetic_dtype


def model_flops(graph: Graph) -> dict[str, float]:
    """Floating-point operations of one step on the global batch, by the dtype they are done in."""
    total: dict[str, float] = {}
    bodies = {name: model_flops(block.body) for name, block in graph.blocks.items()}
    for op in graph.ops:
        if op.kind == "block":
            for dtype, count in bodies[op.attrs["block"]].items():
                total[dtype] = total.get(dtype, 0.0) + count
            continue
        bound = bind(op, graph.tensors)
        if bound.rule.cost in PRODUCTS:
            dtype = arithmetic_dtype(op, graph.tensors, bound.rule.cost)
            total[dtype] = total.get(dtype, 0.0) + sum(flops(bound, op, graph.tensors))
    return total


def peak_time_s(graph: Graph, device: Device) -> float:
    """Seconds that ``device`` alone would take for them at its peaks."""
    return sum(count / device.peak(dtype) for dtype, count in model_flops(graph).items())


def cluster_peak_s(graph: Graph, cluster: Cluster) -> float:
    """The same of all devices of ``cluster``, each with as much as it can do."""
    alone = [(kind.count, peak_time_s(graph, kind.device)) for kind in cluster.kinds]
    if len(alone) == 1 or not alone[0][1]:
        return alone[0][1] / alone[0][0]
    return 1 / sum(count / seconds for count, seconds in alone)
