"""Masks that flex attention's `create_mask` and transformers make from a function of indices.

torch maps the function over every batch, head, query and key (`torch.vmap`), which is no op. The
same function of indices that broadcast gives the same mask, as long as it computes entry by entry.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.torch_private.modes import mapped_over_indices, scalar_indexing
from autopar.torch_private.ops import op_name

_ENTRY_BY_ENTRY = frozenset(
    "index select slice unsqueeze squeeze expand alias view detach lift_fresh arange full ones "
    "zeros new_full new_ones new_zeros full_like ones_like zeros_like scalar_tensor to _to_copy "
    "__and__ __or__ __xor__".split()
)


_LIBRARY, _EXPANDED = "transformers.masking_utils", "_vmap_expansion_sdpa"
"""Where transformers maps a function over indices; of a model of it, it has been imported."""


@contextmanager
def mask_functions_broadcast() -> Iterator[None]:
    """Inside, functions of indices that make masks are called once, with indices that broadcast."""
    module, name = mapped_over_indices
    indexing, mode = scalar_indexing
    plain, plain_mode = getattr(module, name), getattr(indexing, mode)
    library: Any = sys.modules.get(_LIBRARY)
    own = {n: getattr(library, n) for n in (_EXPANDED, mode) if hasattr(library, n)}

    def mapped(fn: Callable[..., Any], prefix: Any, *rest: Any, **others: Any) -> Any:
        whole = prefix == () and not rest and not others
        return _broadcast(fn) if whole else plain(fn, prefix, *rest, **others)

    setattr(module, name, mapped)
    setattr(indexing, mode, nullcontext)
    for name_there in own:
        setattr(library, name_there, _broadcast if name_there == _EXPANDED else nullcontext)
    try:
        yield
    finally:
        for name_there, was in own.items():
            setattr(library, name_there, was)
        setattr(module, name, plain)
        setattr(indexing, mode, plain_mode)


def _broadcast(fn: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """b [b], h [h], q [s], k [t] -> [b, h, s, t]"""

    def mask(*indices: torch.Tensor) -> torch.Tensor:
        wide = [
            index.view([-1 if dim == place else 1 for dim in range(len(indices))])
            for place, index in enumerate(indices)
        ]
        last = _last()
        made: torch.Tensor = fn(*wide)
        _check_entries(fn, last)
        return made.expand([index.shape[0] for index in indices])

    return mask


def _check_entries(fn: Callable[..., Any], last: Any) -> None:
    """Raises where the function has computed with several entries at once."""
    mode: Any = get_proxy_mode()
    for node in reversed(mode.tracer.graph.nodes) if mode is not None else ():
        if node is last:
            return
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        name = op_name(node.target)
        if node.op == "call_function" and not pointwise and name not in _ENTRY_BY_ENTRY:
            raise UnsupportedOpError(
                f"the mask function {getattr(fn, '__name__', fn)} calls {node.target}, which is "
                "not computed entry by entry: make what it needs before, and index it"
            )


def _last() -> Any:
    mode: Any = get_proxy_mode()
    return None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)
