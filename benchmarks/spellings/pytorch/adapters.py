"""Small trained parts put into a frozen model: low rank adapters, prompts and prefixes."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.spellings.pytorch.frame import LAYERS, Body, C, H, S, V, layer, model


class SelfAttention(nn.Module):
    """Causal; adapters are put around its products."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(C, C)
        self.k_proj = nn.Linear(C, C)
        self.v_proj = nn.Linear(C, C)
        self.o_proj = nn.Linear(C, C)

    def forward(self, x, past=None):
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, H, -1).transpose(1, 2)
        k = self.k_proj(x).view(b, s, H, -1).transpose(1, 2)
        v = self.v_proj(x).view(b, s, H, -1).transpose(1, 2)
        seen = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
            seen = F.pad(seen, (past[0].size(2), 0), value=True)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o_proj(y.transpose(1, 2).reshape(b, s, C))


class WrappedLinear(nn.Module):
    def __init__(self, base_layer, adapter_name="default", r=4, alpha=8, dropout=0.0):
        super().__init__()
        self.base_layer = base_layer
        self.base_layer.requires_grad_(False)
        self.scaling = {}
        self.lora_A = nn.ModuleDict({})
        self.lora_B = nn.ModuleDict({})
        self.lora_dropout = nn.ModuleDict({})
        self.active_adapters = []
        self.add_adapter(adapter_name, r, alpha, dropout)

    def add_adapter(self, name, r, alpha, dropout):
        self.lora_A[name] = nn.Linear(self.base_layer.in_features, r, bias=False)
        self.lora_B[name] = nn.Linear(r, self.base_layer.out_features, bias=False)
        self.lora_dropout[name] = nn.Dropout(dropout) if dropout > 0.0 else nn.Identity()
        self.scaling[name] = alpha / r
        nn.init.kaiming_uniform_(self.lora_A[name].weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B[name].weight)
        self.active_adapters.append(name)

    def forward(self, x, *args, **kwargs):
        result = self.base_layer(x, *args, **kwargs)
        result_dtype = result.dtype
        for name in self.active_adapters:
            if name not in self.lora_A.keys():
                continue
            down, up = self.lora_A[name], self.lora_B[name]
            x = x.to(down.weight.dtype)
            result = result + up(down(self.lora_dropout[name](x))) * self.scaling[name]
        return result.to(result_dtype)


@layer(
    "low rank adapters",
    "wrapper around a frozen linear",
    "huggingface/peft, src/peft/tuners/lora/layer.py",
)
class PeftAttention(SelfAttention):
    def __init__(self):
        super().__init__()
        for name, module in list(self.named_children()):
            if name.endswith(("q_proj", "v_proj")):
                setattr(self, name, WrappedLinear(module))


class LoraLinear(nn.Linear):
    def __init__(self, in_features, out_features, r=0, lora_alpha=1, **kwargs):
        nn.Linear.__init__(self, in_features, out_features, **kwargs)
        self.r = r
        self.merged = False
        if r > 0:
            self.lora_A = nn.Parameter(self.weight.new_zeros((r, in_features)))
            self.lora_B = nn.Parameter(self.weight.new_zeros((out_features, r)))
            self.scaling = lora_alpha / r
            self.weight.requires_grad = False
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def train(self, mode=True):
        nn.Linear.train(self, mode)
        if self.r > 0 and mode == self.merged:
            sign = -1 if mode else 1
            self.weight.data += sign * (self.lora_B @ self.lora_A) * self.scaling
            self.merged = not mode
        return self

    def forward(self, x):
        result = F.linear(x, self.weight, bias=self.bias)
        if self.r > 0 and not self.merged:
            result += (x @ self.lora_A.transpose(0, 1) @ self.lora_B.transpose(0, 1)) * self.scaling
        return result


@layer(
    "low rank adapters",
    "subclass of linear with parameters of its own",
    "microsoft/LoRA, loralib/layers.py",
)
class LoralibFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = LoraLinear(C, 2 * C, r=4, lora_alpha=8)
        self.fc2 = LoraLinear(2 * C, C, r=4, lora_alpha=8)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


@layer("low rank adapters", "merged at forward with a magnitude per column", "catid/dora, dora.py")
class DoraLinear(nn.Module):
    """Magnitude and direction of ``weight + b @ a`` are trained apart."""

    def __init__(self, d_in=C, d_out=C, rank=4):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(d_out), requires_grad=False)
        nn.init.xavier_uniform_(self.weight)
        self.m = nn.Parameter(self.weight.norm(p=2, dim=0, keepdim=True))
        self.lora_A = nn.Parameter(torch.randn(d_out, rank) / math.sqrt(rank))
        self.lora_B = nn.Parameter(torch.zeros(rank, d_in))

    def forward(self, x):
        adapted = self.weight + torch.matmul(self.lora_A, self.lora_B)
        directions = adapted / adapted.norm(p=2, dim=0, keepdim=True)
        return F.linear(x, self.m * directions, self.bias)


class MergedLinear(nn.Linear):
    """One product of several parts; only the enabled parts have adapters, each of its own rank."""

    def __init__(self, in_features, part, ranks):
        super().__init__(in_features, part * len(ranks))
        self.ranks = ranks
        self.weight.requires_grad = False
        self.lora_A = nn.Parameter(torch.empty(sum(ranks), in_features))
        self.lora_B = nn.ParameterList([torch.zeros(part, r) for r in ranks if r > 0])
        enabled = torch.tensor([r > 0 for r in ranks])
        self.lora_ind = enabled.repeat_interleave(part)
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def zero_pad(self, x):
        result = x.new_zeros(*x.shape[:-1], self.out_features)
        result[..., self.lora_ind] = x
        return result

    def forward(self, x):
        pieces = F.linear(x, self.lora_A).split([r for r in self.ranks if r > 0], dim=-1)
        after = torch.cat([F.linear(a, b) for a, b in zip(pieces, self.lora_B, strict=True)], -1)
        return super().forward(x) + 2.0 * self.zero_pad(after)


@layer(
    "low rank adapters",
    "ranks per part of a fused projection padded with zeros",
    "Lightning-AI/litgpt, litgpt/lora.py",
)
class MergedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = MergedLinear(C, C, ranks=[4, 0, 2])
        self.c_proj = nn.Linear(C, C)

    def forward(self, x):
        b, s, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (t.view(b, s, H, c // H).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, s, c))


class Injected(nn.Module):
    def __init__(self, linear, r):
        super().__init__()
        self.linear = linear
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.lora_down = nn.Linear(linear.in_features, r, bias=False)
        self.lora_up = nn.Linear(r, linear.out_features, bias=False)
        nn.init.normal_(self.lora_down.weight, std=1 / r)
        nn.init.zeros_(self.lora_up.weight)

    def forward(self, x):
        return self.linear(x) + self.lora_up(self.lora_down(x))


def inject(module, r):
    """Freezes what is there and wraps each linear, or what wraps it already."""
    for child in module.children():
        child.requires_grad_(False)
    for name, child in module.named_children():
        if isinstance(child, (nn.Linear, Injected)):
            module._modules[name] = Injected(child, r)
        else:
            inject(child, r)


@model(
    "low rank adapters",
    "wrapper around a wrapper by a recursive walk",
    "cloneofsimo/lora, lora_diffusion/lora.py",
)
class InjectedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, C)
        self.body = Body()
        self.head = nn.Linear(C, V)
        inject(self.body, r=2)
        inject(self.body, r=4)

    def forward(self, tokens, labels):
        logits = self.head(self.body(self.embed(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def blocks():
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(
            C, H, 2 * C, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        ),
        num_layers=LAYERS,
        enable_nested_tensor=False,
    )


class SoftEmbedding(nn.Module):
    def __init__(self, wte, n_tokens=4, random_range=0.5):
        super().__init__()
        self.wte = wte
        self.n_tokens = n_tokens
        start = torch.FloatTensor(n_tokens, wte.weight.size(1))
        self.learned_embedding = nn.Parameter(start.uniform_(-random_range, random_range))

    def forward(self, tokens):
        words = self.wte(tokens)
        return torch.cat([self.learned_embedding.repeat(words.size(0), 1, 1), words], 1)


@model(
    "prompts and prefixes",
    "soft prompt repeated and concatenated before the words",
    "kipgparker/soft-prompt-tuning, soft_embedding.py",
)
class SoftPrompt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(V, C)
        self.encoder = blocks()
        self.lm_head = nn.Linear(C, V, bias=False)
        for p in self.parameters():
            p.requires_grad = False
        self.wte = SoftEmbedding(self.wte)

    def forward(self, tokens, labels):
        h = self.encoder(self.wte(tokens))
        logits = self.lm_head(h)
        nothing = torch.full((tokens.size(0), self.wte.n_tokens), -100, device=labels.device)
        labels = torch.cat([nothing, labels], dim=1)
        return F.cross_entropy(logits.view(-1, V), labels.view(-1))


class PrefixEncoder(nn.Module):
    def __init__(self, length=4, hidden=16):
        super().__init__()
        self.embedding = nn.Embedding(length, hidden)
        self.trans = nn.Sequential(
            nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, LAYERS * 2 * C)
        )

    def forward(self, prefix):
        return self.trans(self.embedding(prefix))


@model(
    "prompts and prefixes",
    "prefix keys and values of all layers from one small network",
    "THUDM/P-tuning-v2, model/prefix_encoder.py and model/sequence_classification.py",
)
class PrefixTuned(nn.Module):
    def __init__(self, pre_seq_len=4):
        super().__init__()
        self.embed = nn.Embedding(V, C)
        self.attentions = nn.ModuleList([SelfAttention() for _ in range(LAYERS)])
        self.norms = nn.ModuleList([nn.LayerNorm(C) for _ in range(LAYERS)])
        self.head = nn.Linear(C, V)
        for param in [*self.embed.parameters(), *self.attentions.parameters()]:
            param.requires_grad = False
        self.pre_seq_len = pre_seq_len
        self.prefix_tokens = torch.arange(pre_seq_len).long()
        self.prefix_encoder = PrefixEncoder(pre_seq_len)

    def get_prompt(self, batch_size, device):
        prefix_tokens = self.prefix_tokens.unsqueeze(0).expand(batch_size, -1).to(device)
        past = self.prefix_encoder(prefix_tokens)
        past = past.view(batch_size, self.pre_seq_len, LAYERS * 2, H, C // H)
        return past.permute([2, 0, 3, 1, 4]).split(2)

    def forward(self, tokens, labels):
        past_key_values = self.get_prompt(tokens.shape[0], tokens.device)
        x = self.embed(tokens)
        for i, attention in enumerate(self.attentions):
            x = x + attention(self.norms[i](x), past=past_key_values[i])
        return F.cross_entropy(self.head(x).transpose(1, 2), labels)


class BottleneckAdapter(nn.Module):
    def __init__(self, width=C, size=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.down = nn.Linear(width, size)
        self.up = nn.Linear(size, width)
        with torch.no_grad():
            self.up.weight.mul_(1e-2)
            self.up.bias.zero_()

    def forward(self, x, residual):
        return residual + self.up(F.relu(self.down(self.norm(x))))


@layer(
    "prompts and prefixes",
    "bottleneck adapter behind a frozen sublayer",
    "jxhe/unify-parameter-efficient-tuning, petl/petl_factory.py",
)
class AdaptedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = SelfAttention().requires_grad_(False)
        self.adapter = BottleneckAdapter()

    def forward(self, x):
        out = self.attention(x)
        return self.adapter(out, residual=out)


@model(
    "prompts and prefixes",
    "only the biases train by their names",
    "benzakenelad/BitFit, GLUEvaluator.py",
)
class OnlyBiases(nn.Module):
    components = ("bias", "position")

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, C)
        self.position = nn.Parameter(torch.zeros(1, S, C))
        self.encoder = blocks()
        self.classifier = nn.Linear(C, V)
        for param in self.parameters():
            param.requires_grad = False
        for name, param in self.named_parameters():
            for component in self.components:
                if component in name:
                    param.requires_grad = True
                    break

    def forward(self, tokens, labels):
        outputs = self.encoder(self.embed(tokens) + self.position)
        logits = self.classifier(outputs)
        loss_fct = nn.CrossEntropyLoss()
        return loss_fct(logits.view(-1, V), labels.view(-1)), logits


@layer(
    "prompts and prefixes",
    "learned scales of keys and values and inner activations",
    "r-three/t-few, src/models/lora.py",
)
class ScaledAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C)
        self.wi, self.wo = nn.Linear(C, 2 * C), nn.Linear(2 * C, C)
        for module in (self.qkv, self.wi, self.wo):
            for param in module.parameters():
                param.requires_grad_(False)
        self.l_k = nn.Parameter(torch.ones(C))
        self.l_v = nn.Parameter(torch.ones(C))
        self.l_ff = nn.Parameter(torch.ones(2 * C))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        k = k * self.l_k.flatten()
        v = v * self.l_v.flatten()
        weights = torch.softmax(q @ k.mT / C**0.5, dim=-1)
        hidden = torch.relu(self.wi(weights @ v)) * self.l_ff.flatten()
        return self.wo(hidden)
