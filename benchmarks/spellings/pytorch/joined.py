"""Parts of a batch that a model joins and runs at once, and losses weighed by parameters."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.spellings.pytorch.frame import B, Body, C, V, model, numbers
from benchmarks.spellings.pytorch.losses import Words


class Logits(Words):
    """Of every word; the loss is the spelling."""

    def logits(self, ids):
        return self.head(self.features(ids))


class Vectors(nn.Module):
    """A vector of every sample; the loss is the spelling."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(C, C)
        self.body = Body()
        self.out = nn.Linear(C, C)

    def encode(self, x):
        return self.out(self.body(self.proj(x)).mean(dim=1))


@model(
    "parts of a batch run together",
    "chosen and rejected concatenated and taken apart by the number of chosen",
    "huggingface/trl, trl/trainer/dpo_trainer.py",
)
class Preferred(Logits):
    def forward(self, tokens, labels):
        num = tokens.shape[0]
        ids = torch.cat((tokens, labels), dim=0)
        logits = self.logits(ids)[:, :-1]
        per_token = torch.gather(logits.log_softmax(-1), 2, ids[:, 1:, None]).squeeze(2)
        logps = per_token.sum(-1)
        chosen, rejected = logps[:num], logps[num:]
        margin = 0.1 * (chosen - rejected)
        return (-F.logsigmoid(margin) * 0.9 - F.logsigmoid(-margin) * 0.1).mean()


@model(
    "parts of a batch run together",
    "conditional and not, taken apart by chunk",
    "huggingface/diffusers, pipelines/stable_diffusion/pipeline_stable_diffusion.py",
    batch=numbers,
)
class Guided(Vectors):
    def __init__(self):
        super().__init__()
        self.null = nn.Parameter(torch.zeros(C))

    def forward(self, x, y):
        both = torch.cat([x + self.null, x + y])
        uncond, cond = self.encode(both).chunk(2)
        pred = uncond + 7.5 * (cond - uncond)
        return F.mse_loss(pred, y.mean(dim=1))


@model(
    "parts of a batch run together",
    "two views as rows of one matrix, compared across the batch",
    "sthalles/SimCLR, simclr.py",
    batch=numbers,
)
class TwoViews(Vectors):
    def forward(self, x, y):
        z = F.normalize(self.encode(torch.cat([x, y], dim=0)), dim=1)
        labels = torch.cat([torch.arange(B) for _ in range(2)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
        similarity = z @ z.T
        mask = torch.eye(2 * B, dtype=torch.bool)
        similarity = similarity.masked_fill(mask, -1e4) / 0.07
        log_prob = similarity.log_softmax(dim=1)
        positive = labels.masked_fill(mask, 0.0)
        return -(log_prob * positive).sum(1).mean()


@model(
    "parts of a batch run together",
    "anchor, positive and negative split in three",
    "adambielski/siamese-triplet, losses.py",
    batch=numbers,
)
class Triplets(Vectors):
    def forward(self, x, y):
        anchor, positive, negative = self.encode(torch.cat([x, y, y.flip(1)])).split(x.size(0))
        near = (anchor - positive).pow(2).sum(1)
        far = (anchor - negative).pow(2).sum(1)
        return F.relu(near - far + 0.2).mean()


@model(
    "parts of a batch run together",
    "stacked in a dim before the samples, flattened and unflattened",
    "Bardes et al. 2022, VICReg, equation 6, both views at once",
    batch=numbers,
)
class Stacked(Vectors):
    def forward(self, x, y):
        pair = torch.stack([x, y])
        z1, z2 = self.encode(pair.flatten(0, 1)).unflatten(0, (2, -1))
        invariance = F.mse_loss(z1, z2)
        return invariance + 0.1 * F.relu(1 - (z1.square().mean(1) + 1e-4).sqrt()).mean()


@model(
    "losses weighed by parameters",
    "log variances of two tasks",
    "Kendall, Gal, Cipolla 2018, equation 10",
)
class LogVariances(Logits):
    def __init__(self):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, tokens, labels):
        logits = self.logits(tokens)
        losses = (
            F.cross_entropy(logits.view(-1, V), labels.view(-1)),
            F.mse_loss(logits.mean(1), F.one_hot(labels, V).float().mean(1)),
        )
        total = 0
        for i, loss in enumerate(losses):
            total = total + torch.exp(-self.log_vars[i]) * loss + self.log_vars[i]
        return total


@model(
    "losses weighed by parameters",
    "a module of squared parameters with a logarithm",
    "Mikoto10032/AutomaticWeightedLoss, AutomaticWeightedLoss.py",
)
class Automatic(Logits):
    def __init__(self, num=2):
        super().__init__()
        self.params = nn.Parameter(torch.ones(num))

    def forward(self, tokens, labels):
        logits = self.logits(tokens)
        z = torch.logsumexp(logits, -1).pow(2).mean()
        loss_sum = 0
        for i, loss in enumerate((F.cross_entropy(logits.transpose(1, 2), labels), z)):
            loss_sum += 0.5 / (self.params[i] ** 2) * loss + torch.log(1 + self.params[i] ** 2)
        return loss_sum


@model(
    "losses weighed by parameters",
    "stacked losses times a softmax of weights",
    "median-research-group/LibMTL, LibMTL/weighting/RLW.py, with weights that are learned",
)
class Softmaxed(Logits):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterDict({"task": nn.Parameter(torch.zeros(3))})

    def forward(self, tokens, labels):
        logits = self.logits(tokens)
        losses = torch.stack(
            [
                F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
                logits.abs().mean(),
                (logits[:, 1:] - logits[:, :-1]).square().mean(),
            ]
        )
        return (F.softmax(self.weights["task"], dim=-1) * losses).sum()


@model(
    "losses weighed by parameters",
    "a clamped scale of all logits",
    "mlfoundations/open_clip, src/open_clip/model.py",
    batch=numbers,
)
class Scaled(Vectors):
    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))
        self.logit_bias = nn.Parameter(torch.tensor(-10.0))

    def forward(self, x, y):
        a, b = F.normalize(self.encode(x), dim=-1), F.normalize(self.encode(y), dim=-1)
        logits = self.logit_scale.exp().clamp(max=100.0) * (a * b).sum(-1) + self.logit_bias
        return F.softplus(-logits).mean()


@model(
    "losses weighed by parameters",
    "a bounded share between two means",
    "PyTorch documentation, torch.lerp",
    batch=numbers,
)
class Share(Vectors):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.tensor(0.3))

    def forward(self, x, y):
        share = torch.sigmoid(self.mix)
        pred, wanted = self.encode(x), y.mean(1)
        return torch.lerp(F.l1_loss(pred, wanted), F.smooth_l1_loss(pred, wanted), share)
