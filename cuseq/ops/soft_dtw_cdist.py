"""Soft-DTW between all series of two collections, tile by tile of the matrix."""

from functools import partial
from typing import NamedTuple

import numpy as np

from cuseq.host import soft_dtw_cdist as host
from cuseq.ops import soft_dtw_engine as engine
from cuseq.ops.soft_dtw import as_series, check_one_for_all, gamma_option, integer_option
from cuseq.ops.soft_dtw import borrow as borrow_pairs
from cuseq.ops.soft_dtw_engine import Call, Grid, Memory, Numbers, Sums
from cuseq.ops.soft_dtw_plan import SERIES, VALUES, Problem, plan
from cuseq.runtime import arrays, checks, kernels
from cuseq.runtime.arrays import HOST, Array, numpy_dtype
from cuseq.runtime.progress import shown_by
from cuseq.runtime.replay import replayed

AXES, LETTERS = {2: (0, 1, None), 3: (0, 1, 2)}, "(n, N) or (n, N, D)"
MOST_PAIRS = 4096  # of a tile: they fill a device a few times over
ROOM = 2**30  # bytes of working memory, if one pair does not take more


@replayed
def soft_dtw_cdist(
    A,
    B=None,
    *,
    gamma=1.0,
    cost="sqeuclidean",
    bandwidth=None,
    lengths_a=None,
    lengths_b=None,
    progress=False,
):
    """Soft-DTW values between each series of A and each of B: ``D[i, j] = s(A[i], B[j])``.

    The matrix is computed tile by tile: beyond it and the collections, at most 1 GiB of memory is
    used (by `soft_dtw_cdist_value_and_grad` too), unless one pair takes more. Of A with itself half
    the pairs are computed, and the others mirrored; the diagonal is not 0, see
    `soft_dtw_divergence_cdist`.

    Args:
        A: n series of one feature (n, N) or of D features (n, N, D), float64, float32, float16 or
            bfloat16, from any library, in host memory or on a CUDA device.
        B: m series (m, M) or (m, M, D), of the same dtype and device; None for A itself.
        gamma, bandwidth: as `soft_dtw`, one number for all pairs.
        cost: as `soft_dtw`.
        lengths_a, lengths_b: how long each series of A and of B is, integers (n,) and (m,).
        progress: whether to show a bar, by tqdm, of the pairs that are done; the call then waits
            for the device, tile by tile.

    Returns:
        D (n, m), as `soft_dtw` returns values.

    Raises: as `soft_dtw`; ImportError for a bar without tqdm.

    >>> import numpy as np, cuseq
    >>> A = np.array([[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]])
    >>> cuseq.soft_dtw_cdist(A, gamma=0.0)
    array([[0., 2.],
           [2., 0.]])
    """
    chosen = borrow("soft_dtw_cdist", A, B, gamma, cost, bandwidth, lengths_a, lengths_b)
    shown = shown_by(progress)
    D = arrays.empty(chosen.shape, chosen.problem.real, chosen.a)
    if D.device == HOST:
        host.values(chosen.on_host(), D.numpy(), shown)
    else:
        _values_on_device(chosen, D, shown)
    return arrays.give_back(D, A)


@replayed
def soft_dtw_cdist_value_and_grad(
    A,
    B=None,
    *,
    grad_values=None,
    gamma=1.0,
    cost="sqeuclidean",
    bandwidth=None,
    lengths_a=None,
    lengths_b=None,
    progress=False,
):
    """Soft-DTW values between collections, and the gradients of ``sum(grad_values * D)``.

    Args:
        grad_values: a weight of each value (n, m), of the dtype of the values; None for ones.
        The others as `soft_dtw_cdist`.

    Returns:
        D, (grad_A, grad_B), or D, (grad_A,) without B: gradients have the shapes and the dtype of
        their collections. A pair whose value is NaN makes the gradients of its two series NaN.

    Raises: as `soft_dtw_cdist`.

    >>> import numpy as np, cuseq
    >>> A = np.array([[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]])
    >>> D, (grad_A,) = cuseq.soft_dtw_cdist_value_and_grad(A, gamma=0.0)
    >>> grad_A
    array([[-4.,  0.,  4.],
           [ 4.,  0., -4.]])
    """
    operator = "soft_dtw_cdist"
    chosen = borrow(operator, A, B, gamma, cost, bandwidth, lengths_a, lengths_b)
    outer = None
    if grad_values is not None:
        outer = arrays.borrow("grad_values", grad_values, operator)
        checks.shape("grad_values", outer, chosen.shape, "(n, m)", "pass one a value")
        checks.same_dtype("grad_values", outer, "the values", chosen.problem.real)
        checks.same_device("grad_values", outer, "A", chosen.a)
    shown = shown_by(progress)
    D = arrays.empty(chosen.shape, chosen.problem.real, chosen.a)
    results = [arrays.empty(shape, chosen.problem.dtype, chosen.a) for shape in chosen.shapes]
    if D.device == HOST:
        views = [x.seen_as(*AXES[len(x.shape)]).numpy() for x in results]
        of_b = None if chosen.symmetric else views[1]
        host.gradients(outer and outer.numpy(), chosen.on_host(), D.numpy(), views[0], of_b, shown)
    else:
        _gradients_on_device(chosen, outer, D, results, shown)
    return arrays.give_back(D, A), tuple(arrays.give_back(grad, A) for grad in results)


@replayed
def soft_dtw_divergence_cdist(
    A,
    B=None,
    *,
    gamma=1.0,
    cost="sqeuclidean",
    bandwidth=None,
    lengths_a=None,
    lengths_b=None,
    progress=False,
):
    """Soft-DTW divergences between each series of A and each of B.

    ``D[i, j] = s(A[i], B[j]) - (s(A[i], A[i]) + s(B[j], B[j])) / 2``, which is 0 for equal series.
    Otherwise as `soft_dtw_cdist`.

    >>> import numpy as np, cuseq
    >>> A = np.array([[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]])
    >>> cuseq.soft_dtw_divergence_cdist(A, gamma=1.0).round(4)
    array([[0.    , 1.9886],
           [1.9886, 0.    ]])
    """
    operator = "soft_dtw_divergence_cdist"
    chosen = borrow(operator, A, B, gamma, cost, bandwidth, lengths_a, lengths_b)
    (n, m), real = chosen.shape, chosen.problem.real
    shown = shown_by(progress)
    D = arrays.empty(chosen.shape, real, chosen.a)
    own = [arrays.scratch((n,), real, chosen.a)]
    if not chosen.symmetric:
        for x, lengths in (chosen.a, lengths_a), (chosen.b, lengths_b):
            itself = borrow_pairs(operator, x, x, gamma, cost, bandwidth, lengths, lengths)
            room = arrays.scratch(itself.values_shape, real, chosen.a)
            own.append(engine.forward(itself, values=room)[0])
        del own[0]
    of_a, of_b = own[0], own[-1]
    if D.device == HOST:
        matrix = D.numpy()
        host.values(chosen.on_host(), matrix, shown)
        if chosen.symmetric:
            of_a.numpy()[...] = matrix.diagonal()
        with np.errstate(invalid="ignore"):
            matrix -= (of_a.numpy()[:, None] + of_b.numpy()) / 2
    else:
        _values_on_device(chosen, D, shown, of_a)
        grid = m, n, 1, m  # of pairs, as in a tile
        args = D.size, *grid, of_a.pointer, of_b.pointer, D.pointer
        _on_each(chosen, "soft_dtw_debias", D.size, args)
    return arrays.give_back(D, A)


class Collections(NamedTuple):
    """What a function borrowed: collections of series (n, N, D) and (m, M, D)."""

    problem: Problem  # of a tile, but for the numbers of its pairs and series
    a: Array
    b: Array
    symmetric: bool  # b is a
    shapes: tuple  # as the caller has them
    gamma: Numbers
    bandwidth: Numbers | None
    lengths_a: Numbers | None
    lengths_b: Numbers | None

    @property
    def shape(self):
        """Of the matrix: (n, m)."""
        return self.a.shape[0], self.b.shape[0]

    def on_host(self):
        """For cuseq.host."""
        n, m = self.shape
        return host.Collections(
            self.a.numpy(),
            None if self.symmetric else self.b.numpy(),
            self.problem.cost,
            self.gamma.host(1, np.float64)[0],
            self.bandwidth and self.bandwidth.host(1, np.int64)[0],
            self.lengths_a and self.lengths_a.host(n, np.int64),
            self.lengths_b and self.lengths_b.host(m, np.int64),
        )

    def tile(self, rows, columns):
        """The call of the series `rows` of a with `columns` of b, which are slices."""
        r, c = rows.stop - rows.start, columns.stop - columns.start
        m = self.shape[1]
        return Call(
            self.problem._replace(B=r * c, batch_a=r, batch_b=c),
            Grid(c, m, rows.start * m + columns.start, every_a=c, lengths_by_series=True),
            self.shape,
            (),
            _part(self.a, rows),
            _part(self.b, columns),
            None,
            self.gamma,
            self.bandwidth,
            _part_of_each(self.lengths_a, rows),
            _part_of_each(self.lengths_b, columns),
        )

    def tiles(self, pairs):
        """(rows, columns) that cover the matrix, or its part on and above the diagonal."""
        n, m = self.shape
        start = 0
        while start < n:
            first = start if self.symmetric else 0
            wide = min(max(m - first, 1), pairs)
            rows = slice(start, min(start + max(pairs // wide, 1), n))
            for column in range(first, m, wide):
                yield rows, slice(column, min(column + wide, m))
            start = rows.stop


def _part(array, part):
    """A part of a borrowed array along its first axis."""
    offset = part.start * array.strides[0] * numpy_dtype(array.dtype).itemsize
    shape = part.stop - part.start, *array.shape[1:]
    return array._replace(pointer=array.pointer + offset, shape=shape)


def _part_of_each(option, part):
    if option is None or option.each is None or not option.each.shape:
        return option
    return option._replace(each=_part(option.each, part))


def borrow(operator, A, B, gamma, cost, bandwidth, lengths_a, lengths_b):
    """The collections of a public function; everything wrong raises here."""
    first = arrays.borrow("A", A, operator)
    second = first if B is None else arrays.borrow("B", B, operator)
    a, b = as_series(first, second, cost, AXES, LETTERS, ("A", "B"))
    if B is None and lengths_b is not None:
        remedy = "lengths_a are those of A, which is compared with itself"
        raise ValueError(checks.sentence("lengths_b", "None without B", "lengths", remedy))
    check_one_for_all("gamma", gamma, operator)
    check_one_for_all("bandwidth", bandwidth, operator)
    (n, N, D), (m, M, _) = a.shape, b.shape
    gamma, hard = gamma_option(gamma, n, first, operator)
    bandwidth = integer_option("bandwidth", bandwidth, n, (0, np.inf), first, operator)
    lengths_a = integer_option("lengths_a", lengths_a, n, (1, N), first, operator)
    lengths_b = (
        lengths_a
        if B is None
        else integer_option("lengths_b", lengths_b, m, (1, M), first, operator)
    )
    width = M
    if bandwidth and bandwidth.each is None and not (lengths_a or lengths_b):
        width = min(M, 2 * bandwidth.one + abs(N - M))
    problem = Problem(0, N, M, D, 0, 0, a.dtype, cost, hard, width, a.device)
    shapes = (first.shape,) if B is None else (first.shape, second.shape)
    return Collections(problem, a, b, B is None, shapes, gamma, bandwidth, lengths_a, lengths_b)


# ---- on a device


def _pairs_of_tile(tile):
    rows, columns = tile
    return (rows.stop - rows.start) * (columns.stop - columns.start)


def _wait(array):
    """Until what is queued on the array's device is done."""
    kernels.wait(array.library.stream(array.device), array.device)


def _room(chosen, output):
    """(pairs of a tile, working memory of a forward and of a backward), shared by all tiles."""
    limits = kernels.device_limits(chosen.problem.device)
    pairs = MOST_PAIRS
    while True:
        shapes = {tuple(part.stop - part.start for part in tile) for tile in chosen.tiles(pairs)}
        plans = [
            plan(chosen.problem._replace(B=r * c, batch_a=r, batch_b=c), output, keep, limits)
            for keep in [output != VALUES]
            for r, c in shapes
        ]
        sizes = [
            max((Memory.size(sections) for sections in those), default=0)
            for those in ([how.forward for how in plans], [how.backward for how in plans])
        ]
        if sum(sizes) <= ROOM or pairs == 1:
            return pairs, [arrays.scratch((size,), "uint8", chosen.a) for size in sizes]
        pairs //= 2


def _values_on_device(chosen, D, shown, own=None):
    """Write D; of a collection with itself also its diagonal to `own`, if that is wanted."""
    pairs, (room, _) = _room(chosen, VALUES)
    for tile in shown(chosen.tiles(pairs), _pairs_of_tile, partial(_wait, chosen.a)):
        engine.forward(chosen.tile(*tile), values=D, room=room)
    if chosen.symmetric:
        _mirror(chosen, D, own)


def _mirror(chosen, D, own=None):
    args = chosen.shape[0], D.pointer, own.pointer if own else 0
    _on_each(chosen, "soft_dtw_mirror", D.size, args)


def _on_each(chosen, function, count, args):
    if count:
        with arrays.launching(chosen.a) as launch:
            engine.run_on_each(launch, function, chosen, count, args)


def _gradients_on_device(chosen, grad_values, D, results, shown):
    """Write D, and the gradients of sum(grad_values D) to the results, one a collection."""
    if chosen.symmetric:
        n = chosen.shape[0]
        folded = arrays.scratch((n, n), chosen.problem.real, chosen.a)
        outer = (grad_values.pointer, *grad_values.strides) if grad_values else (0, 0, 0)
        _on_each(chosen, "soft_dtw_fold", n * n, (n, *outer, folded.pointer))
        grad_values = folded
    sums = results
    if chosen.problem.dtype != chosen.problem.real:
        sums = [arrays.scratch(x.shape, chosen.problem.real, chosen.a) for x in results]
    for total in sums:
        _on_each(chosen, "soft_dtw_zero", total.size, (total.size, total.pointer))
    pairs, (forward, backward) = _room(chosen, SERIES)
    tiles = shown(chosen.tiles(pairs), _pairs_of_tile, partial(_wait, chosen.a))
    for rows, columns in tiles:
        tile = chosen.tile(rows, columns)
        of_a, of_b = _part(sums[0], rows), _part(sums[-1], columns)
        _, kept = engine.forward(tile, SERIES, values=D, room=forward)
        # One after the other, for they are of the same series where a collection meets itself.
        into = Sums(of_a, None, adds=True), Sums(None, of_b, adds=True)
        engine.backward(tile, grad_values, D, kept, SERIES, sums=into, room=backward)
    if chosen.symmetric:
        _mirror(chosen, D)
    if sums is not results:
        for total, result in zip(sums, results, strict=True):
            args = total.size, total.pointer, result.pointer
            _on_each(chosen, "soft_dtw_narrow", total.size, args)
