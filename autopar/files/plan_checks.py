"""Whether the files of a plan folder say something possible, and agree with one another.

`plan.json` is text that people edit, copy and merge; what is wrong with it is said here, by key and
value, before anything is built from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from autopar.files.file_errors import sentences
from autopar.nouns.axes import AXES
from autopar.nouns.choices import made
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.nouns.expert_placement import ExpertPlacement
from autopar.nouns.graph import Graph
from autopar.nouns.kinds import OF_ROWS
from autopar.nouns.mesh import Mesh
from autopar.nouns.offload import OFFLOAD
from autopar.nouns.optimizer import OPTIMIZERS, is_own
from autopar.nouns.pieces import COUNTS
from autopar.nouns.plan import FORMAT, Plan, key
from autopar.nouns.recompute import Recompute, policies
from autopar.nouns.style import STYLES
from autopar.nouns.workload import PRECISIONS
from autopar.nouns.zero import ZERO_LEVELS

_ONE = TypeAdapter(tuple[Plan], config=ConfigDict(extra="forbid"))
"""A tuple, because a dataclass takes the settings of pydantic from what it lies in."""


class BadPlan(UserError):
    """A plan that was edited, or that lies beside files of another plan."""


def from_json(text: str) -> Plan:
    """The inverse of `autopar.nouns.plan.to_json`. Raises `BadPlan`."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise BadPlan(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadPlan(f"a {type(data).__name__}, not a plan")
    if data.get("format") != FORMAT:
        raise BadPlan(f"plan format {data.get('format')!r}, this tool reads {FORMAT}")
    spreads = data.get("spreads")
    for i, spread in enumerate(spreads if isinstance(spreads, list) else ()):
        if isinstance(spread, dict) and isinstance(spread.get("mesh"), str):
            spread["mesh"] = _mesh(f"spreads[{i}].mesh", spread["mesh"])
    for name in ("stages", "runners_up"):
        records = data.get(name)
        for i, record in enumerate(records if isinstance(records, list) else ()):
            if isinstance(record, dict) and isinstance(record.get("recompute"), str):
                where, framework = f"{name}[{i}].recompute", str(data.get("framework"))
                record["recompute"] = _recompute(where, record["recompute"], framework)
    _read_experts(data)
    try:
        (plan,) = _ONE.validate_json(json.dumps([data]), strict=True)
    except ValidationError as error:
        raise BadPlan("; ".join(sentences(error, Plan, {}, within=1))) from None
    check_values(plan)
    return plan


def _read_experts(data: dict[str, Any]) -> None:
    """Texts of rows by expert, and of where experts are, as what they say."""
    placement = _texts(data.get("expert_placement"))
    for name, text in placement.items():
        try:
            placement[name] = {"ranks": ExpertPlacement.parse(str(text)).ranks}
        except ValueError as error:
            raise _bad(f"expert_placement[{name!r}]", text, str(error)) from None
    imbalance = data.get("expert_imbalance")
    loads = _texts(imbalance.get("loads") if isinstance(imbalance, dict) else None)
    for name, text in loads.items():
        try:
            loads[name] = tuple(map(float, str(text).split()))
        except ValueError:
            where = f"expert_imbalance.loads[{name!r}]"
            raise _bad(where, text, "numbers, as in '12 0 7'") from None


def _texts(table: Any) -> dict[str, Any]:
    """A table to be read; what is none is told by whoever reads the rest."""
    return table if isinstance(table, dict) else {}


def check_values(plan: Plan) -> None:
    """Raises `BadPlan` for a value that no plan can have."""
    _one_of("framework", plan.framework, ("torch", "jax"))
    _one_of("style", plan.style, STYLES)
    _one_of("precision", plan.precision, PRECISIONS)
    if not is_own(plan.optimizer):
        _one_of("optimizer", plan.optimizer, OPTIMIZERS)
    _count("microbatches", plan.microbatches)
    for choice, value in made(plan):
        for where, given, wanted in choice.wrong(value):
            raise _bad(where, given, wanted)
    for axis, first in plan.scatters.items():
        sizes = {plan.mesh(s).ways(axis.split("+")) for s in plan.stages if s.spread == 0}
        if any(ways % first or ways <= first for ways in sizes):
            raise _bad(f"scatters[{axis!r}]", first, "some ranks of that axis that divide them")
    if plan.clip_norm is not None and not 0 < plan.clip_norm < math.inf:
        raise _bad("clip_norm", plan.clip_norm, "a number, more than 0, or null")
    if not plan.stages:
        raise _bad("stages", [], "one stage or more")
    if not plan.spreads:
        raise _bad("spreads", [], "one spread or more")
    for name, loads in (plan.expert_imbalance.loads if plan.expert_imbalance else {}).items():
        if not all(0 <= rows < math.inf for rows in loads):
            raise _bad(f"expert_imbalance.loads[{name!r}]", loads, "rows, 0 or more")
    for i, spread in enumerate(plan.spreads):
        _check_mesh(f"spreads[{i}].mesh", spread.mesh)
        for table in ("pieces", "expert_pieces"):
            for name, count in getattr(spread, table).items():
                _one_of(f"spreads[{i}].{table}[{name!r}]", count, COUNTS)
    for i, stage in enumerate(plan.stages):
        _one_of(f"stages[{i}].zero", stage.zero, ZERO_LEVELS)
        if plan.framework == "jax":
            _one_of(f"stages[{i}].recompute", str(stage.recompute), policies("jax"))
        _one_of(f"stages[{i}].offload", stage.offload, OFFLOAD)
        _one_of(f"stages[{i}].spread", stage.spread, tuple(range(len(plan.spreads))))
        if stage.device < 0:
            raise _bad(f"stages[{i}].device", stage.device, "the number of a device")
    for name in ("step_time_s", "lower_bound_s"):
        value = getattr(plan.prediction, name)
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise _bad(f"prediction.{name}", value, "seconds, 0 or more")


def check_cluster(plan: Plan, cluster: Cluster) -> None:
    """Raises `BadPlan` where the plan was made for another cluster than ``cluster``."""
    if plan.fingerprints.cluster != cluster.fingerprint:
        raise BadPlan(
            f"fingerprints.cluster is {plan.fingerprints.cluster!r}, but cluster.json beside it "
            f"({cluster.name}) has {cluster.fingerprint!r}: one of them was edited or comes from "
            "another plan"
        )
    if plan.device_count != cluster.device_count:
        degrees = " + ".join(str(plan.mesh(stage)) for stage in plan.stages)
        raise BadPlan(
            f"stages: their meshes ({degrees}) have {plan.device_count} devices, cluster.json "
            f"({cluster.name}) has {cluster.device_count}: the degrees must multiply to that"
        )


def check_names(plan: Plan, graph: Graph) -> None:
    """Raises `BadPlan` for a decision about an op or tensor that ``graph`` does not have."""
    graphs = [(None, graph), *((name, block.body) for name, block in graph.blocks.items())]
    ops = {key(scope, op.name) for scope, part in graphs for op in part.ops}
    tensors = {key(scope, name) for scope, part in graphs for name in part.tensors}
    if plan.loss_chunks is not None:  # views of logits are then views of rows
        ops, tensors = (names | {f"{n}{OF_ROWS}" for n in names} for names in (ops, tensors))
    _known("recipes", plan.recipes or (), ops)
    for i, spread in enumerate(plan.spreads):
        for table in ("ops", "expert_pieces", "beside"):
            _known(f"spreads[{i}].{table}", getattr(spread, table), ops)
        for table in ("shared", "parameters", "pieces"):
            _known(f"spreads[{i}].{table}", getattr(spread, table), tensors)
    _known("kernels", plan.kernels, ops)
    for i, stage in enumerate(plan.stages):
        if stage.first:
            _known(f"stages[{i}].first", [stage.first], {op.name for op in graph.ops})


def _known(table: str, given: Iterable[str], names: Collection[str]) -> None:
    for name in given:
        if name not in names:
            last = name.rpartition("/")[2]
            near = sorted(other for other in names if other.endswith(last))[:3]
            has = f"; it has {', '.join(near)}" if near else ""
            raise BadPlan(f"{table} names {name!r}, which graph.txt does not have{has}")


def _mesh(where: str, text: str) -> dict[str, Any]:
    try:
        mesh = Mesh.parse(text)
    except ValueError:
        raise _bad(where, text, "1, or degrees as in dp_shard=2 x tp=2") from None
    return {"axes": mesh.axes, "sizes": mesh.sizes}


def _recompute(where: str, text: str, framework: str) -> dict[str, Any]:
    made = None
    with suppress(ValueError):
        made = Recompute.parse(text)
    if made is None or not made.emitted:
        raise _bad(where, text, " or ".join(_shown(policies(framework))))
    return {"policy": made.policy, "count": made.count}


def _check_mesh(where: str, mesh: Mesh) -> None:
    for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
        if axis not in AXES:
            raise _bad(where, str(mesh), f"axes {', '.join(AXES)}")
        if size < 1:
            raise _bad(where, str(mesh), f"{axis}=1 or more")
    if len(set(mesh.axes)) < len(mesh.axes):
        raise _bad(where, str(mesh), "each axis once")


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if isinstance(value, bool) or value not in allowed:
        raise _bad(name, value, " or ".join(_shown(allowed)))


def _shown(allowed: Iterable[Any]) -> Iterator[str]:
    return (repr(value) for value in allowed)


def _count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _bad(name, value, "a whole number, 1 or more")


def _bad(name: str, value: Any, allowed: str) -> BadPlan:
    return BadPlan(f"{name} is {value!r}; allowed: {allowed}")
