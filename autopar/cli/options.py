"""Arguments and options that several commands of ``autopar`` share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.nouns.errors import UserError

if TYPE_CHECKING:
    from autopar.nouns.imbalance import Imbalance
    from autopar.nouns.style import Style

Model = Annotated[
    str, typer.Argument(metavar="MODEL.PY[:NAME]", help="The file that holds the model.")
]
PlanFolder = Annotated[Path, typer.Argument(metavar="PLAN/", help="A folder from `autopar plan`.")]
ClusterFile = Annotated[
    str, typer.Option("--cluster", "-c", help="A cluster.yaml, or `local` for this machine.")
]
Fix = Annotated[
    list[str] | None,
    typer.Option(
        "--fix",
        metavar="KEY=VALUE,...",
        help="Pin choices, as in tp=2,dp_shard=2,zero=3; the search decides the rest. Degrees: "
        "dp_replicate x dp_shard x cp x tp2 x tp x pp = devices; cp = cp_ring x cp_head (rows and "
        "heads of attention), and cp_outer of cp_ring joins as many rings, as of hosts, in one; ep "
        "borrows ranks of dp_shard, cp and tp, etp is 1 or tp. zero: 0 to 3. microbatch: samples "
        "that one microbatch has on one data rank. recompute: none, selective-op (keeps what "
        "products, attention and collectives gave), compute (keeps what collectives gave) or full. "
        "pp with schedule and interleave: pipelines. loss_chunks: none, or how many "
        "chunks of rows the last product and its loss are taken in, mlp_chunks: of tokens that "
        "feed-forward parts run in, forward and backward, on PyTorch. bucket: of "
        "gradients that replicas add up at once, as 8MiB. tp_pieces: 1, 2, 4 or 8 pieces of rows "
        "that tensor-parallel collectives run in beside products, in eager PyTorch. expert_pieces: "
        "likewise of tokens that travel to their experts while others are computed with. "
        "expert_placement: load (experts on ranks by their measured rows) or order, on PyTorch. "
        "shared_experts: beside (they run while tokens travel to the others) or behind. "
        "seq_slices: of sequences, that pass the stages of a pipeline one after the other, on "
        "PyTorch. reduce: "
        "the dtype in which gradients of shared state are reduced, bfloat16 or float32. "
        "all_reduce: library, or two-level (replicas add up gradients inside hosts, then "
        "across). attention: the kernel that runs it, flash, cudnn, flash3, flash4, or torch, "
        "which takes one itself; kernels: "
        "triton or torch, for what else has kernels. prefetch: 0, 1 or 2 units ahead that FSDP2 "
        "gathers parameters. precision: fp8-tensor, fp8-row, fp8-block or mxfp8, by which linear "
        "layers run in 8 bits where they gain, on PyTorch; gather: fp8 or compute, in what weights "
        "of layers by fp8-tensor travel. "
        "sequence_parallel and recompute=selective, which no backend emits yet, are priced for "
        "transformers, and no program is written.",
    ),
]
Searcher = Annotated[
    str | None,
    typer.Option(
        "--searcher",
        help="Which solver searches the shardings: portfolio (the default, chains the others), "
        "elimination (exact, narrow graphs), integer_program (exact, tight memory), annealing "
        "(large), coordinate_descent (at once), mcts (readable), mcmc (yardstick), brute_force "
        "(tiny, referee).",
    ),
]
Replicated = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-replicated",
        metavar="OP",
        help="Let an op kind without a rule run whole on every device. May be repeated.",
    ),
]
ExpertImbalance = Annotated[
    str | None,
    typer.Option(
        "--expert-imbalance",
        metavar="MEAN[:WORST]",
        help="Rows of a layer's busiest expert over those of its mean expert, in the mean of steps "
        "(time is priced by it) and in the worst one (memory). Else as --profile has it from runs "
        "of the model, else 1: routes are even.",
    ),
]
ExpertLoads = Annotated[
    Path | None,
    typer.Option(
        "--expert-loads",
        metavar="FILE",
        help="In place of --expert-imbalance: rows of each expert, by the module that holds a "
        "layer's experts (YAML or JSON, a list each). Experts may then be placed on ranks by them. "
        "Else as --profile has them from runs of the model.",
    ),
]
Device = Annotated[
    str, typer.Option("--device", help="cpu, cuda, or auto: the accelerators that there are.")
]
Profile = Annotated[
    Path | None,
    typer.Option("--profile", help="Times measured by `autopar profile` replace the built-in."),
]
StyleOption = Annotated[
    str | None,
    typer.Option(
        "--style",
        metavar="eager|layers|compiled|fastest",
        help="How the program executes: op by op (PyTorch's default), the layers that repeat each "
        "compiled into fused kernels, or all of it (JAX always); `fastest` plans for each. `run` "
        "does as its plan says. With --arch: else as is usual on the devices.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Tell every step of every search.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Arch = Annotated[
    str | None,
    typer.Option("--arch", help="Instead of a model: a YAML file of a transformer's sizes."),
]
GlobalBatch = Annotated[
    int | None, typer.Option("--global-batch", help="With --arch: sequences in a step.")
]
Precision = Annotated[
    str | None,
    typer.Option("--precision", help="With --arch: dtype of the matrix products (bf16)."),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Where the plan goes.")]
Tries = Annotated[
    int,
    typer.Option(
        "--try",
        metavar="N",
        min=1,
        help="Run the best N plans for a few steps here, and keep the fastest.",
    ),
]
CompileAhead = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="JAX: also compile the step for the cluster's devices, which need not be there "
        "(TPUs: libtpu must be installed); memory and collectives stand beside the plan's.",
    ),
]
ModelOrNone = Annotated[
    str | None, typer.Argument(metavar="MODEL.PY[:NAME]", help="The file that holds the model.")
]
Devices = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="A table: time, efficiency, memory, cost on each number."),
]
BatchTokens = Annotated[
    int | None, typer.Option("--batch-tokens", help="Tokens in a step, whatever a file says.")
]
SequenceTokens = Annotated[
    int | None, typer.Option("--seq", help="Tokens of a sequence, whatever a file says.")
]


class OptionError(UserError):
    """An option whose value makes no sense; the text says which and what would."""


def parse_style(text: str | None) -> Style | None:
    """Raises `OptionError`."""
    from autopar.nouns.layout import alternatives

    if text is None:
        return None
    styles = parse_styles(text)
    if len(styles) > 1:
        raise OptionError(
            f"--style {text}: a model by its sizes is priced in one style; choose "
            f"{alternatives(styles)}"
        )
    return styles[0]


def parse_styles(text: str | None) -> tuple[Style, ...]:
    """Those that a plan may take the fastest of; empty: what is usual. Raises `OptionError`."""
    from autopar.nouns.layout import alternatives
    from autopar.nouns.style import FASTEST, STYLES

    if text in (None, FASTEST):
        return () if text is None else STYLES
    for style in STYLES:
        if text == style:
            return (style,)
    raise OptionError(f"--style {text}: choose {alternatives((*STYLES, FASTEST))}")


def parse_imbalance(text: str | None, loads: str | Path | None = None) -> Imbalance | None:
    """``loads``: a file. Raises `ImbalanceError`, `ExpertLoadsError`; for both `OptionError`."""
    from autopar.nouns.imbalance import parse

    if loads is None:
        return None if text is None else parse(text)
    from autopar.files.expert_loads import read_loads

    if text is not None:
        raise OptionError(
            f"--expert-imbalance {text} and --expert-loads {loads} say one thing twice: how busy "
            "the busiest expert is follows from the rows of each; leave --expert-imbalance out"
        )
    return read_loads(loads)


def only_of_arch(arch: str | None, given: Mapping[str, object]) -> None:
    """Raises `OptionError` for options that only ``--arch`` reads."""
    unread = [name for name, value in given.items() if value is not None]
    if arch is None and unread:
        raise OptionError(
            f"{unread[0]} is for --arch; the batch and precision of a model stand in its file"
        )
