"""CausalConv1d, the causal convolution as a module."""

import math
import numbers

import torch

from cuseq.ops.convolution import WIDEST, check_options
from cuseq.runtime import checks
from cuseq.torch.convolution import causal_conv1d, causal_conv1d_update, causal_conv1d_with_state


class CausalConv1d(torch.nn.Module):
    """Causal depthwise convolution, the short convolution of Mamba-like models, as a layer.

    ``y[b,d,t] = act(bias[d] + sum_k weight[d,k] x[b,d,t-W+1+k])`` with W the width, and x before
    the start taken from the state, zeros without one.

    Args:
        dim: number of channels D.
        width: length of the filter, 1 to 32.
        bias: whether there is a bias.
        activation: None, "silu" or its other name "swish".
        layout: what the axes of x and y are, "bdl" for (B, D, L) or "bld" for (B, L, D).
        device, dtype: those of the parameters.

    The parameters are weight (D, W) and bias (D,), or None, with the first values that
    `torch.nn.Conv1d(dim, dim, width, groups=dim)` has. `load_state_dict` takes the weight
    (D, 1, W) of such a layer too; `from_conv1d` makes a layer from one.

    Called as ``y = conv(x, seq_idx=None, initial_state=None)``, with a tensor x of any floating
    dtype and the keywords of `cuseq.causal_conv1d`. Under autocast x is cast to autocast's dtype,
    which y then has; float64, the parameters and states keep theirs.

    Raises:
        ValueError, TypeError: as `cuseq.causal_conv1d`.

    >>> import torch, cuseq.torch
    >>> conv = cuseq.torch.CausalConv1d(4, 3)
    >>> x = torch.randn(2, 4, 10)
    >>> conv(x).shape
    torch.Size([2, 4, 10])
    >>> with torch.no_grad():  # the first 9 inputs at once, then one token
    ...     y, state = conv.with_state(x[..., :9])
    ...     torch.allclose(conv.step(x[..., 9], state), conv(x)[..., 9], atol=1e-6)
    True
    """

    def __init__(
        self, dim, width, bias=True, activation="silu", *, layout="bdl", device=None, dtype=None
    ):
        super().__init__()
        _check_count("dim", dim, math.inf)
        _check_count("width", width, WIDEST)
        check_options(activation, layout)
        self.dim, self.width, self.activation, self.layout = dim, width, activation, layout
        options = {"device": device, "dtype": dtype}
        self.weight = torch.nn.Parameter(torch.empty(dim, width, **options))
        self.register_parameter(
            "bias", torch.nn.Parameter(torch.empty(dim, **options)) if bias else None
        )
        self.register_load_state_dict_pre_hook(_take_weight_of_conv1d)
        self.reset_parameters()

    @classmethod
    def from_conv1d(cls, conv, activation=None, *, layout="bdl"):
        """A layer with copies of the parameters of a depthwise `torch.nn.Conv1d`.

        It gives the first L outputs of a convolution with padding W - 1, whatever conv's padding.

        Raises:
            TypeError: for what is no `torch.nn.Conv1d`.
            ValueError: for one that is not depthwise, has a stride or a dilation, or does not pad
                with zeros.

        >>> import torch, cuseq.torch
        >>> conv = torch.nn.Conv1d(4, 4, 3, groups=4, padding=2)
        >>> x = torch.randn(2, 4, 10)
        >>> y = cuseq.torch.CausalConv1d.from_conv1d(conv)(x)
        >>> torch.allclose(y, conv(x)[..., :10], atol=1e-6)
        True
        """
        _check_conv1d(conv)
        layer = cls(
            conv.in_channels,
            conv.kernel_size[0],
            conv.bias is not None,
            activation,
            layout=layout,
            device=conv.weight.device,
            dtype=conv.weight.dtype,
        )
        with torch.no_grad():
            layer.weight.copy_(conv.weight.squeeze(1))
            if conv.bias is not None:
                layer.bias.copy_(conv.bias)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(getattr(conv, name).requires_grad)
        return layer.train(conv.training)

    def reset_parameters(self):
        """Fill the parameters with random values, uniform in -1 / sqrt(W) to 1 / sqrt(W)."""
        bound = 1 / math.sqrt(self.width)
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x, *, seq_idx=None, initial_state=None):
        options = self._options() | {"seq_idx": seq_idx, "initial_state": initial_state}
        return causal_conv1d(x, self.weight, self.bias, **options)

    def with_state(self, x, *, seq_idx=None, initial_state=None):
        """The convolution and the state to go on from, as to read a prompt: (y, final_state).

        Arguments and values as `cuseq.causal_conv1d_with_state`: final_state is (B, D, W - 1), or
        as wide as initial_state.
        """
        options = self._options() | {"seq_idx": seq_idx, "initial_state": initial_state}
        return causal_conv1d_with_state(x, self.weight, self.bias, **options)

    def step(self, x, state):
        """The outputs y of new inputs that follow those in the state, which is updated in place.

        Args:
            x: one token (B, D), or T of them in the layer's layout.
            state: (B, D, S) with S >= W - 1, from `initial_state` or `with_state`.

        Returns y of x's shape. Autograd follows, also from step to step through the state; call it
        under `torch.no_grad()` where no gradient is wanted.

        Raises: as `cuseq.causal_conv1d_update`.
        """
        return causal_conv1d_update(x, state, self.weight, self.bias, **self._options())

    def initial_state(self, batch_size):
        """A state of zeros (B, D, W - 1), on the device of the weight and of its dtype."""
        return self.weight.new_zeros(batch_size, self.dim, self.width - 1)

    def extra_repr(self):
        return (
            f"{self.dim}, {self.width}, bias={self.bias is not None},"
            f" activation={self.activation!r}, layout={self.layout!r}"
        )

    def _options(self):
        return {"activation": self.activation, "layout": self.layout}


# ---- the layer and torch.nn.Conv1d


def _check_count(name, value, most):
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(checks.sentence(name, "an integer", repr(value), "pass a whole number"))
    checks.within(name, value, value, 1, most)


def _take_weight_of_conv1d(layer, state_dict, prefix, *_):
    """Before a state_dict is loaded: a weight (D, 1, W) becomes (D, W)."""
    weight = state_dict.get(f"{prefix}weight")
    if weight is not None and weight.ndim == 3 and weight.shape[1] == 1:
        state_dict[f"{prefix}weight"] = weight.squeeze(1)


def _check_conv1d(conv):
    """Refuse what is not a depthwise torch.nn.Conv1d without stride and dilation."""
    if not isinstance(conv, torch.nn.Conv1d):
        raise TypeError(
            checks.sentence("conv", "a torch.nn.Conv1d", type(conv).__name__, "pass such a layer")
        )
    for attribute, expected in {
        "out_channels": conv.in_channels,
        "groups": conv.in_channels,
        "stride": (1,),
        "dilation": (1,),
        "padding_mode": "zeros",
    }.items():
        if getattr(conv, attribute) != expected:
            raise ValueError(
                checks.sentence(
                    "conv",
                    f"{attribute} = {expected!r}",
                    repr(getattr(conv, attribute)),
                    "a causal depthwise convolution has groups = in_channels = out_channels,"
                    " stride 1, dilation 1 and zeros as padding",
                )
            )
