"""Which words attention may look at."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, create_mask

from benchmarks.spellings.pytorch.frame import (
    LAYERS,
    B,
    C,
    H,
    S,
    V,
    layer,
    model,
    padded,
    tokens,
)


class Attention(nn.Module):
    """Queries, keys and values [b, h, s, d] by products of their own; `weights` is the spelling."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(C, C) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, H, C // H).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = self.weights(q @ k.transpose(-2, -1) / math.sqrt(C // H)) @ v
        made: Tensor = self.out(mixed.transpose(1, 2).reshape(b, s, C))
        return made

    def weights(self, scores: Tensor) -> Tensor:
        raise NotImplementedError


class Heads(nn.Module):
    """The products of attention without its middle."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(C, C) for _ in range(4))

    def split(self, x):
        b, s, _ = x.shape
        return [p(x).view(b, s, H, C // H).transpose(1, 2) for p in (self.q, self.k, self.v)]

    def merge(self, y):
        b, _, s, _ = y.shape
        return self.out(y.transpose(1, 2).reshape(b, s, C))


class Shared(nn.Module):
    """Words, four residual layers of ``attention(x, mask)`` and an MLP, and the loss."""

    def __init__(self, attention):
        super().__init__()
        self.embed = nn.Embedding(V, C)
        self.attentions = nn.ModuleList(attention() for _ in range(LAYERS))
        self.mlps = nn.ModuleList(mlp() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(C)
        self.head = nn.Linear(C, V)

    def run(self, tokens, labels, mask):
        x = self.embed(tokens)
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = x + attention(x, mask)
            x = x + mlp(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, V), labels.view(-1))


def mlp():
    return nn.Sequential(nn.LayerNorm(C), nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C))


@layer("causal mask", "masked_fill of a tril buffer", "karpathy/nanoGPT, model.py")
class TrilBuffer(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(S, S)).view(1, 1, S, S))

    def weights(self, scores: Tensor) -> Tensor:
        s = scores.shape[-1]
        return F.softmax(scores.masked_fill(self.bias[:, :, :s, :s] == 0, float("-inf")), dim=-1)


@layer(
    "causal mask",
    "logarithm of tril kept in an attribute for nn.MultiheadAttention",
    "pytorch/examples, word_language_model/model.py",
)
class SubsequentMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(C, H, batch_first=True)
        self.src_mask = None

    def forward(self, x):
        if self.src_mask is None or self.src_mask.size(0) != x.size(1):
            size = x.size(1)
            self.src_mask = torch.log(torch.tril(torch.ones(size, size))).to(x.device)
        return self.attention(x, x, x, attn_mask=self.src_mask, need_weights=False)[0]


@layer("causal mask", "is_causal of the fused attention", "Lightning-AI/litgpt, litgpt/model.py")
class IsCausal(Heads):
    def forward(self, x, mask=None):
        q, k, v = self.split(x)
        scale = 1.0 / math.sqrt(q.size(-1))
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=0.0, scale=scale, is_causal=mask is None
        )
        return self.merge(y)


@layer(
    "causal mask",
    "where with a full of the least number",
    "huggingface/transformers v4.40, models/gpt2/modeling_gpt2.py",
)
class WhereOfLeast(Attention):
    def __init__(self):
        super().__init__()
        allowed = torch.tril(torch.ones((S, S), dtype=torch.bool)).view(1, 1, S, S)
        self.register_buffer("bias", allowed, persistent=False)

    def weights(self, scores):
        queries, keys = scores.size(-2), scores.size(-1)
        causal = self.bias[:, :, keys - queries : keys, :keys]
        least = torch.finfo(scores.dtype).min
        least = torch.full([], least, dtype=scores.dtype, device=scores.device)
        scores = torch.where(causal, scores, least)
        return F.softmax(scores, dim=-1).type(scores.dtype)


@layer(
    "causal mask",
    "scores times ones and minus a large number times the rest",
    "huggingface/pytorch-openai-transformer-lm, model_pytorch.py",
)
class TimesMask(Attention):
    def __init__(self):
        super().__init__()
        self.register_buffer("b", torch.tril(torch.ones(S, S)).view(1, 1, S, S))

    def weights(self, scores):
        b = self.b[:, :, : scores.size(-2), : scores.size(-1)]
        scores = scores * b + -1e9 * (1 - b)
        return nn.Softmax(dim=-1)(scores)


# Padding: whole models that are handed a mask of the words.


class AddedMask(Heads):
    def forward(self, x, mask):
        q, k, v = self.split(x)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(C // H)
        if mask is not None:
            scores = scores + mask
        return self.merge(torch.matmul(nn.functional.softmax(scores, dim=-1), v))


@model(
    "padding mask",
    "one minus the mask times the least number, extended and added",
    "huggingface/transformers v4.40, modeling_utils.py (get_extended_attention_mask)",
    batch=padded,
)
class Extended(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(V, C)
        self.layer = nn.ModuleList([AddedMask() for _ in range(LAYERS)])
        self.output = nn.ModuleList([mlp() for _ in range(LAYERS)])
        self.decoder = nn.Linear(C, V)

    def extended(self, mask, dtype):
        if mask.dim() == 3:
            wide = mask[:, None, :, :]
        elif mask.dim() == 2:
            wide = mask[:, None, None, :]
        else:
            raise ValueError(f"wrong shape for a mask: {mask.shape}")
        wide = wide.to(dtype=dtype)
        return (1.0 - wide) * torch.finfo(dtype).min

    def forward(self, tokens, mask=None, labels=None):
        if mask is None:
            mask = torch.ones_like(tokens)
        hidden = self.embeddings(tokens)
        extended = self.extended(mask, hidden.dtype)
        for i, layer_module in enumerate(self.layer):
            hidden = hidden + layer_module(hidden, extended)
            hidden = hidden + self.output[i](hidden)
        logits = self.decoder(hidden)
        loss = None
        if labels is not None:
            loss = nn.CrossEntropyLoss()(logits.view(-1, V), labels.view(-1))
        output = (logits,)
        return (loss, *output) if loss is not None else output


def subsequent_mask(size):
    later = torch.triu(torch.ones(1, size, size), diagonal=1).type(torch.uint8)
    return later == 0


def attention(query, key, value, mask=None):
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    return torch.matmul(p_attn, value), p_attn


class MultiHeaded(nn.Module):
    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList([copy.deepcopy(nn.Linear(C, C)) for _ in range(4)])
        self.attn = None

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        n = query.size(0)
        query, key, value = [
            lin(x).view(n, -1, H, C // H).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        ]
        x, self.attn = attention(query, key, value, mask=mask)
        x = x.transpose(1, 2).contiguous().view(n, -1, C)
        return self.linears[-1](x)


@model(
    "padding mask",
    "boolean of words and of earlier words joined by and",
    "harvardnlp/annotated-transformer, the_annotated_transformer.py",
    batch=padded,
)
class StandardMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, C)
        block = nn.ModuleDict({"norm": nn.LayerNorm(C), "attn": MultiHeaded(), "mlp": mlp()})
        self.layers = nn.ModuleList([copy.deepcopy(block) for _ in range(LAYERS)])
        self.generator = nn.Linear(C, V)

    @staticmethod
    def make_std_mask(words):
        mask = (words != 0).unsqueeze(-2)
        return mask & subsequent_mask(words.size(-1)).to(mask.device)

    def forward(self, tokens, labels, mask):
        mask = self.make_std_mask(mask)
        x = self.embed(tokens) * math.sqrt(C)
        for block in self.layers:
            normed = block["norm"](x)
            x = x + block["attn"](normed, normed, normed, mask)
            x = x + block["mlp"](x)
        predicted = F.log_softmax(self.generator(x), dim=-1)
        return F.nll_loss(predicted.reshape(-1, V), labels.reshape(-1), ignore_index=-100)


@model(
    "padding mask",
    "src_key_padding_mask of nn.TransformerEncoder",
    "pytorch.org documentation, torch.nn.TransformerEncoder",
    batch=padded,
)
class KeyPadding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, C)
        encoder_layer = nn.TransformerEncoderLayer(
            d_model=C, nhead=H, dim_feedforward=2 * C, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(encoder_layer, num_layers=LAYERS)
        self.fc = nn.Linear(C, V)

    def forward(self, tokens, labels, mask):
        x = self.encoder(self.embed(tokens), src_key_padding_mask=mask == 0)
        return F.cross_entropy(self.fc(x).transpose(1, 2), labels)


def sequence_mask(rows, valid_len, value):
    index = torch.arange(rows.size(1), dtype=torch.float32, device=rows.device)
    valid = index[None, :] < valid_len[:, None]
    rows[~valid] = value
    return rows


def masked_softmax(scores, valid_lens=None):
    if valid_lens is None:
        return F.softmax(scores, dim=-1)
    valid_lens = torch.repeat_interleave(valid_lens, scores.shape[1])
    rows = sequence_mask(scores.reshape(-1, scores.shape[-1]), valid_lens, value=-1e6)
    return F.softmax(rows.reshape(scores.shape), dim=-1)


class ByLengths(nn.Module):
    def __init__(self):
        super().__init__()
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(C, C, bias=False) for _ in range(4))

    def heads(self, x):
        x = x.reshape(x.shape[0], x.shape[1], H, -1).permute(0, 2, 1, 3)
        return x.reshape(-1, x.shape[2], x.shape[3])

    def forward(self, x, valid_lens):
        queries, keys, values = self.heads(self.W_q(x)), self.heads(self.W_k(x)), self.W_v(x)
        values = self.heads(values)
        if valid_lens is not None:
            valid_lens = torch.repeat_interleave(valid_lens, repeats=H, dim=0)
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[-1])
        output = torch.bmm(masked_softmax(scores, valid_lens), values)
        output = output.reshape(-1, H, output.shape[1], output.shape[2]).permute(0, 2, 1, 3)
        return self.W_o(output.reshape(output.shape[0], output.shape[1], -1))


@model(
    "padding mask",
    "assigned in place behind the valid lengths",
    "d2l.ai, chapter_attention-mechanisms-and-transformers/attention-scoring-functions",
    batch=padded,
)
class ValidLengths(Shared):
    def __init__(self):
        super().__init__(ByLengths)

    def forward(self, tokens, labels, mask):
        return self.run(tokens, labels, mask.sum(dim=1))


class FilledInPlace(Heads):
    def forward(self, x, mask):
        q, k, v = self.split(x)
        q = q / math.sqrt(C // H)
        scores = torch.matmul(q, k.transpose(2, 3))
        hidden = (mask == 0).view(x.size(0), 1, 1, x.size(1)).expand_as(scores)
        scores.masked_fill_(hidden, -float("inf"))
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        return self.merge(torch.matmul(weights, v))


@model(
    "padding mask",
    "filled in place, and the layer's result times the mask",
    "facebookresearch/XLM, xlm/model/transformer.py",
    batch=padded,
)
class TimesWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(V, C)
        self.attentions, self.ffns = nn.ModuleList(), nn.ModuleList()
        self.layer_norm1, self.layer_norm2 = nn.ModuleList(), nn.ModuleList()
        for _ in range(LAYERS):
            self.attentions.append(FilledInPlace())
            self.layer_norm1.append(nn.LayerNorm(C, eps=1e-12))
            self.ffns.append(mlp())
            self.layer_norm2.append(nn.LayerNorm(C, eps=1e-12))
        self.proj = nn.Linear(C, V)

    def forward(self, tokens, labels, mask):
        lengths = mask.sum(1)
        positions = torch.arange(tokens.size(1), dtype=torch.long, device=lengths.device)
        mask = positions < lengths[:, None]
        tensor = self.embeddings(tokens)
        tensor *= mask.unsqueeze(-1).to(tensor.dtype)
        for i in range(LAYERS):
            attn = self.attentions[i](tensor, mask)
            tensor = tensor + attn
            tensor = self.layer_norm1[i](tensor)
            tensor = tensor + self.ffns[i](tensor)
            tensor = self.layer_norm2[i](tensor)
            tensor *= mask.unsqueeze(-1).to(tensor.dtype)
        return F.cross_entropy(self.proj(tensor).view(-1, V), labels.view(-1))


# A window of the last words.

WINDOW = 4


@layer(
    "window mask",
    "logarithm of a band of ones",
    "mistralai/mistral-inference, one_file_ref.py",
)
class LogOfBand(Heads):
    def forward(self, x):
        seqlen = x.shape[1]
        tensor = torch.full((seqlen, seqlen), dtype=x.dtype, fill_value=1, device=x.device)
        mask = torch.tril(tensor, diagonal=0).to(x.dtype)
        mask = torch.triu(mask, diagonal=-WINDOW)
        mask = torch.log(mask)
        q, k, v = self.split(x)
        scores = torch.matmul(q, k.transpose(2, 3)) * (C // H) ** -0.5
        scores = scores + mask[None, None, ...]
        scores = nn.functional.softmax(scores.float(), dim=-1).type_as(q)
        return self.merge(torch.matmul(scores, v))


@layer(
    "window mask",
    "positions compared and joined by logical_and",
    "google-deepmind/recurrentgemma, recurrentgemma/torch/modules.py",
)
class PositionsCompared(Heads):
    def allowed(self, x):
        positions = torch.arange(x.shape[1], device=x.device)
        positions = torch.repeat_interleave(positions[None], x.shape[0], dim=0)
        earlier = positions[..., None] >= positions[..., None, :]
        near = positions[..., None] <= positions[..., None, :] + WINDOW
        return torch.logical_and(earlier, near)

    def forward(self, x):
        q, k, v = self.split(x)
        logits = torch.einsum("bntd,bnsd->bnts", q, k) * (C // H) ** -0.5
        logits = torch.where(self.allowed(x).unsqueeze(1), logits, -2.3e38)
        probs = torch.softmax(logits.type(torch.float32), dim=-1).type_as(x)
        return self.merge(torch.einsum("bnts,bnsd->bntd", probs, v))


def look_around(x, pad_value=-1, dim=3):
    """Each bucket of dim 2, and the one before it, side by side."""
    buckets = x.shape[2]
    pads = (0, 0) * (x.ndim - 3) + (1, 0)
    wide = F.pad(x, pads, value=pad_value)
    return torch.cat([wide[:, :, ind : ind + buckets] for ind in range(2)], dim=dim)


@layer(
    "window mask",
    "buckets that look at themselves and the one before",
    "lucidrains/local-attention, local_attention/local_attention.py",
)
class LookAround(Heads):
    def forward(self, x):
        b, n, _ = x.shape
        windows = n // WINDOW
        q, k, v = self.split(x)
        bq, bk, bv = (t.reshape(b, H, windows, WINDOW, -1) for t in (q, k, v))
        bk, bv = look_around(bk), look_around(bv)
        seq = torch.arange(n, device=x.device).view(1, 1, windows, WINDOW)
        bq_t, bq_k = seq, look_around(seq)
        sim = torch.einsum("bhwid,bhwjd->bhwij", bq, bk) * (C // H) ** -0.5
        mask_value = -torch.finfo(sim.dtype).max
        sim = sim.masked_fill(bq_t[..., :, None] < bq_k[..., None, :], mask_value)
        sim = sim.masked_fill(bq_k[..., None, :] == -1, mask_value)
        out = torch.einsum("bhwij,bhwje->bhwie", sim.softmax(dim=-1), bv)
        return self.merge(out.reshape(b, H, n, -1))


@layer(
    "window mask",
    "keys and values unfolded behind padding",
    "leaderj1001/Stand-Alone-Self-Attention, attention.py",
)
class Unfolded(Heads):
    def forward(self, x):
        q, k, v = self.split(x)
        k = F.pad(k, [0, 0, WINDOW - 1, 0]).unfold(2, WINDOW, 1)
        v = F.pad(v, [0, 0, WINDOW - 1, 0]).unfold(2, WINDOW, 1)
        out = (q.unsqueeze(-1) * k).sum(dim=-2)
        out = F.softmax(out, dim=-1)
        out = torch.einsum("bhsw,bhsdw->bhsd", out, v)
        return self.merge(out)


@layer(
    "window mask",
    "overlapping chunks by as_strided",
    "allenai/longformer, longformer/sliding_chunks.py",
)
class SlidingChunks(Heads):
    def chunks(self, x):
        """[b h, s, d] to [b h, s / w, 3 w, d]: each chunk with its neighbours."""
        rows, s, d = x.shape
        x = F.pad(x, (0, 0, WINDOW, WINDOW), value=-1)
        stride = x.stride()
        size = (rows, s // WINDOW, 3 * WINDOW, d)
        return x.as_strided(size=size, stride=(stride[0], WINDOW * stride[1], *stride[1:]))

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (t.reshape(b * H, s, -1) for t in self.split(x))
        q = q.view(b * H, s // WINDOW, WINDOW, -1) / math.sqrt(q.size(-1))
        scores = torch.einsum("bcxd,bcyd->bcxy", q, self.chunks(k))
        band = scores.new_ones(WINDOW, 3 * WINDOW).tril(2 * WINDOW).triu()
        inside = self.chunks(scores.new_zeros(1, s, 1)) == 0
        scores = scores.masked_fill(band == 0, float("-inf"))
        scores = scores.masked_fill(~inside.squeeze(-1).unsqueeze(-2), float("-inf"))
        out = torch.einsum("bcxy,bcyd->bcxd", F.softmax(scores, dim=-1), self.chunks(v))
        return self.merge(out.reshape(b, H, s, -1))


# Several documents in a row.


def lengths(step=0):
    """Three documents in each row: [b, 3]."""
    generator = torch.Generator().manual_seed(100 + step)
    first, second = (torch.randint(3, 7, (B,), generator=generator) for _ in range(2))
    return torch.stack([first, second, S - first - second], dim=1)


def with_lengths(step=0):
    return {**tokens(step), "lengths": lengths(step)}


def with_starts(step=0):
    """The word 0 begins each document but the first."""
    batch = dict(tokens(step))
    ids = batch["tokens"].clamp(min=1)
    starts = lengths(step).cumsum(1)[:, :-1]
    batch["tokens"] = ids.scatter(1, starts, 0)
    return batch


def with_positions(step=0):
    """Positions that begin again with each document."""
    rows = [torch.cat([torch.arange(n) for n in row]) for row in lengths(step).tolist()]
    return {**tokens(step), "position_ids": torch.stack(rows)}


def with_masks(step=0):
    """A mask [b, s, s] made as rows are packed."""
    masks = []
    for row in lengths(step).tolist():
        blocks = [torch.tril(torch.ones(n, n, dtype=torch.bool)) for n in row]
        masks.append(torch.block_diag(*blocks))
    return {**tokens(step), "mask": torch.stack(masks)}


class Fused(Heads):
    def forward(self, x, mask):
        q, k, v = self.split(x)
        return self.merge(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@model(
    "document mask",
    "cumsum of the words that begin documents",
    "KellerJordan/modded-nanogpt, train_gpt.py",
    batch=with_starts,
)
class CumsumOfStarts(Shared):
    def __init__(self):
        super().__init__(Fused)

    def forward(self, tokens, labels):
        docs = (tokens == 0).cumsum(1)
        index = torch.arange(tokens.size(1), device=tokens.device)
        causal = index[:, None] >= index
        same = docs[:, :, None] == docs[:, None, :]
        return self.run(tokens, labels, (causal & same)[:, None])


@model(
    "document mask",
    "functions of indices given to create_mask",
    "meta-pytorch/attention-gym, attn_gym/masks/document_mask.py",
    batch=with_lengths,
)
class MaskOfIndices(Shared):
    def __init__(self):
        super().__init__(Fused)

    def forward(self, tokens, labels, lengths):
        b, s = tokens.shape
        numbers = torch.arange(lengths.numel(), device=tokens.device)
        document_id = torch.repeat_interleave(numbers, lengths.flatten()).view(b, s)

        def document_mask(b, h, q_idx, kv_idx):
            return document_id[b, q_idx] == document_id[b, kv_idx]

        def causal_mask(b, h, q_idx, kv_idx):
            return q_idx >= kv_idx

        mask_mod = and_masks(document_mask, causal_mask)
        mask = create_mask(mask_mod, b, 1, s, s, device=tokens.device)
        return self.run(tokens, labels, mask)


@model(
    "document mask",
    "block_diag of triangles made with the batch",
    "pytorch/torchtune, torchtune/modules/attention_utils.py",
    batch=with_masks,
)
class MaskInBatch(Shared):
    def __init__(self):
        super().__init__(Fused)

    def forward(self, tokens, labels, mask):
        return self.run(tokens, labels, mask[:, None, :, :])


class Filled(Heads):
    def forward(self, x, mask):
        q, k, v = self.split(x)
        scores = (q @ k.mT) * (C // H) ** -0.5
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return self.merge(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v)


@model(
    "document mask",
    "diff of positions that begin again",
    "huggingface/transformers, masking_utils.py (find_packed_sequence_indices)",
    batch=with_positions,
)
class DiffOfPositions(Shared):
    def __init__(self):
        super().__init__(Filled)

    def forward(self, tokens, labels, position_ids):
        before = position_ids[:, :1] - 1
        steps = torch.diff(position_ids, prepend=before, dim=-1)
        sequence = (steps != 1).cumsum(-1)
        same = sequence.unsqueeze(1) == sequence.unsqueeze(2)
        s = tokens.size(1)
        mask = torch.ones(s, s, dtype=torch.bool, device=tokens.device).tril().unsqueeze(0)
        return self.run(tokens, labels, mask.logical_and(same).unsqueeze(1))


@model(
    "document mask",
    "squares between cumulative lengths set in a loop",
    "huggingface/transformers v4.46, models/qwen2_vl/modeling_qwen2_vl.py",
    batch=with_lengths,
)
class SquaresInLoop(Shared):
    """All rows are one row of many documents."""

    def __init__(self):
        super().__init__(Fused)

    def forward(self, tokens, labels, lengths):
        cu_seqlens = lengths.flatten().cumsum(dim=0, dtype=torch.int32)
        cu_seqlens = F.pad(cu_seqlens, (1, 0), value=0)
        total = tokens.numel()
        mask = torch.zeros([1, total, total], device=tokens.device, dtype=torch.bool)
        for i in range(1, len(cu_seqlens)):
            start, end = cu_seqlens[i - 1], cu_seqlens[i]
            mask[..., start:end, start:end] = True
        return self.run(tokens.view(1, total), labels, mask)


# Softmax of rows that have no key.


class NoSelf(Attention):
    """Words look at earlier words only, so the first has none."""

    def __init__(self):
        super().__init__()
        self.register_buffer("hidden", torch.ones(S, S).triu().bool(), persistent=False)


@layer(
    "safe softmax",
    "nan_to_num after it",
    "discuss.pytorch.org, softmax of rows that are masked everywhere",
)
class NanToNum(NoSelf):
    def weights(self, scores):
        scores = scores.masked_fill(self.hidden, float("-inf"))
        attn = torch.softmax(scores, dim=-1)
        return torch.nan_to_num(attn, nan=0.0)


def padded_left(step=0):
    return {name: entry.flip(1) for name, entry in padded(step).items()}


@model(
    "safe softmax",
    "rows without keys opened by a product with not all",
    "huggingface/transformers, modeling_attn_mask_utils.py (_unmask_unattended)",
    batch=padded_left,
)
class Unmasked(Shared):
    def __init__(self):
        super().__init__(AddedMask)

    def forward(self, tokens, labels, mask):
        b, s = mask.shape
        least = torch.finfo(torch.float32).min
        causal = torch.full((s, s), least, device=mask.device)
        cond = torch.arange(s, device=mask.device)
        causal.masked_fill_(cond < (cond + 1).view(s, 1), 0)
        causal = causal[None, None, :, :].expand(b, 1, s, s)
        inverted = 1.0 - mask[:, None, None, :].expand(b, 1, s, s).to(torch.float32)
        expanded = causal.masked_fill(inverted.bool(), least)
        expanded = expanded.mul(~torch.all(expanded == least, dim=-1, keepdim=True))
        return self.run(tokens, labels, expanded)


@layer(
    "safe softmax",
    "one added to the sum of exponentials",
    "Evan Miller, Attention Is Off By One (evanmiller.org)",
)
class OffByOne(NoSelf):
    def softmax1(self, x, dim=-1):
        shift = x.max(dim=dim, keepdim=True).values.clamp(min=0).detach()
        exped = torch.exp(x - shift)
        return exped / (torch.exp(-shift) + exped.sum(dim=dim, keepdim=True))

    def weights(self, scores):
        return self.softmax1(scores.masked_fill(self.hidden, -float("inf")))


@layer(
    "safe softmax",
    "a learned sink as one more column",
    "openai/gpt-oss, gpt_oss/torch/model.py",
)
class Sink(nn.Module):
    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(H))
        self.qkv = nn.Linear(C, 3 * C)
        self.out = nn.Linear(C, C)

    def sdpa(self, Q, K, V):
        n = Q.shape[1]
        sinks = self.sinks.reshape(1, H, 1, 1).expand(Q.shape[0], -1, n, -1)
        mask = torch.triu(Q.new_full((n, n), -float("inf")), diagonal=0)
        QK = torch.einsum("bqhd,bkhd->bhqk", Q, K)
        QK *= (C // H) ** -0.5
        QK += mask[None, None, :, :]
        QK = torch.cat([QK, sinks], dim=-1)
        W = torch.softmax(QK, dim=-1)
        W = W[..., :-1]
        return torch.einsum("bhqk,bkhd->bqhd", W, V).reshape(-1, n, C)

    def forward(self, x):
        qkv = self.qkv(x)
        q = qkv[:, :, :C].contiguous().view(-1, S, H, C // H)
        k = qkv[:, :, C : 2 * C].contiguous().view(-1, S, H, C // H)
        v = qkv[:, :, 2 * C :].contiguous().view(-1, S, H, C // H)
        return self.out(self.sdpa(q, k, v))


class XSoftmax(torch.autograd.Function):
    """Softmax whose masked entries are 0, also where a row has no other."""

    @staticmethod
    def forward(ctx, scores, mask, dim):
        ctx.dim = dim
        hidden = ~(mask.to(torch.bool))
        output = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        output = torch.softmax(output, dim)
        output.masked_fill_(hidden, 0)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        (output,) = ctx.saved_tensors
        grad = torch._softmax_backward_data(grad_output, output, ctx.dim, output.dtype)
        return grad, None, None


class WithXSoftmax(Heads):
    def forward(self, x, mask):
        q, k, v = self.split(x)
        scores = q @ k.transpose(-1, -2) / math.sqrt(C // H)
        return self.merge(XSoftmax.apply(scores, mask, -1) @ v)


@model(
    "safe softmax",
    "a function of autograd that fills before and after",
    "microsoft/DeBERTa, DeBERTa/deberta/ops.py (XSoftmax)",
    batch=padded,
)
class FilledTwice(Shared):
    def __init__(self):
        super().__init__(WithXSoftmax)

    def forward(self, tokens, labels, mask):
        wide = mask.unsqueeze(1).unsqueeze(2)
        wide = wide * wide.squeeze(-2).unsqueeze(-1)
        return self.run(tokens, labels, wide)
