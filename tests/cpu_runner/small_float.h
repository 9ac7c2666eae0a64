#pragma once
// Conversions of a 16-bit float with M bits of mantissa to float, and from double, rounded once.

#include <math.h>

#include "cuda_on_cpu.h"

namespace cuda_on_cpu {

template <int M> float widen(unsigned short bits) {
    constexpr int exponents = (1 << (15 - M)) - 1, bias = exponents / 2;
    int exponent = bits >> M & exponents, mantissa = bits & ((1 << M) - 1);
    float size;
    if (exponent == exponents) size = __int_as_float(0x7f800000 | mantissa << (23 - M));
    else if (exponent == 0) size = ldexpf(float(mantissa), 1 - bias - M);
    else size = ldexpf(float(mantissa | 1 << M), exponent - bias - M);
    return bits >> 15 ? -size : size;
}

template <int M> unsigned short narrow(double v) {
    constexpr int exponents = (1 << (15 - M)) - 1, least = 1 - exponents / 2;  // of a normal number
    if (isnan(v)) return 0x7fff;
    int sign = signbit(v) ? 0x8000 : 0, infinity = exponents << M;
    if (isinf(v)) return (unsigned short)(sign | infinity);
    int exponent = v == 0 ? least : max(ilogb(v), least);
    if (exponent > -least + 1) return (unsigned short)(sign | infinity);
    // the mantissa with its leading one, which a subnormal lacks; a carry moves into the exponent
    int mantissa = int(rint(ldexp(fabs(v), M - exponent)));
    int size = min(((exponent - least) << M) + mantissa, infinity);
    return (unsigned short)(sign | size);
}

}  // namespace cuda_on_cpu

// A type, its pair and its conversions as CUDA's headers name them.
#define SMALL_FLOAT(T, T2, M, name, as)                                                            \
    struct T {                                                                                     \
        unsigned short bits;                                                                       \
        T() = default;                                                                             \
        template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>            \
        T(Number v) : bits(cuda_on_cpu::narrow<M>(double(v))) {}                                   \
        operator float() const { return cuda_on_cpu::widen<M>(bits); }                             \
    };                                                                                             \
    struct alignas(4) T2 { T x, y; };                                                              \
    inline float __##name##2float(T v) { return v; }                                               \
    inline T __float2##name(float v) { return v; }                                                 \
    inline T __float2##name##_rn(float v) { return v; }                                            \
    inline T __double2##name(double v) { return v; }                                               \
    inline unsigned short __##as##_as_ushort(T v) { return v.bits; }                               \
    inline T __ushort_as_##as(unsigned short bits) { return cuda_on_cpu::bits_as<T>(bits); }
