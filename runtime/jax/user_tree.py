"""The parameters as the user's own tree, beside the state of a program that holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autopar.frontends.jax import paths_of
from autopar.runtime.jax.parallel import Layout, Leaf, by_name, stacked
from autopar.runtime.shared.settings import ProgramError

Tree = Any  # the user's, of arrays
Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class UserTree:
    """Which arrays of the state the leaves of a tree are, by the names that the graph gives them.

    shapes: the tree, of shapes and dtypes. stacks: see `by_name`.
    """

    layout: Layout
    shapes: Tree
    stacks: Mapping[str, Sequence[str]]

    @cached_property
    def paths(self) -> tuple[str, ...]:
        return tuple(path for path, _ in paths_of(self.shapes))

    @cached_property
    def _places(self) -> dict[str, tuple[Leaf, int]]:
        leaves = self.layout.trained.values()
        return {name: (leaf, i) for leaf in leaves for i, name in enumerate(leaf.names)}

    def stored(self, tree: Tree) -> dict[str, Any]:
        """The arrays of the state that hold ``tree``; to be traced."""
        return self.layout.gather_names(by_name(paths_of(tree), self.stacks))

    def tree(self, state: Arrays) -> Tree:
        """The inverse, of parameters or of what is shaped as they are; to be traced."""
        return self._built(lambda path: self._array(path, state))

    def specs(self, cut: bool = False) -> Tree:
        """How each leaf lies; ``cut``: over ``dp_shard`` too, see `Layout.specs`."""
        return self._built(lambda path: self.spec(path, cut))

    def spec(self, path: str, cut: bool) -> Any:
        """The partition spec of one leaf."""
        names = self.stacks.get(path)
        leaf, _ = self._places[names[0] if names else path]
        dims = self.layout.spec(leaf, cut)[1 if leaf.layers else 0 :]
        return PartitionSpec(None, *dims) if names else PartitionSpec(*dims)

    def check_program(self) -> None:
        """Raises `ProgramError` where the program has parameters that the tree has not."""
        known = {name for path in self.paths for name in self.stacks.get(path, (path,))}
        missing = [name for name in self._places if name not in known]
        if missing:
            raise ProgramError(
                f"the program needs {missing[0]} and {len(missing) - 1} more that the model's "
                "parameters do not have: plan the model again"
            )

    def check(self, given: Tree, what: str) -> None:
        """Raises `ProgramError` unless ``given`` has the structure and shapes of this tree."""
        ours, theirs = dict(paths_of(self.shapes)), dict(paths_of(given))
        odd = next((p for p in (*ours, *theirs) if (p in ours) != (p in theirs)), None)
        if odd is not None:
            here = "has no" if odd in ours else "has, and the plan's parameters have not,"
            raise ProgramError(
                f"{what} {here} {odd!r}: give a tree like the one that was planned, which has "
                f"{len(ours)} leaves"
            )
        for path, wanted in ours.items():
            if isinstance(theirs[path], jax.ShapeDtypeStruct):
                raise ProgramError(f"{what}: {path!r} is a shape without numbers; give an array")
            shape = tuple(getattr(theirs[path], "shape", ()))
            if shape != tuple(wanted.shape):
                raise ProgramError(
                    f"{what}: {path!r} has shape {list(shape)}, and where the plan was made it has "
                    f"{list(wanted.shape)}; give arrays of that shape, or plan again"
                )

    def _built(self, make: Any) -> Tree:
        return jax.tree.unflatten(jax.tree.structure(self.shapes), list(map(make, self.paths)))

    def _array(self, path: str, state: Arrays) -> Any:
        names = self.stacks.get(path)
        if names is None:
            return self._one(path, state)
        leaf, _ = self._places[names[0]]
        if leaf.names == tuple(names):
            return state[leaf.key]
        return stacked([self._one(name, state) for name in names])

    def _one(self, name: str, state: Arrays) -> Any:
        leaf, i = self._places[name]
        return state[leaf.key][i] if leaf.layers else state[leaf.key]
