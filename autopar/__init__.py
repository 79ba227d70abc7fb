"""autopar: from an ordinary model and a cluster to a distributed training program."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopar.nouns.workload import Workload, parallelize

if TYPE_CHECKING:
    from autopar.rules.implementations.kernels import register_kernel
    from autopar.rules.registry import register as register_rule
    from autopar.runtime.trainers import load
    from autopar.script.plan import plan

__all__ = ["Workload", "load", "parallelize", "plan", "register_kernel", "register_rule"]

# Found on first use, so that importing autopar stays instant.
_LATER = {
    "load": ("autopar.runtime.trainers", "load"),
    "plan": ("autopar.script.plan", "plan"),
    "register_kernel": ("autopar.rules.implementations.kernels", "register_kernel"),
    "register_rule": ("autopar.rules.registry", "register"),
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        module, attribute = _LATER[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'autopar' has no attribute {name!r}")
