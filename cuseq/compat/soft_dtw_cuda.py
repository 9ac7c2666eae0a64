"""The module of pytorch-softdtw-cuda on top of cuseq.torch."""

import math

import torch

import cuseq.torch
from cuseq.runtime import checks


def squared_euclidean(x, y):
    """``C[b,i,j] = sum_d (x[b,i,d] - y[b,j,d])^2``: x (B, N, D), y (B, M, D) -> (B, N, M).

    16-bit series give costs in float32. Differentiable.

    >>> import torch
    >>> from cuseq.compat.soft_dtw_cuda import squared_euclidean
    >>> squared_euclidean(torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[4.0]]]))
    tensor([[[9.],
             [4.]]])
    """
    if not x.is_floating_point():
        raise TypeError(checks.sentence("X", "a floating dtype", x.dtype, "pass X.float()"))
    checks.same_dtype("Y", y, "X", x.dtype)
    if x.dtype != torch.float64:
        x, y = x.float(), y.float()
    # The default mode subtracts squares, which cancel.
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square()


class SoftDTW(torch.nn.Module):
    """Soft-DTW of each pair of a batch, as pytorch-softdtw-cuda calls it.

    Called as ``SoftDTW(use_cuda=True)(X, Y)`` with X (B, N, D) and Y (B, M, D), it gives the values
    (B,), differentiable by X and Y; with normalize ``s(X, Y) - (s(X, X) + s(Y, Y)) / 2``, also for
    N != M. Series are of any length, dtypes and devices as `cuseq.soft_dtw` takes them.

    Args:
        use_cuda: kept and not read: the work is done where the tensors are, on CUDA or the CPU.
        gamma: the smoothing, >= 0; 0 is DTW.
        normalize: whether the divergence above is returned.
        bandwidth: only cells with |i - j| <= bandwidth count, for N != M too; None, 0 and negative
            numbers are no band. Below |N - M| there would be no path, which raises.
        dist_func: None for the squared Euclidean distance, or a function (X, Y) -> (B, N, M) that
            torch differentiates. It costs the memory of what it returns; so does a band where
            N != M.

    Raises:
        ValueError: in the call, for shapes that do not fit, a bandwidth that leaves no path, and
            what `cuseq.soft_dtw` refuses.
        TypeError: for dtypes that are not floating.

    >>> import torch
    >>> from cuseq.compat.soft_dtw_cuda import SoftDTW
    >>> X, Y = torch.zeros(8, 50, 3, requires_grad=True), torch.ones(8, 40, 3)
    >>> SoftDTW(use_cuda=False, gamma=0.1, normalize=True)(X, Y).mean().backward()
    >>> X.grad.shape
    torch.Size([8, 50, 3])
    """

    def __init__(self, use_cuda, gamma=1.0, normalize=False, bandwidth=None, dist_func=None):
        super().__init__()
        self.use_cuda, self.gamma, self.normalize = use_cuda, gamma, normalize
        self.bandwidth = 0 if bandwidth is None else float(bandwidth)
        self.dist_func = squared_euclidean if dist_func is None else dist_func

    def forward(self, X, Y):
        _check_series(X, Y)
        values = self._soft_dtw(X, Y)
        if not self.normalize:
            return values
        return values - (self._soft_dtw(X, X) + self._soft_dtw(Y, Y)) / 2

    def _soft_dtw(self, X, Y):
        N, M = X.shape[1], Y.shape[1]
        radius = _radius(self.bandwidth, N, M)
        options = {"gamma": self.gamma, "bandwidth": radius}
        widened = radius is not None and N != M  # by cuseq, as far as the lengths differ
        if self.dist_func is squared_euclidean and not widened:
            return cuseq.torch.soft_dtw(X, Y, **options)
        C = self.dist_func(X, Y)
        _check_costs(C, (X.shape[0], N, M))
        if widened:
            C = C.masked_fill(_outside(radius, N, M, C.device), math.inf)
        return cuseq.torch.soft_dtw_from_cost(C, **options)


def _radius(bandwidth, N, M):
    """The largest |i - j| of a band, or None where all cells count."""
    if not 0 < bandwidth < max(N, M) - 1:
        return None
    if bandwidth < abs(N - M):
        raise ValueError(
            checks.sentence(
                "bandwidth",
                f"at least |N - M| = {abs(N - M)} for series of lengths {N} and {M}",
                bandwidth,
                "no path stays in the band: widen it, or pass None for no band",
            )
        )
    return math.floor(bandwidth)


def _outside(radius, N, M, device):
    """(N, M), True where |i - j| > radius."""
    i, j = torch.arange(N, device=device)[:, None], torch.arange(M, device=device)
    return (i - j).abs() > radius


def _check_series(X, Y):
    for name, series in ("X", X), ("Y", Y):
        if series.ndim != 3:
            got = tuple(series.shape)
            raise ValueError(checks.sentence(name, "shape (B, length, D)", got, "add axes of 1"))
    B, _, D = X.shape
    if (Y.shape[0], Y.shape[2]) != (B, D):
        expected = f"shape (B, M, D) with B = {B} and D = {D}"
        remedy = "pass as many series of as many features as in X"
        raise ValueError(checks.sentence("Y", expected, tuple(Y.shape), remedy))


def _check_costs(C, shape):
    if C.shape != shape:
        expected = f"a function whose result has shape (B, N, M) = {shape}"
        remedy = "return the cost of each pair of points"
        raise ValueError(checks.sentence("dist_func", expected, tuple(C.shape), remedy))
