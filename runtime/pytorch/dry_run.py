"""Runs a program once where nothing has memory: what does not parse, import or run is told.

One rank of the mesh is taken, on the meta device: every op checks its operands' shapes and dtypes,
and so do the collectives, which need no other rank there. Instances that hold the same run once for
operands of one kind, and so do stages, so that the depth of a model costs nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from autopar.nouns.axes import SAMPLES, SEQUENCES
from autopar.nouns.batch import BatchEntry
from autopar.nouns.mesh import Mesh
from autopar.runtime.pytorch import ranks
from autopar.runtime.pytorch.parameters import computing, declared_in
from autopar.runtime.pytorch.sequence_slices import Sequences, at
from autopar.runtime.pytorch.stage import Stage, Value
from autopar.runtime.shared.imported import failed, imported
from autopar.runtime.shared.settings import Settings
from autopar.torch_private.modules import buffers_of, modules_of, parameters_of


def dry_run(text: str, file: str, batch: Iterable[BatchEntry]) -> None:
    """One forward and backward of the first rank's first microbatch of a global ``batch``.

    Raises `BrokenProgram` with the line that fails.
    """
    module = imported(text, file)
    try:
        _step(module, batch)
    except Exception as error:  # whatever a line of the program can raise
        raise failed(error, text, file) from error


def sent_shapes(text: str, file: str, batch: Iterable[BatchEntry]) -> Mapping[str, tuple[int, ...]]:
    """What stages of a program send each other of a microbatch, local shape by name, where the
    global ``batch`` is another one than was planned. Raises what a line of the program raises."""
    with torch.enable_grad():  # whoever asks may be evaluating
        return _step(imported(text, file), batch, {})


def _step(
    module: ModuleType,
    batch: Iterable[BatchEntry],
    sent: dict[str, torch.Tensor] | None = None,
) -> Mapping[str, tuple[int, ...]]:
    """``sent``: what stages made so far, where it may have other shapes than ``VALUES`` says."""
    settings: Settings = module.SETTINGS
    mesh = Mesh(tuple(module.MESH), tuple(module.MESH.values())).trimmed()
    dtype = getattr(torch, settings.precision)
    dtype = None if dtype is torch.float32 else dtype
    pieces = {e.name: _piece(e, mesh, settings, dtype) for e in batch}
    with ranks.using(_first_of(mesh, module.MESH)), computing(dtype), _draws_given_back():
        if hasattr(module, "STAGES"):
            _stages(module, pieces, sent, settings.seq_slices)
            return {name: tuple(value.shape) for name, value in (sent or {}).items()}
        model = _declared_model(module.Model)
        _once_a_kind(model, module, _kinds(model, {}))
        extra: dict[str, Any] = {}
        if hasattr(type(model), "counts"):
            extra["counts"] = cast(Any, model).counts(pieces)
        torch.autograd.backward(model(**pieces, **extra))
        return {}


def _declared_model(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    declared_in(model)
    return model


def _stages(
    module: ModuleType,
    pieces: Mapping[str, torch.Tensor],
    sent: dict[str, torch.Tensor] | None = None,
    slices: int = 1,
) -> None:
    """Each stage forward and backward by itself, from values as ``VALUES`` declares them, or as
    stages before it made them."""
    stages: tuple[Stage, ...] = module.STAGES
    values: Mapping[str, Value] = module.VALUES
    numbers: dict[Any, int] = {}
    ran: dict[Any, tuple[torch.Tensor, ...]] = {}
    for stage in stages:
        model = _declared_model(stage.module)
        given: list[Any] = []
        for name in stage.takes:
            if name == "counts":
                with at(Sequences(), 0, slices):
                    given.append(cast(Any, model).counts(pieces))
            elif name in values:
                given.append(_declared(values[name]) if sent is None else _leaf(sent[name]))
            else:
                given.append(pieces[name])
        kinds = _kinds(model, numbers)
        key = (kinds[model], *map(_kind, given))
        if key not in ran:
            _once_a_kind(model, module, kinds)
            with at(Sequences(), 0, slices):
                ran[key] = _both_ways(model, given)
        for name, one in zip(stage.gives, ran[key], strict=True):
            if sent is not None and name in values:
                sent[name] = one
            elif name in values and tuple(one.shape) != values[name].shape:
                raise ValueError(
                    f"{name} is {list(one.shape)}, and VALUES declares {list(values[name].shape)}"
                )


def _both_ways(model: nn.Module, given: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """What a stage makes of ``given``, after its backward."""
    made = model(*given)
    several: tuple[torch.Tensor, ...] = made if isinstance(made, tuple) else (made,)
    trained = [one for one in several if one.requires_grad]
    torch.autograd.backward(trained, [torch.empty_like(one) for one in trained])
    return several


def _declared(value: Value) -> torch.Tensor:
    dtype = getattr(torch, value.dtype)
    return torch.empty(value.shape, dtype=dtype, device="meta", requires_grad=value.gradient)


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().requires_grad_(value.requires_grad)


def _piece(
    entry: BatchEntry, mesh: Mesh, settings: Settings, dtype: torch.dtype | None
) -> torch.Tensor:
    shape = entry.shape
    kind = getattr(torch, entry.dtype)
    if entry.name not in settings.whole_inputs and entry.batch_dim is not None:
        ways = settings.microbatches
        for axis in SAMPLES:
            ways *= mesh.size(axis)
        shape = (shape[0] // ways, *shape[1:])
    if entry.name in settings.sequences:
        pieces = mesh.ways(SEQUENCES) * settings.seq_slices
        shape = (shape[0], shape[1] // pieces, *shape[2:])
    if dtype is not None and kind is torch.float32:
        kind = dtype
    return torch.empty(shape, dtype=kind, device="meta")


def _first_of(mesh: Mesh, named: Iterable[str]) -> ranks.Ranks:
    """Rank 0 of a mesh, without processes: what a program asks of `Ranks`."""
    here = SimpleNamespace(
        mesh=mesh,
        named=tuple(named),
        device=torch.device("meta"),
        rank=0,
        coordinates=dict.fromkeys(mesh.axes, 0),
        index=lambda *axes: 0,
        size=lambda *axes: math.prod(mesh.size(a) for a in axes),
        group=lambda *axes: SimpleNamespace(group_name="dry run"),
    )
    return cast(ranks.Ranks, here)


def _once_a_kind(model: nn.Module, module: ModuleType, kinds: Mapping[nn.Module, int]) -> None:
    """Instances of one of the ``kinds`` share what a forward gave for operands of one kind.

    A class says nothing of their sizes: its constructor may be given widths.
    """
    own = [m for m in model.modules() if type(m).__module__ == module.__name__]
    several = Counter(kinds[m] for m in own)
    given: dict[Any, Any] = {}
    for instance in own:
        if several[kinds[instance]] > 1:
            instance.forward = _remembered(instance.forward, kinds[instance], given)
    vars(module).update(recompute=_called)  # what ran once gives nothing to run again


def _kinds(model: nn.Module, numbers: dict[Any, int]) -> dict[nn.Module, int]:
    """A number for every module inside: the same for those of one class with the same tensors,
    settings and modules under the same names. ``numbers``: of what was met before.

    Keys of a `ModuleDict` are counted through the model, in settings that name one too: stages
    differ by the layers that they are told, and go the same way through them.
    """
    kinds: dict[nn.Module, int] = {}
    dicts = [modules_of(m) for m in model.modules() if type(m) is nn.ModuleDict]
    places = {name: n for n, name in enumerate(dict.fromkeys(chain.from_iterable(dicts)))}

    def setting_of(setting: Any) -> str | int:
        return places[setting] if isinstance(setting, str) and setting in places else repr(setting)

    def number(module: nn.Module) -> int:
        if module not in kinds:
            public = (pair for pair in vars(module).items() if not pair[0].startswith("_"))
            settings = [(n, setting_of(v)) for n, v in public]
            held = {**parameters_of(module), **buffers_of(module)}
            tensors = [(n, None if t is None else _kind(t)) for n, t in held.items()]
            named = places if type(module) is nn.ModuleDict else {}
            below = modules_of(module).items()
            inside = [(named.get(n, n), None if m is None else number(m)) for n, m in below]
            kind = (type(module), tuple(settings), tuple(tensors), tuple(inside))
            kinds[module] = numbers.setdefault(kind, len(numbers))
        return kinds[module]

    number(model)
    return kinds


def _called(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args)


def _remembered(plain: Callable[..., Any], kind: int, given: dict[Any, Any]) -> Any:
    def forward(*operands: Any) -> Any:
        key = (kind, *map(_kind, operands))
        if key not in given:
            given[key] = plain(*operands)
        return given[key]

    return forward


def _kind(operand: Any) -> Any:
    """What decides about the result's shape and about its gradient."""
    if isinstance(operand, torch.Tensor):
        return operand.shape, operand.dtype, operand.requires_grad
    return tuple(operand) if isinstance(operand, Mapping) else operand


@contextmanager
def _draws_given_back() -> Iterator[None]:
    """Random numbers drawn inside leave no trace."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
