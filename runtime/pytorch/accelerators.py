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
