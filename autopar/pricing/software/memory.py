"""What published software holds of a stage: states, activations, and what passes.

Parameters, gradients and optimizer state follow Rajbhandari et al. 2020 (ZeRO, section 3), saved
activations Korthikanti et al. 2022 (equations 1 to 6), microbatches in flight Narayanan et al. 2021
(section 2.2).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from autopar.cost_models.constants import constant
from autopar.cost_models.precision import is_narrow
from autopar.nouns.recompute import FULL
from autopar.pricing.software.again import dropped
from autopar.pricing.software.figures import Figures, Saved
from autopar.pricing.software.states import STATE_BYTES, split_of
from autopar.pricing.software.trainer import Trainer

# Bytes of one logit at the loss: the 16-bit logits and their gradient, and an eager loss's copies.
LOGIT_BYTES = {"eager": 12.0, "fused": 4.0, "chunked": 0.5}


@dataclass(frozen=True, slots=True)
class Overhead:
    """Bytes of a rank beside what a model and its passes hold.

    workspace: of matrix products, and small buffers that stay. reserved: freed, but kept by the
    allocator. outside: the device's context and the communication library. The last two are 0
    where the software's own figure does not count them.
    """

    workspace: float
    reserved: float
    outside: float


def overhead_of(trainer: Trainer, passing: float) -> Overhead:
    """passing: bytes of activations and of what is gathered, which the allocator hands out anew."""
    x, counted = trainer.layout, trainer.software.memory
    groups = sum(size > 1 for size in (x.tp, x.pp, x.cp, x.ep, x.etp, x.dp))
    outside = constant("context_bytes") + groups * constant("communicator_bytes")
    return Overhead(
        workspace=constant("workspace_bytes"),
        reserved=constant("allocator_slack") * passing if counted != "allocated" else 0.0,
        outside=outside if counted == "device" else 0.0,
    )


def states_bytes(trainer: Trainer, outside: float, routed: float) -> tuple[float, float, float]:
    """(parameters, gradients, optimizer state) of so many elements of parameters on a model rank,
    outside and in routed experts."""
    x, software = trainer.layout, trainer.software
    whole = outside + routed
    shard = outside / (x.dp_shard * x.cp) + routed / x.expert_copies(x.tp * x.cp * x.dp_shard)
    weight, gradient, rest = STATE_BYTES[software.states]
    if software.gradient_bytes and software.states == "megatron":
        gradient = software.gradient_bytes
    if (wide := trainer.element_bytes) > 2:  # no copy in 16 bits beside the one that is trained
        weight, gradient, rest = wide, wide, 2 * wide
    split = split_of(trainer)
    kept = shard if split.parameters else whole
    parameters = weight * kept
    if software.states == "fsdp" and wide == 2 and not split.parameters:
        # Products read a 16-bit copy, which alone is whole, gathered once a step.
        # Under pipelines FSDP2 gathers once and reduces once, and what is stored is split.
        stored = shard if split.gradients or (split.optimizer and x.pp > 1) else whole
        parameters = 2 * whole + weight * stored
    gradients = gradient * (shard if split.gradients else whole)
    if x.offloads:
        return 2 * kept, gradients / 2, 0.0
    return parameters, gradients, rest * (shard if split.optimizer else whole)


def gathered_bytes(trainer: Trainer, root: Figures, layer: float, layers: int) -> float:
    """Parameters gathered and gradients not yet scattered, and communication buffers.

    layer: elements of the largest layer's parameters on a model rank; layers: how many there are.
    """
    x, deepspeed = trainer.layout, trainer.software.states.startswith("deepspeed")
    split = split_of(trainer)
    # One layer's gradients before they are scattered.
    total = 4.0 * layer if split.gradients else 0.0
    if split.parameters:
        # Two layers' parameters, and an embedding or a head.
        total += trainer.element_bytes * min(2, layers) * layer
        total += trainer.element_bytes * root.largest
        if deepspeed:
            total += 2 * constant("bucket_bytes") + constant("live_parameters_bytes")
    elif x.dp > 1:
        total += constant("bucket_bytes") * (2 if deepspeed else 1)
    return total


def saved_bytes(unit: Figures, trainer: Trainer) -> float:
    """That one layer saves for backward of one microbatch.

    Operands of 8-bit products are saved in 8 bits.
    """
    x, software = trainer.layout, trainer.software
    own = x.tp if x.sequence_parallel else 1
    wider = trainer.element_bytes / 2
    if x.recompute.policy == FULL:
        again = trainer.element_bytes * unit.tokens * unit.hidden / own * x.recompute.share
        rest = 1 - x.recompute.share
        return again + rest * saved_bytes(unit, trainer.keeping_all)
    gone = dropped(x.recompute)
    ops = bool(gone) and not x.recompute.modules and software.selective == "ops"
    narrow = (1 if is_narrow(trainer.precision) else 2) / 2
    modules = {"moe", "shared_experts"} if unit.experts else {"mlp"}
    kept = unit.saved.every_second if ops else _kept(unit.saved, modules, gone, narrow)
    if unit.attention is not None and software.attention == "unfused" and "core_attn" not in gone:
        kept += wider * unit.attention.scores * (5 if software.dropout else 4)
    if software.style == "eager":  # norms read and keep fp32 copies
        kept += wider * unit.tokens * 8 * unit.hidden / own
    return kept + wider * _routed(unit, trainer, gone, ops)


def working_bytes(unit: Figures, trainer: Trainer) -> float:
    """What backward of a layer makes: what it runs again, and gradients."""
    again = 0.0
    if trainer.layout.recompute.runs_again:
        again = saved_bytes(unit, trainer.keeping_all) - saved_bytes(unit, trainer)
    if unit.experts is not None:
        width = unit.experts.width * (2 if unit.experts.gated else 1) / trainer.layout.tp
    else:
        width = sum(p.columns for p in unit.products if p.name in ("gate", "up"))
    return again + trainer.element_bytes * unit.tokens * (width + 4 * unit.hidden)


def loss_bytes(root: Figures, trainer: Trainer) -> float:
    return root.logits * LOGIT_BYTES[trainer.software.loss]


def handed_on_bytes(unit: Figures, trainer: Trainer) -> float:
    """DeepSpeed's pipeline keeps what each stage gave until its gradient is back
    (`pipe_buffers`)."""
    if not trainer.software.states.startswith("deepspeed") or trainer.layout.pp == 1:
        return 0.0
    return trainer.element_bytes * unit.tokens * unit.hidden


def _kept(saved: Saved, modules: Set[str], gone: Set[str], narrow: float) -> float:
    """Of a layer whose MLP goes by these names. narrow: bytes of a product's operand over those of
    the stream."""
    total = saved.inputs + narrow * saved.mixed
    total += saved.heads * ("mla_up_proj" not in gone)
    total += narrow * saved.norms * ("layernorm" not in gone)
    if not modules & gone:
        total += saved.before + narrow * saved.after * ("moe_act" not in gone)
    return total


def _routed(unit: Figures, trainer: Trainer, gone: Set[str], ops: bool) -> float:
    """Of routed experts, as of a stream of 16 bits."""
    experts, x = unit.experts, trainer.layout
    if experts is None or "moe" in gone:
        return 0.0
    own = x.tp if x.sequence_parallel else 1
    # Ranks that split an expert gather its tokens, and hold their share of its width.
    gathered = x.expert_tp if x.sequence_parallel else 1
    operand = 1 if is_narrow(trainer.precision) else 2
    per_width = 2.0 * (2 if experts.gated else 1) * (0.5 if ops else 1.0)
    per_width += operand * ("moe_act" not in gone)
    per_width += 2 * (trainer.software.style == "eager" and experts.gated)
    each = per_width * experts.width / x.expert_tp + 2 * 2 * unit.hidden
    return unit.tokens * experts.top_k / own * gathered * each * trainer.software.imbalance
