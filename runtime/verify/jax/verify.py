"""A JAX plan against the loss function that it was made from, on the plan's own devices.

The reference is the user's own function on one device, differentiated by JAX (`reference`), with
an optimizer written down again (`reference_steps`). Both start from the workload's own initial
parameters, and both step on the gradients of the reference: `autopar.runtime.verify.verified` has
the argument.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.files import plan_folder
from autopar.frontends.jax import Captured, paths_of
from autopar.frontends.jax.capture import capture_workload
from autopar.frontends.jax.draws import Draws
from autopar.frontends.shared.captured import Aux
from autopar.lowering.collectives import Row
from autopar.nouns.plan import Plan
from autopar.nouns.workload import Workload
from autopar.pipeline.schedules.of_plan import schedule_of
from autopar.runtime.jax.aux_tree import tree_of
from autopar.runtime.jax.load import FROM_INIT, check_arrays, check_model_of
from autopar.runtime.jax.parallel import by_name
from autopar.runtime.jax.programs import read_step
from autopar.runtime.jax.staged import Pipeline, StagedAdditions
from autopar.runtime.jax.step import Additions, Step
from autopar.runtime.shared.edits import edits_of, known_edits, raise_edited
from autopar.runtime.shared.planned_batch import batch_of
from autopar.runtime.shared.planned_workload import planned_workload
from autopar.runtime.verify.collectives import priced_of
from autopar.runtime.verify.jax import staged
from autopar.runtime.verify.jax.compiled import issued_collectives
from autopar.runtime.verify.jax.errors import errors
from autopar.runtime.verify.jax.joined import Options, joined
from autopar.runtime.verify.jax.locate import locate
from autopar.runtime.verify.jax.merged import Twins, twins, without_merged
from autopar.runtime.verify.jax.record import Record, in_float64, in_numpy
from autopar.runtime.verify.jax.reference_steps import reference
from autopar.runtime.verify.verified import (
    TOLERANCE,
    VerifyResult,
    narrowest,
    rounding_of,
)

STEPS = 2
DRAWN = "which random numbers follow from the batch's keys; model and program read the same ones"


def verify(folder: str | Path) -> dict[str, Any]:
    """Verifies the plan in ``folder``: a `VerifyResult` as `dataclasses.asdict` gives it."""
    begin = time.perf_counter()
    plan = plan_folder.read_plan(folder)
    workload = planned_workload(folder, plan)
    captured = capture_workload(workload)
    check_model_of(plan, captured, workload, folder)
    assert workload.init is not None
    made = workload.init(jax.random.key(workload.seed))
    check_arrays(made, FROM_INIT)
    tree = jax.tree.map(np.asarray, made)
    batches = [dict(batch_of(workload, i)) for i in range(STEPS)]
    if captured.draws is not None:
        workload, batches = without_keys(workload, captured.draws, batches)
    unchecked = (DRAWN,) if captured.draws is not None and captured.draws.shapes else ()
    with jax.enable_x64(True):
        wide_batches = _in_float64(batches, captured.draws)
        right = reference(workload, tree, batches, captured.stacks)
        named = _named_in_float64(tree, captured)
    try:
        with jax.enable_x64(True):
            lifted = read_step(folder, workload, lift="float64")
            exact = run(lifted, named, wide_batches, right, aux=captured.aux)
        program = read_step(folder, workload)
        own_parameters = by_name(paths_of(tree), captured.stacks) | dict(captured.constants)
        own = run(program, own_parameters, batches, right)
        issued = issued_collectives(program, batches[0], parameters=own_parameters)
    except Exception as error:  # of an edited program, maybe
        raise_edited(error, known_edits(folder, plan, lambda: captured))
        raise
    precision = narrowest(plan_folder.read_graph(folder), plan.precision)

    def under(options: Options) -> list[Row]:
        return issued_collectives(program, batches[0], options, own_parameters)

    alike = _alike(right, tree, captured)
    moved = _moved(priced_of(folder), issued, alike, program, plan, under)
    result = VerifyResult(
        plan=str(folder),
        ranks=plan.device_count,
        exact=errors(exact, right),
        own=errors(own, right, precision, rounding_of(precision)),
        precision=precision,
        computes_in=plan.precision,
        collectives_match=moved.match,
        collective_differences=moved.differences,
        merged=moved.merged,
        joined=moved.joined,
        issued=tuple(asdict(row) for row in issued),
        time_s=time.perf_counter() - begin,
        unchecked=(*unchecked, *right.unchecked),
    )
    if result.passed:
        return asdict(result)
    if result.exact.largest > TOLERANCE and isinstance(program, Additions):
        with jax.enable_x64(True):
            where = locate(folder, plan, captured, workload, named, wide_batches[0])
    else:
        where = edits_of(folder, plan, captured)
    return asdict(replace(result, first_difference=where))


def _named_in_float64(tree: Any, captured: Captured) -> dict[str, Any]:
    """Parameters by full name, and what the loss closes over."""
    wide = jax.tree.map(in_float64, tree)
    return by_name(paths_of(wide), captured.stacks) | wide_constants(captured)


def _in_float64(batches: list[dict[str, Any]], draws: Draws | None) -> list[dict[str, Any]]:
    wide = [{n: in_float64(np.asarray(a)) for n, a in b.items()} for b in batches]
    return wide if draws is None else [b | draws.counted(b, wide=True) for b in wide]


def _alike(right: Record, tree: Any, captured: Captured) -> list[Twins]:
    """The parameters whose gradients are equal in the reference."""
    own = by_name(paths_of(tree), captured.stacks)
    itemsize = {name: np.asarray(a).dtype.itemsize for name, a in own.items()}
    return twins(right.gradients[0], itemsize)


@dataclass(frozen=True, slots=True)
class _Moved:
    """What is priced against what is issued, see `VerifyResult`."""

    match: bool | None = None
    differences: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()


def _moved(
    priced: list[Row] | None,
    issued: list[Row],
    alike: list[Twins],
    program: Step | Pipeline,
    plan: Plan,
    under: Callable[[Options], list[Row]],
) -> _Moved:
    """``alike``: gradients that are equal; ``under``: what a step issues under options of the
    compiler."""
    if priced is None:
        return _Moved()
    lines, merged = without_merged(priced, issued, alike, program.layout.mesh)
    equal = joined(priced, issued, under) if lines else ()
    lines, merged = ([], ()) if equal else (lines, merged)
    if isinstance(program, StagedAdditions):
        lines += staged.out_of_order(program, schedule_of(plan).lists)
    return _Moved(not lines, tuple(lines), merged, equal)


def without_keys(
    workload: Workload, draws: Draws, batches: list[dict[str, Any]]
) -> tuple[Workload, list[dict[str, Any]]]:
    """The loss that takes the random numbers it would draw, and ``batches`` with these: model and
    program are compared on the same ones."""
    return replace(workload, loss=draws.loss), list(map(draws.drawn, batches))


def run(
    step: Step | Pipeline,
    parameters: Mapping[str, Any],
    batches: list[dict[str, Any]],
    right: Record,
    function: Callable[..., Any] | None = None,
    aux: Aux | None = None,
) -> Record:
    """Steps of a program on the gradients that are ``right``, from parameters by full name;
    ``function`` is ``step.watched``; ``aux``: what the loss function returns beside the loss."""
    record = Record()
    layout = step.layout
    state = step.initial(lambda own: own.gather_names(parameters), parameters)
    if step.scales:  # what is compared is the gradient, and not what a scale makes of it
        state["scale"] = {**state["scale"], "scale": jnp.ones_like(state["scale"]["scale"])}
    for batch, given in zip(batches, right.gradients, strict=True):
        arrays = layout.gather_names(given)
        arrays = {key: a.astype(state["params"][key].dtype) for key, a in arrays.items()}
        watched = function or step.watched
        state, loss, gradients, outputs = watched(state, step.cut(batch), arrays)
        record.losses.append(float(loss))
        if aux is not None:
            beside = tree_of(aux, loss, step.outputs.joined(outputs))
            record.outputs.append(in_numpy(dict(paths_of(beside))))
        record.gradients.append(layout.names(in_numpy(gradients)))
    record.weights = layout.names(in_numpy(state["params"]))
    return record


def wide_constants(captured: Captured) -> dict[str, Any]:
    """The arrays that the loss closes over, floats in float64."""
    return {name: in_float64(np.asarray(a)) for name, a in captured.constants.items()}
