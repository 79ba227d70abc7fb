"""Norms: how they are computed, of what, and where they stand in a layer."""

import copy
import math
from functools import partial

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
    layer,
    model,
    numbers,
)


class NormThenLinear(nn.Module):
    """A product with ``norm`` before it, which is the spelling."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.fc = nn.Linear(C, C)

    def forward(self, x):
        return self.fc(self.norm(x))


# Layer norm.


class MeanAndStd(nn.Module):
    def __init__(self, features, eps=1e-6):
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(features))
        self.b_2 = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


@layer(
    "layer norm",
    "mean and std by hand, epsilon outside of the root",
    "harvardnlp/annotated-transformer, the_annotated_transformer.py",
)
class ByMeanAndStd(NormThenLinear):
    def __init__(self):
        super().__init__(MeanAndStd(C))


class OptionalBias(nn.Module):
    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


@layer("layer norm", "the function with no bias", "karpathy/nanoGPT, model.py")
class ByFunction(NormThenLinear):
    def __init__(self):
        super().__init__(OptionalBias(C, bias=False))


class ChannelsFirst(nn.Module):
    def __init__(self, width, eps=1e-6, data_format="channels_last"):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps
        self.data_format = data_format

    def forward(self, x):
        if self.data_format == "channels_last":
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        x = x - x.mean(1, keepdim=True)
        var = x.pow(2).mean(1, keepdim=True)
        return self.weight[:, None] * (x / torch.sqrt(var + self.eps)) + self.bias[:, None]


@layer(
    "layer norm",
    "of the first dimension of channels, by pow and mean",
    "facebookresearch/ConvNeXt, models/convnext.py",
)
class OfChannelsFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.dwconv = nn.Conv1d(C, C, kernel_size=3, padding=1, groups=C)
        self.norm = ChannelsFirst(C, data_format="channels_first")
        self.pwconv = nn.Conv1d(C, C, kernel_size=1)

    def forward(self, x):
        x = x.permute(0, 2, 1)
        x = self.pwconv(self.norm(self.dwconv(x)))
        return x.permute(0, 2, 1)


class InSingle(nn.LayerNorm):
    """Computed in float32, whatever it is given."""

    def forward(self, x):
        given = x.dtype
        normed = super().forward(x.type(torch.float32))
        return normed.type(given)


@layer("layer norm", "a subclass that casts around super's forward", "openai/CLIP, clip/model.py")
class BySubclass(NormThenLinear):
    def __init__(self):
        super().__init__(InSingle(C))


class NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        ctx.eps = eps
        mu = x.mean(-1, keepdim=True)
        var = (x - mu).pow(2).mean(-1, keepdim=True)
        y = (x - mu) / (var + eps).sqrt()
        ctx.save_for_backward(y, var, weight)
        return weight * y + bias

    @staticmethod
    def backward(ctx, grad_output):
        y, var, weight = ctx.saved_tensors
        g = grad_output * weight
        of_y = (g * y).mean(dim=-1, keepdim=True)
        gx = (g - y * of_y - g.mean(dim=-1, keepdim=True)) / torch.sqrt(var + ctx.eps)
        rest = tuple(range(grad_output.dim() - 1))
        return gx, (grad_output * y).sum(dim=rest), grad_output.sum(dim=rest), None


class FunctionOfAutograd(nn.Module):
    def __init__(self, channels, eps=1e-6):
        super().__init__()
        self.register_parameter("weight", nn.Parameter(torch.ones(channels)))
        self.register_parameter("bias", nn.Parameter(torch.zeros(channels)))
        self.eps = eps

    def forward(self, x):
        return NormFunction.apply(x, self.weight, self.bias, self.eps)


@layer(
    "layer norm",
    "a function of autograd with its own backward",
    "megvii-research/NAFNet, basicsr/models/archs/arch_util.py",
)
class ByOwnBackward(NormThenLinear):
    def __init__(self):
        super().__init__(FunctionOfAutograd(C))


# Root mean square norm.


class Rsqrt(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self._norm(x.float()).type_as(x) * self.weight


@layer(
    "root mean square norm",
    "rsqrt of the mean of pow, in float",
    "meta-llama/llama, llama/model.py",
)
class ByRsqrt(NormThenLinear):
    def __init__(self):
        super().__init__(Rsqrt(C))


class OnePlusWeight(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        output = x.float()
        output = output / torch.sqrt(output.square().mean(dim=-1, keepdim=True) + self.eps)
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


@layer(
    "root mean square norm",
    "times one plus a weight that begins at zero",
    "google/gemma_pytorch, gemma/model.py",
)
class ByOnePlus(NormThenLinear):
    def __init__(self):
        super().__init__(OnePlusWeight(C))


NORMS = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}


def build_norm(norm_type, dim, eps=1e-6):
    if norm_type.lower() not in NORMS:
        raise NotImplementedError(f"no norm {norm_type!r}")
    return NORMS[norm_type.lower()](dim, eps=eps)


@layer(
    "root mean square norm",
    "the module that torch has",
    "pytorch/torchtitan, torchtitan/models/norms.py",
)
class ByModule(NormThenLinear):
    def __init__(self):
        super().__init__(build_norm("RMSNorm", C))


class NormalizeTimesRoot(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale = dim**0.5
        self.g = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.scale * self.g


@layer(
    "root mean square norm",
    "normalize times the root of the width",
    "lucidrains/x-transformers, x_transformers/x_transformers.py",
)
class ByNormalize(NormThenLinear):
    def __init__(self):
        super().__init__(NormalizeTimesRoot(C))


class PartialNorm(nn.Module):
    """p: the part of the width whose norm is taken for that of all."""

    def __init__(self, d, p=None, eps=1e-8):
        super().__init__()
        self.d, self.p, self.eps = d, p, eps
        self.scale = nn.Parameter(torch.ones(d))

    def forward(self, x):
        taken, size = x, self.d
        if self.p is not None:
            size = int(self.d * self.p)
            taken, _ = torch.split(x, [size, self.d - size], dim=-1)
        rms = taken.norm(2, dim=-1, keepdim=True) * size**-0.5
        return self.scale * (x / (rms + self.eps))


@layer(
    "root mean square norm",
    "norm of a part that is split off",
    "bzhangGo/rmsnorm, rmsnorm_torch.py",
)
class OfPart(NormThenLinear):
    def __init__(self):
        super().__init__(PartialNorm(C, p=0.25))


# Group norm and instance norm.

GROUPS = 4


@layer(
    "group and instance norm",
    "nn.GroupNorm between two transposes",
    "facebookresearch/fairseq, fairseq/models/wav2vec/wav2vec2.py",
)
class BetweenTransposes(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(C, C, kernel_size=3, padding=1, bias=False)
        self.norm = nn.GroupNorm(GROUPS, C, affine=True)
        self.act = nn.GELU()

    def forward(self, x):
        x = self.conv(x.transpose(1, 2))
        x = F.group_norm(
            x.float(),
            self.norm.num_groups,
            self.norm.weight.float(),
            self.norm.bias.float(),
            self.norm.eps,
        ).type_as(x)
        return self.act(x).transpose(1, 2)


def mean_and_std(x, eps=1e-5):
    n, c = x.size()[:2]
    rows = x.view(n, c, -1)
    std = (rows.var(dim=2) + eps).sqrt()
    return rows.mean(dim=2).view(n, c, 1), std.view(n, c, 1)


@layer(
    "group and instance norm",
    "mean and std of one part put onto the other",
    "naoto0804/pytorch-AdaIN, function.py",
)
class OntoOther(nn.Module):
    def __init__(self):
        super().__init__()
        self.content, self.style = nn.Conv1d(C, C, 1), nn.Conv1d(C, C, 1)

    def forward(self, x):
        x = x.transpose(1, 2).contiguous()
        content, style = self.content(x), self.style(x)
        mean, std = mean_and_std(content)
        style_mean, style_std = mean_and_std(style)
        normed = (content - mean.expand_as(content)) / std.expand_as(content)
        out = normed * style_std.expand_as(content) + style_mean.expand_as(content)
        return out.transpose(1, 2)


def group_std(x, groups, eps=1e-5):
    b, c, s = x.shape
    grouped = x.reshape(b, groups, c // groups, s)
    var = grouped.float().var(dim=(2, 3), unbiased=False, keepdim=True)
    std = var.add(eps).sqrt().to(x.dtype)
    return std.expand(grouped.shape).reshape(b, c, s)


@layer(
    "group and instance norm",
    "std of groups expanded, over a sigmoid",
    "huggingface/pytorch-image-models, timm/layers/evo_norm.py (EvoNorm2dS0)",
)
class StdOfGroups(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(C, C, 3, padding=1)
        self.weight = nn.Parameter(torch.ones(C))
        self.bias = nn.Parameter(torch.zeros(C))
        self.v = nn.Parameter(torch.ones(C))

    def forward(self, x):
        x = self.conv(x.mT)
        v_shape = (1, -1, 1)
        v = self.v.view(v_shape).to(x.dtype)
        x = x * (x * v).sigmoid() / group_std(x, GROUPS)
        return (x * self.weight.view(v_shape) + self.bias.view(v_shape)).mT


@layer(
    "group and instance norm",
    "batch norm of a view with the samples in its channels",
    "NVlabs/MUNIT, networks.py (AdaptiveInstanceNorm2d)",
)
class SamplesInChannels(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(C))
        self.register_buffer("running_var", torch.ones(C))
        self.mlp = nn.Sequential(nn.Linear(C, C), nn.ReLU(inplace=True), nn.Linear(C, 2 * C))

    def forward(self, x):
        bias, weight = self.mlp(x.mean(dim=1)).chunk(2, dim=1)
        x = x.transpose(1, 2)
        b, c = x.size(0), x.size(1)
        out = F.batch_norm(
            x.contiguous().view(1, b * c, *x.size()[2:]),
            self.running_mean.repeat(b),
            self.running_var.repeat(b),
            weight.contiguous().view(-1),
            bias.contiguous().view(-1),
            training=True,
        )
        return out.view(b, c, *x.size()[2:]).transpose(1, 2)


@layer(
    "group and instance norm",
    "instance and layer statistics mixed by softmax",
    "switchablenorms/Switchable-Normalization, models/switchable_norm.py",
)
class Switchable(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.fc = nn.Linear(C, C)
        self.weight = nn.Parameter(torch.ones(1, C, 1))
        self.bias = nn.Parameter(torch.zeros(1, C, 1))
        self.mean_weight = nn.Parameter(torch.ones(2))
        self.var_weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        x = self.fc(x).transpose(1, 2)
        mean_in = x.mean(-1, keepdim=True)
        var_in = x.var(-1, keepdim=True)
        mean_ln = mean_in.mean(1, keepdim=True)
        temp = var_in + mean_in**2
        var_ln = temp.mean(1, keepdim=True) - mean_ln**2
        mean_weight = F.softmax(self.mean_weight, 0)
        var_weight = F.softmax(self.var_weight, 0)
        mean = mean_weight[0] * mean_in + mean_weight[1] * mean_ln
        var = var_weight[0] * var_in + var_weight[1] * var_ln
        x = (x - mean) / (var + self.eps).sqrt()
        return (x * self.weight + self.bias).transpose(1, 2)


# Unit length.


@layer(
    "scale to unit length",
    "linear of what is normalized and a normalized weight",
    "ronghuaiyang/arcface-pytorch, models/metrics.py",
)
class NormalizedBoth(nn.Module):
    def __init__(self, s=4.0):
        super().__init__()
        self.s = s
        self.weight = nn.Parameter(torch.FloatTensor(C, C))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, input):
        cosine = F.linear(F.normalize(input, dim=-1), F.normalize(self.weight))
        return cosine * self.s


@model(
    "scale to unit length",
    "features over their norm, and logits of all pairs",
    "openai/CLIP, clip/model.py",
    batch=numbers,
)
class PairsOfFeatures(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.transformer = Body(), Body()
        self.text_projection = nn.Parameter(torch.empty(C, C))
        nn.init.normal_(self.text_projection, std=C**-0.5)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, x, y):
        image_features = self.visual(x).mean(dim=1)
        text_features = self.transformer(y)[:, -1] @ self.text_projection
        image_features = image_features / image_features.norm(dim=1, keepdim=True)
        text_features = text_features / text_features.norm(dim=1, keepdim=True)
        logit_scale = self.logit_scale.exp()
        logits_per_image = logit_scale * image_features @ text_features.t()
        logits_per_text = logits_per_image.t()
        labels = torch.arange(x.shape[0], device=x.device)
        of_images = F.cross_entropy(logits_per_image, labels)
        return (of_images + F.cross_entropy(logits_per_text, labels)) / 2


@layer(
    "scale to unit length",
    "weight_norm as a parametrization",
    "huggingface/transformers, models/wav2vec2/modeling_wav2vec2.py",
)
class NormOfWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(C, C, kernel_size=4, padding=2, groups=4)
        weight_norm = nn.utils.weight_norm
        if hasattr(nn.utils.parametrizations, "weight_norm"):
            weight_norm = nn.utils.parametrizations.weight_norm
        self.conv = weight_norm(self.conv, name="weight", dim=2)
        self.num_pad_remove = 1 if 4 % 2 == 0 else 0

    def forward(self, hidden):
        hidden = self.conv(hidden.transpose(1, 2))
        if self.num_pad_remove > 0:
            hidden = hidden[:, :, : -self.num_pad_remove]
        return F.gelu(hidden).transpose(1, 2)


@layer(
    "scale to unit length",
    "div by the root of the sum of pow",
    "amdegroot/ssd.pytorch, layers/modules/l2norm.py",
)
class DivByRoot(nn.Module):
    def __init__(self, scale=5):
        super().__init__()
        self.gamma = scale or None
        self.eps = 1e-10
        self.weight = nn.Parameter(torch.Tensor(C))
        nn.init.constant_(self.weight, self.gamma)
        self.conv = nn.Conv1d(C, C, kernel_size=1)

    def forward(self, x):
        x = self.conv(x.permute(0, 2, 1))
        norm = x.pow(2).sum(dim=1, keepdim=True).sqrt() + self.eps
        x = torch.div(x, norm)
        out = self.weight.unsqueeze(0).unsqueeze(2).expand_as(x) * x
        return out.permute(0, 2, 1).contiguous()


@layer(
    "scale to unit length",
    "cosine_similarity with each row of a memory",
    "loudinthecloud/pytorch-ntm, ntm/memory.py",
)
class MemoryByCosine(nn.Module):
    def __init__(self, rows=12):
        super().__init__()
        self.memory = nn.Parameter(torch.randn(rows, C))
        self.key = nn.Linear(C, C)
        self.strength = nn.Linear(C, 1)

    def forward(self, x):
        k = self.key(x)
        beta = F.softplus(self.strength(x))
        similar = F.cosine_similarity(self.memory + 1e-16, k.unsqueeze(2) + 1e-16, dim=-1)
        w = F.softmax(beta * similar, dim=-1)
        return torch.matmul(w, self.memory)


# Where norms stand.


class Mix(nn.Module):
    """Causal attention with no norm of its own."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x):
        b, s, c = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, H, c // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, s, c))


class Mlp(nn.Module):
    def __init__(self, hidden=2 * C):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(C, hidden), nn.GELU(), nn.Linear(hidden, C)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class SublayerConnection(nn.Module):
    def __init__(self, size, dropout):
        super().__init__()
        self.norm = MeanAndStd(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, sublayer):
        return x + self.dropout(sublayer(self.norm(x)))


class EncoderLayer(nn.Module):
    def __init__(self, size, self_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        one = SublayerConnection(size, dropout)
        self.sublayer = nn.ModuleList([copy.deepcopy(one) for _ in range(2)])

    def forward(self, x):
        x = self.sublayer[0](x, lambda x: self.self_attn(x))
        return self.sublayer[1](x, self.feed_forward)


@model(
    "where norms stand",
    "before, in a sublayer that is given a function",
    "harvardnlp/annotated-transformer, the_annotated_transformer.py",
)
class Before(nn.Module):
    def __init__(self):
        super().__init__()
        c = copy.deepcopy
        attn, ff = Mix(), Mlp()
        self.embed = nn.Embedding(V, C)
        block = EncoderLayer(C, c(attn), c(ff), 0.0)
        self.layers = nn.ModuleList([c(block) for _ in range(LAYERS)])
        self.norm = MeanAndStd(C)
        self.generator = nn.Sequential(nn.Linear(C, V), nn.LogSoftmax(dim=-1))

    def forward(self, tokens, labels):
        x = self.embed(tokens) * math.sqrt(C)
        for block in self.layers:
            x = block(x)
        out = self.generator(self.norm(x))
        return F.nll_loss(out.contiguous().view(-1, V), labels.contiguous().view(-1))


class SelfOutput(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.dense = nn.Linear(width, C)
        self.LayerNorm = nn.LayerNorm(C, eps=1e-12)
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden, input_tensor):
        hidden = self.dense(hidden)
        hidden = self.dropout(hidden)
        return self.LayerNorm(hidden + input_tensor)


class Intermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(C, 2 * C)
        self.intermediate_act_fn = nn.functional.gelu

    def forward(self, hidden):
        return self.intermediate_act_fn(self.dense(hidden))


@model(
    "where norms stand",
    "after, in an output that is given both",
    "huggingface/transformers, models/bert/modeling_bert.py",
)
class After(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(V, C)
        self.layer = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention": Mix(),
                    "attention_output": SelfOutput(C),
                    "intermediate": Intermediate(),
                    "output": SelfOutput(2 * C),
                }
            )
            for _ in range(LAYERS)
        )
        self.cls = nn.Linear(C, V)

    def forward(self, tokens, labels):
        hidden = self.embeddings(tokens)
        for block in self.layer:
            attended = block["attention_output"](block["attention"](hidden), hidden)
            hidden = block["output"](block["intermediate"](attended), attended)
        scores = self.cls(hidden)
        loss = nn.CrossEntropyLoss()(scores.view(-1, V), labels.view(-1))
        return loss, scores


class FourNorms(nn.Module):
    def __init__(self):
        super().__init__()
        norm = partial(OnePlusWeight, C, eps=1e-6)
        self.self_attn, self.mlp = Mix(), Mlp()
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()

    def forward(self, hidden):
        residual = hidden
        hidden = self.input_layernorm(hidden)
        hidden = self.self_attn(hidden)
        hidden = self.post_attention_layernorm(hidden)
        hidden = residual + hidden
        residual = hidden
        hidden = self.pre_feedforward_layernorm(hidden)
        hidden = self.mlp(hidden)
        hidden = self.post_feedforward_layernorm(hidden)
        return residual + hidden


@model(
    "where norms stand",
    "before and after each branch",
    "huggingface/transformers, models/gemma2/modeling_gemma2.py",
)
class BeforeAndAfter(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(V, C)
        self.layers = nn.ModuleList([FourNorms() for _ in range(LAYERS)])
        self.norm = OnePlusWeight(C)
        self.lm_head = nn.Linear(C, V, bias=False)

    def forward(self, tokens, labels):
        hidden = self.embed_tokens(tokens)
        normalizer = torch.tensor(C**0.5, dtype=hidden.dtype)
        hidden = hidden * normalizer
        for decoder_layer in self.layers[:LAYERS]:
            hidden = decoder_layer(hidden)
        logits = self.lm_head(self.norm(hidden))
        return F.cross_entropy(logits.float().view(-1, V), labels.view(-1))


class OneNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(C, eps=1e-5)
        self.attn = Mix()
        self.mlp = Mlp(4 * C)

    def forward(self, hidden):
        residual = hidden
        hidden = self.ln_1(hidden)
        attn_output = self.attn(hidden)
        feed_forward = self.mlp(hidden)
        return attn_output + feed_forward + residual


@model(
    "where norms stand",
    "one before attention and mlp side by side",
    "huggingface/transformers, models/gptj/modeling_gptj.py",
)
class SideBySide(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(V, C)
        self.drop = nn.Dropout(0.0)
        self.h = nn.ModuleList([OneNorm() for _ in range(LAYERS)])
        self.ln_f = nn.LayerNorm(C)
        self.lm_head = nn.Linear(C, V)

    def forward(self, tokens, labels):
        hidden = self.drop(self.wte(tokens.view(-1, tokens.size(-1))))
        for block in self.h:
            hidden = block(hidden)
        hidden = self.ln_f(hidden).view(-1, S, C)
        lm_logits = self.lm_head(hidden).to(torch.float32)
        return F.cross_entropy(lm_logits.view(-1, lm_logits.size(-1)), labels.view(-1))


class Deep(nn.Module):
    def __init__(self, alpha):
        super().__init__()
        self.alpha = alpha
        self.self_attn, self.ffn = Mix(), Mlp()
        self.self_attn_layer_norm = nn.LayerNorm(C)
        self.final_layer_norm = nn.LayerNorm(C)

    def residual_connection(self, x, residual):
        return residual * self.alpha + x

    def forward(self, x):
        residual = x
        x = self.residual_connection(self.self_attn(x), residual)
        residual = x = self.self_attn_layer_norm(x)
        x = self.residual_connection(self.ffn(x), residual)
        return self.final_layer_norm(x)


@model(
    "where norms stand",
    "after a residual times a constant of the depth",
    "microsoft/torchscale, torchscale/architecture/encoder.py (deepnorm)",
)
class DeepNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(V, C)
        self.layers = nn.ModuleList([])
        for _ in range(LAYERS):
            self.layers.append(Deep(math.pow(2.0 * LAYERS, 0.25)))
        self.output_projection = nn.Linear(C, V, bias=False)
        init_scale = math.pow(8.0 * LAYERS, 0.25)
        for name, p in self.named_parameters():
            if "fc1" in name or "fc2" in name or "proj" in name:
                p.data.div_(init_scale)

    def forward(self, tokens, labels):
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x)
        logits = self.output_projection(x)
        loss = F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")
        return loss / labels.numel()
