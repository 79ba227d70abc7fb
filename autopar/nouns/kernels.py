"""Kernels as a plan names them: ``attention by cudnn``, the kind of op and who computes it."""

from __future__ import annotations

from collections.abc import Mapping

_BY = " by "


def kernel_text(kind: str, name: str) -> str:
    return f"{kind}{_BY}{name}"


def kernel_of(text: str) -> tuple[str, str]:
    """(kind, name) of `kernel_text`; the name is empty where it is none."""
    kind, _, name = text.partition(_BY)
    return kind, name


def kernels_text(kernels: Mapping[str, str]) -> str:
    """``attention by cudnn, gated_activation by triton``, each once."""
    return ", ".join(sorted(set(kernels.values())))
