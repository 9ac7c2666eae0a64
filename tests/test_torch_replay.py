"""Calls of cuseq.torch that go past torch's dispatcher, and those that must not."""

import threading

import pytest

from tests.samples import normal

torch = pytest.importorskip("torch")
adapter = pytest.importorskip("cuseq.torch")
shortcut = pytest.importorskip("cuseq.torch.shortcut")

gpu = pytest.mark.gpu


def sample(*shape, seed=0, device="cuda"):
    return torch.tensor(normal(*shape, seed=seed), device=device, dtype=torch.float32)


def filters(seed=0, L=9):
    """x (2, 3, L), weight and bias on the device."""
    shapes = (2, 3, L), (3, 4), (3,)
    return [sample(*shape, seed=seed + k) for k, shape in enumerate(shapes)]


def dispatched(function):
    """The result, and the torch ops of cuseq that a profiler saw or a replay went past: names."""
    seen, real = [], shortcut.Op.replay

    def replay(op, tensors, options):
        results = real(op, tensors, options)
        if results is not None:
            seen.append(op.op.name())
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shortcut.Op, "replay", replay)
        return function(), seen


def on_host(function, *tensors):
    return function(*(x.cpu() for x in tensors)).to(tensors[0].device)


def close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def convolve(x, weight, bias=None, **options):
    return adapter.causal_conv1d(x, weight, bias, activation="silu", **options)


# ---- who is to see torch ops


@pytest.mark.parametrize("activation", [["silu"], {}, 1])
def test_options_that_are_none(activation):
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match="activation"):
            adapter.causal_conv1d(torch.ones(1, 1, 3), torch.ones(1, 2), activation=activation)


def test_a_plain_call_is_alone():
    assert shortcut.alone()
    with torch.no_grad(), torch.inference_mode():
        assert shortcut.alone()


def in_vmap(seen):
    torch.vmap(lambda x: seen.append(shortcut.alone()) or x)(torch.ones(2))


def in_grad(seen):
    torch.func.grad(lambda x: seen.append(shortcut.alone()) or x)(torch.ones(()))


def in_autocast(seen):
    with torch.autocast("cpu"):
        seen.append(shortcut.alone())


def in_a_profile(seen):
    with torch.profiler.profile():
        seen.append(shortcut.alone())


def in_a_trace(seen):
    torch.jit.trace(lambda x: seen.append(shortcut.alone()) or x, torch.ones(2), check_trace=False)


def in_forward_mode(seen):
    with torch.autograd.forward_ad.dual_level():
        seen.append(shortcut.alone())


def in_fake_mode(seen):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        seen.append(shortcut.alone())


def in_make_fx(seen):
    from torch.fx.experimental.proxy_tensor import make_fx

    make_fx(lambda x: seen.append(shortcut.alone()) or x)(torch.ones(2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "place",
    [
        in_vmap,
        in_grad,
        in_autocast,
        in_a_profile,
        in_a_trace,
        in_forward_mode,
        in_fake_mode,
        in_make_fx,
    ],
)
def test_a_call_that_others_follow_is_not_alone(place):
    seen = []
    place(seen)
    assert seen and not any(seen)
    assert shortcut.alone()


# ---- calls like an earlier one


@gpu
def test_a_second_call_is_replayed():
    convolve(*filters(L=10))
    given = filters(seed=5, L=10)
    got, seen = dispatched(lambda: convolve(*given))
    assert seen == ["cuseq::causal_conv1d"]
    close(got, on_host(convolve, *given))


@gpu
def test_forward_and_backward_are_replayed():
    def step(given):
        leaves = [x.clone().requires_grad_() for x in given]
        y, state = adapter.causal_conv1d_with_state(*leaves)
        return torch.autograd.grad(y.square().sum() + state.sum(), leaves)

    step(filters(L=11))
    given = filters(seed=7, L=11)
    got, seen = dispatched(lambda: step(given))
    assert seen == ["cuseq::causal_conv1d_with_state", "cuseq::causal_conv1d_backward"]
    for x, y in zip(got, step([x.cpu() for x in given]), strict=True):
        close(x, y.cuda())


@gpu
def test_soft_dtw_is_replayed():
    def step(x, y):
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        loss = adapter.SoftDTWLoss(gamma=0.5, reduction="sum")(x, y)
        return torch.autograd.grad(loss, (x, y))

    step(sample(3, 7, 2), sample(3, 5, 2, seed=1))
    given = sample(3, 7, 2, seed=2), sample(3, 5, 2, seed=3)
    got, seen = dispatched(lambda: step(*given))
    assert seen == ["cuseq::soft_dtw_keeping", "cuseq::soft_dtw_backward"]
    for x, y in zip(got, step(*(x.cpu() for x in given)), strict=True):
        torch.testing.assert_close(x, y.cuda(), rtol=1e-4, atol=1e-4)


@gpu
def test_a_replayed_step_counts_as_a_change():
    """Of the state, for who saved it for a backward."""
    state, weight = sample(2, 3, 3), sample(3, 4)
    for _ in range(2):
        adapter.causal_conv1d_update(sample(2, 3), state, weight)
    leaf = state.new_ones(()).requires_grad_()
    product = leaf * state
    _, seen = dispatched(lambda: adapter.causal_conv1d_update(sample(2, 3), state, weight))
    assert seen == ["cuseq::causal_conv1d_update"]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def transposed(x, weight):
    return (x.transpose(1, 2).contiguous().transpose(1, 2), weight), {}


def shifted(x, weight):
    memory = torch.zeros(x.numel() + 1, device="cuda")
    moved = memory[1:].view(x.shape)
    return (moved.copy_(x), weight), {}


def negated(x, weight):
    return (torch._neg_view(x), weight), {}


def doubled(x, weight):
    return (x.double(), weight), {}


def with_bias(x, weight):
    return (x, weight, sample(3, seed=9)), {}


def with_a_state(x, weight):
    return (x, weight), {"initial_state": sample(2, 3, 3, seed=9)}


def shorter(x, weight):
    return (x[..., :5].contiguous(), weight), {}


def changed_in_place(x, weight):
    x.data = x.data.flip(2).transpose(1, 2).contiguous().transpose(1, 2)
    return (x, weight), {}


@gpu
@pytest.mark.parametrize(
    "other",
    [
        transposed,
        shifted,
        negated,
        doubled,
        with_bias,
        with_a_state,
        shorter,
        changed_in_place,
    ],
)
def test_a_call_that_differs_runs_anew(other):
    x, weight, _ = filters(L=12)
    for _ in range(2):
        convolve(x, weight)
    given, options = other(x, weight)
    for _ in range(2):  # the second time it may be replayed itself
        got = convolve(*given, **options)
        host = [y.cpu() for y in given], {name: y.cpu() for name, y in options.items()}
        close(got, convolve(*host[0], **host[1]).cuda())


@gpu
def test_gradients_begin_where_one_is_wanted():
    """After calls that none is wanted of, under no_grad and with plain tensors."""
    x, weight, bias = filters(L=13)
    weight.requires_grad_()
    with torch.no_grad():
        for _ in range(2):
            assert not convolve(x, weight, bias).requires_grad
    y = convolve(x, weight, bias)
    y.sum().backward()
    assert weight.grad.abs().sum() > 0
    with torch.inference_mode():
        assert convolve(x, weight, bias).is_inference()
    assert not convolve(x, weight.detach(), bias).is_inference()


@gpu
def test_a_profile_shows_the_op():
    given = filters(L=14)
    for _ in range(2):
        convolve(*given)
    with torch.profiler.profile() as profile:
        convolve(*given)
    assert "cuseq::causal_conv1d" in {event.key for event in profile.key_averages()}


@gpu
def test_autocast_after_calls_without_it():
    x, weight, bias = filters(L=15)
    for _ in range(2):
        assert convolve(x, weight, bias).dtype == torch.float32
    with torch.autocast("cuda", torch.bfloat16):
        assert convolve(x, weight, bias).dtype == torch.bfloat16
    assert convolve(x, weight, bias).dtype == torch.float32


@gpu
def test_many_lengths_take_turns():
    for _ in range(3):
        for L in range(1, 13):
            given = filters(seed=L, L=L)
            close(convolve(*given), on_host(convolve, *given))


@gpu
def test_threads_at_the_same_time():
    """Of calls that are alike, each on a stream of its own."""
    wrong = []

    def work(seed):
        with torch.cuda.stream(torch.cuda.Stream()):
            for k in range(200):
                given = filters(seed=seed + 3 * k, L=64)
                wanted = torch.nn.functional.conv1d(
                    *(given[0], given[1][:, None], given[2]), padding=3, groups=3
                )[..., :64]
                got = adapter.causal_conv1d(*given)
                if not torch.allclose(got, wanted, rtol=1e-4, atol=1e-4):
                    wrong.append((seed, k))

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@gpu
def test_a_side_stream_that_another_one_fills():
    """A replay launches on the stream that is current then."""
    x, weight, bias = filters(L=4096)
    convolve(x, weight, bias)
    side = torch.cuda.Stream()
    wanted = on_host(convolve, x + 1, weight, bias)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        filled = x + 1
        got, seen = dispatched(lambda: convolve(filled, weight, bias))
    side.synchronize()
    assert seen == ["cuseq::causal_conv1d"]
    close(got, wanted)


@gpu
def test_the_second_device_while_the_first_is_current():
    """Forward, backward and step, replayed there."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")

    def step(given, device):
        x, weight, bias = (y.to(device) for y in given)
        x, series = x.clone().requires_grad_(), x.transpose(1, 2).clone().requires_grad_()
        y = convolve(x, weight, bias)
        loss = adapter.SoftDTWLoss(gamma=0.5)(series, y.detach().transpose(1, 2))
        state = x.detach()[..., :3].contiguous()
        token = x.detach()[..., 3].contiguous()
        token = adapter.causal_conv1d_update(token, state, weight, bias)
        return *torch.autograd.grad(y.square().sum() + loss, (x, series)), token, state

    step(filters(L=16), "cuda:1")
    given = filters(seed=5, L=16)
    got, seen = dispatched(lambda: step(given, "cuda:1"))
    assert len(seen) == 5 and torch.cuda.current_device() == 0
    for x, y in zip(got, step(given, "cpu"), strict=True):
        assert x.device == torch.device("cuda:1")
        torch.testing.assert_close(x.cpu(), y, rtol=1e-4, atol=1e-4)
