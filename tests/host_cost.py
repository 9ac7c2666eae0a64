"""What a call costs the host, in microseconds: python -m tests.host_cost

On small inputs on a CUDA device, launches included, without waiting for the device; beside it the
same of causal-conv1d where that is installed.
"""

import statistics
import time

import cupy
import torch

import cuseq.torch

CALLS, ROUNDS = 100, 30  # few enough calls of a round for the queue of launches


def costs(*calls):
    """Microseconds of each call, the median of rounds, in which they take turns."""
    rounds = {call: [] for call in calls}
    for _ in range(ROUNDS):
        for call in calls:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
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
    a, b = cupy.from_dlpack(x.detach()), cupy.from_dlpack(y)
    yield "cuseq.soft_dtw of CuPy arrays", lambda: cuseq.soft_dtw(a, b, gamma=0.1), None
    yield "SoftDTWLoss, forward", lambda: loss(x, y), None
    yield "SoftDTWLoss, forward and backward", lambda: torch.autograd.grad(loss(x, y), x), None
    yield "torch.mean alone, forward and backward", lambda: torch.autograd.grad(x.mean(), x), None


def main():
    """Print a table."""
    if not torch.cuda.is_available():
        raise SystemExit("host_cost: needs a CUDA device")
    have_peer = peer() is not None
    print("| us a call | cuseq | causal-conv1d | ratio |\n|---|---|---|---|")
    for what, ours, theirs in (*convolutions(), *losses()):
        own, *other = costs(ours, theirs) if theirs and have_peer else costs(ours)
        beside = f"{other[0]:.1f} | {own / other[0]:.2f}" if other else "- | -"
        print(f"| {what} | {own:.1f} | {beside} |", flush=True)


if __name__ == "__main__":
    main()
