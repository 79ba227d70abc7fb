"""How the axes that split a batch cut it: along its samples, and along its sequences.

Both follow from the inputs and the rules (`autopar.rules.batch`), so a plan does not say them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.nouns.axes import CONTEXT, SEQUENCES, SLICE
from autopar.nouns.graph import Graph, Op
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import key
from autopar.nouns.sharding import Placement
from autopar.rules.batch import BatchFlow, batch_flow, data_choices
from autopar.rules.implementations.table import (
    GLOBAL_COUNT,
    KEPT_ROWS,
    LOCAL_GROUPS,
    LOCAL_REPEATS,
)
from autopar.rules.notation import Implemented, Rule
from autopar.rules.pieces import BatchMixed
from autopar.rules.registry import bind

BY_SLICE = frozenset({GLOBAL_COUNT, LOCAL_GROUPS, LOCAL_REPEATS})
"""Implementations that a slice runs by as it stands."""
ENOUGH = 1.01
"""Pieces in zigzag make the rank with most work at least so much faster, if they are taken."""


@dataclass(frozen=True, slots=True)
class Cut:
    """dims:    of each input that is cut the dim.
    choices: what the axes do, by op key; for inputs of blocks a placement, by tensor key.
    apart:   keys of tensors whose pieces do not lie one behind the other (`autopar.rules.pieces`).
    zigzag:  where rank i of n has pieces i and 2 n - 1 - i of 2 n, so that rows of causal attention
             are as much work on every rank (Dubey et al. 2024, The Llama 3 herd of models, section
             3.3.2): by tensor key the dim that lies so; None: pieces are contiguous.
    """

    dims: Mapping[str, int]
    choices: Mapping[str, str]
    apart: frozenset[str] = frozenset()
    zigzag: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class BatchCut:
    """``sequences`` is None where no axis splits them.

    slices: that pass one after the other, into which those of a microbatch are cut so ``sliced``.
    """

    samples: Cut
    sequences: Cut | None = None
    slices: int = 1
    sliced: Cut | None = None

    @property
    def apart(self) -> frozenset[str]:
        """See `Cut.apart`."""
        along = (cut.apart for cut in (self.sequences, self.sliced) if cut is not None)
        return frozenset().union(*along)

    @property
    def zigzag(self) -> Mapping[str, int] | None:
        """See `Cut.zigzag`."""
        return self.sequences.zigzag if self.sequences is not None else None

    def on(self, axis: str) -> Cut:
        """Of an axis that splits the batch, or of what cuts it over time."""
        if axis == SLICE:
            assert self.sliced is not None, "this batch has no slices"
            return self.sliced
        if axis not in SEQUENCES:
            return self.samples
        assert self.sequences is not None, "the sequences of this batch were not followed"
        return self.sequences


@dataclass(frozen=True, slots=True)
class Cuts:
    """How a batch is cut on meshes of any number of ranks to a sequence; ``along``: by that number,
    where there may be several; ``sliced``: by that of slices."""

    samples: Cut
    along: Mapping[int, Cut] = field(default_factory=dict)
    sliced: Mapping[int, Cut] = field(default_factory=dict)

    def of(self, mesh: Mesh, slices: int = 1) -> BatchCut:
        """On one mesh."""
        along = self.along.get(mesh.ways(SEQUENCES))
        return BatchCut(self.samples, along, slices, self.sliced.get(slices))


def batch_cut(
    graph: Graph, batch_dims: Mapping[str, int], cp: int = 1, slices: int = 1
) -> BatchCut:
    """For ``cp`` ranks to a sequence; ``batch_dims``: of each batched input the dim of its samples.

    Raises `BatchMixed` where sequences are to be split and cannot be.
    """
    samples = Cut(batch_dims, data_choices(graph, batch_dims))
    sequences = sequence_cut(graph, batch_dims, cp) if cp > 1 else None
    sliced = slice_cut(graph, batch_dims, slices) if slices > 1 else None
    return BatchCut(samples, sequences, slices, sliced)


def slice_cut(graph: Graph, batch_dims: Mapping[str, int], slices: int) -> Cut:
    """Of sequences that pass in ``slices``, each behind the one before it, so that attention reads
    what is kept of those. Raises `BatchMixed` where an op needs later ones, too."""
    dims = _tokens(graph, batch_dims, slices, "slices", "seq_slices")
    cut = _cut_somewhere(batch_flow(graph, dims, slices), dims, f"{slices} slices")
    choices = dict(cut.choices)
    for where, op, rule, implemented in _implemented(graph, cut.choices):
        factor = implemented.factor
        if any(e.name == KEPT_ROWS and e.factor == factor for e in rule.implementations):
            choices[where] = KEPT_ROWS
        elif implemented.name not in BY_SLICE:
            raise BatchMixed(
                f"op {op.kind!r} at {op.source} needs more of its sequences than the slices up to "
                "its own: attention is to be causal, without dropout or a trained mask, all else "
                "to treat each token alike"
            )
    return replace(cut, choices=choices)


def _implemented(
    graph: Graph, choices: Mapping[str, str]
) -> Iterator[tuple[str, Op, Rule, Implemented]]:
    """By key, ops that run by an implementation where they do what ``choices`` say."""
    for name, part in ((None, graph), *((n, block.body) for n, block in graph.blocks.items())):
        for op in part.ops:
            where = key(name, op.name)
            usual = "" if op.kind == "block" else choices[where]
            rule = bind(op, part.tensors).rule if usual else None
            if rule is not None and (implemented := rule.implemented(usual)) is not None:
                yield where, op, rule, implemented


def _tokens(
    graph: Graph, batch_dims: Mapping[str, int], ways: int, of: str, pin: str
) -> dict[str, int]:
    """`sequence_dims` of what ``ways`` divide. Raises `BatchMixed`."""
    dims = sequence_dims(graph, batch_dims)
    if not dims:
        raise BatchMixed(
            f"no entry of the batch has a dim of tokens behind that of its samples, which {ways} "
            f"{of} could have pieces of"
        )
    name, dim = next(iter(dims.items()))
    length = graph.tensors[name].shape[dim]
    if length % ways:
        fitting = [str(n) for n in range(1, length + 1) if length % n == 0]
        raise BatchMixed(
            f"{ways} {of} do not divide the {length} tokens of {name}: {pin} may be "
            f"{', '.join(fitting)}"
        )
    return dims


def sequence_cut(graph: Graph, batch_dims: Mapping[str, int], cp: int) -> Cut:
    """Of sequences alone, for ``cp`` ranks to each; raises `BatchMixed` as `batch_cut` does."""
    dims = _tokens(graph, batch_dims, cp, "ranks", CONTEXT)
    length = next(graph.tensors[name].shape[dim] for name, dim in dims.items())
    if length % (2 * cp) == 0 and (zigzag := _in_zigzag(graph, dims, cp)):
        return zigzag
    return _cut_somewhere(batch_flow(graph, dims, cp), dims, f"{cp} ranks")


def _cut(flow: BatchFlow, dims: Mapping[str, int]) -> Cut:
    return Cut({n: d for n, d in dims.items() if n not in flow.whole}, flow.choices, flow.apart)


def _cut_somewhere(flow: BatchFlow, dims: Mapping[str, int], ways: str) -> Cut:
    """Raises `BatchMixed` where none of the inputs is cut."""
    cut = _cut(flow, dims)
    if not cut.dims:
        raise BatchMixed(
            f"an op needs more than a piece of the tokens of {' and '.join(dims)}, so that each of "
            f"{ways} would have all of them and compute everything: give what is cut from one "
            "array, such as tokens and the labels that follow them, as entries of their own"
        )
    return cut


def _in_zigzag(graph: Graph, dims: Mapping[str, int], cp: int) -> Cut | None:
    """The cut into 2 ``cp`` pieces, two a rank; None where no op gains or one cannot be so: rows
    that see a narrow window are as much work in pieces one behind the other, which a ring stops at.
    """
    try:
        flow = batch_flow(graph, dims, 2 * cp)
    except BatchMixed:
        return None
    choices = dict(flow.choices)
    gains = False
    for where, _, rule, implemented in _implemented(graph, flow.choices):
        balanced = [e for e in rule.implementations if _balances(e, flow.choices[where])]
        if balanced:
            choices[where] = balanced[0].choice
            gains |= implemented.work(cp) > ENOUGH * balanced[0].work(cp)
        elif implemented.row.lie == "contiguous":
            return None
    held = {n: Placement.parse(text) for n, text in flow.tensors.items()}
    at = {n: placed.dim for n, placed in held.items() if placed.kind == "S"}
    cut = _cut(flow, dims)
    return replace(cut, choices=choices, zigzag=at) if gains and cut.dims else None


def _balances(implemented: Implemented, factor: str) -> bool:
    of = (implemented.factor, implemented.row.lie, implemented.also)
    return of == (factor, "zigzag", ())


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
