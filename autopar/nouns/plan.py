"""A plan: every decision that turns a model into a distributed program, and nothing derived.

Shardings, collectives, local shapes and memory are functions of a `Plan` and its `Graph`
(`autopar.lowering.spread`). Keys are tensor names of the graph; inside a block they are written
``<block name>::<name>``. ``plan.json`` is the text form, `autopar.files.plan_checks.from_json`
reads it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.nouns.axes import (
    CONTEXT,
    EXPERT,
    HEADS,
    OUTER,
    PIPELINE,
    REPLICATE,
    SECOND_TENSOR,
    SHARD,
    TENSOR,
)
from autopar.nouns.expert_placement import ExpertPlacement
from autopar.nouns.imbalance import Imbalance
from autopar.nouns.mesh import Mesh
from autopar.nouns.offload import OFFLOAD
from autopar.nouns.prediction import Prediction
from autopar.nouns.recompute import KEEP_ALL, Recompute
from autopar.nouns.style import Style

FORMAT = 5


def key(block: str | None, name: str) -> str:
    """The plan's key of a tensor or op: ``name`` at top level, ``block::name`` in a block."""
    return name if block is None else f"{block}::{name}"


@dataclass(frozen=True, slots=True)
class Spread:
    """The shardings of the whole graph on one mesh; stages of equal meshes share one.

    mesh:       axes of one stage, outermost first; axes of size 1 may be left out.
    ops:        op key -> strategy on the model axes (``"tp:n"``; data axes follow from the batch);
                ops that are not named are ``whole``.
    shared:     tensor key -> sharding of the copy that several readers share (``"tp:S1"``).
    parameters: parameter key -> how it is stored on the model axes (``"tp:S0"``; ``D``: whole on
                every rank, its gradient a partial sum that is reduced once a step).
    pieces:     tensor key -> of rows, that its collective and the products beside it run in
                (`autopar.lowering.pieces`); what is not named runs in one.
    expert_pieces: op key -> of tokens, that travel to their experts and back
                (`autopar.lowering.routed_pieces`), likewise.
    beside:     op key of experts -> path of the module that runs while their tokens travel
                (`autopar.lowering.shared_experts`).
    """

    mesh: Mesh
    ops: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    pieces: Mapping[str, int] = field(default_factory=dict)
    expert_pieces: Mapping[str, int] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of ops that lives on one group of devices.

    first:     the first op that it runs, at the top of the graph; empty: the graph's first. It runs
               all from there to the first of the next stage.
    device:    the first of its devices; it has as many as its mesh, with numbers that follow.
               Stages of equal devices take turns there: interleaving, or a V.
    spread:    place in `Plan.spreads`.
    zero:      what ``dp_shard`` splits, see `autopar.nouns.zero`.
    recompute: what its blocks run again in backward, see `autopar.nouns.recompute`.
    offload:   ``none``; ``optimizer``: its state is in host memory, see `autopar.nouns.offload`.
    """

    first: str = ""
    device: int = 0
    spread: int = 0
    zero: int = 0
    recompute: Recompute = KEEP_ALL
    offload: str = "none"


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """What the plan was made for; a change of any of them makes the plan stale.

    ``cluster_file`` is that of the cluster as its file says it, without what a profile measured;
    empty where there was no file. ``training``: what a plan holds for whatever it is, and is told
    where it changes (`autopar.nouns.workload.training`); nothing where that is not known.
    """

    model: str
    cluster: str
    profile: str
    tool: str
    cluster_file: str = ""
    training: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """A plan that lost: its choices, its time, and why it lost.

    ``zero`` and ``recompute`` are None where no choice of them could have won.
    """

    degrees: Mapping[str, int]
    zero: int | None
    recompute: Recompute | None
    microbatches: int
    step_time_s: float
    memory_bytes: int
    reason: str
    offload: str = "none"


@dataclass(frozen=True, slots=True)
class Plan:
    """All decisions.

    workload:     ``"../model.py:Name"``, the model that the plan is for, seen from its folder.
    cluster_file: ``"../cluster.yaml"``, seen from its folder; empty: made for this machine.
    stages:       in the order of the graph; one or many.
    microbatches: the global batch is cut into them first, then over ``dp_replicate`` and
                  ``dp_shard``; gradients are added up over them.
    schedule:     name of the order in which each rank works; ``none`` with one stage.
    actions:      of each pipeline rank, as text (``2F0 2F1 2B0``), where they were found or given
                  by hand; the named schedules follow from their names.
    style:        how the program is to execute, see `autopar.nouns.style`.
    precision:    dtype of compute (``float32``, ``bfloat16``); parameters are stored as the model
                  declares them.
    clip_norm:    largest norm of the whole gradient, whose parts one more collective adds up.
    expert_imbalance: how unevenly routes were taken to go to experts; None: evenly.
    expert_placement: by the module that holds a layer's experts, which rank has which
                  (`autopar.nouns.expert_placement`), as ``0 5 | 1 4``; others lie in order.
    loss_chunks:  of rows that the model's last product and its loss are taken in, one after the
                  other (`autopar.rules.loss_heads`); None: logits are made whole.
    mlp_chunks:   of tokens that feed-forward parts run in, one after the other
                  (`autopar.rules.feed_forwards`); None: at once.
    bucket_bytes: of gradients that replicas add up at once (`autopar.nouns.buckets`); None: of the
                  usual size, or no replicas do.
    reduce_dtype: of gradients of state that ranks share; None: as they are stored.
    scatters:     axes whose reduce-scatters are two, with the ranks of the first
                  (`autopar.nouns.scatters`); those of others are one.
    all_reduce:   by which replicas add up gradients (`autopar.nouns.reduction`), with the ranks of
                  a domain, as ``two-level of 8``; None: the library's.
    prefetch:     units ahead that FSDP2 gathers split parameters (`autopar.nouns.prefetch`); None:
                  as it does by itself, or it gathers none.
    kernels:      op key -> what runs it (``attention by cudnn``, `autopar.rules.kernels`), of the
                  op that gives the result where a kernel runs several; others run as torch has it.
    seq_slices:   into which the sequences of a microbatch are cut, that pass the stages one after
                  the other (`autopar.lowering.sequence_slices`); None: they pass whole.
    recipes:      by op key, how linear layers run in 8 bits (`autopar.nouns.recipes`), as
                  ``fp8-row`` or ``fp8-row:output+input``; None: all have the plan's precision.
    gather_dtype: of the weights that may be gathered in 8 bits (`autopar.rules.narrow_gathers`);
                  None: as all others, in the dtype of compute.
    """

    workload: str
    framework: str
    spreads: tuple[Spread, ...]
    stages: tuple[Stage, ...]
    microbatches: int
    style: Style
    precision: str
    optimizer: str
    schedule: str
    fingerprints: Fingerprints
    prediction: Prediction
    runners_up: tuple[RunnerUp, ...] = ()
    replicated_ops: tuple[str, ...] = ()
    searcher: str = ""
    clip_norm: float | None = None
    cluster_file: str = ""
    actions: tuple[str, ...] = ()
    expert_imbalance: Imbalance | None = None
    expert_placement: Mapping[str, ExpertPlacement] = field(default_factory=dict)
    loss_chunks: int | None = None
    mlp_chunks: int | None = None
    bucket_bytes: int | None = None
    reduce_dtype: str | None = None
    scatters: Mapping[str, int] = field(default_factory=dict)
    all_reduce: str | None = None
    prefetch: int | None = None
    seq_slices: int | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)
    recipes: Mapping[str, str] | None = None
    gather_dtype: str | None = None
    format: int = FORMAT

    @property
    def device_count(self) -> int:
        return max(stage.device + self.mesh(stage).device_count for stage in self.stages)

    @property
    def degrees(self) -> dict[str, int]:
        """The largest of any stage, and ``pp``: groups of devices that hold stages. Of rare axes
        those that there are."""
        names = (REPLICATE, SHARD, TENSOR, OUTER, CONTEXT, EXPERT, HEADS, SECOND_TENSOR)
        sizes = {name: max(self.mesh(s).size(name) for s in self.stages) for name in names}
        rare = {n for n in (OUTER, HEADS, SECOND_TENSOR) if sizes[n] == 1}
        return {
            **{n: size for n, size in sizes.items() if n not in rare},
            PIPELINE: len(self.groups),
        }

    @property
    def passes(self) -> int:
        """How often a rank runs each of its stages forward in a step."""
        return self.microbatches * (self.seq_slices or 1)

    @property
    def groups(self) -> tuple[int, ...]:
        """First devices of the groups that hold stages: one a pipeline rank, in its order."""
        return tuple(sorted({stage.device for stage in self.stages}))

    def mesh(self, stage: Stage) -> Mesh:
        return self.spreads[stage.spread].mesh

    @property
    def program_mesh(self) -> Mesh:
        """The mesh of all ranks of a program: ``pp`` outermost, then that of every stage."""
        mesh = self.spreads[0].mesh
        return Mesh(("pp", *mesh.axes), (len(self.groups), *mesh.sizes)).trimmed()

    @property
    def tp_pieces(self) -> dict[str, int]:
        """In how many collectives run beside products, by tensor key, of all spreads."""
        return {name: n for spread in self.spreads for name, n in spread.pieces.items()}

    @property
    def expert_pieces(self) -> dict[str, int]:
        """In how many tokens travel to their experts, by op key, of all spreads."""
        return {name: n for spread in self.spreads for name, n in spread.expert_pieces.items()}

    @property
    def shared_experts(self) -> dict[str, str]:
        """The modules that run while tokens travel, by op key, of all spreads."""
        return {name: path for spread in self.spreads for name, path in spread.beside.items()}

    def each(self, choice: str) -> str:
        """``zero``, ``recompute`` or ``offload`` of the stages: one value where all agree."""
        values = [str(getattr(stage, choice)) for stage in self.stages]
        return values[0] if len(set(values)) == 1 else ", ".join(values)

    def fingerprint(self) -> str:
        """SHA-256 of the decisions; ranks compare it before the first step."""
        return hashlib.sha256(to_json(self).encode()).hexdigest()[:16]


_RARE = (
    "expert_imbalance", "loss_chunks", "mlp_chunks", "bucket_bytes", "reduce_dtype", "all_reduce",
    "prefetch", "seq_slices", "recipes", "gather_dtype",
)  # fmt: skip


def as_data(plan: Plan) -> dict[str, Any]:
    """The plan as plain values. What only plans that offload have is left out of others, and so is
    what only those with uneven routes, a loss or MLPs in chunks, slices of sequences, other buckets
    or other sums, recipes or kernels have."""
    data = dataclasses.asdict(plan)
    data["expert_placement"] = {name: str(own) for name, own in plan.expert_placement.items()}
    for rare in ("kernels", "expert_placement", "scatters"):
        if not getattr(plan, rare):
            del data[rare]
    if plan.expert_imbalance is not None:
        data["expert_imbalance"]["loads"] = _loads_text(plan.expert_imbalance)
        if not plan.expert_imbalance.loads:
            del data["expert_imbalance"]["loads"]
    for rare in _RARE:
        if getattr(plan, rare) is None:
            del data[rare]
    for record, spread in _pairs(data, plan, "spreads"):
        for rare in ("pieces", "expert_pieces", "beside"):
            if not getattr(spread, rare):
                del record[rare]
    for record, own in (*_pairs(data, plan, "stages"), *_pairs(data, plan, "runners_up")):
        record["recompute"] = None if own.recompute is None else str(own.recompute)
        if own.offload == OFFLOAD[0]:
            del record["offload"]
    if not plan.prediction.placing_saves_s:
        del data["prediction"]["placing_saves_s"]
    memory = data["prediction"]["memory_bytes"]
    if not memory["host"]:
        del memory["host"], memory["host_limit"]
    return data


def _loads_text(imbalance: Imbalance) -> dict[str, str]:
    """``12 0 7.5``, a layer a line."""
    return {
        name: " ".join(f"{rows:.12g}" for rows in loads) for name, loads in imbalance.loads.items()
    }


def _pairs(data: dict[str, Any], plan: Plan, name: str) -> Iterator[tuple[dict[str, Any], Any]]:
    yield from zip(data[name], getattr(plan, name), strict=True)


def to_json(plan: Plan) -> str:
    """``plan.json``: sorted, indented, byte for byte the same for equal plans."""
    data = as_data(plan)
    for spread, raw in zip(plan.spreads, data["spreads"], strict=True):
        raw["mesh"] = str(spread.mesh)
    return json.dumps(data, indent=1, sort_keys=True) + "\n"
