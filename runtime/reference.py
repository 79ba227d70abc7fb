"""The original model on one device in float64: what every plan is compared with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.errors import UserError
from autopar.frontends.losses import find_loss
from autopar.runtime.batches import Batch
from autopar.runtime.grouped_product import NAMES, grouped_product
from autopar.runtime.recording import named_tensors
from autopar.runtime.stand_ins import drawn_fixed
from autopar.runtime.verified import NEGLIGIBLE
from autopar.workload import Workload

STEPS = 2
MEASUREMENTS = 2
"""How often rounding is measured: that of a single number may be small by chance."""


class VerifyError(UserError):
    """Something that keeps a plan from being compared with its model."""


class NoDropout(TorchFunctionMode):
    """Inside, dropout does nothing and random numbers are fixed ones (`stand_ins`): what is drawn
    cannot agree between layouts."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "").partition(".")[0]  # aten ops name their overload
        if name == "backward":
            with self._in_backward():
                return func(*args, **kwargs)
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        fixed = drawn_fixed(name, func, args, kwargs)
        if fixed is not None:
            return fixed
        place = _place_of_dropout(name, args)
        if place is not None:
            args = (*args[:place], 0.0, *args[place + 1 :]) if len(args) > place else args
        if name in _DROPPING or name in _RECURRENT:
            shares = ("dropout_p", "dropout", "p")
            kwargs = {k: 0.0 if k in shares else v for k, v in kwargs.items()}
        return func(*args, **kwargs)

    @contextmanager
    def _in_backward(self) -> Iterator[None]:
        """``backward`` is a function that a mode handles, so the mode is off while it runs; what is
        recomputed there needs it all the same."""
        autograd: Any = torch.autograd
        engine = autograd._engine_run_backward

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return engine(*args, **kwargs)

        autograd._engine_run_backward = run
        try:
            yield
        finally:
            autograd._engine_run_backward = engine


class Exact(NoDropout):
    """Inside, every floating dtype that is asked for means float64 as well.

    Models cast to float32 on purpose (norms, softmax, rotary embedding, loss), and programs to the
    plan's precision; in a float64 run that would lose what a comparison needs.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("float", "half", "bfloat16"):
            return args[0].double()
        args = tuple(map(_widened, args))
        kwargs = {key: _widened(value) for key, value in (kwargs or {}).items()}
        if func is F.rms_norm and kwargs.get("eps", args[3] if len(args) > 3 else None) is None:
            # torch's own is the smallest step of the dtype that it computes in: that of float32
            args, kwargs["eps"] = args[:3], torch.finfo(torch.float32).eps
        if _in_groups(func, args):
            return grouped_product(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


def _in_groups(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is a product of groups that torch has no kernel for."""
    if getattr(func, "__name__", "") not in NAMES or len(args) < 2:
        return False
    return args[0].dtype is torch.float64 and (args[0].dim(), args[1].dim()) == (2, 3)


def _widened(value: Any) -> Any:
    floats = (torch.float32, torch.bfloat16, torch.float16)
    return torch.float64 if isinstance(value, torch.dtype) and value in floats else value


_DROPOUTS = frozenset(
    {
        "dropout",
        "dropout_",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "alpha_dropout_",
        "feature_dropout",
        "feature_dropout_",
        "feature_alpha_dropout",
        "feature_alpha_dropout_",
    }
)
_DROPPING = {
    "native_dropout": 1,
    "scaled_dot_product_attention": 4,
    "multi_head_attention_forward": 10,
}
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


def _place_of_dropout(name: str, args: tuple[Any, ...]) -> int | None:
    """Where a call that drops out inside takes its share; the mode does not see what it calls."""
    if name in _RECURRENT and len(args) > 3:
        return 5 if isinstance(args[3], bool) else 6  # packed sequences have their sizes before
    return _DROPPING.get(name)


@contextmanager
def exact() -> Iterator[None]:
    """`Exact`, with float64 as the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Exact():
            yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True, slots=True)
class Reference:
    """``STEPS`` steps from the initial weights on one batch.

    gradients: by step and name, before clipping; only what has one.
    weights:   parameters, floating buffers and tensor attributes after the last step.
    alias:     every name of a tensor -> the name that it has here.
    moved:     norm of what the steps changed of each parameter.
    noise:     by step, norm of what rounding changes of a gradient, where it was measured.
    """

    batch: dict[str, Any]
    losses: tuple[float, ...]
    gradients: tuple[dict[str, torch.Tensor], ...]
    weights: dict[str, torch.Tensor]
    alias: dict[str, str]
    moved: dict[str, float]
    noise: tuple[dict[str, float], ...]

    def weights_norm(self) -> float:
        return _norm(self.weights)

    def gradients_norm(self, step: int) -> float:
        return _norm(self.gradients[step])


def _norm(tensors: Mapping[str, torch.Tensor]) -> float:
    return float(torch.stack([t.norm() for t in tensors.values()]).norm()) if tensors else 0.0


def reference(workload: Workload, batch: Batch, device: torch.device) -> Reference:
    """Trains the original model for `STEPS` steps on ``batch``, whose floats must be float64.

    Raises `VerifyError` where the model's result is no loss.
    """
    model = _built(workload).to(device)
    optimizer = plain_optimizer(workload, model)
    losses: list[float] = []
    gradients: list[dict[str, torch.Tensor]] = []
    noise: list[dict[str, float]] = []
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    given = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in batch.items()}
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)
        with exact():
            loss = loss_of(model(**given))
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            raise VerifyError(
                f"the model's own loss on one device is {losses[-1]} in step {len(losses) - 1}, so "
                "there is nothing to compare with. Verification draws a random batch with the "
                "range, mean and spread of batch(): give one whose values are like real data"
            )
        gradients.append(_gradients_of(model))
        noise.append(_noise(workload, model, given, gradients[-1]))
        if workload.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), workload.clip_norm)
        optimizer.step()
    weights = {n: p.detach() for n, p in model.named_parameters()}
    weights |= {n: b for n, b in model.named_buffers() if b.is_floating_point()}
    moved = {n: float((weights[n] - p).norm()) for n, p in before.items()}
    return Reference(
        dict(batch), tuple(losses), tuple(gradients), weights, aliases(model), moved, tuple(noise)
    )


def _gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g.detach().clone() for n, g in found.items()}


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
    found = dict.fromkeys(small, 0.0)
    for _ in range(MEASUREMENTS):
        other = _built(workload).to(next(iter(gradients.values())).device)
        with torch.no_grad():
            for (_, to), (_, now) in zip(named_tensors(other), named_tensors(model), strict=True):
                to.copy_(_moved(now, generator))
        near = {
            n: _moved(v, generator) if isinstance(v, torch.Tensor) else v for n, v in batch.items()
        }
        with exact():
            loss_of(other(**near)).backward()  # type: ignore[no-untyped-call]
        changed = _gradients_of(other)
        for name in small:
            found[name] = max(found[name], float((changed[name] - gradients[name]).norm()))
    return found


def _moved(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Every number of a floating tensor one unit in its last place up or down."""
    if not tensor.is_floating_point():
        return tensor
    up = torch.randint(2, tensor.shape, generator=generator).to(tensor.device)
    return tensor.detach() * (1 + torch.finfo(tensor.dtype).eps * (2 * up - 1).to(tensor.dtype))


def _built(workload: Workload) -> nn.Module:
    """The model with its initial weights in float64."""
    assert workload.model is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(workload.seed)
        model: nn.Module = workload.model()
        return model.double()


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
    found = find_loss(result)
    if found is None or found.numel() != 1:
        raise VerifyError(f"the model's forward returned a {type(result).__name__} without a loss")
    return found


def random_batch(workload: Workload, seed: int = 1) -> dict[str, Any]:
    """A batch shaped like the workload's, of distinct random tensors.

    Distinct, since a batch that passes one tensor twice hides a program that mixes them up. Ids are
    drawn from the range that the real batch shows at their place in a sample, or anywhere where
    they do not vary there, and negative ones (ignored labels) stay in number; masks, flags and
    floats that are never negative are permuted over the samples; other floats get the real mean and
    spread, in float64. Inputs without a batch dim stay as they are.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        real = workload.batch()
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {}
    for name, value in real.items():
        if not isinstance(value, torch.Tensor):
            found[name] = value
            continue
        value = value.detach().cpu()
        wide = value.double() if value.is_floating_point() else value
        keep = name in workload.whole_inputs or value.dim() == 0 or not value.numel()
        found[name] = wide.clone() if keep else _random_like(wide, generator)
    return found


def _random_like(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    mixed = value[torch.randperm(value.shape[0], generator=generator)]
    low, high = value[value >= 0].min() if bool((value >= 0).any()) else 0, value.max()
    if value.is_floating_point():
        if 0 <= value.min() < high:  # logarithms and roots may be taken of it
            return mixed
        noise = torch.randn(value.shape, dtype=value.dtype, generator=generator)
        spread = value.std() if value.numel() > 1 else torch.zeros(())
        return noise * (spread if spread > 0 else 1.0) + value.mean()
    if value.dtype is torch.bool or high <= 1:
        return mixed
    # A place in the sample may have ids of its own, such as those of one table of many.
    least = torch.where(value < 0, high, value).amin(0)
    most = value.amax(0)
    least, most = (
        torch.where(least < most, own, all_) for own, all_ in ((least, low), (most, high))
    )
    share = torch.rand(value.shape, dtype=torch.float64, generator=generator)
    drawn = least + (share * (most - least + 1)).floor().to(value.dtype)
    return torch.where(mixed < 0, mixed, drawn)
