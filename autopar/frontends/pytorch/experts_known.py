"""Experts of transformers whose classes the library's table does not know, and what they compute.

A row of `KNOWN` names a class and a function that computes what its forward does, with its experts
as one call. The library's own forward either reads the routes' values, which a trace has not, or
multiplies every token with every expert. That both compute the same is tested in float64, against
the text of the library's functions that the digest is of: classes that read otherwise are traced
as they stand.

DBRX        two matrices beside each other are read as one, w2 turned around.
JetMoE      puts rows in the order of their experts, whose number of rows each it reads.
LLaMA 4     the score multiplies what goes into an expert. All others got zeros, of which they make
            zeros with gradients of zero: SiLU(0) * 0.
LongCat     routes beyond the last expert give back the token; they take part with a weight of zero,
            spread over experts.
Switch      one expert a token; the token that its expert has no room for has a weight of zero.
NLLB        reads its mask of the first expert as numbers of experts: what is not chosen goes
            through expert 0, what is through expert 1, weighted. The others never have a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.frontends.pytorch.known_rows import MODELS, row_of

Run = Callable[..., Tensor]
"""Experts on ``(x, index, weights, up, down, [up_bias, down_bias])``, as `experts` of a program."""


@dataclass(frozen=True, slots=True)
class Known:
    """A class of experts.

    digest:     of the functions ``reads`` of its file, the text of which is known.
    computes:   what its forward does, of the module, the experts' call and forward's arguments.
    between:    what lies between the products, of the module and what the first one gives.
    width:      of what the first product gives.
    transposed: of what the call is given.
    bias:       whether it is given biases.
    drops:      the share that is dropped between or behind the products, of the module.
    called:     modules inside that ``computes`` calls as the library does.
    """

    digest: str
    reads: tuple[str, ...]
    computes: Callable[..., Any]
    between: Callable[[Any, Tensor], Tensor]
    width: Callable[[Any], int]
    transposed: bool = False
    bias: bool = False
    drops: Callable[[Any], float] = lambda module: 0.0
    called: tuple[str, ...] = ()


def known(module: Any) -> Known | None:
    """See `row_of`."""
    return row_of(module, KNOWN)


def _gated(act: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return act(gate) * up


def _dbrx(module: Any, run: Run, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    stored = (-1, module.ffn_hidden_size, module.hidden_size)
    first, beside, second = (m.view(stored) for m in (module.mlp.w1, module.mlp.v1, module.mlp.w2))
    up = torch.cat([first, beside], 1)
    rows = x.reshape(-1, module.hidden_size)
    made = run(rows, index, weights, up, second.transpose(1, 2))
    return made.view(x.shape[0], -1, module.hidden_size)


def jetmoe_routes(router: Any, logits: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Experts and weights of every token's routes, [n, k] each."""
    best, index = logits.topk(router.top_k, dim=1)
    return index, torch.softmax(best, dim=1).type_as(x)


def _jetmoe(module: Any, run: Run, x: Tensor) -> Tensor:
    rows = x.reshape(-1, module.input_size)
    *_, logits = module.router(rows)
    index, weights = jetmoe_routes(module.router, logits, rows)
    made = run(rows, index, weights, module.input_linear.weight, module.output_linear.weight)
    bias: Tensor = module.bias
    return made.view(x.shape) + bias


def _llama4(module: Any, run: Run, x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.reshape(-1, module.hidden_dim)
    experts = module.experts
    _, logits = module.router(rows)
    best, index = torch.topk(logits, module.router.top_k, dim=1)
    scores = torch.sigmoid(best.float()).to(best.dtype)
    routed = (rows.unsqueeze(1) * scores.unsqueeze(2)).reshape(-1, module.hidden_dim)
    each = index.reshape(-1, 1)
    ones = torch.ones_like(each, dtype=rows.dtype)
    made = run(routed, each, ones, experts.gate_up_proj, experts.down_proj)
    out = module.shared_expert(rows)
    return out + made.view(*index.shape, -1).sum(1), logits


def _longcat(module: Any, run: Run, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    count = module.num_routed_experts
    up, down = module.gate_up_proj[:count], module.down_proj
    same = index >= count
    made = run(x, index.remainder(count), weights.masked_fill(same, 0), up, down)
    share = weights.masked_fill(~same, 0).sum(1, keepdim=True)
    return made + (x * share).to(x.dtype)


def _switch(module: Any, run: Run, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """``chosen`` [n, 1, experts] of zeros and at most one 1."""
    each = [module[f"expert_{i}"] for i in range(module.num_experts)]
    up, down = (torch.stack([getattr(e, name).weight for e in each]) for name in ("wi", "wo"))
    taken = chosen.sum(-1).to(weights.dtype)
    return run(x, chosen.argmax(-1), weights * taken, up, down)


def _nllb(module: Any, run: Run, x: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    each = [module[f"expert_{i}"] for i in range(module.num_experts)]
    up, down = (torch.stack([getattr(e, name).weight for e in each]) for name in ("fc1", "fc2"))
    biases = (torch.stack([getattr(e, name).bias for e in each]) for name in ("fc1", "fc2"))
    return run(x, mask, weights, up, down, *biases)


def _dropped_by_switch(module: Any) -> float:
    return float(module["expert_0"].dropout.p)


def _dropped_by_nllb(module: Any) -> float:
    return max(float(module.moe_token_dropout), float(module["expert_0"].dropout.p))


KNOWN: Mapping[str, Known] = {
    f"{MODELS}dbrx.modeling_dbrx.DbrxExperts": Known(
        "69f7267edace3b7e",
        ("DbrxExperts.forward", "DbrxExpertGLU.forward"),
        _dbrx,
        lambda module, h: _gated(module.mlp.activation_fn, h),
        lambda module: 2 * module.ffn_hidden_size,
    ),
    f"{MODELS}jetmoe.modeling_jetmoe.JetMoeMoE": Known(
        "1dab64c6a2b6bcde",
        ("JetMoeMoE.forward", "JetMoeTopKGating.forward", "JetMoeParallelExperts.forward"),
        _jetmoe,
        lambda module, h: _gated(module.activation, h),
        lambda module: 2 * module.hidden_size,
        called=("router",),
    ),
    f"{MODELS}llama4.modeling_llama4.Llama4TextMoe": Known(
        "c4d11cc21a22e727",
        ("Llama4TextMoe.forward", "Llama4Router.forward", "Llama4TextExperts.forward"),
        _llama4,
        lambda module, h: _gated(module.experts.act_fn, h),
        lambda module: 2 * module.experts.expert_dim,
        transposed=True,
        called=("router", "shared_expert"),
    ),
    f"{MODELS}longcat_flash.modeling_longcat_flash.LongcatFlashExperts": Known(
        "d47c93e4869663e9",
        ("LongcatFlashExperts.forward",),
        _longcat,
        lambda module, h: _gated(module.act_fn, h),
        lambda module: 2 * module.intermediate_size,
    ),
    f"{MODELS}switch_transformers.modeling_switch_transformers.SwitchTransformersExperts": Known(
        "f4e347e3a9613aaa",
        ("SwitchTransformersExperts.forward", "SwitchTransformersDenseActDense.forward"),
        _switch,
        lambda module, h: module["expert_0"].act(h),
        lambda module: module["expert_0"].wi.weight.shape[0],
        drops=_dropped_by_switch,
    ),
    f"{MODELS}nllb_moe.modeling_nllb_moe.NllbMoeExperts": Known(
        "ccc09b32d9044f06",
        ("NllbMoeExperts.forward", "NllbMoeDenseActDense.forward"),
        _nllb,
        lambda module, h: module["expert_0"].act(h),
        lambda module: module["expert_0"].fc1.weight.shape[0],
        bias=True,
        drops=_dropped_by_nllb,
    ),
}
