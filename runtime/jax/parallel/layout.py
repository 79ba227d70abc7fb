"""Where every parameter of an emitted JAX program lies, and how it gets there from the user's tree.

State is a dict from the key of a parameter to one array; the key is its name, and ``block/name``
for the stacked layers of a block. Over ``dp_shard``, and other axes that split the batch and share
state with it, the first dim that divides is cut, from the level of ZeRO on that the plan has; a
parameter without such a dim stays whole there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from autopar.runtime.jax.parallel.tables import (
    DATA_AXES,
    PIPELINE,
    SAMPLE_AXES,
    SHARING,
    Block,
    Parameter,
    Settings,
    Stage,
)

Spec = Any  # PartitionSpec; jax is not type-checked here


class MissingParameters(KeyError):
    """The program needs parameters that it is not given."""


@dataclass(frozen=True)
class Leaf:
    """One array of the state. ``layers`` are the module paths stacked along dim 0, () for none;
    ``cut`` is the dim of one layer that the axes ``sharing`` cut, None for none. ``summed`` are the
    axes of the batch over which its gradient is a sum: those that do not split it themselves."""

    key: str
    name: str
    parameter: Parameter
    layers: tuple[str, ...]
    cut: int | None
    sharing: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()

    @property
    def dim(self) -> int | None:
        """The dim of the stored array that they cut."""
        return None if self.cut is None else self.cut + bool(self.layers)

    @property
    def names(self) -> tuple[str, ...]:
        """Full names of the parameters in this array."""
        return tuple(f"{layer}.{self.name}" for layer in self.layers) or (self.name,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.layers), *self.parameter.shape) if self.layers else self.parameter.shape

    def axes(self, dim: int) -> tuple[str, ...]:
        """The model axes on ``dim`` of one layer, outermost first."""
        entry = self.parameter.spec[dim] if dim < len(self.parameter.spec) else None
        return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


@dataclass(frozen=True)
class Layout:
    """The leaves of a program with the mesh and settings that place them."""

    mesh: Mapping[str, int]
    settings: Settings
    leaves: Mapping[str, Leaf]

    @staticmethod
    def of(program: ModuleType) -> Layout:
        """The layout of an emitted module, from its tables."""
        return Layout.made(program.MESH, program.SETTINGS, program.PARAMETERS, program.BLOCKS)

    @staticmethod
    def of_stage(program: ModuleType, stage: Stage) -> Layout:
        """That of one stage, on the axes that its devices lie along."""
        mesh = {axis: size for axis, size in program.MESH.items() if axis != PIPELINE}
        settings: Settings = program.SETTINGS
        if stage.recompute is not None:
            settings = replace(settings, recompute=stage.recompute)
        parameters = {name: program.PARAMETERS[name] for name in stage.parameters}
        blocks: Mapping[str, Block] = program.BLOCKS
        held = {name: Block(ls, blocks[name].parameters) for name, ls in stage.layers.items()}
        return Layout.made(mesh, settings, parameters, held)

    @staticmethod
    def of_stages(program: ModuleType, layouts: Sequence[Layout]) -> Layout:
        """That of all stages together, whose keys are of their numbers and their own keys."""
        leaves = {
            f"{n}/{key}": replace(leaf, key=f"{n}/{key}")
            for n, layout in enumerate(layouts)
            for key, leaf in layout.leaves.items()
        }
        return Layout(program.MESH, program.SETTINGS, leaves)

    @staticmethod
    def made(
        mesh: Mapping[str, int],
        settings: Settings,
        parameters: Mapping[str, Parameter],
        blocks: Mapping[str, Block],
    ) -> Layout:
        """Of parameters outside of blocks, and blocks."""
        rows: list[tuple[str, str, Parameter, tuple[str, ...]]] = [
            (name, name, parameter, ()) for name, parameter in parameters.items()
        ]
        for block, stack in blocks.items():
            rows += [(f"{block}/{n}", n, p, stack.layers) for n, p in stack.parameters.items()]
        leaves = {k: _leaf(mesh, settings, k, n, p, ls) for k, n, p, ls in rows}
        return Layout(mesh, settings, leaves)

    def leaves_of(self, block: str) -> list[Leaf]:
        """The arrays that hold the layers of ``block``."""
        return [leaf for key, leaf in self.leaves.items() if key == f"{block}/{leaf.name}"]

    @property
    def root(self) -> dict[str, Leaf]:
        """What is in no block, by key."""
        return {key: leaf for key, leaf in self.leaves.items() if not leaf.layers}

    @property
    def pairs(self) -> bool:
        """Whether gradients are of pieces of parameters that devices hold whole."""
        return self.settings.zero == 2 and self.shards

    @property
    def shards(self) -> bool:
        """Whether any axis cuts state at all."""
        return self.settings.zero >= 1 and any(self.mesh.get(a, 1) > 1 for a in SHARING)

    @cached_property
    def data_axes(self) -> tuple[str, ...]:
        """The axes that split the batch."""
        return tuple(a for a in DATA_AXES if self.mesh.get(a, 1) > 1)

    @cached_property
    def sample_axes(self) -> tuple[str, ...]:
        """Those of them that split its samples."""
        return tuple(a for a in SAMPLE_AXES if self.mesh.get(a, 1) > 1)

    @property
    def splits_parameters(self) -> bool:
        """Whether parameters are gathered where they are read, and pieces between."""
        return self.settings.zero == 3

    def specs(self, cut: bool = False) -> dict[str, Spec]:
        """How each array that is trained lies; ``cut``: over the axes that share it too, where they
        divide a dim and the state is sharded at all."""
        return {key: self.spec(leaf, cut) for key, leaf in self.trained.items()}

    def frozen_specs(self) -> dict[str, Spec]:
        """How the arrays that the loss closes over lie."""
        cut = self.splits_parameters
        return {key: self.spec(leaf, cut) for key, leaf in self.frozen.items()}

    @cached_property
    def trained(self) -> Mapping[str, Leaf]:
        """The leaves that have gradients."""
        return {k: leaf for k, leaf in self.leaves.items() if not leaf.parameter.frozen}

    @cached_property
    def frozen(self) -> Mapping[str, Leaf]:
        """The leaves of arrays that the loss closes over."""
        return {k: leaf for k, leaf in self.leaves.items() if leaf.parameter.frozen}

    def spec(self, leaf: Leaf, cut: bool) -> Spec:
        dims: list[Any] = [leaf.axes(d) for d in range(len(leaf.parameter.shape))]
        if cut and leaf.cut is not None:
            dims[leaf.cut] = (*dims[leaf.cut], *leaf.sharing)
        entries = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in dims]
        lead = (None,) if leaf.layers else ()
        return PartitionSpec(*lead, *entries)

    def cutting_axes(self, leaf: Leaf) -> tuple[str, ...]:
        """Axes on which the ranks hold different pieces of the leaf's reduced gradient."""
        model = [a for d in range(len(leaf.parameter.shape)) for a in leaf.axes(d)]
        return (*model, *(() if leaf.cut is None else leaf.sharing))

    def gather_names(
        self, named: Mapping[str, Any], keys: Iterable[str] | None = None
    ) -> dict[str, Any]:
        """State arrays of what is trained, or of ``keys`` of it, from parameters by full name:
        layers are stacked."""
        leaves = self.trained if keys is None else {key: self.trained[key] for key in keys}
        return self._gathered(leaves, named)

    def gather_frozen(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """The same of arrays that the loss closes over."""
        return self._gathered(self.frozen, named)

    def _gathered(self, leaves: Mapping[str, Leaf], named: Mapping[str, Any]) -> dict[str, Any]:
        missing = [n for leaf in leaves.values() for n in leaf.names if n not in named]
        if missing:
            raise MissingParameters(
                f"the program needs {missing[0]} and {len(missing) - 1} more that the model's "
                "parameters do not have: plan the model again"
            )
        return {
            key: stacked([named[n] for n in leaf.names]) if leaf.layers else named[leaf.name]
            for key, leaf in leaves.items()
        }

    def names(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse: parameters by full name."""
        named: dict[str, Any] = {}
        for key, leaf in self.trained.items():
            array = state[key]
            pieces = [array[i] for i in range(len(leaf.layers))] if leaf.layers else [array]
            named.update(zip(leaf.names, pieces, strict=True))
        return named


def paths_of(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) in tree order; keys and indices joined by dots."""
    leaves, _ = tree_flatten_with_path(tree)
    return [(keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def by_name(
    leaves: Iterable[tuple[str, Any]], stacks: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Parameters under the names of the graph, from (path, array) pairs of the user's tree.

    ``stacks``: for paths that hold the layers of a scan, the names of the slices.
    """
    named: dict[str, Any] = {}
    for path, leaf in leaves:
        if path in stacks:
            named.update((name, leaf[i]) for i, name in enumerate(stacks[path]))
        else:
            named[path] = leaf
    return named


def stacked(layers: Sequence[Any]) -> Any:
    """Arrays of one shape along a new first dim."""
    own = all(isinstance(layer, np.ndarray) for layer in layers)  # and then nothing is compiled
    return np.stack(layers) if own else jnp.stack(layers)


def _leaf(
    mesh: Mapping[str, int],
    settings: Settings,
    key: str,
    name: str,
    parameter: Parameter,
    layers: tuple[str, ...],
) -> Leaf:
    """With the first dim that the axes that share it cut, after the others have cut it."""
    leaf = Leaf(key, name, parameter, layers, None)
    splits = [leaf.axes(d) for d in range(len(parameter.shape))]
    own = {axis for axes in splits for axis in axes}
    summed = tuple(a for a in DATA_AXES if mesh.get(a, 1) > 1 and a not in own)
    leaf = Leaf(key, name, parameter, layers, None, summed=summed)
    sharing = tuple(a for a in SHARING if a in summed)
    shard = math.prod(mesh[a] for a in sharing)
    if shard == 1 or settings.zero < 1 or parameter.buffer:
        return leaf
    degrees = (math.prod(mesh[a] for a in axes) for axes in splits)
    local = [size // degree for size, degree in zip(parameter.shape, degrees, strict=True)]
    cut = next((d for d, size in enumerate(local) if size % shard == 0), None)
    return Leaf(key, name, parameter, layers, cut, sharing if cut is not None else (), summed)
