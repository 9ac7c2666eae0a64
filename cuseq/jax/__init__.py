"""JAX: the operators in programs of jit, grad, vmap and scan. An adapter; the mathematics is in
ops/.

    import jax, cuseq.jax
    loss = lambda a, b: cuseq.jax.soft_dtw(a, b, gamma=0.1).mean()
    value, grad = jax.jit(jax.value_and_grad(loss))(a, b)

with a (B, N, D) and b (B, M, D) on a CUDA device or the CPU.
"""

from cuseq.jax.convolution import (
    causal_conv1d,
    causal_conv1d_update,
    causal_conv1d_varlen,
    causal_conv1d_varlen_with_state,
    causal_conv1d_with_state,
)
from cuseq.jax.series import (
    soft_dtw,
    soft_dtw_alignment,
    soft_dtw_divergence,
    soft_dtw_from_cost,
)

__all__ = [
    "causal_conv1d",
    "causal_conv1d_update",
    "causal_conv1d_varlen",
    "causal_conv1d_varlen_with_state",
    "causal_conv1d_with_state",
    "soft_dtw",
    "soft_dtw_alignment",
    "soft_dtw_divergence",
    "soft_dtw_from_cost",
]
