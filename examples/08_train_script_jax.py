"""08: a training script of one's own in JAX, with optax; ten lines of it are autopar's.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/08_train_script_jax.py \
        --cluster examples/clusters/cpu_4.yaml --fix dp_shard=2,tp=2

SIGTERM lets it save and end. Started again, on as many devices as there are then and by the plan
that is best for them, it goes on where it was. A small GPT learns the standard library's source.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 256, 32, 32, 4, 2  # a token is a byte
Params = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", default="local", help="a file; local: this machine")
    parser.add_argument("--fix", default="", help="what is decided already: tp=2,zero=3")
    parser.add_argument("--output", type=Path, default=Path("job"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16, help="samples of a step, in all")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--evaluate-every", type=int, default=20)
    return parser.parse_args()


def batch_of(text: bytes, seed: int, samples: int) -> dict[str, np.ndarray]:
    """Stretches of the text; targets are one byte further on."""
    starts = random.Random(seed).choices(range(len(text) - LENGTH), k=samples)
    rows = np.array([list(text[start : start + LENGTH + 1]) for start in starts], np.int32)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def init(key: jax.Array, dtype: str) -> Params:
    """Fresh parameters; those in "blocks" have a first dim of LAYERS."""
    shapes = {
        "embedding": (VOCABULARY, WIDTH),
        "positions": (LENGTH, WIDTH),
        "blocks": {
            "norm1": (LAYERS, WIDTH), "qkv": (LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS),
            "out": (LAYERS, WIDTH, WIDTH), "norm2": (LAYERS, WIDTH),
            "up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH),
        },
        "norm": (WIDTH,),
        "head": (WIDTH, VOCABULARY),
    }  # fmt: skip
    leaves, tree = jax.tree.flatten_with_path(shapes, is_leaf=lambda s: isinstance(s, tuple))
    keys = jax.random.split(key, len(leaves))
    arrays = [
        jnp.ones(shape, dtype) if "norm" in path[-1].key
        else 0.05 * jax.random.normal(one, shape, dtype)
        for one, (path, shape) in zip(keys, leaves, strict=True)
    ]  # fmt: skip
    return jax.tree.unflatten(tree, arrays)


def norm(weight: jax.Array, x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * weight


def block(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
    q, k, v = jnp.einsum("bsw,wchd->cbhsd", norm(p["norm1"], x), p["qkv"])
    scores = jnp.einsum("bhsd,bhtd->bhst", q, k) * (WIDTH // HEADS) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bhst,bhtd->bshd", jax.nn.softmax(scores), v)
    x = x + mixed.reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(norm(p["norm2"], x) @ p["up"]) @ p["down"], None


def loss(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean cross-entropy of the next byte."""
    x = params["embedding"][batch["tokens"]] + params["positions"]
    x, _ = jax.lax.scan(block, x, params["blocks"])
    logits = norm(params["norm"], x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def main(args: argparse.Namespace) -> None:
    jax.config.update("jax_enable_x64", args.dtype == "float64")
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    held_out, text = text[:65536], text[65536:]
    params = init(jax.random.key(0), args.dtype)

    schedule = optax.warmup_cosine_decay_schedule(0.0, args.lr, args.warmup, args.steps)
    decays = jax.tree.map_with_path(lambda path, _: "norm" not in path[-1].key, params)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=args.weight_decay, mask=decays),
    )
    example, out = batch_of(text, 0, args.batch_size), args.output
    given = {"params": params, "optimizer": optimizer}
    plan = autopar.plan(loss, example, args.cluster, args.fix, out / "plan", **given)
    trainer = autopar.load(plan, model=loss, **given)
    trainer.keep_checkpoints(out / "checkpoints", every=args.save_every, keep=2)

    while trainer.step_number < args.steps:
        value = trainer.step(batch_of(text, trainer.step_number, args.batch_size))
        step = trainer.step_number
        print(f"step {step}  loss {float(value):.15f}", flush=True)
        if step % args.evaluate_every == 0:
            value = trainer.evaluate(batch_of(held_out, 0, 50))
            print(f"step {step}  held out {float(value):.15f}", flush=True)
    leaves = jax.tree.leaves_with_path(trainer.params)
    np.savez(out / "weights.npz", **{jax.tree_util.keystr(path): leaf for path, leaf in leaves})


if __name__ == "__main__":
    main(arguments())
