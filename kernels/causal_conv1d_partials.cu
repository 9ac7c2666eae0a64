// Causal depthwise convolution, gradients of weights and bias from sums over parts of the positions.
//
// Adds the sums of all parts in their order, slices of them first, then the slices, so that gradients
// are the same bits every time.
//
// Launch: grid (ceil(D (W + 1) / 32)), block (32 * SLICES).
// Compiled with: WEIGHT_T, BIAS_T, REAL, WIDTH.

#include "common.cuh"

typedef REAL Real;

constexpr int SLICES = 8;
constexpr int SUMS = WIDTH + 1;  // gradients of a channel: weights, then the bias

extern "C" __global__ void __launch_bounds__(WARP * SLICES)
causal_conv1d_partials(const Real* partials /* [parts, D, W + 1] */, Index parts, Index D,
                           WEIGHT_T* grad_weight /* [D, W] */, BIAS_T* grad_bias /* [D] or null */) {
    __shared__ double slices[SLICES][WARP];
    Index i = Index(blockIdx.x) * WARP + threadIdx.x % WARP;
    int slice = threadIdx.x / WARP;
    double sum = 0;
    if (i < D * SUMS)
        for (Index part = slice; part < parts; part += SLICES) sum += partials[part * D * SUMS + i];
    slices[slice][threadIdx.x % WARP] = sum;
    __syncthreads();
    if (slice > 0 || i >= D * SUMS) return;
    for (int other = 1; other < SLICES; ++other) sum += slices[other][threadIdx.x];
    Index d = i / SUMS, k = i % SUMS;
    if (k < WIDTH) grad_weight[d * WIDTH + k] = narrow<WEIGHT_T>(sum);
    else if (grad_bias) grad_bias[d] = narrow<BIAS_T>(sum);
}
