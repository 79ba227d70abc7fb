"""Noise that training adds, and masks that are drawn at random or come with the batch."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.spellings.pytorch.frame import (
    B,
    Body,
    C,
    S,
    V,
    images,
    layer,
    model,
    numbers,
)


@model(
    "noise",
    "reparametrisation by randn_like",
    "pytorch/examples, vae/main.py",
    batch=lambda step=0: {"x": torch.sigmoid(numbers(step)["x"])},
)
class VAE(nn.Module):
    def __init__(self, latent=8):
        super().__init__()
        self.fc1 = Body()
        self.fc21, self.fc22 = nn.Linear(C, latent), nn.Linear(C, latent)
        self.fc3, self.fc4 = nn.Linear(latent, C), nn.Linear(C, C)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x)
        recon_x = self.decode(self.reparameterize(mu, logvar))
        bce = F.binary_cross_entropy(recon_x, x, reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return (bce + kld) / x.size(0)


def neftune_hook(module, inputs, output):
    if module.training:
        dims = torch.tensor(output.size(1) * output.size(2))
        mag_norm = module.neftune_noise_alpha / torch.sqrt(dims)
        output = output + torch.zeros_like(output).uniform_(-mag_norm, mag_norm)
    return output


@model(
    "noise",
    "uniform noise on embeddings by a forward hook",
    "huggingface/transformers, integrations/neftune.py",
)
class Neftune(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, C)
        self.embed.neftune_noise_alpha = 5.0
        self.handle = self.embed.register_forward_hook(neftune_hook)
        self.body, self.head = Body(), nn.Linear(C, V)

    def forward(self, tokens, labels):
        logits = self.head(self.body(self.embed(tokens)))
        return F.cross_entropy(logits.view(-1, V), labels.view(-1))


def extract(a, t, x_shape):
    b, *_ = t.shape
    out = a.gather(-1, t)
    return out.reshape(b, *((1,) * (len(x_shape) - 1)))


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        half_dim = self.dim // 2
        emb = math.log(10000) / (half_dim - 1)
        emb = torch.exp(torch.arange(half_dim, device=x.device) * -emb)
        emb = x[:, None] * emb[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)


@model(
    "noise",
    "diffusion with a random step per sample",
    "lucidrains/denoising-diffusion-pytorch, denoising_diffusion_pytorch.py",
    batch=lambda step=0: {"images": images(step)["images"]},
)
class Diffusion(nn.Module):
    def __init__(self, timesteps=50):
        super().__init__()
        self.num_timesteps = timesteps
        alphas_cumprod = torch.cumprod(1.0 - torch.linspace(1e-3, 0.1, timesteps), dim=0)
        self.register_buffer("sqrt_alphas_cumprod", alphas_cumprod.sqrt())
        self.register_buffer("sqrt_one_minus_alphas_cumprod", (1 - alphas_cumprod).sqrt())
        self.time_mlp = nn.Sequential(SinusoidalPosEmb(C), nn.Linear(C, C), nn.GELU())
        self.init_conv = nn.Conv2d(3, C, 3, padding=1)
        self.body = Body()
        self.final_conv = nn.Conv2d(C, 3, 1)

    def q_sample(self, x_start, t, noise):
        return (
            extract(self.sqrt_alphas_cumprod, t, x_start.shape) * x_start
            + extract(self.sqrt_one_minus_alphas_cumprod, t, x_start.shape) * noise
        )

    def forward(self, images):
        b, _, h, w = images.shape
        t = torch.randint(0, self.num_timesteps, (b,), device=images.device).long()
        noise = torch.randn_like(images)
        x = self.init_conv(self.q_sample(images, t, noise))
        x = x + self.time_mlp(t)[:, :, None, None]
        x = self.body(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, (h, w))
        loss = F.mse_loss(self.final_conv(x), noise, reduction="none")
        return loss.flatten(1).mean(dim=1).mean()


def embedded_dropout(embed, words, dropout=0.1):
    if dropout:
        mask = embed.weight.data.new().resize_((embed.weight.size(0), 1)).bernoulli_(1 - dropout)
        mask = mask.expand_as(embed.weight) / (1 - dropout)
        masked_embed_weight = mask * embed.weight
    else:
        masked_embed_weight = embed.weight
    padding_idx = embed.padding_idx
    if padding_idx is None:
        padding_idx = -1
    return F.embedding(words, masked_embed_weight, padding_idx, embed.max_norm, embed.norm_type)


@model(
    "noise",
    "rows of the embedding dropped for the whole batch",
    "salesforce/awd-lstm-lm, embed_regularize.py",
)
class WordDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(V, C), nn.Linear(C, V)
        self.body = Body()

    def forward(self, tokens, labels):
        emb = embedded_dropout(self.encoder, tokens, dropout=0.2 if self.training else 0)
        mask = emb.new_empty(emb.size(0), 1, emb.size(2)).bernoulli_(0.9).div_(0.9)
        output = self.body(emb * mask)
        return F.cross_entropy(self.decoder(output.reshape(-1, C)), labels.reshape(-1))


@layer(
    "noise",
    "multiplication by gaussians around one",
    "j-min/Dropouts, Gaussian_Variational_Dropout.ipynb",
)
class GaussianDropout(nn.Module):
    def __init__(self, p=0.2):
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.alpha = torch.Tensor([p / (1 - p)])

    def forward(self, x):
        x = F.relu(self.linear(x))
        if self.training:
            epsilon = torch.randn(x.size()) * self.alpha.sqrt() + 1
            epsilon = epsilon.to(x.device)
            return x * epsilon
        return x


@model(
    "random masks",
    "kept patches by argsort of noise and restored by gather",
    "facebookresearch/mae, models_mae.py",
    batch=images,
)
class MaskedAutoencoder(nn.Module):
    def __init__(self, patch=4, mask_ratio=0.5):
        super().__init__()
        self.p, self.mask_ratio = patch, mask_ratio
        self.patch_embed = nn.Conv2d(3, C, patch, stride=patch)
        self.pos_embed = nn.Parameter(torch.randn(1, 16, C) * 0.02)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, C))
        self.blocks = Body()
        block = nn.TransformerEncoderLayer(C, 4, 2 * C, dropout=0.0, batch_first=True)
        self.decoder_blocks = nn.TransformerEncoder(block, 2)
        self.decoder_pred = nn.Linear(C, patch**2 * 3)

    def patchify(self, imgs):
        p, h = self.p, imgs.shape[2] // self.p
        x = imgs.reshape(imgs.shape[0], 3, h, p, h, p)
        x = torch.einsum("nchpwq->nhwpqc", x)
        return x.reshape(imgs.shape[0], h * h, p**2 * 3)

    def random_masking(self, x):
        n, length, d = x.shape
        len_keep = int(length * (1 - self.mask_ratio))
        noise = torch.rand(n, length, device=x.device)
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        ids_keep = ids_shuffle[:, :len_keep]
        x_masked = torch.gather(x, dim=1, index=ids_keep.unsqueeze(-1).repeat(1, 1, d))
        mask = torch.ones([n, length], device=x.device)
        mask[:, :len_keep] = 0
        return x_masked, torch.gather(mask, dim=1, index=ids_restore), ids_restore

    def forward(self, images, labels):
        x = self.patch_embed(images).flatten(2).transpose(1, 2) + self.pos_embed
        x, mask, ids_restore = self.random_masking(x)
        x = self.blocks(x)
        mask_tokens = self.mask_token.repeat(x.shape[0], ids_restore.shape[1] - x.shape[1], 1)
        x_ = torch.cat([x, mask_tokens], dim=1)
        x_ = torch.gather(x_, 1, index=ids_restore.unsqueeze(-1).repeat(1, 1, x.shape[2]))
        pred = self.decoder_pred(self.decoder_blocks(x_ + self.pos_embed))
        target = self.patchify(images)
        mean, var = target.mean(dim=-1, keepdim=True), target.var(dim=-1, keepdim=True)
        target = (target - mean) / (var + 1.0e-6) ** 0.5
        loss = ((pred - target) ** 2).mean(dim=-1)
        return (loss * mask).sum() / mask.sum(), pred, mask


@model(
    "random masks",
    "words replaced by draws of bernoulli",
    "huggingface/transformers, data/data_collator.py, torch_mask_tokens",
)
class MaskedWords(nn.Module):
    def __init__(self, mask_token_id=V - 1, mlm_probability=0.15):
        super().__init__()
        self.mask_token_id, self.mlm_probability = mask_token_id, mlm_probability
        self.embed, self.position = nn.Embedding(V, C), nn.Embedding(S, C)
        self.encoder, self.cls = Body(), nn.Linear(C, V)

    def mask_tokens(self, inputs):
        inputs, labels = inputs.clone(), inputs.clone()
        probability_matrix = torch.full(labels.shape, self.mlm_probability, device=labels.device)
        probability_matrix.masked_fill_(labels == 0, value=0.0)
        masked_indices = torch.bernoulli(probability_matrix).bool()
        labels[~masked_indices] = -100
        replaced = torch.full(labels.shape, 0.8, device=labels.device)
        indices_replaced = torch.bernoulli(replaced).bool() & masked_indices
        inputs[indices_replaced] = self.mask_token_id
        halves = torch.full(labels.shape, 0.5, device=labels.device)
        indices_random = torch.bernoulli(halves).bool() & masked_indices & ~indices_replaced
        random_words = torch.randint(V, labels.shape, dtype=torch.long, device=labels.device)
        inputs[indices_random] = random_words[indices_random]
        return inputs, labels

    def forward(self, tokens, labels):
        tokens, labels = self.mask_tokens(tokens)
        x = self.embed(tokens) + self.position.weight[: tokens.size(1)]
        return F.cross_entropy(self.cls(self.encoder(x)).view(-1, V), labels.view(-1))


def spans(step=0):
    """`numbers` and ``mask_time_indices`` [b, s], true in two spans of each sample."""
    generator = torch.Generator().manual_seed(step + 5)
    starts = torch.randint(0, S - 3, (B, 2, 1), generator=generator)
    places = torch.arange(S)
    inside = (places >= starts) & (places < starts + 3)
    return {**numbers(step), "mask_time_indices": inside.any(1)}


@model(
    "random masks",
    "spans from the batch overwritten with a learned vector",
    "huggingface/transformers, models/wav2vec2/modeling_wav2vec2.py, _mask_hidden_states",
    batch=spans,
)
class MaskedSpans(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature_projection, self.project_hid = nn.Linear(C, C), nn.Linear(C, C)
        self.masked_spec_embed = nn.Parameter(torch.Tensor(C).uniform_())
        self.pos_conv_embed = nn.Conv1d(C, C, kernel_size=5, padding=2, groups=4)
        self.encoder = Body()

    def forward(self, x, y, mask_time_indices):
        hidden_states = self.feature_projection(x)
        hidden_states[mask_time_indices] = self.masked_spec_embed.to(hidden_states.dtype)
        position = self.pos_conv_embed(hidden_states.transpose(1, 2)).transpose(1, 2)
        predicted = self.project_hid(self.encoder(hidden_states + F.gelu(position)))
        similarity = torch.cosine_similarity(predicted.float(), y.float(), dim=-1)
        return (1 - similarity)[mask_time_indices].mean()


def mixed(step=0):
    """`images`, the ``index`` [b] of each sample's other and its own share ``lam`` [b]."""
    generator = torch.Generator().manual_seed(step + 9)
    return {
        **images(step),
        "index": torch.randperm(B, generator=generator),
        "lam": torch.rand(B, generator=generator),
    }


@model(
    "random masks",
    "mixup with the permutation from the batch",
    "facebookresearch/mixup-cifar10, train.py",
    batch=mixed,
)
class Mixup(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body, self.linear = nn.Conv2d(3, C, 4, 4), Body(), nn.Linear(C, 10)
        self.criterion = nn.CrossEntropyLoss(reduction="none")

    def forward(self, images, labels, index, lam):
        share = lam.view(-1, 1, 1, 1)
        mixed_x = share * images + (1 - share) * images[index, :]
        y_a, y_b = labels, labels[index]
        pred = self.linear(self.body(self.stem(mixed_x).flatten(2).mT).mean(dim=1))
        return (lam * self.criterion(pred, y_a) + (1 - lam) * self.criterion(pred, y_b)).mean()


def rand_cutout(x, ratio=0.5):
    cutout_size = int(x.size(2) * ratio + 0.5), int(x.size(3) * ratio + 0.5)
    offset_x = torch.randint(
        0, x.size(2) + (1 - cutout_size[0] % 2), size=[x.size(0), 1, 1], device=x.device
    )
    offset_y = torch.randint(
        0, x.size(3) + (1 - cutout_size[1] % 2), size=[x.size(0), 1, 1], device=x.device
    )
    grid_batch, grid_x, grid_y = torch.meshgrid(
        torch.arange(x.size(0), dtype=torch.long, device=x.device),
        torch.arange(cutout_size[0], dtype=torch.long, device=x.device),
        torch.arange(cutout_size[1], dtype=torch.long, device=x.device),
        indexing="ij",
    )
    grid_x = torch.clamp(grid_x + offset_x - cutout_size[0] // 2, min=0, max=x.size(2) - 1)
    grid_y = torch.clamp(grid_y + offset_y - cutout_size[1] // 2, min=0, max=x.size(3) - 1)
    mask = torch.ones(x.size(0), x.size(2), x.size(3), dtype=x.dtype, device=x.device)
    mask[grid_batch, grid_x, grid_y] = 0
    return x * mask.unsqueeze(1)


@model(
    "random masks",
    "cutout by index of a mesh of samples and places",
    "mit-han-lab/data-efficient-gans, DiffAugment_pytorch.py",
    batch=images,
)
class Cutout(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.body, self.fc = nn.Conv2d(3, C, 3, 2, 1), Body(), nn.Linear(C, 10)

    def forward(self, images, labels):
        x = rand_cutout(images) if self.training else images
        x = F.relu(self.conv(x)).permute(0, 2, 3, 1)
        return F.cross_entropy(self.fc(self.body(x).amax(dim=(1, 2))), labels)
