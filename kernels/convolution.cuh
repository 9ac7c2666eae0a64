#pragma once
// What the causal depthwise convolutions share: strided tensors, the activation, the input as the
// state continues it into the past.

// One channel of one batch item of a tensor (B, D, L): positions with their stride in elements,
// which is known to be 1 where DENSE is.
template <class T, bool DENSE = false> struct Row {
    T* data;
    Index stride;
    __device__ __forceinline__ T& operator[](Index position) const { return data[DENSE ? position : position * stride]; }
};

// A tensor (B, D, L) with its strides in elements; data is null where a call has no such tensor.
template <class T> struct Tensor {
    T* data;
    Index stride_batch, stride_channel, stride_position;
    template <bool DENSE = false> __device__ __forceinline__ Row<T, DENSE> row(Index batch, Index channel) const {
        return {data + batch * stride_batch + channel * stride_channel, stride_position};
    }
};

template <class Real> __device__ __forceinline__ Real sigmoid(Real v) { return Real(1) / (Real(1) + exp(-v)); }

template <class Real> __device__ __forceinline__ Real activate(Real v, bool silu) { return silu ? v * sigmoid(v) : v; }

template <class Real> __device__ __forceinline__ Real activation_slope(Real v, bool silu) {
    Real s = sigmoid(v);
    return silu ? s * (Real(1) + v * (Real(1) - s)) : Real(1);
}

// The weights of one channel, and its bias (0 without one).
template <class Real, int W> struct Filter {
    Real weight[W], bias;

    template <class Weight, class Bias>
    __device__ void load(const Weight* weights /* [D, W] */, Index stride_channel, Index stride_tap,
                         const Bias* biases /* [D] or null */, Index bias_stride, Index channel) {
#pragma unroll
        for (int k = 0; k < W; ++k) weight[k] = widen<Real>(weights[channel * stride_channel + k * stride_tap]);
        bias = biases ? widen<Real>(biases[channel * bias_stride]) : Real(0);
    }

    // bias + sum_k weight[k] window[k], the newest input last
    __device__ __forceinline__ Real apply(const Real (&window)[W]) const {
        Real sum = bias;
#pragma unroll
        for (int k = 0; k < W; ++k) sum += weight[k] * window[k];
        return sum;
    }
};

template <class Real, int W> __device__ __forceinline__ void push(Real (&window)[W], Real newest) {
#pragma unroll
    for (int k = 0; k < W - 1; ++k) window[k] = window[k + 1];
    window[W - 1] = newest;
}
