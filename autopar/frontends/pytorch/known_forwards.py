"""Methods of transformers' classes that read values, and what they compute without any.

A row of `KNOWN` names a class, and for methods of it functions that compute the same of tensors
alone, while a model is traced. Like the rows of `experts_known`, where the experts are one call, a
row holds for the text that its digest is of; the tests compare both in float64.

JetMoE      puts the routes in the order of their experts, of which it counts how many each has. Its
            attention projects every token by the experts of its routes and back: here every expert
            multiplies, and the routes say which results count.
Qwen4-Exp   asks for every token which blocks of keys it may see. Here the mask must be causal for
            every batch: then all tokens see the same blocks, up to their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopar.frontends.pytorch.experts_known import jetmoe_routes
from autopar.frontends.pytorch.known_indexer import chosen_tokens
from autopar.frontends.pytorch.known_rows import MODELS, row_of


@dataclass(frozen=True, slots=True)
class KnownForward:
    """A class with methods that read values.

    digest:   of the functions ``reads`` of its file, the text of which is known.
    computes: by method what it does, of the module and the method's arguments.
    called:   modules inside that ``computes`` calls as the library does.
    dense:    whether it multiplies by all experts where the library does by those of a route.
    """

    digest: str
    reads: tuple[str, ...]
    computes: Mapping[str, Callable[..., Any]]
    called: tuple[str, ...] = ()
    dense: bool = False


def known_forward(module: nn.Module) -> KnownForward | None:
    """See `row_of`."""
    return row_of(module, KNOWN)


@contextmanager
def known_forwards(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Inside, what `KNOWN` says of the model's modules runs where a trace is taken; yields the
    modules in which every expert multiplies every token."""
    rows = {id(m): row for m in model.modules() if (row := known_forward(m))}
    methods = {(type(m), name) for m in model.modules() for name in _computed(rows.get(id(m)))}

    def instead(name: str, module: nn.Module) -> Callable[..., Any] | None:
        row = rows.get(id(module))
        return None if row is None else partial(row.computes[name], module)

    with ExitStack() as stack:
        for kind, name in sorted(methods, key=repr):
            stack.enter_context(replaced(kind, name, partial(instead, name)))
        yield tuple(p for p, m in model.named_modules() if (r := rows.get(id(m))) and r.dense)


def _computed(row: KnownForward | None) -> tuple[str, ...]:
    return () if row is None else tuple(row.computes)


@contextmanager
def replaced(
    kind: type[nn.Module], name: str, instead: Callable[[nn.Module], Callable[..., Any] | None]
) -> Iterator[None]:
    """Inside, where a trace is taken, modules of a class run what ``instead`` gives for them, if
    any, as their method ``name``."""
    plain: Any = getattr(kind, name)

    @wraps(plain)
    def method(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        other = instead(module) if get_proxy_mode() is not None else None
        return plain(module, *args, **kwargs) if other is None else other(*args, **kwargs)

    setattr(kind, name, method)
    try:
        yield
    finally:
        setattr(kind, name, plain)


def _jetmoe_router(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As the library's, but the counts stay a tensor."""
    logits = module.layer(x).float()
    index, gates = jetmoe_routes(module, logits, x)
    counts = nn.functional.one_hot(index, module.num_experts).sum((0, 1))
    order = index.flatten().sort(0)[1]
    rows = order.div(module.top_k, rounding_mode="trunc")
    return order, rows, gates.flatten()[order], counts, logits


def _jetmoe_map(module: Any, x: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    samples, length, width = x.shape
    rows = x.reshape(-1, width)
    *_, logits = module.router(rows)
    index, gates = jetmoe_routes(module.router, logits, rows)
    every = torch.einsum("nd,ehd->neh", rows, module.input_linear.weight)
    chosen = every.gather(1, index.unsqueeze(-1).expand(-1, -1, module.hidden_size))
    return chosen.view(samples, length, module.top_k, -1), logits, (index, gates)


def _jetmoe_reduce(module: Any, x: Tensor, routes: tuple[Tensor, Tensor]) -> Tensor:
    samples, length, count, width = x.shape
    index, gates = routes
    hot = nn.functional.one_hot(index, module.num_experts).to(x.dtype) * gates.unsqueeze(-1)
    weighted = torch.einsum("nkh,nke->neh", x.reshape(-1, count, width), hot)
    made = torch.einsum("neh,edh->nd", weighted, module.output_linear.weight)
    bias: Tensor = module.bias
    return made.view(samples, length, module.input_size) + bias


_JETMOE = f"{MODELS}jetmoe.modeling_jetmoe."
KNOWN: Mapping[str, KnownForward] = {
    f"{_JETMOE}JetMoeTopKGating": KnownForward(
        "ac1c9c1dee51dfbf",
        ("JetMoeTopKGating.forward",),
        {"forward": _jetmoe_router},
        ("layer",),
    ),
    f"{_JETMOE}JetMoeMoA": KnownForward(
        "4a65608b623ff997",
        (
            *("JetMoeMoA.map", "JetMoeMoA.reduce", "JetMoeAttention.forward"),
            *("JetMoeTopKGating.forward", "JetMoeParallelExperts.forward"),
        ),
        {"map": _jetmoe_map, "reduce": _jetmoe_reduce},
        ("router",),
        dense=True,
    ),
    f"{MODELS}qwen4_exp.modeling_qwen4_exp.Qwen4ExpTextQSAIndexer": KnownForward(
        "6bd665ea8f256efd",
        ("Qwen4ExpTextQSAIndexer.forward", "apply_rotary_pos_emb"),
        {"forward": chosen_tokens},
        ("index_qk_proj", "q_layernorm", "k_layernorm"),
    ),
}
