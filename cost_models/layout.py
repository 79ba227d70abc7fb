"""A layout by name: every degree and choice that `--fix` may pin, and whether it is legal.

Ranks are laid out as torchtitan and Megatron do, innermost first: tp, cp, dp_shard, dp_replicate,
pp. Experts borrow ranks of tp, cp and dp (parallel folding), innermost first: etp, ep, and what is
left holds the same parts of the same experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, cast

from autopar.cost_models.family import Arch
from autopar.cost_models.pipeline_time import Pipeline
from autopar.nouns.axes import CONTEXT, EXPERT, PIPELINE, REPLICATE, SHARD, TENSOR
from autopar.nouns.errors import UserError, did_you_mean
from autopar.nouns.offload import OFFLOAD
from autopar.pipeline.actions import ScheduleError
from autopar.pipeline.schedules.table import SCHEDULES, kind_of

Recompute = Literal["none", "selective", "full"]

DEGREES = (REPLICATE, SHARD, TENSOR, CONTEXT, EXPERT, PIPELINE)
_NAMED_FIRST = (TENSOR, CONTEXT, PIPELINE, REPLICATE)
"""`SHARD` takes what these leave."""
_COUNTS = (*DEGREES, "etp", "microbatch", "microbatches", "interleave", "zero", "global_batch")
_WORDS: dict[str, tuple[str, ...]] = {
    "recompute": ("none", "selective", "full"),
    "schedule": tuple(SCHEDULES),
    "sequence_parallel": ("on", "off"),
    "uneven": ("on", "off"),
}


_UNNAMED = ("offload_optimizer", "recompute_share", "recompute_modules", "etp", "uneven")
"""Fields that `--fix` does not take, and those of `rarely_named`."""


class LayoutError(UserError):
    """A layout that cannot be; the message gives the formula with its numbers."""


@dataclass(frozen=True)
class Layout:
    """All degrees and choices of one layout. `global_batch` and `microbatch` count sequences."""

    global_batch: int
    microbatch: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    zero: int = 1
    """State sharded over dp_shard: 0 nothing, 1 optimizer, 2 and gradients, 3 and parameters."""
    schedule: str = "1f1b"
    """By its name in `autopar.pipeline.schedules.table`."""
    interleave: int = 1
    """Pipeline stages per rank (virtual stages); half of them for schedules in waves."""
    recompute: Recompute = "none"
    recompute_share: float = 1.0
    """Share of the layers that `recompute` applies to."""
    recompute_modules: tuple[str, ...] = ()
    """What selective recompute runs again (`recompute.MODULES`); empty: what the software does."""
    sequence_parallel: bool = True
    offload_optimizer: bool = False
    etp: int = 0
    """Ranks that split each expert's matrices; 0: tp, less what ep takes of it (Megatron-Core's
    default, folded where ep and tp together are more than there are ranks)."""
    uneven: bool = False
    """Stages may differ by a layer: the last, then the first, have one less."""

    @property
    def expert_tp(self) -> int:
        """Ranks that split each expert's matrices."""
        return self.etp or math.gcd(self.tp, max(1, self.tp * self.cp * self.dp // self.ep))

    @property
    def expert_ranks(self) -> int:
        """Ranks that one layer's experts are spread over."""
        return self.ep * self.expert_tp

    def expert_copies(self, ranks: int) -> int:
        """Of `ranks` (tp, cp and data ranks together), those that hold the same experts."""
        return max(1, ranks // self.expert_ranks)

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def device_count(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def microbatches(self) -> int:
        """Microbatches of one step through one pipeline."""
        return max(1, round(self.global_batch / (self.dp * self.microbatch)))

    def pipeline(self, layers: int) -> Pipeline:
        """How ``layers`` pass through the pipeline."""
        return Pipeline(self.schedule, self.pp, self.interleave, self.microbatches, layers)

    def __str__(self) -> str:
        """The text form that `--fix` reads back."""
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _UNNAMED:
                continue
            if isinstance(value, bool):
                value = "on" if value else "off"
            parts.append(f"{field.name}={value}")
        return ",".join(parts) + rarely_named(self)


def rarely_named(layout: Layout) -> str:
    """Choices that most layouts leave alone, as `--fix` takes them: `",etp=2,uneven=on"`."""
    return (f",etp={layout.etp}" if layout.etp else "") + (",uneven=on" if layout.uneven else "")


def fix_pairs(texts: Iterable[str]) -> dict[str, str]:
    """`["tp=2,dp_shard=2", "zero=3"]` as a dict; spaces part choices as commas do.

    Raises:
        LayoutError: a part that is not `key=value`, or a key with two values.
    """
    pairs: dict[str, str] = {}
    for part in (part for text in texts for part in text.replace(",", " ").split()):
        name, _, value = part.partition("=")
        if not name or not value:
            raise LayoutError(
                f"--fix {part!r} is not KEY=VALUE; write for example --fix tp=2,zero=3"
            )
        if pairs.setdefault(name, value) != value:
            raise LayoutError(f"--fix gives {name} twice, as {pairs[name]} and as {value}")
    return pairs


def parse_fix(text: str) -> dict[str, int | str]:
    """`"tp=8,pp=4,recompute=full"` as `choices_of` has it."""
    return choices_of(fix_pairs([text]))


def choices_of(pairs: Mapping[str, str]) -> dict[str, int | str]:
    """What the user pinned, counts as numbers.

    Raises:
        LayoutError: an unknown name or a value that the name does not take.
    """
    choices: dict[str, int | str] = {}
    for name, value in pairs.items():
        part = f"{name}={value}"
        if name == "offload" and value in OFFLOAD:
            if value != OFFLOAD[0]:
                raise LayoutError(
                    f"--fix {part}: layouts of architecture figures keep the optimizer's state on "
                    "devices so far; `autopar plan` prices it in host memory, of a model and "
                    "without cp, ep and sequence_parallel"
                )
            continue
        if name not in _COUNTS and name not in _WORDS:
            known = (*_COUNTS, *_WORDS)
            raise LayoutError(
                f"--fix {part!r}: no choice called {name!r}. {did_you_mean(name, known)}"
                f"There are {', '.join(known)}"
            )
        if name in _WORDS:
            if value not in _WORDS[name]:
                raise LayoutError(f"--fix {part!r}: {name} is one of {', '.join(_WORDS[name])}")
            choices[name] = value
            continue
        least = 0 if name == "zero" else 1
        number = int(value) if re.fullmatch("[0-9]{1,12}", value) else -1
        if number < least or (name == "zero" and number > 3):
            wanted = "0, 1, 2 or 3" if name == "zero" else "a whole number from 1"
            raise LayoutError(f"--fix {part!r}: {name} is {wanted}")
        choices[name] = number
    return choices


def layout_from_fix(
    choices: Mapping[str, int | str], device_count: int, global_batch: int | None = None
) -> Layout:
    """The one layout that `choices` name; data parallelism takes the devices that are left.

    Degrees that are not named are 1, `microbatch` is 1, `zero` is 1 (3 where only dp_shard is
    named, 0 where replicas share no state), `schedule` follows from `interleave`.

    Raises:
        LayoutError: the degrees do not multiply to the device count, no batch is known, or state
            is to be split over replicas that keep it whole.
    """
    given = dict(choices)
    batch = given.pop("global_batch", global_batch)
    if batch is None:
        raise LayoutError("no global batch: add global_batch=N (sequences) to --fix")
    number = {name: int(given.get(name, 1)) for name in DEGREES}
    model = number[TENSOR] * number[CONTEXT] * number[PIPELINE]
    if SHARD not in given:
        named = model * number[REPLICATE]
        rest, left = divmod(device_count, named)
        if left or rest == 0:
            raise LayoutError(
                f"{' x '.join(f'{name} {number[name]}' for name in _NAMED_FIRST)} = {named} does "
                f"not divide {device_count} devices, which they and dp_shard must multiply to"
            )
        number[SHARD] = rest
    replicas = number[REPLICATE]
    whole = replicas > 1 and number[SHARD] * number[CONTEXT] == 1
    if whole and int(given.get("zero", 0)) > 0:
        raise LayoutError(
            f"zero={given['zero']} splits state over dp_shard, but dp_replicate={replicas} leaves "
            f"dp_shard=1 of {device_count} devices, so nothing is split: dp_shard={replicas} in "
            "its place shards, zero=0 replicates"
        )
    usual_zero = 0 if whole else 1 if number[PIPELINE] > 1 or number[TENSOR] > 1 else 3
    interleave = int(given.get("interleave", 1))
    dp = number[REPLICATE] * number[SHARD]
    microbatch = int(given.get("microbatch", 1))
    if "microbatches" in given:
        implied, left = divmod(int(batch), dp * int(given["microbatches"]))
        if left or ("microbatch" in given and implied != microbatch):
            raise LayoutError(
                f"global batch {batch} is not dp {dp} x microbatches {given['microbatches']}"
                f" x microbatch {given.get('microbatch', '(a whole number)')}"
            )
        microbatch = implied
    default_schedule = "interleaved-1f1b" if interleave > 1 else "1f1b"
    return Layout(
        global_batch=int(batch),
        microbatch=microbatch,
        zero=int(given.get("zero", usual_zero)),
        interleave=interleave,
        schedule=str(given.get("schedule", default_schedule)),
        recompute=cast(Recompute, given.get("recompute", "none")),
        sequence_parallel=given.get("sequence_parallel", "on") == "on",
        dp_replicate=number[REPLICATE],
        dp_shard=number[SHARD],
        tp=number[TENSOR],
        cp=number[CONTEXT],
        ep=number[EXPERT],
        pp=number[PIPELINE],
        etp=int(given.get("etp", 0)),
        uneven=given.get("uneven") == "on",
    )


def check_layout(arch: Arch, layout: Layout, device_count: int) -> None:
    """Refuse a layout that cannot run.

    Raises:
        LayoutError: every rule that it breaks, each with its formula and numbers.
    """
    broken = illegal(arch, layout, device_count)
    if broken:
        raise LayoutError("; ".join(broken))


def illegal(arch: Arch, layout: Layout, device_count: int) -> list[str]:
    """One sentence for every rule that `layout` breaks."""
    x, broken = layout, []
    if x.device_count != device_count:
        broken.append(
            f"dp_replicate {x.dp_replicate} x dp_shard {x.dp_shard} x cp {x.cp} x tp {x.tp} x pp "
            f"{x.pp} = {x.device_count}, but the cluster has {device_count} devices"
        )
    for what, size in (("heads", arch.heads), ("ffn", arch.ffn)):
        if size % x.tp:
            broken.append(f"tp {x.tp} does not divide {what} {size}")
    if arch.latent is None and arch.kv_heads % x.tp and x.tp % arch.kv_heads:
        broken.append(f"tp {x.tp} and kv_heads {arch.kv_heads}: neither divides the other")
    stages = x.pipeline(arch.layers).stages
    least = arch.layers // stages
    can_be = arch.layers + 2 >= stages  # the embedding and the head may be stages of their own
    if arch.layers % stages and not x.uneven:
        way = f" (add uneven=on for stages of {least} and {least + 1})" if can_be else ""
        broken.append(f"{_stages(x)} = {stages} stages do not divide {arch.layers} layers{way}")
    elif not can_be:
        broken.append(
            f"{_stages(x)} = {stages} stages for {arch.layers} layers: some would have none"
        )
    if x.interleave > 1 and x.pp == 1:
        broken.append(f"interleave {x.interleave} needs pp > 1")
    if x.global_batch % (x.dp * x.microbatch):
        each = x.dp * x.microbatch
        less = x.global_batch // each * each
        near = f"{less} or {less + each}" if less else f"{each}"
        broken.append(
            f"dp {x.dp} x microbatch {x.microbatch} = {each} does not divide the global batch "
            f"{x.global_batch}; give --global-batch {near}, or fewer data ranks"
        )
    elif x.pp > 1:
        try:
            kind_of(x.schedule, x.pp, x.microbatches, x.interleave)
        except ScheduleError as error:
            broken.append(str(error))
    if x.cp > 1 and arch.seq % (2 * x.cp):
        broken.append(f"2 x cp {x.cp} chunks do not divide the sequence {arch.seq}")
    if x.tp > 1 and x.sequence_parallel and (arch.seq // x.cp) % x.tp:
        broken.append(f"sequence parallel: tp {x.tp} does not divide the sequence {arch.seq}")
    if x.ep > 1 and not arch.is_moe:
        broken.append(f"ep {x.ep} for a model without experts")
    elif x.ep > 1:
        if arch.experts % x.ep:
            broken.append(f"ep {x.ep} does not divide {arch.experts} experts")
        if (x.tp * x.cp * x.dp) % x.ep:
            broken.append(
                f"ep {x.ep} does not divide tp {x.tp} x cp {x.cp} x dp {x.dp} = "
                f"{x.tp * x.cp * x.dp}"
            )
    if x.etp and not arch.is_moe:
        broken.append(f"etp {x.etp} for a model without experts")
    elif x.etp:
        if x.tp % x.etp:
            broken.append(f"etp {x.etp} does not divide tp {x.tp}, whose ranks it takes")
        if arch.ffn % x.etp:
            broken.append(f"etp {x.etp} does not divide the experts' ffn {arch.ffn}")
        if (x.tp * x.cp * x.dp) % (x.ep * x.etp):
            broken.append(
                f"etp {x.etp} x ep {x.ep} = {x.ep * x.etp} does not divide tp {x.tp} x cp {x.cp} "
                f"x dp {x.dp} = {x.tp * x.cp * x.dp}"
            )
    if x.zero == 3 and x.pp > 1 and x.microbatches > 1 and x.schedule == "gpipe":
        broken.append("zero 3 under gpipe would gather every parameter for every microbatch twice")
    return broken


def _stages(x: Layout) -> str:
    """What multiplies to the number of stages."""
    waves = SCHEDULES[x.schedule].stages
    return f"pp {x.pp} x interleave {x.interleave}" + (f" x {waves}" if waves > 1 else "")
