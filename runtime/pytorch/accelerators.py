"""The accelerator that a process computes on: what is asked of it is asked here, by no one's name.

Beside CUDA's it may be any device that torch has streams for; `autopar rehearse` puts one of its
own in the place.
"""

from __future__ import annotations

from typing import Any

import torch


def is_accelerator(device: torch.device) -> bool:
    """Whether ``device`` works beside the host, with memory and streams of its own."""
    return device.type not in ("cpu", "meta")


def module_of(device: torch.device) -> Any:
    """`torch.cuda`, or what another accelerator has in its place."""
    return torch.get_device_module(device)


def multiplies_groups(device: torch.device) -> bool:
    """Whether torch has a kernel there for products of groups of rows: on GPUs of CUDA's kind from
    capability 8.0 (Ampere) on."""
    if not is_accelerator(device):
        return False
    asked = getattr(module_of(device), "get_device_capability", lambda device: None)
    capability = asked(device)
    return isinstance(capability, tuple) and capability >= (8, 0)  # Intel's is a dict
