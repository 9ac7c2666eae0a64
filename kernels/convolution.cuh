#pragma once
// What the causal depthwise convolutions share: strided tensors, packs of elements that are read at
// once, the activation, and the inputs of a sequence as its state continues them into the past.

constexpr int NOTHING_KEPT = 0x7fffffff;  // in an entry of a state, among those that name an input

// One channel of one batch item of a tensor (B, D, L): positions with their stride in elements.
template <class T> struct Row {
    T* data;
    Index stride;
    __device__ __forceinline__ T& operator[](Index position) const { return data[position * stride]; }
};

// A tensor (B, D, L) with its strides in elements; data is null where a call has no such tensor.
template <class T> struct Tensor {
    T* data;
    Index stride_batch, stride_channel, stride_position;
    __device__ __forceinline__ Row<T> row(Index batch, Index channel) const {
        return {data + batch * stride_batch + channel * stride_channel, stride_position};
    }
};

template <int bytes> struct Bits;  // what is read and written at once
template <> struct Bits<16> { typedef uint4 Type; };
template <> struct Bits<8> { typedef uint2 Type; };
template <> struct Bits<4> { typedef unsigned Type; };
template <> struct Bits<2> { typedef unsigned short Type; };

// Elements that lie next to each other, aligned as a whole.
template <class T, int n> struct Pack {
    T at[n];
    typedef typename Bits<n * sizeof(T)>::Type Whole;
    __device__ __forceinline__ void read(const T* from) {
        Whole bits = __ldg(reinterpret_cast<const Whole*>(from));
        memcpy(this, &bits, sizeof bits);
    }
    __device__ __forceinline__ void write(T* to) const {
        Whole bits;
        memcpy(&bits, this, sizeof bits);
        __stcg(reinterpret_cast<Whole*>(to), bits);  // as a whole, which a plain store is not sure to be
    }
};

// For results that are rounded to 16 bits a quick exponential is good enough.
template <bool quick> __device__ __forceinline__ float sigmoid(float v) {
    return __fdividef(1.0f, 1.0f + (quick ? __expf(-v) : exp(-v)));
}
template <bool quick> __device__ __forceinline__ double sigmoid(double v) { return 1 / (1 + exp(-v)); }

template <bool quick, class Real> __device__ __forceinline__ Real activate(Real v, bool silu) {
    return silu ? v * sigmoid<quick>(v) : v;
}

template <bool quick, class Real> __device__ __forceinline__ Real activation_slope(Real v, bool silu) {
    Real s = sigmoid<quick>(v);
    return silu ? s * (Real(1) + v * (Real(1) - s)) : Real(1);
}

// The weights of one channel, and its bias (0 without one).
template <class Real, int W> struct Filter {
    Real weight[W], bias;

    template <class Weight, class Bias>
    __device__ __forceinline__ void load(const Weight* weights /* [D, W] */, Index stride_channel, Index stride_tap,
                                         const Bias* biases /* [D] or null */, Index bias_stride, Index channel) {
#pragma unroll
        for (int k = 0; k < W; ++k) weight[k] = widen<Real>(weights[channel * stride_channel + k * stride_tap]);
        bias = biases ? widen<Real>(biases[channel * bias_stride]) : Real(0);
    }

    // bias + sum_k weight[k] window[k], the newest input last
    __device__ __forceinline__ Real apply(const Real* window) const {
        Real sum = bias;
#pragma unroll
        for (int k = 0; k < W; ++k) sum += weight[k] * window[k];
        return sum;
    }
};

template <class T, int W> __device__ __forceinline__ void push(T (&window)[W], T newest) {
#pragma unroll
    for (int k = 0; k < W - 1; ++k) window[k] = window[k + 1];
    window[W - 1] = newest;
}
