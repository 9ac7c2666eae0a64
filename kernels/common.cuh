#pragma once
// Types and conversions that every kernel uses. Kernels compute in Real (float or double) and
// hold their arrays in any of double, float, __half and __nv_bfloat16.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef long long Index;  // offsets in elements and sizes: tensors may exceed 2^32 elements

constexpr int WARP = 32;
constexpr unsigned FULL_MASK = 0xffffffffu;

// widen: any storage type to the type computed in
template <class Real> __device__ __forceinline__ Real widen(double v) { return Real(v); }
template <class Real> __device__ __forceinline__ Real widen(float v) { return Real(v); }
template <class Real> __device__ __forceinline__ Real widen(__half v) { return Real(__half2float(v)); }
template <class Real> __device__ __forceinline__ Real widen(__nv_bfloat16 v) { return Real(__bfloat162float(v)); }

// narrow: rounded to nearest even, once
template <class T, class Real> struct Narrow {
    static __device__ __forceinline__ T from(Real v) { return T(v); }
};
template <class Real> struct Narrow<__half, Real> {
    static __device__ __forceinline__ __half from(Real v) { return __float2half_rn(float(v)); }
};
template <class Real> struct Narrow<__nv_bfloat16, Real> {
    static __device__ __forceinline__ __nv_bfloat16 from(Real v) { return __float2bfloat16_rn(float(v)); }
};
template <class T, class Real> __device__ __forceinline__ T narrow(Real v) { return Narrow<T, Real>::from(v); }

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
template <class Real> __device__ __forceinline__ Real not_a_number();
template <> __device__ __forceinline__ float not_a_number<float>() { return __int_as_float(0x7fffffff); }
template <> __device__ __forceinline__ double not_a_number<double>() { return __longlong_as_double(0x7fffffffffffffffLL); }

// Shared memory of which the launch gives the size.
#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(T, name) extern __shared__ T name[]
#endif

// Asks for the cache line of an address, and does not wait for it.
__device__ __forceinline__ void prefetch(const void* address) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
#endif
}

// Keeps an address in registers, where the compiler might compute it again at each use.
template <class T> __device__ __forceinline__ void keep(T*& address) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+l"(address));
#endif
}
