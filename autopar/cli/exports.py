"""``autopar export``: a plan, or a layout that no program can run, as files of another trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.cost_models.software import States
from autopar.emit.exports.from_plan import machines, setup_of
from autopar.emit.exports.held import TRAINERS, Held
from autopar.emit.exports.setup import Figures, Setup
from autopar.emit.exports.targets import target
from autopar.files import export_folder, plan_folder
from autopar.files.cluster_file import load_cluster
from autopar.frontends.family.arch import Arch
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.nouns.grammar import pairs_of
from autopar.nouns.layout import Layout, pairs_text
from autopar.nouns.workload import Workload, training

PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be exported, as it was typed."""

    source: str | None
    arch: str | None = None
    cluster: str | None = None
    fix: tuple[str, ...] = ()
    global_batch: int | None = None
    precision: str | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """What went into ``folder``, and what did not."""

    target: str
    folder: str
    files: tuple[str, ...]
    left_out: tuple[str, ...]
    start: str

    def to_object(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "target": self.target,
            "folder": self.folder,
            "files": list(self.files),
            "not_carried": list(self.left_out),
            "start": self.start,
        }


def export(asked: Asked, to: str, folder: Path) -> Written:
    """Writes the files of ``to`` into ``folder``, or nothing. Raises `UserError`."""
    make = target(to)
    export_folder.check_writable(folder)
    made = make(setup(asked))
    export_folder.write(folder, made.files, to)
    return Written(to, str(folder), tuple(made.files), made.left_out, made.start)


def setup(asked: Asked) -> Setup:
    """The record that exports read. Raises `UserError`."""
    if asked.source is not None and Path(asked.source).is_dir():
        if asked.fix or asked.cluster:
            raise UserError(
                f"--{'fix' if asked.fix else 'cluster'} is for a model or --arch: {asked.source} "
                "is a plan, whose layout is decided; plan the model again, or export the model"
            )
        return of_folder(asked.source)
    if asked.cluster is None:
        what = asked.source if asked.arch is None else f"--arch {asked.arch}"
        raise UserError(
            f"{what} is no folder of a plan, so its layout is that of --fix on a --cluster: add "
            "--cluster cluster.yaml --fix tp=2,pp=2, or give a folder of `autopar plan`"
        )
    cluster = load_cluster(asked.cluster)
    if asked.source is not None:
        return _of_model(asked.source, asked.cluster, cluster, pairs_of(asked.fix))
    from autopar.planner.family.estimate import estimate_files

    precision = asked.precision or "bf16"
    fix = ",".join(asked.fix)
    estimate = estimate_files(asked.arch or "", asked.cluster, fix, asked.global_batch, precision)
    return of_layout(
        Path(asked.arch or "").name, estimate.arch, estimate.layout, cluster, precision
    )


def of_folder(folder: str | Path) -> Setup:
    """Of a plan's folder. Raises `PlanFolderError`."""
    plan = plan_folder.read_plan(folder)
    graph, batch = plan_folder.read_graph(folder), plan_folder.read_batch(folder)
    return setup_of(plan, graph, batch, plan_folder.read_cluster(folder))


def _of_model(model: str, cluster_ref: str, cluster: Cluster, fix: Mapping[str, str]) -> Setup:
    """A layout of a model that no backend emits; others are planned first."""
    from autopar.cli.unemitted import price
    from autopar.frontends.loading import load_workload
    from autopar.planner.ask.pins import unemitted

    if not unemitted(fix):
        raise UserError(
            f"programs can run all of --fix {pairs_text(fix)}: plan "
            f"{model} with it (`autopar plan`) and export the folder"
        )
    estimate = price(model, cluster_ref, fix).estimate
    return of_layout(
        Path(model).name,
        estimate.arch,
        estimate.layout,
        cluster,
        estimate.precision,
        load_workload(model),
    )


def of_layout(
    name: str,
    arch: Arch,
    layout: Layout,
    cluster: Cluster,
    precision: str,
    workload: Workload | None = None,
) -> Setup:
    """Of a layout of the transformer family. Raises `UserError` for 8-bit and 4-bit precisions."""
    if precision not in PRECISIONS:
        raise UserError(
            f"--precision {precision}: exports carry {', '.join(PRECISIONS)}; export with bf16, "
            f"and switch {precision} on in the trainer"
        )
    x = layout
    replicated = x.zero == 0  # then dp_shard splits nothing, and trainers call it replicas
    return Setup(
        name=name,
        framework="" if workload is None else workload.framework,
        layout=replace(
            x,
            dp_replicate=x.dp if replicated else x.dp_replicate,
            dp_shard=1 if replicated else x.dp_shard,
            schedule=x.schedule if x.pp > 1 else "none",
            sequence_parallel=x.sequence_parallel and x.tp > 1,
        ),
        sequence=arch.seq,
        machines=machines(cluster, x.device_count),
        precision=PRECISIONS[precision],
        optimizer="adamw" if workload is None else workload.optimizer,
        clip_norm=None if workload is None else workload.clip_norm,
        training={} if workload is None else training(workload),
        layers=arch.layers,
        figures=figures_of(arch),
        held=held_by(arch, layout, cluster, precision) if workload is None else None,
    )


def figures_of(arch: Arch) -> Figures:
    """All sizes of an architecture file."""
    rare = {
        "latent attention": arch.latent is not None,
        f"attention of {arch.windowed_layers} layers to the last {arch.window} tokens": arch.window,
        f"{arch.dense_layers} layers without experts": arch.dense_layers,
        f"{arch.shared_experts} shared experts": arch.shared_experts,
        "attention to both sides": not arch.causal,
    }
    return Figures(
        *(arch.layers, arch.hidden, arch.ffn, arch.vocab, arch.experts),
        heads=arch.heads,
        kv_heads=arch.kv_heads,
        head_dim=arch.dim,
        top_k=arch.top_k,
        gated=arch.gated,
        tied=arch.tied,
        biases=arch.has_biases,
        positions=arch.positions,
        unusual=" and ".join(name for name, there in rare.items() if there),
    )


def held_by(arch: Arch, layout: Layout, cluster: Cluster, precision: str) -> Held | None:
    """Memory as the estimate has it, and with the state that each trainer keeps; None in 32 bits,
    which all keep alike."""
    from autopar.planner.family.runs import peak_bytes, run_on, software_for

    if precision not in ("bf16", "fp16"):
        return None
    usual = software_for(cluster, layout)
    states: dict[str, States] = {
        "float32": "fsdp",
        "megatron": "megatron",
        "deepspeed": "deepspeed",
    }
    totals = {
        keeper: peak_bytes(
            run_on(arch, cluster, layout, precision, software=replace(usual, states=state))
        )
        for keeper, state in states.items()
    }
    kept = next(keeper for keeper, state in states.items() if state == usual.states)
    words = next(keeps.words for keeps in TRAINERS if keeps.name == kept)
    return Held(kept, words, totals[kept], cluster.memory_bytes, totals)
