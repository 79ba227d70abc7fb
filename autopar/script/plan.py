"""``autopar.plan``: the search of ``autopar plan``, called from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from autopar.nouns.axes import PIPELINE
from autopar.nouns.cluster import Cluster
from autopar.nouns.grammar import pairs_of
from autopar.runtime.first_rank import first_rank_makes
from autopar.script.planned import PlanFolder


def plan(
    model: Any = None,
    batch: Any = None,
    cluster: str | PathLike[str] | Cluster = "local",
    fix: str | Mapping[str, Any] | Sequence[str] = (),
    folder: str | PathLike[str] = "plan",
    *,
    searcher: str | None = None,
    allow_replicated: Sequence[str] = (),
    profile: str | PathLike[str] | None = None,
    style: str | None = None,
    expert_imbalance: float | str | None = None,
    expert_loads: str | PathLike[str] | None = None,
    **training: Any,
) -> PlanFolder:
    """The fastest plan that fits, written to ``folder`` with its program.

    Every process of a torchrun job may call it, and then all of them do: the first plans, the
    others wait and get its plan, or its error. ``folder`` may be shared by all machines or lie on
    each of them.

    model:    an nn.Module (on the meta device too), a class or callable that makes one, a
              `Workload` or decorated class, or ``"model.py:Name"``. JAX: ``loss(params, batch)``,
              with ``params=``, its tree of arrays or of `jax.ShapeDtypeStruct`, or ``init=``;
              ``frozen=``: patterns of paths that are not trained.
    batch:    one *global* batch, as a dict of example tensors or a callable that makes it.
    cluster:  a file, ``"local"`` for this machine, or a `Cluster`.
    fix:      what is decided already: ``{"tp": 2, "zero": 3}`` or ``"tp=2,zero=3"``. JAX: stages of
              a pipeline where it has ``pp`` alone, since a script's own optimizer takes all
              gradients in one place, and sending them there is not priced.
    expert_imbalance: rows of a layer's busiest expert over those of its mean expert, ``1.3``, or
              ``"1.3:1.8"`` with that of the worst step; None: as ``profile`` has it, else even.
    expert_loads: a file of the rows of each expert, in place of that: by the module that holds a
              layer's experts, a list. They may then be placed on ranks by it.
    training: other fields of `Workload`: ``optimizer``, ``clip_norm``, ``precision``, ``seed`` ...
              ``optimizer`` may also be the one that `autopar.load` gets, of torch or optax: memory
              is then priced by what it keeps.

    Raises `UserError`, on every rank.
    """
    target = Path(folder)
    given = _Given(
        model, batch, cluster, fix, searcher, allow_replicated, profile, style, expert_imbalance,
        expert_loads, training,
    )  # fmt: skip
    first_rank_makes(lambda: _files(given, target), target)
    return PlanFolder(target)


@dataclass(frozen=True, slots=True)
class _Given:
    """What `plan` is given."""

    model: Any
    batch: Any
    cluster: str | PathLike[str] | Cluster
    fix: str | Mapping[str, Any] | Sequence[str]
    searcher: str | None
    allow_replicated: Sequence[str]
    profile: str | PathLike[str] | None
    style: str | None
    expert_imbalance: float | str | None
    expert_loads: str | PathLike[str] | None
    training: Mapping[str, Any]

    def pinned(self, framework: str) -> dict[str, str]:
        """``fix`` by name."""
        pairs = [self.fix] if isinstance(self.fix, str) else list(self.fix)
        if isinstance(self.fix, Mapping):
            pairs = [f"{name}={value}" for name, value in self.fix.items()]
        fixed = dict(pairs_of(pairs))
        if framework == "jax":
            fixed.setdefault(PIPELINE, "1")
        return fixed


def _files(of: _Given, target: Path) -> Mapping[str, str]:
    """The files of the plan, which are written."""
    from autopar.cli.commands import check_output, plan_files, search, write_plan
    from autopar.cli.options import parse_imbalance, parse_styles
    from autopar.script.workloads import given_workload

    check_output(target)
    name, workload = given_workload(of.model, of.batch, of.training)
    result = search(
        name,
        of.cluster if isinstance(of.cluster, Cluster) else str(of.cluster),
        of.pinned(workload.framework),
        of.searcher,
        tuple(of.allow_replicated),
        None if of.profile is None else Path(of.profile),
        styles=parse_styles(of.style),
        workload=workload,
        imbalance=parse_imbalance(
            None if of.expert_imbalance is None else str(of.expert_imbalance),
            None if of.expert_loads is None else Path(of.expert_loads),
        ),
    )
    files, _ = plan_files(result, target)
    write_plan(result, target, files)
    return files
