"""What an optimizer keeps of each parameter, for checkpoints."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from autopar.nouns.errors import UserError
from autopar.runtime.pytorch.groups import again
from autopar.runtime.pytorch.offload import host_like

_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, tuple[str, ...]]]
_known = weakref.WeakKeyDictionary()


def optimizer_state(
    optimizer: torch.optim.Optimizer, leaf: torch.Tensor, on_host: bool = False
) -> dict[str, torch.Tensor]:
    """The optimizer's tensors of ``leaf``, shaped like it or scalars, by name; zeros before the
    first step, in host memory where it is ``on_host``. ``step``, which counts them, is not among
    these: it is the trainer's own."""
    number = next(
        i for i, g in enumerate(optimizer.param_groups) if any(p is leaf for p in g["params"])
    )
    names = _known.setdefault(optimizer, {})
    if number not in names:
        names[number] = _kept(optimizer, number)
    state = optimizer.state[leaf]
    counts = "step" in names[number]
    kept = [name for name in names[number] if name != "step"]
    for name in kept:
        if state.get(name) is None:
            scalar = name.startswith(_SCALAR)
            if scalar:
                state[name] = leaf.new_zeros(())
            else:
                own = on_host and leaf.ndim > 0
                state[name] = host_like(leaf).zero_() if own else torch.zeros_like(leaf)
    if counts and "step" not in state:
        fused = optimizer.param_groups[number].get("fused", False)
        state["step"] = torch.zeros((), device=leaf.device if fused else None)
    return {name: state[name] for name in kept}


_SCALAR = ("mu_product", "eta")
"""Names under which torch's optimizers keep a number beside a parameter (NAdam, ASGD)."""


def _kept(optimizer: torch.optim.Optimizer, number: int) -> tuple[str, ...]:
    """Names that a trial step makes. Raises `UserError` for what no checkpoint could hold."""
    trial = nn.Parameter(torch.ones(2, 3))
    trial.grad = torch.ones(2, 3)
    made = again(optimizer, [trial], number)
    made.step()
    names = []
    for name, value in made.state[trial].items():
        shaped = isinstance(value, torch.Tensor) and value.shape == trial.shape
        if value is None:
            continue
        if not shaped and name != "step" and not name.startswith(_SCALAR):
            raise UserError(
                f"{type(optimizer).__name__} keeps {name!r} of every parameter, which is neither "
                "of its shape nor a count of steps: checkpoints cannot carry it to other plans"
            )
        names.append(name)
    return tuple(names)


def set_steps(optimizer: torch.optim.Optimizer, step: int) -> None:
    for state in optimizer.state.values():
        if "step" in state:
            if isinstance(state["step"], torch.Tensor):
                state["step"].fill_(step)
            else:
                state["step"] = step
