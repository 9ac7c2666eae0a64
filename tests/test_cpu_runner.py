"""The runner of kernels on the CPU: it computes what CUDA would and catches what CUDA would not."""

import inspect
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import ml_dtypes
import numpy as np
import pytest

import cuseq.runtime.kernels
from tests import cpu_runner
from tests.cpu_runner import CpuKernel, sanitized_environment, shuffled

pytestmark = pytest.mark.skipif(not cpu_runner.COMPILER, reason="g++ is not installed")

SEEDS = range(8)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compiles the kernel `name` of a source text, with headers as {name: text} beside it."""
    folder = tmp_path_factory.mktemp("kernels")

    def compile_text(name, text, macros=(), headers=()):
        path = folder / f"{name}.cu"
        path.write_text(dedent(text))
        for header, of_header in dict(headers).items():
            (folder / header).write_text(dedent(of_header))
        return CpuKernel(path, name, macros)

    return compile_text


# ---- threads and what they do together


def test_every_thread_of_every_block_runs_once(compiled):
    kernel = compiled(
        "places",
        """
        extern "C" __global__ void __launch_bounds__(256) places(int* out) {
            int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
            int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
            int threads = blockDim.x * blockDim.y * blockDim.z;
            atomicAdd(&out[block * threads + thread], 1 + block * threads + thread);
        }
        """,
    )
    for grid, block in [((1,), (1,)), ((5,), (33,)), ((3, 2, 4), (5, 7, 2)), ((2, 3), (1024,))]:
        for seed in (0, 1, 2):
            out = np.zeros(np.prod(grid) * np.prod(block), np.int32)
            kernel(grid, block, (out,), seed=seed)
            assert (out == 1 + np.arange(out.size)).all()


def shuffled_lanes(operation, values, amount, width):
    """What each of the threads, all in one warp, gets from a shuffle; NaN from a lane not there."""
    result = np.full(len(values), np.nan)
    for lane in range(len(values)):
        first = lane // width * width
        last = first + width - 1
        source = {
            "idx": first + amount % width,
            "up": lane - amount if lane - amount >= first else lane,
            "down": lane + amount if lane + amount <= last else lane,
            "xor": lane ^ amount if lane ^ amount <= last else lane,
        }[operation]
        if source < len(values):
            result[lane] = values[source]
    return result


@pytest.mark.parametrize("threads", [1, 31, 32, 33, 64])
@pytest.mark.parametrize("width", [32, 8])
def test_shuffles(compiled, threads, width):
    kernel = compiled(
        "shuffles",
        """
        extern "C" __global__ void shuffles(double* out /* [4, threads] */, int amount, int width) {
            int t = threadIdx.x, n = blockDim.x;
            double v = 0.5 + t;
            out[t] = __shfl_sync(0xffffffffu, v, amount, width);
            out[n + t] = __shfl_up_sync(0xffffffffu, v, amount, width);
            out[2 * n + t] = __shfl_down_sync(0xffffffffu, v, amount, width);
            out[3 * n + t] = __shfl_xor_sync(0xffffffffu, v, amount, width);
        }
        """,
    )
    values = 0.5 + np.arange(threads)
    warps = [values[first : first + 32] for first in range(0, threads, 32)]
    for amount in (0, 1, 5, 16, 31):
        expected = [
            np.concatenate([shuffled_lanes(operation, warp, amount, width) for warp in warps])
            for operation in ("idx", "up", "down", "xor")
        ]
        for seed in (0, 1, 2):
            out = np.zeros((4, threads))
            kernel((1,), (threads,), (out, np.int32(amount), np.int32(width)), seed=seed)
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    "dtype, name",
    [
        (np.int32, "int"),
        (np.uint32, "unsigned"),
        (np.int64, "long long"),
        (np.float32, "float"),
        (np.float64, "double"),
    ],
)
def test_shuffle_types(compiled, dtype, name):
    kernel = compiled(
        "rotate",
        """
        extern "C" __global__ void rotate(T* x) {
            x[threadIdx.x] = __shfl_sync(0xffffffffu, x[threadIdx.x], threadIdx.x + 1);
        }
        """,
        (("T", name),),
    )
    x = np.random.default_rng(0).integers(0, 256, 32 * np.dtype(dtype).itemsize, np.uint8)
    expected = np.roll(x.view(dtype), -1).tobytes()
    kernel((1,), (32,), (x,))
    assert x.tobytes() == expected


@pytest.mark.parametrize("threads", [1, 31, 33, 64])
def test_ballots_and_partial_masks(compiled, threads):
    kernel = compiled(
        "ballots",
        """
        extern "C" __global__ void ballots(unsigned* out /* [threads, 5] */, unsigned pattern) {
            int lane = threadIdx.x % 32;
            bool mine = pattern >> lane & 1;
            unsigned* row = out + 5 * threadIdx.x;
            row[0] = __ballot_sync(0xffffffffu, mine);
            row[1] = __any_sync(0xffffffffu, mine);
            row[2] = __all_sync(0xffffffffu, mine);
            if (mine) row[3] = __ballot_sync(pattern, lane % 2);
            else row[3] = __ballot_sync(~pattern, 1);
            __syncwarp();
            if (!mine) return;
            row[4] = __shfl_sync(0xffffffffu, lane, __ffs(pattern) - 1);  // only those that live
        }
        """,
    )
    for pattern in (0x1, 0xF0F0F0F1, 0xFFFFFFFF, 0x80000001):
        for seed in (0, 1, 2):
            out = np.zeros((threads, 5), np.uint32)
            kernel((1,), (threads,), (out, np.uint32(pattern)), seed=seed)
            for thread in range(threads):
                here = (1 << min(32, threads - thread // 32 * 32)) - 1
                ballot, mine = pattern & here, pattern >> thread % 32 & 1
                among = pattern & 0xAAAAAAAA & here if mine else ~pattern & here
                row = [ballot, ballot != 0, ballot == here, among, 0]
                row[4] = (pattern & -pattern).bit_length() - 1 if mine else 0
                assert out[thread].tolist() == row


def test_a_missing_barrier_shows_and_a_present_one_holds(compiled):
    kernel = compiled(
        "neighbours",
        """
        extern "C" __global__ void neighbours(int* out, int barrier, int by) {
            __shared__ int s[64];
            int t = threadIdx.x, v = t;
            for (int round = 0; round < 3; ++round) {
                s[t] = v;
                if (barrier == 1) __syncwarp();
                if (barrier == 2) __syncthreads();
                v = s[t ^ by];
                if (barrier == 1) __syncwarp();
                if (barrier == 2) __syncthreads();
            }
            out[t] = v;
        }
        """,
    )
    thread = np.arange(64)
    holding = [(1, 1), (2, 1), (2, 32)]  # the barrier, and how far the neighbour is
    for barrier, by in [*holding, (0, 1), (0, 32), (1, 32)]:
        results = []
        for seed in SEEDS:
            out = np.zeros(64, np.int32)
            kernel((1,), (64,), (out, np.int32(barrier), np.int32(by)), seed=seed)
            results.append((out == thread ^ by).all())
        assert all(results) == ((barrier, by) in holding)


def test_blocks_that_lean_on_each_other_show(compiled):
    kernel = compiled(
        "chain",
        """
        extern "C" __global__ void chain(int* x) { x[blockIdx.x + 1] = x[blockIdx.x] + 1; }
        """,
    )
    ends = set()
    for seed in range(3):
        x = np.zeros(9, np.int32)
        with shuffled(seed):
            kernel((8,), (1,), (x,))
        ends.add(int(x[-1]))
    assert 8 in ends and len(ends) > 1


STUCK = """
    extern "C" __global__ void stuck(int* out, int how) {
        int t = threadIdx.x;
        if (how == 1 && t < 16) __syncthreads();  // one
        else if (how == 1) __syncthreads();  // other
        if (how == 2) out[t] = t < 16 ? __shfl_sync(~0u, t, 0) : __shfl_up_sync(~0u, t, 1);
        if (how == 3) __syncwarp(t == 0 ? 2 : ~0u);
        if (how == 4 && t == 5) __syncwarp();
        if (how == 5 && t < 40) return;  // those that end need not come
        __syncthreads();
        out[t] = how;
    }
"""


def test_threads_that_wait_for_ever_raise(compiled):
    kernel = compiled("stuck", STUCK)
    words = {
        1: ["16 threads from thread 0 at __syncthreads, stuck.cu:4", "48 threads from thread 16"],
        2: ["at __shfl_sync", "at __shfl_up_sync, stuck.cu:6 with mask 0xffffffff"],
        3: ["1 thread from thread 0 at __syncwarp", "with mask 0x2"],
        4: ["1 thread from thread 5 at __syncwarp", "63 threads from thread 0 at __syncthreads"],
    }
    for seed in (0, 1):
        for how, expected in words.items():
            with pytest.raises(RuntimeError, match=r"block \(0, 0, 0\) is stuck") as raised:
                kernel((1,), (64,), (np.zeros(64, np.int32), np.int32(how)), seed=seed)
            assert all(word in str(raised.value) for word in expected)
        out = np.zeros(64, np.int32)
        kernel((1,), (64,), (out, np.int32(5)), seed=seed)
        assert out.tolist() == 40 * [0] + 24 * [5]


# ---- blocks that wait for earlier ones

WAIT = """
    #pragma once
    __device__ void wait(const int* x) {
        while (__ldcv(x) == 0) __nanosleep(20);  // wait
    }
"""
PATIENT = """
    extern "C" __global__ void patient(int* x, int* turns) {
        wait(x + blockIdx.x);
        turns[threadIdx.x] = atomicAdd(&turns[blockDim.x], 1);
        __syncthreads();
        if (threadIdx.x == 0) x[blockIdx.x + 1] = x[blockIdx.x] + 1;
    }
"""
INCLUDES = '#include "{}"\n'.format


@pytest.mark.parametrize(
    "text, headers",
    [
        (dedent(WAIT) + dedent(PATIENT), {}),
        (INCLUDES("wait.cuh") + dedent(PATIENT), {"wait.cuh": WAIT}),
        (
            INCLUDES("outer.cuh") + dedent(PATIENT),
            {"outer.cuh": INCLUDES("inner.cuh"), "inner.cuh": WAIT},
        ),
    ],
    ids=["in the kernel", "in a header", "in a header's header"],
)
def test_blocks_that_wait_for_earlier_ones_come_in_order(compiled, text, headers):
    """Under any seed; the threads of a block still take turns in another order."""
    kernel = compiled("patient", text, headers=headers)
    orders = set()
    for seed in SEEDS:
        x, turns = np.zeros(9, np.int32), np.zeros(65, np.int32)
        x[0] = 1
        kernel((8,), (64,), (x, turns), seed=seed)
        assert (x == 1 + np.arange(9)).all()
        orders.add(turns[:64].tobytes())
    assert len(orders) > 1


def test_a_block_that_waits_for_what_no_earlier_one_does_is_stuck(compiled):
    kernel = compiled("patient", dedent(WAIT) + dedent(PATIENT))
    line = 1 + [text.endswith("// wait") for text in dedent(WAIT).splitlines()].index(True)
    words = rf"stuck; 3 threads from thread 0 at __nanosleep, patient\.cu:{line}$"
    for seed in (0, 1, 2):
        x, turns = np.zeros(5, np.int32), np.zeros(4, np.int32)
        with pytest.raises(RuntimeError, match=r"^patient: block \(0, 0, 0\) is " + words):
            kernel((4,), (3,), (x, turns), seed=seed)
        assert not x.any()
        x[0] = 1
        kernel((4,), (3,), (x, turns), seed=seed)
        assert x[4] == 5


def test_sleepers_and_those_at_a_barrier_are_told_apart(compiled):
    kernel = compiled(
        "half",
        """
        extern "C" __global__ void half(int* x) {
            if (threadIdx.x >= 24) __nanosleep(20);
            __syncthreads();
            *x = 1;
        }
        """,
    )
    x = np.zeros(1, np.int32)
    with pytest.raises(
        RuntimeError, match="24 threads .* __syncthreads.* 8 threads .* __nanosleep"
    ):
        kernel((1,), (32,), (x,))
    assert x[0] == 0


def test_ldcv_reads_what_is_there_now(compiled):
    kernel = compiled(
        "fresh",
        """
        extern "C" __global__ void fresh(ulonglong2* mail, unsigned long long* out, int* number) {
            if (threadIdx.x == 5) mail[1] = {3, 4}, *number = -7;
            __syncthreads();
            ulonglong2 v = __ldcv(&mail[1]);
            out[threadIdx.x] = 10 * v.x + v.y + (__ldcv(number) == -7 ? 100 : 0);
        }
        """,
    )
    for seed in (0, 1, 2):
        memory, out, number = np.zeros(5, np.uint64), np.zeros(40, np.uint64), np.zeros(1, np.int32)
        mail = memory[memory.ctypes.data % 16 // 8 :][:4]
        kernel((1,), (40,), (mail, out, number), seed=seed)
        assert (out == 134).all()


# ---- memory and numbers


def test_shared_memory_is_poisoned_before_each_block(compiled):
    kernel = compiled(
        "poisoned",
        """
        template <int N> __device__ __forceinline__ float* room() {
            __shared__ float s[N];
            return s;
        }
        extern "C" __global__ void poisoned(unsigned* out /* [blocks, 4] */) {
            __shared__ char a[3];
            __shared__ __align__(16) double b[33];
            __shared__ unsigned never_written;
            unsigned* row = out + 4 * blockIdx.x;
            row[0] = isnan(b[0]) && isnan(b[32]) && a[0] == -1 && a[2] == -1;
            row[1] = isnan(room<5>()[4]) && isnan(room<70>()[69]);
            row[2] = never_written;
            row[3] = (unsigned long long)b % 16;
            a[0] = a[2] = 0;
            b[0] = b[32] = room<5>()[4] = room<70>()[69] = 0;
        }
        """,
    )
    out = np.zeros((3, 4), np.uint32)
    kernel((3,), (1,), (out,))
    assert out.tolist() == 3 * [[1, 1, 0xFFFFFFFF, 0]]


@pytest.mark.parametrize(
    "dtype, name, macros",
    [
        (np.dtype(np.float16), "half", "__half"),
        (np.dtype(ml_dtypes.bfloat16), "bfloat16", "__nv_bfloat16"),
    ],
)
def test_small_floats_agree_with_numpy(compiled, dtype, name, macros):
    kernel = compiled(
        "convert",
        """
        #include <cuda_bf16.h>
        #include <cuda_fp16.h>
        #define PASTE(a, b, c) a##b##c
        #define TO_FLOAT(name) PASTE(__, name, 2float)
        #define FROM(kind, name) PASTE(__##kind##2, name, )
        extern "C" __global__ void convert(const SMALL* a, float* widened, const double* b,
                                           SMALL* from_double, SMALL* from_float, long long n) {
            for (long long k = threadIdx.x; k < n; k += blockDim.x) {
                widened[k] = TO_FLOAT(NAME)(a[k]);
                from_double[k] = FROM(double, NAME)(b[k]);
                from_float[k] = PASTE(__float2, NAME, _rn)(float(b[k]));
            }
        }
        """.replace("NAME", name),
        (("SMALL", macros),),
    )
    every = np.arange(65536, dtype=np.uint16).view(dtype)
    random = np.random.default_rng(0).integers(0, 2**32, 65536, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        exact = every.astype(np.float32)
        ties = (exact + np.roll(exact, -1)) / 2
        near = [np.nextafter(ties, np.float32(to)) for to in (-np.inf, np.inf)]
        for values in (exact, random, ties, *near):
            values = values.astype(np.float64)
            widened, back = np.zeros(65536, np.float32), np.zeros((2, 65536), dtype)
            kernel((1,), (4,), (every, widened, values, back[0], back[1], 65536))
            np.testing.assert_array_equal(widened, every.astype(np.float32))
            assert (np.signbit(widened) == np.signbit(every.astype(np.float32))).all()
            expected = values.astype(np.float32).astype(dtype)
            same = (back.view(np.uint16) == expected.view(np.uint16)) | np.isnan(values)
            assert same.all() and np.isnan(back[:, np.isnan(values)].astype(np.float32)).all()


def test_a_double_is_rounded_to_a_small_float_once(compiled):
    kernel = compiled(
        "once",
        """
        #include <cuda_fp16.h>
        extern "C" __global__ void once(double v, __half* out) { *out = __double2half(v); }
        """,
    )
    out = np.zeros(1, np.float16)
    kernel((1,), (1,), (np.float64(1 + 2**-11 + 2**-40), out))  # by way of float: a tie, to 1
    assert out[0] == 1 + 2**-10


def test_functions_of_one_thread(compiled):
    kernel = compiled(
        "functions",
        """
        extern "C" __global__ void functions(double* out, double nan) {
            out[0] = max(-1, 2u) == 0xffffffffu;  // as CUDA has it: unsigned wins
            out[1] = max(float(nan), 2.0f) + min(3.0, nan);
            out[2] = __float2int_rn(2.5f) + __float2int_rn(3.5f);
            out[3] = __double2int_rn(nan);
            out[4] = __float2int_rz(1e20f);
            out[5] = double(__double2ll_rd(-1e30));
            out[6] = __hiloint2double(__double2hiint(-1.5e300), __double2loint(-1.5e300));
            out[7] = __int_as_float(0x7f800000) + abs(-2) + fabs(-0.5) + __popc(7) + __clz(1);
            out[8] = exp2f(3.0f) + log2(8.0) + rsqrt(0.25) + __fdividef(1.0f, 2.0f);
            float4 v = make_float4(1, 2, 3, 4);
            out[9] = v.x + 10 * v.w + alignof(float4) + alignof(float2) + sizeof(double2);
        }
        """,
    )
    out = np.zeros(10)
    kernel((1,), (1,), (out, np.float64(np.nan)))
    infinity = np.inf
    assert out.tolist() == [1, 5, 6, 0, 2**31 - 1, -(2.0**63), -1.5e300, infinity, 13.5, 81]


# ---- bugs that the sanitizers must name

PLANTED = """
    __device__ __noinline__ float& at(float* p, int k) {  // what p points to is not seen here
        return p[k];
    }
    template <int N> __device__ float shared_at(int k) {
        __shared__ float s[N];
        s[threadIdx.x] = 1;
        __syncthreads();
        return at(s, k);  // template_shared
    }
    extern "C" __global__ void planted(float* x, int n, int bug) {
        __shared__ float s[32];
        float local[4] = {1, 2, 3, x[0]};
        if (!isnan(s[threadIdx.x])) x[n] = 0;  // it is poisoned between its redzones
        s[threadIdx.x] = x[threadIdx.x];
        __syncthreads();
        if (bug == 1) x[0] = x[n];  // read
        if (bug == 2) x[n + threadIdx.x] = 0;  // write
        if (bug == 3) x[-1] = 0;  // write_before
        if (bug == 4) at(s, n) = 0;  // shared
        if (bug == 5) s[n] = 0;  // shared_index
        if (bug == 6) x[0] = shared_at<32>(n);
        if (bug == 7) x[0] = at(local, n / 8);  // local
        if (bug == 8) x[0] = float(n + 0x7fffffff);  // overflow
        if (bug == 9) x[0] = reinterpret_cast<float4*>(x + 1)->y;  // misaligned
        if (bug == 10) x[0] = at((float*)0x1000, n);  // wild
        if (bug == 12) x[0] = __ldcv(x + n);  // volatile_read
        if (bug == 11 && threadIdx.x < 8) __syncwarp();
        if (bug == 11) __syncthreads();
    }
"""

RUN_PLANTED = """
import sys
import numpy as np
from tests.cpu_runner import SANITIZED, CpuKernel
assert SANITIZED
kernel = CpuKernel(sys.argv[1], "planted")
kernel((2,), (32,), (np.ones(32, np.float32), np.int32(32), np.int32(0)), seed=1)
kernel((2,), (32,), (np.ones(32, np.float32), np.int32(32), np.int32(sys.argv[2])))
"""


@pytest.mark.parametrize(
    "bug, place, words",
    [
        (0, "", ""),
        (1, "read", "heap-buffer-overflow"),
        (2, "write", "heap-buffer-overflow"),
        (3, "write_before", "heap-buffer-overflow"),
        (4, "shared", "global-buffer-overflow"),
        (5, "shared_index", "index 32 out of bounds for type 'float [32]'"),
        (6, "template_shared", "global-buffer-overflow"),
        (7, "local", "stack-buffer-overflow"),
        (8, "overflow", "signed integer overflow"),
        (9, "misaligned", "misaligned address"),
        (10, "wild", "SEGV"),
        (12, "volatile_read", "heap-buffer-overflow"),
        (11, "", "planted: block (0, 0, 0) is stuck; 8 threads from thread 0"),
    ],
)
def test_sanitizers_name_the_line_of_a_bug(tmp_path, bug, place, words):
    path = tmp_path / "planted.cu"
    path.write_text(dedent(PLANTED))
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", RUN_PLANTED, str(path), str(bug)],
        env=sanitized_environment() | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) == (bug == 0), done.stderr
    assert words in done.stderr
    if place:
        ends = [line.endswith(f"// {place}") for line in path.read_text().splitlines()]
        assert f"planted.cu:{1 + ends.index(True)}" in done.stderr
        assert 'File "<string>", line 8' in done.stderr  # and Python's own line


# ---- the way in


def test_arguments_that_cannot_be_meant_are_refused(compiled):
    kernel = compiled("takes", 'extern "C" __global__ void takes(float* p, int n, float v) {}')
    array, n, v = np.zeros(1, np.float32), np.int32(1), np.float32(1)
    kernel((1,), (1,), (array.ctypes.data, n, v))
    for wrong in [(n,), (1, v), (n, np.float64(1)), (v, v), (n, 1.0)]:
        with pytest.raises(TypeError, match="takes"):
            kernel((1,), (1,), (array, *wrong))
    with pytest.raises(ValueError, match="grid"):
        kernel((0,), (1,), (array, n, v))
    with pytest.raises(ValueError, match="block"):
        kernel((1,), (32, 33), (array, n, v))


def test_an_error_of_the_compiler_is_raised(compiled):
    with pytest.raises(RuntimeError, match="nonsense"):
        compiled("wrong", 'extern "C" __global__ void wrong() { nonsense; }')


def test_launch_can_take_the_place_of_the_real_one():
    ours, real = cpu_runner.launch, cuseq.runtime.kernels.launch
    assert inspect.signature(ours) == inspect.signature(real)
