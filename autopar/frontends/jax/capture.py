"""A JAX loss function to a `Graph`: traced on abstract values, nothing is computed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar.frontends.jax.aux import aux_of, results_of
from autopar.frontends.jax.built import Built, built, built_of_few
from autopar.frontends.jax.constants import held_note
from autopar.frontends.jax.counts import OtherCounts, counts_of
from autopar.frontends.jax.draws import Draws, drawn_entries, drawn_note, draws_of, with_counts
from autopar.frontends.jax.errors import (
    BatchError,
    BuildError,
    CaptureError,
    ControlFlow,
    LossError,
    NoFloat64,
    NotFloating,
    NotScalarLoss,
)
from autopar.frontends.jax.few_layers import Asked, few_in_half
from autopar.frontends.jax.inputs import (
    abstract_batch,
    abstract_parameters,
    batch_entries,
    is_key,
    model_tensors,
    samples_of,
)
from autopar.frontends.jax.interpret import flat_parameters
from autopar.frontends.jax.pairs import has_complex, without_complex
from autopar.frontends.jax.remarks import remarks, untrained_note
from autopar.frontends.shared.captured import Aux, Captured
from autopar.frontends.shared.kept_state import KeptState
from autopar.frontends.shared.places import UNKNOWN, declared, last_line
from autopar.nouns.batch import BatchEntry, sample_dims, tokens_of
from autopar.nouns.workload import Workload
from autopar.rules.joined_samples import in_turns, joined_note

Loss = Callable[[Any, Mapping[str, Any]], Any]


def capture(
    loss: Loss,
    params: Any,
    batch: Mapping[str, Any],
    whole_inputs: tuple[str, ...] = (),
    precision: str = "float32",
    has_aux: bool = False,
) -> Captured:
    """The graph of ``loss(params, batch)``.

    ``params`` is a tree and ``batch`` a dict of arrays or of anything with shape and dtype; only
    shapes are looked at. ``whole_inputs`` names batch entries without a batch dim; ``precision`` is
    that of the workload: casts that the loss asks for in it are ops of the graph. ``has_aux``: the
    loss returns a pair, and what is in its second part are further results of the graph. Raises
    `CaptureError` and its kinds.
    """
    params = abstract_parameters(params)
    batch = abstract_batch(batch)
    flat = results_of(loss) if has_aux else loss
    given = {n: v for n, v in batch.items() if not is_key(v)}
    entries = batch_entries(given, tuple(n for n in whole_inputs if n in given or n not in batch))
    asked = Asked(loss, flat, params, batch, precision)
    few = None if has_aux else few_in_half(asked)
    if few is not None and counts_of(flat, few.closed, few.paths, batch, _small(entries)):
        few = None  # what is counted leaves the loss that has all layers
    made = None if few is None else built_of_few(asked, few)
    if few is not None and made is not None:
        return _captured(made, few.closed, asked, entries)
    try:
        return _all_layers(asked, entries, has_aux)
    except OtherCounts:  # in half precision: they stay in the loss
        return _all_layers(asked, entries, has_aux, counted=False)


def _all_layers(
    asked: Asked, entries: tuple[BatchEntry, ...], has_aux: bool, counted: bool = True
) -> Captured:
    """``counted``: counts leave the loss. Raises `OtherCounts`."""
    loss, flat, params, batch = asked.loss, asked.flat, asked.params, asked.batch
    closed, shapes = _jaxpr(loss, flat, params, batch, has_aux)
    draws = draws_of(flat, closed, params, batch)
    if draws is not None:
        flat, batch = draws.loss, draws.planned()
        closed, shapes = _jaxpr(loss, flat, params, batch, has_aux)
        entries = tuple(e for e in entries if e.name in batch)
    counts = counts_of(flat, closed, params, batch, _small(entries)) if counted else None
    if counts is not None:
        draws = with_counts(draws, flat, closed, params, batch, counts)
        flat, batch = counts.loss, counts.planned()
        closed, shapes = _jaxpr(loss, flat, params, batch, has_aux)
    if has_complex(closed.jaxpr):
        flat = without_complex(flat)
        closed, shapes = _jaxpr(loss, flat, params, batch, has_aux)
    samples_of(entries)  # an entry whose samples differ is told before what the loss does
    kept = frozenset(() if counts is None else counts.shapes)
    made = built(replace(asked, flat=flat, batch=batch, counts=kept), closed)
    aux = aux_of(shapes, made.results) if has_aux else None
    return _captured(made, closed, asked, entries, draws, aux)


def _captured(
    made: Built,
    closed: Any,
    asked: Asked,
    entries: tuple[BatchEntry, ...],
    draws: Draws | None = None,
    aux: Aux | None = None,
) -> Captured:
    graph, joined = in_turns(made.graph, sample_dims(entries))
    named = flat_parameters(made.arrays, made.stacks)
    tensors = model_tensors(graph)
    held = {n: a for n, a in named.items() if n in tensors}
    samples = samples_of(entries)
    if draws is not None:
        entries = (*entries, *drawn_entries(graph, entries, draws))
    return Captured(
        graph,
        tensors,
        entries,
        samples,
        tokens_of(entries),
        stacks=made.stacks,
        constants=held,
        aux=aux,
        draws=draws,
        notes=(
            *remarks(closed, asked.precision, made.casts, made.graph),
            *joined_note(joined),
            *held_note(held),
            *drawn_note(draws),
            *untrained_note(made.untrained),
        ),
    )


def capture_workload(workload: Workload) -> Captured:
    """`capture` of a workload that gives ``loss``, ``init`` and ``batch``; nothing is computed."""
    assert workload.loss is not None
    assert workload.init is not None
    with KeptState(workload, lambda value: isinstance(value, jax.core.Tracer)) as state:
        captured = _capture_workload(workload, workload.loss, workload.init)
    return replace(captured, notes=(*captured.notes, *state.notes))


def _capture_workload(workload: Workload, loss: Loss, init: Callable[..., Any]) -> Captured:
    if workload.precision == "float64" and jax.dtypes.canonicalize_dtype("float64") != "float64":
        raise NoFloat64(
            'precision="float64": jax computes in 32 bits here, and would round every number to '
            'them. Write jax.config.update("jax_enable_x64", True) at the top of the file, or set '
            'JAX_ENABLE_X64=1; or choose precision="float32"'
        )
    params = _parameters(init, workload.seed)
    batch = _batch(workload.batch)
    try:
        whole, precision = workload.whole_inputs, workload.precision
        return capture(loss, params, batch, whole, precision, workload.has_aux)
    except BatchError as error:
        raise BatchError(f"{_declared(workload.batch)}: {error}") from error
    except NotFloating as error:
        raise NotFloating(f"{_declared(init)}: {error}") from error


def _parameters(init: Callable[..., Any], seed: int) -> Any:
    """Shapes of what ``init`` makes."""
    try:
        return jax.eval_shape(init, jax.random.key(seed))
    except Exception as error:  # a user's function
        raise BuildError(
            f"{_place(error, init)}: making the parameters failed: {_first_line(error)}\n"
            "init(key) takes one random key and returns a tree of floating-point arrays; the "
            "values are not there while it is traced"
        ) from error


def _batch(make: Callable[..., Any]) -> Any:
    try:
        return make()
    except Exception as error:  # a user's function
        raise BuildError(
            f"{_place(error, make)}: making the batch failed: {_first_line(error)}\n"
            "batch() takes no argument or one with a default, the number of the step: "
            "def batch(step=0)"
        ) from error


def _small(entries: Sequence[BatchEntry]) -> list[str]:
    """Entries with a number a token at most: every device may have them whole, to count."""
    return [e.name for e in entries if e.batch_dim is not None and len(e.shape) <= 2]


def _jaxpr(
    loss: Loss, flat: Loss, params: Any, batch: Mapping[str, Any], has_aux: bool
) -> tuple[Any, Any]:
    """The jaxpr of ``flat``, which is ``loss`` or its results in a row, and the shapes of what it
    returns."""
    try:
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(params, batch)
    except jax.errors.ConcretizationTypeError as error:
        text = str(error).partition("\n")[0]
        raise ControlFlow(
            f"{_place(error, loss)}: the loss needs the value of an array while it is traced "
            f"({text}). The program must be the same for every batch: replace if, int() and bool() "
            "on arrays by jnp.where"
        ) from error
    except CaptureError:
        raise
    except Exception as error:  # a user's function
        raise LossError(
            f"{_place(error, loss)}: the loss failed: {_first_line(error)}\nIt is called as "
            f"loss(params, batch); the batch has {_shapes(batch)}"
        ) from error
    leaves = jax.tree.leaves(shapes[0] if has_aux else shapes)
    single = len(leaves) == 1 and leaves[0].shape == () and "float" in str(leaves[0].dtype)
    if not single:
        shown = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves) or "nothing"
        raise NotScalarLoss(
            f"the loss function returns {shown}, not one floating-point number: reduce it, as in "
            "losses.mean(); has_aux=True is for one that returns (loss, aux)"
        )
    return closed, shapes


def _shapes(batch: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value.dtype}{list(value.shape)}" for name, value in batch.items())


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _place(error: Exception, function: Callable[..., Any]) -> str:
    """Where the user's code failed; where ``function`` stands if none of its lines ran."""
    place = last_line(error, _is_internal)
    return _declared(function) if place == UNKNOWN else place


def _declared(function: Callable[..., Any]) -> str:
    place = declared(function, _is_internal)
    return getattr(function, "__name__", repr(function)) if place == UNKNOWN else place


_FOLDERS = (Path(__file__).parents[2], *(Path(inspect.getfile(m)).parent for m in (jax, np)))
_LIBRARIES = tuple(f"{folder}/" for folder in _FOLDERS)


def _is_internal(file: str) -> bool:
    """Whether ``file`` is ours or a library's, so no place to show to a user."""
    return file.startswith((*_LIBRARIES, "<"))
