"""What a user hands over: a model, one global batch, and how it is to be trained.

Importing this module imports neither torch nor jax; what the callables return decides which
frontend captures it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from autopar.nouns.errors import UserError, did_you_mean
from autopar.nouns.optimizer import OPTIMIZERS, is_known

PRECISIONS = ("float32", "bfloat16", "float16", "float64")
DECORATED = "__autopar_workload__"

Class = TypeVar("Class", bound=type)
Made = TypeVar("Made")


class WorkloadError(UserError):
    """A `Workload` that says too little or contradicts itself."""


_OTHERWISE = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "max_grad_norm": "clip_norm",
    "grad_clip": "clip_norm",
    "gradient_clip": "clip_norm",
    "dtype": "precision",
}
"""Names that other libraries have for fields of `Workload`."""


def _names_checked(made: type[Made]) -> type[Made]:
    """Arguments that a `Workload` does not have are a `WorkloadError`, as wrong values are."""
    given_first = made.__init__

    @functools.wraps(given_first)
    def init(self: Made, *unnamed: Any, **given: Any) -> None:
        known = [field.name for field in fields(made)]  # type: ignore[arg-type]
        if unnamed:
            raise WorkloadError(
                "a Workload takes its arguments by name: Workload(model=..., batch=...)"
            )
        for name in given:
            if name not in known:
                meant = did_you_mean(_OTHERWISE.get(name, name), known)
                raise WorkloadError(
                    f"{name}=...: a Workload has no such argument. {meant}There are "
                    f"{', '.join(known)}"
                )
        if "batch" not in given:
            raise WorkloadError(
                "a Workload needs batch=... (a callable that makes one global batch by name)"
            )
        given_first(self, **given)

    made.__init__ = init  # type: ignore[assignment]
    return made


Framework = Literal["torch", "jax"]


@_names_checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model with its batch and optimizer; PyTorch gives ``model``, JAX ``loss`` and ``init``.

    model:         makes the `nn.Module`; its ``forward(**batch)`` returns the scalar loss, a tuple
                   with no other scalar, or a record with ``.loss``. Called under fake tensors: no
                   weights are allocated.
    loss, init:    JAX: ``loss(params, batch)`` is the scalar loss, ``init(key)`` makes the params.
    has_aux:       JAX: the loss function returns ``(loss, aux)``, a tree of other arrays, as for
                   `jax.value_and_grad`; a step gives both.
    batch:         makes one *global* batch by name; dim 0 of every tensor counts the samples. It
                   may take the number of the step.
    optimizer:     ``adamw`` or ``sgd``; ``learning_rate``, ``weight_decay``, ``betas`` and ``eps``
                   are its own.
    clip_norm:     largest norm of the whole gradient; None leaves it as it is.
    precision:     dtype of compute; parameters are stored as the model declares them.
    seed:          seed of the initial weights.
    whole_inputs:  names of batch entries without a batch dim, which every device gets whole.
    document_tokens: of batches that pack documents into samples (PyTorch): how long the document
                   of a token is, in the mean over tokens (sum of squared lengths over sum of
                   lengths), or that of the busiest device, which others wait for. Attention is
                   priced so; None: as one document a sample.

    Raises `WorkloadError`.
    """

    batch: Callable[..., Mapping[str, Any]]
    model: Callable[[], Any] | None = None
    loss: Callable[..., Any] | None = None
    init: Callable[..., Any] | None = None
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip_norm: float | None = None
    precision: str = "float32"
    seed: int = 0
    whole_inputs: tuple[str, ...] = ()
    has_aux: bool = False
    document_tokens: float | None = None

    def __post_init__(self) -> None:
        if (self.model is None) == (self.loss is None):
            raise WorkloadError(
                "a Workload needs either model=... (a callable that makes an nn.Module) or "
                f"loss=... and init=... (JAX); it got {'both' if self.model else 'neither'}"
            )
        if (self.loss is None) != (self.init is None):
            raise WorkloadError("loss=... and init=... go together: init(key) makes loss's params")
        if self.has_aux and self.loss is None:
            raise WorkloadError("has_aux=True goes with a JAX loss, which returns (loss, aux)")
        for name in ("batch", "model", "loss", "init"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise WorkloadError(
                    f"{name}={type(value).__name__}(...) is not callable: write {name}=lambda: "
                    "..., so that it can be made under fake tensors"
                )
        if not isinstance(self.optimizer, str) or not is_known(self.optimizer):
            raise WorkloadError(
                f"optimizer={self.optimizer!r}: choose {' or '.join(OPTIMIZERS)}; one of your own "
                "goes to autopar.plan(..., optimizer=...) and to load, in a script"
            )
        if self.precision not in PRECISIONS:
            raise WorkloadError(f"precision={self.precision!r}: choose {', '.join(PRECISIONS)}")
        self._check_figures()

    def _check_figures(self) -> None:
        """Ranges of what the optimizer takes; frameworks differ in what they let through."""
        _figure("learning_rate", self.learning_rate, "0 or more", least=0.0)
        _figure("weight_decay", self.weight_decay, "0 or more", least=0.0)
        _figure("eps", self.eps, "more than 0", above=0.0)
        if self.clip_norm is not None:
            _figure("clip_norm", self.clip_norm, "more than 0, or None", above=0.0)
        if self.document_tokens is not None:
            _figure("document_tokens", self.document_tokens, "1 or more, or None", least=1.0)
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise WorkloadError(f"betas={self.betas!r}: give two numbers, as in (0.9, 0.999)")
        for i, beta in enumerate(self.betas):
            _figure(f"betas[{i}]", beta, "0 or more and below 1", least=0.0, below=1.0)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise WorkloadError(f"seed={self.seed!r}: give a whole number, 0 or more")

    @property
    def scalar_loss(self) -> Callable[..., Any]:
        """JAX: ``loss`` without what it returns beside."""
        loss = self.loss
        assert loss is not None
        return (lambda params, batch: loss(params, batch)[0]) if self.has_aux else loss

    @property
    def framework(self) -> Framework:
        return "jax" if self.model is None else "torch"


def training(workload: Workload) -> dict[str, str]:
    """What decides about a training's numbers and not about its plan, as text by name.

    ``code``: the files of the workload's functions, without comments; a changed initialisation
    shows there.
    """
    import hashlib  # late: `import autopar` is instant

    names = ("learning_rate", "weight_decay", "betas", "eps", "seed")
    settings = {name: repr(_plain(getattr(workload, name))) for name in names}
    made_by = (workload.model, workload.loss, workload.init, workload.batch)
    files = {_file(call) for call in made_by if call is not None}
    digest = hashlib.sha256()
    for text in sorted(_meaning(Path(file)) for file in files if file):
        digest.update(text.encode())
    if workload.has_aux:
        settings["has_aux"] = "True"
    return {**settings, "code": digest.hexdigest()[:16]}


def _plain(value: Any) -> Any:
    """Numbers that are equal as equal values."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return int(value) if value == int(value) else float(value)


def _file(call: Any) -> str:
    """Where a callable was written. `inspect` looks classes up by their module's name, which may
    be that of another file by now."""
    while isinstance(call, functools.partial):
        call = call.func
    kind = call if isinstance(call, type) else type(call)
    parts = (call, *vars(kind).values())
    return next((str(f.__code__.co_filename) for f in parts if hasattr(f, "__code__")), "")


def _meaning(file: Path) -> str:
    try:
        return _meaning_of(file.read_text())
    except (OSError, ValueError, SyntaxError):
        return ""


@functools.lru_cache(maxsize=8)
def _meaning_of(code: str) -> str:
    """Kept, because a script plans and loads by the same files."""
    import ast

    return ast.dump(ast.parse(code))


def _figure(
    name: str,
    value: Any,
    allowed: str,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> None:
    """Raises `WorkloadError` unless ``value`` is a number in the range."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (value >= least and above < value < below):
        raise WorkloadError(f"{name}={value!r}: give a number, {allowed}")


def parallelize(
    *, batch: Callable[..., Mapping[str, Any]], **options: Any
) -> Callable[[Class], Class]:
    """Class decorator: marks an `nn.Module` as the model of its file and leaves it as it is.

    ``options`` are the other fields of `Workload`. The class is built without arguments.
    """

    def mark(model: Class) -> Class:
        given: object = model
        if not isinstance(given, type):
            name = getattr(model, "__name__", str(model))
            raise WorkloadError(
                f"@autopar.parallelize marks an nn.Module class; {name} is a "
                f"{type(model).__name__}. For a loss function in JAX write workload = "
                "autopar.Workload(loss=..., init=..., batch=...)"
            )
        setattr(model, DECORATED, Workload(model=model, batch=batch, **options))
        return model

    return mark


def workload_of(value: Any) -> Workload | None:
    """The workload that ``value`` is, or that `parallelize` put on it; None for anything else.

    A subclass of a decorated class is not decorated itself.
    """
    if isinstance(value, Workload):
        return value
    if isinstance(value, type):
        workload = value.__dict__.get(DECORATED)
        return workload if isinstance(workload, Workload) else None
    return None
