"""Weights that are not the parameters themselves: normalised, masked, quantised and generated."""

import math
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, spectral_norm, weight_norm

from benchmarks.spellings.pytorch.frame import C, S, layer


class Chomp1d(nn.Module):
    def __init__(self, chomp_size):
        super().__init__()
        self.chomp_size = chomp_size

    def forward(self, x):
        return x[:, :, : -self.chomp_size].contiguous()


def old_weight_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return weight_norm(module)


@layer("normalised weights", "weight norm of the old kind by hooks", "locuslab/TCN, TCN/tcn.py")
class TemporalBlock(nn.Module):
    def __init__(self, kernel_size=3, dilation=2):
        super().__init__()
        padding = (kernel_size - 1) * dilation
        conv = {"kernel_size": kernel_size, "padding": padding, "dilation": dilation}
        self.conv1 = old_weight_norm(nn.Conv1d(C, C, **conv))
        self.conv2 = old_weight_norm(nn.Conv1d(C, C, **conv))
        self.net = nn.Sequential(
            self.conv1, Chomp1d(padding), nn.ReLU(), self.conv2, Chomp1d(padding), nn.ReLU()
        )
        self.init_weights()

    def init_weights(self):
        self.conv1.weight.data.normal_(0, 0.01)
        self.conv2.weight.data.normal_(0, 0.01)

    def forward(self, x):
        return self.net(x.transpose(1, 2)).transpose(1, 2)


@layer(
    "normalised weights",
    "weight norm as a parametrisation over the kernel's last dim",
    "huggingface/transformers, models/wav2vec2/modeling_wav2vec2.py",
)
class PositionalConv(nn.Module):
    def __init__(self, kernel=4, groups=4):
        super().__init__()
        self.conv = nn.Conv1d(C, C, kernel_size=kernel, padding=kernel // 2, groups=groups)
        norm = weight_norm
        if hasattr(nn.utils.parametrizations, "weight_norm"):
            norm = nn.utils.parametrizations.weight_norm
        self.conv = norm(self.conv, name="weight", dim=2)
        self.num_pad_remove = 1 if kernel % 2 == 0 else 0

    def forward(self, hidden_states):
        hidden_states = self.conv(hidden_states.transpose(1, 2))
        if self.num_pad_remove > 0:
            hidden_states = hidden_states[:, :, : -self.num_pad_remove]
        return F.gelu(hidden_states).transpose(1, 2)


@layer(
    "normalised weights",
    "spectral norm with a power iteration at each forward",
    "NVlabs/SPADE, models/networks/architecture.py",
)
class SpectralBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_0 = spectral_norm(nn.Conv1d(C, C // 2, kernel_size=3, padding=1))
        self.conv_1 = spectral_norm(nn.Conv1d(C // 2, C, kernel_size=3, padding=1))
        self.fc = nn.utils.parametrizations.spectral_norm(nn.Linear(C, C), n_power_iterations=2)

    def forward(self, x):
        dx = self.conv_0(F.leaky_relu(x.transpose(1, 2), 2e-1))
        dx = self.conv_1(F.leaky_relu(dx, 2e-1))
        return self.fc(dx.transpose(1, 2))


def normalize(x, eps=1e-4):
    dims = list(range(1, x.ndim))
    norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=torch.float32)
    norm = torch.add(eps, norm, alpha=math.sqrt(norm.numel() / x.numel()))
    return x / norm.to(x.dtype)


@layer(
    "normalised weights",
    "normalised by hand and the parameter written back while training",
    "NVlabs/edm2, training/networks_edm2.py, MPConv",
)
class MagnitudePreserving(nn.Module):
    def __init__(self, gain=1.0):
        super().__init__()
        self.gain = gain
        self.weight = nn.Parameter(torch.randn(C, C))
        self.emb_gain = nn.Parameter(torch.ones([]))

    def forward(self, x):
        w = self.weight.to(torch.float32)
        if self.training:
            with torch.no_grad():
                self.weight.copy_(normalize(w))
        w = normalize(w)
        w = w * (self.gain / math.sqrt(w[0].numel()))
        w = w.to(x.dtype)
        return F.silu(x) @ w.t() * self.emb_gain


class StdConv1d(nn.Conv1d):
    def forward(self, x):
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1),
            None,
            None,
            training=True,
            momentum=0.0,
            eps=1e-6,
        ).reshape_as(self.weight)
        return F.conv1d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


@layer(
    "normalised weights",
    "weight standardisation through batch norm of the kernel",
    "huggingface/pytorch-image-models, timm/layers/std_conv.py",
)
class StandardisedConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = StdConv1d(C, C, 3, padding=1)
        self.norm = nn.GroupNorm(4, C)

    def forward(self, x):
        return self.norm(F.relu(self.conv(x.mT))).mT


@layer(
    "made weights",
    "kernel from a code by two products",
    "g1910/HyperNetworks, hypernetwork_modules.py",
)
class HyperKernel(nn.Module):
    def __init__(self, f_size=3, z_dim=8, out_size=C, in_size=C):
        super().__init__()
        self.z_dim, self.f_size, self.out_size, self.in_size = z_dim, f_size, out_size, in_size
        self.z = nn.Parameter(torch.fmod(torch.randn(z_dim), 2))
        self.w1 = nn.Parameter(torch.fmod(torch.randn((z_dim, out_size * f_size)) * 0.1, 2))
        self.b1 = nn.Parameter(torch.zeros(out_size * f_size))
        self.w2 = nn.Parameter(torch.fmod(torch.randn((z_dim, in_size * z_dim)) * 0.1, 2))
        self.b2 = nn.Parameter(torch.fmod(torch.randn(in_size * z_dim) * 0.1, 2))

    def kernel(self):
        h_in = torch.matmul(self.z, self.w2) + self.b2
        h_in = h_in.view(self.in_size, self.z_dim)
        h_final = torch.matmul(h_in, self.w1) + self.b1
        return h_final.view(self.in_size, self.out_size, self.f_size).transpose(0, 1)

    def forward(self, x):
        return F.conv1d(x.permute(0, 2, 1), self.kernel(), padding=1).permute(0, 2, 1)


@layer(
    "made weights",
    "kernels mixed per sample in one grouped convolution",
    "kaijieshi7/Dynamic-convolution-Pytorch, dynamic_conv.py",
)
class DynamicConv(nn.Module):
    def __init__(self, in_planes=C, out_planes=C, kernel_size=3, padding=1, K=4):
        super().__init__()
        self.in_planes, self.out_planes = in_planes, out_planes
        self.kernel_size, self.padding, self.K = kernel_size, padding, K
        self.attention = nn.Sequential(nn.Linear(in_planes, K), nn.ReLU(), nn.Linear(K, K))
        self.temperature = 31
        self.weight = nn.Parameter(torch.randn(K, out_planes, in_planes, kernel_size) * 0.1)
        self.bias = nn.Parameter(torch.zeros(K, out_planes))

    def forward(self, x):
        x = x.transpose(1, 2)
        pooled = F.adaptive_avg_pool1d(x, 1).view(x.size(0), -1)
        softmax_attention = F.softmax(self.attention(pooled) / self.temperature, 1)
        batch_size, _, length = x.size()
        x = x.reshape(1, -1, length)
        weight = self.weight.view(self.K, -1)
        aggregate_weight = torch.mm(softmax_attention, weight).view(
            -1, self.in_planes, self.kernel_size
        )
        aggregate_bias = torch.mm(softmax_attention, self.bias).view(-1)
        output = F.conv1d(
            x, aggregate_weight, aggregate_bias, padding=self.padding, groups=batch_size
        )
        return output.view(batch_size, self.out_planes, output.size(-1)).transpose(1, 2)


def weight_quant(w):
    scale = 1.0 / w.abs().mean().clamp_(min=1e-5)
    return (w * scale).round().clamp_(-1, 1) / scale


def activation_quant(x):
    scale = 127.0 / x.abs().max(dim=-1, keepdim=True).values.clamp_(min=1e-5)
    return (x * scale).round().clamp_(-128, 127) / scale


class BitLinear(nn.Linear):
    def forward(self, x):
        w = self.weight
        x_norm = F.rms_norm(x, (x.shape[-1],))
        x_quant = x_norm + (activation_quant(x_norm) - x_norm).detach()
        w_quant = w + (weight_quant(w) - w).detach()
        return F.linear(x_quant, w_quant, self.bias)


@layer(
    "made weights",
    "ternary by rounding with detached differences",
    "microsoft/unilm, bitnet, The Era of 1-bit LLMs: training tips, code and FAQ",
)
class BitFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = BitLinear(C, 2 * C, bias=False)
        self.down = BitLinear(2 * C, C, bias=False)

    def forward(self, x):
        return self.down(F.relu(self.up(x)) ** 2)


class MaskedLinear(nn.Linear):
    def __init__(self, in_features, out_features, bias=True):
        super().__init__(in_features, out_features, bias)
        self.register_buffer("mask", torch.ones(out_features, in_features))

    def set_mask(self, mask):
        self.mask.data.copy_(mask.t().to(torch.uint8))

    def forward(self, x):
        return F.linear(x, self.mask * self.weight, self.bias)


@layer("made weights", "product with a masked weight", "karpathy/pytorch-made, made.py")
class Made(nn.Module):
    """Each place of the sequence from those before it, channel by channel."""

    def __init__(self, nin=S, nhidden=2 * S):
        super().__init__()
        self.net = nn.Sequential(MaskedLinear(nin, nhidden), nn.ReLU(), MaskedLinear(nhidden, nin))
        generator = torch.Generator().manual_seed(0)
        order = torch.arange(nin)
        hidden = torch.randint(0, nin - 1, (nhidden,), generator=generator)
        self.net[0].set_mask(order[:, None] <= hidden[None, :])
        self.net[2].set_mask(hidden[:, None] < order[None, :])

    def forward(self, x):
        return self.net(x.transpose(1, 2)).transpose(1, 2)


class Skew(nn.Module):
    def forward(self, x):
        a = x.triu(1)
        return a - a.transpose(-1, -2)


class MatrixExponential(nn.Module):
    def forward(self, x):
        return torch.matrix_exp(x)


class Pruned(nn.Module):
    def __init__(self, x, p_drop=0.2):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        mask = torch.full(x.shape, 1.0 - p_drop)
        self.register_buffer("mask", torch.bernoulli(mask, generator=generator))

    def forward(self, x):
        return x * self.mask


@layer(
    "made weights",
    "registered parametrisations one upon another",
    "pytorch/tutorials, intermediate_source/parametrizations.py",
)
class Orthogonal(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Linear(C, C)
        parametrize.register_parametrization(self.turn, "weight", Skew())
        parametrize.register_parametrization(self.turn, "weight", MatrixExponential())
        self.mix = nn.Linear(C, C)
        parametrize.register_parametrization(self.mix, "weight", Pruned(self.mix.weight))

    def forward(self, x):
        with parametrize.cached():
            return self.mix(F.relu(self.turn(x)))
