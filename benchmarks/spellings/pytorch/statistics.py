"""Statistics over the samples of a batch: moments, codebooks and comparisons of rows."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.spellings.pytorch.frame import Body, C, images, layer, model, numbers


def off_diagonal(x):
    n, m = x.shape
    assert n == m
    return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


@model(
    "statistics of the batch",
    "standard deviation and covariance over the samples by hand",
    "facebookresearch/vicreg, main_vicreg.py",
    batch=numbers,
)
class VicReg(nn.Module):
    def __init__(self, sim_coeff=25.0, std_coeff=25.0, cov_coeff=1.0):
        super().__init__()
        self.backbone = Body()
        self.projector = nn.Sequential(nn.Linear(C, 2 * C), nn.ReLU(True), nn.Linear(2 * C, C))
        self.num_features = C
        self.sim_coeff, self.std_coeff, self.cov_coeff = sim_coeff, std_coeff, cov_coeff

    def forward(self, x, y):
        batch_size = x.shape[0]
        x = self.projector(self.backbone(x).mean(1))
        y = self.projector(self.backbone(y).mean(1))
        repr_loss = F.mse_loss(x, y)
        x = x - x.mean(dim=0)
        y = y - y.mean(dim=0)
        std_x = torch.sqrt(x.var(dim=0) + 0.0001)
        std_y = torch.sqrt(y.var(dim=0) + 0.0001)
        std_loss = torch.mean(F.relu(1 - std_x)) / 2 + torch.mean(F.relu(1 - std_y)) / 2
        cov_x = (x.T @ x) / (batch_size - 1)
        cov_y = (y.T @ y) / (batch_size - 1)
        cov_loss = off_diagonal(cov_x).pow_(2).sum().div(self.num_features)
        cov_loss = cov_loss + off_diagonal(cov_y).pow_(2).sum().div(self.num_features)
        return self.sim_coeff * repr_loss + self.std_coeff * std_loss + self.cov_coeff * cov_loss


def batch_norm(x, gamma, beta, moving_mean, moving_var, eps, momentum):
    if not torch.is_grad_enabled():
        x_hat = (x - moving_mean) / torch.sqrt(moving_var + eps)
    else:
        mean = x.mean(dim=(0, 1), keepdim=True)
        var = ((x - mean) ** 2).mean(dim=(0, 1), keepdim=True)
        x_hat = (x - mean) / torch.sqrt(var + eps)
        moving_mean = (1.0 - momentum) * moving_mean + momentum * mean
        moving_var = (1.0 - momentum) * moving_var + momentum * var
    return gamma * x_hat + beta, moving_mean.data, moving_var.data


@layer(
    "statistics of the batch",
    "batch norm by hand with moving averages",
    "d2l.ai, batch normalization, implementation from scratch",
)
class HandBatchNorm(nn.Module):
    def __init__(self, num_features=C):
        super().__init__()
        shape = (1, 1, num_features)
        self.gamma = nn.Parameter(torch.ones(shape))
        self.beta = nn.Parameter(torch.zeros(shape))
        self.moving_mean = torch.zeros(shape)
        self.moving_var = torch.ones(shape)
        self.linear = nn.Linear(C, C)

    def forward(self, x):
        if self.moving_mean.device != x.device:
            self.moving_mean = self.moving_mean.to(x.device)
            self.moving_var = self.moving_var.to(x.device)
        y, self.moving_mean, self.moving_var = batch_norm(
            self.linear(x), self.gamma, self.beta, self.moving_mean, self.moving_var,
            eps=1e-5, momentum=0.1,
        )  # fmt: skip
        return torch.sigmoid(y)


class Transpose(nn.Module):
    def __init__(self, *dims, contiguous=False):
        super().__init__()
        self.dims, self.contiguous = dims, contiguous

    def forward(self, x):
        x = x.transpose(*self.dims)
        return x.contiguous() if self.contiguous else x


@layer(
    "statistics of the batch",
    "batch norm module between transposes",
    "yuqinie98/PatchTST, PatchTST_supervised/layers/PatchTST_backbone.py",
)
class TransposedBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_attn = nn.Sequential(Transpose(1, 2), nn.BatchNorm1d(C), Transpose(1, 2))
        self.ff = nn.Sequential(nn.Linear(C, C), nn.GELU(), nn.Linear(C, C))
        self.norm_ffn = nn.Sequential(
            Transpose(1, 2), nn.BatchNorm1d(C), Transpose(1, 2, contiguous=True)
        )

    def forward(self, src):
        src = self.norm_attn(src)
        return self.norm_ffn(src + self.ff(src))


@model(
    "statistics of the batch",
    "standard deviation of groups as another channel",
    "rosinality/stylegan2-pytorch, model.py",
    batch=images,
)
class StddevChannel(nn.Module):
    def __init__(self, stddev_group=4, stddev_feat=1):
        super().__init__()
        self.stddev_group, self.stddev_feat = stddev_group, stddev_feat
        self.from_rgb = nn.Conv2d(3, C, 1)
        self.convs = nn.Sequential(
            *[
                nn.Sequential(nn.Conv2d(C, C, 3, stride=2, padding=1), nn.LeakyReLU(0.2))
                for _ in range(2)
            ]
        )
        self.body = Body()
        self.final_conv = nn.Conv2d(C + 1, C, 3, padding=1)
        self.final_linear = nn.Linear(C * 4 * 4, 10)

    def forward(self, images, labels):
        out = self.convs(self.from_rgb(images))
        out = self.body(out.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        batch, channel, height, width = out.shape
        group = min(batch, self.stddev_group)
        stddev = out.reshape(
            group, -1, self.stddev_feat, channel // self.stddev_feat, height, width
        )
        stddev = torch.sqrt(stddev.var(0, unbiased=False) + 1e-8)
        stddev = stddev.mean([2, 3, 4], keepdim=True).squeeze(2)
        stddev = stddev.repeat(group, 1, height, width)
        out = F.leaky_relu(self.final_conv(torch.cat([out, stddev], 1)), 0.2)
        return F.cross_entropy(self.final_linear(out.view(batch, -1)), labels)


@model(
    "statistics of the batch",
    "cross correlation of two views in place",
    "facebookresearch/barlowtwins, main.py",
    batch=numbers,
)
class BarlowTwins(nn.Module):
    def __init__(self, lambd=0.0051):
        super().__init__()
        self.lambd = lambd
        self.backbone = Body()
        self.projector = nn.Sequential(
            nn.Linear(C, C, bias=False), nn.BatchNorm1d(C), nn.ReLU(inplace=True), nn.Linear(C, C)
        )
        self.bn = nn.BatchNorm1d(C, affine=False)

    def forward(self, x, y):
        z1 = self.projector(self.backbone(x).mean(1))
        z2 = self.projector(self.backbone(y).mean(1))
        c = self.bn(z1).T @ self.bn(z2)
        c.div_(x.shape[0])
        on_diag = torch.diagonal(c).add_(-1).pow_(2).sum()
        off_diag = off_diagonal(c).pow_(2).sum()
        return on_diag + self.lambd * off_diag


@layer(
    "codebooks",
    "nearest by cdist and codes read as an embedding",
    "lucidrains/vector-quantize-pytorch, vector_quantize_pytorch/vector_quantize_pytorch.py",
)
class CdistCodes(nn.Module):
    def __init__(self, codebook_size=24):
        super().__init__()
        self.project_in, self.project_out = nn.Linear(C, 8), nn.Linear(8, C)
        self.embed = nn.Parameter(torch.randn(codebook_size, 8))

    def forward(self, x):
        x = self.project_in(x)
        flatten = x.reshape(-1, x.shape[-1])
        dist = -torch.cdist(flatten.detach(), self.embed.detach(), p=2)
        embed_ind = dist.argmax(dim=-1).view(x.shape[:-1])
        quantize = F.embedding(embed_ind, self.embed)
        if self.training:
            quantize = x + (quantize - x).detach() + (quantize - quantize.detach())
        return self.project_out(quantize)


@model(
    "codebooks",
    "nearest by expanded squares and one-hot products",
    "MishaLaskin/vqvae, models/quantizer.py",
    batch=numbers,
)
class VectorQuantizer(nn.Module):
    def __init__(self, n_e=24, beta=0.25):
        super().__init__()
        self.encoder, self.decoder = Body(), Body()
        self.n_e, self.beta = n_e, beta
        self.embedding = nn.Embedding(n_e, C)
        self.embedding.weight.data.uniform_(-1.0 / n_e, 1.0 / n_e)

    def quantize(self, z):
        z_flattened = z.view(-1, C)
        weight = self.embedding.weight
        d = (
            torch.sum(z_flattened**2, dim=1, keepdim=True)
            + torch.sum(weight**2, dim=1)
            - 2 * torch.matmul(z_flattened, weight.t())
        )
        min_encoding_indices = torch.argmin(d, dim=1).unsqueeze(1)
        min_encodings = torch.zeros(min_encoding_indices.shape[0], self.n_e).to(z.device)
        min_encodings.scatter_(1, min_encoding_indices, 1)
        z_q = torch.matmul(min_encodings, weight).view(z.shape)
        loss = torch.mean((z_q.detach() - z) ** 2)
        loss = loss + self.beta * torch.mean((z_q - z.detach()) ** 2)
        z_q = z + (z_q - z).detach()
        e_mean = torch.mean(min_encodings, dim=0)
        perplexity = torch.exp(-torch.sum(e_mean * torch.log(e_mean + 1e-10), 0, keepdim=True))
        return loss, z_q, perplexity

    def forward(self, x, y):
        embedding_loss, z_q, perplexity = self.quantize(self.encoder(x))
        recon_loss = torch.mean((self.decoder(z_q) - y) ** 2) / torch.var(y)
        return recon_loss + embedding_loss, perplexity


@model(
    "codebooks",
    "codes as buffers moved towards means in forward",
    "rosinality/vq-vae-2-pytorch, vqvae.py",
    batch=numbers,
)
class MovedCodes(nn.Module):
    def __init__(self, n_embed=24, decay=0.99, eps=1e-5):
        super().__init__()
        self.encoder, self.decoder = Body(), nn.Linear(C, C)
        self.n_embed, self.decay, self.eps = n_embed, decay, eps
        embed = torch.randn(C, n_embed)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(n_embed))
        self.register_buffer("embed_avg", embed.clone())

    def quantize(self, z):
        flatten = z.reshape(-1, C)
        dist = (
            flatten.pow(2).sum(1, keepdim=True)
            - 2 * flatten @ self.embed
            + self.embed.pow(2).sum(0, keepdim=True)
        )
        _, embed_ind = (-dist).max(1)
        embed_onehot = F.one_hot(embed_ind, self.n_embed).type(flatten.dtype)
        embed_ind = embed_ind.view(*z.shape[:-1])
        quantize = F.embedding(embed_ind, self.embed.transpose(0, 1))
        if self.training:
            embed_onehot_sum = embed_onehot.sum(0)
            embed_sum = flatten.transpose(0, 1) @ embed_onehot
            self.cluster_size.data.mul_(self.decay).add_(embed_onehot_sum, alpha=1 - self.decay)
            self.embed_avg.data.mul_(self.decay).add_(embed_sum, alpha=1 - self.decay)
            n = self.cluster_size.sum()
            cluster_size = (self.cluster_size + self.eps) / (n + self.n_embed * self.eps) * n
            self.embed.data.copy_(self.embed_avg / cluster_size.unsqueeze(0))
        diff = (quantize.detach() - z).pow(2).mean()
        return z + (quantize - z).detach(), diff

    def forward(self, x, y):
        quant, diff = self.quantize(self.encoder(x))
        return F.mse_loss(self.decoder(quant), y) + 0.25 * diff


def round_ste(z):
    zhat = z.round()
    return z + (zhat - z).detach()


@layer(
    "codebooks",
    "bounded numbers rounded to levels",
    "lucidrains/vector-quantize-pytorch, vector_quantize_pytorch/finite_scalar_quantization.py",
)
class FiniteScalars(nn.Module):
    def __init__(self, levels=(8, 5, 5, 4)):
        super().__init__()
        self.register_buffer("_levels", torch.tensor(levels, dtype=torch.int32), persistent=False)
        self.project_in = nn.Linear(C, len(levels))
        self.project_out = nn.Linear(len(levels), C)

    def bound(self, z, eps=1e-3):
        half_l = (self._levels - 1) * (1 + eps) / 2
        offset = torch.where(self._levels % 2 == 0, 0.5, 0.0)
        shift = (offset / half_l).atanh()
        return (z + shift).tanh() * half_l - offset

    def forward(self, x):
        quantized = round_ste(self.bound(self.project_in(x)))
        return self.project_out(quantized / (self._levels // 2))


class QuantizeStraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, codebook):
        with torch.no_grad():
            flat = inputs.view(-1, codebook.size(1))
            sqr = torch.sum(codebook**2, dim=1) + torch.sum(flat**2, dim=1, keepdim=True)
            distances = torch.addmm(sqr, flat, codebook.t(), alpha=-2.0, beta=1.0)
            _, indices = torch.min(distances, dim=1)
        ctx.save_for_backward(indices, codebook)
        ctx.mark_non_differentiable(indices)
        return torch.index_select(codebook, 0, indices).view_as(inputs), indices

    @staticmethod
    def backward(ctx, grad_output, grad_indices):
        grad_inputs, grad_codebook = None, None
        if ctx.needs_input_grad[0]:
            grad_inputs = grad_output.clone()
        if ctx.needs_input_grad[1]:
            indices, codebook = ctx.saved_tensors
            flat = grad_output.contiguous().view(-1, codebook.size(1))
            grad_codebook = torch.zeros_like(codebook)
            grad_codebook.index_add_(0, indices, flat)
        return grad_inputs, grad_codebook


@layer(
    "codebooks",
    "straight through by an autograd function",
    "ritheshkumar95/pytorch-vqvae, functions.py",
)
class FunctionCodes(nn.Module):
    def __init__(self, K=24):
        super().__init__()
        self.embedding = nn.Embedding(K, C)
        self.proj = nn.Linear(C, C)

    def forward(self, x):
        codes, _ = QuantizeStraightThrough.apply(self.proj(x).contiguous(), self.embedding.weight)
        return codes


@model(
    "pairs of rows",
    "pdist of normalised samples",
    "SsnL/align_uniform, README",
    batch=numbers,
)
class AlignUniform(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.out = Body(), nn.Linear(C, C)

    @staticmethod
    def lunif(x, t=2):
        return torch.pdist(x, p=2).pow(2).mul(-t).exp().mean().log()

    def forward(self, x, y):
        x, y = (F.normalize(self.out(self.encoder(v).mean(1)), dim=1) for v in (x, y))
        align = (x - y).norm(dim=1).pow(2).mean()
        return align + (self.lunif(x) + self.lunif(y)) / 2


@model(
    "pairs of rows",
    "differences by broadcasting under several widths",
    "jindongwang/transferlearning, code/distance/mmd_pytorch.py",
    batch=numbers,
)
class Discrepancy(nn.Module):
    def __init__(self, kernel_mul=2.0, kernel_num=5):
        super().__init__()
        self.kernel_mul, self.kernel_num = kernel_mul, kernel_num
        self.features, self.out = Body(), nn.Linear(C, C)

    def guassian_kernel(self, source, target):
        n_samples = int(source.size()[0]) + int(target.size()[0])
        total = torch.cat([source, target], dim=0)
        total0 = total.unsqueeze(0).expand(n_samples, n_samples, total.size(1))
        total1 = total.unsqueeze(1).expand(n_samples, n_samples, total.size(1))
        distance = ((total0 - total1) ** 2).sum(2)
        bandwidth = torch.sum(distance.data) / (n_samples**2 - n_samples)
        bandwidth /= self.kernel_mul ** (self.kernel_num // 2)
        widths = [bandwidth * (self.kernel_mul**i) for i in range(self.kernel_num)]
        return sum([torch.exp(-distance / width) for width in widths])

    def forward(self, x, y):
        source, target = self.features(x), self.features(y)
        batch_size = int(source.size()[0])
        kernels = self.guassian_kernel(source.mean(1), target.mean(1))
        mmd = torch.mean(
            kernels[:batch_size, :batch_size]
            + kernels[batch_size:, batch_size:]
            - kernels[:batch_size, batch_size:]
            - kernels[batch_size:, :batch_size]
        )
        return F.mse_loss(self.out(source), y) + mmd


def gram_matrix(x):
    a, b, c, d = x.size()
    features = x.reshape(a * b, c * d)
    return torch.mm(features, features.t()).div(a * b * c * d)


@model(
    "pairs of rows",
    "gram matrix of all samples and channels",
    "pytorch/tutorials, advanced_source/neural_style_tutorial.py",
    batch=lambda step=0: {"images": images(step)["images"], "style": images(step + 1)["images"]},
)
class StyleLoss(nn.Module):
    def __init__(self, style_weight=1e5):
        super().__init__()
        self.style_weight = style_weight
        self.layers = nn.ModuleList(
            [nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(4)]
        )
        self.make = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, images, style):
        x, wanted, loss = self.make(images), style, 0
        for conv in self.layers:
            x, wanted = F.relu(conv(x)), F.relu(conv(wanted))
            loss = loss + F.mse_loss(gram_matrix(x), gram_matrix(wanted).detach())
        return self.style_weight * loss + F.mse_loss(x, wanted.detach())


@model(
    "pairs of rows",
    "cosine matrix by unsqueezed rows",
    "princeton-nlp/SimCSE, simcse/models.py, Similarity",
    batch=numbers,
)
class CosineMatrix(nn.Module):
    def __init__(self, temp=0.5):
        super().__init__()
        self.temp = temp
        self.cos = nn.CosineSimilarity(dim=-1)
        self.encoder, self.mlp = Body(), nn.Sequential(nn.Linear(C, C), nn.Tanh())

    def forward(self, x, y):
        z1 = self.mlp(self.encoder(x)[:, 0])
        sim = self.cos(z1.unsqueeze(1), z1.unsqueeze(0)) / self.temp
        gold = self.cos(y.mean(1).unsqueeze(1), y.mean(1).unsqueeze(0)) / self.temp
        return F.mse_loss(sim.log_softmax(-1), gold.log_softmax(-1))


def distmat(x):
    r = torch.sum(x * x, 1).view([-1, 1])
    a = torch.mm(x, torch.transpose(x, 0, 1))
    d = r.expand_as(a) - 2 * a + torch.transpose(r, 0, 1).expand_as(a)
    return torch.abs(d)


def centred_kernel(x, sigma):
    m = int(x.size()[0])
    h = torch.eye(m, device=x.device) - (1.0 / m) * torch.ones([m, m], device=x.device)
    variance = 2.0 * sigma * sigma * x.size()[1]
    return torch.mm(torch.exp(-distmat(x) / variance).type(torch.FloatTensor).to(x.device), h)


@model(
    "pairs of rows",
    "centred kernel matrices and the trace of their product",
    "choasma/HSIC-bottleneck, source/hsicbt/math/hsic.py",
    batch=numbers,
)
class Bottleneck(nn.Module):
    def __init__(self, sigma=5.0):
        super().__init__()
        self.sigma = sigma
        self.layers, self.out = Body(), nn.Linear(C, C)

    def hsic(self, x, y):
        m = x.size(0)
        product = torch.mm(centred_kernel(x, self.sigma), centred_kernel(y, self.sigma))
        return torch.trace(product) / (m - 1) ** 2

    def forward(self, x, y):
        hidden = self.layers(x)
        flat = hidden.flatten(1)
        dependence = self.hsic(flat, x.flatten(1)) - 5.0 * self.hsic(flat, y.flatten(1))
        return F.mse_loss(self.out(hidden), y) + dependence
