"""PyTorch modules."""

import torch

from cuseq.ops.soft_dtw import COSTS
from cuseq.runtime import checks
from cuseq.torch.series import soft_dtw


class SoftDTWLoss(torch.nn.Module):
    """Soft-DTW between two batches of time series as a loss.

    Args:
        gamma, cost, bandwidth: as `cuseq.soft_dtw` takes them.
        normalize: not in this release; leave it False.
        reduction: "mean" or "sum" over the batch, or "none" for one value a pair.

    Called as ``loss(x, y, lengths_x=None, lengths_y=None)`` with x (B, N, D) and y (B, M, D);
    shapes, dtypes, lengths and errors as `cuseq.soft_dtw`.

    >>> import torch, cuseq.torch
    >>> loss = cuseq.torch.SoftDTWLoss(gamma=0.1)
    >>> x = torch.zeros(8, 50, 3, requires_grad=True)
    >>> loss(x, torch.ones(8, 40, 3)).backward()
    >>> x.grad.shape
    torch.Size([8, 50, 3])
    """

    def __init__(
        self, gamma=1.0, *, cost="sqeuclidean", bandwidth=None, normalize=False, reduction="mean"
    ):
        super().__init__()
        checks.one_of("cost", cost, COSTS)
        checks.not_yet("normalize", normalize, False)
        checks.one_of("reduction", reduction, ("mean", "sum", "none"))
        self.gamma, self.cost, self.bandwidth = gamma, cost, bandwidth
        self.reduction = reduction

    def forward(self, x, y, lengths_x=None, lengths_y=None):
        values = soft_dtw(
            x,
            y,
            gamma=self.gamma,
            cost=self.cost,
            bandwidth=self.bandwidth,
            lengths_a=lengths_x,
            lengths_b=lengths_y,
        )
        return values if self.reduction == "none" else getattr(values, self.reduction)()

    def extra_repr(self):
        return f"gamma={self.gamma}, cost={self.cost!r}, reduction={self.reduction!r}"
