"""Architecture files: a transformer's sizes as YAML.

layers: 80
hidden: 8192
heads: 64
kv_heads: 8
ffn: 28672
vocab: 128256
sequence: 8192
gated: true
"""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autopar.files.file_errors import sentences, unique_yaml, yaml_sentence
from autopar.frontends.family.arch import Arch, LatentAttention
from autopar.nouns.errors import UserError


class ArchFileError(UserError):
    """An architecture file that cannot be used; the message says what to change."""


class _LatentText(BaseModel):
    model_config = ConfigDict(extra="forbid")

    q_rank: int = Field(ge=0, le=1_000_000)
    kv_rank: int = Field(gt=0, le=1_000_000)
    rope_dim: int = Field(gt=0, le=65_536)
    value_dim: int = Field(gt=0, le=65_536)


class _ArchText(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str | None = None
    layers: int = Field(gt=0, le=100_000)
    hidden: int = Field(gt=0, le=10_000_000)
    heads: int = Field(gt=0, le=100_000)
    kv_heads: int | None = Field(default=None, gt=0)
    ffn: int = Field(gt=0, le=100_000_000)
    vocab: int = Field(gt=0, le=100_000_000)
    sequence: int = Field(gt=0, le=1_000_000_000)
    gated: bool = True
    head_dim: int = Field(default=0, ge=0, le=65_536)
    experts: int = Field(default=0, ge=0, le=100_000)
    top_k: int = Field(default=0, ge=0, le=100_000)
    shared_experts: int = Field(default=0, ge=0, le=1_000)
    dense_layers: int = Field(default=0, ge=0, le=100_000)
    dense_ffn: int = Field(default=0, ge=0, le=100_000_000)
    tied: bool = False
    causal: bool = True
    positions: bool = False
    biases: bool | None = None
    latent: _LatentText | None = None
    window: int = Field(default=0, ge=0, le=1_000_000_000)
    windowed_layers: int = Field(default=0, ge=0, le=100_000)


def load_arch(path: str | Path) -> Arch:
    """The architecture that the YAML file at `path` describes.

    Raises:
        ArchFileError: no such file, unknown or missing keys, figures that cannot be.
    """
    file = Path(path)
    if not file.is_file():
        raise ArchFileError(
            f"no architecture file {str(path)!r}; give a YAML file with layers, ..."
        )
    try:
        data = unique_yaml(file.read_text())
        if not isinstance(data, dict):
            raise ArchFileError(f"{path}: expected `layers:`, `hidden:`, `heads:` and so on")
        text = _ArchText.model_validate(data)
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ArchFileError(f"{path}: cannot be read as text: {error}") from None
    except yaml.YAMLError as error:
        raise ArchFileError(f"{path}: {yaml_sentence(error)}") from None
    except ValidationError as error:
        raise ArchFileError(f"{path}: {'; '.join(sentences(error, _ArchText, {}))}") from None
    wrong = _contradictions(text)
    if wrong:
        raise ArchFileError(f"{path}: {'; '.join(wrong)}")
    figures = text.model_dump(exclude={"latent"})
    figures["name"] = text.name or file.stem
    figures["kv_heads"] = text.kv_heads or text.heads
    figures["seq"] = figures.pop("sequence")
    if text.latent is not None:
        figures["latent"] = LatentAttention(**text.latent.model_dump())
    return Arch(**figures)


def _contradictions(text: _ArchText) -> list[str]:
    """One sentence for every pair of figures that cannot both be."""
    wrong = []
    if text.heads % (text.kv_heads or text.heads):
        wrong.append(f"kv_heads {text.kv_heads} does not divide heads {text.heads}")
    if not text.head_dim and text.latent is not None:
        wrong.append("latent attention needs head_dim, the width of a query's head")
    elif not text.head_dim and text.hidden % text.heads:
        wrong.append(f"heads {text.heads} does not divide hidden {text.hidden}; give head_dim")
    if text.latent is not None and 0 < text.head_dim <= text.latent.rope_dim:
        wrong.append(f"head_dim {text.head_dim} must be above rope_dim {text.latent.rope_dim}")
    if bool(text.experts) != bool(text.top_k) or text.top_k > text.experts:
        wrong.append(
            f"experts {text.experts} and top_k {text.top_k}: give both, top_k at most experts"
        )
    for name in ("shared_experts", "dense_layers", "dense_ffn"):
        if getattr(text, name) and not text.experts:
            wrong.append(f"{name} {getattr(text, name)} for a model without experts")
    for name in ("dense_layers", "windowed_layers"):
        if getattr(text, name) > text.layers:
            wrong.append(f"{name} {getattr(text, name)} of {text.layers} layers")
    if bool(text.window) != bool(text.windowed_layers):
        wrong.append(
            f"window {text.window} and windowed_layers {text.windowed_layers}: give both or none"
        )
    return wrong
