"""PyTorch: the operators with autograd, and modules. An adapter; the mathematics is in ops/.

    import torch, cuseq.torch
    loss = cuseq.torch.SoftDTWLoss(gamma=0.1)
    loss(prediction, target).backward()

with prediction (B, N, D) and target (B, M, D) on CUDA or the CPU.
"""

from cuseq.torch.causal_conv1d_layer import CausalConv1d
from cuseq.torch.convolution import (
    causal_conv1d,
    causal_conv1d_update,
    causal_conv1d_varlen,
    causal_conv1d_varlen_with_state,
    causal_conv1d_with_state,
)
from cuseq.torch.series import soft_dtw, soft_dtw_divergence, soft_dtw_from_cost
from cuseq.torch.soft_dtw_loss import SoftDTWLoss

__all__ = [
    "CausalConv1d",
    "SoftDTWLoss",
    "causal_conv1d",
    "causal_conv1d_update",
    "causal_conv1d_varlen",
    "causal_conv1d_varlen_with_state",
    "causal_conv1d_with_state",
    "soft_dtw",
    "soft_dtw_divergence",
    "soft_dtw_from_cost",
]
