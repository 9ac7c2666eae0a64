"""cuseq.plot draws what it is given, read back from matplotlib's artists."""

import re

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

import cuseq  # noqa: E402
from cuseq import plot  # noqa: E402
from tests.frameworks import TORCH_CPU, every_place, over  # noqa: E402
from tests.oracles import soft_dtw as oracle  # noqa: E402
from tests.samples import normal  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error")
LEAST = 0.02  # of what opacity a link is drawn, by the docstring


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


@pytest.fixture
def ax():
    return Figure().subplots()


def links(ax):
    """Frames (i, j), ends (y of a, y of b) and opacity of each link of an alignment."""
    (collection,) = ax.collections
    segments = np.array(collection.get_segments())  # (links, 2 ends, x and y)
    segments = segments.reshape(-1, 2, 2)  # also of none
    return segments[..., 0].astype(int), segments[..., 1], collection.get_edgecolor()[:, 3]


def curves(ax):
    """The lines of an Axes (count, frames), each checked to have a point a frame."""
    for line in ax.lines:
        assert (line.get_xdata() == np.arange(len(line.get_ydata()))).all()
    return [line.get_ydata() for line in ax.lines]


def heat(ax):
    """The values (N, M) of a heat map, frames of a to the right and those of b up."""
    (image,) = ax.images
    values = image.get_array().T
    assert image.origin == "lower"
    assert image.get_extent() == [-0.5, len(values) - 0.5, -0.5, values.shape[1] - 0.5]
    return values


# ---- alignment


def test_links_have_the_opacity_of_their_cells(ax):
    a, b = normal(6), normal(8, seed=1)
    E = np.random.default_rng(2).uniform(0, 0.05, (6, 8))
    E[0, 0], E[5, 7], E[2, 3] = 1, 0, LEAST
    assert plot.alignment(a, b, E, ax=ax) is ax
    frames, ends, opacity = links(ax)
    drawn = dict(zip(map(tuple, frames.tolist()), opacity, strict=True))
    assert drawn == {ij: E[ij] for ij in np.ndindex(E.shape) if E[ij] >= LEAST}
    line_a, line_b = curves(ax)
    assert (ends == np.stack([line_a[frames[:, 0]], line_b[frames[:, 1]]], axis=1)).all()


def test_rounding_above_1_is_opaque(ax):
    plot.alignment(np.zeros(1), np.zeros(1), np.array([[1 + 1e-6]]), ax=ax)
    assert links(ax)[2].tolist() == [1]


def test_a_is_drawn_over_b(ax):
    """In one scale, b where it is, and so far apart that they do not meet."""
    a, b = normal(30), normal(40, seed=1)
    plot.alignment(a, b, np.zeros((30, 40)), ax=ax)
    line_a, line_b = curves(ax)
    assert (line_b == b).all()
    np.testing.assert_allclose(line_a - line_a[0], a - a[0], atol=1e-12)
    assert line_a.min() > line_b.max()
    middles = [(line.min() + line.max()) / 2 for line in (line_a, line_b)]
    assert ax.get_yticks().tolist() == pytest.approx(middles)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]


def test_channels_are_shades_and_links_lie_between_them(ax):
    a, b = normal(5, 3), normal(4, 3, seed=1)
    plot.alignment(a, b, np.ones((5, 4)), ax=ax)
    lines = curves(ax)
    of_a, of_b = np.stack(lines[:3], axis=1), np.stack(lines[3:], axis=1)
    assert (of_b == b).all() and len({line.get_color().tobytes() for line in ax.lines}) == 6
    np.testing.assert_allclose(of_a - of_a[0, 0], a - a[0, 0], atol=1e-12)
    frames, ends, _ = links(ax)
    assert len(frames) == 20
    for (i, j), (top, bottom) in zip(frames, ends, strict=True):
        assert top == of_a[i].min() and bottom == of_b[j].max()


@pytest.mark.parametrize("options", [{}, {"gamma": 0.1, "cost": "cityblock", "bandwidth": 1}])
def test_alignment_is_computed_where_it_is_not_given(ax, options):
    a, b = normal(5, 2), normal(7, 2, seed=1)
    plot.alignment(a, b, ax=ax, **options)
    C = oracle.cost(a, b, options.get("cost", "sqeuclidean"))
    C[~oracle.inside(5, 7, options.get("bandwidth"))] = np.inf
    E = oracle.alignment(C, options.get("gamma", 1.0))
    frames, _, opacity = links(ax)
    assert frames.tolist() == np.argwhere(E >= LEAST).tolist()
    assert opacity.tolist() == pytest.approx(E[E >= LEAST].tolist())


@pytest.mark.parametrize(
    "sizes", [(100, 101), (101, 101), (150, 150), (500, 500), (500, 3)], ids=str
)
def test_links_of_long_series_thin_out_evenly(ax, sizes):
    """Along a diagonal as along a row: at most 200 antidiagonals, all of up to 200 frames."""
    N, M = sizes
    E = np.ones(sizes)
    plot.alignment(np.zeros(N), np.zeros(M), E, ax=ax)
    frames, _, _ = links(ax)
    sums = np.unique(frames.sum(axis=1))
    (step,) = set(np.diff(sums))
    assert len(sums) <= 200 and step % 2 == 1
    assert step == 1 or (N + M - 1) / (step - 2) > 200, "fewer than could be drawn"
    assert len(frames) == (np.indices(sizes).sum(axis=0) % step == 0).sum(), "all of those"


def test_no_link_of_an_infinite_value(ax):
    a = np.array([0.0, 1e300])
    plot.alignment(a, -a, ax=ax)
    assert not len(links(ax)[0])


# ---- heat maps


@pytest.mark.parametrize("kind", ["sqeuclidean", "euclidean", "cityblock", "cosine"])
@pytest.mark.parametrize("D", [None, 1, 3])
def test_cost_matrix(ax, kind, D):
    a, b = (normal(*((n,) if D is None else (n, D)), seed=n) for n in (5, 7))
    assert plot.cost_matrix(a, b, cost=kind, ax=ax) is ax
    expected = oracle.cost(a.reshape(5, -1), b.reshape(7, -1), kind)
    np.testing.assert_allclose(heat(ax), expected, rtol=1e-12, atol=1e-14)
    assert ax.get_xlabel() == "frame of a" and ax.get_ylabel() == "frame of b"
    bar = ax.images[0].colorbar
    assert bar.ax.get_ylabel() == f"cost ({kind})" and bar.ax.figure is ax.figure


def test_cosine_of_a_zero_vector_is_blank(ax):
    plot.cost_matrix(
        np.array([[0.0, 0.0], [1.0, 0.0]]), np.array([[0.0, 1.0]]), cost="cosine", ax=ax
    )
    assert np.ma.getmaskarray(heat(ax)).tolist() == [[True], [False]]
    ax.figure.canvas.draw()


def test_alignment_matrix(ax):
    E = oracle.alignment(oracle.cost(normal(5, 1), normal(7, 1, seed=1)), 1.0)
    assert plot.alignment_matrix(E, ax=ax) is ax
    assert (heat(ax) == E).all()
    image = ax.images[0]
    assert image.norm([0, 0.25, 1]).tolist() == [0, 0.5, 1]
    assert image.colorbar.ax.get_ylabel() == "expected alignment E"
    assert ax.get_xlabel() == "frame of a" and ax.get_ylabel() == "frame of b"


# ---- barycenter


@pytest.mark.parametrize("D", [None, 3])
@pytest.mark.parametrize("lengths", [None, [4, 1, 6], np.array([6, 6, 2], dtype=np.int32)], ids=str)
def test_barycenter_over_its_members(ax, D, lengths):
    z, X = (normal(*shape, *([D] if D else [])) for shape in ((5,), (3, 6)))
    assert plot.barycenter(z, X, lengths=lengths, ax=ax) is ax
    assert (np.stack(curves(ax), axis=1) == z.reshape(5, -1)).all()
    assert len(ax.collections) == (D or 1)
    lengths = [6, 6, 6] if lengths is None else lengths
    for d, (line, members) in enumerate(zip(ax.lines, ax.collections, strict=True)):
        drawn = members.get_segments()
        for x, length, segment in zip(X.reshape(3, 6, -1), lengths, drawn, strict=True):
            assert (segment[:, 0] == np.arange(length)).all()
            assert (segment[:, 1] == x[:length, d]).all()
        (colour,) = members.get_edgecolor()
        assert colour[:3].tolist() == list(matplotlib.colors.to_rgb(line.get_color()))
        assert 0 < colour[3] <= 0.5 and members.get_zorder() < line.get_zorder()
    assert len({line.get_color() for line in ax.lines}) == (D or 1)
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["members", "barycenter"]


def test_many_members_are_fainter(ax):
    opacities = []
    for n in (10, 1000):
        plot.barycenter(np.zeros(2), np.zeros((n, 2)), ax=ax)
        opacities.append(ax.collections[-1].get_alpha())
    assert opacities[1] < opacities[0] / 5


# ---- any array, any Axes


DRAWINGS = {
    "alignment": lambda brought, ax: plot.alignment(brought(A), brought(B), ax=ax),
    "alignment of E": lambda brought, ax: plot.alignment(brought(A), brought(B), brought(E), ax=ax),
    "alignment_matrix": lambda brought, ax: plot.alignment_matrix(brought(E), ax=ax),
    "cost_matrix": lambda brought, ax: plot.cost_matrix(brought(A), brought(B), ax=ax),
    "barycenter": lambda brought, ax: plot.barycenter(
        brought(A), brought(X), lengths=brought(np.array([4, 9, 1])), ax=ax
    ),
}
A, B = normal(6, 2, dtype="float32"), normal(8, 2, seed=1, dtype="float32")
E, X = cuseq.soft_dtw_alignment(A, B), normal(3, 9, 2, seed=2, dtype="float32")
every_drawing = pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)


def artists(ax):
    """All numbers that are drawn into an Axes."""
    yield from curves(ax)
    for collection in ax.collections:
        yield collection.get_edgecolor()
        yield from collection.get_segments()
    for image in ax.images:
        yield image.get_array()


@every_place
@every_drawing
def test_every_place_draws_the_same(place, drawing):
    ours, theirs = (Figure().subplots() for _ in range(2))
    drawing(lambda x: x, ours)
    drawing(place.array, theirs)
    for expected, drawn in zip(artists(ours), artists(theirs), strict=True):
        np.testing.assert_allclose(drawn, expected, rtol=1e-4, atol=1e-5)


@over([TORCH_CPU])
@every_drawing
def test_what_autograd_follows_is_drawn(place, drawing, ax):
    def followed(x):
        x = place.array(x)
        return x.requires_grad_() if x.is_floating_point() else x

    drawing(followed, ax)
    assert len(list(artists(ax)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_floats(dtype, ax):
    a, b = normal(4, dtype=dtype), normal(3, seed=1, dtype=dtype)
    plot.alignment(a, b, ax=ax)
    assert (curves(ax)[1] == b.astype(np.float64)).all()


@every_drawing
def test_without_axes_a_figure_is_made(drawing):
    ax = drawing(lambda x: x, None)
    assert pyplot.gcf() is ax.figure and pyplot.get_fignums() == [1]
    ax.figure.canvas.draw()  # which lays out
    sheet, drawn = ax.figure.bbox, ax.figure.get_tightbbox().transformed(ax.figure.dpi_scale_trans)
    assert sheet.x0 <= drawn.x0 and sheet.y0 <= drawn.y0, "labels are cut off"
    assert drawn.x1 <= sheet.x1 and drawn.y1 <= sheet.y1, "labels are cut off"


@every_drawing
def test_with_axes_no_figure_is_made(drawing, ax):
    assert drawing(lambda x: x, ax) is ax
    assert not pyplot.get_fignums()


@every_drawing
def test_inputs_stay_as_they_were(drawing, ax):
    before = [x.copy() for x in (A, B, E, X)]
    drawing(lambda x: x, ax)
    assert all((x == was).all() for x, was in zip((A, B, E, X), before, strict=True))


# ---- errors

a, b = np.zeros((3, 2)), np.zeros((4, 2))
WRONG = [
    (ValueError, "a", lambda: plot.alignment(np.zeros((1, 3, 2)), b)),
    (ValueError, "b", lambda: plot.alignment(a, np.zeros((0, 2)))),
    (ValueError, "b", lambda: plot.alignment(a, np.zeros((4, 3)))),
    (ValueError, "b", lambda: plot.cost_matrix(a, np.zeros(4))),
    (ValueError, "a", lambda: plot.alignment(np.full((3, 2), np.nan), b)),
    (ValueError, "b", lambda: plot.cost_matrix(a, np.full((4, 2), np.inf))),
    (TypeError, "a", lambda: plot.cost_matrix(a.astype(int), b)),
    (TypeError, "a", lambda: plot.alignment([1.0, 2.0], b)),
    (TypeError, "b", lambda: plot.alignment(a, b.astype(np.float32))),
    (ValueError, "E", lambda: plot.alignment(a, b, np.zeros((4, 3)))),
    (ValueError, "E", lambda: plot.alignment(a, b, np.zeros((1, 3, 4)))),
    (TypeError, "E", lambda: plot.alignment(a, b, np.zeros((3, 4), dtype=bool))),
    (ValueError, "E", lambda: plot.alignment_matrix(np.zeros(3))),
    (ValueError, "gamma", lambda: plot.alignment(a, b, gamma=-1.0)),
    (ValueError, "cost", lambda: plot.alignment(a, b, cost="manhattan")),
    (ValueError, "cost", lambda: plot.cost_matrix(a, b, cost="manhattan")),
    (ValueError, "z", lambda: plot.barycenter(np.zeros((1, 3, 2)), np.zeros((5, 3, 2)))),
    (ValueError, "X", lambda: plot.barycenter(a, a[0])),
    (ValueError, "X", lambda: plot.barycenter(a, np.zeros((5, 3)))),
    (ValueError, "X", lambda: plot.barycenter(a, np.zeros((0, 3, 2)))),
    (ValueError, "lengths", lambda: plot.barycenter(a, np.zeros((2, 3, 2)), lengths=[3])),
    (ValueError, "lengths", lambda: plot.barycenter(a, np.zeros((2, 3, 2)), lengths=[3, 4])),
    (ValueError, "lengths", lambda: plot.barycenter(a, np.zeros((2, 3, 2)), lengths=[0, 3])),
    (TypeError, "lengths", lambda: plot.barycenter(a, np.zeros((2, 3, 2)), lengths=[1.0, 3.0])),
    (TypeError, "ax", lambda: plot.cost_matrix(a, b, ax=np.zeros(2))),
    (TypeError, "ax", lambda: plot.alignment(a, b, ax=Figure())),
]


@pytest.mark.parametrize("error, argument, call", WRONG)
def test_what_is_wrong_is_named(error, argument, call):
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert re.fullmatch(rf"{argument}: expected .+, got .+; .+", str(caught.value))
    assert not pyplot.get_fignums(), "a figure was made before the arguments were checked"
