"""The one table of tolerances, each entry with its reason, and the comparison that uses it.

An element may be off by

    rtol |expected| + (atol + 4 eps exponent) scale

with eps of the arithmetic's dtype (float32 for 16-bit results), scale the largest finite |expected|
of the array unless the test knows better (a sum that cancels is as good as its terms), and
exponent the largest x of an exp(-x) taken on the way, 0 where there is none worth counting:
rounding x by eps x puts as much into the result.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

# Unit roundoffs: the relative error of rounding to nearest.
U64, U32, U16, UB16 = 2.0**-53, 2.0**-24, 2.0**-11, 2.0**-8


class Tolerance(NamedTuple):
    rtol: float
    atol: float
    reason: str


ONE_ROUNDING = "float32 arithmetic as in the float32 entry, then one rounding to the dtype"
CONVOLUTION = {
    ("value", "float64"): Tolerance(
        8 * U64, 64 * U64, "33 products and sums at W = 32, as large as 2 scale; exp, quotient"
    ),
    ("value", "float32"): Tolerance(
        8 * U32, 32 * U32, "the same; 33 roundings in one direction do not occur, half may"
    ),
    ("value", "float16"): Tolerance(U16 + 8 * U32, 32 * U32, ONE_ROUNDING),
    ("value", "bfloat16"): Tolerance(UB16 + 8 * U32, 32 * U32, ONE_ROUNDING),
    ("gradient", "float64"): Tolerance(
        8 * U64, 256 * U64, "sums over batch and length, whose terms exceed their sum"
    ),
    ("gradient", "float32"): Tolerance(
        8 * U32, 64 * U32, "W products, the slope's 1 + v (1 - sigma); long sums are taken by parts"
    ),
    ("gradient", "float16"): Tolerance(U16 + 8 * U32, 64 * U32, ONE_ROUNDING),
    ("gradient", "bfloat16"): Tolerance(UB16 + 8 * U32, 64 * U32, ONE_ROUNDING),
    ("state", "float64"): Tolerance(0, 0, "inputs are copied"),
    ("state", "float32"): Tolerance(U32, 0, "inputs are copied, rounded where they are float64"),
    ("state", "float16"): Tolerance(U16, 2.0**-25, "one rounding; half a step among subnormals"),
    ("state", "bfloat16"): Tolerance(UB16, 0, "inputs are copied, rounded once"),
}
SOFT_DTW = {
    ("value", "float64"): Tolerance(
        1e-13, 16 * U64, "a few roundings a diagonal, which average out over thousands of them"
    ),
    ("value", "float32"): Tolerance(
        8 * U32, 8 * U32, "a squared difference is good to 3 roundings, R to one a cell, and small"
    ),
    ("gradient", "float64"): Tolerance(
        16 * U64, 1e-13, "E is good to about 1e-14 times the cells that share a row"
    ),
    ("gradient", "float32"): Tolerance(
        8 * U32, 1e-5, "E is good to 5e-6 beyond its exponents, and a row shares it among cells"
    ),
    ("gradient", "float16"): Tolerance(U16 + 8 * U32, 1e-5, ONE_ROUNDING),
    ("gradient", "bfloat16"): Tolerance(UB16 + 8 * U32, 1e-5, ONE_ROUNDING),
}
# Gradients against (f(x + h) - f(x - h)) / (2 h) in float64 with h = 1e-5.
CENTRAL_DIFFERENCE = {
    ("gradient", "float64"): Tolerance(
        0, 1e-8, "h^2 f''' / 6 is about 1e-10, and U64 |f| / h about 1e-10 for |f| of 10"
    ),
}
TOLERANCES = {
    "soft_dtw": SOFT_DTW,
    "causal_conv1d": CONVOLUTION,
    "causal_conv1d_update": CONVOLUTION,
    "central_difference": CENTRAL_DIFFERENCE,
}


def tolerance(what, dtype):
    """The entry for "operator.quantity": grad_... and alignment are gradients, ...state a state."""
    operator, quantity = what.split(".")
    if quantity.startswith("grad_") or quantity == "alignment":
        role = "gradient"
    elif quantity.endswith("state"):
        role = "state"
    else:
        role = "value"
    name = np.dtype(dtype).name
    entries = TOLERANCES[operator]
    if (role, name) not in entries:
        raise AssertionError(f"{what}: expected a dtype that a {role} has, got {name}")
    return entries[role, name]


def assert_close(actual, expected, what, *, scale=None, exponent=0.0):
    """Compare `actual` with the float64 answer within the tolerance of `what` and actual's dtype.

    `what` is "operator.quantity", as "soft_dtw.grad_a". Shapes must agree. NaN passes only where
    NaN is expected; infinity only where the same is, or where the dtype overflows.
    """
    actual = np.asarray(actual)
    allowed = tolerance(what, actual.dtype)
    head = f"{what} ({actual.dtype.name})"
    if actual.shape != np.shape(expected):
        raise AssertionError(f"{head}: expected shape {np.shape(expected)}, got {actual.shape}")
    got = actual.astype(np.float64)
    wanted = np.array(expected, dtype=np.float64)
    overflows = np.abs(wanted) > float(ml_dtypes.finfo(actual.dtype).max)
    wanted[overflows] = np.copysign(np.inf, wanted[overflows])

    finite = np.isfinite(wanted)
    if scale is None:
        scale = np.abs(wanted[finite]).max(initial=0.0)
    eps = 2 * (U64 if actual.dtype == np.float64 else U32)
    with np.errstate(invalid="ignore"):
        limit = allowed.rtol * np.abs(wanted) + (allowed.atol + 4 * eps * exponent) * scale
        error = np.abs(got - wanted)
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    close = np.where(finite & np.isfinite(got), error <= limit, same)
    if close.all():
        return
    # The worst element; a NaN or infinity where none belongs comes before any number.
    badness = np.where(close, -1, np.where(np.isfinite(error), error, np.inf))
    place = np.unravel_index(np.argmax(badness), badness.shape)
    raise AssertionError(
        f"{head}: {np.count_nonzero(~close)} of {close.size} elements are off; largest error"
        f" {badness[place]:.3g} at {tuple(map(int, place))}: expected {wanted[place]:.9g},"
        f" got {got[place]:.9g}, allowed {limit[place]:.3g} ({allowed.reason})"
    )
