"""What the software of a run does: declared, never fitted.

The estimator prices an execution style, not a product: which attention kernel runs, whether
elementwise work is fused, which communication hides behind compute, how parameters are held, and
which of the device's bytes the reported peak counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopar.nouns.style import Style

AttentionKernel = Literal["flash", "flash_4", "flash_new", "flash_old", "unfused"]
MemoryDefinition = Literal["allocated", "reserved", "device"]
Context = Literal["ring", "gather", "heads"]
Routing = Literal["fused", "dispatched", "kernels", "eager"]
States = Literal["megatron", "deepspeed", "deepspeed_bf16", "hybrid_zero", "fsdp", "bf16"]


@dataclass(frozen=True)
class Software:
    """Execution style; the defaults are a Megatron-Core or torchtitan run of 2024."""

    attention: AttentionKernel = "flash"
    """flash: FlashAttention-2 and kin; flash_new: a kernel made for the device (FlashAttention-3,
    cuDNN); flash_4: FlashAttention-4 on Blackwell, and what has its ways; flash_old:
    FlashAttention-1 and its Triton port; unfused: scores go through memory."""
    attention_narrow: bool = False
    """Attention's products run in the 8-bit format of the others where those do."""
    style: Style = "compiled"
    """Norms, activations, residuals and rotary: each a call of its own (eager), or fused kernels
    (compiled), whether a compiler made them or a hand."""
    graphs: bool = False
    """Launches are recorded (CUDA graphs, XLA): the host never holds the device back."""
    moe_graphs: bool = False
    """Expert layers are recorded too: the host never waits for token counts."""
    routing: Routing = "kernels"
    """How tokens reach experts and come back: fused into the products, permuted inside the dispatch
    kernels, by a few kernels of their own, or by eager sorting, indexing and masking."""
    gradient_bytes: int = 0
    """Bytes of one element of a reduced gradient; 0: what `states` implies."""
    updates: Literal["all_gather", "broadcast"] = "all_gather"
    """How sharded optimizers hand out new parameters: gathered under the next forward, or each
    owner's part broadcast in turn before it."""
    bucket_bytes: float = 0.0
    """Gradients travel in buckets of this size; 0: 40 million elements, more on many ranks."""
    gradients: Literal["reduce_scatter", "all_reduce"] = "reduce_scatter"
    """How sharded optimizers (zero 1) get their gradients."""
    dispatch: Literal["all_to_all", "once_per_domain"] = "all_to_all"
    """Tokens go to every expert's rank, or once to each domain that holds some (DeepEP)."""
    imbalance: float = 1.0
    """Load of the busiest expert rank over the mean."""
    context: Context = "ring"
    """What ranks that share a sequence do in attention: keys and values pass round a ring (Liu et
    al. 2023), every rank gathers them (Dubey et al. 2024, section 3.3.2), or ranks trade rows for
    heads (Jacobs et al. 2023, DeepSpeed Ulysses, section 3)."""
    tp_overlap: bool = False
    dp_overlap: bool = True
    ep_overlap: bool = False
    p2p_overlap: bool = True
    steps_overlap: bool = False
    """Pipeline ranks begin their next step without waiting for the others: what needs all ranks,
    as the norm of gradients, is checked afterwards."""
    loss: Literal["eager", "fused", "chunked"] = "eager"
    """eager: logits, an fp32 copy, its softmax and gradients; fused: logits and their gradient;
    chunked: never all logits at once (Liger)."""
    selective: Literal["attention", "ops"] = "attention"
    """What selective recompute runs again: the attention core (Megatron), or every second product
    and all elementwise ops (torchtitan)."""
    dropout: bool = False
    states: States = "megatron"
    """How parameters, gradients and optimizer state are held.

    megatron: bf16 parameters, fp32 gradients, fp32 master and moments; fsdp: fp32 parameters,
    gradients and moments, gathered in bf16; deepspeed: 16-bit parameters and gradients, fp32
    master, moments and a gradient shard; deepspeed_bf16: whole fp32 gradients beside 16-bit ones;
    hybrid_zero: flattened 16-bit and fp32 copies of the shard's gradients too, and the
    roots of second moments that PyTorch's AdamW makes for all parameters at once; bf16: bf16
    parameters and gradients, fp32 moments and master.
    """
    memory: MemoryDefinition = "allocated"
    """What a reported peak counts: allocated tensors, the allocator's reserve, or all that the
    device has lost, context and communication library included."""


def default_software(family: str, kind: str, zero: int) -> Software:
    """What a run on a device of `family` does unless something else is declared."""
    states: States = "fsdp" if zero >= 2 else "megatron"
    if kind == "tpu" or family in ("gaudi", "trainium"):
        return Software(
            attention="flash_new",
            graphs=True,
            moe_graphs=True,
            routing="fused",
            tp_overlap=True,
            states=states,
        )
    if family == "blackwell":
        return Software(attention="flash_new", states=states)
    if kind == "cpu" or family == "volta":
        return Software(attention="unfused", style="eager", states=states)
    return Software(states=states)
