"""Pictures: how they become patches, and how maps of them are pooled and resized."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.spellings.pytorch.frame import LAYERS, Body, C, H, images, model

P, G = 4, 4
"""Height and width of a patch, patches per side."""


class PatchEmbed(nn.Module):
    def __init__(self, img_size=16, patch_size=P, in_chans=3, embed_dim=C, flatten=True):
        super().__init__()
        self.img_size, self.patch_size = (img_size, img_size), (patch_size, patch_size)
        self.grid_size = tuple(s // p for s, p in zip(self.img_size, self.patch_size, strict=True))
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.flatten = flatten
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)
        self.norm = nn.Identity()

    def forward(self, x):
        _, _, height, width = x.shape
        assert (height, width) == self.img_size, f"{height}x{width} is not {self.img_size}"
        x = self.proj(x)
        if self.flatten:
            x = x.flatten(2).transpose(1, 2)
        return self.norm(x)


@model(
    "patches",
    "convolution with the stride of its kernel",
    "huggingface/pytorch-image-models, timm/layers/patch_embed.py",
    batch=images,
)
class StridedPatches(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, C))
        self.pos_embed = nn.Parameter(torch.randn(1, self.patch_embed.num_patches + 1, C) * 0.02)
        layer = nn.TransformerEncoderLayer(C, H, 2 * C, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(C, 10)

    def forward(self, images, labels):
        x = self.patch_embed(images)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        return F.cross_entropy(self.head(self.blocks(x)[:, 0]), labels)


@model(
    "patches",
    "unfold module with overlapping windows",
    "yitu-opensource/T2T-ViT, models/t2t_vit.py",
    batch=images,
)
class UnfoldedPatches(nn.Module):
    def __init__(self):
        super().__init__()
        self.soft_split0 = nn.Unfold(kernel_size=(5, 5), stride=(2, 2), padding=(2, 2))
        self.soft_split1 = nn.Unfold(kernel_size=(3, 3), stride=(2, 2), padding=(1, 1))
        self.attention1 = nn.Linear(3 * 25, 16)
        self.project = nn.Linear(16 * 9, C)
        self.blocks, self.norm, self.head = Body(), nn.LayerNorm(C), nn.Linear(C, 10)

    def forward(self, images, labels):
        x = self.attention1(self.soft_split0(images).transpose(1, 2))
        b, new_hw, c = x.shape
        side = int(new_hw**0.5)
        x = x.transpose(1, 2).reshape(b, c, side, side)
        x = self.project(self.soft_split1(x).transpose(1, 2))
        x = self.norm(self.blocks(x))
        return F.cross_entropy(self.head(x.mean(1)), labels)


@model(
    "patches",
    "unfold of two dims of the tensor and permute",
    "discuss.pytorch.org, creating nonoverlapping patches from image data",
    batch=images,
)
class TensorUnfold(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3 * P * P, C)
        self.body, self.out = Body(), nn.Linear(G * G * C, 10)

    def forward(self, images, labels):
        patches = images.unfold(2, P, P).unfold(3, P, P)
        patches = patches.contiguous().view(patches.size(0), 3, -1, P, P)
        patches = patches.permute(0, 2, 1, 3, 4).reshape(patches.size(0), -1, 3 * P * P)
        x = self.body(self.embed(patches))
        return F.cross_entropy(self.out(x.flatten(start_dim=1)), labels)


@model(
    "patches",
    "pixel unshuffle module before a convolution",
    "huggingface/diffusers, src/diffusers/models/adapter.py",
    batch=lambda step=0: {"images": images(step)["images"]},
)
class UnshuffledPixels(nn.Module):
    def __init__(self, downscale_factor=4):
        super().__init__()
        channels = 3 * downscale_factor**2
        self.unshuffle = nn.PixelUnshuffle(downscale_factor)
        self.conv_in = nn.Conv2d(channels, C, kernel_size=3, padding=1)
        self.body = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Conv2d(C, C, kernel_size=3, padding=1), nn.ReLU(), nn.Conv2d(C, C, 1)
                )
                for _ in range(LAYERS)
            ]
        )
        self.conv_out = nn.Conv2d(C, channels, kernel_size=1)
        self.shuffle = nn.PixelShuffle(downscale_factor)

    def forward(self, images):
        x = self.conv_in(self.unshuffle(images))
        features = []
        for block in self.body:
            x = block(x) + x
            features.append(x)
        restored = self.shuffle(self.conv_out(torch.stack(features).mean(0)))
        return F.l1_loss(restored, images)


@model(
    "patches",
    "einops layer in a sequential",
    "lucidrains/vit-pytorch, vit_pytorch/vit.py",
    batch=images,
    needs="einops",
)
class RearrangedPatches(nn.Module):
    def __init__(self):
        super().__init__()
        from einops.layers.torch import Rearrange, Reduce

        self.to_patch_embedding = nn.Sequential(
            Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=P, p2=P),
            nn.LayerNorm(3 * P * P),
            nn.Linear(3 * P * P, C),
            nn.LayerNorm(C),
        )
        self.transformer = Body()
        self.mlp_head = nn.Sequential(Reduce("b n d -> b d", "mean"), nn.Linear(C, 10))

    def forward(self, images, labels):
        x = self.transformer(self.to_patch_embedding(images))
        return F.cross_entropy(self.mlp_head(x), labels)


class ResidualMaps(nn.Module):
    """Four residual convolutions of [b, c, 8, 8] behind a stem."""

    def __init__(self, width=C):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(LAYERS))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + F.relu(block(x))
        return x


class AdaptiveConcatPool2d(nn.Module):
    def __init__(self, size=None):
        super().__init__()
        self.size = size or 1
        self.ap = nn.AdaptiveAvgPool2d(self.size)
        self.mp = nn.AdaptiveMaxPool2d(self.size)

    def forward(self, x):
        return torch.cat([self.mp(x), self.ap(x)], 1)


@model(
    "pooling and resizing",
    "adaptive largest and mean concatenated",
    "fastai/fastai, fastai/layers.py, AdaptiveConcatPool2d",
    batch=images,
)
class ConcatPool(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            ResidualMaps(), AdaptiveConcatPool2d(), nn.Flatten(), nn.BatchNorm1d(2 * C),
            nn.Linear(2 * C, C, bias=False), nn.ReLU(inplace=True), nn.Linear(C, 10),
        )  # fmt: skip

    def forward(self, images, labels):
        return F.cross_entropy(self.layers(images), labels)


@model(
    "pooling and resizing",
    "interpolate to the size of the finer map",
    "pytorch/vision, torchvision/ops/feature_pyramid_network.py",
    batch=images,
)
class FeaturePyramid(nn.Module):
    def __init__(self, in_channels_list=(8, 16, 24, 32), out_channels=16):
        super().__init__()
        widths = (3, *in_channels_list)
        self.stages = nn.ModuleList(
            [
                nn.Conv2d(widths[i], widths[i + 1], 3, stride=2 if i else 1, padding=1)
                for i in range(len(in_channels_list))
            ]
        )
        self.inner_blocks, self.layer_blocks = nn.ModuleList(), nn.ModuleList()
        for in_channels in in_channels_list:
            self.inner_blocks.append(nn.Conv2d(in_channels, out_channels, 1))
            self.layer_blocks.append(nn.Conv2d(out_channels, out_channels, 3, padding=1))
        self.body, self.fc = Body(out_channels), nn.Linear(out_channels, 10)

    def forward(self, images, labels):
        x, maps = images, []
        for stage in self.stages:
            x = F.relu(stage(x))
            maps.append(x)
        last_inner = self.inner_blocks[-1](maps[-1])
        results = [self.layer_blocks[-1](last_inner)]
        for idx in range(len(maps) - 2, -1, -1):
            inner_lateral = self.inner_blocks[idx](maps[idx])
            feat_shape = inner_lateral.shape[-2:]
            inner_top_down = F.interpolate(last_inner, size=feat_shape, mode="nearest")
            last_inner = inner_lateral + inner_top_down
            results.insert(0, self.layer_blocks[idx](last_inner))
        pooled = [self.body(r.permute(0, 2, 3, 1)).mean((1, 2)) for r in results]
        return F.cross_entropy(self.fc(sum(pooled)), labels)


@model(
    "pooling and resizing",
    "pixel shuffle back from a smaller picture",
    "pytorch/examples, super_resolution/model.py",
    batch=lambda step=0: {"images": images(step)["images"]},
)
class SuperResolution(nn.Module):
    def __init__(self, upscale_factor=2):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(3, 32, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(32, 32, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(32, 16, (3, 3), (1, 1), (1, 1))
        self.conv4 = nn.Conv2d(16, 3 * upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        self.upscale_factor = upscale_factor

    def forward(self, images):
        scale = 1 / self.upscale_factor
        x = F.interpolate(images, scale_factor=scale, mode="bicubic", align_corners=False)
        base = F.interpolate(x, images.shape[-2:], mode="bilinear", align_corners=True)
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        x = self.relu(self.conv3(x))
        x = self.pixel_shuffle(self.conv4(x))
        return F.mse_loss(base + x, images)


class AttentionPool2d(nn.Module):
    def __init__(self, spacial_dim, embed_dim, num_heads, output_dim):
        super().__init__()
        self.positional_embedding = nn.Parameter(
            torch.randn(spacial_dim**2 + 1, embed_dim) / embed_dim**0.5
        )
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.c_proj = nn.Linear(embed_dim, output_dim)
        self.num_heads = num_heads

    def forward(self, x):
        x = x.flatten(start_dim=2).permute(2, 0, 1)
        x = torch.cat([x.mean(dim=0, keepdim=True), x], dim=0)
        x = x + self.positional_embedding[:, None, :].to(x.dtype)
        x, _ = F.multi_head_attention_forward(
            query=x[:1],
            key=x,
            value=x,
            embed_dim_to_check=x.shape[-1],
            num_heads=self.num_heads,
            q_proj_weight=self.q_proj.weight,
            k_proj_weight=self.k_proj.weight,
            v_proj_weight=self.v_proj.weight,
            in_proj_weight=None,
            in_proj_bias=torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]),
            bias_k=None,
            bias_v=None,
            add_zero_attn=False,
            dropout_p=0,
            out_proj_weight=self.c_proj.weight,
            out_proj_bias=self.c_proj.bias,
            use_separate_proj_weight=True,
            training=self.training,
            need_weights=False,
        )
        return x.squeeze(0)


@model(
    "pooling and resizing",
    "attention from the mean over all places",
    "openai/CLIP, clip/model.py, AttentionPool2d",
    batch=images,
)
class AttentionPooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.maps, self.attnpool = ResidualMaps(), AttentionPool2d(8, C, H, 10)

    def forward(self, images, labels):
        return F.cross_entropy(self.attnpool(self.maps(images)), labels)


class GeM(nn.Module):
    def __init__(self, p=3, eps=1e-6):
        super().__init__()
        self.p = nn.Parameter(torch.ones(1) * p)
        self.eps = eps

    def forward(self, x):
        size = (x.size(-2), x.size(-1))
        return F.avg_pool2d(x.clamp(min=self.eps).pow(self.p), size).pow(1.0 / self.p)


@model(
    "pooling and resizing",
    "mean of a learned power over all places",
    "filipradenovic/cnnimageretrieval-pytorch, cirtorch/layers/functional.py",
    batch=images,
)
class PowerPooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.pool = ResidualMaps(), GeM()
        self.whiten = nn.Linear(C, C)
        self.classes = nn.Parameter(torch.randn(10, C))

    def forward(self, images, labels):
        o = self.pool(self.features(images)).squeeze(-1).squeeze(-1)
        o = o / (torch.norm(o, p=2, dim=1, keepdim=True) + 1e-6).expand_as(o)
        o = F.normalize(self.whiten(o))
        return F.cross_entropy(10 * o @ F.normalize(self.classes).t(), labels)
