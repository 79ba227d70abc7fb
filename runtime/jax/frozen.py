"""Parameters that are not trained: held and split as the others, without gradients or state.

To the program they are arrays that the loss closes over (`autopar.frontends.jax.constants`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from autopar.frontends.jax import paths_of
from autopar.nouns.errors import UserError, did_you_mean
from autopar.runtime.jax.parallel import Layout, put
from autopar.runtime.jax.step import Step

Tree = Any  # of arrays; None where a leaf is in the other part
Frozen = str | Sequence[str] | Callable[[str, Any], bool]
"""Patterns of paths, or what says of a path and its leaf whether it is frozen."""
_HELD = "constants.frozen."
"""Before the names that the arrays of ``frozen`` below have in a graph."""


def parted(params: Tree, frozen: Frozen) -> tuple[Tree, Tree]:
    """The trees of what is trained, and of what is not. Raises `UserError` for a pattern without a
    parameter, where nothing is left to train, and for a frozen leaf that is a shape."""
    named = dict(paths_of(params))
    patterns = [frozen] if isinstance(frozen, str) else frozen
    if callable(patterns):
        chosen = {path for path, leaf in named.items() if patterns(path, leaf)}
    else:
        chosen = set()
        for pattern in patterns:
            own = {path for path in named if fnmatchcase(path, pattern)}
            if not own:
                meant = did_you_mean(pattern, list(named))
                raise UserError(
                    f"frozen={pattern!r} is the path of no parameter. {meant}There are "
                    f"{', '.join(list(named)[:6])}{', ...' if len(named) > 6 else ''}"
                )
            chosen |= own
    if len(chosen) == len(named):
        raise UserError(f"frozen=... names all {len(named)} parameters: leave one to train")
    shape = next((p for p in chosen if isinstance(named[p], jax.ShapeDtypeStruct)), None)
    if shape is not None:
        raise UserError(
            f"frozen parameter {shape!r} is a shape: give its array, whose numbers may become part "
            "of the program"
        )

    return _kept(params, named.keys() - chosen), _kept(params, chosen)


def without(params: Tree, frozen: Tree) -> Tree:
    """What is trained of ``params``, which may have all leaves."""
    held = {path for path, _ in paths_of(frozen)}
    return _kept(params, {path for path, _ in paths_of(params)} - held)


def _kept(tree: Tree, paths: Collection[str]) -> Tree:
    leaves = [leaf if path in paths else None for path, leaf in paths_of(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def joined(trained: Tree, frozen: Tree) -> Tree:
    """The inverse of `parted`."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda leaf: leaf is None
    )


def of_trained(loss: Callable[..., Any], frozen: Tree) -> Callable[..., Any]:
    """``loss`` as a function of what is trained."""

    def closed(trained: Tree, batch: Mapping[str, Any]) -> Any:
        return loss(joined(trained, frozen), batch)

    return closed


def held_by(step: Step, state: Mapping[str, Any], frozen: Tree) -> Tree:
    """Copies of the frozen parameters as they lie on the devices, those of ``state`` and what is
    part of the program: steps write over the state."""
    places = _places(step.layout)

    def array(path: str, leaf: Any) -> Any:
        if _HELD + path in places:
            key, layer = places[_HELD + path]
            return jnp.copy(state[key] if layer is None else state[key][layer])
        return put(leaf, NamedSharding(step.mesh, PartitionSpec()))

    leaves = [array(path, leaf) for path, leaf in paths_of(frozen)]
    return jax.tree.unflatten(jax.tree.structure(frozen), leaves)


def _places(layout: Layout) -> dict[str, tuple[str, int | None]]:
    return {
        name: (leaf.key, i if leaf.layers else None)
        for leaf in layout.frozen.values()
        for i, name in enumerate(leaf.names)
    }
