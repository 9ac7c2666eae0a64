"""Soft-DTW on one page: compare two recorded gestures, turn one into the other, draw the alignment.

    python examples/quickstart.py [--output alignment.png]

Runs on the GPU where CuPy finds one and on the CPU otherwise; the calls to cuseq are the same.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

import cuseq

GAMMA = 0.1  # in units of the squared difference: small is sharp, large is smooth
GESTURES = np.genfromtxt(Path(__file__).parent / "data/gunpoint.csv", delimiter=",", names=True)


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


def seconds(xp, function):
    """Return the time of one call, with its work on the GPU (the call alone only queues it)."""
    start = time.perf_counter()
    function()
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()
    return time.perf_counter() - start


def learn(series, target, steps=61, rate=0.05):
    """Descend from series (N,) toward target (M,); return the result and each step's value."""
    history = []
    for _ in range(steps):
        value, (grad, _) = cuseq.soft_dtw_value_and_grad(series, target, gamma=GAMMA)
        history.append(float(value))
        series = series - rate * grad
    return series, history


def draw(output, a, b, E, learned, history):
    """Save the picture: the alignment beside its two series, and how the learning went."""
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    blue, orange = "#2166ac", "#d95f02"
    figure = Figure(figsize=(12, 6.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1.15, 1])

    (corner, over), (beside, middle) = left.subplots(
        2, 2, sharex="col", sharey="row", width_ratios=[1, 4], height_ratios=[1, 4]
    )
    corner.axis("off")
    over.plot(a, color=blue, lw=2)
    over.set_title("gun draw, a", color=blue)
    over.tick_params(labelleft=True)
    beside.plot(b, np.arange(len(b)), color=orange, lw=2)
    beside.invert_xaxis()
    beside.set_title("pointing, b", color=orange)
    beside.set_ylabel("frame of b")
    # Where the alignment spreads out E is small: the square root keeps it visible.
    heat = middle.imshow(
        E.T, origin="lower", aspect="auto", cmap="gist_heat_r", norm=PowerNorm(0.5, 0, 1)
    )
    middle.plot([0, len(a) - 1], [0, len(b) - 1], color="#777777", lw=1, ls=":")
    middle.set_xlabel("frame of a")
    left.colorbar(heat, ax=middle, label="expected alignment E", ticks=[0, 0.1, 0.25, 0.5, 1])

    top, bottom = right.subplots(2, 1)
    top.plot(a, color=blue, lw=1.5, label="start: gun draw, a")
    top.plot(b, color=orange, lw=1.5, label="target: pointing, b")
    top.plot(learned, color="black", lw=1.5, ls="--", label="learned")
    top.set(xlabel="frame", title="a learned toward b by gradient descent")
    top.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.47, 0.05))
    bottom.plot(history, color="black", lw=2)
    bottom.set(xlabel="step", ylabel="soft-DTW to b")
    for axes in (over, beside, top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="alignment.png", help="where to save the picture")
    output = parser.parse_args().output

    xp, device = pick_device()
    print(f"device: {device}")
    a = xp.asarray(GESTURES["gun_draw_1"], dtype=xp.float32)
    b = xp.asarray(GESTURES["point_1"], dtype=xp.float32)

    def compare():
        return cuseq.soft_dtw(a, b, gamma=GAMMA)

    first = seconds(xp, compare)  # on a GPU this compiles the kernel, or loads it from the cache
    warm = statistics.median(seconds(xp, compare) for _ in range(15))
    print(
        f"soft-DTW of {len(a)} against {len(b)} frames: {float(compare()):.4f}"
        " (it sums over all paths, so it may be negative)"
    )
    print(f"time: first call {1e3 * first:.1f} ms, then {1e3 * warm:.3f} ms (median of 15)")

    learned, history = learn(a, b)
    for step in range(0, len(history), 10):
        print(f"step {step:3d}: {history[step]:9.4f}")
    print(f"objective fell from {history[0]:.4f} to {history[-1]:.4f}")

    host = np.asarray if xp is np else xp.asnumpy
    E = cuseq.soft_dtw_alignment(a, b, gamma=GAMMA)  # E[i, j]: how much of a path crosses (i, j)
    try:
        draw(output, host(a), host(b), host(E), host(learned), history)
    except ImportError:
        print("picture: skipped, matplotlib is not installed (pip install matplotlib)")
    else:
        print(f"picture: {output}")


if __name__ == "__main__":
    main()
