"""A JAX plan against the loss function that it was made from, on the plan's own devices.

The reference is the user's own function on one device, differentiated by JAX (`jax_reference`),
with an optimizer written down again here. Both start from the workload's own initial parameters,
and both step on the gradients of the reference: `autopar.runtime.verify.verified` has the argument.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
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
from autopar.runtime.verify.jax import counting, staged
from autopar.runtime.verify.jax.joined import Options, joined
from autopar.runtime.verify.jax.locate import locate
from autopar.runtime.verify.jax.merged import twins, without_merged
from autopar.runtime.verify.jax.reference import reference_of
from autopar.runtime.verify.verified import (
    MARGIN,
    NEGLIGIBLE,
    SMALLEST,
    TOLERANCE,
    Errors,
    VerifyResult,
    gradient_scale,
    narrowest,
    rounding_of,
    weight_scale,
)

STEPS = 2
MEASUREMENTS = 2
"""How often rounding is measured: that of a single number may be small by chance."""
DRAWN = "which random numbers follow from the batch's keys; model and program read the same ones"
Named = dict[str, np.ndarray]


@dataclass(slots=True)
class Record:
    """What a run gave: loss and gradients of each step, and what the loss function returns beside
    the loss, by its path there; weights after the last.

    moved, noise: of the reference, norms by name as in `verify.pytorch.reference.Reference`.
    unchecked:    what comparing with it cannot see.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[Named] = field(default_factory=list)
    outputs: list[Named] = field(default_factory=list)
    weights: Named = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    noise: list[dict[str, float]] = field(default_factory=list)
    output_noise: list[dict[str, float]] = field(default_factory=list)
    unchecked: tuple[str, ...] = ()


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
    unchecked: tuple[str, ...] = ()
    if captured.draws is not None:
        workload, batches = without_keys(workload, captured.draws, batches)
        unchecked = (DRAWN,) if captured.draws.shapes else ()
    with jax.enable_x64(True):
        wide = jax.tree.map(_float64, tree)
        wide_batches = [{n: _float64(np.asarray(a)) for n, a in b.items()} for b in batches]
        if captured.draws is not None:
            wide_batches = [b | captured.draws.counted(b, wide=True) for b in wide_batches]
        right = reference(workload, tree, batches, captured.stacks)
        named = by_name(paths_of(wide), captured.stacks) | wide_constants(captured)
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
    rounding = rounding_of(precision)
    priced = priced_of(folder)
    lines, merged = _compared(priced or [], issued, right, tree, captured, program)
    equal: tuple[str, ...] = ()
    if priced is not None and lines:

        def under(options: Options) -> list[Row]:
            return issued_collectives(program, batches[0], options, own_parameters)

        equal = joined(priced, issued, under)
        lines, merged = ([], ()) if equal else (lines, merged)
    if isinstance(program, StagedAdditions):
        lines += staged.out_of_order(program, schedule_of(plan).lists)
    result = VerifyResult(
        plan=str(folder),
        ranks=plan.device_count,
        exact=errors(exact, right),
        own=errors(own, right, precision, rounding),
        precision=precision,
        computes_in=plan.precision,
        collectives_match=None if priced is None else not lines,
        collective_differences=() if priced is None else tuple(lines),
        merged=() if priced is None else merged,
        joined=equal,
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


def _compared(
    priced: list[Row],
    issued: list[Row],
    right: Record,
    tree: Any,
    captured: Captured,
    program: Step | Pipeline,
) -> tuple[list[str], tuple[str, ...]]:
    """`without_merged` for the gradients of the reference."""
    own = by_name(paths_of(tree), captured.stacks)
    itemsize = {name: np.asarray(a).dtype.itemsize for name, a in own.items()}
    alike = twins(right.gradients[0], itemsize)
    return without_merged(priced, issued, alike, program.layout.mesh)


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
            record.outputs.append(_numpy(dict(paths_of(beside))))
        record.gradients.append(layout.names(_numpy(gradients)))
    record.weights = layout.names(_numpy(state["params"]))
    return record


def reference(
    workload: Workload,
    params: Any,
    batches: list[dict[str, Any]],
    stacks: Mapping[str, tuple[str, ...]],
) -> Record:
    """Steps of the user's own function on one device, in float64; ``params`` and ``batches`` in the
    dtypes that the user gives them, 64-bit types enabled."""
    assert workload.loss is not None
    has_aux = workload.has_aux
    given = reference_of(workload.loss, params, batches[0], has_aux)

    def run(params: Any, batch: Mapping[str, Any]) -> Any:
        made, gradients = given.function(params, batch)
        return made if has_aux else (made, ()), gradients

    function = jax.jit(run)
    record = Record(unchecked=given.unchecked)
    params = jax.tree.map(lambda a: _float64(np.asarray(a)), params)
    batches = [{n: _float64(np.asarray(a)) for n, a in b.items()} for b in batches]
    before = _named(params, stacks)
    slots: dict[str, Named] = {"m": {}, "v": {}}
    structure = jax.tree.structure(params)
    paths = [path for path, _ in paths_of(params)]
    for number, batch in enumerate(batches, 1):
        (loss, beside), gradients = function(params, batch)
        record.losses.append(float(loss))
        record.outputs.append(_numpy(dict(paths_of(beside))))
        flat = {path: np.asarray(g) for path, g in paths_of(gradients)}
        record.gradients.append(by_name(flat.items(), stacks))
        known = record.gradients[-1], record.outputs[-1]
        noise, beside = _noise(function, params, batch, *known, stacks)
        record.noise.append(noise)
        record.output_noise.append(beside)
        if workload.clip_norm is not None:
            norm = math.sqrt(sum(float(np.square(g).sum()) for g in flat.values()))
            factor = min(1.0, workload.clip_norm / (norm + 1e-6))
            flat = {path: g * factor for path, g in flat.items()}
        weights = {path: np.asarray(p) for path, p in paths_of(params)}
        for path, weight in weights.items():
            weights[path] = _updated(workload, number, path, weight, flat[path], slots)
        params = jax.tree.unflatten(structure, [jnp.asarray(weights[p]) for p in paths])
    record.weights = _named(params, stacks)
    record.moved = {n: float(np.linalg.norm(record.weights[n] - p)) for n, p in before.items()}
    return record


def _noise(
    function: Callable[..., Any],
    params: Any,
    batch: Mapping[str, Any],
    gradients: Named,
    outputs: Named,
    stacks: Mapping[str, tuple[str, ...]],
) -> tuple[dict[str, float], dict[str, float]]:
    """Norm of what rounding changes of the gradients that are small beside the whole one, and of
    what is beside the loss: weights and batch are off by one unit in their last place."""
    norms = {n: float(np.linalg.norm(g)) for n, g in gradients.items()}
    least = NEGLIGIBLE * _norm_of_all(gradients)
    noise = {n: 0.0 for n, norm in norms.items() if 0 < norm < least}
    beside = dict.fromkeys(outputs, 0.0)
    draws = np.random.default_rng(0)

    def moved(a: Any) -> Any:
        if a.dtype != np.float64:
            return a
        return a * (1 + np.finfo(np.float64).eps * draws.choice((-1.0, 1.0), a.shape))

    for _ in range(MEASUREMENTS if noise or beside else 0):
        near = jax.tree.map(moved, params), {n: moved(a) for n, a in batch.items()}
        (_, others), changed = function(*near)
        named = _named(changed, stacks)
        for name in noise:
            noise[name] = max(noise[name], float(np.linalg.norm(named[name] - gradients[name])))
        for name, array in paths_of(others):
            beside[name] = max(beside[name], apart(np.asarray(array), outputs[name]))
    return noise, beside


def _updated(
    workload: Workload,
    number: int,
    path: str,
    weight: np.ndarray,
    gradient: np.ndarray,
    slots: dict[str, Named],
) -> np.ndarray:
    rate, decay = workload.learning_rate, workload.weight_decay
    if workload.optimizer == "sgd":
        return np.asarray(weight - rate * (gradient + decay * weight))
    first, second = workload.betas
    m = slots["m"].get(path, 0.0) * first + gradient * (1 - first)
    v = slots["v"].get(path, 0.0) * second + np.square(gradient) * (1 - second)
    slots["m"][path], slots["v"][path] = m, v
    direction = (m / (1 - first**number)) / (np.sqrt(v / (1 - second**number)) + workload.eps)
    return np.asarray(weight - rate * decay * weight - rate * direction)


def errors(
    actual: Record, right: Record, precision: str = "float64", tolerance: float = TOLERANCE
) -> Errors:
    """Largest errors of a run in ``precision``, whose errors are held against ``tolerance``."""
    exact = precision == "float64"
    share = NEGLIGIBLE if exact else rounding_of(precision)
    loss = max(
        abs(a - b) / max(abs(b), SMALLEST) if math.isfinite(a) else math.inf
        for a, b in zip(actual.losses, right.losses, strict=True)
    )
    worst, worst_weight = (0.0, ""), (0.0, "")
    for ours, theirs, noise in zip(actual.gradients, right.gradients, right.noise, strict=True):
        whole = _norm_of_all(theirs)
        for name, g in theirs.items():
            measured = noise.get(name, 0.0) if exact else 0.0
            scale = gradient_scale(float(np.linalg.norm(g)), whole, share, measured)
            worst = max(worst, (_distance(ours[name], g) / scale, name))
    for name, w in right.weights.items():
        scale = weight_scale(float(np.linalg.norm(w)), right.moved[name], precision, tolerance)
        worst_weight = max(worst_weight, (_distance(actual.weights[name], w) / scale, name))
    beside = _output_errors(actual, right) if exact else {}
    output = max(beside, key=lambda name: beside[name], default="")
    return Errors(
        *(loss, worst[0], worst_weight[0], worst[1], worst_weight[1]),
        output=beside.get(output),
        worst_output=output,
    )


def _output_errors(actual: Record, right: Record) -> dict[str, float]:
    """Of what is returned beside the loss, in float64, each relative to its own norm; where that is
    what rounding leaves of sums that cancel, to what was measured of it."""
    made: dict[str, float] = {}
    steps = zip(actual.outputs, right.outputs, right.output_noise, strict=True)
    for ours, theirs, noise in steps if actual.outputs else ():
        for name, array in theirs.items():
            # where rounding makes other numbers infinite, nothing is left to be judged by it
            rounding = noise[name] if math.isfinite(noise[name]) else 0.0
            scale = max(_size(array), MARGIN * rounding / TOLERANCE, SMALLEST)
            made[name] = max(made.get(name, 0.0), apart(ours[name], array) / scale)
    return made


def apart(ours: np.ndarray, theirs: np.ndarray) -> float:
    """How far two arrays are from each other: infinitely where they have other shapes, or are not
    the same where they are no finite numbers."""
    if ours.shape != theirs.shape:
        return math.inf
    ours, theirs = (a.astype(np.result_type(a.dtype, np.float64)) for a in (ours, theirs))
    finite = np.isfinite(theirs)
    if not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True):
        return math.inf
    return _distance(ours[finite], theirs[finite])


def _size(array: np.ndarray) -> float:
    finite = array[np.isfinite(array)]
    return float(np.linalg.norm(finite.astype(np.result_type(array.dtype, np.float64))))


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    wide = np.result_type(ours.dtype, np.float64)
    distance = float(np.linalg.norm(np.ravel(ours.astype(wide) - theirs)))
    return distance if math.isfinite(distance) else math.inf


def issued_collectives(
    step: Step | Pipeline,
    batch: Mapping[str, Any],
    options: Mapping[str, str] | None = None,
    parameters: Mapping[str, Any] = MappingProxyType({}),
) -> list[Row]:
    """What XLA compiled into one step, under its ``options``; of a pipeline, that has played one,
    for its initial ``parameters`` by full name."""
    if isinstance(step, StagedAdditions):
        state = step.initial(lambda own: own.gather_names(parameters), parameters)
        return staged.issued(step, state, step.cut(batch), options)
    made = compiled(step, step.step, batch, options=options)
    return counting.collectives(made.as_text(), step.layout.mesh)


def compiled(
    step: Step,
    function: Any,
    batch: Mapping[str, Any],
    wide: bool = False,
    options: Mapping[str, str] | None = None,
) -> Any:
    """``step.step`` or ``step.watched`` compiled for a batch; ``wide``: parameters are float64."""
    cut = step.cut(batch)
    params = {
        key: jax.ShapeDtypeStruct(leaf.shape, "float64" if wide else leaf.parameter.dtype)
        for key, leaf in step.layout.trained.items()
    }
    state: dict[str, Any] = dict.fromkeys(step.state_specs, params)
    state["frozen"] = {
        key: jax.ShapeDtypeStruct(
            leaf.shape, _wide(leaf.parameter.dtype) if wide else leaf.parameter.dtype
        )
        for key, leaf in step.layout.frozen.items()
    }
    state |= jax.eval_shape(step.counters)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), cut)
    gradients = (params,) if function is step.watched else ()
    lowered = function.lower(state, shapes, *gradients)
    counting.mark_asked_dtypes(lowered.compiler_ir("stablehlo").operation)
    return lowered.compile(compiler_options=None if options is None else dict(options))


def _norm_of_all(named: Named) -> float:
    return math.sqrt(sum(float(np.square(a.astype(np.float64)).sum()) for a in named.values()))


def wide_constants(captured: Captured) -> dict[str, Any]:
    """The arrays that the loss closes over, floats in float64."""
    return {name: _float64(np.asarray(a)) for name, a in captured.constants.items()}


def _wide(dtype: str) -> str:
    return "float64" if "float" in dtype else dtype


def _numpy(named: Mapping[str, Any]) -> Named:
    return {name: np.asarray(a) for name, a in named.items()}


def _named(tree: Any, stacks: Mapping[str, tuple[str, ...]]) -> Named:
    """Parameters by full name. Layers are cut apart by numpy: JAX compiles every cut."""
    return by_name(((path, np.asarray(a)) for path, a in paths_of(tree)), stacks)


def _float64(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if "float" in str(array.dtype) else array
