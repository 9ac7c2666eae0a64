"""GPU sequence kernels for any array library: soft-DTW and causal depthwise convolution."""

from cuseq.ops.causal_conv1d import (
    causal_conv1d,
    causal_conv1d_backward,
    causal_conv1d_with_state,
)
from cuseq.ops.causal_conv1d_update import causal_conv1d_update
from cuseq.ops.causal_conv1d_varlen import (
    causal_conv1d_varlen,
    causal_conv1d_varlen_backward,
    causal_conv1d_varlen_with_state,
)
from cuseq.ops.dtw import dtw, dtw_path
from cuseq.ops.soft_dtw import (
    soft_dtw,
    soft_dtw_alignment,
    soft_dtw_value_and_grad,
    soft_dtw_value_and_grad_gamma,
)
from cuseq.ops.soft_dtw_barycenter import (
    soft_dtw_barycenter,
    soft_dtw_barycenter_with_history,
)
from cuseq.ops.soft_dtw_cdist import (
    soft_dtw_cdist,
    soft_dtw_cdist_value_and_grad,
    soft_dtw_divergence_cdist,
)
from cuseq.ops.soft_dtw_divergence import (
    soft_dtw_divergence,
    soft_dtw_divergence_value_and_grad,
)
from cuseq.ops.soft_dtw_from_cost import (
    soft_dtw_from_cost,
    soft_dtw_from_cost_value_and_grad,
    soft_dtw_from_cost_value_and_grad_gamma,
)
from cuseq.ops.soft_dtw_hvp import soft_dtw_from_cost_hvp, soft_dtw_hvp
from cuseq.ops.soft_dtw_subsequence import soft_dtw_subsequence, soft_dtw_subsequence_match

__version__ = "0.1.0.dev0"

__all__ = [
    "causal_conv1d",
    "causal_conv1d_backward",
    "causal_conv1d_update",
    "causal_conv1d_varlen",
    "causal_conv1d_varlen_backward",
    "causal_conv1d_varlen_with_state",
    "causal_conv1d_with_state",
    "dtw",
    "dtw_path",
    "soft_dtw",
    "soft_dtw_alignment",
    "soft_dtw_barycenter",
    "soft_dtw_barycenter_with_history",
    "soft_dtw_cdist",
    "soft_dtw_cdist_value_and_grad",
    "soft_dtw_divergence",
    "soft_dtw_divergence_cdist",
    "soft_dtw_divergence_value_and_grad",
    "soft_dtw_from_cost",
    "soft_dtw_from_cost_hvp",
    "soft_dtw_from_cost_value_and_grad",
    "soft_dtw_from_cost_value_and_grad_gamma",
    "soft_dtw_hvp",
    "soft_dtw_subsequence",
    "soft_dtw_subsequence_match",
    "soft_dtw_value_and_grad",
    "soft_dtw_value_and_grad_gamma",
]
