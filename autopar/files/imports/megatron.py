"""Megatron-LM: the arguments of a run, from a shell script or as they were printed."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

from autopar.files.imports.settings import NotImported, Settings, several, whole
from autopar.nouns.errors import did_you_mean
from autopar.nouns.recompute import ATTENTION, FULL, Recompute

LAYOUT = (
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "pipeline-model-parallel-layout",
    "pipeline-model-parallel-comm-backend",
    "num-virtual-stages-per-pipeline-rank",
    "num-layers-per-virtual-pipeline-stage",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "microbatch-group-size-per-virtual-pipeline-stage",
    "context-parallel-size",
    "hierarchical-context-parallel-sizes",
    "cp-comm-type",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
    "sequence-parallel",
    "micro-batch-size",
    "global-batch-size",
    "num-layers",
    "seq-length",
    "bf16",
    "fp16",
    "use-distributed-optimizer",
    "num-distributed-optimizer-instances",
    "use-megatron-fsdp",
    "use-custom-fsdp",
    "use-torch-fsdp2",
    "data-parallel-sharding-strategy",
    "outer-dp-sharding-strategy",
    "overlap-grad-reduce",
    "overlap-param-gather",
    "recompute-activations",
    "recompute-granularity",
    "recompute-method",
    "recompute-num-layers",
    "recompute-modules",
)
"""Arguments that decide the layout or are close to those."""
GONE = {
    "model-parallel-size": "tensor-model-parallel-size",
    "checkpoint-activations": "recompute-granularity",
    "DDP-impl": "use-distributed-optimizer",
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
}
"""Arguments of versions before 2023 -> what says it now."""
ABOUT_LAYOUT = ("parallel", "sharding", "recompute", "pipeline", "fsdp", "virtual")
STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def read(text: str, name: str) -> Settings:
    """Raises `NotImported`."""
    given = _arguments(text, name)
    if not any(argument in LAYOUT for argument in given):
        raise NotImported(
            f"{name} has none of Megatron's arguments (--tensor-model-parallel-size and so on); "
            "give the script that sets them, or what the run printed of them"
        )
    for argument in given:
        _check_known(argument, name)

    def count(argument: str, usual: int = 1) -> int:
        return whole(f"{name}: --{argument}", given.get(argument, str(usual)))

    pp, tp = count("pipeline-model-parallel-size"), count("tensor-model-parallel-size")
    ep = count("expert-model-parallel-size")
    pins = several(
        dp_replicate=count("num-distributed-optimizer-instances"),
        tp=tp,
        cp=(cp := count("context-parallel-size")),
        cp_head=_heads(given, cp, name),
        ep=ep,
        pp=pp,
    )
    if "expert-tensor-parallel-size" in given and (ep > 1 or tp > 1):
        pins = replace(pins, etp=count("expert-tensor-parallel-size"))
    pins = replace(pins, zero=_zero(given), microbatch=count("micro-batch-size"))
    if tp > 1 and "sequence-parallel" not in given:
        pins = replace(pins, sequence_parallel=False)
    notes: list[str] = []
    if cp > 1 and given.get("cp-comm-type") == "all_gather":
        notes.append("cp-comm-type all_gather: keys and values are priced as passing round a ring")
    if pp > 1:
        stages = _interleave(given, pp, name)
        schedule = "interleaved-1f1b" if stages > 1 else "1f1b"
        pins = replace(pins, schedule=schedule, interleave=stages if stages > 1 else None)
    granularity = given.get("recompute-granularity")
    if granularity or "recompute-activations" in given:
        pins = replace(pins, recompute=_recompute(granularity or ATTENTION, name))
    if "recompute-num-layers" in given and given["recompute-num-layers"] != "1":
        notes.append("recompute-num-layers: all layers are priced as recomputed")
    precision = "bf16" if "bf16" in given else "fp16" if "fp16" in given else "fp32"
    batch = count("global-batch-size") if "global-batch-size" in given else None
    return Settings("megatron", pins, batch, None, precision, tuple(notes))


def _arguments(text: str, name: str) -> dict[str, str]:
    """``--a b`` and ``--a=b`` by name, with the script's own ``NAME=value`` put in."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise NotImported(f"{name}: no shell text: {error}") from None
    variables: dict[str, str] = {}
    given: dict[str, str] = {}
    last = ""
    for word in words:
        word = re.sub(r"^\w+=\(", "", word.rstrip(")"))
        if match := re.fullmatch(r"([A-Za-z_]\w*)=([^(]*)", word):
            variables[match[1]] = _filled(match[2], variables)
            last = ""
        elif word.startswith("--"):
            last, _, value = word[2:].partition("=")
            given[last] = _filled(value, variables)
        elif last and not given[last]:
            given[last] = _filled(word, variables)
    return given


def _filled(text: str, variables: dict[str, str]) -> str:
    """``$TP``, ``${TP}`` and ``${TP:-2}`` as the script has set them."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[2] or match[0])

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)", value, text)


def _check_known(argument: str, name: str) -> None:
    if argument in LAYOUT:
        return
    if argument in GONE:
        raise NotImported(
            f"{name}: --{argument} is of an old Megatron; say it with --{GONE[argument]}"
        )
    alike = 0.85 if any(part in argument for part in ABOUT_LAYOUT) else 0.93
    meant = did_you_mean(argument, LAYOUT, alike)
    if meant:
        raise NotImported(
            f"{name}: --{argument} is no argument of Megatron-LM that autopar knows (commit "
            f"d98e8a64dd). {meant}Leave it out to read the rest"
        )


def _heads(given: dict[str, str], cp: int, name: str) -> int:
    """Ranks of a sequence that trade rows for heads: of ``a2a+p2p`` the first of the sizes."""
    kind = given.get("cp-comm-type", "p2p")
    match kind:
        case "p2p" | "all_gather":
            return 1
        case "a2a":
            return cp
        case "a2a+p2p":
            sizes = "hierarchical-context-parallel-sizes"
            heads = whole(f"{name}: --{sizes}", given.get(sizes, ""))
            if cp % heads:
                raise NotImported(
                    f"{name}: --{sizes} {heads} does not divide --context-parallel-size {cp}; it "
                    "is the ranks that trade rows for heads, then those of the ring"
                )
            return heads
    raise NotImported(
        f"{name}: --cp-comm-type {kind}: there are p2p, all_gather, a2a and a2a+p2p; of a list by "
        "layer write the one of most layers"
    )


def _recompute(granularity: str, name: str) -> Recompute:
    if granularity not in (ATTENTION, FULL):
        raise NotImported(
            f"{name}: --recompute-granularity {granularity}: there are {ATTENTION} and {FULL}"
        )
    return Recompute(granularity)


def _zero(given: dict[str, str]) -> int:
    if "use-torch-fsdp2" in given:
        return 3
    if "use-megatron-fsdp" in given or "use-custom-fsdp" in given:
        return STRATEGIES.get(given.get("data-parallel-sharding-strategy", "no_shard"), 3)
    return 1 if "use-distributed-optimizer" in given else 0


def _interleave(given: dict[str, str], pp: int, name: str) -> int:
    if "pipeline-model-parallel-layout" in given:
        stages = given["pipeline-model-parallel-layout"].count("|") + 1
        if stages % pp:
            raise NotImported(
                f"{name}: --pipeline-model-parallel-layout has {stages} stages, which pp {pp} does "
                "not divide; a layout has pp x virtual stages, parted by |"
            )
        return stages // pp
    if "num-virtual-stages-per-pipeline-rank" in given:
        argument = "num-virtual-stages-per-pipeline-rank"
        return whole(f"{name}: --{argument}", given[argument])
    if "num-layers-per-virtual-pipeline-stage" in given:
        if "num-layers" not in given:
            raise NotImported(
                f"{name}: --num-layers-per-virtual-pipeline-stage needs --num-layers beside it"
            )
        layers = whole(f"{name}: --num-layers", given["num-layers"])
        each = whole(f"{name}: layers of a stage", given["num-layers-per-virtual-pipeline-stage"])
        return max(1, layers // pp // each)
    return 1
