"""The original model on one device in float64: what every plan is compared with."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autopar.frontends.shared.losses import find_loss
from autopar.frontends.shared.noise import HAPPENS_ABOVE
from autopar.nouns.errors import UserError
from autopar.nouns.graph import Graph
from autopar.nouns.workload import Workload
from autopar.runtime.pytorch.batches import Batch
from autopar.runtime.pytorch.recording import named_tensors
from autopar.runtime.verify.pytorch import stand_ins
from autopar.runtime.verify.pytorch.evaluation import Evaluation, evaluation
from autopar.runtime.verify.pytorch.modes import exact
from autopar.runtime.verify.verified import NEGLIGIBLE

STEPS = 2
NO_MARKS: Mapping[str, Set[int]] = MappingProxyType({})
MEASUREMENTS = 2
"""How often rounding is measured: that of a single number may be small by chance."""


class VerifyError(UserError):
    """Something that keeps a plan from being compared with its model."""


class NoNumber(VerifyError):
    """The model's own loss is not finite."""


@dataclass(frozen=True, slots=True)
class Reference:
    """``STEPS`` steps from the initial weights on one batch.

    gradients: by step and name, before clipping; only what has one.
    weights:   parameters, floating buffers and tensor attributes after the last step.
    whole:     integer buffers and tensor attributes after the last step, as float64.
    updated:   buffers of the model's state that the forward changed.
    alias:     every name of a tensor -> the name that it has here.
    moved:     norm of what the steps changed of each parameter.
    noise:     by step, norm of what rounding changes of a gradient, where it was measured.
    above:     how likely a bernoulli was so that it happened.
    evaluation: what the model evaluates to after the last step; None: no loss.
    """

    batch: dict[str, Any]
    losses: tuple[float, ...]
    gradients: tuple[dict[str, torch.Tensor], ...]
    weights: dict[str, torch.Tensor]
    whole: dict[str, torch.Tensor]
    updated: frozenset[str]
    alias: dict[str, str]
    moved: dict[str, float]
    noise: tuple[dict[str, float], ...]
    above: float = HAPPENS_ABOVE[0]
    evaluation: Evaluation | None = None

    def weights_norm(self) -> float:
        return _norm(self.weights)

    def gradients_norm(self, step: int) -> float:
        return _norm(self.gradients[step])


def is_compared(tensor: torch.Tensor) -> bool:
    """Of what is no parameter: numbers, and neither masks nor tables of complex ones."""
    return not (tensor.is_complex() or tensor.dtype is torch.bool)


def _norm(tensors: Mapping[str, torch.Tensor]) -> float:
    return float(torch.stack([t.norm() for t in tensors.values()]).norm()) if tensors else 0.0


def reference(workload: Workload, batch: Batch, device: torch.device) -> Reference:
    """Trains the original model for `STEPS` steps on ``batch``, whose floats must be float64.

    Where its loss is no number, unlikely draws happen in another try: a model that masks words by
    chance may have masked none. `stand_ins.above` is then as it was for the result.

    Raises `VerifyError` where the model's result is no loss.
    """
    likely, *others = HAPPENS_ABOVE
    stand_ins.above.set(likely)
    try:
        return _trained(workload, batch, device)
    except NoNumber:
        for unlikely in others:
            stand_ins.above.set(unlikely)
            with suppress(NoNumber):
                return replace(_trained(workload, batch, device), above=unlikely)
        raise


def _trained(workload: Workload, batch: Batch, device: torch.device) -> Reference:
    model = _built(workload).to(device)
    optimizer = plain_optimizer(workload, model)
    losses: list[float] = []
    gradients: list[dict[str, torch.Tensor]] = []
    noise: list[dict[str, float]] = []
    before = {n: in_pairs(p.detach().clone()) for n, p in model.named_parameters()}
    saved = model.state_dict()
    kept = {n: t.detach().clone() for n, t in _unstepped(model) if n in saved}
    given = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in batch.items()}
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)
        with exact():
            loss = loss_of(model(**given))
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            raise NoNumber(
                f"the model's own loss on one device is {losses[-1]} in step {len(losses) - 1}, so "
                "there is nothing to compare with. Verification draws a random batch with the "
                "range, mean and spread of batch(): give one whose values are like real data"
            )
        gradients.append(_gradients_of(model))
        noise.append(_noise(workload, model, given, gradients[-1]))
        if workload.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), workload.clip_norm)
        optimizer.step()
    alias = aliases(model)
    weights = {
        alias.get(n, n): t.detach().clone()
        for n, t in named_tensors(model)
        if t.is_floating_point()
    }
    whole = {
        alias.get(n, n): t.detach().double()
        for n, t in named_tensors(model)
        if is_compared(t) and not t.is_floating_point()
    }
    updated = frozenset(
        alias.get(n, n) for n, t in _unstepped(model) if n in kept and not torch.equal(t, kept[n])
    )
    moved = {n: float((weights[n] - p).norm()) for n, p in before.items()}
    return Reference(
        dict(batch),
        tuple(losses),
        tuple(gradients),
        weights,
        whole,
        updated,
        alias,
        moved,
        tuple(noise),
        evaluation=evaluation(model, given),
    )


def _unstepped(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What the forward alone may change: buffers, and parameters that are not trained."""
    yield from model.named_buffers()
    yield from ((n, p) for n, p in model.named_parameters() if not p.requires_grad)


def _gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: in_pairs(g.detach().clone()) for n, g in gradients.items()}


def in_pairs(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as programs hold them: pairs [..., 2] of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _noise(
    workload: Workload, model: nn.Module, batch: Batch, gradients: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Norm of what rounding changes of the gradients that are small beside the whole one.

    Measured on a second model, whose weights and batch are off by one unit in their last place.
    """
    least = NEGLIGIBLE * _norm(gradients)
    small = [n for n, g in gradients.items() if 0 < float(g.norm()) < least]
    if not small:
        return {}
    generator = torch.Generator().manual_seed(workload.seed)
    noise = dict.fromkeys(small, 0.0)
    for _ in range(MEASUREMENTS):
        other = _built(workload).to(next(iter(gradients.values())).device)
        values = dict(named_tensors(model))
        with torch.no_grad():
            for name, to in named_tensors(other):  # tables that a forward made are not there yet
                to.copy_(_moved(values[name], generator))
        near = {
            n: _moved(v, generator) if isinstance(v, torch.Tensor) else v for n, v in batch.items()
        }
        with exact():
            loss_of(other(**near)).backward()  # type: ignore[no-untyped-call]
        changed = _gradients_of(other)
        for name in small:
            noise[name] = max(noise[name], float((changed[name] - gradients[name]).norm()))
    return noise


def _moved(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Every number of a floating tensor one unit in its last place up or down."""
    if not tensor.is_floating_point():
        return tensor
    up = torch.randint(2, tensor.shape, generator=generator).to(tensor.device)
    return tensor.detach() * (1 + torch.finfo(tensor.dtype).eps * (2 * up - 1).to(tensor.dtype))


def _built(workload: Workload) -> nn.Module:
    """The model with its initial weights in float64, and plain tensor attributes too."""
    assert workload.model is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(workload.seed)
        model: nn.Module = workload.model()
        for module in model.modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    vars(module)[name] = value.double()
        model.double()
        for parameter in model.parameters():
            if parameter.is_complex():
                parameter.data = parameter.data.to(torch.complex128)
        return model


def plain_optimizer(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """The workload's optimizer over a whole model, as one would write it by hand."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if workload.optimizer == "adamw":
        return torch.optim.AdamW(
            parameters,
            lr=workload.learning_rate,
            betas=workload.betas,
            eps=workload.eps,
            weight_decay=workload.weight_decay,
        )
    return torch.optim.SGD(
        parameters, lr=workload.learning_rate, weight_decay=workload.weight_decay
    )


def aliases(model: nn.Module) -> dict[str, str]:
    """Every name of a tensor of ``model`` -> its first name."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(t), name) for name, t in named_tensors(model)}


def loss_of(result: Any) -> torch.Tensor:
    """The loss in what a forward returned, see `find_loss`."""
    loss = find_loss(result)
    if loss is None or loss.numel() != 1:
        raise VerifyError(f"the model's forward returned a {type(result).__name__} without a loss")
    return loss


def marks_of(graph: Graph) -> dict[str, frozenset[int]]:
    """Of batch entries, the numbers that stand for rows of another tensor (tokens of images), or
    for rows that are taken (ends): those that they are compared with, where any such are."""
    every = (graph, *(block.body for block in graph.blocks.values()))
    if not any(op.kind in ("place_rows", "row_places") for part in every for op in part.ops):
        return {}
    marks: dict[str, set[int]] = {}
    entry = {name: name for name in graph.inputs}  # that a tensor has the numbers of
    for op in graph.ops:
        if not op.inputs or op.inputs[0] not in entry:
            continue
        name, other = entry[op.inputs[0]], op.attrs.get("other")
        if op.kind in ("cast", "reshape", "aten::clone"):
            entry[op.outputs[0]] = name
        elif op.kind in ("eq", "ne") and type(other) is int:
            marks.setdefault(name, set()).add(other)
    return {name: frozenset(numbers) for name, numbers in marks.items()}


def random_batch(
    workload: Workload,
    seed: int = 1,
    marks: Mapping[str, Set[int]] = NO_MARKS,
    kept: Collection[str] = (),
) -> dict[str, Any]:
    """A batch shaped like the workload's, of distinct random tensors.

    Distinct, since a batch that passes one tensor twice hides a program that mixes them up. Ids are
    drawn from the range that the real batch shows at their place in a sample, or anywhere where
    they do not vary there, and negative ones (ignored labels) stay in number; masks, flags, lengths
    that add up to one number in every sample, and floats that are never negative are permuted over
    the samples; other floats get the real mean and spread, in float64. Inputs without a batch dim
    stay as they are. ``marks``: numbers by entry that stay where samples have them, see `marks_of`;
    ``kept``: entries that stay whole.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        real = workload.batch()
    generator = torch.Generator().manual_seed(seed)
    batch: dict[str, Any] = {}
    for name, value in real.items():
        if not isinstance(value, torch.Tensor):
            batch[name] = value
            continue
        value = value.detach().cpu()
        wide = value.double() if value.is_floating_point() else value
        stays = name in workload.whole_inputs or name in kept
        keep = stays or value.dim() == 0 or not value.numel()
        batch[name] = wide.clone() if keep else _random_like(wide, generator, marks.get(name, ()))
    return batch


def _adds_up(value: torch.Tensor) -> bool:
    """Whether these are lengths of parts: [b, n], of samples that differ and have one sum."""
    if value.dim() < 2 or bool((value < 0).any()) or bool((value == value[0]).all()):
        return False
    sums = value.flatten(1).sum(1)
    return bool((sums == sums[0]).all())


def _random_like(
    value: torch.Tensor, generator: torch.Generator, marks: Collection[int]
) -> torch.Tensor:
    mixed = value[torch.randperm(value.shape[0], generator=generator)]
    low, high = value[value >= 0].min() if bool((value >= 0).any()) else 0, value.max()
    if value.is_floating_point():
        if 0 <= value.min() < high:  # logarithms and roots may be taken of it
            return mixed
        noise = torch.randn(value.shape, dtype=value.dtype, generator=generator)
        spread = value.std() if value.numel() > 1 else torch.zeros(())
        return noise * (spread if spread > 0 else 1.0) + value.mean()
    if value.dtype is torch.bool or high <= 1 or _adds_up(value):
        return mixed
    # A place in the sample may have ids of its own, such as those of one table of many.
    least = torch.where(value < 0, high, value).amin(0)
    most = value.amax(0)
    least, most = (
        torch.where(least < most, own, all_) for own, all_ in ((least, low), (most, high))
    )
    share = torch.rand(value.shape, dtype=torch.float64, generator=generator)
    drawn = least + (share * (most - least + 1)).floor().to(value.dtype)
    as_it_is = mixed < 0
    for mark in marks:
        as_it_is = as_it_is | (mixed == mark) | (drawn == mark)
    return torch.where(as_it_is, mixed, drawn)
