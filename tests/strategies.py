"""Hypothesis strategies: the ways in which an array may lie in memory, and ragged sizes."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st


class Layout(NamedTuple):
    """Strides to be given to an array: its axes in the order of memory, and a step for each."""

    order: tuple
    steps: tuple  # 2 leaves gaps, below 0 runs backwards, 0 repeats the first element
    offset: int  # elements of its memory before it

    def of(self, x):
        """The same numbers (but those that a step of 0 replaces), laid out so."""
        shape = x.shape
        x = x[tuple(slice(0, 1) if step == 0 else slice(None) for step in self.steps)]
        steps = [step or 1 for step in self.steps]
        sizes = [x.shape[axis] * abs(steps[axis]) for axis in self.order]
        memory = np.zeros(sizes, x.dtype).transpose(np.argsort(self.order))
        view = memory[tuple(slice(None, None, step) for step in steps)]
        view[...] = x
        return np.broadcast_to(view, shape)


def layouts(ndim, strides, repeats=True):
    """Layouts that a place has: `strides` as it says, repeats whether an axis may repeat."""
    if strides == "contiguous":
        return st.just(Layout(tuple(range(ndim)), (1,) * ndim, 0))
    steps = [1, 2] + [-1, -2] * (strides == "any") + [0] * repeats
    return st.builds(
        Layout,
        st.permutations(range(ndim)).map(tuple),
        st.tuples(*[st.sampled_from(steps)] * ndim),
        st.sampled_from([0, 3]),
    )


def sizes(most):
    """Lengths from 1 to `most`, those around a warp more often."""
    near = [n for n in (15, 16, 17, 31, 32, 33) if n <= most]
    return st.one_of(st.integers(1, most), *([st.sampled_from(near)] if near else []))
