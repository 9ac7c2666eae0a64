"""Which gesture is it? The nearest neighbour by DTW and by soft-DTW, beside published errors.

    python examples/nearest_neighbour.py [--output neighbours.png] [--subset 12]

The 150 test gestures of GunPoint are given the class of the nearest of its 50 training gestures.
With DTW, soft-DTW with gamma = 0, the errors are those that the UCR archive publishes, exactly;
with a gamma above 0 they are fewer. Window and gamma are chosen on the training gestures alone.
Runs on the GPU where CuPy finds one and on the CPU otherwise, in a minute or two.
"""

import argparse
import time
from pathlib import Path

import numpy as np

import cuseq

WINDOWS = 0, 1, 2, 4, 8, 16, None  # frames that a gesture may be ahead or behind; None: any number
GAMMAS = 0.01, 0.1, 1.0, 10.0  # in units of the squared difference: small is sharp, large is smooth
PUBLISHED = {"Euclidean": 0.0867, "DTW, learnt window": 0.0867, "DTW, no window": 0.0933}
CLASSES = {1: "gun draw", 2: "pointing"}
TRAINING = 50  # of the recording's rows; the others are for the test
RECORDING = Path(__file__).parent / "data/gunpoint_all.csv.gz"


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


def matrix(xp, A, B=None, **options):
    """Return the soft-DTW between all of A and all of B in host memory, and the seconds it took."""
    start = time.perf_counter()
    D = cuseq.soft_dtw_cdist(A, B, **options)
    if xp is not np:
        D = xp.asnumpy(D)  # waits for the device
    return D, time.perf_counter() - start


def mistakes_left_out(xp, X, classes, **options):
    """Return how many of X have a nearest neighbour, other than themselves, of another class."""
    D, _ = matrix(xp, X, **options)  # of X with itself only half is computed
    np.fill_diagonal(D, np.inf)
    return int((classes[D.argmin(axis=1)] != classes).sum())


def draw(output, X, T, classes, D_hard, D_soft, true, names):
    """Save the picture: the matrix, and a gesture of which the two have different opinions."""
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    black, blue, orange = "black", "#2166ac", "#d95f02"
    by_hard, by_soft = classes[D_hard.argmin(axis=1)], classes[D_soft.argmin(axis=1)]
    disputed = np.flatnonzero((by_hard != true) & (by_soft == true))
    query = disputed[0] if len(disputed) else 0

    figure = Figure(figsize=(12, 6.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.25])
    rows, columns = np.argsort(true, kind="stable"), np.argsort(classes, kind="stable")
    axes = left.subplots()
    above = D_soft - D_soft.min()
    heat = axes.imshow(
        above[rows][:, columns], aspect="auto", cmap="gist_heat", norm=PowerNorm(0.5)
    )
    nearest = np.argsort(columns)[D_soft.argmin(axis=1)[rows]]
    wrong = (by_soft != true)[rows]
    axes.scatter(nearest[~wrong], np.flatnonzero(~wrong), 12, "white", label="nearest: right class")
    axes.scatter(nearest[wrong], np.flatnonzero(wrong), 50, "#41b6e6", marker="X", label="wrong")
    axes.axhline((true == 1).sum() - 0.5, color="white", lw=1)
    axes.axvline((classes == 1).sum() - 0.5, color="white", lw=1)
    axes.set(
        xlabel=" | ".join(f"training: {name}" for name in CLASSES.values()),
        ylabel=" | ".join(f"test: {name}" for name in reversed(CLASSES.values())),
        title=names[1],
    )
    axes.set(xticks=[], yticks=[])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.05), ncols=2, facecolor="#999999")
    left.colorbar(heat, ax=axes, label="soft-DTW above the smallest")

    panels = right.subplots(2, 1, sharex=True)
    for axes, D, name, colour in zip(panels, (D_hard, D_soft), names, (orange, blue), strict=True):
        neighbour = D[query].argmin()
        axes.plot(
            T[query], color=black, lw=2, label=f"test gesture {query}: {CLASSES[true[query]]}"
        )
        found = f"its nearest, {neighbour}: {CLASSES[classes[neighbour]]}"
        axes.plot(X[neighbour], color=colour, lw=2, label=found)
        axes.set_title(f"by {name}", color=colour)
        axes.legend(frameon=False, loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].set_xlabel("frame")
    figure.savefig(output, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="neighbours.png", help="where to save the picture")
    parser.add_argument("--subset", type=int, help="use only so many training and test gestures")
    arguments = parser.parse_args()

    xp, device = pick_device()
    print(f"device: {device}")
    recording = np.loadtxt(RECORDING, delimiter=",")
    training, test = (
        recording[:TRAINING][: arguments.subset],
        recording[TRAINING:][: arguments.subset],
    )
    classes, true = training[:, 0].astype(int), test[:, 0].astype(int)
    X, T = (xp.asarray(part[:, 1:], dtype=xp.float32) for part in (training, test))
    print(f"{len(X)} training and {len(T)} test gestures of {X.shape[1]} frames")

    left_out = [mistakes_left_out(xp, X, classes, gamma=0.0, bandwidth=w) for w in WINDOWS]
    window = WINDOWS[np.argmin(left_out)]  # the narrowest of the best
    print(
        "training mistakes by window:",
        ", ".join(f"{w}: {k}" for w, k in zip(WINDOWS, left_out, strict=True)),
    )
    left_out = [mistakes_left_out(xp, X, classes, gamma=gamma) for gamma in GAMMAS]
    gamma = GAMMAS[np.argmin(left_out)]
    print(
        "training mistakes by gamma:",
        ", ".join(f"{g}: {k}" for g, k in zip(GAMMAS, left_out, strict=True)),
    )
    print(f"learnt: window {window}, gamma {gamma}")

    soft = f"soft-DTW, gamma {gamma}"
    methods = {
        "Euclidean": {"gamma": 0.0, "bandwidth": 0},
        "DTW, learnt window": {"gamma": 0.0, "bandwidth": window},
        "DTW, no window": {"gamma": 0.0},
        soft: {"gamma": gamma},
    }
    print(f"{'nearest neighbour by':20} {'error':>7} {'published':>9} {'seconds':>8}")
    matrices = {}
    for name, options in methods.items():
        D, seconds = matrix(xp, T, X, **options)
        matrices[name] = D
        error = (classes[D.argmin(axis=1)] != true).mean()
        published = None if arguments.subset else PUBLISHED.get(name)
        print(f"{name:20} {error:7.4f} {published or '':>9} {seconds:8.3f}")
        if published and round(error, 4) != published:
            raise SystemExit(f"{name}: error {error:.4f}, but the archive has {published}")

    names = "DTW, no window", soft
    hard, of_soft = (matrices[name] for name in names)
    try:
        draw(arguments.output, training[:, 1:], test[:, 1:], classes, hard, of_soft, true, names)
    except ImportError:
        print("picture: skipped, matplotlib is not installed (pip install matplotlib)")
    else:
        print(f"picture: {arguments.output}")


if __name__ == "__main__":
    main()
