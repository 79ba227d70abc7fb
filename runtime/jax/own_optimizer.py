"""An optimizer of the user's own: anything with optax's ``init`` and ``update``.

It sees the parameters as the user's own tree of whole arrays, so that norms over tensors, factored
moments, masks and labels by path mean what they mean on one device. XLA partitions it: what is
element by element runs on the pieces that ``dp_shard`` cuts, as the plan's own optimizer does, and
everything in its state that is shaped as a parameter lies as that parameter's pieces do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from autopar.frontends.jax import paths_of
from autopar.nouns.errors import UserError
from autopar.runtime.jax.parallel import placed
from autopar.runtime.jax.processes import owned
from autopar.runtime.jax.user_tree import Tree, UserTree

Array = Any
Arrays = Mapping[str, Array]


@dataclass(frozen=True)
class OwnOptimizer:
    """``given`` over the parameters of ``tree``; ``specs``: how its state lies on ``mesh``."""

    given: Any
    tree: UserTree
    mesh: Mesh
    shapes: Any
    specs: Any

    @staticmethod
    def of(given: Any, tree: UserTree, mesh: Mesh) -> OwnOptimizer:
        """Raises `UserError` for what is no optimizer, or does not take these parameters."""
        shapes = _shapes(given, tree.shapes)
        return OwnOptimizer(given, tree, mesh, shapes, _specs(shapes, tree))

    def init(self, params: Arrays) -> Any:
        """The optimizer's state for the ``params`` of a program's state, each piece where it
        belongs."""

        def make(params: Arrays) -> Any:
            # some hold the parameters, which a step may not get twice
            return jax.tree.map(jnp.copy, self.given.init(self.tree.tree(params)))

        return jax.jit(make, out_shardings=placed(self.mesh, self.specs))(params)

    def placed(self, state: Any) -> Any:
        """A state of the user's own, each piece where it belongs, in memory of its own. Raises
        `UserError` for one of another tree or other shapes."""
        given, wanted = paths_of(state), paths_of(self.shapes)
        if jax.tree.structure(state) != jax.tree.structure(self.shapes):
            raise UserError(
                f"opt_state: a tree of {len(list(given))} leaves is not that of the optimizer that "
                f"load got, which has {len(list(wanted))}: give what its init or update makes"
            )
        for (path, leaf), (_, shape) in zip(given, wanted, strict=True):
            if tuple(jnp.shape(leaf)) != tuple(shape.shape):
                raise UserError(
                    f"opt_state: {path!r} has shape {list(jnp.shape(leaf))}, and the optimizer's "
                    f"init makes {list(shape.shape)}: give the state for these parameters"
                )
        cast = jax.tree.map(
            lambda leaf, shape: leaf if leaf.dtype == shape.dtype else leaf.astype(shape.dtype),
            jax.tree.map(_array, state),
            self.shapes,
        )
        return owned(cast, placed(self.mesh, self.specs))

    def copying(self) -> Any:
        """A jitted function that copies a state, which steps then leave alone."""
        where = placed(self.mesh, self.specs)
        return jax.jit(lambda state: jax.tree.map(jnp.copy, state), out_shardings=where)

    def updated(
        self, params: Arrays, state: Any, gradients: Arrays, loss: Array
    ) -> tuple[dict[str, Array], Any]:
        """Parameters and state after a step; to be traced. ``loss`` goes to transformations that
        ask for a ``value``, as `optax.contrib.reduce_on_plateau` does."""
        pieces = placed(self.mesh, self.tree.specs(cut=True))
        own = lax.with_sharding_constraint(self.tree.tree(params), pieces)
        asked = {"value": loss} if _takes_more(self.given) else {}
        changes, state = self.given.update(self.tree.tree(gradients), state, own, **asked)
        made = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), own, changes)
        return self.tree.stored(lax.with_sharding_constraint(made, pieces)), state


def state_share(given: Any, params: Tree) -> float:
    """Bytes of the optimizer's state for each byte of ``params``, arrays or shapes.

    Raises `UserError` as `OwnOptimizer.of`.
    """
    state, whole = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if leaf.shape)
        for tree in (_shapes(given, params), params)
    )
    return float(state / max(1, whole))


def _shapes(given: Any, params: Tree) -> Any:
    """The optimizer's state as shapes."""
    if not (hasattr(given, "init") and hasattr(given, "update")) or isinstance(given, type):
        name = getattr(given, "__name__", type(given).__name__)
        call = f"; call it, as in optimizer={name}(1e-3)" if callable(given) else ""
        raise UserError(
            f"optimizer={name}: JAX takes an optax transformation, such as "
            f"optax.adamw(schedule), or anything with its init and update{call}"
        )
    try:
        return jax.eval_shape(given.init, params)
    except Exception as error:  # of the user's transformation
        raise UserError(
            f"the optimizer's init fails on these parameters ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}); give one for the tree that the loss takes"
        ) from error


def norm_of(gradients: Tree) -> Array:
    """The 2-norm of all leaves together, in at least float32; to be traced."""
    squares = (
        jnp.square(g.astype(jnp.promote_types(g.dtype, jnp.float32))).sum()
        for g in jax.tree.leaves(gradients)
    )
    return jnp.sqrt(sum(squares, jnp.zeros(())))


def _array(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)


def _takes_more(given: Any) -> bool:
    return any(kind.__name__ == "GradientTransformationExtraArgs" for kind in type(given).__mro__)


def _specs(shapes: Any, tree: UserTree) -> Any:
    """As the parameter whose path ends a leaf's own, where the shapes are the same; else whole."""
    parameters = {path: tuple(leaf.shape) for path, leaf in paths_of(tree.shapes)}

    def spec(path: str, shape: tuple[int, ...]) -> Any:
        keys = path.split(".")
        for start in range(len(keys)):
            name = ".".join(keys[start:])
            if parameters.get(name) == shape:
                return tree.spec(name, cut=True)
        return PartitionSpec()

    made = [spec(path, tuple(leaf.shape)) for path, leaf in paths_of(shapes)]
    return jax.tree.unflatten(jax.tree.structure(shapes), made)
