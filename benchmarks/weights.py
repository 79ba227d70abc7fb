"""Loading and saving the Hugging Face weights of a 1B-shaped Llama, each rank its own pieces.

    python -m benchmarks.weights [--layers 16] [--json]

Two processes hold halves of every matrix, in bfloat16, in memory. Each saves its pieces, zeroes
them, loads them again and compares: bit for bit. Growth is the peak of resident memory beyond what
the process held before, beside the largest tensor of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

from benchmarks.figures import Target, show

WIDTH, INNER, VOCABULARY, HEADS = 2048, 8192, 128256, 512


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Llama 3.2 1B, embedding and head tied."""
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    each = {
        "self_attn.q_proj": (WIDTH, WIDTH),
        "self_attn.k_proj": (HEADS, WIDTH),
        "self_attn.v_proj": (HEADS, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }
    for layer in range(layers):
        made |= {f"model.layers.{layer}.{n}.weight": shape for n, shape in each.items()}
    return made | {"model.norm.weight": (WIDTH,)}


def digest(tensor: Any) -> int:
    """CRC-32 of its bytes."""
    import torch

    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)


def work(folder: Path, layers: int) -> None:
    """One of two ranks; it leaves ``row-<rank>.json``."""
    import torch
    import torch.distributed as dist

    from autopar.runtime.jobs.host_memory import forget_peak, resident_bytes
    from autopar.runtime.pytorch.checkpoint_pieces import Piece
    from autopar.runtime.pytorch.parameters import cut, region_shape
    from autopar.runtime.pytorch.training.load import start
    from autopar.runtime.pytorch.weights import load_weights, save_weights

    start("cpu")
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    pieces: dict[str, Piece] = {}
    for name, shape in shapes(layers).items():
        region = tuple(slice(0, n) for n in shape)
        if len(shape) == 2:  # rows of some, columns of those that sum
            region = cut(region, int(name.endswith(("o_proj.weight", "down_proj.weight"))), 2, rank)
        own = torch.empty(region_shape(region), dtype=torch.bfloat16)
        if len(shape) == 2:
            own.view(torch.int16).random_(0, 1 << 14, generator=draw)
        else:
            own.fill_(1.5)
        pieces[name] = Piece(own, region, shape)
    wanted = {name: digest(piece.tensor) for name, piece in pieces.items()}
    row: dict[str, Any] = {"rank": rank}
    row["pieces_bytes"] = sum(piece.tensor.nbytes for piece in pieces.values())
    row["largest_tensor_bytes"] = 2 * VOCABULARY * WIDTH

    def measured(name: str, do: Any) -> None:
        dist.barrier()
        forget_peak()
        before, begin = resident_bytes(), time.perf_counter()
        do()
        row[f"{name}_s"] = time.perf_counter() - begin
        row[f"{name}_growth_bytes"] = resident_bytes(peak=True) - before

    measured("save", lambda: save_weights(folder, pieces))
    for piece in pieces.values():
        piece.tensor.zero_()
    measured("load", lambda: load_weights(folder, pieces, {}, frozenset()))
    row["equal"] = all(digest(piece.tensor) == wanted[name] for name, piece in pieces.items())
    (folder / f"row-{rank}.json").write_text(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Path(options.worker), options.layers)
        return
    with tempfile.TemporaryDirectory() as scratch:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        run += ["-m", "benchmarks.weights", f"--layers={options.layers}", "--worker", scratch]
        subprocess.run(run, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rows = [json.loads((Path(scratch) / f"row-{rank}.json").read_text()) for rank in (0, 1)]
    largest = rows[0]["largest_tensor_bytes"]
    growth = max(row[f"{name}_growth_bytes"] for row in rows for name in ("save", "load"))
    targets = [
        Target("growth / largest tensor", growth / largest, 1.0),
        Target("pieces that came back otherwise", float(sum(not r["equal"] for r in rows)), 0.0),
    ]
    show(rows, targets, options.json)


if __name__ == "__main__":
    main()
