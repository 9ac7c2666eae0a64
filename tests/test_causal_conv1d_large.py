"""Causal convolutions of more than 2^32 elements, or 2^31 positions, on a CUDA device.

All numbers are small integers, of which every result and every sum on the way is exact: results are
compared as a whole, and must be equal. What they must be is computed by shifts, a part of the
positions at a time.
"""

import pytest

import cuseq
from tests import frameworks
from tests.frameworks import TORCH_CUDA, over

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.slow]

W = 4
MEMORY = 60  # GiB of the device
AT_ONCE = 2**26  # elements that are compared at once
LONG = 2**31 + 77
CASES = [  # layout, (B, D, L)
    ("bdl", (3, 1031, 1_390_001)),  # each row is aligned in another way
    ("bld", (3, 1032, 1_387_301)),
    ("bdl", (1, 1, LONG)),
    ("bld", (1, 1, LONG)),
    ("bdl", (1, 2, LONG)),
    ("bld", (1, 2, LONG)),
]


@pytest.fixture(autouse=True)
def memory(place):
    """As much of the device's memory as a test here takes, or a skip; and then it is given back."""
    frameworks.module("cupy").get_default_memory_pool().free_all_blocks()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < MEMORY:
        pytest.skip(f"needs {MEMORY} GiB of free device memory, there are {free:.0f}")
    yield
    torch.cuda.empty_cache()


def integers(*shape, seed, dtype=torch.bfloat16, device="cuda"):
    """-2 to 2, the same for the same arguments."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator, dtype=dtype, device=device)


def filters(D, device="cuda"):
    """weight and bias."""
    return (
        integers(D, W, seed=1, dtype=torch.float32, device=device),
        integers(D, seed=2, dtype=torch.float32, device=device),
    )


def seen(x, layout):
    """As (B, D, L), or the latter in the axes of `layout`."""
    return x if layout == "bdl" else x.transpose(1, 2)


def around(x, start, end):
    """x[..., start:end] in float32, with zeros for positions that there are not."""
    inside = x[..., max(start, 0) : max(end, 0)].float()
    return torch.nn.functional.pad(inside, (max(-start, 0), max(end - x.shape[-1], 0)))


def correlated(u, taps):
    """sum_k taps[d, k] u[..., d, t + k]."""
    n = u.shape[-1] - (W - 1)
    return sum(taps[:, k, None] * u[..., k : k + n] for k in range(W))


class Expected:
    """Compares results of one sequence after the other, and adds up what they have in common."""

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias
        self.grad_weight = torch.zeros_like(weight, dtype=torch.float64)
        self.grad_bias = torch.zeros_like(bias, dtype=torch.float64)

    def check_sequence(self, x, grad_y, y, grad_x, state=None, grad_final_state=None):
        """x, grad_y, y and grad_x are (B, D, L), the states (B, D, W - 1)."""
        B, D, L = x.shape
        length = max(AT_ONCE // (B * D), W)
        for start in range(0, L, length):
            end = min(start + length, L)
            u = around(x, start - (W - 1), end)
            if start == 0 and state is not None:
                u[..., : W - 1] = state
            wanted = self.bias[:, None] + correlated(u, self.weight)
            assert torch.equal(y[..., start:end].float(), wanted), f"y from {start} on"

            g = around(grad_y, start, end + W - 1)
            wanted = correlated(g, self.weight.flip(1))
            kept = max(start, L - (W - 1))  # by the final state, from there on
            if grad_final_state is not None and kept < end:
                from_state = grad_final_state[..., kept - L :]
                wanted[..., kept - start :] += from_state[..., : end - kept]
            assert torch.equal(grad_x[..., start:end].float(), wanted), f"grad_x from {start} on"

            g = g[..., : end - start]
            for k in range(W):
                terms = g * u[..., k : k + end - start]
                self.grad_weight[:, k] += terms.sum((0, 2), dtype=torch.float64)
            self.grad_bias += g.sum((0, 2), dtype=torch.float64)

    def check_sums(self, gradients):
        assert torch.equal(gradients.weight.double(), self.grad_weight)
        assert torch.equal(gradients.bias.double(), self.grad_bias)


def before_start(grad_y, weight):
    """The gradients by the W - 1 inputs before the start of a sequence."""
    return correlated(around(grad_y, 1 - W, W - 1), weight.flip(1))


@over([TORCH_CUDA])
@pytest.mark.parametrize("layout, size", CASES)
def test_large(place, layout, size):
    check_large(layout, size)


def check_large(layout, size, device="cuda"):
    B, D, L = size
    shape = size if layout == "bdl" else (B, L, D)
    x = integers(*shape, seed=0, device=device)
    grad_y = integers(*shape, seed=4, device=device)
    weight, bias = filters(D, device)
    state = integers(B, D, W - 1, seed=3, device=device)
    grad_final_state = integers(B, D, W - 1, seed=5, device=device)
    options = {"layout": layout, "initial_state": state}
    y, final_state = cuseq.causal_conv1d_with_state(x, weight, bias, **options)
    gradients = cuseq.causal_conv1d_backward(
        grad_y, x, weight, bias, grad_final_state=grad_final_state, **options
    )
    x, grad_y, y, grad_x = (seen(t, layout) for t in (x, grad_y, y, gradients.x))
    expected = Expected(weight, bias)
    expected.check_sequence(x, grad_y, y, grad_x, state, grad_final_state)
    expected.check_sums(gradients)
    assert torch.equal(final_state, x[..., 1 - W :])
    assert torch.equal(gradients.initial_state.float(), before_start(grad_y, weight))


@over([TORCH_CUDA])
@pytest.mark.parametrize("layout", ["bdl", "bld"])
def test_long_rows_of_sequences_by_index(place, layout):
    """The last sequence begins behind position 2^31, and so does what the final state keeps."""
    check_by_index(layout, [0, 2**30, 2**31 - 1, 2**31 + 2, LONG])


def check_by_index(layout, edges, D=2, device="cuda"):
    L = edges[-1]
    shape = (1, D, L) if layout == "bdl" else (1, L, D)
    x = integers(*shape, seed=0, device=device)
    grad_y = integers(*shape, seed=4, device=device)
    weight, bias = filters(D, device)
    grad_final_state = integers(1, D, W - 1, seed=5, device=device)
    seq_idx = torch.zeros((1, L), dtype=torch.int32, device=device)
    for n, start in enumerate(edges[:-1]):
        seq_idx[:, start:] = n
    options = {"layout": layout, "seq_idx": seq_idx}
    y, final_state = cuseq.causal_conv1d_with_state(x, weight, bias, **options)
    gradients = cuseq.causal_conv1d_backward(
        grad_y, x, weight, bias, grad_final_state=grad_final_state, **options
    )
    tensors = [seen(t, layout) for t in (x, grad_y, y, gradients.x)]
    expected = Expected(weight, bias)
    for start, end in zip(edges, edges[1:], strict=False):
        of_sequence = [t[..., start:end] for t in tensors]
        expected.check_sequence(*of_sequence, None, grad_final_state if end == L else None)
    expected.check_sums(gradients)
    assert torch.equal(final_state, tensors[0][..., 1 - W :])


@over([TORCH_CUDA])
def test_long_packed_sequences(place):
    check_packed([0, 2**31 - 1, 2**31 + 2, 2**31 + 2, LONG])


def check_packed(ends, D=2, device="cuda"):
    T, count = ends[-1], len(ends) - 1
    x = integers(T, D, seed=0, device=device)
    grad_y = integers(T, D, seed=4, device=device)
    weight, bias = filters(D, device)
    state = integers(count, D, W - 1, seed=3, device=device)
    grad_final_state = integers(count, D, W - 1, seed=5, device=device)
    options = {"cu_seqlens": ends, "initial_state": state}
    y, final_state = cuseq.causal_conv1d_varlen_with_state(x, weight, bias, **options)
    gradients = cuseq.causal_conv1d_varlen_backward(
        grad_y, x, weight, bias, grad_final_state=grad_final_state, **options
    )
    tensors = [t.T[None] for t in (x, grad_y, y, gradients.x)]
    expected = Expected(weight, bias)
    for s, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        one, of_sequence = slice(s, s + 1), [t[..., start:end] for t in tensors]
        expected.check_sequence(*of_sequence, state[one], grad_final_state[one])
        u = torch.cat((state[one], of_sequence[0][..., 1 - W :]), dim=2)
        assert torch.equal(final_state[one], u[..., 1 - W :])
        if end - start >= W - 1:
            wanted = before_start(of_sequence[1], weight)
            assert torch.equal(gradients.initial_state[one].float(), wanted)
    expected.check_sums(gradients)


@over([TORCH_CUDA])
@pytest.mark.parametrize("starts", [None, [0, 5, 2**40 + 1]], ids=["shifted", "ring"])
def test_rows_of_a_large_pool(place, starts):
    check_pool(2**20 + 1, starts)


def check_pool(P, starts, D=1024, device="cuda"):
    """Rows in the middle and at the end of the pool are updated, and all others stay."""
    pool = integers(P, D, W, seed=3, device=device)
    x, (weight, bias) = integers(3, D, seed=0, device=device), filters(D, device)
    rows = [P // 2 + 1, P - 1, P // 2]
    wanted, wanted_y = pool.clone(), torch.empty_like(x)
    for b, row in enumerate(rows):
        seen_before = 0 if starts is None else starts[b]
        newest_last = pool[row].roll(-seen_before, dims=1)
        after = torch.cat((newest_last[:, 1:], x[b, :, None]), dim=1)
        wanted[row] = after if starts is None else after.roll(seen_before + 1, dims=1)
        wanted_y[b] = (weight * after).sum(dim=1) + bias
    y = cuseq.causal_conv1d_update(x, pool, weight, bias, cache_seqlens=starts, state_indices=rows)
    assert torch.equal(y, wanted_y)
    assert torch.equal(pool, wanted)
