"""Every trainer whose settings are read, and which of them a file is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from autopar.files.imports import accelerate, deepspeed, megatron, torchtitan
from autopar.files.imports.settings import NotImported, Settings
from autopar.nouns.errors import did_you_mean

READERS: Mapping[str, Callable[[str, str], Settings]] = MappingProxyType(
    {
        "torchtitan": torchtitan.read,
        "megatron": megatron.read,
        "accelerate": accelerate.read,
        "deepspeed": deepspeed.read,
    }
)
ENDINGS = {
    ".py": "torchtitan",
    ".toml": "torchtitan",
    ".json": "deepspeed",
    ".yaml": "accelerate",
    ".yml": "accelerate",
}
"""What is none of these are Megatron's arguments."""


def read(file: str | Path, trainer: str | None = None) -> Settings:
    """The layout that ``file`` says; ``trainer``: whose it is, else its ending tells.

    Raises:
        NotImported: no such file or trainer, or settings that are not understood.
    """
    place = Path(file)
    if trainer is not None and trainer not in READERS:
        raise NotImported(
            f"--from {trainer}: not read. {did_you_mean(trainer, READERS)}There are "
            f"{', '.join(READERS)}"
        )
    try:
        text = place.read_text()
    except UnicodeDecodeError:
        raise NotImported(f"{place} is no text (UTF-8)") from None
    except OSError as error:
        raise NotImported(
            f"cannot read {place}: {error.strerror}; give a torchtitan recipe (.py, .toml), a file "
            "of Megatron's arguments, an Accelerate YAML or a DeepSpeed JSON"
        ) from None
    return READERS[trainer or ENDINGS.get(place.suffix, "megatron")](text, place.name)
