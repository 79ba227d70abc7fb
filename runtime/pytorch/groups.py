"""A user's optimizer, with its groups of parameters, over the pieces that this rank holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from autopar.nouns.errors import UserError
from autopar.runtime.pytorch.held import Held
from autopar.runtime.pytorch.parameters import region_shape

Choice = str | Sequence[str] | Callable[[str, torch.Tensor], bool]
"""Which parameters are in a group: names or patterns (``*.bias``), or what says so of a name and a
tensor of the whole shape without memory."""
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class GroupsError(UserError):
    """Groups of parameters that overlap, miss some, or an optimizer that cannot take pieces."""


def own_optimizer(
    held: Iterable[Held],
    optimizer: torch.optim.Optimizer | Make,
    groups: Sequence[Mapping[str, Any]] | None,
    model: Any,
) -> torch.optim.Optimizer:
    """``optimizer`` over pieces: one over the parameters of ``model``, which from then on updates
    the pieces instead, or a callable that takes groups. Raises `GroupsError`."""
    every = list(held)
    if isinstance(optimizer, torch.optim.Optimizer):
        if groups is not None:
            raise GroupsError(
                "load(optimizer=..., groups=...): the optimizer has groups already; give one, or "
                "a callable as optimizer, such as torch.optim.AdamW"
            )
        if any(map(_has_stepped, optimizer.state.values())):
            raise GroupsError(
                "load(optimizer=...): the optimizer has taken steps, which would be lost; make a "
                "new one, and continue a run by trainer.load(folder)"
            )
        parts, options = _of_pieces(_groups_of(optimizer, model), every), _options(optimizer)
        optimizer.__init__(parts, **options)  # type: ignore[misc]  # the script's own object
        made = optimizer
    else:
        made = optimizer(_of_pieces(_chosen(groups, every), every))
    if any(region_shape(h.region) != h.declared.shape for h in every):
        check_by_element(made)
    return made


def _has_stepped(state: Mapping[str, Any]) -> bool:
    if "step" in state:
        return float(state["step"]) > 0
    return any(isinstance(v, torch.Tensor) and bool(v.count_nonzero()) for v in state.values())


def _options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The arguments of its class; what a group overrides stands in the group."""
    taken = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in taken}


Given = list[tuple[list[str], dict[str, Any]]]


def _groups_of(optimizer: torch.optim.Optimizer, model: Any) -> Given:
    if not isinstance(model, nn.Module):
        raise GroupsError(
            "load(optimizer=...) with an optimizer needs the module whose parameters it has, as in "
            "load(plan, model=model, optimizer=torch.optim.AdamW(model.parameters())); with a "
            "class, give a callable: optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3)"
        )
    names = {id(p): name for name, p in model.named_parameters()}
    given: Given = []
    for number, group in enumerate(optimizer.param_groups):
        strange = [p for p in group["params"] if id(p) not in names]
        if strange:
            raise GroupsError(
                f"group {number} of the optimizer has a parameter of shape "
                f"{list(strange[0].shape)} that is none of the model's: make the optimizer of the "
                "parameters of the module that load gets, and for that load alone"
            )
        options = {name: value for name, value in group.items() if name != "params"}
        given.append(([names[id(p)] for p in group["params"]], options))
    return given


def _chosen(groups: Sequence[Mapping[str, Any]] | None, held: Sequence[Held]) -> Given:
    if groups is None:
        return [([h.name for h in held if h.leaf.requires_grad], {})]
    given: Given = []
    for group in groups:
        if "params" not in group:
            raise GroupsError(
                "a group is a dict with params: names, patterns such as '*.bias', or a function of "
                "name and parameter; the rest are options, as in {'params': '*', 'lr': 1e-3}"
            )
        choose = _chooser(group["params"])
        names = [
            h.name
            for h in held
            if h.leaf.requires_grad
            and choose(h.name, torch.empty(h.declared.shape, dtype=h.declared.dtype, device="meta"))
        ]
        given.append((names, {name: v for name, v in group.items() if name != "params"}))
    return given


def _chooser(choice: Choice) -> Callable[[str, torch.Tensor], bool]:
    if callable(choice):
        return choice
    patterns = [choice] if isinstance(choice, str) else list(choice)
    return lambda name, _: any(fnmatchcase(name, pattern) for pattern in patterns)


def _of_pieces(given: Given, held: Sequence[Held]) -> list[dict[str, Any]]:
    """Groups of leaves. Raises `GroupsError` for names that stand in two groups or in none."""
    of: dict[str, int] = {}
    for number, (names, _) in enumerate(given):
        for name in names:
            if name in of:
                raise GroupsError(
                    f"{name} is in groups {of[name]} and {number} of the optimizer: a parameter "
                    "is updated by one; let the choices exclude each other"
                )
            of[name] = number
    missing = list(dict.fromkeys(h.name for h in held if h.leaf.requires_grad and h.name not in of))
    if missing:
        more = f" and {len(missing) - 3} more" if missing[3:] else ""
        raise GroupsError(
            f"{', '.join(missing[:3])}{more} are trained and in no group of the optimizer: add a "
            "group for them, or freeze them (requires_grad_(False)) before planning"
        )
    parts: list[dict[str, Any]] = [{**options, "params": []} for _, options in given]
    for h in held:
        if h.leaf.requires_grad and h.leaf.numel():
            parts[of[h.name]]["params"].append(h.leaf)
    return parts


def check_by_element(optimizer: torch.optim.Optimizer) -> None:
    """Raises `GroupsError` for an optimizer that updates a matrix otherwise than its pieces: it is
    tried on a small one, whole and cut."""
    draw = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(4, 6, generator=draw) for _ in range(4))
    results = []
    for cuts in ([(0, 4, 0, 6)], [(0, 3, 0, 6), (3, 4, 0, 6)], [(0, 4, 0, 2), (0, 4, 2, 6)]):
        pieces = [nn.Parameter(start[a:b, c:d].clone()) for a, b, c, d in cuts]
        tried = again(optimizer, pieces)
        for grad in grads:
            for piece, (a, b, c, d) in zip(pieces, cuts, strict=True):
                piece.grad = grad[a:b, c:d].clone()
            tried.step()
        whole = torch.empty(4, 6)
        for piece, (a, b, c, d) in zip(pieces, cuts, strict=True):
            whole[a:b, c:d] = piece.detach()
        results.append(whole)
    if not all(torch.allclose(results[0], other, rtol=1e-5) for other in results[1:]):
        raise GroupsError(
            f"{type(optimizer).__name__} updates a matrix as a whole, and under this plan ranks "
            "hold pieces of matrices: choose an optimizer that goes by elements (AdamW, SGD, ...), "
            "or a plan that splits no parameter: --fix tp=1,zero=0"
        )


def again(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], group: int = 0
) -> torch.optim.Optimizer:
    """One like a group of ``optimizer`` over other parameters."""
    options = {k: v for k, v in optimizer.param_groups[group].items() if k != "params"}
    made = type(optimizer)([{**options, "params": list(parameters)}], **_options(optimizer))
    return made
