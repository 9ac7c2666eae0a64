"""Pictures of alignments, costs and barycenters, with matplotlib.

    import cuseq.plot
    cuseq.plot.alignment(a, b, gamma=0.1)

Each function draws into the Axes it is given, or into a new figure of pyplot, and returns the Axes.
It takes arrays of any library on any device, copies them to the host, and so waits for the device;
of a tensor that autograd follows it draws the values.
"""

import numpy as np

from cuseq.host import costs
from cuseq.ops.soft_dtw import COSTS, soft_dtw_alignment
from cuseq.runtime import arrays, checks

try:
    from matplotlib import pyplot
    from matplotlib.axes import Axes
    from matplotlib.collections import LineCollection
    from matplotlib.colors import PowerNorm, to_rgb
except ImportError as missing:
    raise ImportError(
        checks.sentence(
            "matplotlib", "matplotlib, which draws", "none installed", "pip install cuseq[plot]"
        )
    ) from missing

__all__ = ["alignment", "alignment_matrix", "barycenter", "cost_matrix"]

BLUE, ORANGE = "#2166ac", "#d95f02"  # a and b; the colour-blind tell them apart
FAINTEST = 0.02  # below this opacity a link does not show, even beside others
MOST_DIAGONALS = 200  # the links of more run into one another on a printed page
APART = 0.6  # between two series, in heights of the higher one


def alignment(a, b, E=None, *, gamma=1.0, cost="sqeuclidean", bandwidth=None, ax=None):
    """Two series above each other, a over b, and links between the frames that are aligned.

    The link of frames (i, j) has the opacity E[i, j], and none is drawn below 0.02. Of long series
    only every k-th antidiagonal i + j has links, with k the least odd number that leaves no more
    than 200 of them: so the links of any path thin out evenly, along its diagonals too.

    Both series have one scale; a is moved up, so the y axis has their names only. The channels of
    a series with D > 1 are shades of its colour, and links end at the channel that is nearest to
    the other series.

    Args:
        a: series of shape (N,) or (N, D), finite, float64, float32, float16 or bfloat16.
        b: series of shape (M,) or (M, D).
        E: (N, M) opacities of 0 to 1, such as `cuseq.soft_dtw_alignment` returns. None is what it
            returns for a, b, gamma, cost and bandwidth.
        gamma, cost, bandwidth: as `cuseq.soft_dtw_alignment`, where E is None.
        ax: the matplotlib Axes to draw into. None makes a new figure.

    Returns: the Axes. One unit of x is a frame.

    Raises:
        ValueError: for shapes that do not fit, an entry of a or b that is not finite, or an option
            out of range.
        TypeError: for dtypes that are not floating, for what is no array or no Axes.

    >>> import numpy as np, cuseq.plot
    >>> a, b = np.array([0.0, 1.0, 1.0, 0.0]), np.array([0.0, 1.0, 0.0])
    >>> ax = cuseq.plot.alignment(a, b, gamma=0.0)
    >>> [len(links.get_segments()) for links in ax.collections]
    [4]
    """
    x, y = _pair(a, b)
    if E is None:
        a, b = _without_gradient(a), _without_gradient(b)
        E = soft_dtw_alignment(a, b, gamma=gamma, cost=cost, bandwidth=bandwidth)
    E = _values("E", E, {2: "(N, M)"})
    checks.shape("E", E, (len(x), len(y)), "(N, M)", "pass the alignment of a and b")
    ax = _axes(ax, (8, 4))

    x += y.max() - x.min() + APART * (max(np.ptp(x), np.ptp(y)) or 1)
    ax.add_collection(_links(x, y, E))
    for series, colour in (x, BLUE), (y, ORANGE):
        for channel, shade in zip(series.T, _shades(colour, series.shape[1]), strict=True):
            ax.plot(channel, color=shade, lw=1.8)
    ax.set_xlabel("frame")
    ax.set_yticks([(series.min() + series.max()) / 2 for series in (x, y)], ["a", "b"])
    for label, colour in zip(ax.get_yticklabels(), (BLUE, ORANGE), strict=True):
        label.set(color=colour, size="large")
    ax.tick_params(axis="y", length=0)
    ax.margins(x=0.02)
    ax.spines[["top", "left", "right"]].set_visible(False)
    return ax


def alignment_matrix(E, *, ax=None):
    """Heat map of an expected alignment.

    The colours go by the square root of E: where an alignment spreads out E is small, and stays
    visible.

    Args:
        E: (N, M), of 0 to 1, such as `cuseq.soft_dtw_alignment` returns; float64, float32, float16
            or bfloat16.
        ax: the matplotlib Axes to draw into. None makes a new figure.

    Returns: the Axes, its x axis the frames of a and its y axis those of b.

    Raises:
        ValueError: for another shape.
        TypeError: for dtypes that are not floating, for what is no array or no Axes.

    >>> import numpy as np, cuseq.plot
    >>> E = cuseq.soft_dtw_alignment(np.zeros(3), np.zeros(4), gamma=0.1)
    >>> ax = cuseq.plot.alignment_matrix(E)
    >>> ax.get_xlabel(), ax.get_ylabel()
    ('frame of a', 'frame of b')
    """
    E = _values("E", E, {2: "(N, M)"})
    norm, ticks = PowerNorm(0.5, 0, 1), [0, 0.1, 0.25, 0.5, 1]
    return _heat_map(ax, E, "expected alignment E", "magma_r", norm, ticks)


def cost_matrix(a, b, *, cost="sqeuclidean", ax=None):
    """Heat map of the costs C[i, j] between the frames of two series.

    A path as `cuseq.dtw_path` returns can be drawn over it: `ax.plot(*path[path[:, 0] >= 0].T)`.

    Args:
        a: series of shape (N,) or (N, D), finite, float64, float32, float16 or bfloat16.
        b: series of shape (M,) or (M, D).
        cost: as `cuseq.soft_dtw`. The cosine distance of a zero vector, NaN, is left blank.
        ax: the matplotlib Axes to draw into. None makes a new figure.

    Returns: the Axes, its x axis the frames of a and its y axis those of b.

    Raises:
        ValueError: for shapes that do not fit, an entry that is not finite, or an unknown cost.
        TypeError: for dtypes that are not floating, for what is no array or no Axes.

    >>> import numpy as np, cuseq.plot
    >>> ax = cuseq.plot.cost_matrix(np.array([0.0, 1.0, 3.0]), np.array([0.0, 2.0]))
    >>> ax.images[0].get_array().T.tolist()
    [[0.0, 4.0], [1.0, 1.0], [9.0, 1.0]]
    """
    x, y = _pair(a, b)
    checks.one_of("cost", cost, COSTS)
    with np.errstate(all="ignore"):
        x, y = costs.points(x[None], cost, np.inf)[0], costs.points(y[None], cost, -np.inf)
        C = np.concatenate([costs.of_differences(cost, point - y) for point in x])
    return _heat_map(ax, C, f"cost ({cost})", "viridis")


def barycenter(z, X, *, lengths=None, ax=None):
    """A barycenter over the series that it is the barycenter of, thin and faint.

    Channels have the colours of matplotlib's cycle, in order, in z and in its members.

    Args:
        z: (L,) or (L, D) of any length L, such as `cuseq.soft_dtw_barycenter` returns; float64,
            float32, float16 or bfloat16.
        X: its n members, (n, N) or (n, N, D).
        lengths: how long each member is, integers (n,); what lies beyond is not drawn. None is N.
        ax: the matplotlib Axes to draw into. None makes a new figure.

    Returns: the Axes. One unit of x is a frame.

    Raises:
        ValueError: for shapes that do not fit, or a length out of range.
        TypeError: for dtypes that are not floating, lengths that are not integers, for what is no
            array or no Axes.

    >>> import numpy as np, cuseq.plot
    >>> X = np.array([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    >>> ax = cuseq.plot.barycenter(X.mean(axis=0), X)
    >>> ax.lines[0].get_ydata().tolist()
    [0.0, 0.5, 0.5, 0.0]
    """
    z = _values("z", z, {1: "(L,)", 2: "(L, D)"})
    X = _values("X", X, {2: "(n, N)", 3: "(n, N, D)"})
    z, X = z.reshape(len(z), -1), X.reshape(*X.shape[:2], -1)
    n, N, D = X.shape
    _check_features("X", D, "z", z.shape[1])
    lengths = _lengths(lengths, n, N)
    ax = _axes(ax, (8, 4))

    opacity = min(0.5, 1.5 / np.sqrt(n))  # the more members, the fainter, or they are a blot
    for d in range(D):
        colour = f"C{d}"
        members = [
            np.stack([np.arange(length), x[:length, d]], axis=1)
            for x, length in zip(X, lengths, strict=True)
        ]
        of_members, of_z = ("members", "barycenter") if d == 0 else (None, None)
        style = {"colors": colour, "lw": 1, "alpha": opacity, "zorder": 1}  # below every channel
        ax.add_collection(LineCollection(members, label=of_members, **style))
        ax.plot(z[:, d], color=colour, lw=2.5, label=of_z)
    ax.set_xlabel("frame")
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0.02)
    # Above the axes it hides nothing; its sample of a member must show, however faint they are.
    legend = ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    legend.legend_handles[0].set_alpha(0.5)
    return ax


# ---- arguments


def _values(name, x, letters):
    """An argument's values on the host, in float64; `letters` names its axes by their number."""
    array = arrays.borrow(name, _without_gradient(x), "soft_dtw")
    checks.floating(name, array)
    if len(array.shape) not in letters or 0 in array.shape:
        expected = f"shape {' or '.join(letters.values())}, no axis of 0"
        remedy = "add an axis, or pass one of a batch"
        raise ValueError(checks.sentence(name, expected, array.shape, remedy))
    return arrays.read(array).astype(np.float64)


def _without_gradient(x):
    """A tensor of torch outside of autograd, anything else as it is."""
    return x.detach() if hasattr(x, "detach") else x


def _pair(a, b):
    """The values of two series as (N, D) and (M, D)."""
    series = []
    for name, x in ("a", a), ("b", b):
        x = _values(name, x, {1: "(N,)", 2: "(N, D)"})
        if not np.isfinite(x).all():
            remedy = f"cut {name} to what was recorded, or fill its gaps"
            raise ValueError(checks.sentence(name, "finite numbers", "NaN or infinity", remedy))
        series.append(x.reshape(len(x), -1))
    x, y = series
    _check_features("b", y.shape[1], "a", x.shape[1])
    return x, y


def _check_features(name, D, other_name, other_D):
    if D != other_D:
        expected = f"D = {other_D} features as {other_name} has"
        raise ValueError(checks.sentence(name, expected, f"D = {D}", "pass the same channels"))


def _lengths(lengths, n, N):
    """The length of each member."""
    if lengths is None:
        return [N] * n
    lengths = arrays.on_host("lengths", lengths, "soft_dtw")
    if lengths.dtype.name not in checks.INTEGER:
        remedy = "convert lengths to one of these"
        raise TypeError(checks.sentence("lengths", "int32 or int64", lengths.dtype, remedy))
    checks.shape("lengths", lengths, (n,), "(n,)", "pass one a member")
    checks.within("lengths", lengths.min(), lengths.max(), 1, N)
    return lengths


# ---- drawing


def _axes(ax, size):
    """The caller's Axes, or one in a new figure of `size` in inches."""
    if ax is None:
        return pyplot.subplots(figsize=size, layout="constrained")[1]
    if not isinstance(ax, Axes):
        remedy = "pass one, such as axs[0] of several"
        raise TypeError(checks.sentence("ax", "a matplotlib Axes", type(ax).__name__, remedy))
    return ax


def _links(x, y, E):
    """A line from x[i] (N, D) down to y[j] (M, D) for each cell of E (N, M) that has one."""
    # k is odd, for along diagonal steps i + j is all even or all odd.
    k = -(-(sum(E.shape) - 1) // MOST_DIAGONALS) | 1
    diagonals = np.add.outer(np.arange(len(x)), np.arange(len(y)))
    i, j = np.nonzero((E >= FAINTEST) & (diagonals % k == 0))
    upper, lower = np.stack([i, x.min(axis=1)[i]], axis=1), np.stack([j, y.max(axis=1)[j]], axis=1)
    colours = np.full((len(i), 4), 0.27)  # grey, and the opacity
    colours[:, 3] = np.minimum(E[i, j], 1)
    return LineCollection(np.stack([upper, lower], axis=1), colors=colours, lw=0.6, zorder=1)


def _heat_map(ax, values, label, colours, norm=None, ticks=None):
    """Values (N, M) with frames of a to the right and frames of b up, and a colour bar."""
    ax = _axes(ax, (6, 5))
    image = ax.imshow(values.T, origin="lower", aspect="auto", cmap=colours, norm=norm)
    ax.set(xlabel="frame of a", ylabel="frame of b")
    ax.figure.colorbar(image, ax=ax, label=label, ticks=ticks)
    return ax


def _shades(colour, count):
    """So many shades of a colour, from itself on toward white."""
    colour = np.array(to_rgb(colour))
    return [colour + white * (1 - colour) for white in np.linspace(0, 0.6, count)]
