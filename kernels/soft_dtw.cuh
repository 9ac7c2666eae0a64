#pragma once
// What the soft-DTW kernels share: the pairs of a call, and the mail between stripes.
//
// Compiled with: REAL (float or double).

#include "common.cuh"

typedef REAL Real;

constexpr int COLUMNS = 4;                  // of a block of cells
constexpr int TILE = WARP;                  // rows of a series that are packed together
constexpr int NONE = 0x7fffffff;            // no such row
constexpr double LN_2 = 0.69314718055994530942;
constexpr Real FORBIDDEN = sizeof(Real) == 8 ? Real(1e280) : Real(1e28);  // cost of a cell that no path may cross
constexpr Real NO_PATH = FORBIDDEN / 10;    // R from here on: no path is left

template <int n> struct alignas(n * sizeof(Real) < 16 ? n * sizeof(Real) : 16) Reals {  // loaded at once
    Real at[n];
};
typedef Reals<COLUMNS> Row;  // of a block

struct alignas(16) Pair {  // one pair of series
    int n, m;              // lengths; 1, 1 where the pair is not usable
    int lower, upper;      // of the band: i - j <= lower and j - i <= upper
    double gamma;
    Index place;           // of its value among all values
    int usable;            // 0: its length, bandwidth or gamma is out of range, and so its value NaN
    int a, b;              // which series of each batch
    __device__ __forceinline__ bool inside(int i, int j) const {
        return i < n && j < m && i - j <= lower && j - i <= upper;
    }
};

struct Grid {  // which series meet, and where the values go
    Index every_a, batch_a, every_b, batch_b;  // pair k has series k / every % batch of each batch
    Index columns, first, row_length;          // the values of `columns` pairs are beside each other in a row
    __device__ int a(Index k) const { return int(k / every_a % batch_a); }
    __device__ int b(Index k) const { return int(k / every_b % batch_b); }
    __device__ Index place(Index k) const { return first + k / columns * row_length + k % columns; }
};

struct FirstOf {  // among the rows of a tile: the first with a NaN, with an infinity, or NONE
    int nan, infinity;
};

// ---- mail: numbers from one stripe to the next, through global memory

// Four bytes of a number with the stripe that sent them, written at once. Who finds the stripe that
// it waits for has the bytes too, so nothing else says that they are there: no flag, no fence.
typedef unsigned long long Word;
constexpr int WORDS = sizeof(Real) / 4;  // of a number
constexpr Word NOTHING_SENT = ~Word(0);

template <int n> struct Message {  // n numbers
    static constexpr int PAIRS = (n * WORDS + 1) / 2;  // of words, which are written and read at once
    ulonglong2 pairs[PAIRS];
    __device__ void put(int k, float v, int stripe) { word(k) = Word(stripe) << 32 | __float_as_uint(v); }
    __device__ void put(int k, double v, int stripe) {
        word(2 * k) = Word(stripe) << 32 | unsigned(__double2hiint(v));
        word(2 * k + 1) = Word(stripe) << 32 | unsigned(__double2loint(v));
    }
    __device__ void get(int k, float& v) const { v = __uint_as_float(unsigned(word(k))); }
    __device__ void get(int k, double& v) const {
        v = __hiloint2double(int(unsigned(word(2 * k))), int(unsigned(word(2 * k + 1))));
    }
    __device__ void send(Message* to) const {
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) to->pairs[pair] = pairs[pair];
    }
    __device__ void look(const Message* at) {  // what is there now, whoever sent it
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) pairs[pair] = __ldcv(&at->pairs[pair]);
    }
    __device__ bool from(int stripe) const {
        bool all = true;
#pragma unroll
        for (int k = 0; k < n * WORDS; ++k) all &= int(word(k) >> 32) == stripe;
        return all;
    }
    __device__ void wait(const Message* at, int stripe) {
        if (from(stripe)) return;
        for (look(at); !from(stripe); look(at)) __nanosleep(20);
    }
    __device__ void clear() {
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) pairs[pair] = {NOTHING_SENT, NOTHING_SENT};
    }

  private:
    __device__ Word& word(int k) { return k % 2 ? pairs[k / 2].y : pairs[k / 2].x; }
    __device__ const Word& word(int k) const { return k % 2 ? pairs[k / 2].y : pairs[k / 2].x; }
};
typedef Message<COLUMNS> Letter;  // a row of a block, of sums or of E
