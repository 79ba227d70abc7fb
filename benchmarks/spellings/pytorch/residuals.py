"""What is added to what: scaled and dropped branches, and connections over several layers."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.spellings.pytorch.frame import LAYERS, C, H, V, images, layer, model


def mlp(hidden=2 * C):
    return nn.Sequential(nn.LayerNorm(C), nn.Linear(C, hidden), nn.GELU(), nn.Linear(hidden, C))


class Mix(nn.Module):
    """Causal attention with a norm before it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(C)
        self.qkv, self.proj = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (H, C // H)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


def next_word(logits, labels):
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


# Scaled branches.


class LayerScale(nn.Module):
    def __init__(self, dim, init_values=1e-5, inplace=False):
        super().__init__()
        self.inplace = inplace
        self.gamma = nn.Parameter(init_values * torch.ones(dim))

    def forward(self, x):
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


@layer(
    "scaled residuals",
    "a weight of each channel that begins small",
    "huggingface/pytorch-image-models, timm/models/vision_transformer.py (LayerScale)",
)
class ScaledBranches(nn.Module):
    def __init__(self, init_values=1e-2):
        super().__init__()
        self.attn, self.mlp = Mix(), mlp()
        self.ls1 = LayerScale(C, init_values, inplace=True) if init_values else nn.Identity()
        self.ls2 = LayerScale(C, init_values) if init_values else nn.Identity()

    def forward(self, x):
        x = x + self.ls1(self.attn(x))
        x = x + self.ls2(self.mlp(x))
        return x


@layer(
    "scaled residuals",
    "one number that begins at zero, shared by both branches",
    "majumderb/rezero, rezero/transformer/rztx.py",
)
class ReZero(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(C, H, dropout=0.0)
        self.linear1 = nn.Linear(C, 2 * C)
        self.linear2 = nn.Linear(2 * C, C)
        self.resweight = nn.Parameter(torch.Tensor([0]))

    def forward(self, src):
        src = src.transpose(0, 1)
        src2 = src
        src2 = self.self_attn(src2, src2, src2)
        src2 = src2[0]
        src2 = src2 * self.resweight
        src = src + src2
        src2 = src
        src2 = self.linear2(F.relu(self.linear1(src2)))
        src2 = src2 * self.resweight
        src = src + src2
        return src.transpose(0, 1)


class NormFree(nn.Module):
    def __init__(self, channels, alpha, beta):
        super().__init__()
        self.alpha, self.beta = alpha, beta
        self.act1, self.act2 = nn.SiLU(), nn.SiLU(inplace=True)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.skipinit_gain = nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        out = self.act1(x) * self.beta
        shortcut = x
        out = self.conv1(out)
        out = self.conv2(self.act2(out))
        out.mul_(self.skipinit_gain)
        return out * self.alpha + shortcut


@model(
    "scaled residuals",
    "constants of the expected variance and a gain in place",
    "huggingface/pytorch-image-models, timm/models/nfnet.py (NormFreeBlock)",
    batch=images,
)
class NormFreeNet(nn.Module):
    def __init__(self, channels=16, alpha=0.2):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        expected_var = 1.0
        blocks = []
        for _ in range(LAYERS):
            blocks += [NormFree(channels, alpha, 1.0 / expected_var**0.5)]
            expected_var += alpha**2
        self.stages = nn.Sequential(*blocks)
        self.final_act = nn.SiLU()
        self.head = nn.Linear(channels, 10)

    def forward(self, images, labels):
        x = self.stages(self.stem(images))
        x = self.final_act(x).mean((2, 3))
        return F.cross_entropy(self.head(x), labels)


class ByDepth(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = Mix(), mlp()
        self.scale_depth = 1.4
        self.num_hidden_layers = LAYERS

    def forward(self, hidden):
        residual = hidden
        hidden = self.self_attn(hidden)
        hidden = residual + hidden * (self.scale_depth / math.sqrt(self.num_hidden_layers))
        residual = hidden
        hidden = self.mlp(hidden)
        return residual + hidden * (self.scale_depth / math.sqrt(self.num_hidden_layers))


@model(
    "scaled residuals",
    "a constant over the root of the depth",
    "OpenBMB/MiniCPM, model/modeling_minicpm.py",
)
class RootOfDepth(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(V, C)
        self.layers = nn.ModuleList([ByDepth() for _ in range(LAYERS)])
        self.norm = nn.RMSNorm(C)
        self.lm_head = nn.Linear(C, V, bias=False)

    def forward(self, tokens, labels):
        hidden = self.embed_tokens(tokens) * 12
        for decoder_layer in self.layers:
            hidden = decoder_layer(hidden)
        hidden = self.norm(hidden)
        return next_word(self.lm_head(hidden / (C / 16)), labels)


class WithFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = Mix(), mlp()
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x, x0):
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        x = x + self.attn(x)
        x = x + self.mlp(x)
        return x


@model(
    "scaled residuals",
    "learned numbers of the layer before and of the embedding",
    "KellerJordan/modded-nanogpt, train_gpt.py (lambdas)",
)
class LearnedMix(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(wte=nn.Embedding(V, C), h=nn.ModuleList([WithFirst() for _ in range(LAYERS)]))
        )
        self.lm_head = nn.Linear(C, V, bias=False)

    def forward(self, tokens, labels):
        x = self.transformer.wte(tokens)
        x = F.rms_norm(x, (x.size(-1),))
        x0 = x
        for block in self.transformer.h:
            x = block(x, x0)
        x = F.rms_norm(x, (x.size(-1),))
        logits = self.lm_head(x)
        logits = 30 * torch.tanh(logits / 30)
        return next_word(logits.float(), labels)


# Branches that are dropped at random.


def drop_path(x, rate, training):
    if rate == 0.0 or not training:
        return x
    stay = 1 - rate
    draws = x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(stay)
    draws.div_(stay)
    return x * draws


class DropPath(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        return drop_path(x, self.rate, self.training)

    def extra_repr(self):
        return f"rate={self.rate:.3f}"


class Dropped(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.attn, self.mlp = Mix(), mlp()
        self.drop_path = DropPath(rate) if rate > 0.0 else nn.Identity()

    def forward(self, x):
        x = x + self.drop_path(self.attn(x))
        return x + self.drop_path(self.mlp(x))


@model(
    "stochastic depth",
    "bernoulli_ of a new_empty for each sample, rates by linspace",
    "huggingface/pytorch-image-models, timm/layers/drop.py",
)
class RatesByDepth(nn.Module):
    def __init__(self, drop_path_rate=0.2):
        super().__init__()
        self.embed = nn.Embedding(V, C)
        dpr = [x.item() for x in torch.linspace(0, drop_path_rate, LAYERS)]
        self.blocks = nn.Sequential(*[Dropped(dpr[i]) for i in range(LAYERS)])
        self.norm = nn.LayerNorm(C)
        self.head = nn.Linear(C, V)

    def forward(self, tokens, labels):
        return next_word(self.head(self.norm(self.blocks(self.embed(tokens)))), labels)


def drop_connect(inputs, rate, training):
    if not training:
        return inputs
    keep = 1 - rate
    drawn = keep
    drawn += torch.rand([inputs.shape[0], 1, 1], dtype=inputs.dtype, device=inputs.device)
    return inputs / keep * torch.floor(drawn)


@layer(
    "stochastic depth",
    "floor of a rand and the probability to stay",
    "lukemelas/EfficientNet-PyTorch, efficientnet_pytorch/utils.py (drop_connect)",
)
class DropConnect(nn.Module):
    def __init__(self, rate=0.1):
        super().__init__()
        self.rate = rate
        self.mix = mlp()

    def forward(self, inputs):
        x = self.mix(inputs)
        if self.rate:
            x = drop_connect(x, self.rate, training=self.training)
        x = x + inputs
        return x


def stochastic_depth(branch, rate, mode, training):
    if not training or rate == 0.0:
        return branch
    if mode == "row":
        size = [branch.shape[0]] + [1] * (branch.ndim - 1)
    else:
        size = [1] * branch.ndim
    noise = torch.empty(size, dtype=branch.dtype, device=branch.device)
    noise = noise.bernoulli_(1.0 - rate)
    if rate < 1.0:
        noise.div_(1.0 - rate)
    return branch * noise


@layer(
    "stochastic depth",
    "one draw for the whole batch",
    "pytorch/vision, torchvision/ops/stochastic_depth.py",
)
class DrawOfBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = Mix(), mlp()

    def forward(self, x):
        result = stochastic_depth(self.attn(x), 0.1, "batch", self.training)
        result += x
        return result + stochastic_depth(self.mlp(result), 0.1, "batch", self.training)


def drop_add_residual(x, residual_func, drop_ratio):
    b = x.shape[0]
    kept = max(int(b * (1 - drop_ratio)), 1)
    brange = torch.randperm(b, device=x.device)[:kept]
    residual = residual_func(x[brange]).flatten(1)
    out = torch.index_add(x.flatten(1), 0, brange, residual.to(dtype=x.dtype), alpha=b / kept)
    return out.view_as(x)


@layer(
    "stochastic depth",
    "a random subset of the samples and index_add",
    "facebookresearch/dinov2, dinov2/layers/block.py",
)
class SubsetOfSamples(nn.Module):
    def __init__(self, drop_path=0.25):
        super().__init__()
        self.attn, self.mlp = Mix(), mlp()
        self.sample_drop_ratio = drop_path

    def forward(self, x):
        if self.training and self.sample_drop_ratio > 0.1:
            x = drop_add_residual(x, self.attn, self.sample_drop_ratio)
            x = drop_add_residual(x, self.mlp, self.sample_drop_ratio)
        else:
            x = x + self.attn(x)
            x = x + self.mlp(x)
        return x


class LayerDropModuleList(nn.ModuleList):
    """Yields another choice of its layers each time."""

    def __init__(self, p, modules=None):
        super().__init__(modules)
        self.p = p

    def __iter__(self):
        draws = torch.empty(len(self)).uniform_()
        for number, kept in enumerate(super().__iter__()):
            if self.training and draws[number] < self.p:
                continue
            yield kept


@model(
    "stochastic depth",
    "a module list that leaves layers out",
    "facebookresearch/fairseq, fairseq/modules/layer_drop.py",
)
class LeftOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(V, C)
        self.layers = LayerDropModuleList(p=0.02)
        self.layers.extend([Dropped(0.0) for _ in range(2 * LAYERS)])
        self.output_projection = nn.Linear(C, V)

    def forward(self, tokens, labels):
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x)
        return next_word(self.output_projection(x), labels)


# Connections over several layers.


class LongSkip(nn.Module):
    def __init__(self, skip=False):
        super().__init__()
        self.attn, self.mlp = Mix(), mlp()
        self.skip_linear = nn.Linear(2 * C, C) if skip else None

    def forward(self, x, skip=None):
        if self.skip_linear is not None:
            x = self.skip_linear(torch.cat([x, skip], dim=-1))
        x = x + self.attn(x)
        return x + self.mlp(x)


@model(
    "connections between layers",
    "a stack of skips that the second half pops",
    "baofff/U-ViT, libs/uvit.py",
)
class PoppedSkips(nn.Module):
    def __init__(self, depth=LAYERS + 1):
        super().__init__()
        self.embed = nn.Embedding(V, C)
        self.in_blocks = nn.ModuleList([LongSkip() for _ in range(depth // 2)])
        self.mid_block = LongSkip()
        self.out_blocks = nn.ModuleList([LongSkip(skip=True) for _ in range(depth // 2)])
        self.norm = nn.LayerNorm(C)
        self.decoder_pred = nn.Linear(C, V, bias=True)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        skips = []
        for blk in self.in_blocks:
            x = blk(x)
            skips.append(x)
        x = self.mid_block(x)
        for blk in self.out_blocks:
            x = blk(x, skips.pop())
        return next_word(self.decoder_pred(self.norm(x)), labels)


class DenseLayer(nn.Module):
    def __init__(self, width, growth):
        super().__init__()
        self.relu1, self.relu2 = nn.ReLU(inplace=True), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(width, 2 * growth, kernel_size=1)
        self.conv2 = nn.Conv2d(2 * growth, growth, kernel_size=3, padding=1)

    def forward(self, features):
        if isinstance(features, torch.Tensor):
            features = [features]
        x = self.conv1(self.relu1(torch.cat(features, 1)))
        return self.conv2(self.relu2(x))


class DenseBlock(nn.ModuleDict):
    def __init__(self, layers, width, growth):
        super().__init__()
        for i in range(layers):
            self.add_module(f"denselayer{i + 1}", DenseLayer(width + i * growth, growth))

    def forward(self, x):
        features = [x]
        for _, made in self.items():
            features.append(made(features))
        return torch.cat(features, 1)


@model(
    "connections between layers",
    "each layer is given the cat of all before",
    "pytorch/vision, torchvision/models/densenet.py",
    batch=images,
)
class DenseNet(nn.Module):
    def __init__(self, growth=8, width=16):
        super().__init__()
        stem = [
            ("conv0", nn.Conv2d(3, width, 3, stride=2, padding=1)),
            ("relu0", nn.ReLU(inplace=True)),
            ("pool0", nn.MaxPool2d(kernel_size=2)),
        ]
        self.features = nn.Sequential(OrderedDict(stem))
        self.features.add_module("denseblock1", DenseBlock(LAYERS, width, growth))
        width += LAYERS * growth
        self.features.add_module("conv1", nn.Conv2d(width, width // 2, 1))
        self.classifier = nn.Linear(width // 2, 10)

    def forward(self, images, labels):
        features = self.features(images)
        out = F.relu(features, inplace=True)
        out = F.adaptive_avg_pool2d(out, (1, 1))
        out = torch.flatten(out, 1)
        return F.cross_entropy(self.classifier(out), labels)


class ScalarMix(nn.Module):
    """A sum with softmax weights, times a number."""

    def __init__(self, count):
        super().__init__()
        self.scalars = nn.ParameterList(
            [nn.Parameter(torch.FloatTensor([0.0])) for _ in range(count)]
        )
        self.gamma = nn.Parameter(torch.FloatTensor([1.0]))

    def forward(self, tensors):
        weights = F.softmax(torch.cat([scalar for scalar in self.scalars]), dim=0)
        weights = torch.split(weights, split_size_or_sections=1)
        return self.gamma * sum(w * t for w, t in zip(weights, tensors, strict=True))


@model(
    "connections between layers",
    "sum of all hidden states with softmax weights",
    "allenai/allennlp, allennlp/modules/scalar_mix.py",
)
class SumOfStates(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, C)
        self.layers = nn.ModuleList([Dropped(0.0) for _ in range(LAYERS)])
        self.mix = ScalarMix(LAYERS + 1)
        self.fc = nn.Linear(C, V)

    def forward(self, tokens, labels):
        hidden = self.embed(tokens)
        all_hidden_states = ()
        for block in self.layers:
            all_hidden_states = (*all_hidden_states, hidden)
            hidden = block(hidden)
        all_hidden_states = (*all_hidden_states, hidden)
        return next_word(self.fc(self.mix(all_hidden_states)), labels)


@model(
    "connections between layers",
    "forward hooks that collect, and a stack",
    "isl-org/MiDaS, midas/vit.py (get_activation)",
)
class CollectedByHooks(nn.Module):
    def __init__(self, hooks=(1, 3)):
        super().__init__()
        self.embed = nn.Embedding(V, C)
        self.blocks = nn.Sequential(*[Dropped(0.0) for _ in range(LAYERS)])
        self.activations = {}
        for i, hook in enumerate(hooks):
            self.blocks[hook].register_forward_hook(self.get_activation(str(i + 1)))
        self.scratch = nn.Linear(len(hooks) * C, C)
        self.output_conv = nn.Linear(C, V)

    def get_activation(self, name):
        def hook(model, input, output):
            self.activations[name] = output

        return hook

    def forward(self, tokens, labels):
        _ = self.blocks(self.embed(tokens))
        taken = torch.stack([self.activations[name] for name in sorted(self.activations)], dim=2)
        path = F.relu(self.scratch(taken.flatten(2)))
        return next_word(self.output_conv(path), labels)


class ValuesOfFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_q, self.c_k, self.c_v, self.c_proj = (nn.Linear(C, C, bias=False) for _ in range(4))
        self.lamb = nn.Parameter(torch.tensor(0.5))
        self.mlp = mlp()

    def forward(self, x, v1=None):
        b, t = x.size(0), x.size(1)
        h = F.rms_norm(x, (C,))
        q = self.c_q(h).view(b, t, H, C // H)
        k = self.c_k(h).view(b, t, H, C // H)
        v = self.c_v(h).view(b, t, H, C // H)
        if v1 is None:
            v1 = v
        v = (1 - self.lamb) * v + self.lamb * v1.view_as(v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view_as(x))
        return x + self.mlp(x), v1


@model(
    "connections between layers",
    "values of the first layer handed on in a tuple",
    "KellerJordan/modded-nanogpt, train_gpt.py (value residual)",
)
class FirstValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(V, C)
        self.h = nn.ModuleList([ValuesOfFirst() for _ in range(LAYERS)])
        self.lm_head = nn.Linear(C, V, bias=False)

    def forward(self, tokens, labels):
        x = self.wte(tokens)
        v1 = None
        for block in self.h:
            x, v1 = block(x, v1)
        return next_word(self.lm_head(F.rms_norm(x, (C,))), labels)
