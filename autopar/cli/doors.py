"""The commands between autopar and other trainers: ``export`` and ``import``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.options import (
    Arch,
    Fix,
    GlobalBatch,
    Json,
    OptionError,
    Precision,
    only_of_arch,
)
from autopar.cli.progress import progress


def export(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="PLAN/|MODEL.PY[:NAME]", help="A plan, or a model with --cluster and --fix."
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="NAME",
            help="torchtitan, megatron, megatron-bridge, deepspeed, accelerate, transformers, "
            "maxtext, levanter, axlearn, partition-specs, slurm, kubeflow, ray or skypilot.",
        ),
    ] = "",
    output: Annotated[Path, typer.Option("--output", "-o", help="Where its files go.")] = Path(
        "export"
    ),
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", help="With a model or --arch: a cluster.yaml.")
    ] = None,
    fix: Fix = None,
    arch: Arch = None,
    global_batch: GlobalBatch = None,
    precision: Precision = None,
    json: Json = False,
) -> None:
    """Write a plan as settings of another trainer or launcher.

    A model, or --arch, with --fix exports a layout that no program can run yet.
    """
    from autopar.cli import exports

    only_of_arch(arch, {"--global-batch": global_batch, "--precision": precision})
    if (source is None) == (arch is None):
        raise OptionError(
            "export needs either a plan or model, or --arch; "
            f"it got {'neither' if source is None else 'both'}"
        )
    asked = exports.Asked(source, arch, cluster, tuple(fix or ()), global_batch, precision)
    written = exports.export(asked, to, output)
    for sentence in written.left_out:
        progress(f"not carried: {sentence}")
    if json:
        import json as text

        print(text.dumps(written.to_object()))
        return
    print("\n".join(f"{output}/{name}" for name in written.files))
    progress(f"next: {written.start}")


def import_layout(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A torchtitan recipe (.py, .toml), a file of Megatron's arguments, an Accelerate "
            "YAML or a DeepSpeed JSON.",
        ),
    ],
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL.PY[:NAME]", help="The model that it trains.")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option("--from", metavar="NAME", help="Whose file it is; else its ending tells."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", help="Where it runs: a cluster.yaml.")
    ] = None,
    arch: Arch = None,
    global_batch: GlobalBatch = None,
    precision: Precision = None,
    json: Json = False,
) -> None:
    """The layout of a run that exists as --fix, priced beside the fastest one here."""
    from autopar.cli import imports

    if model is not None and arch is not None:
        raise OptionError("import prices a model or --arch, not both")
    if model is not None:
        only_of_arch(arch, {"--global-batch": global_batch, "--precision": precision})
    imported = imports.imported(
        imports.Asked(file, trainer, model, arch, cluster, global_batch, precision)
    )
    for note in imported.settings.notes:
        progress(f"note: {note}")
    if json:
        import json as text

        print(text.dumps(imported.to_object()))
        return
    print(imported.to_text())
