"""Weights and blocks that are used more than once, and the containers that hold them."""

import copy
import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from benchmarks.spellings.pytorch.frame import LAYERS, B, Body, C, H, S, V, layer, model


@model("tied embeddings", "assignment of the head's weight", "karpathy/nanoGPT, model.py")
class AssignedWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(V, C),
                wpe=nn.Embedding(S, C),
                h=Body(),
                ln_f=nn.LayerNorm(C),
            )
        )
        self.lm_head = nn.Linear(C, V, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, tokens, labels=None):
        pos = torch.arange(0, tokens.size(1), dtype=torch.long, device=tokens.device)
        x = self.transformer.wte(tokens) + self.transformer.wpe(pos)
        logits = self.lm_head(self.transformer.ln_f(self.transformer.h(x)))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
        return logits, loss


@model(
    "tied embeddings",
    "functional linear with the embedding's weight",
    "facebookresearch/fairseq, fairseq/models/lstm.py",
)
class FunctionalHead(nn.Module):
    def __init__(self, share_input_output_embed=True):
        super().__init__()
        self.share_input_output_embed = share_input_output_embed
        self.embed_tokens = nn.Embedding(V, C, padding_idx=0)
        nn.init.uniform_(self.embed_tokens.weight, -0.1, 0.1)
        nn.init.constant_(self.embed_tokens.weight[self.embed_tokens.padding_idx], 0)
        self.layers = Body()
        if not self.share_input_output_embed:
            self.fc_out = nn.Linear(C, V)

    def output_layer(self, x):
        if self.share_input_output_embed:
            return F.linear(x, self.embed_tokens.weight)
        return self.fc_out(x)

    def forward(self, tokens, labels):
        x = self.output_layer(self.layers(self.embed_tokens(tokens)))
        lprobs = F.log_softmax(x, dim=-1, dtype=torch.float32)
        return F.nll_loss(lprobs.view(-1, V), labels.view(-1), reduction="mean")


class TiedLinear(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self._source = [embedding]
        self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings))

    @property
    def weight(self):
        return self._source[0].weight

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


@model(
    "tied embeddings",
    "property that reads the embedding's weight",
    "discuss.pytorch.org, tying weights of an encoder and a decoder without registering twice",
)
class PropertyHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, C)
        self.embedding.weight.data.uniform_(-0.1, 0.1)
        self.body = Body()
        self.decoder = TiedLinear(self.embedding)

    def forward(self, tokens, labels):
        logits = self.decoder(self.body(self.embedding(tokens)))
        return F.cross_entropy(logits.permute(0, 2, 1), labels)


@model(
    "tied embeddings",
    "functional_call on tied weights with normalised rows",
    "docs.pytorch.org, torch.func.functional_call, tie_weights",
)
class CalledWithWeights(nn.Module):
    def __init__(self):
        super().__init__()
        embed, head = nn.Embedding(V, C), nn.Linear(C, V, bias=False)
        head.weight = embed.weight
        self.net = nn.Sequential(OrderedDict(embed=embed, body=Body(), head=head))
        self.temperature = nn.Parameter(torch.tensor(4.0))

    def forward(self, tokens, labels):
        weights = {"embed.weight": F.normalize(self.net.embed.weight, dim=-1)}
        logits = functional_call(self.net, weights, (tokens,), tie_weights=True)
        return F.cross_entropy((self.temperature * logits).flatten(0, -2), labels.flatten())


@model(
    "tied embeddings",
    "product with the transposed weight and a shared scale",
    "openai/whisper, whisper/model.py, with the scale of huggingface/transformers, modeling_t5.py",
)
class TransposedProduct(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(V, C)
        self.positional_embedding = nn.Parameter(torch.empty(S, C))
        nn.init.normal_(self.positional_embedding, std=0.01)
        self.blocks = Body()
        self.ln = nn.LayerNorm(C)
        self.model_dim = C

    def forward(self, tokens, labels):
        x = self.token_embedding(tokens) + self.positional_embedding[: tokens.shape[-1]]
        x = self.ln(self.blocks(x)) * (self.model_dim**-0.5)
        logits = (x @ torch.transpose(self.token_embedding.weight.to(x.dtype), 0, 1)).float()
        return F.cross_entropy(logits.reshape(-1, V), labels.reshape(-1))


class Attention(nn.Module):
    def __init__(self, causal=True):
        super().__init__()
        self.causal = causal
        self.to_q = nn.Linear(C, C, bias=False)
        self.to_kv = nn.Linear(C, 2 * C, bias=False)
        self.to_out = nn.Linear(C, C)

    def forward(self, x, context=None):
        b, s, _ = x.shape
        context = x if context is None else context
        q = self.to_q(x).view(b, s, H, -1).transpose(1, 2)
        k, v = self.to_kv(context).view(b, context.shape[1], 2, H, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.to_out(out.transpose(1, 2).reshape(b, s, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def timing_signal(length, channels):
    position = torch.arange(length).float()
    rates = torch.exp(torch.arange(channels // 2).float() * -(math.log(1e4) / (channels // 2 - 1)))
    scaled = position.unsqueeze(1) * rates.unsqueeze(0)
    return torch.cat([torch.sin(scaled), torch.cos(scaled)], dim=1).view(1, length, channels)


@model(
    "a block used again",
    "one block in a loop with a signal of the step",
    "andreamad8/Universal-Transformer-Pytorch, models/UTransformer.py",
)
class UniversalEncoder(nn.Module):
    def __init__(self, num_layers=LAYERS):
        super().__init__()
        self.num_layers = num_layers
        self.timing_signal = timing_signal(S, C)
        self.position_signal = timing_signal(num_layers, C)
        self.emb = nn.Embedding(V, C)
        self.enc = Block()
        self.after = Body()
        self.W = nn.Linear(C, V)

    def forward(self, tokens, labels):
        x = self.emb(tokens)
        for step in range(self.num_layers):
            x = x + self.timing_signal[:, : tokens.shape[1], :].type_as(x)
            signal = self.position_signal[:, step, :].unsqueeze(1).repeat(1, tokens.shape[1], 1)
            x = x + signal.type_as(x)
            x = self.enc(x)
        return F.cross_entropy(self.W(self.after(x)).view(-1, V), labels.view(-1))


@model(
    "a block used again",
    "module list of one block times n",
    "discuss.pytorch.org, weights shared by the same module several times in a ModuleList",
)
class ListOfOne(nn.Module):
    def __init__(self):
        super().__init__()
        attention = Attention()
        self.embed = nn.Embedding(V, C)
        self.attentions = nn.ModuleList([attention] * LAYERS)
        self.feeds = nn.ModuleList(
            [nn.Sequential(nn.Linear(C, C), nn.ReLU(), nn.Linear(C, C)) for _ in range(LAYERS)]
        )
        self.out = nn.Linear(C, V)

    def forward(self, tokens, labels):
        h = self.embed(tokens)
        for attention, feed in zip(self.attentions, self.feeds, strict=True):
            h = F.layer_norm(h + attention(h), (C,))
            h = F.layer_norm(h + feed(h), (C,))
        return F.cross_entropy(self.out(h).view(-1, V), labels.view(-1))


class LayerGroup(nn.Module):
    def __init__(self, inner_group_num):
        super().__init__()
        self.albert_layers = nn.ModuleList([Block() for _ in range(inner_group_num)])

    def forward(self, hidden_states):
        for albert_layer in self.albert_layers:
            hidden_states = albert_layer(hidden_states)
        return hidden_states


@model(
    "a block used again",
    "groups of layers by the index of the layer",
    "huggingface/transformers, models/albert/modeling_albert.py",
)
class GroupedLayers(nn.Module):
    def __init__(self, num_hidden_layers=8, num_hidden_groups=4, inner_group_num=1):
        super().__init__()
        self.num_hidden_layers, self.num_hidden_groups = num_hidden_layers, num_hidden_groups
        self.word_embeddings = nn.Embedding(V, C // 2)
        self.embedding_hidden_mapping_in = nn.Linear(C // 2, C)
        self.albert_layer_groups = nn.ModuleList(
            [LayerGroup(inner_group_num) for _ in range(num_hidden_groups)]
        )
        self.predictions = nn.Linear(C, V)

    def forward(self, tokens, labels):
        hidden_states = self.embedding_hidden_mapping_in(self.word_embeddings(tokens))
        for i in range(self.num_hidden_layers):
            group_idx = int(i / (self.num_hidden_layers / self.num_hidden_groups))
            hidden_states = self.albert_layer_groups[group_idx](hidden_states)
        prediction_scores = self.predictions(hidden_states)
        return nn.CrossEntropyLoss()(prediction_scores.view(-1, V), labels.view(-1))


@model(
    "a block used again",
    "sequential called four times with the input added again",
    "Leiay/looped_transformer, scripts/models.py",
)
class LoopedSequential(nn.Module):
    def __init__(self, n_loops=4):
        super().__init__()
        self.n_loops = n_loops
        self._read_in = nn.Embedding(V, C)
        self._backbone = nn.Sequential(Block(), Block(), Block(), Block(), nn.LayerNorm(C))
        self._read_out = nn.Linear(C, V)

    def forward(self, tokens, labels):
        embeds = self._read_in(tokens)
        output = torch.zeros_like(embeds)
        losses = 0
        for _ in range(self.n_loops):
            output = self._backbone(output + embeds)
            losses = losses + F.cross_entropy(self._read_out(output).mT, labels)
        return losses / self.n_loops


def pairs(step=0):
    """``source``, ``target`` and ``labels`` [b, s]."""
    generator = torch.Generator().manual_seed(step)
    source, target = (torch.randint(0, V, (B, S), generator=generator) for _ in range(2))
    return {"source": source, "target": target, "labels": target.roll(-1, 1)}


class CrossBlock(nn.Module):
    """The encoder's block and a look at the encoder's output between its halves."""

    def __init__(self, block):
        super().__init__()
        self.block = block
        self.ln_cross = nn.LayerNorm(C)
        self.cross = Attention(causal=False)

    def forward(self, x, memory):
        x = x + self.block.attn(self.block.ln_1(x))
        x = x + self.cross(self.ln_cross(x), memory)
        return x + self.block.mlp(self.block.ln_2(x))


@model(
    "a block used again",
    "encoder and decoder of the same layers",
    "huggingface/transformers, models/encoder_decoder, tie_encoder_decoder",
    batch=pairs,
)
class TiedEncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(V, C)
        self.encoder = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.decoder = nn.ModuleList([CrossBlock(block) for block in self.encoder])
        self.lm_head = nn.Linear(C, V, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, source, target, labels):
        memory = self.shared(source)
        for block in self.encoder:
            memory = block(memory)
        x = self.shared(target)
        for block in self.decoder:
            x = block(x, memory)
        return F.cross_entropy(self.lm_head(x * C**-0.5).flatten(0, 1), labels.flatten())


@layer(
    "containers",
    "module dict by joined names of edges",
    "pyg-team/pytorch_geometric 2.0, torch_geometric/nn/conv/hetero_conv.py",
)
class ByEdge(nn.Module):
    def __init__(self):
        super().__init__()
        edges = [("word", "before", "word"), ("word", "is", "word"), ("word", "behind", "word")]
        self.shifts = {"before": 1, "is": 0, "behind": -1}
        self.convs = nn.ModuleDict({"__".join(k): nn.Linear(C, C) for k in edges})

    def forward(self, x):
        out = {}
        for edge_type, conv in self.convs.items():
            _, rel, dst = edge_type.split("__")
            out.setdefault(dst, []).append(conv(torch.roll(x, self.shifts[rel], dims=1)))
        out = {key: torch.stack(values, dim=0).sum(0) for key, values in out.items()}
        return out["word"]


@layer(
    "containers",
    "parameter list and parameter dict read by index and name",
    "docs.pytorch.org, torch.nn.ParameterList and torch.nn.ParameterDict, examples",
)
class Parameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.params = nn.ParameterList([nn.Parameter(torch.randn(C, C) / C) for _ in range(4)])
        self.choices = nn.ParameterDict(
            {"left": nn.Parameter(torch.ones(C)), "right": nn.Parameter(torch.zeros(C))}
        )
        self.choices["over"] = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x):
        for i, p in enumerate(self.params):
            x = x @ self.params[i // 2] + x @ p
        if "over" in self.choices:
            x = x * self.choices["over"]
        return x * self.choices["left"] + self.choices["right"]


class DenseLayers(nn.ModuleDict):
    def __init__(self, num_layers, num_input_features, growth_rate):
        super().__init__()
        for i in range(num_layers):
            width = num_input_features + i * growth_rate
            self.add_module(
                f"denselayer{i + 1}",
                nn.Sequential(
                    OrderedDict(
                        [
                            ("norm1", nn.LayerNorm(width)),
                            ("relu1", nn.ReLU(inplace=True)),
                            ("conv1", nn.Linear(width, growth_rate, bias=False)),
                        ]
                    )
                ),
            )

    def forward(self, init_features):
        features = [init_features]
        for _name, dense in self.items():
            features.append(dense(torch.cat(features, -1)))
        return torch.cat(features, -1)


@layer(
    "containers",
    "ordered dict names in sequentials within a module dict",
    "pytorch/vision, torchvision/models/densenet.py",
)
class DenseFeatures(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(OrderedDict([("norm0", nn.LayerNorm(C))]))
        self.features.add_module("denseblock1", DenseLayers(3, C, growth_rate=8))
        self.features.add_module(
            "transition1",
            nn.Sequential(OrderedDict(norm=nn.LayerNorm(C + 24), conv=nn.Linear(C + 24, C))),
        )

    def forward(self, x):
        return self.features(x)


@model(
    "containers",
    "setattr and getattr by formatted names",
    "whai362/PVT, classification/pvt.py",
)
class NamedStages(nn.Module):
    def __init__(self, depths=(1, 1, 2, 1), num_stages=4):
        super().__init__()
        self.depths, self.num_stages = depths, num_stages
        for i in range(num_stages):
            setattr(self, f"patch_embed{i + 1}", nn.Embedding(V, C) if i == 0 else nn.Linear(C, C))
            setattr(self, f"pos_embed{i + 1}", nn.Parameter(torch.zeros(1, S, C)))
            setattr(self, f"block{i + 1}", nn.ModuleList([Block() for _ in range(depths[i])]))
        self.norm = nn.LayerNorm(C)
        self.head = nn.Linear(C, V)

    def forward_features(self, x):
        for i in range(self.num_stages):
            patch_embed = getattr(self, f"patch_embed{i + 1}")
            pos_embed = getattr(self, f"pos_embed{i + 1}")
            block = getattr(self, f"block{i + 1}")
            x = patch_embed(x) + pos_embed
            for blk in block:
                x = blk(x)
        return self.norm(x)

    def forward(self, tokens, labels):
        return F.cross_entropy(self.head(self.forward_features(tokens)).mT, labels)


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fn = fn

    def forward(self, x, **kwargs):
        return self.fn(self.norm(x), **kwargs)


@model(
    "containers",
    "list in list unpacked in the loop",
    "lucidrains/vit-pytorch, vit_pytorch/vit.py",
)
class ListInList(nn.Module):
    def __init__(self, depth=LAYERS):
        super().__init__()
        self.layers = nn.ModuleList([])
        feed = nn.Sequential(nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C))
        for _ in range(depth):
            inner = nn.ModuleList([PreNorm(C, copy.deepcopy(feed)), nn.Identity()])
            self.layers.append(nn.ModuleList([PreNorm(C, Attention()), inner]))
        self.to_logits = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, V))
        self.embed = nn.Embedding(V, C)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for attn, (ff, skip) in self.layers:
            x = attn(x) + x
            x = ff(x) + skip(x)
        return F.cross_entropy(self.to_logits(x).transpose(1, 2), labels)
