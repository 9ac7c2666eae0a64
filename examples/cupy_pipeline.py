"""Strides that are alike, found in CuPy: filter, windows and soft-DTW queued on one stream.

    python examples/cupy_pipeline.py

Nine accelerometer channels of a walker are smoothed and cut into windows of one second, and each
window is compared with one of them. On a GPU that is queued without waiting, and then captured in a
CUDA graph, which is replayed on other data. Without a GPU it runs in NumPy.
"""

from contextlib import nullcontext
from pathlib import Path

import numpy as np

import cuseq

GAMMA = 0.1  # in units of the squared difference: small is sharp, large is smooth
RATE = 64  # samples a second
WINDOW, HOP = 64, 16  # samples in a window, and from one window to the next
WIDTH = 8  # taps of the filter
TEMPLATE = 64  # the window that others are compared with
NEAREST = 6  # windows to print
TOLERANCE = 1e-3  # of values in the hundreds, in float32
RECORDING = Path(__file__).parent / "data/daphnet.csv"


def pick_device():
    """Return the array module to use, CuPy or NumPy, and the name of the device it computes on."""
    try:
        import cupy
    except ImportError:
        return np, "CPU (NumPy; CuPy is not installed)"
    if not cupy.cuda.is_available():
        return np, "CPU (NumPy; CuPy finds no GPU)"
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    return cupy, f"GPU ({properties['name'].decode()})"


def windows(xp, x):
    """Return the windows (B, WINDOW, D) of x (1, D, L): a view, though they overlap."""
    _, D, L = x.shape
    _, channel, sample = x.strides
    shape = (L - WINDOW) // HOP + 1, WINDOW, D
    return xp.lib.stride_tricks.as_strided(x, shape, (HOP * sample, sample, channel))


def distances(xp, x, weight, template):
    """Return the soft-DTW (B,) of the windows of x (1, D, L), smoothed, to the template."""
    smooth = cuseq.causal_conv1d(x, weight)
    return cuseq.soft_dtw(windows(xp, smooth), template, gamma=GAMMA)


def replay(cupy, stream, x, weight, template):
    """Capture the distances of one half of x on the current stream; replay them on the other."""
    half = x.shape[2] // 2
    signal = x[:, :, :half].copy()
    pool = cupy.cuda.MemoryPool()  # the graph's own: none else may get the memory it works in
    with cupy.cuda.using_allocator(pool.malloc):
        distances(cupy, signal, weight, template)  # once before, as compiling is not to be captured
        stream.begin_capture()
        values = distances(cupy, signal, weight, template)
        graph = stream.end_capture()
    signal[...] = x[:, :, half:]
    graph.launch()
    direct = distances(cupy, signal, weight, template)
    difference = float(abs(values - direct).max())
    print(f"graph: replayed on {len(values)} other windows, max difference {difference:.1e}")
    if not difference <= TOLERANCE:  # in this form a NaN fails too
        raise SystemExit(f"graph: differs from the direct calls by more than {TOLERANCE:.0e}")


def main():
    xp, device = pick_device()
    print(f"device: {device}")
    on_gpu = xp is not np

    recording = np.loadtxt(RECORDING, delimiter=",", skiprows=1, dtype=np.float32)
    with xp.cuda.Stream(non_blocking=True) if on_gpu else nullcontext() as stream:
        x = xp.asarray(recording.T[None])  # (1, D, L)
        x = (x - x.mean(axis=2, keepdims=True)) / x.std(axis=2, keepdims=True)
        taps = xp.hanning(WIDTH + 2)[1:-1]
        weight = xp.tile(taps / taps.sum(), (x.shape[1], 1)).astype(x.dtype)  # (D, WIDTH)
        template = windows(xp, cuseq.causal_conv1d(x, weight))[TEMPLATE : TEMPLATE + 1]
        values = distances(xp, x, weight, template)
        if on_gpu:
            values = xp.asnumpy(values)  # the first that waits

        print(f"{len(values)} windows; nearest to that at {TEMPLATE * HOP / RATE:.2f} s:")
        for k in np.argsort(values)[:NEAREST]:
            print(f"{k * HOP / RATE:6.2f} s: soft-DTW {values[k]:7.3f}")

        if on_gpu:
            replay(xp, stream, x, weight, template)
        else:
            print("graph: skipped, no GPU")


if __name__ == "__main__":
    main()
