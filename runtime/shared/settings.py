"""How an emitted program is to be run: the constants beside its mesh, and what cannot be run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType, MappingProxyType

from autopar.nouns.buckets import MIB
from autopar.nouns.errors import UserError
from autopar.nouns.expert_placement import ExpertPlacement
from autopar.nouns.mesh import Mesh
from autopar.nouns.offload import OFFLOAD
from autopar.nouns.plan import Plan
from autopar.nouns.prefetch import USUAL
from autopar.nouns.recipes import GATHERED
from autopar.nouns.reduction import ranks_inside
from autopar.nouns.workload import Workload, training
from autopar.nouns.zero import ZERO, ZERO_LEVELS, Zero

FIRST_LOSS_SCALE = 65536.0
LOSS_SCALE_GROWS_EVERY = 2000
"""Steps in a row: the rule of `torch.amp.GradScaler`, in float16."""


class ProgramError(UserError):
    """A program that cannot be run as it stands; the text says what to change."""


@dataclass(frozen=True, slots=True)
class Settings:
    """``SETTINGS`` of an emitted program.

    zero:         what ``dp_shard`` cuts, see `autopar.nouns.zero`; the most of any stage, which
                  say their own where they differ.
    microbatches: gradient accumulation steps of one step.
    precision:    dtype of compute. ``float32`` computes in the dtypes that the model declares;
                  ``bfloat16`` and ``float16`` replace float32 in parameters where they are used and
                  in inputs, never in stored parameters, gradients or optimizer state.
    recompute:    ``none``, ``compute`` or ``full``; the program's forward does it.
    units:        module path patterns (``*`` matches one path component) whose parameters are
                  gathered and reduced together; the rest of the model is one more unit.
    offload:      ``none``, or ``optimizer``: its state is in host memory between steps.
    bucket_mib:   of gradients that DDP adds up at once; None: its own.
    reduce_dtype: of gradients that FSDP2 reduces, in half precision; None: as they are stored.
    prefetch:     units ahead that FSDP2 gathers split parameters, see `autopar.nouns.prefetch`.
    narrow:       weights, by patterns of their names, whose pieces are made 8 bits of before FSDP2
                  gathers them, see `autopar.rules.narrow_gathers`.
    forward_only: units that no gradient passes, so that none is gathered ahead for backward.
    two_level:    how many neighbours of the data ranks DDP adds up gradients among first, and then
                  across; 0: as the library does.
    seq_slices:   into which the sequences of a microbatch are cut, that pass the stages of a
                  pipeline one after the other.
    whole_inputs: batch entries that every microbatch and rank gets uncut.
    alike:        numbers that every sample has of an entry, whose program has no others.
    sequences:    those of which ranks along ``cp``, or slices, have pieces of dim 1.
    limits:       parameters by name that each step brings between two numbers, the lower first,
                  None for one that is open.
    placed:       by the module that holds a layer's experts, the experts of each rank
                  (`autopar.nouns.expert_placement`); others lie in order.
    order:        how those lie: ``contiguous``, or ``zigzag``, where rank i of n has pieces i and
                  2 n - 1 - i of 2 n.
    """

    zero: int = 0
    microbatches: int = 1
    seq_slices: int = 1
    precision: str = "float32"
    recompute: str = "none"
    units: tuple[str, ...] = ()
    whole_inputs: tuple[str, ...] = ()
    alike: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sequences: tuple[str, ...] = ()
    order: str = "contiguous"
    offload: str = "none"
    bucket_mib: int | None = None
    reduce_dtype: str | None = None
    prefetch: int = USUAL
    narrow: tuple[str, ...] = ()
    forward_only: tuple[str, ...] = ()
    two_level: int = 0
    limits: tuple[tuple[str, float | None, float | None], ...] = ()
    placed: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @property
    def passes(self) -> int:
        """How often a stage runs forward in a step."""
        return self.microbatches * self.seq_slices

    @property
    def offloads(self) -> bool:
        """Whether the optimizer's state is in host memory."""
        return self.offload == "optimizer"

    @property
    def split(self) -> Zero:
        """What ``zero`` splits over ``dp_shard``, where that has more than one rank."""
        return ZERO[self.zero]

    def __post_init__(self) -> None:
        if self.zero not in ZERO_LEVELS:
            raise ProgramError(f"zero={self.zero}: state sharding is 0, 1, 2 or 3")
        if self.offload not in OFFLOAD:
            raise ProgramError(f"offload={self.offload!r}: choose {' or '.join(OFFLOAD)}")
        if self.microbatches < 1:
            raise ProgramError(f"microbatches={self.microbatches}: at least 1 is needed")
        for name, of_ranks in self.placed.items():
            try:
                ExpertPlacement.checked(of_ranks)
            except ValueError as error:
                raise ProgramError(f"placed[{name!r}]={of_ranks}: give {error}") from None
        if self.seq_slices < 1:
            raise ProgramError(f"seq_slices={self.seq_slices}: at least 1 is needed")
        if self.precision not in ("float64", "float32", "bfloat16", "float16"):
            raise ProgramError(
                f"precision={self.precision!r}: choose float32, bfloat16, float16 or float64"
            )


def check_settings(plan: Plan, mesh: Mapping[str, int], settings: Settings) -> None:
    """Raises `ProgramError` where the program in a plan folder is not that of its ``plan.json``.

    mesh: the program's ``MESH``.
    """
    usual = Settings()  # of what a JAX program does not have
    planned, own = plan.program_mesh, Mesh(tuple(mesh), tuple(mesh.values())).trimmed()
    differing = [("the mesh", str(planned), str(own))] if planned != own else []
    decided = {
        "zero": str(max(stage.zero for stage in plan.stages)),
        "microbatches": str(plan.microbatches),
        "seq_slices": str(plan.seq_slices or 1),
        "precision": plan.precision,
        "recompute": plan.each("recompute"),
        "offload": plan.each("offload"),
        "reduce_dtype": str(plan.reduce_dtype),
        "prefetch": str(USUAL if plan.prefetch is None else plan.prefetch),
        "two_level": str(ranks_inside(plan.all_reduce) or 0),
        "placed": str({n: p.ranks for n, p in sorted(plan.expert_placement.items())}),
        "bucket_mib": str(None if plan.bucket_bytes is None else plan.bucket_bytes // MIB),
    }
    for name, there in decided.items():
        here = str(getattr(settings, name, getattr(usual, name)))
        if there != here:
            differing.append((name, there, here))
    if (narrow := bool(getattr(settings, "narrow", ()))) != (plan.gather_dtype is not None):
        differing.append(("gather_dtype", str(plan.gather_dtype), GATHERED if narrow else "None"))
    scatters = dict(getattr(settings, "scatters", {}))  # of JAX programs alone
    if scatters != dict(plan.scatters):
        differing.append(("scatters", str(dict(plan.scatters)), str(scatters)))
    if any(stage.spread for stage in plan.stages):
        differing.append(("the number of spreads", str(len(plan.spreads)), "1"))
    if differing:
        shown = ", ".join(f"{name} is {a} there and {b} here" for name, a, b in differing)
        raise ProgramError(
            f"plan.json and the program beside it differ: {shown}. A plan is changed by planning "
            "again, with `--fix` for what is to be so"
        )


class StaleSettings(UserError):
    """The workload is trained otherwise now than when it was planned."""


def check_workload(plan: Plan, workload: Workload) -> None:
    """Raises `StaleSettings` where the file says other things now than the plan was made for."""
    settings: list[tuple[str, object, object]] = [("optimizer", plan.optimizer, workload.optimizer)]
    settings += [("precision", plan.precision, workload.precision)]
    settings += [("clip_norm", plan.clip_norm, workload.clip_norm)]
    differing = [
        f"{name} is {now!r} and was {then!r}" for name, then, now in settings if then != now
    ]
    if differing:
        raise StaleSettings(
            f"{plan.workload} has changed since it was planned: {', '.join(differing)}. Plan it "
            "again with `autopar plan`, or put that back"
        )


def changed_training(
    plan: Plan, workload: Workload, constants: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """What has changed since the plan was made, and does not make it stale, a sentence each.
    ``constants``: digests of what a loss closes over, as `Captured.digests` names them."""
    planned = plan.fingerprints.training
    now = {**training(workload), **constants} if planned else {}
    notes = [
        f"{name} is {now[name]} and was {planned[name]} when {plan.workload} was planned"
        for name in now
        if name != "code" and name in planned and planned[name] != now[name]
    ]
    if "code" in planned and planned["code"] != now["code"]:
        notes.append(
            f"the code of {plan.workload} has changed since it was planned, and what the model "
            "computes has not: initial weights or batches may be others"
        )
    return notes


def tell_changes(
    plan: Plan, workload: Workload, constants: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Prints `changed_training` to stderr."""
    for note in changed_training(plan, workload, constants):
        print(f"autopar: note: {note}; what it is now is used", file=sys.stderr, flush=True)


def compiled(text: str, file: str) -> CodeType:
    """The program's code. Raises `ProgramError` where the text is not Python."""
    try:
        return compile(text, file, "exec")
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise ProgramError(f"{file}:{error.lineno}: {error.msg}: {line}") from None
