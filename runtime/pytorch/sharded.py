"""Parameters under FSDP2, over the axes that share their state."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from autopar.lowering.state import magnitude_axes
from autopar.nouns.axes import PIPELINE
from autopar.nouns.prefetch import USUAL
from autopar.nouns.style import Style
from autopar.runtime.pytorch.gathered_ahead import gather_ahead, gather_back
from autopar.runtime.pytorch.held import Held
from autopar.runtime.pytorch.materialise import materialise
from autopar.runtime.pytorch.narrow_gathers import NarrowGathers
from autopar.runtime.pytorch.parameters import cut, region_shape
from autopar.runtime.pytorch.shard_groups import ShardGroups
from autopar.runtime.pytorch.storage import Storage
from autopar.runtime.pytorch.units import is_like, unit_modules
from autopar.runtime.shared.settings import ProgramError
from autopar.torch_private.distributed import fsdp_post_backward


class Sharded(Storage):
    """FSDP2 over the axes that share state, and over ``dp_replicate`` where the mesh has it."""

    def _wrap(self) -> None:
        ranks, settings = self.ranks, self.settings
        named = dict(self.model.named_parameters())
        self._apart = {n for n, p in named.items() if _is_apart(p) or not self.sharing(n)}
        groups = [*unit_modules(self.model, settings.units), self.model]
        shards = ShardGroups(ranks)
        for module in groups:
            materialise(module, ranks.device)  # one unit at a time has its whole piece in memory
            named = dict(self.model.named_parameters())
            ignored = {named[name] for name in self._apart}
            over = {p: self.sharing(name) for name, p in named.items()}
            members = _of_unit(module, ignored)
            fully_shard(
                module,
                mesh=shards.mesh(ranks.mesh.sharing()),
                shard_placement_fn=shards.place({p: over[p] for p in members}),
                reshard_after_forward=settings.split.parameters and module is not self.model,
                mp_policy=self._policy(module, members),
                ignored_params=ignored,
            )
        self.groups: list[FSDPModule] = [m for m in groups if isinstance(m, FSDPModule)]
        self._gather_narrow()
        for group in self.groups:
            group.set_gradient_divide_factor(1.0)
            group.set_force_sum_reduction_for_comms(True)
        staged = ranks.size(PIPELINE) > 1
        if settings.split.parameters and (staged or settings.prefetch != USUAL):
            called = (*unit_modules(self.model, settings.units, in_order=True), self.model)
            ordered = [module for module in called if isinstance(module, FSDPModule)]
            alone = unit_modules(self.model, settings.forward_only)
            ahead = gather_back if settings.prefetch == USUAL else gather_ahead
            ahead(ordered, settings.prefetch, [m for m in ordered if m in alone])

    def _gather_narrow(self) -> None:
        """Weights in 8 bits; in float64 `autopar verify` has them as all others. Raises
        `ProgramError` for a pattern that nothing matches (stages have parts of a model)."""
        named, patterns = dict(self.model.named_parameters()), self.settings.narrow
        missing = [p for p in patterns if not any(is_like(name, p) for name in named)]
        if missing and self.ranks.size(PIPELINE) == 1:
            raise ProgramError(
                f"SETTINGS.narrow names {missing}, and the model has no such parameter"
            )
        weights = {
            name: (parameter, magnitude_axes(self.declared[name].sharding, self.ranks.mesh))
            for name, parameter in named.items()
            if isinstance(parameter, DTensor)
            and parameter.dtype is not torch.float64
            and any(is_like(name, pattern) for pattern in patterns)
        }
        precision = getattr(torch, self.settings.precision)
        self._narrow = NarrowGathers(weights, self.ranks, precision) if weights else None
        if self._narrow is not None:
            join = self._narrow.join
            self.model.register_forward_pre_hook(lambda module, given: join(), prepend=True)

    def _policy(self, module: nn.Module, here: list[nn.Parameter]) -> MixedPrecisionPolicy:
        trained = {p.dtype for p in here if p.requires_grad}
        compute = getattr(torch, self.settings.precision)
        if len(trained) > 1 and compute is not torch.float32:
            raise ProgramError(
                f"parameters of {type(module).__name__} have dtypes {sorted(map(str, trained))}: "
                f"FSDP2 reduces one dtype per unit in {compute}; declare them alike, or plan with "
                "--fix zero=0"
            )
        # Frozen ones may be stored otherwise, as under adapters: FSDP2 gathers bytes then.
        stored = next(iter(trained), next(iter({p.dtype for p in here}), torch.float32))
        wide = any(p.dtype is torch.float32 for p in here)
        lower = compute if wide and compute is not torch.float32 else None
        reduced = stored if lower is not None else None
        if self.settings.reduce_dtype is not None and compute in (torch.bfloat16, torch.float16):
            reduced = getattr(torch, self.settings.reduce_dtype)
        return MixedPrecisionPolicy(
            param_dtype=lower,
            reduce_dtype=reduced,
            cast_forward_inputs=False,
        )

    def _hold(self, name: str, parameter: nn.Parameter) -> Held:
        held = super()._hold(name, parameter)
        if name in self._apart:
            held.reduce = self.reduced_over(held.declared)
            return held
        with torch.no_grad():
            piece = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        sharing = self.sharing(name)
        held.region = cut(held.region, 0, self.ranks.size(*sharing), self.ranks.index(*sharing))
        held.leaf = nn.Parameter(piece.detach(), requires_grad=parameter.requires_grad)
        held.split = tuple(a for a in self.ranks.mesh.axes if a in (*sharing, *held.split))
        assert tuple(piece.shape) == region_shape(held.region), name
        return held

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        split = self.settings.split
        for group in self.groups:
            group.set_requires_gradient_sync(last or split.gradients, recurse=False)
            group.set_requires_all_reduce(last, recurse=False)
            # Zero 1 and 2 have whole parameters: between microbatches nothing is dropped.
            group.set_reshard_after_backward(last or split.parameters, recurse=False)
        yield

    @contextmanager
    def part(self) -> Iterator[None]:
        for group in self.groups:
            group.set_requires_gradient_sync(False, recurse=False)
            group.set_reshard_after_backward(False, recurse=False)
        yield

    def weights(self) -> None:
        fsdp_post_backward(self.groups[-1])

    def collect(self) -> None:
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, held in self.held.items():
                grad = parameters[name].grad
                if grad is not None and name not in self._apart:
                    held.leaf.grad = grad.to_local() if isinstance(grad, DTensor) else grad

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        # A forward alone leaves what the backward behind it would have dropped.
        self._changed()
        try:
            with super().evaluating():
                yield
        finally:
            self.groups[-1].reset_iter_state()

    def zero_grad(self) -> None:
        super().zero_grad()
        self._changed()
        for parameter in self.model.parameters():
            parameter.grad = None

    def _changed(self) -> None:
        if self._narrow is not None:
            self._narrow.change()

    def compile(self, style: Style = "compiled") -> None:
        # FSDP2's hooks sit around the units: what lies between them is compiled.
        self.style = style
        for module in self.layers() or [self.model]:
            module.compile()


def _of_unit(module: nn.Module, ignored: Set[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that FSDP2 shards with ``module``, those of units inside of it left out."""
    return [p for p in module.parameters() if not isinstance(p, DTensor) and p not in ignored]


def _is_apart(parameter: nn.Parameter) -> bool:
    """Whether FSDP2 leaves it as it is: no dim to cut, or no element to gather and to reduce."""
    return parameter.dim() == 0 or parameter.numel() == 0
