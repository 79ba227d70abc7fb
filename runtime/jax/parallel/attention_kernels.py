"""Attention by a kernel of the device, where it has one that can.

======  =====================================================  =====================================
device  what                                                   where
======  =====================================================  =====================================
GPU     cuDNN's, by `jax.nn.dot_product_attention`             bfloat16 or float16, head size at
                                                               most 128 and a multiple of 8, from
                                                               compute capability 8.0 on
TPU     splash attention, a Pallas kernel that jax brings; of  bfloat16, both lengths a multiple of
        a causal mask or a window it computes what shows       128
======  =====================================================  =====================================
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autopar.runtime.jax.parallel.tables import Array

_LANES = 128
"""Of a TPU's vectors: blocks of a kernel are made of as many rows."""
_TILES = (512, 256, _LANES)
"""Rows and columns that a kernel takes at a time, the first that divides."""


def platform() -> str:
    """``cpu``, ``gpu`` or ``tpu``: of the mesh that is computed on, else of this process."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return str(jax.default_backend() if device is None else device.platform)


def kernel_for(q: Array, k: Array) -> Any:
    """The function of (q, k, v, causal, scale, window) that attends by a kernel; None: there is
    none."""
    on = platform()
    if on in ("gpu", "cuda") and _cudnn_can(q, k):
        return by_cudnn
    whole = all(x.shape[2] % _LANES == 0 for x in (q, k))
    if on == "tpu" and whole and q.dtype == k.dtype == jnp.bfloat16:
        return by_splash
    return None


def _cudnn_can(q: Array, k: Array) -> bool:
    d = q.shape[-1]
    if q.dtype not in (jnp.bfloat16, jnp.float16) or d > 128 or d % 8 or k.dtype != q.dtype:
        return False
    return float(getattr(jax.local_devices()[0], "compute_capability", "0")) >= 8.0


def by_cudnn(
    q: Array, k: Array, v: Array, causal: bool, scale: Any, window: int | None = None
) -> Array:
    turned = (x.swapaxes(1, 2) for x in (q, k, v))
    back = None if window is None else (window - 1, 0)
    attended = jax.nn.dot_product_attention(
        *turned, scale=scale, is_causal=causal, local_window_size=back, implementation="cudnn"
    )
    return attended.swapaxes(1, 2)


def by_splash(
    q: Array, k: Array, v: Array, causal: bool, scale: Any, window: int | None = None,
    interpret: bool = False,
) -> Array:  # fmt: skip
    """Keeps what it gives and a number for each row, under the name that layers keep results by.

    ``interpret``: on any device, in place of the kernel.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    rows, columns = (next(n for n in _TILES if not x.shape[2] % n) for x in (q, k))
    shape = (q.shape[2], k.shape[2])
    mask: Any = masks.CausalMask(shape) if causal else masks.FullMask(shape)
    if window is not None:
        mask = masks.LocalMask(shape, window_size=(window - 1, 0), offset=0)
    kernel = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * q.shape[1]),
        block_sizes=splash.BlockSizes(
            block_q=rows, block_kv=columns, block_q_dkv=rows, block_kv_dkv=columns,
            block_q_dq=rows, block_kv_dq=columns,
        ),
        residual_checkpoint_name="attention",
        interpret=interpret,
    )  # fmt: skip
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)  # it has no scale of its own
    attended: Array = jax.vmap(kernel)(scaled, k, v)
    return attended
