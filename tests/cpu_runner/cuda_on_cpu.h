#pragma once
// What a .cu file needs to be compiled by g++ and run on the CPU: the words of CUDA C++, its vector
// types, the functions of one thread, and those of threads together (their other side is in
// fibers.cpp). It has no asm and no float atomics: the kernels use none.
//
// __shared__ becomes a static variable, so that AddressSanitizer puts redzones around it, and
// fibers.cpp fills the library's .bss with 0xFF (NaN) before each block. A variable outside of a
// function that has no initial value would be filled as well: kernels have none. DYNAMIC_SHARED has
// the size of the launch, for which the library is compiled.

#include <math.h>
#include <string.h>

#include <type_traits>
#include <utility>

// ---- words. `used` keeps the compiler from taking shared memory that is never written for zeros.

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __shared__ static __attribute__((used))
#define DYNAMIC_SHARED(T, name) __shared__ T name[SHARED_BYTES / sizeof(T)]
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)

// ---- vector types, aligned as on the device: a misaligned access is caught

#define VECTOR(T, name, align2, align4)                                                            \
    struct alignas(align2) name##2 { T x, y; };                                                    \
    struct name##3 { T x, y, z; };                                                                 \
    struct alignas(align4) name##4 { T x, y, z, w; };                                              \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                     \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                             \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTOR(signed char, char, 2, 4)
VECTOR(unsigned char, uchar, 2, 4)
VECTOR(short, short, 4, 8)
VECTOR(unsigned short, ushort, 4, 8)
VECTOR(int, int, 8, 16)
VECTOR(unsigned, uint, 8, 16)
VECTOR(long long, longlong, 16, 16)
VECTOR(unsigned long long, ulonglong, 16, 16)
VECTOR(float, float, 8, 16)
VECTOR(double, double, 16, 16)
#undef VECTOR

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

// ---- numbers

namespace cuda_on_cpu {

template <class To, class From> To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}

// float to integer as the device does it: NaN is 0, and what is out of range is clamped
template <class Int, class Float> Int clamped(Float whole) {
    constexpr Int least = Int(1) << (8 * sizeof(Int) - 1 - 1) << 1;
    if (isnan(whole)) return 0;
    if (whole >= -Float(least)) return ~least;
    return whole < Float(least) ? least : Int(whole);
}

}  // namespace cuda_on_cpu

#define BITS(name, To, From) inline To name(From v) { return cuda_on_cpu::bits_as<To>(v); }
BITS(__float_as_int, int, float)
BITS(__int_as_float, float, int)
BITS(__float_as_uint, unsigned, float)
BITS(__uint_as_float, float, unsigned)
BITS(__double_as_longlong, long long, double)
BITS(__longlong_as_double, double, long long)
#undef BITS
inline int __double2hiint(double v) { return int(__double_as_longlong(v) >> 32); }
inline int __double2loint(double v) { return int(__double_as_longlong(v)); }
inline double __hiloint2double(int high, int low) {
    return cuda_on_cpu::bits_as<double>((unsigned long long)(unsigned)high << 32 | (unsigned)low);
}

#define TO_INTEGER(From, from, Int, to)                                                            \
    inline Int __##from##2##to##_rn(From v) { return cuda_on_cpu::clamped<Int>(rint(v)); }         \
    inline Int __##from##2##to##_rz(From v) { return cuda_on_cpu::clamped<Int>(trunc(v)); }        \
    inline Int __##from##2##to##_rd(From v) { return cuda_on_cpu::clamped<Int>(floor(v)); }        \
    inline Int __##from##2##to##_ru(From v) { return cuda_on_cpu::clamped<Int>(ceil(v)); }
TO_INTEGER(float, float, int, int)
TO_INTEGER(float, float, long long, ll)
TO_INTEGER(double, double, int, int)
TO_INTEGER(double, double, long long, ll)
#undef TO_INTEGER

// The pairs of types that CUDA has; any other mixture is ambiguous, here as there.
#define MIN_MAX(T, A, B)                                                                           \
    inline T min(A a, B b) { return (T)a < (T)b ? (T)a : (T)b; }                                   \
    inline T max(A a, B b) { return (T)a > (T)b ? (T)a : (T)b; }
#define MIN_MAX_INTEGER(S, U) MIN_MAX(S, S, S) MIN_MAX(U, U, U) MIN_MAX(U, S, U) MIN_MAX(U, U, S)
MIN_MAX_INTEGER(int, unsigned)
MIN_MAX_INTEGER(long, unsigned long)
MIN_MAX_INTEGER(long long, unsigned long long)
#undef MIN_MAX_INTEGER
#undef MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }  // of a number and NaN: the number
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(a, b); }
inline double max(float a, double b) { return fmax(a, b); }
inline double min(double a, float b) { return fmin(a, b); }
inline double max(double a, float b) { return fmax(a, b); }

inline float rsqrtf(float v) { return 1 / sqrtf(v); }
inline double rsqrt(double v) { return 1 / sqrt(v); }
inline float rsqrt(float v) { return rsqrtf(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float v) { return 1 / v; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float v) { return sqrtf(v); }
inline float __expf(float v) { return expf(v); }
inline float __logf(float v) { return logf(v); }
inline float __log2f(float v) { return log2f(v); }
inline float __saturatef(float v) { return fminf(fmaxf(v, 0), 1); }

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {  // of the two, as one
    return unsigned(((unsigned long long)high << 32 | low) >> (shift & 31));
}

template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcv(const T* p) { return *p; }
template <class T> void __stcg(T* p, T v) { *p = v; }

// Integers only: float atomics would make a result depend on the order of the threads.
#define ATOMIC_ADD(T) inline T atomicAdd(T* p, T v) { T old = *p; *p = old + v; return old; }
ATOMIC_ADD(int)
ATOMIC_ADD(unsigned)
ATOMIC_ADD(unsigned long long)
#undef ATOMIC_ADD

// ---- what threads do together. The last two arguments are the place of the call: threads that
// meet must be at the same one.

namespace cuda_on_cpu {

extern int lane;  // of the thread that runs

// All threads of the block that have not ended meet here.
void meet_block(const char* what, const char* file, int line);

// The lanes of `mask` that have not ended meet here. Each brings a value and gets that of lane
// `source`, all bits set if that one is not here; with GET_BALLOT it gets the lanes whose value is
// not 0.
constexpr int GET_BALLOT = -1;
unsigned long long meet_warp(const char* what, unsigned mask, unsigned long long value, int source,
                             const char* file, int line);

// A block waits for one that has not been run: it is stuck.
void wait_for_another_block(const char* file, int line);

template <class T>
T shuffle(const char* what, unsigned mask, T value, int source, const char* file, int line) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
    unsigned long long slot = 0;
    __builtin_memcpy(&slot, &value, sizeof value);
    slot = meet_warp(what, mask, slot, source, file, line);
    __builtin_memcpy(&value, &slot, sizeof value);
    return value;
}

}  // namespace cuda_on_cpu

#define PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(PLACE) { cuda_on_cpu::meet_block("__syncthreads", file, line); }
inline void __syncwarp(unsigned mask = 0xffffffffu, PLACE) {
    cuda_on_cpu::meet_warp("__syncwarp", mask, 0, cuda_on_cpu::GET_BALLOT, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, PLACE) {
    return unsigned(cuda_on_cpu::meet_warp("__ballot_sync", mask, predicate != 0,
                                           cuda_on_cpu::GET_BALLOT, file, line));
}
inline int __any_sync(unsigned mask, int predicate, PLACE) {
    return __ballot_sync(mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, PLACE) {
    return __ballot_sync(mask, !predicate, file, line) == 0;
}

// A warp is cut into segments of `width` lanes; who reaches beyond its segment gets its own value.
template <class T> T __shfl_sync(unsigned mask, T value, int from, int width = warpSize, PLACE) {
    int source = (cuda_on_cpu::lane & ~(width - 1)) | (from & (width - 1));
    return cuda_on_cpu::shuffle("__shfl_sync", mask, value, source, file, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, PLACE) {
    int lane = cuda_on_cpu::lane, source = lane - int(delta);
    if (source < (lane & ~(width - 1))) source = lane;
    return cuda_on_cpu::shuffle("__shfl_up_sync", mask, value, source, file, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, PLACE) {
    int lane = cuda_on_cpu::lane, source = lane + int(delta);
    if (source > (lane | (width - 1))) source = lane;
    return cuda_on_cpu::shuffle("__shfl_down_sync", mask, value, source, file, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize, PLACE) {
    int lane = cuda_on_cpu::lane, source = lane ^ (bits & 31);
    if (source > (lane | (width - 1))) source = lane;
    return cuda_on_cpu::shuffle("__shfl_xor_sync", mask, value, source, file, line);
}
#undef PLACE

inline void __threadfence() {}
// Who sleeps waits for another block: those before it have ended, so it would wait for ever.
#define __nanosleep(t) cuda_on_cpu::wait_for_another_block(__FILE__, __LINE__)
inline void __threadfence_block() {}
unsigned __activemask() = delete;  // says nothing that a program may rely on

// ---- the way in from Python: one kernel a library

namespace cuda_on_cpu {

const char* run_grid(void (*thread)(void**), char* shared, char* shared_end, const unsigned* grid,
                     const unsigned* block, void** args, unsigned long long seed, int in_order);

template <auto kernel> struct Entry;
template <class... P, void (*kernel)(P...)> struct Entry<kernel> {
    template <size_t... I> static void call(void** args, std::index_sequence<I...>) {
        kernel(*static_cast<P*>(args[I])...);
    }
    static void thread(void** args) { call(args, std::index_sequence_for<P...>()); }

    template <class T> static constexpr char kind() {
        if (std::is_pointer_v<T>) return 'p';
        if (std::is_integral_v<T>) return 'i';
        return std::is_floating_point_v<T> ? 'f' : 's';
    }
    // the kinds of the parameters, then their sizes in bytes
    static constexpr char signature[] = {kind<P>()..., char(sizeof(P))..., 0};
};

}  // namespace cuda_on_cpu

namespace {  // The kernel's file is put in here, and sees these beside its own overloads.
using ::min, ::max, ::abs, ::fabs, ::exp, ::exp2, ::log, ::log2, ::fma, ::sqrt, ::isnan, ::isinf;
}

// set by the linker: where this library's .bss begins and ends
extern "C" __attribute__((visibility("hidden"))) char __bss_start[], _end[];

#define CUDA_ON_CPU_ENTRY(kernel)                                                                  \
    extern "C" const char* signature() {                                                           \
        return cuda_on_cpu::Entry<kernel>::signature;                                              \
    }                                                                                              \
    extern "C" const char* launch(const unsigned* grid, const unsigned* block, void** args,        \
                                  unsigned long long seed, int in_order) {                         \
        return cuda_on_cpu::run_grid(cuda_on_cpu::Entry<kernel>::thread, __bss_start, _end, grid,  \
                                     block, args, seed, in_order);                                 \
    }
