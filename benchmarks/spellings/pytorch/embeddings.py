"""How words become vectors, and layers that mix them in other domains than products do."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.spellings.pytorch.frame import B, Body, C, H, S, V, layer, model, padded, tokens

CLASSES = 5


def documents(step=0):
    """``tokens`` [b, s] and ``labels`` [b], one of five."""
    generator = torch.Generator().manual_seed(step + 13)
    labels = torch.randint(0, CLASSES, (B,), generator=generator)
    return {"tokens": tokens(step)["tokens"], "labels": labels}


@model(
    "lookups",
    "embedding bag with offsets of flattened words",
    "pytorch/tutorials, beginner_source/text_sentiment_ngrams_tutorial.py",
    batch=documents,
)
class BagOfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(V, C, sparse=False)
        self.body, self.fc = Body(), nn.Linear(C, CLASSES)
        self.init_weights()

    def init_weights(self):
        initrange = 0.5
        self.embedding.weight.data.uniform_(-initrange, initrange)
        self.fc.weight.data.uniform_(-initrange, initrange)
        self.fc.bias.data.zero_()

    def forward(self, tokens, labels):
        text = tokens.view(-1)
        lengths = torch.tensor([0, *[len(row) for row in tokens][:-1]], device=tokens.device)
        embedded = self.embedding(text, lengths.cumsum(dim=0))
        return F.cross_entropy(self.fc(self.body(embedded)), labels)


@model(
    "lookups",
    "one-hot of the transposed words times a weight",
    "d2l.ai, recurrent neural network implementation from scratch",
)
class OneHot(nn.Module):
    def __init__(self):
        super().__init__()
        self.vocab_size = V
        self.W_xh = nn.Parameter(torch.randn(V, C) * 0.1)
        self.b_h = nn.Parameter(torch.zeros(C))
        self.W_hq, self.b_q = nn.Parameter(torch.randn(C, V) * 0.1), nn.Parameter(torch.zeros(V))
        self.hidden = Body()

    def forward(self, tokens, labels):
        x = F.one_hot(tokens.T, self.vocab_size).type(torch.float32)
        outputs = []
        for step in self.hidden(torch.matmul(x, self.W_xh) + self.b_h):
            outputs.append(torch.mm(step, self.W_hq) + self.b_q)
        return F.cross_entropy(torch.cat(outputs, dim=0), labels.T.reshape(-1).long())


@model(
    "lookups",
    "index of a parameter and view of the joined window",
    "karpathy/nn-zero-to-hero, lectures/makemore, part 2, mlp",
)
class IndexedParameter(nn.Module):
    def __init__(self, block_size=3):
        super().__init__()
        self.block_size = block_size
        self.C = nn.Parameter(torch.randn((V, C // 2)))
        self.W1 = nn.Parameter(torch.randn((block_size * (C // 2), C)) * 0.1)
        self.b1 = nn.Parameter(torch.zeros(C))
        self.body, self.out = Body(), nn.Linear(C, V)

    def forward(self, tokens, labels):
        before = F.pad(tokens, (self.block_size - 1, 0))
        windows = torch.stack([before[:, i : i + S] for i in range(self.block_size)], dim=-1)
        emb = self.C[windows.view(-1, self.block_size)]
        h = torch.tanh(emb.view(emb.shape[0], -1) @ self.W1 + self.b1)
        logits = self.out(self.body(h))
        counts = (logits - logits.max(1, keepdim=True).values.detach()).exp()
        prob = counts / counts.sum(1, keepdim=True)
        return -prob[torch.arange(labels.nelement()), labels.view(-1)].log().mean()


PRIMES = [31, 43, 59, 61]


@model(
    "lookups",
    "several tables of hashed buckets by formatted names",
    "huggingface/transformers, models/canine/modeling_canine.py",
)
class HashedBuckets(nn.Module):
    def __init__(self, num_hash_functions=4, num_hash_buckets=16):
        super().__init__()
        self.num_hash_functions, self.num_hash_buckets = num_hash_functions, num_hash_buckets
        for i in range(num_hash_functions):
            table = nn.Embedding(num_hash_buckets, C // num_hash_functions)
            setattr(self, f"HashBucketCodepointEmbedder_{i}", table)
        self.encoder, self.head = Body(), nn.Linear(C, V)

    def _hash_bucket_tensors(self, input_ids, num_hashes, num_buckets):
        if num_hashes > len(PRIMES):
            raise ValueError(f"`num_hashes` must be <= {len(PRIMES)}")
        return [((input_ids + 1) * prime) % num_buckets for prime in PRIMES[:num_hashes]]

    def forward(self, tokens, labels):
        hashed = self._hash_bucket_tensors(tokens, self.num_hash_functions, self.num_hash_buckets)
        shards = []
        for i, hash_bucket_ids in enumerate(hashed):
            shards.append(getattr(self, f"HashBucketCodepointEmbedder_{i}")(hash_bucket_ids))
        x = self.encoder(torch.cat(shards, dim=-1))
        return F.cross_entropy(self.head(x).transpose(1, 2), labels)


def marked(step=0):
    """``tokens`` [b, s], zero where there is no word, ``mask`` [b, s] and ``labels`` [b]."""
    batch = padded(step)
    return {
        "tokens": batch["tokens"].masked_fill(batch["mask"] == 0, 0),
        "mask": batch["mask"],
        "labels": documents(step)["labels"],
    }


@model(
    "lookups",
    "padding row and the mean over the valid words",
    "UKPLab/sentence-transformers, sentence_transformers/models/Pooling.py",
    batch=marked,
)
class MeanPooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embedding = nn.Embedding(V, C, padding_idx=0)
        self.transformer = Body()
        self.classifier = nn.Linear(2 * C, CLASSES)

    def forward(self, tokens, mask, labels):
        token_embeddings = self.transformer(self.word_embedding(tokens))
        expanded = mask.unsqueeze(-1).expand(token_embeddings.size()).to(token_embeddings.dtype)
        sum_embeddings = torch.sum(token_embeddings * expanded, 1)
        sum_mask = torch.clamp(expanded.sum(1), min=1e-9)
        token_embeddings[expanded == 0] = -1e9
        max_over_time = torch.max(token_embeddings, 1)[0]
        sentence = torch.cat([sum_embeddings / sum_mask, max_over_time], 1)
        return F.cross_entropy(self.classifier(sentence), labels)


@layer(
    "other domains",
    "two fourier transforms and the real part",
    "rishikksh20/FNet-pytorch, fnet.py",
)
class FNetBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(C)

    def forward(self, x):
        return torch.fft.fft(torch.fft.fft(self.norm(x), dim=-1), dim=-2).real / C


@layer(
    "other domains",
    "complex parameters on the lowest frequencies",
    "zongyi-li/fourier_neural_operator, fourier_1d.py, SpectralConv1d",
)
class SpectralConv1d(nn.Module):
    def __init__(self, in_channels=C, out_channels=C, modes1=5):
        super().__init__()
        self.in_channels, self.out_channels, self.modes1 = in_channels, out_channels, modes1
        self.scale = 1 / (in_channels * out_channels)
        self.weights1 = nn.Parameter(
            self.scale * torch.rand(in_channels, out_channels, self.modes1, dtype=torch.cfloat)
        )
        self.w = nn.Conv1d(in_channels, out_channels, 1)

    def compl_mul1d(self, x, weights):
        return torch.einsum("bix,iox->box", x, weights)

    def forward(self, x):
        x = x.permute(0, 2, 1)
        batchsize = x.shape[0]
        x_ft = torch.fft.rfft(x)
        out_ft = torch.zeros(
            batchsize, self.out_channels, x.size(-1) // 2 + 1, device=x.device, dtype=torch.cfloat
        )
        out_ft[:, :, : self.modes1] = self.compl_mul1d(x_ft[:, :, : self.modes1], self.weights1)
        x1 = torch.fft.irfft(out_ft, n=x.size(-1))
        return F.gelu(x1 + self.w(x)).permute(0, 2, 1)


class CausalConv1d(nn.Module):
    def __init__(self, chan_in, chan_out, kernel_size, **kwargs):
        super().__init__()
        dilation = kwargs.get("dilation", 1)
        self.causal_padding = dilation * (kernel_size - 1)
        self.conv = nn.Conv1d(chan_in, chan_out, kernel_size, **kwargs)

    def forward(self, x):
        return self.conv(F.pad(x, (self.causal_padding, 0), mode="constant"))


@layer(
    "other domains",
    "dilated convolutions padded on the left",
    "lucidrains/audiolm-pytorch, audiolm_pytorch/soundstream.py",
)
class CausalConvs(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            *[
                nn.Sequential(CausalConv1d(C, C, 3, dilation=d), nn.ELU(), CausalConv1d(C, C, 1))
                for d in (1, 3)
            ]
        )

    def forward(self, x):
        return self.net(x.transpose(1, 2)).transpose(1, 2)


@layer(
    "other domains",
    "depthwise convolution between two gates cut to the length",
    "huggingface/transformers, models/lfm2/modeling_lfm2.py",
)
class ShortConv(nn.Module):
    def __init__(self, kernel=3):
        super().__init__()
        self.conv = nn.Conv1d(C, C, kernel_size=kernel, groups=C, padding=kernel - 1, bias=False)
        self.in_proj = nn.Linear(C, 3 * C, bias=False)
        self.out_proj = nn.Linear(C, C, bias=False)

    def forward(self, x):
        seqlen = x.shape[1]
        bcx = self.in_proj(x).transpose(-1, -2)
        b, c, x = bcx.chunk(3, dim=-2)
        conv_out = self.conv(b * x)[..., :seqlen]
        return self.out_proj((c * conv_out).transpose(-1, -2).contiguous())


@layer(
    "other domains",
    "gather along time at the largest autocorrelations",
    "thuml/Autoformer, layers/AutoCorrelation.py",
)
class AutoCorrelation(nn.Module):
    def __init__(self, top_k=3):
        super().__init__()
        self.top_k = top_k
        self.query, self.key, self.value, self.out = (nn.Linear(C, C) for _ in range(4))

    def time_delay_agg(self, values, corr):
        batch, head, channel, length = values.shape
        init_index = torch.arange(length, device=values.device).view(1, 1, 1, -1)
        init_index = init_index.repeat(batch, head, channel, 1)
        mean_value = torch.mean(torch.mean(corr, dim=1), dim=1)
        weights, delay = torch.topk(mean_value, self.top_k, dim=-1)
        tmp_corr = torch.softmax(weights, dim=-1)
        tmp_values = values.repeat(1, 1, 1, 2)
        delays_agg = torch.zeros_like(values).float()
        for i in range(self.top_k):
            shift = delay[:, i].view(-1, 1, 1, 1).repeat(1, head, channel, length)
            pattern = torch.gather(tmp_values, dim=-1, index=init_index + shift)
            delays_agg = delays_agg + pattern * tmp_corr[:, i].view(-1, 1, 1, 1)
        return delays_agg

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (
            p(x).view(b, s, H, -1).permute(0, 2, 3, 1).contiguous()
            for p in (self.query, self.key, self.value)
        )
        res = torch.fft.rfft(q, dim=-1) * torch.conj(torch.fft.rfft(k, dim=-1))
        corr = torch.fft.irfft(res, n=s, dim=-1)
        out = self.time_delay_agg(v, corr).permute(0, 3, 1, 2)
        return self.out(out.reshape(b, s, -1))
