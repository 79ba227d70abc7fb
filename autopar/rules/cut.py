"""How the axes that split a batch cut it: along its samples, and along its sequences.

Both follow from the inputs and the rules (`autopar.rules.batch`), so a plan does not say them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.nouns.axes import SEQUENCES
from autopar.nouns.graph import Graph
from autopar.rules.batch import batch_flow, data_choices
from autopar.rules.pieces import BatchMixed


@dataclass(frozen=True, slots=True)
class Cut:
    """dims:    of each input that is cut the dim.
    choices: what the axes do, by op key; for inputs of blocks a placement, by tensor key.
    apart:   keys of tensors whose pieces do not lie one behind the other (`autopar.rules.pieces`).
    """

    dims: Mapping[str, int]
    choices: Mapping[str, str]
    apart: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class BatchCut:
    """``sequences`` is None where no axis splits them."""

    samples: Cut
    sequences: Cut | None = None

    @property
    def apart(self) -> frozenset[str]:
        """See `Cut.apart`."""
        return self.sequences.apart if self.sequences is not None else frozenset()

    def on(self, axis: str) -> Cut:
        """Of an axis that splits the batch, or of microbatches."""
        if axis not in SEQUENCES:
            return self.samples
        assert self.sequences is not None, "the sequences of this batch were not followed"
        return self.sequences


def batch_cut(graph: Graph, batch_dims: Mapping[str, int], cp: int = 1) -> BatchCut:
    """For ``cp`` ranks to a sequence; ``batch_dims``: of each batched input the dim of its samples.

    Raises `BatchMixed` where sequences are to be split and cannot be.
    """
    samples = Cut(batch_dims, data_choices(graph, batch_dims))
    return BatchCut(samples, _along(graph, batch_dims, cp) if cp > 1 else None)


def _along(graph: Graph, batch_dims: Mapping[str, int], cp: int) -> Cut:
    dims = sequence_dims(graph, batch_dims)
    if not dims:
        raise BatchMixed(
            f"no entry of the batch has a dim of tokens behind that of its samples, which {cp} "
            "ranks could have pieces of"
        )
    name, dim = next(iter(dims.items()))
    length = graph.tensors[name].shape[dim]
    if length % cp:
        fitting = [str(n) for n in range(1, length + 1) if length % n == 0]
        raise BatchMixed(
            f"{cp} ranks do not divide the {length} tokens of {name}: cp may be "
            f"{', '.join(fitting)}"
        )
    flow = batch_flow(graph, dims, cp)
    return Cut({n: d for n, d in dims.items() if n not in flow.whole}, flow.choices, flow.apart)


def sequence_dims(graph: Graph, batch_dims: Mapping[str, int]) -> dict[str, int]:
    """Of each batched input the dim behind its samples, where that has the length of most of them:
    tokens, labels, positions, masks of a row a sample; features of each token where there are no
    tokens."""
    shapes = {name: graph.tensors[name].shape for name, dim in batch_dims.items() if dim == 0}
    lengths = Counter(shape[1] for shape in shapes.values() if len(shape) == 2)
    lengths = lengths or Counter(shape[1] for shape in shapes.values() if len(shape) == 3)
    if not lengths:
        return {}
    (length, _), *_ = lengths.most_common(1)
    return {name: 1 for name, shape in shapes.items() if shape[1:2] == (length,)}
