"""Parts computed in another dtype than the rest, and the buffers that modules keep."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.spellings.pytorch.frame import B, Body, C, H, InLayers, S, V, layer, model, numbers

HALF = "bfloat16"


class EagerAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(C, C, bias=False) for _ in range(4)
        )
        self.scaling = (C // H) ** -0.5

    def forward(self, hidden_states):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, C // H)
        query = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        attn_weights = torch.matmul(query, key.transpose(2, 3)) * self.scaling
        attn_weights = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
        attn_output = torch.matmul(attn_weights, value).transpose(1, 2).contiguous()
        return self.o_proj(attn_output.reshape(*input_shape, -1).contiguous())


@model(
    "computed in another dtype",
    "softmax in float and back to the dtype of the queries",
    "huggingface/transformers, models/llama/modeling_llama.py, eager_attention_forward",
    precision=HALF,
)
class FloatSoftmax(InLayers):
    def __init__(self):
        super().__init__(EagerAttention)


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


class RotaryEmbedding(nn.Module):
    def __init__(self, dim=C // H, base=10000):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        inv_freq = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        position_ids = position_ids[:, None, :].float()
        device_type = x.device.type
        with torch.autocast(device_type=device_type, enabled=False):
            freqs = (inv_freq.float() @ position_ids.float()).transpose(1, 2)
            emb = torch.cat((freqs, freqs), dim=-1)
            cos, sin = emb.cos(), emb.sin()
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


class RotaryAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.rotary_emb = RotaryEmbedding()

    def forward(self, x):
        b, s, c = x.shape
        position_ids = torch.arange(s, device=x.device).unsqueeze(0)
        q, k, v = self.qkv(x).view(b, s, 3, H, c // H).permute(2, 0, 3, 1, 4)
        cos, sin = (t.unsqueeze(1) for t in self.rotary_emb(v, position_ids))
        q, k = (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(b, s, c))


@model(
    "computed in another dtype",
    "autocast switched off inside forward",
    "huggingface/transformers, models/llama/modeling_llama.py, LlamaRotaryEmbedding",
    precision=HALF,
)
class AutocastOff(InLayers):
    def __init__(self):
        super().__init__(RotaryAttention)


class RMSNorm(nn.Module):
    def __init__(self, hidden_size=C, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class NormedFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer_norm = RMSNorm()
        self.wi, self.wo = nn.Linear(C, 2 * C, bias=False), nn.Linear(2 * C, C, bias=False)

    def forward(self, hidden_states):
        hidden_states = F.relu(self.wi(self.layer_norm(hidden_states)))
        if hidden_states.dtype != self.wo.weight.dtype:
            hidden_states = hidden_states.to(self.wo.weight.dtype)
        return self.wo(hidden_states)


@model(
    "computed in another dtype",
    "variance in float and casts by the dtype of weights",
    "huggingface/transformers, models/t5/modeling_t5.py",
    precision=HALF,
)
class CastByWeight(InLayers):
    def __init__(self):
        super().__init__(NormedFeedForward)


@dataclass
class LMOutput:
    loss: torch.Tensor
    logits: torch.Tensor


@model(
    "computed in another dtype",
    "parameters declared in half and logits made float before the loss",
    "meta-llama/llama, llama/model.py",
)
class FloatLogits(nn.Module):
    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.tok_embeddings = nn.Embedding(V, C, dtype=dtype)
        self.layers = Body().to(dtype)
        self.norm = RMSNorm()
        self.output = nn.Linear(C, V, bias=False, dtype=dtype)

    def forward(self, tokens, labels):
        h = self.layers(self.tok_embeddings(tokens))
        h = self.norm(h.float()).type_as(h)
        logits = self.output(h).float()
        loss = F.cross_entropy(logits.view(-1, V), labels.view(-1))
        return LMOutput(loss=loss, logits=logits)


def timed(step=0):
    """`numbers` and ``timesteps`` [b]."""
    generator = torch.Generator().manual_seed(step + 11)
    return {**numbers(step), "timesteps": torch.randint(0, 100, (B,), generator=generator)}


def extract(table, timesteps, shape):
    res = table[timesteps].float()
    while len(res.shape) < len(shape):
        res = res[..., None]
    return res.expand(shape)


@model(
    "computed in another dtype",
    "double tables cast where they are used",
    "openai/guided-diffusion, guided_diffusion/gaussian_diffusion.py",
    batch=timed,
)
class DoubleTables(nn.Module):
    def __init__(self, steps=100):
        super().__init__()
        betas = torch.linspace(1e-3, 0.05, steps, dtype=torch.float64)
        alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
        self.register_buffer("sqrt_alphas_cumprod", torch.sqrt(alphas_cumprod))
        self.register_buffer("sqrt_one_minus", torch.sqrt(1.0 - alphas_cumprod))
        self.time = nn.Embedding(steps, C)
        self.model, self.out = Body(), nn.Linear(C, C)

    def forward(self, x, y, timesteps):
        x_t = (
            extract(self.sqrt_alphas_cumprod, timesteps, x.shape) * x
            + extract(self.sqrt_one_minus, timesteps, x.shape) * y
        )
        predicted = self.out(self.model(x_t + self.time(timesteps).unsqueeze(1)))
        mse = ((y - predicted) ** 2).mean(dim=list(range(1, y.ndim)))
        return mse.mean()


class CachedRotary(nn.Module):
    def __init__(self, dim=C // H, max_position_embeddings=8):
        super().__init__()
        self.register_buffer(
            "inv_freq", 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim)), persistent=False
        )
        self._set_cos_sin_cache(max_position_embeddings, self.inv_freq.device, torch.float32)

    def _set_cos_sin_cache(self, seq_len, device, dtype):
        self.max_seq_len_cached = seq_len
        t = torch.arange(seq_len, device=device, dtype=self.inv_freq.dtype)
        freqs = torch.einsum("i,j->ij", t, self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        self.register_buffer("cos_cached", emb.cos().to(dtype), persistent=False)
        self.register_buffer("sin_cached", emb.sin().to(dtype), persistent=False)

    def forward(self, x, seq_len):
        if seq_len > self.max_seq_len_cached:
            self._set_cos_sin_cache(seq_len=seq_len, device=x.device, dtype=x.dtype)
        return self.cos_cached[:seq_len].to(x), self.sin_cached[:seq_len].to(x)


@layer(
    "kept buffers",
    "tables outside the state dict that grow with the sequence",
    "huggingface/transformers v4.36, models/llama/modeling_llama.py",
)
class GrowingTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.wqkv, self.wo = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.rotary_emb = CachedRotary()

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, H, C // H).transpose(1, 2) for t in self.wqkv(x).split(C, dim=-1))
        cos, sin = self.rotary_emb(v, seq_len=s)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        y = F.scaled_dot_product_attention(q, k, v)
        return self.wo(y.transpose(1, 2).flatten(2))


@layer(
    "kept buffers",
    "flag that the first forward sets when it fills the parameters",
    "rosinality/glow-pytorch, model.py, ActNorm",
)
class ActNorm(nn.Module):
    def __init__(self, in_channel=C):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(1, 1, in_channel))
        self.scale = nn.Parameter(torch.ones(1, 1, in_channel))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))
        self.linear = nn.Linear(in_channel, in_channel)

    def initialize(self, x):
        with torch.no_grad():
            flatten = x.permute(2, 0, 1).contiguous().view(x.shape[2], -1)
            mean = flatten.mean(1).view(1, 1, -1)
            std = flatten.std(1).view(1, 1, -1)
            self.loc.data.copy_(-mean)
            self.scale.data.copy_(1 / (std + 1e-6))

    def forward(self, x):
        x = self.linear(x)
        if self.initialized.item() == 0:
            self.initialize(x)
            self.initialized.fill_(1)
        return torch.tanh(self.scale * (x + self.loc))


@layer(
    "kept buffers",
    "counter of steps that gives the factor of the average",
    "pytorch/pytorch, torch/nn/modules/batchnorm.py, momentum=None",
)
class CountedMean(nn.Module):
    def __init__(self, momentum=None):
        super().__init__()
        self.momentum = momentum
        self.project = nn.Linear(C, C)
        self.register_buffer("running_mean", torch.zeros(C))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long))

    def forward(self, x):
        x = self.project(x)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
            else:
                factor = self.momentum
            with torch.no_grad():
                self.running_mean.lerp_(x.mean(dim=(0, 1)), factor)
        return F.silu(x - self.running_mean)


@layer(
    "kept buffers",
    "none registered first and the mask set in forward",
    "lucidrains/PaLM-pytorch, palm_pytorch/palm_pytorch.py",
)
class LateMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.fused_attn_proj = nn.Linear(C, C + 2 * (C // H), bias=False)
        self.attn_out = nn.Linear(C, C, bias=False)
        self.register_buffer("mask", None, persistent=False)

    def get_mask(self, n, device):
        if self.mask is not None and self.mask.shape[-1] >= n:
            return self.mask[:n, :n].to(device)
        mask = torch.ones((n, n), device=device, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask, persistent=False)
        return mask

    def forward(self, x):
        b, n, device = x.shape[0], x.shape[1], x.device
        q, k, v = self.fused_attn_proj(x).split((C, C // H, C // H), dim=-1)
        q = q.view(b, n, H, -1).transpose(1, 2) * (C // H) ** -0.5
        sim = torch.einsum("b h i d, b j d -> b h i j", q, k)
        sim = sim.masked_fill(self.get_mask(n, device), -torch.finfo(sim.dtype).max)
        attn = (sim - sim.amax(dim=-1, keepdim=True).detach()).softmax(dim=-1)
        out = torch.einsum("b h i j, b j d -> b h i d", attn, v)
        return self.attn_out(out.transpose(1, 2).reshape(b, n, -1))


@layer(
    "kept buffers",
    "constants as plain tensor attributes",
    "bentrevett/pytorch-seq2seq, 6 - Attention is All You Need.ipynb",
)
class PlainConstants(nn.Module):
    def __init__(self, device="cpu"):
        super().__init__()
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(C, C) for _ in range(4))
        self.scale = torch.sqrt(torch.FloatTensor([C // H])).to(device)
        slopes = torch.tensor([2.0 ** (-8 * (i + 1) / H) for i in range(H)])
        self.distance = slopes.view(H, 1, 1) * -(torch.arange(S)[:, None] - torch.arange(S)).abs()

    def forward(self, x):
        batch_size = x.shape[0]
        q, k, v = (
            fc(x).view(batch_size, -1, H, C // H).permute(0, 2, 1, 3)
            for fc in (self.fc_q, self.fc_k, self.fc_v)
        )
        energy = torch.matmul(q, k.permute(0, 1, 3, 2)) / self.scale.to(x.device)
        attention = torch.softmax(energy + self.distance.to(x.device), dim=-1)
        out = torch.matmul(attention, v).permute(0, 2, 1, 3).contiguous()
        return self.fc_o(out.view(batch_size, -1, C)) / math.sqrt(2)
