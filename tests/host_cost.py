"""What a call costs the host, in microseconds: python -m tests.host_cost

On small inputs on a CUDA device, launches included, without waiting for the device; beside it the
same of causal-conv1d where that is installed. Calls of jitted JAX programs are timed until the last
of a round is through, for XLA has threads of its own.
"""

import os
import statistics
import time

import cupy
import torch

import cuseq.torch

CALLS, ROUNDS = 100, 30  # few enough calls of a round for the queue of launches


def costs(*calls):
    """Microseconds of each call, the median of rounds, in which they take turns.

    A call that gives back something to wait for (a JAX array) is waited for after each round.
    """
    rounds = {call: [] for call in calls}
    for _ in range(ROUNDS):
        for call in calls:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                last = call()
            getattr(last, "block_until_ready", bool)()
            rounds[call].append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return [statistics.median(times[ROUNDS // 3 :]) for times in rounds.values()]


def peer():
    """causal_conv1d_fn and causal_conv1d_update of causal-conv1d, or None."""
    try:
        import causal_conv1d
    except ImportError:
        return None
    return causal_conv1d.causal_conv1d_fn, causal_conv1d.causal_conv1d_update


def convolutions():
    """Rows: what, our call, the peer's."""
    fn, update = peer() or (None, None)
    x = torch.randn(2, 64, 32, device="cuda", dtype=torch.bfloat16)
    weight, bias = torch.randn(64, 4, device="cuda"), torch.randn(64, device="cuda")
    state, token = torch.zeros(2, 64, 4, device="cuda", dtype=torch.bfloat16), x[:, :, 0].clone()
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    ones = torch.ones_like(x)

    def ours(x, weight, bias):
        return cuseq.torch.causal_conv1d(x, weight, bias, activation="silu")

    def theirs(x, weight, bias):
        return fn(x, weight, bias, activation="silu")

    def step(function):
        return lambda: torch.autograd.grad(function(*leaves), leaves, ones)

    given = x, weight, bias
    yield "causal_conv1d, no grad", lambda: ours(*given), lambda: theirs(*given)
    yield "causal_conv1d, with grad", lambda: ours(*leaves), lambda: theirs(*leaves)
    yield "causal_conv1d, forward and backward", step(ours), step(theirs)
    yield (
        "causal_conv1d_update",
        lambda: cuseq.torch.causal_conv1d_update(token, state, weight, bias, activation="silu"),
        lambda: update(token, state, weight, bias, activation="silu"),
    )


def losses():
    """Rows: what, our call; last one that is torch's, which no loss with a mean is below."""
    x = torch.randn(4, 16, 2, device="cuda", requires_grad=True)
    y, loss = torch.randn(4, 12, 2, device="cuda"), cuseq.torch.SoftDTWLoss(gamma=0.1)
    yield "SoftDTWLoss, forward", lambda: loss(x, y), None
    yield "SoftDTWLoss, forward and backward", lambda: torch.autograd.grad(loss(x, y), x), None
    yield "torch.mean alone, forward and backward", lambda: torch.autograd.grad(x.mean(), x), None


def in_cupy():
    """Rows: what, our call, nothing beside it."""
    a, b = cupy.random.rand(4, 16, 2, dtype="f"), cupy.random.rand(4, 12, 2, dtype="f")
    x, weight = cupy.random.rand(2, 64, 32, dtype="f"), cupy.random.rand(64, 4, dtype="f")
    state, token = cupy.zeros((2, 64, 4), "f"), x[:, :, 0].copy()
    yield "CuPy: soft_dtw", lambda: cuseq.soft_dtw(a, b, gamma=0.1), None
    both = cuseq.soft_dtw_value_and_grad
    yield "CuPy: soft_dtw_value_and_grad", lambda: both(a, b, gamma=0.1), None
    yield "CuPy: causal_conv1d", lambda: cuseq.causal_conv1d(x, weight), None
    update = cuseq.causal_conv1d_update
    yield "CuPy: causal_conv1d_update", lambda: update(token, state, weight), None


def in_jax():
    """As `in_cupy`, of jitted programs, and last of one of XLA's own."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax

        import cuseq.jax

        device = jax.devices("cuda")[0]
    except (ImportError, RuntimeError):
        return
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), 4)
    shapes = (4, 16, 2), (4, 12, 2), (2, 64, 32), (64, 4)
    a, b, x, weight = (
        jax.device_put(jax.random.normal(key, shape), device)
        for key, shape in zip(keys, shapes, strict=True)
    )

    def value(a, b):
        return cuseq.jax.soft_dtw(a, b, gamma=0.1).sum()

    soft_dtw, slope = jax.jit(value), jax.jit(jax.grad(value))
    convolve, own = jax.jit(cuseq.jax.causal_conv1d), jax.jit(lambda x: x + 1)
    step = jax.jit(cuseq.jax.causal_conv1d_update, donate_argnums=1)
    token = x[:, :, 0]
    carried = [jax.device_put(jax.numpy.zeros((2, 64, 4)), device)]

    def advance():
        y, carried[0] = step(token, carried[0], weight)
        return y

    yield "JAX: jit of soft_dtw", lambda: soft_dtw(a, b), None
    yield "JAX: jit of its gradient", lambda: slope(a, b), None
    yield "JAX: jit of causal_conv1d", lambda: convolve(x, weight), None
    yield "JAX: jit of causal_conv1d_update", advance, None
    yield "JAX: jit of x + 1", lambda: own(x), None


def main():
    """Print a table."""
    if not torch.cuda.is_available():
        raise SystemExit("host_cost: needs a CUDA device")
    have_peer = peer() is not None
    print("| us a call | cuseq | causal-conv1d | ratio |\n|---|---|---|---|")
    for what, ours, theirs in (*convolutions(), *losses(), *in_cupy(), *in_jax()):
        own, *other = costs(ours, theirs) if theirs and have_peer else costs(ours)
        beside = f"{other[0]:.1f} | {own / other[0]:.2f}" if other else "- | -"
        print(f"| {what} | {own:.1f} | {beside} |", flush=True)


if __name__ == "__main__":
    main()
