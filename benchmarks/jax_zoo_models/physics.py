"""Fields, flows and differential equations in plain JAX."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.jax_zoo_models.frame import SAMPLES, Parts, drawn, kind, numbers

W = 32


def mlp_shapes(*sizes):
    return [{"w": (k, n), "b": (n,)} for k, n in itertools.pairwise(sizes)]


def mlp(params, x, activation=jnp.tanh):
    for p in params[:-1]:
        x = activation(x @ p["w"] + p["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


@kind("NeRF", "plain JAX", "github.com/bmild/nerf, run_nerf.py (JAX: google-research/jaxnerf)")
def nerf():
    """Rays of points at several scales of sines, densities and colours, summed by transmittance."""
    points = 8

    def encoded(x, degrees):
        scales = jnp.array([2.0**i for i in range(degrees)])
        xb = jnp.reshape((x[..., None, :] * scales[:, None]), [*x.shape[:-1], -1])
        four = jnp.sin(jnp.concatenate([xb, xb + 0.5 * jnp.pi], axis=-1))
        return jnp.concatenate([x, four], axis=-1)

    def loss(params, batch):
        origins, directions = batch["origins"], batch["directions"]
        t = jnp.linspace(2.0, 6.0, points)
        t = jnp.broadcast_to(t, (origins.shape[0], points)) + batch["jitter"]
        xyz = origins[:, None, :] + t[..., None] * directions[:, None, :]
        h = x = encoded(xyz, 4)
        for i, p in enumerate(params["trunk"]):
            h = jax.nn.relu(h @ p["w"] + p["b"])
            h = jnp.concatenate([h, x], axis=-1) if i == 1 else h
        sigma = jax.nn.relu(h @ params["sigma"])[..., 0]
        view = directions / jnp.linalg.norm(directions, axis=-1, keepdims=True)
        view = jnp.repeat(encoded(view, 2)[:, None], points, axis=1)
        colour = jax.nn.sigmoid(mlp(params["colour"], jnp.concatenate([h, view], -1), jax.nn.relu))
        gaps = jnp.concatenate([t[..., 1:] - t[..., :-1], jnp.full_like(t[..., :1], 1e2)], -1)
        gaps = gaps * jnp.linalg.norm(directions[..., None, :], axis=-1)
        alpha = 1.0 - jnp.exp(-sigma * gaps)
        through = jnp.cumprod(1.0 - alpha[..., :-1] + 1e-10, axis=-1)
        through = jnp.concatenate([jnp.ones_like(through[..., :1]), through], axis=-1)
        seen = ((alpha * through)[..., None] * colour).sum(axis=-2)
        return jnp.square(seen - batch["pixels"]).mean()

    inputs = 3 + 2 * 3 * 4
    trunk = mlp_shapes(inputs, W, W) + mlp_shapes(W + inputs, W)
    colour = mlp_shapes(W + 3 + 12, W, 3)
    shapes = {"trunk": trunk, "sigma": (W, 1), "colour": colour}

    def batch(draws):
        return {
            "origins": numbers(draws, 3),
            "directions": numbers(draws, 3),
            "jitter": draws.uniform(0, 0.5, (SAMPLES, points)).astype(np.float32),
            "pixels": draws.uniform(size=(SAMPLES, 3)).astype(np.float32),
        }

    return Parts(lambda key: drawn(key, shapes), loss, batch)


@kind("PINN", "plain JAX", "github.com/PredictiveIntelligenceLab/jaxpi, examples/burgers/models.py")
def pinn():
    """Burgers' equation: first and second derivatives of the network stand in the loss."""

    def u(params, t, x):
        h = jnp.stack([t, x])
        h = jnp.concatenate([jnp.cos(h @ params["fourier"]), jnp.sin(h @ params["fourier"])])
        return mlp(params["mlp"], h)[0]

    def residual(params, t, x):
        value = u(params, t, x)
        u_t = jax.grad(u, argnums=1)(params, t, x)
        u_x = jax.grad(u, argnums=2)(params, t, x)
        u_xx = jax.grad(jax.grad(u, argnums=2), argnums=2)(params, t, x)
        return u_t + value * u_x - 0.01 / math.pi * u_xx

    def loss(params, batch):
        r = jax.vmap(residual, (None, 0, 0))(params, batch["t"], batch["x"])
        start = jax.vmap(u, (None, None, 0))(params, 0.0, batch["x"])
        return jnp.mean(r**2) + 10.0 * jnp.mean((start + jnp.sin(jnp.pi * batch["x"])) ** 2)

    shapes = {"fourier": (2, 8), "mlp": mlp_shapes(16, W, W, 1)}

    def batch(draws):
        t, x = draws.uniform(0, 1, SAMPLES), draws.uniform(-1, 1, SAMPLES)
        return {"t": t.astype(np.float32), "x": x.astype(np.float32)}

    return Parts(lambda key: drawn(key, shapes), loss, batch)


@kind("neural ODE", "plain JAX", "docs.jax.dev, notebooks/neural_network_and_data_loading; odeint")
def neural_ode():
    """Runge and Kutta's steps of one network, a number of them fixed, by fori_loop."""
    steps, dt = 4, 0.25

    def loss(params, batch):
        def field(y, t):
            time = jnp.full((*y.shape[:-1], 1), t)
            return mlp(params["field"], jnp.concatenate([y, time], axis=-1))

        def step(i, y):
            t = i * dt
            k1 = field(y, t)
            k2 = field(y + dt / 2 * k1, t + dt / 2)
            k3 = field(y + dt / 2 * k2, t + dt / 2)
            k4 = field(y + dt * k3, t + dt)
            return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

        y = jax.lax.fori_loop(0, steps, step, batch["x"] @ params["in"])
        return jnp.mean((y @ params["out"] - batch["y"]) ** 2)

    shapes = {"field": mlp_shapes(W + 1, W, W), "in": (8, W), "out": (W, 8)}

    def batch(draws):
        return {"x": numbers(draws, 8), "y": numbers(draws, 8)}

    return Parts(lambda key: drawn(key, shapes), loss, batch)


@kind("RealNVP", "plain JAX", "github.com/ericjang/nf-jax, tutorial; Dinh et al., 2017")
def real_nvp():
    """Couplings of halves in turn and the density of a normal behind them."""

    def shift_and_log_scale(p, x):
        s, t = jnp.split(mlp(p, x, jax.nn.relu), 2, axis=-1)
        return t, jnp.tanh(s)

    def log_prob(params, x):
        log_det = jnp.zeros(x.shape[:-1])
        for i, p in enumerate(params["couplings"]):
            x = x[..., ::-1] if i % 2 else x
            a, b = jnp.split(x, 2, axis=-1)
            t, s = shift_and_log_scale(p, a)
            x = jnp.concatenate([a, (b - t) * jnp.exp(-s)], axis=-1)
            log_det = log_det - s.sum(-1)
        return jax.scipy.stats.norm.logpdf(x).sum(-1) + log_det

    def loss(params, batch):
        return -jnp.mean(log_prob(params, batch["x"]))

    shapes = {"couplings": [mlp_shapes(4, W, 8)] * 4}
    return Parts(lambda key: drawn(key, shapes), loss, lambda draws: {"x": numbers(draws, 8)})


@kind("VAE", "plain JAX", "github.com/jax-ml/jax, examples/mnist_vae.py")
def vae():
    """A sample of the posterior from the batch's key; Bernoulli pixels and KL by hand."""

    def loss(params, batch):
        h = jax.nn.relu(batch["x"] @ params["encoder"]["w"] + params["encoder"]["b"])
        mu = h @ params["mu"]
        sigma = jax.nn.softplus(h @ params["sigma"])
        z = mu + sigma * jax.random.normal(batch["key"], mu.shape)
        logits = mlp(params["decoder"], z, jax.nn.relu)
        logpx = -jnp.sum(jnp.logaddexp(0.0, jnp.where(batch["x"] > 0.5, -1.0, 1.0) * logits))
        kl = -0.5 * jnp.sum(1.0 + jnp.log(sigma**2.0) - mu**2.0 - sigma**2.0)
        return (kl - logpx) / batch["x"].shape[0]

    shapes = {
        "encoder": {"w": (24, W), "b": (W,)},
        "mu": (W, 8),
        "sigma": (W, 8),
        "decoder": mlp_shapes(8, W, 24),
    }

    def batch(draws):
        return {"x": (draws.uniform(size=(SAMPLES, 24)) > 0.5).astype(np.float32)}

    return Parts(lambda key: drawn(key, shapes), loss, batch, keyed=True)


@kind(
    "FNO", "plain JAX", "github.com/neuraloperator/neuraloperator, layers/spectral_convolution.py"
)
def fno():
    """The lowest modes of a Fourier transform times complex weights, and back."""
    length, modes, width = 16, 4, 16

    def spectral(p, x):
        transformed = jnp.fft.rfft(x, axis=1)
        weights = p["re"] + 1j * p["im"]
        low = jnp.einsum("bmi,mio->bmo", transformed[:, :modes], weights)
        full = jnp.zeros((x.shape[0], length // 2 + 1, width), low.dtype).at[:, :modes].set(low)
        return jnp.fft.irfft(full, n=length, axis=1)

    def loss(params, batch):
        x = batch["x"] @ params["lift"]
        for p in params["layers"]:
            x = jax.nn.gelu(spectral(p, x) + x @ p["skip"])
        return jnp.mean((x @ params["project"] - batch["y"]) ** 2)

    layer = {"re": (modes, width, width), "im": (modes, width, width), "skip": (width, width)}
    shapes = {"lift": (2, width), "layers": [layer] * 2, "project": (width, 1)}

    def batch(draws):
        return {"x": numbers(draws, length, 2), "y": numbers(draws, length, 1)}

    return Parts(lambda key: drawn(key, shapes), loss, batch)
