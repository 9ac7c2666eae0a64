"""The way past torch's dispatcher, for calls that only autograd follows and whose like was seen.

The dispatcher, the parsing of a schema and torch.autograd.Function's care for torch.func take the
host longer than a launch does. What tells here whether they can be left out is torch's own, and
private: where a torch lacks a part of it, every call goes through the dispatcher.
"""

import threading

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from cuseq.runtime.replay import ALIGNMENT, MOST

try:
    from torch._C import (
        _are_functorch_transforms_active,
        _is_any_autocast_enabled,
        _is_tracing,
        _len_torch_dispatch_stack,
    )
    from torch._C._dynamo.guards import TensorGuards
    from torch.autograd import _profiler_enabled
except ImportError:
    TensorGuards = None


def alone():
    """Whether only autograd sees the ops of a call: no compiler, tracer, transform, mode, autocast.

    A profiler wants to see them too.
    """
    return not (
        is_compiling()
        or TensorGuards is None
        or _len_torch_dispatch_stack()
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _is_any_autocast_enabled()
        or _is_tracing()
        or _profiler_enabled()
    )


def apply(function, *args):
    """As function.apply, less what that does for torch.func. Only where a call is `alone()`."""
    return super(torch.autograd.Function, function).apply(*args)


class Op:
    """A torch op, called with its tensors and its other arguments.

    A call like a recent one of the thread is replayed, if it is `alone()`; it gives None where the
    torch op gives a tensor without elements. Calls are alike for the guards of torch's compiler,
    which compare all that is known of tensors at once.
    """

    RECENT = 8  # calls that are looked through, of the same other arguments

    def __init__(self, op, find):
        self.op, self._find, self._recent = op, find, _Recent()

    def __call__(self, tensors, options):
        if not alone():
            return self.op(*tensors, *options)
        results = self.replay(tensors, options)
        if results is None:
            results = self.op(*tensors, *options)
            self._remember(tensors, options)
        return results

    def replay(self, tensors, options):
        """The results of a call like a recent one, else None.

        Only where a call is `alone()` and autograd does not follow the tensors.
        """
        given, places = _given(tensors)
        try:
            recent = self._recent.calls.get((options, places), ())
        except TypeError:  # an option that can not be hashed, and is wrong
            return None
        for guards, recording in recent:
            if guards.check(*given):
                addresses = [x.data_ptr() for x in given]
                if not any([address % ALIGNMENT for address in addresses]):
                    return recording.again(addresses)
        return None

    def _remember(self, tensors, options):
        recording, _, addresses = self._find(*tensors, *options)
        if recording and not any(address % ALIGNMENT for address in addresses):
            given, places = _given(tensors)
            if len(self._recent.calls) >= MOST:
                self._recent.calls.clear()
            recent = self._recent.calls.setdefault((options, places), [])
            recent.insert(0, (_guards(given), recording))
            del recent[self.RECENT :]


class _Recent(threading.local):
    """Of a thread: pairs of guards and a recording, by options and which tensors there are."""

    def __init__(self):
        self.calls = {}


def _given(tensors):
    """Those that are not None, and which they are."""
    return [x for x in tensors if x is not None], tuple([x is None for x in tensors])


def _guards(tensors):
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
