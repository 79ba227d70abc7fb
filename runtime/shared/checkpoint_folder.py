"""The folder of a checkpoint, in either framework: whole or not at all, and what is in it.

    checkpoint.json   format, framework, and the size and SHA-256 of every other file; written last
    .metadata, *.distcp   PyTorch: a checkpoint of `torch.distributed.checkpoint`
    state.npz, *.state.npz   JAX: of one process, of each of several

`autopar.runtime.shared.save_target` says how one is made.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from autopar.nouns.errors import UserError

FORMAT = 1
STEP = re.compile(r"step-(\d+)")
"""What a checkpoint is called that a trainer keeps by itself."""
MANIFEST = "checkpoint.json"
DATA = {"torch": (".metadata", ".distcp"), "jax": ("state.npz",)}
"""How names of a framework's own files end."""
_CHUNK_BYTES = 1 << 20


class CheckpointError(UserError):
    """A checkpoint that is not there, not whole, of another model, or has nowhere to go."""


class Damaged(CheckpointError):
    """A checkpoint that is not as it was written: cut off, changed, mixed or with parts missing."""


@dataclass(frozen=True, slots=True)
class File:
    """What a file held when the checkpoint was written."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What ``checkpoint.json`` says; ``files`` by name, which are all in the one folder."""

    framework: str
    files: Mapping[str, File]

    def to_json(self) -> str:
        fields = {"format": FORMAT, **asdict(self)}
        return json.dumps({**fields, "sha256": _of_text(fields)}, indent=1, sort_keys=True) + "\n"


def _of_text(fields: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def file_of(path: Path) -> File:
    """Reads the whole of ``path``, about a second a GB and core."""
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size_bytes += len(chunk)
    return File(size_bytes, digest.hexdigest())


def find(folder: str | Path) -> Path:
    """Where the checkpoint ``folder`` lies: itself, or its last version if a write was cut off.

    Raises `CheckpointError` where there is none.
    """
    target = Path(folder).absolute()
    for place in (target, beside(target, "old")):
        if (place / MANIFEST).exists():
            return place
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file, and a checkpoint is a folder; give another one")
    parts = [name for name in names_in(target) if is_data(name)]
    if parts:
        raise Damaged(
            f"{target} has {parts[0]} but no {MANIFEST}, which is written last: it is part of a "
            "checkpoint, or one that an older autopar wrote. Copy the whole folder, or give "
            "another checkpoint"
        )
    missing = Damaged if target.is_dir() and STEP.fullmatch(target.name) else CheckpointError
    raise missing(
        f"no checkpoint in {target}: `autopar run --save {folder}` writes one, or trainer.save"
    )


def read_manifest(source: Path, framework: str) -> Manifest:
    """What the checkpoint ``source`` says of itself. Raises `CheckpointError`."""
    file = source / MANIFEST
    again = "copy the folder again, or give another checkpoint"
    try:
        fields = json.loads(file.read_text())
        if fields["format"] != FORMAT:
            raise CheckpointError(
                f"{file}: checkpoint format {fields['format']!r}, this tool reads {FORMAT}; load "
                "it with the version that wrote it, or give another checkpoint"
            )
        kept = fields.pop("sha256")
        files = {str(name): File(**one) for name, one in fields["files"].items()}
        manifest = Manifest(str(fields["framework"]), files)
    except OSError as error:
        raise Damaged(f"{file} cannot be read: {error.strerror}; {again}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise Damaged(f"{file} is damaged ({why}); {again}") from None
    if kept != _of_text(fields):
        raise Damaged(
            f"{file} is damaged: its SHA-256 is {_of_text(fields)[:12]}... and not the "
            f"{kept[:12]!s}... that was written; {again}"
        )
    if manifest.framework != framework:
        raise CheckpointError(
            f"{source} is a checkpoint of {manifest.framework}, the plan is for {framework}; give "
            f"one that a {framework} plan wrote"
        )
    return manifest


def check_names(source: Path, manifest: Manifest) -> None:
    """Raises `Damaged` where files are missing or have another size, or a data file is
    there that was not written with the others."""
    again = "Copy the folder again, or give another checkpoint"
    there = names_in(source)
    for name, wanted in manifest.files.items():
        if name not in there:
            raise Damaged(
                f"{source / name} is missing: the checkpoint has {len(manifest.files)} files, and "
                f"this one had {wanted.size_bytes} bytes. {again}"
            )
        size_bytes = (source / name).stat().st_size
        if size_bytes != wanted.size_bytes:
            raise Damaged(
                f"{source / name} has {size_bytes} bytes and had {wanted.size_bytes} when it was "
                f"written. {again}"
            )
    foreign = [n for n in there if n not in manifest.files and is_data(n)]
    if foreign:
        raise Damaged(
            f"{source / foreign[0]} was not written with the others, by {MANIFEST}: two "
            "checkpoints may be mixed there. Remove it, or copy the folder again"
        )


def check_digests(source: Path, manifest: Manifest, names: Sequence[str]) -> None:
    """Reads the files ``names``. Raises `Damaged` where one is not as it was written."""
    for name in names:
        wanted = manifest.files[name]
        try:
            actual = file_of(source / name)
        except OSError as error:
            raise Damaged(
                f"{source / name} cannot be read: {error.strerror}; copy the folder again, or give "
                "another checkpoint"
            ) from None
        if actual != wanted:
            raise Damaged(
                f"{source / name} is damaged: its SHA-256 is {actual.sha256[:12]}... and was "
                f"{wanted.sha256[:12]}... when it was written. Copy the folder again, or give "
                "another checkpoint"
            )


def check_source(folder: str | Path, framework: str) -> None:
    """Refuses early what loading would refuse late, as far as sizes tell. `CheckpointError`."""
    source = find(folder)
    check_names(source, read_manifest(source, framework))


def beside(target: Path, what: str) -> Path:
    """``.<name>.<what>`` in the same folder."""
    return target.with_name(f".{target.name}.{what}")


def names_in(folder: Path) -> list[str]:
    """What lies in ``folder``, sorted; nothing where there is none."""
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def is_data(name: str) -> bool:
    """Whether a file is called as those of some framework's checkpoint are."""
    return any(name.endswith(end) for ends in DATA.values() for end in ends)
