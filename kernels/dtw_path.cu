// The path that an alignment with gamma = 0 follows: E is 1 along it and 0 elsewhere.
//
//     path[0] = (0, 0),   path[t + 1] = the one of (i + 1, j + 1), (i + 1, j), (i, j + 1) where E is 1
//
// Behind its end it is (-1, -1), as is all of it where there is none: then E[0, 0] is not 1.
//
// Launch: one thread a pair, blocks of 128.
// Compiled with: REAL.

#include "common.cuh"

typedef REAL Real;
constexpr int THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
dtw_path(Index B, Index N, Index M, const Real* E /* [B, N, M] */, int* path /* [B, N + M - 1, 2] */) {
    Index k = Index(blockIdx.x) * THREADS + threadIdx.x, length = N + M - 1;
    if (k >= B) return;
    E += k * N * M;
    path += k * length * 2;
    auto on_path = [&](Index i, Index j) { return i < N && j < M && E[i * M + j] == 1; };
    Index i = 0, j = 0, t = 0;
    for (bool there = on_path(0, 0); there; there = on_path(i, j)) {
        path[2 * t] = int(i);
        path[2 * t + 1] = int(j);
        ++t;
        bool diagonal = on_path(i + 1, j + 1), down = !diagonal && on_path(i + 1, j);
        i += diagonal || down;
        j += !down;
    }
    for (; t < length; ++t) path[2 * t] = path[2 * t + 1] = -1;
}
