"""Which tokens the attention of Qwen4-Exp lets each token see, where its mask is causal.

Tokens lie in blocks, and every token sees those blocks before its own place that score best with
it, and what of its own block lies before it. The library reads off the mask, token by token, which
blocks are complete; with a causal mask, rows of as many complete blocks lie together.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.frontends.pytorch.constant_values import constant_of
from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.torch_private.modes import without_modes, without_torch_function

MOST = 256
"""Groups of rows, each of which is ranked by a few ops of its own."""


def chosen_tokens(
    module: Any,
    x: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    past_key_values: object,
) -> Tensor:
    """The mask [b, 1, s, s] of the tokens that a forward of the indexer chooses."""
    samples, length, _ = x.shape
    ratio, count = module.compress_ratio, module.block_topk
    blocks = length // ratio
    if past_key_values is not None or not _is_causal(attention_mask, length):
        raise UnsupportedOpError(
            f"{type(module).__name__} reads off its mask which blocks of tokens are complete, and "
            "the mask is not causal alone, the same for every batch: give no attention_mask (pad "
            "behind the tokens and set those labels to -100), position ids that count on, and "
            "use_cache=False"
        )
    if blocks - count > MOST:
        raise UnsupportedOpError(
            f"{type(module).__name__} ranks {blocks} blocks of {ratio} tokens, and planning takes "
            f"at most {MOST} more than the {count} that are chosen: shorten the sequences"
        )
    scores = _scores(module, x, position_embeddings, blocks)
    taken = _taken(scores, length, ratio, count)
    whole = taken.unsqueeze(-1).expand(-1, -1, -1, ratio).reshape(samples, length, blocks * ratio)
    place = torch.arange(length)
    own = place // ratio >= ((place + 1) // ratio).unsqueeze(1)  # of a block that is not complete
    chosen: Tensor = F.pad(whole, (0, length - blocks * ratio)) | own
    chosen = chosen & (place <= place.unsqueeze(1))
    return chosen.unsqueeze(1)


def _is_causal(mask: Tensor, length: int) -> bool:
    """Whether a mask, of booleans or added, shows every row the columns up to its own."""
    with without_torch_function():  # none of these calls is the layer's
        values = constant_of(mask)
    if values is None or tuple(mask.shape[-2:]) != (length, length):
        return False
    with without_modes(), without_torch_function():
        seen = values if values.dtype is torch.bool else values == 0
        return bool((seen == torch.ones(length, length, dtype=torch.bool).tril()).all())


def _scores(module: Any, x: Tensor, embeddings: tuple[Tensor, Tensor], blocks: int) -> Tensor:
    """Of every token with every block, [b, s, blocks]."""
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    width, ratio = module.index_head_dim, module.compress_ratio
    cos, sin = embeddings
    parts = [module.index_n_heads * width, module.index_kv_heads * width]
    q, keys = module.index_qk_proj(x).split(parts, dim=-1)
    q = module.q_layernorm(q.reshape(*x.shape[:2], -1, width))
    q = rotate(q, cos=cos, sin=sin, unsqueeze_dim=2)
    grouped = keys[:, : blocks * ratio].reshape(x.shape[0], blocks, ratio, width)
    pooled = module.k_layernorm(grouped.float().mean(2).to(keys.dtype)).unsqueeze(2)
    first = (t[:, : blocks * ratio : ratio] for t in (cos, sin))
    pooled = rotate(pooled, None, *first, unsqueeze_dim=2).squeeze(2)
    met: Tensor = torch.matmul(q.float(), pooled.float().transpose(1, 2).unsqueeze(1))
    return torch.relu(met).sum(2) / math.sqrt(width)


def _taken(scores: Tensor, length: int, ratio: int, count: int) -> Tensor:
    """Which blocks a token takes, [b, s, blocks]: all that are complete while there are no more
    than ``count``. Rows of as many are ranked together, among these alone, so that equal scores
    are told apart as the library's call does."""
    samples, _, blocks = scores.shape
    ranked = min((count + 1) * ratio - 1, length)
    parts = [torch.ones(samples, ranked, blocks, dtype=torch.bool)]
    for complete in range(count + 1, blocks + 1):
        rows = scores[:, complete * ratio - 1 : min((complete + 1) * ratio - 1, length), :complete]
        best = rows.topk(count, dim=-1).indices
        parts.append(F.one_hot(best, blocks).sum(2) > 0)
    return torch.cat(parts, dim=1)
