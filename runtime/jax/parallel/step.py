"""One training step on the devices of a mesh: a model that is one stage."""

from __future__ import annotations

from types import MappingProxyType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from autopar.runtime.jax.parallel.layout import Layout
from autopar.runtime.jax.parallel.part import Part
from autopar.runtime.jax.parallel.tables import Array, Arrays, State


class Step(Part):
    """The jitted step of ``model.py`` and ``train.py``.

    ``step(state, batch)`` gives the next state, the loss, the norm of the gradient (0 where nothing
    is clipped), and what else the loss function returns. A batch has the microbatches as its first
    dim: [m, samples, ...]; see `Part.cut`.
    """

    def __init__(self, program: ModuleType, workload: Any, train: ModuleType) -> None:
        super().__init__(program, workload, train, Layout.of(program))
        self.outputs: Any = None
        if hasattr(train, "outputs_of"):
            self.outputs = train.outputs_of(program, self.layout)
        given, plain = (self.state_specs, self.batch_specs), PartitionSpec()
        more = (self.outputs.specs,) if self.outputs else ()
        self.step = self.jitted(self._step, given, (self.state_specs, plain, plain, *more), (0,))

    def _step(self, state: State, batch: Arrays) -> tuple[Any, ...]:
        loss, gradients, *outputs = self.train.backward(self, state, batch)
        state, norm = self.train.update(self, state, gradients)
        return state, loss, norm.astype(loss.dtype), *outputs

    def value_and_grad(
        self, state: State, batch: Arrays, own: Arrays | None = None, scale: Array = None
    ) -> tuple[Any, ...]:
        """Loss share and gradients of one microbatch, and a tuple of what `loss` returns beside, if
        anything. The gradients are of ``own``, this device's pieces of parameters that it holds
        whole; None: of what it holds. The loss is multiplied by ``scale`` for backward."""
        params, frozen = state["params"], state["frozen"]
        if self.layout.splits_parameters:
            # else XLA gathers once before the loop over microbatches, and keeps what it gathered
            params, frozen, batch = lax.optimization_barrier((params, frozen, batch))
        whole, own = ({}, params) if own is None else (params, own)

        def share(own: Arrays) -> tuple[Array, tuple[Array, tuple[Array, ...]]]:
            loss, outputs = self.loss(own, frozen, batch, whole)
            return loss if scale is None else loss.astype(scale.dtype) * scale, (loss, outputs)

        (_, (loss, outputs)), gradients = jax.value_and_grad(share, has_aux=True)(own)
        if scale is not None:
            gradients = {k: (g / scale).astype(g.dtype) for k, g in gradients.items()}
        loss = loss.astype(jnp.promote_types(loss.dtype, jnp.float32))
        return (loss, dict(gradients), outputs) if outputs else (loss, dict(gradients))

    def zeros(
        self, state: State, batch: Arrays, own: Arrays | None = None
    ) -> tuple[Array, dict[str, Array]]:
        """Loss and gradients that `value_and_grad` gives of a microbatch, all zero."""
        first = {name: entry[0] for name, entry in batch.items()}
        share, _ = jax.eval_shape(lambda: self.loss(state["params"], state["frozen"], first))
        loss = jnp.zeros((), jnp.promote_types(share.dtype, jnp.float32))
        of = state["params"] if own is None else own
        return loss, {k: jnp.zeros(x.shape, x.dtype) for k, x in of.items()}

    def loss(
        self, own: Arrays, frozen: Arrays, batch: Arrays, whole: Arrays = MappingProxyType({})
    ) -> tuple[Array, tuple[Array, ...]]:
        """This device's share of a microbatch's loss, and what is beside it; ``own``, ``whole``:
        see `Part.paired`."""
        made = self.program.loss(self._given({**own, **frozen}, whole), **self.computing(batch))
        return (made[0], tuple(made[1:])) if isinstance(made, tuple) else (made, ())

    def _given(self, own: Arrays, whole: Arrays) -> dict[str, Any]:
        """What the program's ``loss`` reads: parameters by name, and a `Stack` for each block."""
        pairs, root = self.paired(own, whole), self.layout.root
        prepared = self.prepared(root, {k: pairs[k] for k in root})
        return {**prepared, **{block: self.stack(block, pairs) for block in self.program.BLOCKS}}
