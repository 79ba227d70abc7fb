"""Holding a program's parameters: plain, under DDP, or under FSDP2.

=====================  =========================================================================
mesh and zero          how the local pieces are held
=====================  =========================================================================
batch not split        plain tensors
zero 0, or no axis     plain tensors under DistributedDataParallel over all axes that split the
that shares state      batch (plain where nothing is trained)
zero 3                 FSDP2: gathered for forward and again for backward, dropped in between
zero 2                 FSDP2: gathered once a step, gradients reduce-scattered every microbatch
zero 1                 FSDP2: gathered once a step, gradients reduce-scattered once a step
=====================  =========================================================================

Splits over other axes are ours alone, and so are those of experts over axes that split the batch:
FSDP2 and DDP see plain local pieces, and the axes of the batch that do not split them.
Whatever must know the whole tensor (norms, checkpoints, initial values) goes by `Held.region`.
Gradients are sums over the data ranks, never means: the loss of a rank is a share of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autopar.lowering.state import split_of
from autopar.nouns.prefetch import USUAL
from autopar.runtime.pytorch.bucket_sums import BucketSums
from autopar.runtime.pytorch.carried import write_carried
from autopar.runtime.pytorch.expert_places import name_layers
from autopar.runtime.pytorch.gathered_ahead import gather_ahead
from autopar.runtime.pytorch.held import Held
from autopar.runtime.pytorch.initialize import Target
from autopar.runtime.pytorch.limits import bring_within
from autopar.runtime.pytorch.loss_scale import LossScale
from autopar.runtime.pytorch.own_functions import gradients_scaled
from autopar.runtime.pytorch.parameters import Declared, Region, cut, declared_in, region_shape
from autopar.runtime.pytorch.phases import Stopwatch
from autopar.runtime.pytorch.portions import weighted
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.shard_groups import ShardGroups
from autopar.runtime.pytorch.two_level import TwoLevelSum
from autopar.runtime.pytorch.units import unit_modules
from autopar.runtime.shared.settings import ProgramError, Settings
from autopar.torch_private.distributed import ddp_ignores, fsdp_post_backward
from autopar.torch_private.modules import buffers_of, parameters_of, unsaved_of


class Storage:
    """A program's model with memory behind its parameters; the base class holds them plain."""

    grad_scale = 1.0
    """What the loss share is multiplied with before backward."""
    compiled = False
    norm_over: None = None
    """All ranks know the same parameters, so each knows over which axes a norm is summed."""

    def __init__(self, model: nn.Module, ranks: Ranks, settings: Settings) -> None:
        self.model = model
        self.ranks = ranks
        self.settings = settings
        self.watch = Stopwatch(ranks.device)
        self.loss_scale = LossScale.of(settings)
        self.declared, self.declared_buffers = declared_in(model)
        self.call: Callable[..., torch.Tensor] = model
        self.orders = name_layers(model, settings.placed, self.declared, ranks.mesh)
        self._materialise_buffers()
        self._wrap()
        self.held = {name: self._hold(name, p) for name, p in self.model.named_parameters()}

    def _wrap(self) -> None:
        materialise(self.model, self.ranks.device)

    def _materialise_buffers(self) -> None:
        for module in self.model.modules():
            for name, buffer in buffers_of(module).items():
                if buffer is not None and buffer.is_meta:
                    buffers_of(module)[name] = unfilled(buffer, self.ranks.device)

    def _hold(self, name: str, parameter: nn.Parameter) -> Held:
        declared = self.declared[name]
        region = declared.region(self.ranks.mesh, self.ranks.coordinates)
        split, late = self._split(declared), self._late(declared)
        order = self.orders.get(name)
        return Held(name, declared, parameter, region, split, late, order=order)

    def _split(self, declared: Declared) -> tuple[str, ...]:
        mesh = self.ranks.mesh
        return tuple(a for a in mesh.axes if declared.sharding.on(a).kind == "S")

    def _late(self, declared: Declared) -> tuple[str, ...]:
        return tuple(a for a in declared.deferred_axes() if self.ranks.mesh.size(a) > 1)

    def _reduced_over(self, declared: Declared) -> tuple[str, ...]:
        """Axes that split the batch and not the parameter, and then `_late`."""
        split = self._split(declared)
        over = {*(a for a in self.ranks.batch_axes if a not in split), *self._late(declared)}
        return tuple(a for a in self.ranks.mesh.axes if a in over)

    def _sharing(self, name: str) -> tuple[str, ...]:
        """The axes that share a parameter's state."""
        return self.ranks.mesh.sharing(split_of(self.declared[name].sharding))

    @property
    def pieces(self) -> list[Held]:
        """Every piece that this rank holds."""
        return list(self.held.values())

    @property
    def persistent(self) -> frozenset[str]:
        """Names of buffers that belong to the model's state dict."""
        return frozenset(
            f"{path}.{name}" if path else name
            for path, module in self.model.named_modules()
            for name in buffers_of(module)
            if name not in unsaved_of(module)
        )

    def targets(self) -> dict[str, Target]:
        """Where the initial values of parameters and buffers go, by name."""
        return targets(self.pieces, self.buffers())

    def forward(self, *given: Mapping[str, Any]) -> torch.Tensor:
        """The model on one microbatch: this rank's share of the loss."""
        with gradients_scaled(self.grad_scale):
            share = self.call(**{name: value for part in given for name, value in part.items()})
        self.watch.lap("forward")
        return weighted(share, given[0])

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, `evaluate` may be called; afterwards nothing of it is left."""
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()

    def evaluate(self, *given: Mapping[str, Any]) -> torch.Tensor:
        """The share of one microbatch, without gradient or dropout."""
        share = self.model(**{name: value for part in given for name, value in part.items()})
        return weighted(share, given[0])

    def backward(self, share: torch.Tensor) -> None:
        """Adds the gradients of ``share`` to those there are."""
        with gradients_scaled(self.grad_scale):
            torch.autograd.backward(share, torch.full_like(share, self.grad_scale))
        self.watch.lap("backward")

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one microbatch of several."""
        return nullcontext()

    def part(self) -> AbstractContextManager[None]:
        """Around a backward that leaves weights out: nothing is reduced."""
        return nullcontext()

    def weights(self) -> None:
        """Behind the rest of such a backward, inside of `microbatch`."""

    def collect(self) -> None:
        """After the last backward: every ``leaf.grad`` is this rank's (so far reduced) gradient."""

    def limit(self) -> None:
        """Brings parameters between the limits that the forward keeps them in."""
        bring_within(self.pieces, self.settings.limits)

    def carry(self) -> None:
        """Buffers hold from here on what the forward left in them."""
        write_carried(self.model)

    def zero_grad(self) -> None:
        for held in self.held.values():
            held.leaf.grad = None

    def buffers(self) -> Iterator[tuple[str, torch.Tensor, Region]]:
        """(name, local tensor, region) of every buffer."""
        for name, buffer in self.model.named_buffers():
            declared = self.declared_buffers[name]
            yield name, buffer, declared.region(self.ranks.mesh, self.ranks.coordinates)

    def compile(self) -> None:
        """`torch.compile` of the whole forward."""
        self.compiled = True
        self.model.compile()


class Replicated(Storage):
    """DistributedDataParallel over the data axes; gradients are reduced in the last microbatch."""

    def _wrap(self) -> None:
        super()._wrap()
        axes = self.ranks.batch_axes
        self._ddp: DistributedDataParallel | None = None
        named = dict(self.model.named_parameters())
        apart = [name for name in named if split_of(self.declared[name].sharding)]
        if not any(p.requires_grad for name, p in named.items() if name not in apart):
            return  # DDP wants a gradient to reduce
        ddp_ignores(self.model, apart)
        if not self.settings.two_level:
            # DDP divides by the number of ranks; the gradient wanted is the sum.
            self.grad_scale = float(self.ranks.size(*axes))
        scale = self.grad_scale
        named = dict(self.model.named_parameters())
        for name in apart:
            if named[name].requires_grad:
                named[name].register_hook(lambda gradient: gradient / scale)  # type: ignore[no-untyped-call]
        self._ddp = DistributedDataParallel(
            self.model,
            process_group=self.ranks.group(*axes),
            forward_sync_buffers=False,
            init_sync=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self.settings.bucket_mib,
        )
        self.call = self._ddp
        if self.settings.two_level:
            self._on_two_levels(self._ddp, [p for n, p in named.items() if n not in apart])

    def _on_two_levels(self, ddp: DistributedDataParallel, reduced: list[nn.Parameter]) -> None:
        """Of `reduced`, sums in place of means come out of backward."""
        groups = self.ranks.two_level_groups(self.ranks.batch_axes, self.settings.two_level)
        whole_bytes = sum(p.nbytes for p in reduced if p.requires_grad)
        BucketSums(TwoLevelSum(groups, whole_bytes)).register(ddp)

    def _hold(self, name: str, parameter: nn.Parameter) -> Held:
        held = super()._hold(name, parameter)
        if split_of(held.declared.sharding):
            held.reduce = self._reduced_over(held.declared)
        return held

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last or self._ddp is None else self._ddp.no_sync()


class Sharded(Storage):
    """FSDP2 over the axes that share state, and over ``dp_replicate`` where the mesh has it."""

    def _wrap(self) -> None:
        ranks, settings = self.ranks, self.settings
        named = dict(self.model.named_parameters())
        self._apart = {n for n, p in named.items() if _is_apart(p) or not self._sharing(n)}
        groups = [*unit_modules(self.model, settings.units), self.model]
        shards = ShardGroups(ranks)
        for module in groups:
            materialise(module, ranks.device)  # one unit at a time has its whole piece in memory
            named = dict(self.model.named_parameters())
            ignored = {named[name] for name in self._apart}
            over = {p: self._sharing(name) for name, p in named.items()}
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
        for group in self.groups:
            group.set_gradient_divide_factor(1.0)
            group.set_force_sum_reduction_for_comms(True)
        if settings.split.parameters and settings.prefetch != USUAL:
            called = (*unit_modules(self.model, settings.units, in_order=True), self.model)
            ordered = [module for module in called if isinstance(module, FSDPModule)]
            alone = unit_modules(self.model, settings.forward_only)
            gather_ahead(ordered, settings.prefetch, [m for m in ordered if m in alone])

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
            held.reduce = self._reduced_over(held.declared)
            return held
        with torch.no_grad():
            piece = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        sharing = self._sharing(name)
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
        try:
            with super().evaluating():
                yield
        finally:
            self.groups[-1].reset_iter_state()

    def zero_grad(self) -> None:
        super().zero_grad()
        for parameter in self.model.parameters():
            parameter.grad = None

    def compile(self) -> None:
        # FSDP2's hooks sit around the units: what lies between them is compiled.
        self.compiled = True
        for group in self.groups[:-1] or self.groups:
            assert isinstance(group, nn.Module)
            group.compile()


def _of_unit(module: nn.Module, ignored: Set[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that FSDP2 shards with ``module``, those of units inside of it left out."""
    return [p for p in module.parameters() if not isinstance(p, DTensor) and p not in ignored]


def _is_apart(parameter: nn.Parameter) -> bool:
    """Whether FSDP2 leaves it as it is: no dim to cut, or no element to gather and to reduce."""
    return parameter.dim() == 0 or parameter.numel() == 0


def targets(
    held: Iterable[Held], buffers: Iterable[tuple[str, torch.Tensor, Region]]
) -> dict[str, Target]:
    """Where the values of parameters and of (name, local tensor, region) go, of each name to all
    that hold it."""
    by_name: dict[str, Target] = {}
    own = ((h.name, Target(h.leaf, h.region, order=h.order)) for h in held)
    for name, target in chain(own, ((n, Target(t, r)) for n, t, r in buffers)):
        known = by_name.get(name)
        twins = () if known is None else (*known.twins, target.tensor)
        by_name[name] = replace(known or target, twins=twins)
    return by_name


def unfilled(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a tensor on meta, full of nan: what nobody fills shows in the first loss, and
    never is what happened to lie there, which may be the right numbers of another tensor."""
    with torch.no_grad():
        made = torch.empty_like(like, device=device)
        if made.is_floating_point() or made.is_complex():
            made.fill_(torch.nan)
        elif made.dtype is not torch.bool:
            made.fill_(torch.iinfo(made.dtype).min)
    return made


def materialise(module: nn.Module, device: torch.device) -> None:
    """Gives every parameter of ``module`` that is still on meta memory of its own; ties stay."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in parameters_of(part).items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    own = unfilled(parameter, device)
                    made[id(parameter)] = nn.Parameter(own, parameter.requires_grad)
                parameters_of(part)[name] = made[id(parameter)]
