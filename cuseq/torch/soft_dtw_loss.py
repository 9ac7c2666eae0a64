"""SoftDTWLoss, soft-DTW as a module."""

from numbers import Real

import torch

from cuseq.ops.soft_dtw import COSTS
from cuseq.runtime import checks
from cuseq.torch.library import autocast_dtype, cast, no_autocast, tensor
from cuseq.torch.series import divergence, soft_dtw, soft_dtw_from_cost

REDUCTIONS = ("mean", "sum", "none")


class SoftDTWLoss(torch.nn.Module):
    """Soft-DTW between two batches of time series as a loss.

    With ``normalize=True`` it is the divergence ``s(x, y) - (s(x, x) + s(y, y)) / 2`` of soft-DTW
    s, which is 0 for x = y. Each s has the same gamma, cost and bandwidth, and s(x, x) the lengths
    of x on both sides.

    Args:
        gamma, bandwidth: as `cuseq.soft_dtw` takes them.
        cost: a name that `cuseq.soft_dtw` takes, or a callable (x, y) -> C, which autograd
            differentiates. It is called with x (B, N, D) and y (B, M, D), where a batch of 1 is
            expanded to B, and returns C (B, N, M), floating, on their device. What lies beyond a
            length is replaced by the first point of its series before the call. A callable that is
            a module is a submodule of the loss.
        normalize: whether to compute the divergence.
        reduction: "mean" or "sum" over the batch, or "none" for one value a pair.

    Called as ``loss(x, y, lengths_x=None, lengths_y=None)`` with tensors x and y of shape (N,),
    (N, D) or (B, N, D) and the like with M, of which a batch of 1 meets every series of the other
    batch, and lengths as `cuseq.soft_dtw` takes them: integers (B,). With a callable, x and y may
    differ in D and dtype.

    Returns:
        A tensor of shape (), or with reduction "none" of shape (B,), or () for a single pair, in
        float64 for float64 series, else float32. Under autocast everything but float64 is cast to
        float32, and a callable runs without autocast.

    Raises:
        ValueError, TypeError: as `cuseq.soft_dtw`, which names the series a and b; and for a
            callable that returns anything but C.

    Source: M. Blondel, A. Mensch and J.-P. Vert, "Differentiable divergences between time series",
    AISTATS 2021.

    >>> import torch, cuseq.torch
    >>> loss = cuseq.torch.SoftDTWLoss(gamma=0.1)
    >>> x = torch.zeros(8, 50, 3, requires_grad=True)
    >>> loss(x, torch.ones(8, 40, 3)).backward()
    >>> x.grad.shape
    torch.Size([8, 50, 3])
    >>> cuseq.torch.SoftDTWLoss(cost=torch.cdist, normalize=True)(x, torch.zeros(8, 50, 3)).item()
    0.0
    """

    def __init__(
        self, gamma=1.0, *, cost="sqeuclidean", bandwidth=None, normalize=False, reduction="mean"
    ):
        super().__init__()
        if not callable(cost):
            checks.one_of("cost", cost, COSTS)
        if not isinstance(normalize, bool):
            raise TypeError(
                checks.sentence("normalize", "True or False", repr(normalize), "pass one of them")
            )
        checks.one_of("reduction", reduction, REDUCTIONS)
        if isinstance(gamma, Real):
            checks.gamma(gamma)
        self.gamma, self.cost, self.bandwidth = gamma, cost, bandwidth
        self.normalize, self.reduction = normalize, reduction

    def forward(self, x, y, lengths_x=None, lengths_y=None):
        single = max(tensor("x", x).ndim, tensor("y", y).ndim) < 3
        x, y = _batch_of_series("x", x), _batch_of_series("y", y)
        if autocast_dtype(x):
            x, y = cast(torch.float32, x, y)
        _common_batch(x, y)
        if self.normalize:
            options = self.gamma, self.bandwidth
            values = divergence(self._values, x, y, options, lengths_x, lengths_y)
        else:
            values = self._values(x, y, lengths_x, lengths_y)
        if single:
            values = values.squeeze(0)
        return values if self.reduction == "none" else getattr(values, self.reduction)()

    def _values(self, x, y, lengths_x, lengths_y):
        """Soft-DTW (B,) of x (B or 1, N, D) and y (B or 1, M, D)."""
        options = {"gamma": self.gamma, "bandwidth": self.bandwidth}
        options |= {"lengths_a": lengths_x, "lengths_b": lengths_y}
        if not callable(self.cost):
            return soft_dtw(x, y, cost=self.cost, **options)
        B = _common_batch(x, y)
        x = _without_padding("lengths_x", x.expand(B, -1, -1), lengths_x)
        y = _without_padding("lengths_y", y.expand(B, -1, -1), lengths_y)
        with no_autocast(x):
            C = self.cost(x, y)
        _check_cost(C, x, y)
        return soft_dtw_from_cost(C, **options)

    def extra_repr(self):
        parts = [f"gamma={self.gamma}"]
        if not isinstance(self.cost, torch.nn.Module):  # which is printed as a submodule
            parts.append(f"cost={self.cost!r}")
        if self.bandwidth is not None:
            parts.append(f"bandwidth={self.bandwidth}")
        if self.normalize:
            parts.append("normalize=True")
        return ", ".join([*parts, f"reduction={self.reduction!r}"])


# ---- series and their costs


def _batch_of_series(name, x):
    """(N,), (N, D) and (B, N, D) as (B, N, D)."""
    if x.ndim not in (1, 2, 3):
        shape = tuple(x.shape)
        raise ValueError(
            checks.sentence(name, "shape (N,), (N, D) or (B, N, D)", shape, "add or flatten axes")
        )
    if x.ndim == 1:
        x = x[:, None]
    return x if x.ndim == 3 else x[None]


def _common_batch(x, y):
    """The number of pairs B of x (B or 1, N, D) and y (B or 1, M, D)."""
    batches = x.shape[0], y.shape[0]
    if batches[0] != batches[1] and 1 not in batches:
        raise ValueError(
            checks.sentence(
                "y",
                f"a batch of {batches[0]} as x has, or of 1",
                f"a batch of {batches[1]}",
                "pair each series of x with one of y",
            )
        )
    return batches[1] if batches[0] == 1 else batches[0]


def _without_padding(name, x, lengths):
    """x (B, N, D) with its first point beyond its lengths: a cost that it has anyway."""
    if lengths is None:
        return x
    lengths = torch.as_tensor(lengths, device=x.device)
    checks.per_sample(name, lengths, len(x))
    inside = torch.arange(x.shape[1], device=x.device) < lengths.reshape(-1, 1)
    return torch.where(inside[..., None], x, x[:, :1])


def _check_cost(C, x, y):
    """Refuse a result of a callable cost that is not the cost of x and y."""
    shape = len(x), x.shape[1], y.shape[1]
    returns = f"a callable that returns a floating torch.Tensor of shape (B, N, M) = {shape}"
    if not isinstance(C, torch.Tensor):
        got, error = type(C).__name__, TypeError
    elif str(C.dtype).removeprefix("torch.") not in checks.FLOATING:
        got, error = f"one of dtype {C.dtype}", TypeError
    elif C.shape != shape:
        got, error = f"one of shape {tuple(C.shape)}", ValueError
    elif C.device != x.device:
        returns, got, error = f"{returns} on {x.device}", f"one on {C.device}", ValueError
    else:
        return
    remedy = "return the cost of each point of x (B, N, D) to each of y (B, M, D)"
    raise error(checks.sentence("cost", returns, got, remedy))
