"""The parameters of a program's state from the user's tree of arrays."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from autopar.frontends.jax import paths_of
from autopar.runtime.jax.parallel import Arrays, by_name, placed, put
from autopar.runtime.jax.processes import owned
from autopar.runtime.jax.step import Step
from autopar.runtime.jax.user_tree import Tree, UserTree


def stored(step: Step, tree: UserTree, given: Tree) -> dict[str, Any]:
    """The parameters of a state from the user's tree of arrays, wherever these are, in memory of
    their own: an array that lies as the state holds it is copied, and no other twice."""
    specs = step.held_specs["params"]
    named, dtypes = dict(paths_of(given)), {p: leaf.dtype for p, leaf in paths_of(tree.shapes)}
    direct = {
        key: named[key]
        for key, leaf in step.layout.trained.items()
        if not leaf.layers and key in named and getattr(named[key], "dtype", None) == dtypes[key]
    }
    made: dict[str, Any] = owned(direct, placed(step.mesh, {key: specs[key] for key in direct}))
    rest = {key: spec for key, spec in specs.items() if key not in direct}
    if not rest:
        return made
    cut = step.layout.splits_parameters
    lying = {path: tree.spec(path, cut) for path in named if path not in direct}

    def make(given: Arrays) -> dict[str, Any]:  # casts and stacks, so XLA makes new arrays
        cast = {path: jnp.copy(a.astype(dtypes[path])) for path, a in given.items()}
        return step.layout.gather_names(by_name(cast.items(), tree.stacks), rest)

    there = put({path: named[path] for path in lying}, placed(step.mesh, lying))
    return {**made, **step.compiled(make, (lying,), rest)(there)}
