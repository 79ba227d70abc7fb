"""Which axes of a plan's meshes lie on whole slices of TPUs, where reduce-scatters are two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.cost_models.collectives import on_torus
from autopar.nouns.axes import SHARING
from autopar.nouns.mesh import Mesh
from autopar.planner.ask.question import Decided, Question
from autopar.planner.solve.solved import state_of
from autopar.pricing.units.moves import group_of


def scatters_of(question: Question, decided: Decided) -> Mapping[str, int]:
    """See `autopar.nouns.scatters`."""
    if question.framework != "jax":
        return {}
    mesh = state_of(question, decided.layout, decided.candidate).mesh
    turns = {}
    for axis in _groups(mesh.trimmed()):
        place = on_torus(question.cluster, group_of(mesh, axis))
        if place is not None and place.first:
            turns[axis] = place.first
    return turns


def _groups(mesh: Mesh) -> Iterator[str]:
    """What a reduce-scatter may go over: an axis, or several that share state."""
    yield from mesh.axes
    together: tuple[str, ...] = ()
    for axis in reversed(mesh.axes):
        if axis not in SHARING:
            return
        together = (axis, *together)
        if len(together) > 1:
            yield "+".join(together)
