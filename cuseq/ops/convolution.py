"""What the operators of the causal convolution share: the checks of what they are given."""

from cuseq.runtime import arrays, checks

WIDEST = 32
AXES = {"bdl": (0, 1, 2), "bld": (0, 2, 1)}  # that are seen as B, D, L
NOTHING = 0, 0, 0, 0  # pointer and strides of a tensor that a call does not have


def check_options(activation, layout="bdl"):
    """Refuse an activation or a layout that is not one."""
    checks.one_of("layout", layout, ("bdl", "bld"))
    checks.one_of("activation", activation, (None, "silu", "swish"))


def as_bdl(x, layout):
    """An array of either layout seen as (B, D, L)."""
    return x.seen_as(*AXES[layout])


def borrow_filter(operator, x, weight, bias):
    """Weight seen as (D, W) and bias (D,) or None, borrowed and checked, and weight's own shape."""
    weight = arrays.borrow("weight", weight, operator)
    checks.floating("weight", weight)
    checks.same_device("weight", weight, "x", x)
    D, shape = x.shape[1], weight.shape
    if len(shape) == 3 and shape[1] == 1:
        weight = weight.seen_as(0, 2)
    if len(weight.shape) != 2 or weight.shape[0] != D or not 1 <= weight.shape[1] <= WIDEST:
        raise ValueError(
            checks.sentence(
                "weight",
                f"shape (D, W) or (D, 1, W) with D = {D} and W of 1 to {WIDEST}",
                shape,
                "check the layout of x, which names its axes",
            )
        )
    if bias is not None:
        bias = arrays.borrow("bias", bias, operator)
        checks.floating("bias", bias)
        checks.shape("bias", bias, (D,), "(D,)", "pass one bias a channel, or None")
        checks.same_device("bias", bias, "x", x)
    return weight, bias, shape


def check_state(name, state, x, rows, W):
    """Refuse a state that is not (rows, D, S) with S >= W - 1 on x's device."""
    checks.floating(name, state)
    checks.same_device(name, state, "x", x)
    D = x.shape[1]
    fits = len(state.shape) == 3 and state.shape[1] == D and state.shape[2] >= W - 1
    if not fits or (rows is not None and state.shape[0] != rows):
        letters = f"({'P' if rows is None else rows}, {D}, S) with S >= W - 1 = {W - 1}"
        raise ValueError(
            checks.sentence(name, f"shape {letters}", state.shape, "keep W - 1 inputs or more")
        )


def borrow_initial_state(operator, state, x, rows, W):
    """The initial state borrowed and checked, or None; and final states' shape and dtype."""
    if state is None:
        return None, (rows, x.shape[1], W - 1), x.dtype
    state = arrays.borrow("initial_state", state, operator)
    check_state("initial_state", state, x, rows, W)
    return state, tuple(state.shape), state.dtype


def borrow_outer(operator, call, grad_y, grad_final_state, letters):
    """Incoming gradients: grad_y, borrowed, seen as (B, D, L), and that of the final state or None.

    `letters` are the axes of a state in an error sentence.
    """
    checks.shape("grad_y", grad_y, call.given.shape, "of x", "pass one a y")
    checks.same_dtype("grad_y", grad_y, "x", call.x.dtype)
    checks.same_device("x", call.x, "grad_y", grad_y)
    if grad_final_state is not None:
        name = "grad_final_state"
        grad_final_state = arrays.borrow(name, grad_final_state, operator)
        checks.shape(name, grad_final_state, call.states, letters, "pass one a final state")
        checks.same_dtype(name, grad_final_state, "the state", call.state_dtype)
        checks.same_device(name, grad_final_state, "grad_y", grad_y)
    return grad_y.seen_as(*call.axes), grad_final_state
