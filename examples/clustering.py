"""Walking, running, badminton: recordings of a smart watch, clustered with no label read.

    python examples/clustering.py [--output clusters.png] [--subset 4]

This is k-means with soft-DTW in place of the squared distance: a recording belongs to the centre of
the smallest soft-DTW, and a centre is the soft-DTW barycenter of its recordings. M. Cuturi and
M. Blondel, "Soft-DTW: a differentiable loss function for time-series", ICML 2017, section 5.2.
Runs on the GPU where CuPy finds one and on the CPU otherwise.
"""

import argparse
import time
from pathlib import Path

import numpy as np

import cuseq

GAMMA = 0.1  # in units of the squared difference: small is sharp, large is smooth
ACTIVITIES = "walking", "running", "badminton"
ITERATIONS = 10  # at most
STEPS = 10  # of a barycenter in an iteration: it goes on in the next
STARTS = 3  # from different first centres: k-means gets stuck, so the best is kept
SAMPLES, RATE = 50, 10  # of a recording, and in a second
SHOWN = 5  # the channel in the picture: the rotation about z
RECORDINGS = Path(__file__).parent / "data/motions.csv.gz"


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


def load(subset):
    """Return recordings (B, SAMPLES, 6), each scaled to variance 1, and their activities (B,)."""
    rows = np.loadtxt(RECORDINGS, delimiter=",", skiprows=1, dtype=np.float32)
    rows = rows.reshape(-1, SAMPLES, rows.shape[1])
    activities = rows[:, 0, 0].astype(int) - 1
    few = np.concatenate([np.flatnonzero(activities == k)[:subset] for k in range(len(ACTIVITIES))])
    x = rows[few, :, 1:]
    x = x - x.mean(axis=1, keepdims=True)
    return x / x.std(axis=(1, 2), keepdims=True), activities[few]


def spread_out(host, X, k, random):
    """Return k of X as the first centres, each likely to be far from those before: k-means++."""
    chosen = [int(random.integers(len(X)))]
    while len(chosen) < k:
        # Unlike soft-DTW, the divergence is 0 for equal series, and never negative but in rounding.
        D = host(cuseq.soft_dtw_divergence_cdist(X, X[chosen], gamma=GAMMA))
        nearest = D.min(axis=1).clip(min=0)
        chosen.append(int(random.choice(len(X), p=nearest / nearest.sum(dtype=np.float64))))
    return X[chosen]


def cluster(xp, host, X, k, random):
    """Return each recording's cluster (B,), the centres (k, SAMPLES, 6), and the inertias.

    The inertia is the sum of each recording's soft-DTW to its centre. It falls, for assigning and
    averaging both lower it; but it may be negative, as soft-DTW may be: it sums over all paths.
    """
    centres = spread_out(host, X, k, random)
    before, inertias = None, []
    for _ in range(ITERATIONS):
        D = host(cuseq.soft_dtw_cdist(X, centres, gamma=GAMMA))
        nearest = D.argmin(axis=1)
        inertias.append(float(D.min(axis=1).sum()))
        if before is not None and (nearest == before).all():
            break
        before = nearest
        for c in set(nearest):  # a centre that lost all of its recordings stays
            members = X[xp.asarray(nearest == c)]
            centres[c] = cuseq.soft_dtw_barycenter(
                members, init=centres[c], gamma=GAMMA, max_iter=STEPS
            )
    return nearest, centres, inertias


def adjusted_rand_index(a, b):
    """Return the agreement of two partitions: 1 for the same, 0 on average for random ones."""

    def pairs(counts):
        return (counts * (counts - 1) / 2).sum()

    table = np.array([[((a == i) & (b == j)).sum() for j in set(b)] for i in set(a)])
    of_a, of_b = pairs(table.sum(axis=1)), pairs(table.sum(axis=0))
    by_chance = of_a * of_b / pairs(table.sum())
    return (pairs(table) - by_chance) / ((of_a + of_b) / 2 - by_chance)


def draw(output, xp, host, X, clusters, centres, titles):
    """Save the picture: the members of each cluster as recorded and aligned, and its barycenter."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.2), layout="constrained")
    grid = figure.subplots(2, len(centres), sharex=True, sharey=True, squeeze=False)
    seconds = np.arange(SAMPLES) / RATE
    colours = "#2166ac", "#d95f02", "#1b9e77"
    for c, (column, colour) in enumerate(zip(grid.T, colours, strict=True)):
        members = X[xp.asarray(clusters == c)]
        # E[b, i, j]: how much of a path from the centre to member b crosses (i, j).
        E = host(cuseq.soft_dtw_alignment(centres[c][None], members, gamma=GAMMA))
        recorded = host(members)
        aligned = E @ recorded / E.sum(axis=2, keepdims=True)
        for axes, lines in zip(column, (recorded, aligned), strict=True):
            axes.plot(seconds, lines[..., SHOWN].T, color=colour, lw=0.8, alpha=0.5)
            axes.plot(seconds, host(centres[c])[:, SHOWN], color=colour, lw=3)
            axes.spines[["top", "right"]].set_visible(False)
        column[0].plot(seconds, recorded[..., SHOWN].mean(axis=0), "k:", lw=2, label="plain mean")
        column[0].set_title(titles[c], color=colour)
        column[1].set_xlabel("seconds")
    grid[0, 0].legend(frameon=False, loc="lower left")
    grid[0, 0].set_ylabel("rotation, as recorded")
    grid[1, 0].set_ylabel("rotation, aligned to the barycenter")
    figure.savefig(output, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="clusters.png", help="where to save the picture")
    parser.add_argument("--subset", type=int, help="use only so many recordings an activity")
    arguments = parser.parse_args()

    xp, device = pick_device()
    print(f"device: {device}")
    host = np.asarray if xp is np else xp.asnumpy
    recordings, activities = load(arguments.subset)
    X = xp.asarray(recordings)
    print(f"{len(X)} recordings of {X.shape[1]} samples, {X.shape[2]} channels")

    start = time.perf_counter()
    found = []
    for k in range(STARTS):
        found.append(cluster(xp, host, X, len(ACTIVITIES), np.random.default_rng(k)))
        print(f"start {k}: inertia", ", ".join(f"{value:.1f}" for value in found[k][-1]))
    clusters, centres, inertias = min(found, key=lambda result: result[-1][-1])
    print(f"best inertia {inertias[-1]:.1f}, found in {time.perf_counter() - start:.1f} s")
    titles = []
    for c in range(len(ACTIVITIES)):
        count = np.bincount(activities[clusters == c], minlength=len(ACTIVITIES))
        inside = [f"{n} {what}" for n, what in zip(count, ACTIVITIES, strict=True) if n]
        titles.append(", ".join(inside))
        print(f"cluster {c}: {titles[c]}")
    index = adjusted_rand_index(clusters, activities)
    print(f"agreement with the activities: adjusted Rand index {index:.3f}")

    try:
        draw(arguments.output, xp, host, X, clusters, centres, titles)
    except ImportError:
        print("picture: skipped, matplotlib is not installed (pip install matplotlib)")
    else:
        print(f"picture: {arguments.output}")


if __name__ == "__main__":
    main()
