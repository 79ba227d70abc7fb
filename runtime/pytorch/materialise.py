"""Memory behind tensors that are on meta."""

from __future__ import annotations

import torch
from torch import nn

from autopar.torch_private.modules import parameters_of


def unfilled(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a tensor on meta, full of nan: what nobody fills shows in the first loss, and
    never is what happened to lie there, which may be the right numbers of another tensor."""
    with torch.no_grad():
        made = torch.empty_like(like, device=device)
        if made.is_floating_point() or made.is_complex():
            made.fill_(torch.nan)
        elif made.dtype is not torch.bool:
            made.fill_(torch.iinfo(made.dtype).min)
    return made


def materialise(module: nn.Module, device: torch.device) -> None:
    """Gives every parameter of ``module`` that is still on meta memory of its own; ties stay."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in parameters_of(part).items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    own = unfilled(parameter, device)
                    made[id(parameter)] = nn.Parameter(own, parameter.requires_grad)
                parameters_of(part)[name] = made[id(parameter)]
