"""Where a word stands: positions that are added, rotated into, or looked up between words."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.spellings.pytorch.frame import (
    LAYERS,
    Body,
    C,
    H,
    S,
    V,
    images,
    layer,
    model,
    padded,
)

D = C // H


def mlp():
    return nn.Sequential(nn.LayerNorm(C), nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C))


class Heads(nn.Module):
    """The products of attention without its middle."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(C, C, bias=False) for _ in range(4))

    def split(self, x):
        b, s, _ = x.shape
        return [p(x).view(b, s, H, D).transpose(1, 2) for p in (self.q, self.k, self.v)]

    def merge(self, y):
        b, _, s, _ = y.shape
        return self.out(y.transpose(1, 2).reshape(b, s, C))


def next_word(logits, labels):
    return F.cross_entropy(logits.view(-1, V), labels.view(-1))


# Sinusoids.


class TableInAttribute(nn.Module):
    def __init__(self, num_hiddens, dropout, max_len=100):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.P = torch.zeros((1, max_len, num_hiddens))
        X = torch.arange(max_len, dtype=torch.float32).reshape(-1, 1)
        X = X / torch.pow(10000, torch.arange(0, num_hiddens, 2, dtype=torch.float32) / num_hiddens)
        self.P[:, :, 0::2] = torch.sin(X)
        self.P[:, :, 1::2] = torch.cos(X)

    def forward(self, X):
        X = X + self.P[:, : X.shape[1], :].to(X.device)
        return self.dropout(X)


@model(
    "sinusoidal positions",
    "a table in an attribute, even and odd columns assigned",
    "d2l.ai, chapter_attention-mechanisms-and-transformers/self-attention-and-positional-encoding",
)
class PlainAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, C)
        self.pos_encoding = TableInAttribute(C, 0.0)
        self.blks = Body()
        self.dense = nn.Linear(C, V)

    def forward(self, tokens, labels):
        X = self.pos_encoding(self.embedding(tokens) * math.sqrt(C))
        return next_word(self.dense(self.blks(X)), labels)


class ByIndexSelect(nn.Module):
    """Positions begin behind `padding_idx`, whose row is zeros, and count words only."""

    def __init__(self, embedding_dim, padding_idx, init_size=S):
        super().__init__()
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.weights = self.get_embedding(init_size + padding_idx + 1, embedding_dim, padding_idx)
        self.register_buffer("_float_tensor", torch.zeros(1))

    @staticmethod
    def get_embedding(count, dim, padding_idx=None):
        half = dim // 2
        rates = torch.exp(torch.arange(half, dtype=torch.float) * -(math.log(10000) / (half - 1)))
        angles = torch.arange(count, dtype=torch.float).unsqueeze(1) * rates.unsqueeze(0)
        table = torch.cat([torch.sin(angles), torch.cos(angles)], dim=1).view(count, -1)
        if padding_idx is not None:
            table[padding_idx, :] = 0
        return table

    def forward(self, mask):
        b, s = mask.size()
        if self.weights is None or s + self.padding_idx + 1 > self.weights.size(0):
            count = s + self.padding_idx + 1
            self.weights = self.get_embedding(count, self.embedding_dim, self.padding_idx)
        self.weights = self.weights.to(self._float_tensor)
        mask = mask.int()
        positions = (torch.cumsum(mask, dim=1).type_as(mask) * mask).long() + self.padding_idx
        return self.weights.index_select(0, positions.view(-1)).view(b, s, -1).detach()


@model(
    "sinusoidal positions",
    "index_select of a cumsum of the mask",
    "facebookresearch/fairseq, fairseq/modules/sinusoidal_positional_embedding.py",
    batch=padded,
)
class CountedWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(V, C)
        self.embed_positions = ByIndexSelect(C, padding_idx=1)
        self.layers = Body()
        self.output = nn.Linear(C, V)

    def forward(self, tokens, labels, mask):
        x = math.sqrt(C) * self.embed_tokens(tokens)
        x += self.embed_positions(mask)
        return next_word(self.output(self.layers(x)), labels)


def timestep_embedding(timesteps, dim, max_period=10000):
    half = dim // 2
    index = torch.arange(start=0, end=half, dtype=torch.float32)
    freqs = torch.exp(-math.log(max_period) * index / half).to(device=timesteps.device)
    args = timesteps[:, None].float() * freqs[None]
    embedding = torch.cat([torch.cos(args), torch.sin(args)], dim=-1)
    if dim % 2:
        embedding = torch.cat([embedding, torch.zeros_like(embedding[:, :1])], dim=-1)
    return embedding


@layer(
    "sinusoidal positions",
    "computed in each forward and put through an MLP",
    "openai/guided-diffusion, guided_diffusion/nn.py (timestep_embedding)",
)
class EachForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.time_embed = nn.Sequential(nn.Linear(C, 2 * C), nn.SiLU(), nn.Linear(2 * C, C))
        self.fc = nn.Linear(C, C)

    def forward(self, x):
        steps = torch.arange(x.shape[1], device=x.device)
        emb = self.time_embed(timestep_embedding(steps, C)).type(x.dtype)
        while len(emb.shape) < len(x.shape):
            emb = emb[None, ...]
        return self.fc(x + emb)


def sincos_of_axis(width, pos):
    omega = np.arange(width // 2, dtype=float)
    omega /= width / 2.0
    omega = 1.0 / 10000**omega
    out = np.einsum("m,d->md", pos.reshape(-1), omega)
    return np.concatenate([np.sin(out), np.cos(out)], axis=1)


def sincos_of_square(width, side, cls_token=False):
    down, across = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    halves = [sincos_of_axis(width // 2, axis) for axis in (across, down)]
    table = np.concatenate(halves, axis=1)
    if cls_token:
        table = np.concatenate([np.zeros([1, width]), table], axis=0)
    return table


@model(
    "sinusoidal positions",
    "a frozen parameter filled from numpy, one row for the class",
    "facebookresearch/mae, util/pos_embed.py and models_mae.py",
    batch=images,
)
class FrozenParameter(nn.Module):
    def __init__(self, side=4):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, C, kernel_size=16 // side, stride=16 // side)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, C))
        self.pos_embed = nn.Parameter(torch.zeros(1, side**2 + 1, C), requires_grad=False)
        self.blocks = nn.ModuleList(WithAttention() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(C)
        self.head = nn.Linear(C, 10)
        table = sincos_of_square(C, side, cls_token=True)
        self.pos_embed.data.copy_(torch.from_numpy(table).float().unsqueeze(0))
        torch.nn.init.normal_(self.cls_token, std=0.02)

    def forward(self, images, labels):
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = x + self.pos_embed[:, 1:, :]
        cls_token = self.cls_token + self.pos_embed[:, :1, :]
        cls_tokens = cls_token.expand(x.shape[0], -1, -1)
        x = torch.cat((cls_tokens, x), dim=1)
        for blk in self.blocks:
            x = blk(x)
        x = self.norm(x)
        return F.cross_entropy(self.head(x[:, 0]), labels)


class WithAttention(nn.Module):
    def __init__(self, is_causal=False):
        super().__init__()
        self.norm, self.heads, self.mlp = nn.LayerNorm(C), Heads(), mlp()
        self.is_causal = is_causal

    def forward(self, x):
        q, k, v = self.heads.split(self.norm(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.heads.merge(y)
        return x + self.mlp(x)


class SinusoidalEmbedding(nn.Embedding):
    """An embedding whose weight is a table of sinusoids and is never trained."""

    def __init__(self, num_positions, embedding_dim):
        super().__init__(num_positions, embedding_dim)
        self._init_weight()

    @torch.no_grad()
    def _init_weight(self):
        n, dim = self.weight.shape
        rows = [[p / 10000 ** (2 * (j // 2) / dim) for j in range(dim)] for p in range(n)]
        angles = torch.tensor(rows)
        self.weight.requires_grad = False
        self.weight[:, : dim // 2] = torch.sin(angles[:, 0::2])
        self.weight[:, dim // 2 :] = torch.cos(angles[:, 1::2])

    @torch.no_grad()
    def forward(self, shape, past=0):
        _, seq_len = shape[:2]
        positions = torch.arange(past, past + seq_len, device=self.weight.device)
        return super().forward(positions)


@model(
    "sinusoidal positions",
    "a frozen subclass of nn.Embedding that takes a shape",
    "huggingface/transformers, models/marian/modeling_marian.py",
)
class FrozenEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(V, C)
        self.embed_positions = SinusoidalEmbedding(2 * S, C)
        self.layers = nn.ModuleList(WithAttention(is_causal=True) for _ in range(LAYERS))
        self.lm_head = nn.Linear(C, V, bias=False)

    def forward(self, tokens, labels):
        inputs_embeds = self.shared(tokens) * math.sqrt(C)
        hidden = inputs_embeds + self.embed_positions(tokens.size())
        for encoder_layer in self.layers:
            hidden = encoder_layer(hidden)
        return next_word(self.lm_head(hidden), labels)


# Learned positions.


@model(
    "learned positions",
    "an embedding of arange of the length",
    "karpathy/nanoGPT, model.py",
)
class EmbeddingOfArange(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(V, C),
                wpe=nn.Embedding(S, C),
                h=nn.ModuleList([WithAttention(is_causal=True) for _ in range(LAYERS)]),
                ln_f=nn.LayerNorm(C),
            )
        )
        self.lm_head = nn.Linear(C, V, bias=False)

    def forward(self, tokens, labels):
        _, t = tokens.size()
        assert t <= S, f"at most {S} words, not {t}"
        pos = torch.arange(0, t, dtype=torch.long, device=tokens.device)
        x = self.transformer.wte(tokens) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        return next_word(self.lm_head(self.transformer.ln_f(x)), labels)


@model(
    "learned positions",
    "a slice of a parameter added in place behind a repeated class",
    "lucidrains/vit-pytorch, vit_pytorch/vit.py",
    batch=images,
    needs="einops",
)
class SliceOfParameter(nn.Module):
    def __init__(self, patch=4):
        super().__init__()
        from einops.layers.torch import Rearrange

        self.to_patch_embedding = nn.Sequential(
            Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=patch, p2=patch),
            nn.LayerNorm(3 * patch**2),
            nn.Linear(3 * patch**2, C),
            nn.LayerNorm(C),
        )
        self.pos_embedding = nn.Parameter(torch.randn(1, (16 // patch) ** 2 + 1, C))
        self.cls_token = nn.Parameter(torch.randn(1, 1, C))
        self.transformer = nn.Sequential(*[WithAttention() for _ in range(LAYERS)])
        self.to_latent = nn.Identity()
        self.mlp_head = nn.Linear(C, 10)

    def forward(self, images, labels):
        from einops import repeat

        x = self.to_patch_embedding(images)
        b, n, _ = x.shape
        cls_tokens = repeat(self.cls_token, "1 1 d -> b 1 d", b=b)
        x = torch.cat((cls_tokens, x), dim=1)
        x += self.pos_embedding[:, : (n + 1)]
        x = self.transformer(x)
        x = self.to_latent(x[:, 0])
        return F.cross_entropy(self.mlp_head(x), labels)


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(V, C, padding_idx=0)
        self.position_embeddings = nn.Embedding(2 * S, C)
        self.token_type_embeddings = nn.Embedding(2, C)
        self.LayerNorm = nn.LayerNorm(C, eps=1e-12)
        ids = torch.arange(2 * S).expand((1, -1))
        self.register_buffer("position_ids", ids, persistent=False)
        zeros = torch.zeros(self.position_ids.size(), dtype=torch.long)
        self.register_buffer("token_type_ids", zeros, persistent=False)

    def forward(self, input_ids, token_type_ids=None, position_ids=None):
        shape = input_ids.size()
        if position_ids is None:
            position_ids = self.position_ids[:, : shape[1]]
        if token_type_ids is None:
            kinds = self.token_type_ids[:, : shape[1]]
            token_type_ids = kinds.expand(shape[0], shape[1])
        embeddings = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        embeddings += self.position_embeddings(position_ids)
        return self.LayerNorm(embeddings)


@model(
    "learned positions",
    "a slice of a buffer of ids, and of kinds",
    "huggingface/transformers, models/bert/modeling_bert.py (BertEmbeddings)",
)
class BufferOfIds(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = Embeddings()
        self.encoder = nn.ModuleList([WithAttention() for _ in range(LAYERS)])
        self.decoder = nn.Linear(C, V)

    def forward(self, tokens, labels):
        hidden = self.embeddings(input_ids=tokens)
        for layer_module in self.encoder:
            hidden = layer_module(hidden)
        return next_word(self.decoder(hidden), labels)


class OffsetEmbedding(nn.Embedding):
    """The first two rows are no positions."""

    def __init__(self, num_embeddings, embedding_dim):
        self.offset = 2
        super().__init__(num_embeddings + self.offset, embedding_dim)

    def forward(self, attention_mask, past=0):
        attention_mask = attention_mask.long()
        positions = torch.cumsum(attention_mask, dim=1).type_as(attention_mask)
        positions = (positions * attention_mask).long() - 1
        positions = positions[:, past:]
        return super().forward(positions + self.offset)


@model(
    "learned positions",
    "a subclass of nn.Embedding that takes the mask",
    "huggingface/transformers, models/opt/modeling_opt.py",
    batch=padded,
)
class CumsumOfMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(V, C // 2)
        self.project_in = nn.Linear(C // 2, C, bias=False)
        self.embed_positions = OffsetEmbedding(S, C)
        self.layers = Body()
        self.project_out = nn.Linear(C, C // 2, bias=False)

    def forward(self, tokens, labels, mask):
        hidden = self.project_in(self.embed_tokens(tokens)) + self.embed_positions(mask)
        hidden = self.project_out(self.layers(hidden))
        logits = F.linear(hidden, self.embed_tokens.weight)
        return next_word(logits, labels)


class RowsAndColumns(nn.Module):
    def __init__(self, num_pos_feats):
        super().__init__()
        self.row_embed = nn.Embedding(10, num_pos_feats)
        self.col_embed = nn.Embedding(10, num_pos_feats)
        nn.init.uniform_(self.row_embed.weight)
        nn.init.uniform_(self.col_embed.weight)

    def forward(self, x):
        h, w = x.shape[-2:]
        x_emb = self.col_embed(torch.arange(w, device=x.device))
        y_emb = self.row_embed(torch.arange(h, device=x.device))
        across = x_emb.unsqueeze(0).repeat(h, 1, 1)
        down = y_emb.unsqueeze(1).repeat(1, w, 1)
        pos = torch.cat([across, down], dim=-1)
        return pos.permute(2, 0, 1).unsqueeze(0).repeat(x.shape[0], 1, 1, 1)


class PositionsInLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(C, H, dropout=0.0)
        self.linear1, self.linear2 = nn.Linear(C, 2 * C), nn.Linear(2 * C, C)
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)

    def with_pos_embed(self, tensor, pos):
        return tensor if pos is None else tensor + pos

    def forward(self, src, pos=None):
        q = k = self.with_pos_embed(src, pos)
        src2 = self.self_attn(q, k, value=src)[0]
        src = self.norm1(src + src2)
        src2 = self.linear2(F.relu(self.linear1(src)))
        return self.norm2(src + src2)


@model(
    "learned positions",
    "rows and columns repeated, added to queries and keys of each layer",
    "facebookresearch/detr, models/position_encoding.py and models/transformer.py",
    batch=images,
)
class InEachLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv2d(3, C, kernel_size=4, stride=4)
        self.position_embedding = RowsAndColumns(C // 2)
        self.layers = nn.ModuleList([PositionsInLayer() for _ in range(LAYERS)])
        self.class_embed = nn.Linear(C, 10)

    def forward(self, images, labels):
        src = self.backbone(images)
        pos_embed = self.position_embedding(src)
        src = src.flatten(2).permute(2, 0, 1)
        pos_embed = pos_embed.flatten(2).permute(2, 0, 1)
        output = src
        for block in self.layers:
            output = block(output, pos=pos_embed)
        return F.cross_entropy(self.class_embed(output.mean(0)), labels)


# Rotary positions.


def precompute_freqs_cis(dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    freqs = torch.outer(torch.arange(end), freqs).float()
    return torch.polar(torch.ones_like(freqs), freqs)


def reshape_for_broadcast(freqs_cis, x):
    ndim = x.ndim
    assert freqs_cis.shape == (x.shape[1], x.shape[-1])
    shape = [d if i in (1, ndim - 1) else 1 for i, d in enumerate(x.shape)]
    return freqs_cis.view(*shape)


def rotate_complex(xq, xk, freqs_cis):
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = reshape_for_broadcast(freqs_cis, xq_)
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(C, C, bias=False) for _ in range(4))
        self.attention_norm, self.feed_forward = nn.RMSNorm(C), mlp()

    def attention(self, x, freqs_cis, mask):
        bsz, seqlen, _ = x.shape
        xq, xk, xv = (w(x).view(bsz, seqlen, H, D) for w in (self.wq, self.wk, self.wv))
        xq, xk = rotate_complex(xq, xk, freqs_cis=freqs_cis)
        xq, keys, values = xq.transpose(1, 2), xk.transpose(1, 2), xv.transpose(1, 2)
        scores = torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(D)
        if mask is not None:
            scores = scores + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        output = torch.matmul(scores, values)
        return self.wo(output.transpose(1, 2).contiguous().view(bsz, seqlen, -1))

    def forward(self, x, freqs_cis, mask):
        h = x + self.attention(self.attention_norm(x), freqs_cis, mask)
        return h + self.feed_forward(h)


@model(
    "rotary positions",
    "complex numbers by polar, kept in an attribute",
    "meta-llama/llama, llama/model.py",
)
class ComplexNumbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(V, C)
        self.layers = nn.ModuleList()
        for _ in range(LAYERS):
            self.layers.append(Complex())
        self.norm = nn.RMSNorm(C)
        self.output = nn.Linear(C, V, bias=False)
        self.freqs_cis = precompute_freqs_cis(D, S * 2)

    def forward(self, tokens, labels):
        _, seqlen = tokens.shape
        h = self.tok_embeddings(tokens)
        self.freqs_cis = self.freqs_cis.to(h.device)
        freqs_cis = self.freqs_cis[:seqlen]
        mask = None
        if seqlen > 1:
            mask = torch.full((seqlen, seqlen), float("-inf"), device=tokens.device)
            mask = torch.triu(mask, diagonal=1).type_as(h)
        for block in self.layers:
            h = block(h, freqs_cis, mask)
        output = self.output(self.norm(h)).float()
        return next_word(output, labels)


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


class RotaryTables(nn.Module):
    def __init__(self, base=10000.0):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, D, 2, dtype=torch.int64).float() / D))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.attention_scaling = 1.0

    @torch.no_grad()
    def forward(self, x, position_ids):
        rows = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        columns = position_ids[:, None, :].float()
        device_type = x.device.type if isinstance(x.device.type, str) else "cpu"
        with torch.autocast(device_type=device_type, enabled=False):
            freqs = (rows.float() @ columns.float()).transpose(1, 2)
            emb = torch.cat((freqs, freqs), dim=-1)
            cos = emb.cos() * self.attention_scaling
            sin = emb.sin() * self.attention_scaling
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


class RotatedHalves(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.heads, self.mlp = nn.RMSNorm(C), Heads(), mlp()

    def forward(self, hidden, position_embeddings):
        q, k, v = self.heads.split(self.input_layernorm(hidden))
        cos, sin = position_embeddings
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q = (q * cos) + (rotate_half(q) * sin)
        k = (k * cos) + (rotate_half(k) * sin)
        hidden = hidden + self.heads.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return hidden + self.mlp(hidden)


@model(
    "rotary positions",
    "halves rotated by a pair that is made once and handed to each layer",
    "huggingface/transformers, models/llama/modeling_llama.py",
)
class HandedOn(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(V, C)
        self.layers = nn.ModuleList([RotatedHalves() for _ in range(LAYERS)])
        self.norm = nn.RMSNorm(C)
        self.rotary_emb = RotaryTables()
        self.lm_head = nn.Linear(C, V, bias=False)

    def forward(self, tokens, labels):
        hidden = self.embed_tokens(tokens)
        cache_position = torch.arange(0, hidden.shape[1], device=hidden.device)
        position_ids = cache_position.unsqueeze(0)
        position_embeddings = self.rotary_emb(hidden, position_ids)
        for decoder_layer in self.layers:
            hidden = decoder_layer(hidden, position_embeddings=position_embeddings)
        return next_word(self.lm_head(self.norm(hidden)), labels)


class PairsInCache(nn.Module):
    def __init__(self, dim, max_seq_len=2 * S, base=10_000):
        super().__init__()
        theta = 1.0 / (base ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
        self.register_buffer("theta", theta, persistent=False)
        angles = torch.einsum("i, j -> ij", torch.arange(max_seq_len, dtype=theta.dtype), theta)
        cache = torch.stack([torch.cos(angles), torch.sin(angles)], dim=-1)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x, input_pos=None):
        seq_len = x.size(1)
        rope_cache = self.cache[:seq_len] if input_pos is None else self.cache[input_pos]
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        rope_cache = rope_cache.view(-1, pairs.size(1), 1, pairs.size(3), 2)
        x_out = torch.stack(
            [
                pairs[..., 0] * rope_cache[..., 0] - pairs[..., 1] * rope_cache[..., 1],
                pairs[..., 1] * rope_cache[..., 0] + pairs[..., 0] * rope_cache[..., 1],
            ],
            -1,
        )
        return x_out.flatten(3).type_as(x)


@layer(
    "rotary positions",
    "pairs stacked and flattened, from a buffer of both",
    "pytorch/torchtune, torchtune/modules/position_embeddings.py",
)
class StackedPairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = (
            nn.Linear(C, C, bias=False) for _ in range(4)
        )
        self.pos_embeddings = PairsInCache(D)

    def forward(self, x, y=None):
        y = x if y is None else y
        b, s_x, _ = x.shape
        s_y = y.shape[1]
        q = self.pos_embeddings(self.q_proj(x).view(b, s_x, H, D)).transpose(1, 2)
        k = self.pos_embeddings(self.k_proj(y).view(b, s_y, -1, D)).transpose(1, 2)
        v = self.v_proj(y).view(b, s_y, -1, D).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output_proj(out.transpose(1, 2).contiguous().view(b, s_x, -1))


def create_sinusoidal_positions(num_pos, dim):
    inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2, dtype=torch.int64) / dim))
    angles = torch.einsum("i , j -> i j", torch.arange(num_pos).float(), inv_freq).float()
    return torch.cat((torch.sin(angles), torch.cos(angles)), dim=1)


def rotate_every_two(x):
    x1 = x[:, :, :, ::2]
    x2 = x[:, :, :, 1::2]
    x = torch.stack((-x2, x1), dim=-1)
    return x.flatten(-2)


def apply_every_two(tensor, sin, cos):
    sin = torch.repeat_interleave(sin[:, :, None, :], 2, 3)
    cos = torch.repeat_interleave(cos[:, :, None, :], 2, 3)
    return (tensor * cos) + (rotate_every_two(tensor) * sin)


@layer(
    "rotary positions",
    "every two of a part of the width, gathered and repeated",
    "huggingface/transformers, models/gptj/modeling_gptj.py",
)
class EveryTwo(nn.Module):
    def __init__(self, rotary_dim=4):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(C, C, bias=False) for _ in range(4)
        )
        self.rotary_dim = rotary_dim
        table = create_sinusoidal_positions(2 * S, rotary_dim)
        self.register_buffer("embed_positions", table, persistent=False)

    def forward(self, hidden):
        b, s, _ = hidden.shape
        query = self.q_proj(hidden).view(b, s, H, D)
        key = self.k_proj(hidden).view(b, s, H, D)
        value = self.v_proj(hidden).view(b, s, H, D).permute(0, 2, 1, 3)
        position_ids = torch.arange(s, device=hidden.device).unsqueeze(0).expand(b, -1)
        embed_positions = self.embed_positions.repeat(b, 1, 1)
        repeated = position_ids.unsqueeze(-1).repeat(1, 1, embed_positions.shape[-1])
        sincos = torch.gather(embed_positions, 1, repeated).to(key.dtype)
        sin, cos = torch.split(sincos, sincos.shape[-1] // 2, dim=-1)
        k_rot, k_pass = key[:, :, :, : self.rotary_dim], key[:, :, :, self.rotary_dim :]
        q_rot, q_pass = query[:, :, :, : self.rotary_dim], query[:, :, :, self.rotary_dim :]
        key = torch.cat([apply_every_two(k_rot, sin, cos), k_pass], dim=-1)
        query = torch.cat([apply_every_two(q_rot, sin, cos), q_pass], dim=-1)
        key, query = key.permute(0, 2, 1, 3), query.permute(0, 2, 1, 3)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out_proj(out.permute(0, 2, 1, 3).contiguous().view(b, s, C))


class TablesOfLength(nn.Module):
    def __init__(self, dim):
        super().__init__()
        inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq)
        self._seq_len_cached = None
        self._cos_cached = None
        self._sin_cached = None

    def update(self, x, seq_dimension=1):
        seq_len = x.shape[seq_dimension]
        if seq_len != self._seq_len_cached or self._cos_cached.device != x.device:
            self._seq_len_cached = seq_len
            t = torch.arange(seq_len, device=x.device).type_as(self.inv_freq)
            freqs = torch.einsum("i,j->ij", t, self.inv_freq)
            emb = torch.cat((freqs, freqs), dim=-1).to(x.device)
            self._cos_cached = emb.cos()[None, :, :]
            self._sin_cached = emb.sin()[None, :, :]
        return self._cos_cached, self._sin_cached

    def rotated(self, x):
        cos, sin = self._cos_cached[:, : x.shape[-2], :], self._sin_cached[:, : x.shape[-2], :]
        x1, x2 = x.chunk(2, dim=-1)
        return (x * cos) + (torch.cat((-x2, x1), dim=-1) * sin)

    def forward(self, q, k):
        self.update(k, seq_dimension=-2)
        return self.rotated(q), self.rotated(k)


@layer(
    "rotary positions",
    "tables that are made again when the length is another",
    "facebookresearch/esm, esm/rotary_embedding.py",
)
class MadeAgain(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(C, C) for _ in range(4))
        self.rot_emb = TablesOfLength(dim=D)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (
            p(x).transpose(0, 1).contiguous().view(s, b * H, D).transpose(0, 1)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rot_emb(q * D**-0.5, k)
        weights = F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1)
        attn = torch.bmm(weights, v)
        return self.out_proj(attn.transpose(0, 1).contiguous().view(s, b, C)).transpose(0, 1)


# Relative positions.


class Bucketed(nn.Module):
    """The first layer alone has the table; the others are given what it made."""

    def __init__(self, has_relative_attention_bias=False):
        super().__init__()
        self.norm, self.heads, self.mlp = nn.RMSNorm(C), Heads(), mlp()
        self.has_relative_attention_bias = has_relative_attention_bias
        if self.has_relative_attention_bias:
            self.relative_attention_bias = nn.Embedding(8, H)

    @staticmethod
    def bucket(relative_position, num_buckets=8, max_distance=16):
        num_buckets //= 2
        buckets = (relative_position > 0).to(torch.long) * num_buckets
        distance = torch.abs(relative_position)
        max_exact = num_buckets // 2
        is_small = distance < max_exact
        log_ratio = torch.log(distance.float() / max_exact) / math.log(max_distance / max_exact)
        if_large = max_exact + (log_ratio * (num_buckets - max_exact)).to(torch.long)
        if_large = torch.min(if_large, torch.full_like(if_large, num_buckets - 1))
        buckets += torch.where(is_small, distance, if_large)
        return buckets

    def compute_bias(self, query_length, key_length):
        device = self.relative_attention_bias.weight.device
        context = torch.arange(query_length, dtype=torch.long, device=device)[:, None]
        memory = torch.arange(key_length, dtype=torch.long, device=device)[None, :]
        values = self.relative_attention_bias(self.bucket(memory - context))
        return values.permute([2, 0, 1]).unsqueeze(0)

    def forward(self, hidden, position_bias=None):
        q, k, v = self.heads.split(self.norm(hidden))
        scores = torch.matmul(q, k.transpose(3, 2))
        if position_bias is None:
            if not self.has_relative_attention_bias:
                position_bias = torch.zeros((1, H, q.shape[2], k.shape[2]), device=scores.device)
            else:
                position_bias = self.compute_bias(q.shape[2], k.shape[2])
        scores += position_bias
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        hidden = hidden + self.heads.merge(torch.matmul(weights, v))
        return hidden + self.mlp(hidden), position_bias


@model(
    "relative positions",
    "buckets whose bias the first layer hands on",
    "huggingface/transformers, models/t5/modeling_t5.py",
)
class Buckets(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(V, C)
        self.block = nn.ModuleList(
            [Bucketed(has_relative_attention_bias=bool(i == 0)) for i in range(LAYERS)]
        )
        self.final_layer_norm = nn.RMSNorm(C)
        self.lm_head = nn.Linear(C, V, bias=False)

    def forward(self, tokens, labels):
        hidden = self.shared(tokens)
        position_bias = None
        for _, layer_module in enumerate(self.block):
            layer_outputs = layer_module(hidden, position_bias=position_bias)
            hidden = layer_outputs[0]
            position_bias = layer_outputs[1]
        return next_word(self.lm_head(self.final_layer_norm(hidden)), labels)


def build_alibi_tensor(attention_mask, num_heads, dtype):
    b, s = attention_mask.shape
    closest = 2 ** math.floor(math.log2(num_heads))
    base = torch.tensor(
        2 ** (-(2 ** -(math.log2(closest) - 3))), device=attention_mask.device, dtype=torch.float32
    )
    powers = torch.arange(1, 1 + closest, device=attention_mask.device, dtype=torch.int32)
    slopes = torch.pow(base, powers)
    positions = ((attention_mask.cumsum(dim=-1) - 1) * attention_mask)[:, None, :]
    alibi = slopes[..., None] * positions
    return alibi.reshape(b * num_heads, 1, s).to(dtype)


class WithAlibi(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.mlp = nn.LayerNorm(C), mlp()
        self.query_key_value = nn.Linear(C, 3 * C)
        self.dense = nn.Linear(C, C)

    def forward(self, hidden, alibi, mask):
        b, s, _ = hidden.shape
        fused = self.query_key_value(self.input_layernorm(hidden)).view(b, s, H, 3, D)
        query = fused[..., 0, :].transpose(1, 2).reshape(b * H, s, D)
        key = fused[..., 1, :].permute(0, 2, 3, 1).reshape(b * H, D, s)
        value = fused[..., 2, :].transpose(1, 2).reshape(b * H, s, D)
        scores = alibi.baddbmm(batch1=query, batch2=key, beta=1.0, alpha=1.0 / math.sqrt(D))
        scores = scores.view(b, H, s, -1) + mask
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(hidden.dtype)
        context = torch.bmm(weights.view(b * H, s, -1), value)
        context = context.view(b, H, s, D).permute(0, 2, 1, 3).reshape(b, s, C)
        hidden = hidden + self.dense(context)
        return hidden + self.mlp(hidden)


@model(
    "relative positions",
    "slopes times counted words, added by baddbmm",
    "huggingface/transformers, models/bloom/modeling_bloom.py",
    batch=padded,
)
class Alibi(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(V, C)
        self.h = nn.ModuleList([WithAlibi() for _ in range(LAYERS)])
        self.ln_f = nn.LayerNorm(C)
        self.lm_head = nn.Linear(C, V, bias=False)

    def forward(self, tokens, labels, mask):
        hidden = self.word_embeddings(tokens)
        alibi = build_alibi_tensor(mask, H, dtype=hidden.dtype)
        s = tokens.shape[1]
        least = torch.finfo(hidden.dtype).min
        causal = torch.full((s, s), least, device=hidden.device).triu(1)[None, None]
        hidden_words = (1 - mask[:, None, None, :]).to(torch.bool)
        causal = causal.expand(mask.shape[0], 1, s, s).masked_fill(hidden_words, least)
        for block in self.h:
            hidden = block(hidden, alibi, causal)
        return next_word(self.lm_head(self.ln_f(hidden)), labels)


class RelativePosition(nn.Module):
    def __init__(self, num_units, max_relative_position):
        super().__init__()
        self.num_units = num_units
        self.max_relative_position = max_relative_position
        table = torch.Tensor(max_relative_position * 2 + 1, num_units)
        self.embeddings_table = nn.Parameter(table)
        nn.init.xavier_uniform_(self.embeddings_table)

    def forward(self, length_q, length_k):
        range_q = torch.arange(length_q, device=self.embeddings_table.device)
        range_k = torch.arange(length_k, device=self.embeddings_table.device)
        distance = range_k[None, :] - range_q[:, None]
        furthest = self.max_relative_position
        distance = torch.clamp(distance, -furthest, furthest) + furthest
        return self.embeddings_table[distance.long()]


@layer(
    "relative positions",
    "rows of a table for clamped distances, to keys and values",
    "evelinehong/Transformer_Relative_Position_PyTorch, relative_position.py",
)
class RowsForDistances(Heads):
    def __init__(self):
        super().__init__()
        self.relative_position_k = RelativePosition(D, 4)
        self.relative_position_v = RelativePosition(D, 4)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.split(x)
        attn1 = torch.matmul(q, k.permute(0, 1, 3, 2))
        r_q2 = q.permute(2, 0, 1, 3).contiguous().view(s, b * H, D)
        r_k2 = self.relative_position_k(s, s)
        attn2 = torch.matmul(r_q2, r_k2.transpose(1, 2)).transpose(0, 1)
        attn2 = attn2.contiguous().view(b, H, s, s)
        attn = torch.softmax((attn1 + attn2) / math.sqrt(D), dim=-1)
        weight1 = torch.matmul(attn, v)
        r_v2 = self.relative_position_v(s, s)
        weight2 = attn.permute(2, 0, 1, 3).contiguous().view(s, b * H, s)
        weight2 = torch.matmul(weight2, r_v2)
        weight2 = weight2.transpose(0, 1).contiguous().view(b, H, s, D)
        return self.merge(weight1 + weight2)


@layer(
    "relative positions",
    "sinusoids of distances, shifted by a column of zeros and a view",
    "kimiyoung/transformer-xl, pytorch/mem_transformer.py",
)
class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_net = nn.Linear(C, 3 * C, bias=False)
        self.r_net = nn.Linear(C, C, bias=False)
        self.o_net = nn.Linear(C, C, bias=False)
        self.r_w_bias = nn.Parameter(torch.zeros(H, D))
        self.r_r_bias = nn.Parameter(torch.zeros(H, D))
        self.register_buffer("inv_freq", 1 / (10000 ** (torch.arange(0.0, C, 2.0) / C)))

    def _rel_shift(self, x):
        zero_pad = torch.zeros((x.size(0), 1, *x.size()[2:]), device=x.device, dtype=x.dtype)
        x_padded = torch.cat([zero_pad, x], dim=1)
        x_padded = x_padded.view(x.size(1) + 1, x.size(0), *x.size()[2:])
        return x_padded[1:].view_as(x)

    def forward(self, x):
        w = x.transpose(0, 1).contiguous()
        qlen, bsz = w.size(0), w.size(1)
        pos_seq = torch.arange(qlen - 1, -1, -1.0, device=w.device, dtype=w.dtype)
        sinusoid_inp = torch.ger(pos_seq, self.inv_freq)
        r = torch.cat([sinusoid_inp.sin(), sinusoid_inp.cos()], dim=-1)
        w_head_q, w_head_k, w_head_v = torch.chunk(self.qkv_net(w), 3, dim=-1)
        w_head_q = w_head_q.reshape(qlen, bsz, H, D)
        w_head_k = w_head_k.reshape(qlen, bsz, H, D)
        w_head_v = w_head_v.reshape(qlen, bsz, H, D)
        r_head_k = self.r_net(r).view(qlen, H, D)
        AC = torch.einsum("ibnd,jbnd->ijbn", w_head_q + self.r_w_bias, w_head_k)
        BD = torch.einsum("ibnd,jnd->ijbn", w_head_q + self.r_r_bias, r_head_k)
        BD = self._rel_shift(BD)
        attn_score = AC + BD
        attn_score.mul_(1 / D**0.5)
        attn_mask = torch.triu(w.new_ones(qlen, qlen), diagonal=1).bool()[:, :, None]
        attn_score = attn_score.masked_fill(attn_mask[:, :, :, None], -float("inf"))
        attn_prob = F.softmax(attn_score, dim=1)
        attn_vec = torch.einsum("ijbn,jbnd->ibnd", attn_prob, w_head_v)
        attn_vec = attn_vec.contiguous().view(qlen, bsz, C)
        return self.o_net(attn_vec).transpose(0, 1)


@layer(
    "relative positions",
    "a table of a square window read through a buffer of indices",
    "microsoft/Swin-Transformer, models/swin_transformer.py",
)
class IndexOfWindow(nn.Module):
    def __init__(self, window_size=(4, 4)):
        super().__init__()
        self.window_size = window_size
        height, width = window_size
        self.relative_position_bias_table = nn.Parameter(
            torch.zeros((2 * height - 1) * (2 * width - 1), H)
        )
        coords = torch.stack(
            torch.meshgrid([torch.arange(height), torch.arange(width)], indexing="ij")
        )
        coords = torch.flatten(coords, 1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous()
        relative[:, :, 0] += height - 1
        relative[:, :, 1] += width - 1
        relative[:, :, 0] *= 2 * width - 1
        self.register_buffer("relative_position_index", relative.sum(-1))
        self.qkv = nn.Linear(C, C * 3)
        self.proj = nn.Linear(C, C)
        self.softmax = nn.Softmax(dim=-1)
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, H, c // H).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q * D**-0.5) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        area = self.window_size[0] * self.window_size[1]
        bias = bias.view(area, area, -1).permute(2, 0, 1).contiguous()
        attn = attn + bias.unsqueeze(0)
        x = (self.softmax(attn) @ v).transpose(1, 2).reshape(b, n, c)
        return self.proj(x)
