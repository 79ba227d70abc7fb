"""Losses of the whole batch: of words, of pictures, of pairs and of several parts."""

import collections
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.spellings.pytorch.frame import (
    LAYERS,
    B,
    Body,
    C,
    S,
    V,
    images,
    model,
    numbers,
    padded,
    tokens,
)


class Words(nn.Module):
    """Logits of every word; the loss is the spelling."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, C)
        self.body = Body()
        self.norm = nn.LayerNorm(C)
        self.head = nn.Linear(C, V, bias=False)

    def features(self, ids):
        return self.norm(self.body(self.embed(ids)))


@dataclass
class CausalOutput:
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


@model(
    "masked cross entropy",
    "shifted logits with the ignored label",
    "huggingface/transformers, models/gpt2/modeling_gpt2.py",
    batch=padded,
)
class IgnoredLabel(Words):
    def forward(self, tokens, labels=None, mask=None):
        x = self.embed(tokens)
        if mask is not None:
            x = x * mask.unsqueeze(-1).to(x.dtype)
        lm_logits = self.head(self.norm(self.body(x)))
        loss = None
        if labels is not None:
            shift_logits = lm_logits[..., :-1, :].contiguous()
            shift_labels = labels[..., 1:].contiguous()
            loss_fct = nn.CrossEntropyLoss()
            loss = loss_fct(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))
        return CausalOutput(loss=loss, logits=lm_logits)


def sequence_mask(x, valid_len, value=0):
    maxlen = x.size(1)
    keep = torch.arange(maxlen, dtype=torch.float32, device=x.device)[None, :] < valid_len[:, None]
    x[~keep] = value
    return x


class MaskedSoftmaxCELoss(nn.CrossEntropyLoss):
    def forward(self, pred, label, valid_len):
        weights = sequence_mask(torch.ones_like(label), valid_len)
        self.reduction = "none"
        unweighted = super().forward(pred.permute(0, 2, 1), label)
        return (unweighted * weights).mean(dim=1)


@model(
    "masked cross entropy",
    "subclass of the loss with weights by valid length",
    "d2l.ai, sequence to sequence learning, MaskedSoftmaxCELoss",
    batch=padded,
)
class ByLength(Words):
    def __init__(self):
        super().__init__()
        self.criterion = MaskedSoftmaxCELoss()

    def forward(self, tokens, labels, mask):
        lengths = mask.sum(1)
        return self.criterion(self.head(self.features(tokens)), labels.clamp(min=0), lengths).mean()


@model(
    "masked cross entropy",
    "gathered log probabilities averaged per sample",
    "eric-mitchell/direct-preference-optimization, trainers.py",
    batch=padded,
)
class GatheredLogps(Words):
    def forward(self, tokens, labels, mask):
        logits = self.head(self.features(tokens))
        labels = labels[:, 1:].clone()
        logits = logits[:, :-1, :]
        loss_mask = labels != -100
        labels[labels == -100] = 0
        per_token_logps = torch.gather(
            logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)
        ).squeeze(2)
        return -((per_token_logps * loss_mask).sum(-1) / loss_mask.sum(-1)).mean()


@model(
    "masked cross entropy",
    "only the kept positions by a boolean index",
    "facebookresearch/fairseq, fairseq/criterions/masked_lm.py",
    batch=padded,
)
class BooleanIndex(Words):
    def forward(self, tokens, labels, mask):
        masked_tokens = labels.ne(-100)
        sample_size = masked_tokens.int().sum()
        masked_tokens = torch.where(masked_tokens.any(), masked_tokens, masked_tokens.new([True]))
        features = self.features(tokens)[masked_tokens, :]
        targets = labels[masked_tokens]
        loss = F.nll_loss(
            F.log_softmax(self.head(features), dim=-1, dtype=torch.float32),
            targets.view(-1),
            reduction="sum",
            ignore_index=-100,
        )
        return loss / sample_size


@model(
    "masked cross entropy",
    "logarithm of the sum of exponentials less the label's logit",
    "NVIDIA/Megatron-LM, megatron/core/tensor_parallel/cross_entropy.py and pretrain_gpt.py",
    batch=padded,
)
class HandCrossEntropy(Words):
    def forward(self, tokens, labels, mask):
        logits = self.head(self.features(tokens)).float()
        logits = logits - torch.max(logits, dim=-1)[0].detach().unsqueeze(dim=-1)
        masked_target = torch.where(labels < 0, 0, labels)
        logits_2d = logits.view(-1, V)
        arange_1d = torch.arange(start=0, end=logits_2d.size()[0], device=logits_2d.device)
        predicted = logits_2d[arange_1d, masked_target.view(-1)].view_as(labels)
        losses = torch.log(logits.exp().sum(dim=-1)) - predicted
        loss_mask = mask.view(-1).float()
        return torch.sum(losses.view(-1) * loss_mask) / loss_mask.sum()


class Pictures(nn.Module):
    """Logits of a picture's ten classes; the loss is the spelling."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, C, 4, stride=4)
        self.body = Body()
        self.fc = nn.Linear(C, 10)

    def logits(self, x):
        x = self.body(self.stem(x).flatten(2).transpose(1, 2))
        return self.fc(x.mean(1))


@model(
    "smoothed and focal",
    "label smoothing argument of the loss",
    "pytorch/vision, references/classification/train.py",
    batch=images,
)
class SmoothingArgument(Pictures):
    def __init__(self):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, images, labels):
        return self.criterion(self.logits(images), labels)


class LabelSmoothing(nn.Module):
    def __init__(self, size, padding_idx, smoothing=0.0):
        super().__init__()
        self.criterion = nn.KLDivLoss(reduction="sum")
        self.padding_idx, self.size = padding_idx, size
        self.confidence, self.smoothing = 1.0 - smoothing, smoothing
        self.true_dist = None

    def forward(self, x, target):
        assert x.size(1) == self.size
        true_dist = x.data.clone()
        true_dist.fill_(self.smoothing / (self.size - 2))
        true_dist.scatter_(1, target.data.unsqueeze(1), self.confidence)
        true_dist[:, self.padding_idx] = 0
        mask = torch.nonzero(target.data == self.padding_idx)
        if mask.dim() > 0:
            true_dist.index_fill_(0, mask.squeeze(-1), 0.0)
        self.true_dist = true_dist
        return self.criterion(x, true_dist.clone().detach())


@model(
    "smoothed and focal",
    "divergence from a filled and scattered distribution",
    "The Annotated Transformer, label smoothing",
)
class FilledDistribution(Words):
    def __init__(self):
        super().__init__()
        self.criterion = LabelSmoothing(V, padding_idx=0, smoothing=0.1)

    def forward(self, tokens, labels):
        x = F.log_softmax(self.head(self.features(tokens)), dim=-1)
        y = labels.contiguous().view(-1)
        return self.criterion(x.contiguous().view(-1, x.size(-1)), y) / (y != 0).data.sum()


def label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index=None):
    if target.dim() == lprobs.dim() - 1:
        target = target.unsqueeze(-1)
    pad_mask = target.eq(ignore_index)
    nll_loss = -lprobs.gather(dim=-1, index=target.masked_fill(pad_mask, 0))
    smooth_loss = -lprobs.sum(dim=-1, keepdim=True)
    nll_loss.masked_fill_(pad_mask, 0.0)
    smooth_loss.masked_fill_(pad_mask, 0.0)
    eps_i = epsilon / (lprobs.size(-1) - 1)
    loss = (1.0 - epsilon - eps_i) * nll_loss.sum() + eps_i * smooth_loss.sum()
    return loss, nll_loss.sum()


@model(
    "smoothed and focal",
    "mixture of the gathered and the summed log probabilities",
    "facebookresearch/fairseq, fairseq/criterions/label_smoothed_cross_entropy.py",
    batch=padded,
)
class MixedNll(Words):
    def forward(self, tokens, labels, mask):
        lprobs = torch.log_softmax(self.head(self.features(tokens)).float(), dim=-1)
        loss, nll = label_smoothed_nll_loss(lprobs.view(-1, V), labels.view(-1), 0.1, -100)
        ntokens = mask.sum()
        return loss / ntokens, {"nll": nll.detach().reshape(1), "words": ntokens.reshape(1)}


@model(
    "smoothed and focal",
    "focal by the exponent of gathered log probabilities",
    "clcarwin/focal_loss_pytorch, focalloss.py",
)
class GatheredFocal(Words):
    def __init__(self, gamma=2):
        super().__init__()
        self.gamma = gamma
        self.alpha = torch.linspace(0.5, 1.0, V)

    def forward(self, tokens, labels):
        logits = self.head(self.features(tokens)).view(-1, V)
        target = labels.view(-1, 1)
        logpt = F.log_softmax(logits, dim=1).gather(1, target).view(-1)
        pt = logpt.detach().exp()
        if self.alpha.type() != logits.data.type():
            self.alpha = self.alpha.type_as(logits.data)
        logpt = logpt * self.alpha.to(logits.device).gather(0, target.view(-1))
        loss = -1 * (1 - pt) ** self.gamma * logpt
        return loss.mean()


@model(
    "smoothed and focal",
    "sigmoid focal of one-hot targets",
    "pytorch/vision, torchvision/ops/focal_loss.py",
    batch=images,
)
class SigmoidFocal(Pictures):
    alpha, gamma = 0.25, 2.0

    def __init__(self):
        super().__init__()
        nn.init.constant_(self.fc.bias, -math.log((1 - 0.01) / 0.01))

    def forward(self, images, labels):
        inputs = self.logits(images)
        targets = F.one_hot(labels, num_classes=inputs.size(1)).to(inputs.dtype)
        p = torch.sigmoid(inputs)
        ce_loss = F.binary_cross_entropy_with_logits(inputs, targets, reduction="none")
        p_t = p * targets + (1 - p) * (1 - targets)
        loss = ce_loss * ((1 - p_t) ** self.gamma)
        if self.alpha >= 0:
            alpha_t = self.alpha * targets + (1 - self.alpha) * (1 - targets)
            loss = alpha_t * loss
        return loss.sum() / inputs.size(0)


class Encoder(nn.Module):
    """One vector per sample."""

    def __init__(self, width=C):
        super().__init__()
        self.body = Body()
        self.projector = nn.Sequential(nn.Linear(C, C), nn.ReLU(), nn.Linear(C, width))

    def forward(self, x):
        return self.projector(self.body(x).mean(1))


@model(
    "contrast over the batch",
    "cosine scores of pairs with their row numbers as labels",
    "UKPLab/sentence-transformers, losses/MultipleNegativesRankingLoss.py",
    batch=numbers,
)
class RankedPairs(nn.Module):
    def __init__(self, scale=20.0):
        super().__init__()
        self.encoder = Encoder()
        self.scale = scale
        self.cross_entropy_loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        reps = [self.encoder(sentence) for sentence in (x, y)]
        a, b = (F.normalize(r, p=2, dim=1) for r in reps)
        scores = torch.mm(a, b.transpose(0, 1)) * self.scale
        labels = torch.tensor(range(len(scores)), dtype=torch.long, device=scores.device)
        return self.cross_entropy_loss(scores, labels)


@model(
    "contrast over the batch",
    "symmetric over images and words with a learned scale",
    "openai/CLIP, clip/model.py, with the loss of mlfoundations/open_clip, loss.py",
    batch=lambda step=0: {"images": images(step)["images"], "tokens": tokens(step)["tokens"]},
)
class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Conv2d(3, C, 4, stride=4)
        self.visual_body, self.transformer = Body(), Body()
        self.token_embedding = nn.Embedding(V, C)
        self.text_projection = nn.Parameter(torch.empty(C, C // 2))
        self.proj = nn.Parameter(C**-0.5 * torch.randn(C, C // 2))
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))
        nn.init.normal_(self.text_projection, std=C**-0.5)

    def encode_image(self, image):
        x = self.visual(image)
        x = x.reshape(x.shape[0], x.shape[1], -1).permute(0, 2, 1)
        return self.visual_body(x).mean(dim=1) @ self.proj

    def encode_text(self, text):
        x = self.transformer(self.token_embedding(text))
        return x[torch.arange(x.shape[0]), text.argmax(dim=-1)] @ self.text_projection

    def forward(self, images, tokens):
        image_features = self.encode_image(images)
        text_features = self.encode_text(tokens)
        image_features = image_features / image_features.norm(dim=1, keepdim=True)
        text_features = text_features / text_features.norm(dim=1, keepdim=True)
        logits_per_image = self.logit_scale.exp() * image_features @ text_features.t()
        logits_per_text = logits_per_image.t()
        ground_truth = torch.arange(images.shape[0], dtype=torch.long, device=images.device)
        return (
            F.cross_entropy(logits_per_image, ground_truth)
            + F.cross_entropy(logits_per_text, ground_truth)
        ) / 2


@model(
    "contrast over the batch",
    "both views concatenated and the diagonal cut out by a mask",
    "sthalles/SimCLR, simclr.py",
    batch=numbers,
)
class SimClr(nn.Module):
    def __init__(self, n_views=2, temperature=0.1):
        super().__init__()
        self.model = Encoder()
        self.n_views, self.temperature = n_views, temperature

    def forward(self, x, y):
        batch_size = x.size(0)
        features = F.normalize(self.model(torch.cat([x, y], dim=0)), dim=1)
        labels = torch.cat([torch.arange(batch_size) for _ in range(self.n_views)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float().to(x.device)
        similarity = torch.matmul(features, features.T)
        mask = torch.eye(labels.shape[0], dtype=torch.bool).to(x.device)
        labels = labels[~mask].view(labels.shape[0], -1)
        similarity = similarity[~mask].view(similarity.shape[0], -1)
        positives = similarity[labels.bool()].view(labels.shape[0], -1)
        negatives = similarity[~labels.bool()].view(similarity.shape[0], -1)
        logits = torch.cat([positives, negatives], dim=1) / self.temperature
        target = torch.zeros(logits.shape[0], dtype=torch.long).to(x.device)
        return F.cross_entropy(logits, target)


def people(step=0):
    """``x`` [b, s, c] and ``pids`` [b], two samples of each person."""
    x = numbers(step)["x"]
    pids = torch.arange(B) // 2
    return {"x": x + pids[:, None, None] / 4, "pids": pids}


@model(
    "contrast over the batch",
    "hardest triplets found in a loop over the samples",
    "KaiyangZhou/deep-person-reid, torchreid/losses/hard_mine_triplet_loss.py",
    batch=people,
)
class HardTriplets(nn.Module):
    def __init__(self, margin=0.3):
        super().__init__()
        self.encoder = Encoder()
        self.ranking_loss = nn.MarginRankingLoss(margin=margin)

    def forward(self, x, pids):
        inputs = self.encoder(x)
        n = inputs.size(0)
        dist = torch.pow(inputs, 2).sum(dim=1, keepdim=True).expand(n, n)
        dist = dist + dist.t()
        dist.addmm_(inputs, inputs.t(), beta=1, alpha=-2)
        dist = dist.clamp(min=1e-12).sqrt()
        mask = pids.expand(n, n).eq(pids.expand(n, n).t())
        dist_ap, dist_an = [], []
        for i in range(n):
            dist_ap.append(dist[i][mask[i]].max().unsqueeze(0))
            dist_an.append(dist[i][mask[i] == 0].min().unsqueeze(0))
        dist_ap, dist_an = torch.cat(dist_ap), torch.cat(dist_an)
        return self.ranking_loss(dist_an, dist_ap, torch.ones_like(dist_an))


@model(
    "contrast over the batch",
    "supervised by equal labels with scattered self mask",
    "HobbitLong/SupContrast, losses.py",
    batch=people,
)
class SupCon(nn.Module):
    def __init__(self, temperature=0.07, base_temperature=0.07):
        super().__init__()
        self.encoder, self.head = Body(), nn.Linear(C, C)
        self.temperature, self.base_temperature = temperature, base_temperature

    def forward(self, x, pids):
        h = self.encoder(x)
        views = [h[:, ::2].mean(1), h[:, 1::2].mean(1)]
        features = torch.stack([F.normalize(self.head(v), dim=1) for v in views], dim=1)
        batch_size, contrast_count = features.shape[:2]
        labels = pids.contiguous().view(-1, 1)
        mask = torch.eq(labels, labels.T).float()
        contrast_feature = torch.cat(torch.unbind(features, dim=1), dim=0)
        dots = torch.div(contrast_feature @ contrast_feature.T, self.temperature)
        logits_max, _ = torch.max(dots, dim=1, keepdim=True)
        logits = dots - logits_max.detach()
        mask = mask.repeat(contrast_count, contrast_count)
        own = torch.arange(batch_size * contrast_count).view(-1, 1).to(x.device)
        logits_mask = torch.scatter(torch.ones_like(mask), 1, own, 0)
        mask = mask * logits_mask
        exp_logits = torch.exp(logits) * logits_mask
        log_prob = logits - torch.log(exp_logits.sum(1, keepdim=True))
        mean_log_prob_pos = (mask * log_prob).sum(1) / mask.sum(1)
        loss = -(self.temperature / self.base_temperature) * mean_log_prob_pos
        return loss.view(contrast_count, batch_size).mean()


def taught(step=0):
    """`images` and ``teacher`` [b, 10], logits of a model that is not here."""
    generator = torch.Generator().manual_seed(step + 1000)
    return {**images(step), "teacher": 2 * torch.randn(B, 10, generator=generator)}


@model(
    "distillation",
    "soft targets by hand from logits in the batch",
    "pytorch/tutorials, beginner_source/knowledge_distillation_tutorial.py",
    batch=taught,
)
class SoftTargets(Pictures):
    T, soft_weight, ce_weight = 2, 0.25, 0.75

    def forward(self, images, labels, teacher):
        student_logits = self.logits(images)
        soft_targets = nn.functional.softmax(teacher / self.T, dim=-1)
        soft_prob = nn.functional.log_softmax(student_logits / self.T, dim=-1)
        distilled = torch.sum(soft_targets * (soft_targets.log() - soft_prob))
        distilled = distilled / soft_prob.size()[0] * (self.T**2)
        label_loss = F.cross_entropy(student_logits, labels)
        return self.soft_weight * distilled + self.ce_weight * label_loss


@model(
    "distillation",
    "frozen teacher inside and selected logits",
    "huggingface/transformers, examples/research_projects/distillation/distiller.py",
    batch=padded,
)
class FrozenTeacher(nn.Module):
    def __init__(self, temperature=2.0, alpha_ce=0.5, alpha_mlm=0.5):
        super().__init__()
        self.student, self.teacher = Words(), Words()
        self.teacher.requires_grad_(False)
        self.temperature, self.alpha_ce, self.alpha_mlm = temperature, alpha_ce, alpha_mlm
        self.ce_loss_fct = nn.KLDivLoss(reduction="batchmean")
        self.lm_loss_fct = nn.CrossEntropyLoss(ignore_index=-100)

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, tokens, labels, mask):
        s_logits = self.student.head(self.student.features(tokens))
        with torch.no_grad():
            t_logits = self.teacher.head(self.teacher.features(tokens))
        keep = mask.bool().unsqueeze(-1).expand_as(s_logits)
        s_logits_slct = torch.masked_select(s_logits, keep).view(-1, s_logits.size(-1))
        t_logits_slct = torch.masked_select(t_logits, keep).view(-1, s_logits.size(-1))
        assert t_logits_slct.size() == s_logits_slct.size()
        loss_ce = (
            self.ce_loss_fct(
                F.log_softmax(s_logits_slct / self.temperature, dim=-1),
                F.softmax(t_logits_slct / self.temperature, dim=-1),
            )
            * (self.temperature) ** 2
        )
        loss = self.alpha_ce * loss_ce
        if self.alpha_mlm > 0.0:
            loss_mlm = self.lm_loss_fct(s_logits.view(-1, s_logits.size(-1)), labels.view(-1))
            loss += self.alpha_mlm * loss_mlm
        return loss


@model(
    "distillation",
    "squares between chosen hidden states through a fitted product",
    "huawei-noah/Pretrained-Language-Model, TinyBERT/task_distill.py",
)
class HiddenStates(nn.Module):
    def __init__(self, teacher_layers=8, teacher_width=48):
        super().__init__()
        self.embed, self.teacher_embed = nn.Embedding(V, C), nn.Embedding(V, teacher_width)
        self.student, self.head = Body().layers, nn.Linear(C, V)
        self.teacher = nn.ModuleList(
            [nn.Sequential(nn.Linear(teacher_width, teacher_width), nn.Tanh())
             for _ in range(teacher_layers)]
        )  # fmt: skip
        for param in [*self.teacher.parameters(), *self.teacher_embed.parameters()]:
            param.requires_grad = False
        self.fit_dense = nn.Linear(C, teacher_width)
        self.loss_mse = nn.MSELoss()

    def forward(self, tokens, labels):
        h = self.embed(tokens)
        student_reps = [self.fit_dense(h)]
        for layer in self.student:
            h = h + layer(h)
            student_reps.append(self.fit_dense(h))
        with torch.no_grad():
            t = self.teacher_embed(tokens)
            teacher_reps = [t]
            for layer in self.teacher:
                t = layer(t)
                teacher_reps.append(t)
        per_block = int((len(teacher_reps) - 1) / (len(student_reps) - 1))
        new_teacher_reps = [teacher_reps[i * per_block] for i in range(len(student_reps))]
        rep_loss = 0.0
        for student_rep, teacher_rep in zip(student_reps, new_teacher_reps, strict=True):
            rep_loss += self.loss_mse(student_rep, teacher_rep)
        return F.cross_entropy(self.head(h).view(-1, V), labels.view(-1)) + rep_loss


@model(
    "distillation",
    "divergence of both from their mixture in logarithms",
    "huggingface/trl, trl/trainer/gkd_trainer.py, generalized_jsd_loss",
    batch=padded,
)
class JensenShannon(nn.Module):
    def __init__(self, beta=0.5, temperature=1.0):
        super().__init__()
        self.student, self.teacher_model = Words(), Words()
        for param in self.teacher_model.parameters():
            param.requires_grad_(False)
        self.register_buffer("beta", torch.tensor(beta), persistent=False)
        self.temperature = temperature

    def forward(self, tokens, labels, mask):
        student = self.student.head(self.student.features(tokens)) / self.temperature
        with torch.no_grad():
            teacher = self.teacher_model.head(self.teacher_model.features(tokens))
            teacher = teacher / self.temperature
        student_log_probs = F.log_softmax(student, dim=-1)
        teacher_log_probs = F.log_softmax(teacher, dim=-1)
        both = [student_log_probs + torch.log(1 - self.beta),
                teacher_log_probs + torch.log(self.beta)]  # fmt: skip
        mixture_log_probs = torch.logsumexp(torch.stack(both), dim=0)
        kl_teacher = F.kl_div(
            mixture_log_probs, teacher_log_probs, reduction="none", log_target=True
        )
        kl_student = F.kl_div(
            mixture_log_probs, student_log_probs, reduction="none", log_target=True
        )
        jsd = self.beta * kl_teacher + (1 - self.beta) * kl_student
        kept = labels != -100
        return jsd[kept].sum() / kept.sum()


@model(
    "distillation",
    "centred teacher of two views with a running centre",
    "facebookresearch/dino, main_dino.py",
    batch=numbers,
)
class Dino(nn.Module):
    def __init__(self, out_dim=24, center_momentum=0.9):
        super().__init__()
        self.student, self.teacher = Encoder(out_dim), Encoder(out_dim)
        self.teacher.load_state_dict(self.student.state_dict())
        for p in self.teacher.parameters():
            p.requires_grad = False
        self.student_temp, self.teacher_temp = 0.1, 0.04
        self.center_momentum = center_momentum
        self.register_buffer("center", torch.zeros(1, out_dim))

    def forward(self, x, y):
        views = torch.cat([x, y])
        teacher_output, student_output = self.teacher(views), self.student(views)
        student_out = (student_output / self.student_temp).chunk(2)
        teacher_out = F.softmax((teacher_output - self.center) / self.teacher_temp, dim=-1)
        teacher_out = teacher_out.detach().chunk(2)
        total_loss, n_loss_terms = 0, 0
        for iq, q in enumerate(teacher_out):
            for v in range(len(student_out)):
                if v == iq:
                    continue
                loss = torch.sum(-q * F.log_softmax(student_out[v], dim=-1), dim=-1)
                total_loss += loss.mean()
                n_loss_terms += 1
        self.update_center(teacher_output)
        return total_loss / n_loss_terms

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = torch.sum(teacher_output, dim=0, keepdim=True) / len(teacher_output)
        kept = self.center_momentum
        self.center = self.center * kept + batch_center * (1 - kept)


class Regressor(nn.Module):
    """Numbers from numbers; the loss is the spelling."""

    def __init__(self, outputs=C):
        super().__init__()
        self.body = Body()
        self.out = nn.Linear(C, outputs)

    def predict(self, x):
        return self.out(self.body(x))


@model(
    "regression",
    "huber by hand with where",
    "facebookresearch/fvcore, fvcore/nn/smooth_l1_loss.py",
    batch=numbers,
)
class HandHuber(Regressor):
    beta = 0.5

    def forward(self, x, y):
        n = torch.abs(self.predict(x) - y)
        cond = n < self.beta
        loss = torch.where(cond, 0.5 * n**2 / self.beta, n - 0.5 * self.beta)
        return loss.mean() if loss.numel() > 0 else 0.0 * loss.sum()


def weighed(step=0):
    """`numbers` and ``timesteps`` [b]."""
    generator = torch.Generator().manual_seed(step + 7)
    return {**numbers(step), "timesteps": torch.randint(0, 100, (B,), generator=generator)}


@model(
    "regression",
    "squares weighted per sample from a table",
    "huggingface/diffusers, examples/text_to_image/train_text_to_image.py",
    batch=weighed,
)
class WeightedSquares(Regressor):
    def __init__(self, snr_gamma=5.0):
        super().__init__()
        self.snr_gamma = snr_gamma
        alphas_cumprod = torch.cumprod(1.0 - torch.linspace(1e-3, 0.05, 100), dim=0)
        self.register_buffer("snr", alphas_cumprod / (1 - alphas_cumprod))

    def forward(self, x, y, timesteps):
        model_pred = self.predict(x)
        snr = self.snr[timesteps]
        gammas = self.snr_gamma * torch.ones_like(timesteps)
        mse_loss_weights = torch.stack([snr, gammas], dim=1).min(dim=1)[0] / snr
        loss = F.mse_loss(model_pred.float(), y.float(), reduction="none")
        loss = loss.mean(dim=list(range(1, len(loss.shape)))) * mse_loss_weights
        return loss.mean()


@model(
    "regression",
    "larger of two slopes in a loop over quantiles",
    "sktime/pytorch-forecasting, pytorch_forecasting/metrics/quantile.py",
    batch=numbers,
)
class Quantiles(Regressor):
    def __init__(self):
        self.quantiles = [0.1, 0.5, 0.9]
        super().__init__(outputs=len(self.quantiles))

    def forward(self, x, y):
        y_pred, target = self.predict(x), y[..., 0]
        losses = []
        for i, q in enumerate(self.quantiles):
            errors = target - y_pred[..., i]
            losses.append(torch.max((q - 1) * errors, q * errors).unsqueeze(-1))
        return 2 * torch.cat(losses, dim=2).mean()


@model(
    "regression",
    "log probability under a normal distribution object",
    "awslabs/gluonts, src/gluonts/torch/distributions",
    batch=numbers,
)
class GaussianHead(Regressor):
    def __init__(self):
        super().__init__(outputs=2 * C)

    def forward(self, x, y):
        loc, scale = self.predict(x).chunk(2, dim=-1)
        distr = torch.distributions.Normal(loc, F.softplus(scale) + 1e-3)
        scaled = torch.distributions.Independent(distr, 1)
        return -scaled.log_prob(y).mean()


class LogCoshLoss(torch.nn.Module):
    def forward(self, y_t, y_prime_t):
        ey_t = y_t - y_prime_t
        return torch.mean(torch.log(torch.cosh(ey_t + 1e-12)))


@model(
    "regression",
    "logarithm of the hyperbolic cosine",
    "tuantle/regression-losses-pytorch, regression_losses.py",
    batch=numbers,
)
class LogCosh(Regressor):
    def __init__(self):
        super().__init__()
        self.criterion = LogCoshLoss()

    def forward(self, x, y):
        return self.criterion(y, self.predict(x))


@model(
    "auxiliary losses",
    "squared log partition of the logits",
    "allenai/OLMo, olmo/train.py, cross_entropy_loss",
    batch=padded,
)
class ZLoss(Words):
    def forward(self, tokens, labels, mask):
        logits = self.head(self.features(tokens)).view(-1, V)
        labels = labels.view(-1)
        ce_loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="mean")
        z_squared = logits.logsumexp(-1).pow(2)
        kept = labels != -100
        z_loss = 1e-4 * ((z_squared * kept).sum() / kept.sum())
        return ce_loss + z_loss


class AutomaticWeightedLoss(nn.Module):
    def __init__(self, num=2):
        super().__init__()
        self.params = nn.Parameter(torch.ones(num, requires_grad=True))

    def forward(self, *x):
        loss_sum = 0
        for i, loss in enumerate(x):
            loss_sum += 0.5 / (self.params[i] ** 2) * loss + torch.log(1 + self.params[i] ** 2)
        return loss_sum


@model(
    "auxiliary losses",
    "three losses weighted by learned uncertainties",
    "Mikoto10032/AutomaticWeightedLoss, AutomaticWeightedLoss.py",
    batch=lambda step=0: {**tokens(step), "y": numbers(step)["y"]},
)
class LearnedWeights(Words):
    def __init__(self):
        super().__init__()
        self.regress, self.judge = nn.Linear(C, C), nn.Linear(C, 1)
        self.awl = AutomaticWeightedLoss(3)

    def forward(self, tokens, labels, y):
        h = self.features(tokens)
        loss1 = F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())
        loss2 = F.l1_loss(self.regress(h), y)
        even = (tokens.sum(-1) % 2 == 0).float()
        loss3 = F.binary_cross_entropy_with_logits(self.judge(h[:, -1]).squeeze(-1), even)
        return self.awl(loss1, loss2, loss3)


@model(
    "auxiliary losses",
    "squares of activations kept by forward hooks",
    "discuss.pytorch.org, penalty on activations of hidden layers with forward hooks",
)
class HookedPenalty(Words):
    def __init__(self, alpha=1e-2):
        super().__init__()
        self.alpha = alpha
        self.activations = collections.OrderedDict()
        for name, module in self.body.named_modules():
            if isinstance(module, nn.GELU):
                module.register_forward_hook(self.keep(name))

    def keep(self, name):
        def hook(module, inputs, output):
            self.activations[name] = output

        return hook

    def forward(self, tokens, labels):
        logits = self.head(self.features(tokens))
        loss = F.cross_entropy(logits.view(-1, V), labels.view(-1))
        penalty = sum(act.pow(2).mean() for act in self.activations.values())
        self.activations.clear()
        return loss + self.alpha * penalty


def actions(step=0):
    """``x`` [b, s, c], ``action`` and ``returns`` [b, s]."""
    generator = torch.Generator().manual_seed(step + 3)
    return {
        "x": numbers(step)["x"],
        "action": torch.randint(0, 6, (B, S), generator=generator),
        "returns": torch.randn(B, S, generator=generator),
    }


ActorOutput = collections.namedtuple("ActorOutput", ["loss", "entropy", "values"])


@model(
    "auxiliary losses",
    "entropy bonus of a categorical beside value and action losses",
    "ikostrikov/pytorch-a2c-ppo-acktr-gail, a2c_ppo_acktr/algo/a2c_acktr.py",
    batch=actions,
)
class ActorCritic(nn.Module):
    def __init__(self, value_loss_coef=0.5, entropy_coef=0.01):
        super().__init__()
        self.base = Body()
        self.dist = nn.Linear(C, 6)
        self.critic_linear = nn.Linear(C, 1)
        self.value_loss_coef, self.entropy_coef = value_loss_coef, entropy_coef

    def forward(self, x, action, returns):
        features = self.base(x)
        values = self.critic_linear(features).squeeze(-1)
        dist = torch.distributions.Categorical(logits=self.dist(features))
        advantages = returns - values
        value_loss = advantages.pow(2).mean()
        action_loss = -(advantages.detach() * dist.log_prob(action)).mean()
        entropy = dist.entropy()
        loss = value_loss * self.value_loss_coef + action_loss - entropy.mean() * self.entropy_coef
        return ActorOutput(loss, entropy.detach(), values)


class ResBlock(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        torch.nn.init.zeros_(self.linear.weight)
        self.act = nn.SiLU()

    def forward(self, x):
        return x + self.act(self.linear(x))


@model(
    "auxiliary losses",
    "heads of their own for several next words with decaying weights",
    "FasterDecoding/Medusa, medusa/train/train_legacy.py",
)
class SeveralNext(Words):
    def __init__(self, medusa_num_heads=LAYERS - 1, decay=0.8):
        super().__init__()
        self.medusa, self.decay = medusa_num_heads, decay
        self.medusa_head = nn.ModuleList(
            [
                nn.Sequential(ResBlock(C), nn.Linear(C, V, bias=False))
                for _ in range(medusa_num_heads)
            ]
        )

    def forward(self, tokens, labels):
        hidden = self.features(tokens)
        medusa_logits = [self.medusa_head[i](hidden) for i in range(self.medusa)]
        logits = torch.stack([self.head(hidden), *medusa_logits], dim=0)
        loss, log = 0, {}
        loss_fct = nn.CrossEntropyLoss()
        for i in range(self.medusa + 1):
            ahead = logits[i, :, : S - i].contiguous().view(-1, logits.shape[-1])
            wanted = labels[..., i:].contiguous().view(-1)
            loss_i = loss_fct(ahead, wanted)
            loss += self.decay**i * loss_i
            log[f"medusa{i}_top1"] = ahead.detach().argmax(-1).eq(wanted)
        return loss, log
