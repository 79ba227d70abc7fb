"""Graphs, tables and trees of features in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.jax_zoo_models.frame import SAMPLES, Parts, classes, drawn, kind, numbers
from benchmarks.jax_zoo_models.physics import mlp, mlp_shapes

W = 32


@kind("DLRM", "plain JAX", "github.com/facebookresearch/dlrm, dlrm_s_pytorch.py")
def dlrm():
    """Bags of rows summed in several tables, every pair multiplied, two MLPs."""
    tables, bag, rows = 4, 3, 64

    def loss(params, batch):
        dense = jax.nn.relu(mlp(params["bottom"], batch["dense"], jax.nn.relu))
        bags = [
            jnp.take(table, batch["sparse"][:, i], axis=0).sum(axis=1)
            for i, table in enumerate(params["tables"])
        ]
        t = jnp.stack([dense, *bags], axis=1)
        z = jnp.einsum("bid,bjd->bij", t, t)
        li, lj = jnp.tril_indices(tables + 1, k=-1)
        r = jnp.concatenate([dense, z[:, li, lj]], axis=1)
        logit = mlp(params["top"], r, jax.nn.relu)[:, 0]
        y = batch["click"]
        return jnp.mean(jax.nn.relu(logit) - logit * y + jnp.log1p(jnp.exp(-jnp.abs(logit))))

    shapes = {
        "bottom": mlp_shapes(8, W, 16),
        "tables": [(rows, 16)] * tables,
        "top": mlp_shapes(16 + 10, W, 1),
    }

    def batch(draws):
        return {
            "dense": numbers(draws, 8),
            "sparse": classes(draws, rows, tables, bag),
            "click": (draws.uniform(size=SAMPLES) > 0.5).astype(np.float32),
        }

    return Parts(lambda key: drawn(key, shapes), loss, batch)


@kind("graph network", "plain JAX", "github.com/google-deepmind/jraph, jraph/_src/models.py")
def graph_network():
    """Messages along edges, summed at nodes by segment_sum; one graph a sample, padded."""
    nodes, edges = 8, 16

    def layer(p, x, e, senders, receivers):
        e = mlp(p["edge"], jnp.concatenate([e, x[senders], x[receivers]], axis=-1), jax.nn.relu)
        sent = jax.ops.segment_sum(e, senders, num_segments=nodes)
        received = jax.ops.segment_sum(e, receivers, num_segments=nodes)
        x = x + mlp(p["node"], jnp.concatenate([x, sent, received], axis=-1), jax.nn.relu)
        return x, e

    def loss(params, batch):
        def energy(x, e, senders, receivers):
            x, e = x @ params["in_node"], e @ params["in_edge"]
            for p in params["layers"]:
                x, e = layer(p, x, e, senders, receivers)
            return mlp(params["out"], x.sum(axis=0), jax.nn.relu)[0]

        graph = (batch["nodes"], batch["edges"], batch["senders"], batch["receivers"])
        return jnp.mean((jax.vmap(energy)(*graph) - batch["energy"]) ** 2)

    one = {"edge": mlp_shapes(3 * W, W, W), "node": mlp_shapes(3 * W, W, W)}
    shapes = {
        "in_node": (4, W),
        "in_edge": (3, W),
        "layers": [one] * 2,
        "out": mlp_shapes(W, W, 1),
    }

    def batch(draws):
        return {
            "nodes": numbers(draws, nodes, 4),
            "edges": numbers(draws, edges, 3),
            "senders": classes(draws, nodes, edges),
            "receivers": classes(draws, nodes, edges),
            "energy": numbers(draws),
        }

    return Parts(lambda key: drawn(key, shapes), loss, batch)


@kind("graph attention", "plain JAX", "github.com/google-deepmind/jraph, jraph/_src/models.py: GAT")
def graph_attention():
    """Softmax over the edges that reach a node, by segment_max and segment_sum."""
    nodes, edges, heads = 8, 24, 4

    def softmax(logits, segments):
        top = jax.ops.segment_max(logits, segments, num_segments=nodes)
        shifted = jnp.exp(logits - jax.lax.stop_gradient(top)[segments])
        return shifted / jax.ops.segment_sum(shifted, segments, num_segments=nodes)[segments]

    def loss(params, batch):
        def logits_of(x, senders, receivers):
            for p in params["layers"]:
                h = jnp.einsum("nc,chd->nhd", x, p["w"])
                score = jnp.concatenate([h[senders], h[receivers]], axis=-1) @ p["a"]
                weight = softmax(jax.nn.leaky_relu(score, 0.2), receivers)
                h = jax.ops.segment_sum(weight[..., None] * h[senders], receivers, nodes)
                x = jax.nn.elu(h.reshape(nodes, -1))
            return x @ params["out"]

        logits = jax.vmap(logits_of)(batch["nodes"], batch["senders"], batch["receivers"])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], -1)
        return -picked.mean()

    def layer(k):
        return {"w": (k, heads, 8), "a": (16,)}

    shapes = {"layers": [layer(8), layer(W)], "out": (W, 5)}

    def batch(draws):
        loops = np.tile(np.arange(nodes), (SAMPLES, 1))
        ends = [np.concatenate([loops, classes(draws, nodes, edges - nodes)], 1) for _ in range(2)]
        return {
            "nodes": numbers(draws, nodes, 8),
            "senders": ends[0].astype(np.int32),
            "receivers": ends[1].astype(np.int32),
            "labels": classes(draws, 5, nodes),
        }

    return Parts(lambda key: drawn(key, shapes), loss, batch)
