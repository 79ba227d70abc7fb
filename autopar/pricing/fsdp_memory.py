"""What FSDP2 holds of parameters and gradients at the moments of a step that may be its peak.

===========  ===================================================  ================================
moment       activations                                          of parameters and gradients
===========  ===================================================  ================================
outside      saved, and what an op outside the blocks makes       the root; under ZeRO 3 the units
             (the loss)                                           that are gathered ahead, else all
block        saved, and what a block makes in backward            the same; its unit, its gradients
                                                                  and their buffer; those of what
                                                                  follows the blocks
blocks' end  what the first block makes in backward               the same, and all pieces of
                                                                  gradients
end          none                                                 the root, its gradients and their
                                                                  buffer; all pieces of gradients
===========  ===================================================  ================================

A gather fills a buffer, of which each parameter is then copied; the buffer goes with the next
gather. Gradients are whole in the dtype of compute, and once more in the buffer that they are
scattered from, which has the dtype they are reduced in and goes with the next reduction. With
several microbatches pieces of gradients are there from the first on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.mesh import sharers
from autopar.nouns.recipes import MOVED_BYTES
from autopar.pricing.state import StateSharding
from autopar.pricing.summary import Summary
from autopar.pricing.units.unit import Kind, Unit
from autopar.pricing.units.walk import Life


class Moment(NamedTuple):
    """Bytes: ``passing`` beyond what is saved of a microbatch, ``gathered`` of parameters and
    gradients, ``gradients`` of pieces of these."""

    passing: int
    gathered: int
    gradients: int


class _Whole(NamedTuple):
    """Bytes of a unit: all its parameters gathered, its gradients, and the buffer that these are
    scattered from."""

    parameters: int
    gradients: int
    buffer: int


def fullest(summary: Summary, state: StateSharding, life: Life, pieces: int, alone: bool) -> Moment:
    """Of a stage, which is the whole model where it is ``alone``; ``pieces``: bytes of all pieces
    of gradients.

    How many microbatches a stage of several holds is not known here: what there is when none is
    left counts beside them.
    """
    first = pieces if state.microbatches > 1 or not alone else 0
    moments = [
        moment if alone else moment._replace(passing=max(0, moment.passing))
        for moment in _moments(summary, state, life, pieces, first)
    ]
    return max(moments, key=sum)


def _moments(
    summary: Summary, state: StateSharding, life: Life, pieces: int, first: int
) -> Iterator[Moment]:
    """``first``: bytes of pieces of gradients that are there before the first backward ends."""
    (root, _), *blocks = summary.owners()
    every, own = [_whole(unit, state) for unit, _ in blocks], _whole(root, state)
    largest = _Whole(*(max((one[i] for one in every), default=0) for i in range(3)))
    split, several = state.split, state.microbatches > 1
    resident = own.parameters
    if not split.parameters:
        resident += sum(w.parameters * n for w, (_, n) in zip(every, blocks, strict=True))
    ahead = max(1, state.prefetch) if split.parameters else 1
    buffers = ahead * (largest if blocks else own).parameters
    passing = life.inside - life.saved
    yield Moment(life.outside - life.saved, resident + buffers, first)
    behind = resident + _bytes(summary.late, state).gradients
    behind += largest.gradients + largest.buffer
    if split.parameters:
        behind += (1 + state.prefetch) * largest.parameters
    if blocks:
        yield Moment(passing, behind, first)
        yield Moment(max(0, passing) - life.saved, behind, pieces)
    kept = resident if several else own.parameters
    made = own.gradients if split.gradients or not several else 0  # else they are no pieces
    yield Moment(-life.saved, kept + made + own.buffer, pieces)


def _whole(unit: Unit, state: StateSharding) -> _Whole:
    trained = _bytes(unit.trained, state)
    frozen = _bytes(unit.frozen, state).parameters if unit.frozen else 0
    return trained._replace(parameters=trained.parameters + frozen)


def _bytes(numel: Mapping[Kind, int], state: StateSharding) -> _Whole:
    """Of elements whose state ranks share, in the dtypes that they are gathered, made and reduced
    in."""
    gathered = made = reduced = 0
    for kind, n in numel.items():
        ways = sharers(state.mesh, kind.split) if kind.split else state.shard
        if ways > 1:
            gathered += n * MOVED_BYTES[state.moved_dtype(kind)]
            made += n * MOVED_BYTES[state.moved_dtype(kind._replace(narrow=False))]
            reduced += n * DTYPE_BYTES[state.reduced_dtype(kind.dtype)]
    return _Whole(gathered, made, reduced)
