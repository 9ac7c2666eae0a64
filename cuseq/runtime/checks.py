"""The one form of error sentence: argument, expected, got, remedy.

``ValueError`` for values and shapes, ``TypeError`` for kinds, ``NotImplementedError`` for an option
that the interface names and this release does not have yet.
"""

import math

FLOATING = ("float64", "float32", "float16", "bfloat16")
INTEGER = ("int32", "int64")


def sentence(argument, expected, got, remedy):
    """``a: expected shape (B, N, D), got (128,); add axes with a[None, :, None]``."""
    return f"{argument}: expected {expected}, got {got}; {remedy}"


def floating(name, array):
    """Refuse an array that is not of one of the four floating dtypes."""
    if array.dtype not in FLOATING:
        raise TypeError(
            sentence(
                name, "dtype " + ", ".join(FLOATING), array.dtype, f"convert {name} to one of them"
            )
        )


def shape(name, array, expected, letters, remedy):
    """Refuse an array whose shape is not `expected`; `letters` names its axes, as "(D,)"."""
    if array.shape != expected:
        raise ValueError(sentence(name, f"shape {letters} = {expected}", array.shape, remedy))


def same_dtype(name, array, other_name, dtype):
    """Refuse an array whose dtype is not that of another one."""
    if array.dtype != dtype:
        raise TypeError(
            sentence(
                name,
                f"the dtype of {other_name}, {dtype}",
                array.dtype,
                f"convert {name} or {other_name}",
            )
        )


def same_device(name, array, first_name, first):
    """Refuse an array that lives on another device than the first one."""
    if array.device != first.device:
        raise ValueError(
            sentence(
                name,
                f"an array on the device of {first_name}, {first.device_name}",
                array.device_name,
                "move one of them: all arrays of a call live on one device",
            )
        )


def one_of(name, value, choices):
    """Refuse an option that is none of `choices`."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(sentence(name, f"one of {listed}", repr(value), "choose one of these"))


def not_yet(name, value, only):
    """Refuse an option that the interface names and that this release lacks."""
    same = value is only or (isinstance(value, type(only)) and value == only)
    if not same:
        raise NotImplementedError(
            sentence(name, f"{only!r} in this release", _brief(value), f"leave {name} out for now")
        )


def gamma(value):
    """The smoothing as a finite float of at least 0."""
    try:
        value = float(value)
    except OverflowError:  # an int beyond every float
        value = math.inf
    if not (value >= 0.0 and math.isfinite(value)):
        raise ValueError(
            sentence("gamma", "a finite number of at least 0", value, "pass a gamma such as 1.0")
        )
    return value


def per_sample(name, array, B):
    """Refuse an option of another shape than () and (B,)."""
    if array.shape not in ((), (B,)):
        raise ValueError(
            sentence(name, f"shape (B,) = ({B},)", array.shape, "pass one number, or one a sample")
        )


def within(name, lowest, highest, least, most):
    """Refuse an integer option whose values, from `lowest` to `highest`, leave least .. most."""
    for value in lowest, highest:
        if not least <= value <= most:
            expected = f"at least {least}" if most == math.inf else f"{least} to {most}"
            raise ValueError(sentence(name, expected, int(value), "correct this entry"))


def _brief(value):
    if hasattr(value, "shape"):
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    return repr(value)
