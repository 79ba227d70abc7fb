"""The batch cut along its sequences as well, where ``--fix cp`` asks for it or the search may."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.lowering.lowered import LoweringError
from autopar.lowering.spread import lower
from autopar.nouns.axes import CONTEXT, HEADS, SHARD
from autopar.nouns.graph import Graph
from autopar.nouns.layout import SEQ_SLICES, LayoutError, alternatives, divisors
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from autopar.rules.cut import BatchCut, Cut, Cuts, batch_cut, sequence_cut, slice_cut
from autopar.rules.pieces import BatchMixed

WITHOUT, WHOLE = {CONTEXT: "1"}, {SEQ_SLICES: "1"}


def cuts_along(graph: Graph, batch_dims: Mapping[str, int], cp: int) -> Cuts:
    """For ``cp`` ranks to a sample.

    Raises:
        LayoutError: the batch or an op of the model do not allow it.
    """
    try:
        cut = batch_cut(graph, batch_dims, cp)
        _try_beside_samples(graph, batch_dims, cut, cp)
    except (BatchMixed, LoweringError) as error:
        raise LayoutError(f"--fix cp={cp}: {error}", WITHOUT) from error
    assert cut.sequences is not None
    return Cuts(cut.samples, {cp: cut.sequences})


def in_slices(graph: Graph, samples: Cut, slices: int) -> Cuts:
    """For sequences that pass the stages of a pipeline in ``slices``.

    Raises:
        LayoutError: the batch or an op of the model do not allow it.
    """
    try:
        cut = BatchCut(samples, None, slices, slice_cut(graph, samples.dims, slices))
        _try_beside_samples(graph, samples.dims, cut)
    except (BatchMixed, LoweringError) as error:
        raise LayoutError(f"--fix seq_slices={slices}: {error}", WHOLE) from error
    assert cut.sliced is not None
    return Cuts(samples, sliced={slices: cut.sliced})


def check_heads(graph: Graph, heads: int) -> None:
    """Raises `LayoutError` where ``--fix cp_head`` asks more ranks to share the heads of attention
    than their number allows.

    Ranks have whole groups of queries' heads with the one of keys and values that these share; a
    group itself is split where there is one.
    """
    for part in (graph, *(block.body for block in graph.blocks.values())):
        for op in part.ops:
            if op.kind != "attention":
                continue
            queries, keys = (part.tensors[name].shape[1] for name in op.inputs[:2])
            most = keys if keys > 1 else queries
            if most % heads:
                raise LayoutError(
                    f"--fix cp_head={heads} does not divide the {most} heads of "
                    f"{'keys and values' if keys > 1 else 'queries'} at {op.source}: cp_head may "
                    f"be {alternatives(divisors(most))}, or split rows in their place by cp_ring",
                    {HEADS: "1"},
                )


def every_cut(graph: Graph, samples: Cut, devices: int) -> Cuts:
    """For every number of ranks to a sequence that divides ``devices`` and the model allows."""
    along: dict[int, Cut] = {}
    for cp in divisors(devices)[1:]:
        try:
            sequences = sequence_cut(graph, samples.dims, cp)
            _try_beside_samples(graph, samples.dims, BatchCut(samples, sequences), cp)
        except (BatchMixed, LoweringError):
            continue
        along[cp] = sequences
    return Cuts(samples, along)


def _try_beside_samples(
    graph: Graph, batch_dims: Mapping[str, int], cut: BatchCut, cp: int = 1
) -> None:
    """Raises `LoweringError` where samples and sequences cannot both be split."""
    samples = {graph.tensors[name].shape[dim] for name, dim in batch_dims.items()}
    ways = next((n for n in range(2, min(samples) + 1) if all(s % n == 0 for s in samples)), 1)
    lower(graph, Spread(Mesh((SHARD, CONTEXT), (ways, cp))), 1, cut)
