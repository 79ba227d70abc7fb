"""Weights as Hugging Face keeps them: safetensors files, read and written piece by piece.

A file is 8 bytes with the length of a JSON header, the header, and the tensors in row-major order:
https://huggingface.co/docs/safetensors. So every rank reads, and writes, the bytes of its own
pieces, and none has more of a tensor than that in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.nouns.errors import UserError
from autopar.runtime.pytorch.agreement import together
from autopar.runtime.pytorch.checkpoint_pieces import Piece, Pieces
from autopar.runtime.pytorch.parameters import Region, region_shape
from autopar.runtime.pytorch.recording import named_tensors
from autopar.runtime.pytorch.saved_names import Parts, in_parts

INDEX = "model.safetensors.index.json"
ONE = "model.safetensors"
SHARD_BYTES = 5 * 10**9
"""The size from which Hugging Face begins another file."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


Named = Sequence[tuple[str, Piece]]
"""Pieces by the names of files, a name as often as a rank has pieces of it."""


class WeightsError(UserError):
    """A folder whose weights are not the model's, or that cannot be read or written."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: its bytes begin at ``start``."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


def load_weights(
    folder: str | Path,
    pieces: Pieces,
    aliases: Mapping[str, str],
    optional: frozenset[str],
    parts: Parts = MappingProxyType({}),
) -> None:
    """Fills ``pieces``, by the model's names, each rank with its own bytes; a collective call.

    aliases:  other names of tied tensors, and the name that is in ``pieces``.
    optional: what the folder need not have: buffers. Files of another dtype are converted, as
              ``from_pretrained`` does. Raises `WeightsError` on every rank before anything changes.
    parts:    of tensors that the folder may have in parts instead.
    """
    source = Path(folder)
    stored = together(lambda: contents(source))
    every = in_parts(pieces, {n: p for n, p in parts.items() if n not in stored})
    ready = together(lambda: _matched(source, stored, every, aliases, optional))
    together(lambda: _read(ready, every))


def _matched(
    source: Path,
    stored: dict[str, Stored],
    pieces: Named,
    aliases: Mapping[str, str],
    optional: frozenset[str],
) -> dict[str, Stored]:
    for alias, name in aliases.items():
        if name not in stored and alias in stored:
            stored[name] = stored[alias]
    names = dict.fromkeys(name for name, _ in pieces)
    missing = [name for name in names if name not in stored and name not in optional]
    if missing:
        more = f" and {len(missing) - 3} more" if missing[3:] else ""
        raise WeightsError(
            f"{source} has no {', '.join(missing[:3])}{more}: it has {len(stored)} tensors, such "
            f"as {', '.join(list(stored)[:3])}. Give the weights of this model"
        )
    for name, piece in pieces:
        if name in stored and stored[name].shape != tuple(piece.shape):
            raise WeightsError(
                f"{name} is {list(stored[name].shape)} in {source} and {list(piece.shape)} in the "
                "model: give the weights of this model"
            )
    return stored


def aliases_of(model: nn.Module) -> dict[str, str]:
    """The other names of tied tensors, each with the first one, which the program has."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in named_tensors(model):
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
    return aliases


def contents(source: Path) -> dict[str, Stored]:
    """Every tensor of a folder by name. Raises `WeightsError`."""
    try:
        if (source / INDEX).is_file():
            files = set(json.loads((source / INDEX).read_text())["weight_map"].values())
        else:
            files = {file.name for file in source.glob("*.safetensors")}
        if not files:
            raise WeightsError(
                f"{source} has no {ONE} and no {INDEX}: give the folder that save_pretrained wrote"
            )
        tensors: dict[str, Stored] = {}
        for name in sorted(files):
            tensors |= _header(source / name)
        return tensors
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"the weights in {source} cannot be read: {error}") from None


def _header(file: Path) -> dict[str, Stored]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file.name} is no safetensors file, or was cut off")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    starts = {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}
    return {
        name: Stored(file, DTYPES[entry["dtype"]], tuple(entry["shape"]), starts[name])
        for name, entry in header.items()
    }


def _read(stored: Mapping[str, Stored], pieces: Named) -> None:
    opened: dict[Path, int] = {}
    try:
        for name, piece in pieces:
            if name not in stored or piece.empty:
                continue
            there = stored[name]
            if there.file not in opened:
                opened[there.file] = os.open(there.file, os.O_RDONLY)
            local = torch.empty(region_shape(piece.region), dtype=there.dtype)
            flat = _bytes(local)
            done = 0
            for offset, size in _runs(there.shape, piece.region, there.dtype.itemsize):
                done += _read_into(opened[there.file], flat[done : done + size], there, offset)
            with torch.no_grad():
                piece.tensor.copy_(local)
    except OSError as error:
        raise WeightsError(f"{error.filename}: {error.strerror}") from None
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    numbers: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


def _read_into(descriptor: int, into: memoryview, there: Stored, offset: int) -> int:
    count = os.preadv(descriptor, [into], there.start + offset)
    if count != len(into):
        raise WeightsError(f"{there.file} was cut off: it ends inside of a tensor")
    return count


def _runs(shape: tuple[int, ...], region: Region, itemsize: int) -> Iterator[tuple[int, int]]:
    """(offset, size) in bytes of every stretch of a region of a row-major tensor, in its order."""
    last = len(shape) - 1  # the innermost dim that is not whole, and what lies inside of it
    while last >= 0 and (region[last].start, region[last].stop) == (0, shape[last]):
        last -= 1
    if last < 0:
        yield 0, math.prod(shape) * itemsize
        return
    inner = math.prod(shape[last + 1 :]) * itemsize
    strides = [math.prod(shape[d + 1 :]) * itemsize for d in range(last)]
    size = (region[last].stop - region[last].start) * inner
    places = [0]
    for d in range(last):
        steps = range(region[d].start, region[d].stop)
        places = [base + i * strides[d] for base in places for i in steps]
    for base in places:
        yield base + region[last].start * inner, size


def save_weights(
    folder: str | Path,
    pieces: Pieces,
    shard_bytes: int = SHARD_BYTES,
    parts: Parts = MappingProxyType({}),
) -> None:
    """Writes ``pieces`` of all ranks as files of ``from_pretrained``, some of them in ``parts``; a
    collective call.

    The folder is one that all ranks see. Files of before are replaced when all are whole. Raises
    `WeightsError` on every rank.
    """
    target = Path(folder)
    mine = in_parts(pieces, parts)
    own = [(name, tuple(p.shape), p.tensor.dtype, p.region) for name, p in mine]
    every = [own]
    rank = 0
    if dist.is_initialized() and dist.get_world_size() > 1:
        every, rank = [own] * dist.get_world_size(), dist.get_rank()
        dist.all_gather_object(every, own)
    whole = {name: (shape, dtype) for part in every for name, shape, dtype, _ in part}
    files = _files(whole, target, shard_bytes)
    together(lambda: _begin(target, files) if rank == 0 else None)
    together(lambda: _write(files, _mine(every, rank, mine)))
    together(lambda: _finish(target, files) if rank == 0 else None)


Table = dict[str, Stored]


def _files(
    whole: Mapping[str, tuple[tuple[int, ...], torch.dtype]], target: Path, shard_bytes: int
) -> dict[Path, tuple[bytes, Table]]:
    """Header and tensors of each file, by its place while it is written."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, (shape, dtype) in whole.items():
        own = math.prod(shape) * dtype.itemsize
        if shards[-1] and size + own > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += own
    names = {dtype: text for text, dtype in DTYPES.items()}
    made: dict[Path, tuple[bytes, Table]] = {}
    for number, shard in enumerate(shards, 1):
        file = ONE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in shard:
            shape, dtype = whole[name]
            size = math.prod(shape) * dtype.itemsize
            offsets = [at, at + size]
            header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": offsets}
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        part = target / f".{file}.part"
        table = {
            name: Stored(part, whole[name][1], whole[name][0], 8 + len(text) + entry[0])
            for name in shard
            for entry in [header[name]["data_offsets"]]
        }
        made[part] = (len(text).to_bytes(8, "little") + text, table)
    return made


def _begin(target: Path, files: Mapping[Path, tuple[bytes, Table]]) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True)
        for part, (header, _) in files.items():
            part.write_bytes(header)
    except OSError as error:
        raise WeightsError(f"cannot write {target}: {error.strerror}") from None


def _mine(every: list[Any], rank: int, pieces: Named) -> Iterator[tuple[str, Piece]]:
    """What this rank writes: of a piece that several hold the first one does."""
    first: dict[tuple[str, tuple[tuple[int, int], ...]], int] = {}
    for holder, own in enumerate(every):
        for name, _, _, region in own:
            first.setdefault((name, _ends(region)), holder)
    for name, piece in pieces:
        if first[name, _ends(piece.region)] == rank and not piece.empty:
            yield name, piece


def _ends(region: Region) -> tuple[tuple[int, int], ...]:
    """What slices are looked up by."""
    return tuple((part.start, part.stop) for part in region)


def _write(files: Mapping[Path, tuple[bytes, Table]], mine: Iterator[tuple[str, Piece]]) -> None:
    tables = {name: stored for _, table in files.values() for name, stored in table.items()}
    opened = {part: os.open(part, os.O_WRONLY) for part in files}
    try:
        for name, piece in mine:
            there = tables[name]
            local = piece.tensor.detach().cpu().contiguous()
            flat = _bytes(local)
            done = 0
            for offset, size in _runs(there.shape, piece.region, there.dtype.itemsize):
                os.pwrite(opened[there.file], flat[done : done + size], there.start + offset)
                done += size
        for descriptor in opened.values():
            os.fsync(descriptor)
    except OSError as error:
        raise WeightsError(f"cannot write the weights: {error.strerror}") from None
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def _finish(target: Path, files: Mapping[Path, tuple[bytes, Table]]) -> None:
    """Puts the files in their places, the index last."""
    for old in (*target.glob("model*.safetensors"), target / INDEX):
        old.unlink(missing_ok=True)
    places: dict[str, str] = {}
    total = 0
    for part, (header, table) in files.items():
        name = part.name.removeprefix(".").removesuffix(".part")
        total += part.stat().st_size - len(header)
        part.rename(target / name)
        places |= dict.fromkeys(table, name)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")
