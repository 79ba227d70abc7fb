"""Peak memory of one rank, by what holds it, with the moment of the peak.

Parameters, gradients and optimizer state follow Rajbhandari et al. 2020 (ZeRO, section 3), saved
activations Korthikanti et al. 2022 (equations 1 to 6) generalised to grouped-query attention, gated
and routed MLPs, microbatches in flight Narayanan et al. 2021 (section 2.2). Three definitions of a
peak are told apart: `allocated` tensors, what the allocator has `reserved`, and what the `device`
has lost to this process, context and communication library included.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, fields, replace

from autopar.cost_models.bands import memory_band
from autopar.cost_models.constants import constant
from autopar.cost_models.family import Arch
from autopar.cost_models.layer_figures import LayerKept, Saved
from autopar.cost_models.pipeline_time import pipeline_of
from autopar.cost_models.precision import is_narrow, stream_bytes
from autopar.cost_models.software import Software
from autopar.nouns.layout import Layout
from autopar.nouns.recompute import ATTENTION, FULL, KEEP_ALL
from autopar.nouns.zero import ZERO, over

# Bytes a parameter: (weights, gradients, optimizer state).
STATE_BYTES = {
    "megatron": (2, 4, 12),
    "deepspeed": (2, 2, 16),
    "deepspeed_bf16": (2, 6, 12),
    "hybrid_zero": (2, 2, 22),
    "fsdp": (4, 4, 8),
    "bf16": (2, 2, 12),
}
# Bytes of one logit at the loss: the 16-bit logits and their gradient, and an eager loss's copies.
LOGIT_BYTES = {"eager": 12.0, "fused": 4.0, "chunked": 0.5}


@dataclass(frozen=True)
class Footprint:
    """Bytes of the rank that needs most, at its peak."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """Saved for backward, all microbatches in flight."""
    working: float
    """The layer (or loss) that is being computed at the peak."""
    gathered: float
    """Parameters gathered, gradients not yet scattered, communication buffers."""
    workspace: float
    """Workspaces of matrix products and small buffers that stay."""
    reserve: float
    """Freed, but kept by the allocator; 0 where only allocated bytes count."""
    outside: float
    """The device's context and the communication library; 0 where only the allocator's count."""
    rank: int
    """Of the pipeline."""
    moment: str
    """When the peak is reached."""

    @property
    def total(self) -> float:
        return sum(size for _, size in self.parts())

    @property
    def allocated(self) -> float:
        """What tensors hold."""
        return self.total - self.reserve - self.outside

    @property
    def reserved(self) -> float:
        """What the allocator has taken from the device."""
        return self.total - self.outside

    @property
    def band(self) -> tuple[float, float]:
        """Within which four of five published peaks of known definition lie."""
        return memory_band().around(self.total)

    def parts(self) -> list[tuple[str, float]]:
        """(name, bytes), in the order of the fields."""
        return [
            (f.name, getattr(self, f.name))
            for f in fields(self)
            if f.name not in ("rank", "moment")
        ]


def footprint(
    arch: Arch,
    layout: Layout,
    software: Software,
    precision: str,
    kept: LayerKept,
) -> Footprint:
    """The footprint of the fullest pipeline rank.

    precision: what matrix products read. kept: by a layer that recomputes nothing.
    """
    pipeline = pipeline_of(layout, arch.layers)
    held, layers = pipeline.held_layers(), pipeline.rank_layers()
    first, last = pipeline.end_ranks()
    ends = first | last
    # Of ranks without embedding and head only those can be fullest that hold most of something.
    between = [rank for rank in range(layout.pp) if rank not in ends]
    most = {max(between, key=of.__getitem__) for of in (held, layers) if between}
    ranks = [
        rank_footprint(arch, layout, software, rank, precision, kept) for rank in {*ends, *most}
    ]
    return max(ranks, key=lambda f: (f.total, -f.rank))


def rank_footprint(
    arch: Arch,
    layout: Layout,
    software: Software,
    rank: int,
    precision: str,
    kept: LayerKept,
) -> Footprint:
    """The footprint of one rank, with the layers in flight that its schedule gives it."""
    x = layout
    pipeline = pipeline_of(x, arch.layers)
    first, last = pipeline.end_ranks()
    has_embedding, has_head = rank in first, rank in last
    layers = pipeline.rank_layers()[rank]
    share = _moe_share(arch, layers, rank, x.pp)
    outside, routed = arch.mean_parameters(share)
    ends = arch.embedding_parameters * has_embedding + arch.head_parameters * has_head
    if arch.tied and has_head and not has_embedding:
        ends += arch.embedding_parameters
    dense = (outside * layers + ends) / x.tp
    expert = routed * layers / x.expert_ranks
    states = _states(dense, expert, x, software, precision)
    layer_local = outside / x.tp + routed / x.expert_ranks

    saved = saved_bytes(arch, x, software, share, precision, kept)
    again = 0.0
    if x.recompute.runs_again:
        plain = replace(x, recompute=KEEP_ALL)
        again = saved_bytes(arch, plain, software, share, precision, kept) - saved
    held = pipeline.held_layers()[rank]
    activations = saved * held
    tokens = x.microbatch * arch.seq / x.cp
    if software.states.startswith("deepspeed") and x.pp > 1:
        # Its pipeline keeps what each stage gave until its gradient is back (`pipe_buffers`).
        activations += stream_bytes(precision) * tokens * arch.hidden * held / layers
    logits = tokens * arch.vocab / x.tp * LOGIT_BYTES[software.loss] * has_head
    element = stream_bytes(precision)
    grad_working = arch.ffn * (2 if arch.gated else 1) / x.tp + 4 * arch.hidden
    grad_working *= element * tokens
    working, moment = max(
        (again + grad_working, "backward of a layer"), (logits, "the loss"), key=lambda w: w[0]
    )
    # One layer's gradients before they are scattered.
    split = over(x.zero, x.dp_shard)
    gathered = 4.0 * layer_local if split.gradients else 0.0
    if split.parameters:
        # Two layers' parameters, and an embedding or a head.
        gathered += min(2.0, layers) * element * layer_local
        gathered += element * min(ends, arch.vocab * arch.hidden) / x.tp
        if software.states.startswith("deepspeed"):
            gathered += 2 * constant("bucket_bytes") + constant("live_parameters_bytes")
    elif x.dp > 1:
        gathered += constant("bucket_bytes") * (2 if software.states.startswith("deepspeed") else 1)
    workspace, reserve, beyond = constant("workspace_bytes"), 0.0, 0.0
    if software.memory in ("reserved", "device"):
        reserve = constant("allocator_slack") * (activations + working + gathered)
    if software.memory == "device":
        groups = sum(size > 1 for size in (x.tp, x.pp, x.cp, x.ep, x.etp, x.dp))
        beyond = constant("context_bytes") + groups * constant("communicator_bytes")
    parts = (*states, activations, working, gathered, workspace, reserve, beyond)
    return Footprint(*parts, rank, moment)


def _states(
    dense: float, expert: float, x: Layout, software: Software, precision: str
) -> tuple[float, float, float]:
    """(parameters, gradients, optimizer) bytes from local parameter counts."""
    whole = dense + expert
    dense_shard = dense / (x.dp_shard * x.cp)
    expert_shard = expert / max(1, x.tp * x.cp * x.dp_shard / x.expert_ranks)
    shard = dense_shard + expert_shard
    weight, gradient, rest = STATE_BYTES[software.states]
    if software.gradient_bytes and software.states == "megatron":
        gradient = software.gradient_bytes
    wide = stream_bytes(precision)
    if wide > 2:  # no copy in 16 bits beside the one that is trained
        weight, gradient, rest = wide, wide, 2 * wide
    split = ZERO[x.zero]
    held = shard if split.parameters else whole
    parameters = weight * held
    if software.states == "fsdp" and wide == 2 and not split.parameters:
        # Products read a 16-bit copy, which alone is whole, gathered once a step.
        # Under pipelines FSDP2 gathers once and reduces once, and what is stored is split.
        stored = shard if split.gradients or (split.optimizer and x.pp > 1) else whole
        parameters = 2 * whole + weight * stored
    gradients = gradient * (shard if split.gradients else whole)
    optimizer = rest * (shard if split.optimizer else whole)
    if x.offloads:
        parameters, optimizer = 2 * held, 0.0
        gradients /= 2
    return parameters, gradients, optimizer


def _moe_share(arch: Arch, layers: float, stage: int, pp: int) -> float:
    """Share of a stage's layers that have experts; the dense ones come first."""
    if not arch.is_moe:
        return 0.0
    if pp == 1:
        return arch.moe_layers / arch.layers
    dense = min(max(0.0, arch.dense_layers - stage * layers), layers)
    return 1 - dense / layers


def saved_bytes(
    arch: Arch,
    layout: Layout,
    software: Software,
    share: float,
    precision: str,
    kept: LayerKept,
) -> float:
    """Activation bytes that one layer saves for backward, one microbatch, on one rank.

    `share` of the layer has experts. Operands of 8-bit products are saved in 8 bits; in 32 or 64
    bits all is as much wider. `kept`: see `footprint`.
    """
    x = layout
    tokens = x.microbatch * arch.seq / x.cp
    sp = x.tp if x.sequence_parallel else 1
    wider = stream_bytes(precision) / 2
    if x.recompute.policy == FULL:
        plain = replace(x, recompute=KEEP_ALL)
        again = wider * tokens * 2 * arch.hidden / sp * x.recompute.share
        rest = 1 - x.recompute.share
        return again + rest * saved_bytes(arch, plain, software, share, precision, kept)
    dropped = dropped_modules(x)
    ops = bool(dropped) and not x.recompute.modules and software.selective == "ops"
    operand = 1 if is_narrow(precision) else 2
    scores = 0.0
    if software.attention == "unfused" and "core_attn" not in dropped:
        scores = arch.heads * arch.seq / x.tp * (5 if software.dropout else 4)
    wide_norms = 8 * arch.hidden / sp if software.style == "eager" else 0.0
    total = wider * tokens * (scores + wide_norms)
    layers = ((kept.plain, 1 - share, {"mlp"}), (kept.routed, share, {"moe", "shared_experts"}))
    for saved, part, modules in layers:
        if saved is not None:
            own = saved.every_second if ops else _kept_bytes(saved, modules, dropped, operand / 2)
            total += part * own
    if share and "moe" not in dropped:
        # Ranks that split an expert gather its tokens, and hold their share of its width.
        gathered = x.expert_tp if x.sequence_parallel else 1
        per_width = 2.0 * (2 if arch.gated else 1) * (0.5 if ops else 1.0)
        per_width += operand * ("moe_act" not in dropped)
        per_width += 2 * (software.style == "eager" and arch.gated)
        width = arch.ffn / x.expert_tp
        routed = arch.top_k / sp * gathered * (per_width * width + 2 * 2 * arch.hidden)
        total += wider * tokens * share * routed * software.imbalance
    return total


def _kept_bytes(saved: Saved, modules: Set[str], dropped: Set[str], narrow: float) -> float:
    """Of a layer whose MLP goes by these names. narrow: bytes of a product's operand over those of
    the stream."""
    total = saved.inputs + narrow * saved.mixed
    total += saved.heads * ("mla_up_proj" not in dropped)
    total += narrow * saved.norms * ("layernorm" not in dropped)
    if not modules & dropped:
        total += saved.before + narrow * saved.after * ("moe_act" not in dropped)
    return total


def dropped_modules(layout: Layout) -> frozenset[str]:
    """Modules whose activations are run again instead of saved."""
    if layout.recompute.policy != ATTENTION:
        return frozenset()
    return frozenset(layout.recompute.modules or ("core_attn", "layernorm", "moe_act"))
