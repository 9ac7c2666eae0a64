"""A denoiser trained in JAX with soft-DTW as its loss, then run sample by sample.

    python examples/jax_training.py

The three accelerometer channels at a walker's ankle get noise, and a causal model learns to take it
off again. Soft-DTW forgives it a small delay, which a squared error would not. Runs on the GPU
where JAX finds one and on the CPU otherwise.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import cuseq.jax

GAMMA = 0.1  # in units of the squared difference: small is sharp, large is smooth
WINDOW = 64  # samples: one second
TRAINING = 16  # windows to learn from; those after them are held out
NOISE = 0.5  # standard deviation; that of the signal is 1
HIDDEN, WIDTH = 16, 8  # channels and taps of the convolution
STEPS, RATE, MOMENTUM = 81, 2e-3, 0.9
TOLERANCE = 1e-5
RECORDING = Path(__file__).parent / "data/daphnet.csv"

# A GPU may round what it multiplies to 10 bits unless told not to: far more than TOLERANCE.
jax.config.update("jax_default_matmul_precision", "highest")


def describe_device():
    """Return the name of the device that JAX computes on."""
    device = jax.devices()[0]
    if device.platform == "gpu":
        return f"GPU ({device.device_kind})"
    return "CPU (JAX finds no GPU)"


def initial_weights(key):
    """Return weights by name: random ones, but for those of the result, so that it starts as x."""
    mix, filters = jax.random.split(key)
    return {
        "mix": jax.random.normal(mix, (3, HIDDEN)) / 3**0.5,
        "filters": jax.random.normal(filters, (HIDDEN, WIDTH)) / WIDTH**0.5,
        "bias": jnp.zeros(HIDDEN),
        "unmix": jnp.zeros((HIDDEN, 3)),
    }


def denoise(weights, x):
    """Return y (B, L, 3) of x (B, L, 3)."""
    hidden = cuseq.jax.causal_conv1d(
        x @ weights["mix"], weights["filters"], weights["bias"], activation="silu", layout="bld"
    )
    return x - hidden @ weights["unmix"]


def denoise_sample(weights, state, x):
    """Return the next state (B, HIDDEN, WIDTH - 1) and y (B, 3) of one sample x (B, 3)."""
    hidden, state = cuseq.jax.causal_conv1d_update(
        x @ weights["mix"], state, weights["filters"], weights["bias"], activation="silu"
    )
    return state, x - hidden @ weights["unmix"]


def distance(a, b):
    """Return the soft-DTW of a (B, N, 3) and b (B, M, 3), mean over the batch."""
    return cuseq.jax.soft_dtw(a, b, gamma=GAMMA).mean()


@jax.jit
def train_step(weights, velocity, noisy, clean):
    """Descend once; return weights, velocity and the loss before."""

    def loss_of(weights):
        return distance(denoise(weights, noisy), clean)

    loss, grad = jax.value_and_grad(loss_of)(weights)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v - RATE * g, velocity, grad)
    return jax.tree.map(jnp.add, weights, velocity), velocity, loss


@jax.jit
def stream(weights, x):
    """Return y (B, L, 3) from one sample of x (B, L, 3) at a time."""
    state = jnp.zeros((x.shape[0], HIDDEN, WIDTH - 1))
    _, y = jax.lax.scan(partial(denoise_sample, weights), state, x.swapaxes(0, 1))
    return y.swapaxes(0, 1)


def main():
    print(f"device: {describe_device()}")

    recording = np.loadtxt(RECORDING, delimiter=",", skiprows=1, dtype=np.float32)
    walk = recording[8 * WINDOW :, :3]  # the ankle, from when the person walks
    walk = (walk - walk.mean(axis=0)) / walk.std(axis=0)
    clean = jnp.asarray(walk.reshape(-1, WINDOW, 3))  # (B, WINDOW, 3)
    for_noise, for_weights = jax.random.split(jax.random.key(0))
    noisy = clean + NOISE * jax.random.normal(for_noise, clean.shape)
    unseen_noisy, unseen_clean = noisy[TRAINING:], clean[TRAINING:]
    noisy, clean = noisy[:TRAINING], clean[:TRAINING]

    weights = initial_weights(for_weights)
    velocity = jax.tree.map(jnp.zeros_like, weights)
    for step in range(STEPS):
        weights, velocity, loss = train_step(weights, velocity, noisy, clean)
        if step % 20 == 0:  # to print is to wait for the device
            print(f"step {step:3d}: loss {loss:8.3f}")

    before = distance(unseen_noisy, unseen_clean)
    after = distance(denoise(weights, unseen_noisy), unseen_clean)
    print(f"held out: soft-DTW to the clean signal {before:.3f} before, {after:.3f} after")

    signal = unseen_noisy.reshape(1, -1, 3)
    difference = float(abs(stream(weights, signal) - denoise(weights, signal)).max())
    print(f"sample by sample, {signal.shape[1]} samples: max difference {difference:.1e}")
    if not difference <= TOLERANCE:  # in this form a NaN fails too
        raise SystemExit(f"sample by sample: differs from the whole by more than {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
