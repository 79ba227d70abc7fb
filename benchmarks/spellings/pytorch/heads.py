"""How attention makes its heads, and puts them together again."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.spellings.pytorch.frame import C, H, S, layer

D = C // H
KV = 2
"""Heads of keys and values, where there are fewer than of queries."""


# Splitting and merging.


@layer(
    "split and merge heads",
    "view of a size that is put together, and permute",
    "huggingface/transformers, models/bert/modeling_bert.py",
)
class TransposeForScores(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_attention_heads = H
        self.attention_head_size = int(C / H)
        self.all_head_size = self.num_attention_heads * self.attention_head_size
        self.query = nn.Linear(C, self.all_head_size)
        self.key = nn.Linear(C, self.all_head_size)
        self.value = nn.Linear(C, self.all_head_size)
        self.dense = nn.Linear(self.all_head_size, C)

    def transpose_for_scores(self, x):
        shape = x.size()[:-1] + (self.num_attention_heads, self.attention_head_size)  # noqa: RUF005
        x = x.view(*shape)
        return x.permute(0, 2, 1, 3)

    def forward(self, hidden):
        mixed_query = self.query(hidden)
        key = self.transpose_for_scores(self.key(hidden))
        value = self.transpose_for_scores(self.value(hidden))
        query = self.transpose_for_scores(mixed_query)
        scores = torch.matmul(query, key.transpose(-1, -2))
        scores = scores / math.sqrt(self.attention_head_size)
        context = torch.matmul(nn.Softmax(dim=-1)(scores), value)
        context = context.permute(0, 2, 1, 3).contiguous()
        shape = context.size()[:-2] + (self.all_head_size,)  # noqa: RUF005
        return self.dense(context.view(*shape))


@layer(
    "split and merge heads",
    "time first, heads in the batch, and bmm",
    "facebookresearch/fairseq, fairseq/modules/multihead_attention.py",
)
class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(C, C) for _ in range(3))
        self.out_proj = nn.Linear(C, C)
        self.scaling = D**-0.5

    def forward(self, x):
        query = x.transpose(0, 1)
        tgt_len, bsz, embed_dim = query.size()
        q = self.q_proj(query)
        k = self.k_proj(query)
        v = self.v_proj(query)
        q *= self.scaling
        q = q.contiguous().view(tgt_len, bsz * H, D).transpose(0, 1)
        k = k.contiguous().view(-1, bsz * H, D).transpose(0, 1)
        v = v.contiguous().view(-1, bsz * H, D).transpose(0, 1)
        weights = torch.bmm(q, k.transpose(1, 2))
        assert list(weights.size()) == [bsz * H, tgt_len, tgt_len]
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).type_as(weights)
        attn = torch.bmm(weights, v)
        assert list(attn.size()) == [bsz * H, tgt_len, D]
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        return self.out_proj(attn).transpose(0, 1)


@layer(
    "split and merge heads",
    "split of the channels and cat along the batch",
    "juho-lee/set_transformer, modules.py",
)
class CatAlongBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(C, C) for _ in range(4))

    def forward(self, X):
        Q, K, V = self.fc_q(X), self.fc_k(X), self.fc_v(X)
        Q_ = torch.cat(Q.split(D, 2), 0)
        K_ = torch.cat(K.split(D, 2), 0)
        V_ = torch.cat(V.split(D, 2), 0)
        A = torch.softmax(Q_.bmm(K_.transpose(1, 2)) / math.sqrt(C), 2)
        O = torch.cat((Q_ + A.bmm(V_)).split(Q.size(0), 0), 2)  # noqa: E741
        return O + F.relu(self.fc_o(O))


@layer(
    "split and merge heads",
    "einsum with a weight of each head",
    "TransformerLensOrg/TransformerLens, transformer_lens/components/abstract_attention.py",
)
class WeightOfEachHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.W_Q = nn.Parameter(torch.empty(H, C, D))
        self.W_K = nn.Parameter(torch.empty(H, C, D))
        self.W_V = nn.Parameter(torch.empty(H, C, D))
        self.W_O = nn.Parameter(torch.empty(H, D, C))
        self.b_Q = nn.Parameter(torch.zeros(H, D))
        self.b_K = nn.Parameter(torch.zeros(H, D))
        self.b_V = nn.Parameter(torch.zeros(H, D))
        self.b_O = nn.Parameter(torch.zeros(C))
        for weight in (self.W_Q, self.W_K, self.W_V, self.W_O):
            nn.init.normal_(weight, std=0.2)

    def forward(self, x):
        q = torch.einsum("bpm,hmd->bphd", x, self.W_Q) + self.b_Q
        k = torch.einsum("bpm,hmd->bphd", x, self.W_K) + self.b_K
        v = torch.einsum("bpm,hmd->bphd", x, self.W_V) + self.b_V
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / D**0.5
        pattern = scores.softmax(-1)
        z = torch.einsum("bkhd,bhqk->bqhd", v, pattern)
        return torch.einsum("bqhd,hdm->bqm", z, self.W_O) + self.b_O


class Head(nn.Module):
    def __init__(self, head_size):
        super().__init__()
        self.key = nn.Linear(C, head_size, bias=False)
        self.query = nn.Linear(C, head_size, bias=False)
        self.value = nn.Linear(C, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(S, S)))

    def forward(self, x):
        _, T, _ = x.shape
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = F.softmax(wei, dim=-1)
        return wei @ self.value(x)


@layer(
    "split and merge heads",
    "a module list of heads, and cat",
    "karpathy/ng-video-lecture, gpt.py",
)
class ListOfHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([Head(D) for _ in range(H)])
        self.proj = nn.Linear(C, C)

    def forward(self, x):
        out = torch.cat([h(x) for h in self.heads], dim=-1)
        return self.proj(out)


# One product for queries, keys and values.


@layer("packed projections", "split by the width", "karpathy/nanoGPT, model.py")
class SplitByWidth(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(C, 3 * C)
        self.c_proj = nn.Linear(C, C)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(b, t, H, c // H).transpose(1, 2)
        q = q.view(b, t, H, c // H).transpose(1, 2)
        v = v.view(b, t, H, c // H).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(b, t, c)
        return self.c_proj(y)


@layer(
    "packed projections",
    "reshape to three, permute and unbind",
    "huggingface/pytorch-image-models, timm/models/vision_transformer.py",
)
class UnbindThree(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(C, C * 3, bias=True)
        self.proj = nn.Linear(C, C)
        self.scale = D**-0.5

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, H, D).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q = q * self.scale
        attn = q @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        x = attn @ v
        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


@layer(
    "packed projections",
    "interleaved for each head, and sliced",
    "huggingface/transformers, models/gpt_neox/modeling_gpt_neox.py",
)
class InterleavedHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.query_key_value = nn.Linear(C, 3 * C)
        self.dense = nn.Linear(C, C)

    def forward(self, hidden):
        qkv = self.query_key_value(hidden)
        qkv = qkv.view(*qkv.size()[:-1], H, 3 * D)
        query = qkv[..., :D].permute(0, 2, 1, 3)
        key = qkv[..., D : 2 * D].permute(0, 2, 1, 3)
        value = qkv[..., 2 * D :].permute(0, 2, 1, 3)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out = out.permute(0, 2, 1, 3).contiguous()
        return self.dense(out.view(out.size(0), out.size(1), H * D))


@layer(
    "packed projections",
    "chunk and a map of rearrange",
    "lucidrains/vit-pytorch, vit_pytorch/vit.py",
    needs="einops",
)
class MapOfRearrange(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = H
        self.norm = nn.LayerNorm(C)
        self.attend = nn.Softmax(dim=-1)
        self.to_qkv = nn.Linear(C, H * D * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(H * D, C), nn.Dropout(0.0))

    def forward(self, x):
        from einops import rearrange

        x = self.norm(x)
        qkv = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = map(lambda t: rearrange(t, "b n (h d) -> b h n d", h=self.heads), qkv)
        dots = torch.matmul(q, k.transpose(-1, -2)) * D**-0.5
        out = torch.matmul(self.attend(dots), v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


@layer(
    "packed projections",
    "unflatten, a new first dimension, transpose and squeeze",
    "pytorch/pytorch, torch/nn/functional.py (_in_projection_packed)",
)
class InProjection(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * C, C))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * C))
        self.out_proj = nn.Linear(C, C)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, x):
        e = x.size(-1)
        proj = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        proj = proj.unflatten(-1, (3, e)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
        q, k, v = proj[0], proj[1], proj[2]
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(y.transpose(1, 2).flatten(-2))


# Fewer keys and values than queries.


@layer(
    "grouped keys and values",
    "repeat_interleave of the heads",
    "pytorch-labs/gpt-fast, model.py",
)
class RepeatInterleave(nn.Module):
    def __init__(self):
        super().__init__()
        self.wqkv = nn.Linear(C, (H + 2 * KV) * D, bias=False)
        self.wo = nn.Linear(C, C, bias=False)

    def forward(self, x):
        bsz, seqlen, _ = x.shape
        kv_size = KV * D
        q, k, v = self.wqkv(x).split([C, kv_size, kv_size], dim=-1)
        q = q.view(bsz, seqlen, H, D)
        k = k.view(bsz, seqlen, KV, D)
        v = v.view(bsz, seqlen, KV, D)
        q, k, v = map(lambda t: t.transpose(1, 2), (q, k, v))
        k = k.repeat_interleave(H // KV, dim=1)
        v = v.repeat_interleave(H // KV, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.0)
        y = y.transpose(1, 2).contiguous().view(bsz, seqlen, C)
        return self.wo(y)


def repeat_kv(states, n_rep):
    b, heads, s, d = states.shape
    if n_rep == 1:
        return states
    states = states[:, :, None, :, :].expand(b, heads, n_rep, s, d)
    return states.reshape(b, heads * n_rep, s, d)


@layer(
    "grouped keys and values",
    "expand of a new dimension and reshape",
    "huggingface/transformers, models/llama/modeling_llama.py (repeat_kv)",
)
class ExpandAndReshape(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(C, H * D, bias=False)
        self.k_proj = nn.Linear(C, KV * D, bias=False)
        self.v_proj = nn.Linear(C, KV * D, bias=False)
        self.o_proj = nn.Linear(H * D, C, bias=False)

    def forward(self, hidden):
        input_shape = hidden.shape[:-1]
        hidden_shape = (*input_shape, -1, D)
        query = self.q_proj(hidden).view(hidden_shape).transpose(1, 2)
        key = repeat_kv(self.k_proj(hidden).view(hidden_shape).transpose(1, 2), H // KV)
        value = repeat_kv(self.v_proj(hidden).view(hidden_shape).transpose(1, 2), H // KV)
        weights = torch.matmul(query, key.transpose(2, 3)) * D**-0.5
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
        out = torch.matmul(weights, value).transpose(1, 2).contiguous()
        out = out.reshape(*input_shape, -1).contiguous()
        return self.o_proj(out)


@layer(
    "grouped keys and values",
    "enable_gqa of the fused attention",
    "karpathy/nanochat, nanochat/gpt.py",
)
class EnableGqa(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_q = nn.Linear(C, H * D, bias=False)
        self.c_k = nn.Linear(C, KV * D, bias=False)
        self.c_v = nn.Linear(C, KV * D, bias=False)
        self.c_proj = nn.Linear(C, C, bias=False)

    def forward(self, x):
        b, t, _ = x.size()
        q = self.c_q(x).view(b, t, H, D)
        k = self.c_k(x).view(b, t, KV, D)
        v = self.c_v(x).view(b, t, KV, D)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != KV)
        y = y.transpose(1, 2).contiguous().view(b, t, -1)
        return self.c_proj(y)


@layer(
    "grouped keys and values",
    "einsum over groups of queries",
    "fkodom/grouped-query-attention-pytorch, grouped_query_attention_pytorch/attention.py",
)
class EinsumOfGroups(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(C, C)
        self.k_proj = nn.Linear(C, KV * D)
        self.v_proj = nn.Linear(C, KV * D)
        self.norm = nn.LayerNorm(C)
        self.out_proj = nn.Linear(C, C)

    def forward(self, x):
        b, n, _ = x.shape
        groups = H // KV
        q = self.q_proj(x).view(b, n, KV, groups, D).permute(0, 3, 2, 1, 4)
        k = self.k_proj(x).view(b, n, KV, D).permute(0, 2, 1, 3)
        v = self.v_proj(x).view(b, n, KV, D).permute(0, 2, 1, 3)
        q = q / D**0.5
        similarity = torch.einsum("bghnd,bhsd->bghns", q, k)
        mask = torch.ones((b, n, n), device=x.device, dtype=torch.bool).tril_()
        mask = mask[:, None, None, :, :]
        similarity.masked_fill_(~mask, torch.finfo(similarity.dtype).min)
        attention = F.softmax(similarity, dim=-1)
        out = torch.einsum("bghns,bhsd->bghnd", attention, v)
        out = out.permute(0, 3, 2, 1, 4).reshape(b, n, C)
        return self.out_proj(self.norm(out))


@layer(
    "grouped keys and values",
    "one head of keys, queries folded into the length, and baddbmm",
    "huggingface/transformers v4.40, models/gpt_bigcode/modeling_gpt_bigcode.py",
)
class OneHeadOfKeys(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(C, C + 2 * D)
        self.c_proj = nn.Linear(C, C)
        self.register_buffer("bias", torch.ones(S, S, dtype=torch.bool).tril(), persistent=False)

    def forward(self, hidden):
        query, key_value = self.c_attn(hidden).split((C, 2 * D), dim=2)
        key, value = key_value.split((D, D), dim=-1)
        key = key.transpose(-1, -2)
        batch, length = query.shape[:2]
        attn_shape = (batch, length, H, key.size(-1))
        attn_view = (batch, length * H, key.size(-1))
        query = query.reshape(batch, length * H, D)
        weights = torch.empty(attn_view, device=query.device, dtype=query.dtype)
        weights = torch.baddbmm(weights, query, key, beta=0, alpha=D**-0.5).view(attn_shape)
        mask = self.bias[None, :length, :length].unsqueeze(2)
        least = torch.full([], torch.finfo(weights.dtype).min, device=weights.device)
        weights = torch.where(mask, weights, least)
        weights = F.softmax(weights, dim=-1)
        out = torch.bmm(weights.view(attn_view), value).view(batch, length, C)
        return self.c_proj(out)


# Norms of queries and keys.


@layer(
    "norms of queries and keys",
    "layer norm of each head's width",
    "huggingface/pytorch-image-models, timm/models/vision_transformer.py (qk_norm)",
)
class NormOfHead(nn.Module):
    def __init__(self, qk_norm=True):
        super().__init__()
        self.qkv = nn.Linear(C, C * 3)
        self.q_norm = nn.LayerNorm(D) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(D) if qk_norm else nn.Identity()
        self.proj = nn.Linear(C, C)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class RmsNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden):
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight * hidden).to(dtype)


@layer(
    "norms of queries and keys",
    "root mean square norm of the whole width before the split",
    "huggingface/transformers, models/olmo2/modeling_olmo2.py",
)
class NormOfWhole(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(C, C, bias=False) for _ in range(4)
        )
        self.q_norm = RmsNorm(C)
        self.k_norm = RmsNorm(C)

    def forward(self, hidden):
        hidden_shape = (*hidden.shape[:-1], -1, D)
        query = self.q_norm(self.q_proj(hidden)).view(hidden_shape).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden)).view(hidden_shape).transpose(1, 2)
        value = self.v_proj(hidden).view(hidden_shape).transpose(1, 2)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(*hidden.shape[:-1], -1))


@layer(
    "norms of queries and keys",
    "normalize, and the exponential of a clamped scale",
    "microsoft/Swin-Transformer, models/swin_transformer_v2.py",
)
class ClampedScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones((H, 1, 1))))
        self.qkv = nn.Linear(C, C * 3, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(C))
        self.v_bias = nn.Parameter(torch.zeros(C))
        self.proj = nn.Linear(C, C)

    def forward(self, x):
        b, n, c = x.shape
        zeros = torch.zeros_like(self.v_bias, requires_grad=False)
        bias = torch.cat((self.q_bias, zeros, self.v_bias))
        qkv = F.linear(input=x, weight=self.qkv.weight, bias=bias)
        qkv = qkv.reshape(b, n, 3, H, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        largest = torch.log(torch.tensor(1.0 / 0.01, device=x.device))
        attn = attn * torch.clamp(self.logit_scale, max=largest).exp()
        x = (attn.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c)
        return self.proj(x)


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


@layer(
    "norms of queries and keys",
    "a function without weights",
    "KellerJordan/modded-nanogpt, train_gpt.py",
)
class NormWithoutWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_w = nn.Parameter(torch.randn(3, C, C) * C**-0.5)
        self.c_proj = nn.Linear(C, C, bias=False)

    def forward(self, x):
        b, t = x.size(0), x.size(1)
        qkv = F.linear(x, self.qkv_w.flatten(end_dim=1).type_as(x))
        q, k, v = qkv.view(b, t, 3 * H, D).chunk(3, dim=-2)
        q, k = norm(q), norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.12).transpose(1, 2)
        return self.c_proj(y.contiguous().view(b, t, H * D))


class NormOfHeads(nn.LayerNorm):
    """Statistics of each head, weights of all of them."""

    def __init__(self, heads, width):
        super().__init__((heads, width))
        self.normalized_shape = (width,)

    def forward(self, x):
        normed = F.layer_norm(x, self.normalized_shape, eps=self.eps)
        return torch.addcmul(self.bias, normed, self.weight)


@layer(
    "norms of queries and keys",
    "a layer norm with weights of each head",
    "huggingface/transformers, models/chameleon/modeling_chameleon.py",
)
class WeightsOfHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(C, C) for _ in range(4))
        self.q_norm = NormOfHeads(H, D)
        self.k_norm = NormOfHeads(H, D)

    def forward(self, hidden):
        b, s, _ = hidden.size()
        query, key = self.q_proj(hidden), self.k_proj(hidden)
        query = self.q_norm(query.reshape(-1, H, D))
        key = self.k_norm(key.reshape(-1, H, D))
        query = query.reshape(b, s, H, D).transpose(1, 2)
        key = key.reshape(b, s, H, D).transpose(1, 2)
        value = self.v_proj(hidden).view(b, s, H, D).transpose(1, 2)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out = out.transpose(1, 2).contiguous()
        return self.o_proj(out.reshape(b, s, C))


# Gates of heads.


@layer(
    "gates of heads",
    "a learned number of each head by einsum",
    "facebookresearch/fairseq, fairseq/modules/transformer_layer.py (scale_heads)",
)
class ScaledHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Parameter(torch.ones((H,)), requires_grad=True)
        self.qkv = nn.Linear(C, 3 * C)
        self.out = nn.Linear(C, C)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).unbind(2)
        weights = torch.einsum("bthd,bshd->bhts", q, k).div(math.sqrt(D)).softmax(-1)
        attn = torch.einsum("bhts,bshd->bthd", weights, v)
        attn = torch.einsum("bthd,h->bthd", attn, self.c_attn)
        return self.out(attn.reshape(x.shape))


@layer(
    "gates of heads",
    "sigmoid of a second half of the queries",
    "huggingface/transformers, models/qwen3_next/modeling_qwen3_next.py",
)
class SecondHalf(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(C, H * D * 2, bias=False)
        self.k_proj = nn.Linear(C, C, bias=False)
        self.v_proj = nn.Linear(C, C, bias=False)
        self.o_proj = nn.Linear(C, C, bias=False)

    def forward(self, hidden):
        input_shape = hidden.shape[:-1]
        query, gate = torch.chunk(self.q_proj(hidden).view(*input_shape, -1, D * 2), 2, dim=-1)
        gate = gate.reshape(*input_shape, -1)
        query = query.transpose(1, 2)
        key = self.k_proj(hidden).view(*input_shape, -1, D).transpose(1, 2)
        value = self.v_proj(hidden).view(*input_shape, -1, D).transpose(1, 2)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out = out.transpose(1, 2).reshape(*input_shape, -1).contiguous()
        out = out * torch.sigmoid(gate)
        return self.o_proj(out)


@layer(
    "gates of heads",
    "sigmoid of a product with the first channels",
    "KellerJordan/modded-nanogpt, train_gpt.py (attn_gate)",
)
class FirstChannels(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.attn_gate = nn.Linear(12, H, bias=False)
        nn.init.zeros_(self.attn_gate.weight)
        self.c_proj = nn.Linear(C, C, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3 * H, D).transpose(1, 2).chunk(3, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        gate = torch.sigmoid(self.attn_gate(x[..., : self.attn_gate.weight.size(-1)]))
        y = y * gate.view(b, t, H, 1)
        return self.c_proj(y.contiguous().view(b, t, H * D))


@layer(
    "gates of heads",
    "a learned temperature of each head over channels",
    "facebookresearch/xcit, xcit.py (XCA)",
)
class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(H, 1, 1))
        self.qkv = nn.Linear(C, C * 3, bias=False)
        self.proj = nn.Linear(C, C)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, H, c // H)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        q = q.transpose(-2, -1)
        k = k.transpose(-2, -1)
        v = v.transpose(-2, -1)
        q = torch.nn.functional.normalize(q, dim=-1)
        k = torch.nn.functional.normalize(k, dim=-1)
        attn = (q @ k.transpose(-2, -1)) * self.temperature
        attn = attn.softmax(dim=-1)
        x = (attn @ v).permute(0, 3, 1, 2).reshape(b, n, c)
        return self.proj(x)


@layer(
    "gates of heads",
    "a gate of each head between contents and positions",
    "facebookresearch/convit, convit.py (GPSA)",
)
class ContentOrPosition(nn.Module):
    """The words are a square of patches; its table of distances is made when first needed."""

    def __init__(self):
        super().__init__()
        self.qk = nn.Linear(C, C * 2, bias=False)
        self.v = nn.Linear(C, C, bias=False)
        self.proj = nn.Linear(C, C)
        self.pos_proj = nn.Linear(3, H)
        self.gating_param = nn.Parameter(torch.ones(H))

    def forward(self, x):
        b, n, c = x.shape
        if not hasattr(self, "rel_indices") or self.rel_indices.size(1) != n:
            self.get_rel_indices(n)
        attn = self.get_attention(x)
        v = self.v(x).reshape(b, n, H, c // H).permute(0, 2, 1, 3)
        x = (attn @ v).transpose(1, 2).reshape(b, n, c)
        return self.proj(x)

    def get_attention(self, x):
        b, n, c = x.shape
        qk = self.qk(x).reshape(b, n, 2, H, c // H).permute(2, 0, 3, 1, 4)
        q, k = qk[0], qk[1]
        pos_score = self.rel_indices.expand(b, -1, -1, -1)
        pos_score = self.pos_proj(pos_score).permute(0, 3, 1, 2)
        patch_score = (q @ k.transpose(-2, -1)) * D**-0.5
        patch_score = patch_score.softmax(dim=-1)
        pos_score = pos_score.softmax(dim=-1)
        gating = self.gating_param.view(1, -1, 1, 1)
        attn = (1.0 - torch.sigmoid(gating)) * patch_score + torch.sigmoid(gating) * pos_score
        attn /= attn.sum(dim=-1).unsqueeze(-1)
        return attn

    def get_rel_indices(self, patches):
        side = int(patches**0.5)
        index = torch.arange(side)
        apart = index.view(1, -1) - index.view(-1, 1)
        across = apart.repeat(side, side)
        down = apart.repeat_interleave(side, dim=0).repeat_interleave(side, dim=1)
        rel = torch.stack((across, down, across**2 + down**2), dim=-1).float().unsqueeze(0)
        self.rel_indices = rel.to(self.qk.weight.device)
