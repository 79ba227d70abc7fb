"""Running a model in float64 where it says float32: the reference of `verify` and of the tests.

Models cast to float32 inside (norms, softmax, rotary tables), whatever their parameters are. Under
`Wide` those casts and factories make float64, so that rounding cannot hide a wrong result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Wide(TorchFunctionMode):
    """Replaces every float dtype argument by float64, and ``.float()`` by ``.double()``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            return args[0].double()
        args = tuple(torch.float64 if _narrow(a) else a for a in args)
        kwargs = {k: torch.float64 if _narrow(v) else v for k, v in (kwargs or {}).items()}
        if func is F.rms_norm and kwargs.get("eps", args[3] if len(args) > 3 else None) is None:
            args, kwargs["eps"] = args[:3], torch.finfo(torch.float32).eps  # as in float32
        return func(*args, **kwargs)


def _narrow(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _NARROW
