#pragma once
// What the causal depthwise convolutions share: strided tensors, packs of elements that are read at
// once, the activation, and the inputs of a sequence as its state continues them into the past.

constexpr Index NOTHING_KEPT = 0x7fffffffffffffff;  // in an entry of a state, among those that name an input

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

template <class T> constexpr bool IS_BFLOAT16 = false;
template <> constexpr bool IS_BFLOAT16<__nv_bfloat16> = true;

// Elements that lie next to each other, aligned as a whole.
template <class T, int n> struct Pack {
    T at[n];
    typedef typename Bits<n * sizeof(T)>::Type Whole;
    template <class Real> __device__ __forceinline__ Real value(int k) const {
        if constexpr (IS_BFLOAT16<T> && n % 2 == 0) {  // by one instruction
            unsigned two;
            memcpy(&two, at + k / 2 * 2, sizeof two);
            return Real(__uint_as_float(k % 2 ? two & 0xffff0000u : two << 16));
        }
        return widen<Real>(at[k]);
    }
    __device__ __forceinline__ void read(const T* from) {
        Whole bits = __ldg(reinterpret_cast<const Whole*>(from));
        memcpy(this, &bits, sizeof bits);
    }
    __device__ __forceinline__ void read_written(const T* from) {  // what the kernel itself writes
        Whole bits = *reinterpret_cast<const Whole*>(from);
        memcpy(this, &bits, sizeof bits);
    }
    __device__ __forceinline__ void write(T* to) const {
        Whole bits;
        memcpy(&bits, this, sizeof bits);
        __stcg(reinterpret_cast<Whole*>(to), bits);  // as a whole, which a plain store is not sure to be
    }
};

// Copies from global to shared memory, on the side if there are 4, 8 or 16 bytes; zeros where they do
// not exist. A thread can read what it has copied after `wait_for_copies`. once: nobody else reads it.
template <int bytes, bool once> __device__ __forceinline__ void copy_aside(void* to, const void* from, bool exists) {
#if __CUDA_ARCH__ >= 800
    if constexpr (bytes >= 4) {
        unsigned place = unsigned(__cvta_generic_to_shared(to));
        int size = exists ? bytes : 0;
        if constexpr (bytes == 16 && once)  // past the L1 cache
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(size) : "memory");
        else
            asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(place), "l"(from), "n"(bytes), "r"(size)
                         : "memory");
        return;
    }
#endif
    typename Bits<bytes>::Type bits{};
    if (exists) bits = __ldg(static_cast<const typename Bits<bytes>::Type*>(from));
    memcpy(to, &bits, bytes);
}

// Ends a group of copies.
__device__ __forceinline__ void end_of_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all groups of copies but the last `n`.
template <int n> __device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
#endif
}

__device__ __forceinline__ float reciprocal(float v) {
#ifdef __CUDA_ARCH__
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(v));  // __fdividef adds a zero
    return v;
#else
    return 1 / v;
#endif
}

// For results that are rounded to 16 bits a quick exponential is good enough.
template <bool quick> __device__ __forceinline__ float sigmoid(float v) {
    return reciprocal(1.0f + (quick ? __expf(-v) : exp(-v)));
}
template <bool quick> __device__ __forceinline__ double sigmoid(double v) { return 1 / (1 + exp(-v)); }

template <bool silu, bool quick, class Real> __device__ __forceinline__ Real activate(Real v) {
    return silu ? v * sigmoid<quick>(v) : v;
}

template <bool silu, bool quick, class Real> __device__ __forceinline__ Real activation_slope(Real v) {
    if (!silu) return Real(1);
    Real s = sigmoid<quick>(v);
    return s + v * s * (Real(1) - s);
}

// The weights of one channel, and its bias (0 without one).
template <class Real, int W> struct Filter {
    Real weight[W], bias;
    // bias + sum_k weight[k] window[k], the newest input last
    __device__ __forceinline__ Real apply(const Real* window) const {
        Real sum = bias;
#pragma unroll
        for (int k = 0; k < W; ++k) sum += weight[k] * window[k];
        return sum;
    }
};

// Filters of `n` neighbouring channels, with so many weights read at once.
template <int at_once, class Weight, class Bias, class Real, int W, int n>
__device__ __forceinline__ void load_filters(const Weight* weight /* [D, W] */, Index weight_d, Index weight_k,
                                             const Bias* bias /* [D] or null */, Index bias_d, Index channel,
                                             Filter<Real, W> (&filters)[n]) {
#pragma unroll
    for (int k = 0; k < n * W; k += at_once) {
        Pack<Weight, at_once> some;
        some.read(weight + (channel + k / W) * weight_d + k % W * weight_k);
#pragma unroll
        for (int j = 0; j < at_once; ++j) filters[(k + j) / W].weight[(k + j) % W] = widen<Real>(some.at[j]);
    }
#pragma unroll
    for (int c = 0; c < n; ++c) filters[c].bias = bias ? widen<Real>(bias[(channel + c) * bias_d]) : Real(0);
}

template <class T, int W> __device__ __forceinline__ void push(T (&window)[W], T newest) {
#pragma unroll
    for (int k = 0; k < W - 1; ++k) window[k] = window[k + 1];
    window[W - 1] = newest;
}
