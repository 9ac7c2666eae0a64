"""A causal convolution over a signal that arrives bit by bit, equal to the whole at once.

    python examples/streaming_conv.py

Nine accelerometer channels of a person who sets off walking are smoothed in three ways: all at
once, in chunks that hand a state on, and sample by sample. Runs on the GPU where CuPy finds one.
"""

from pathlib import Path

import numpy as np

import cuseq

WIDTH = 8  # taps: an eighth of a second at 64 samples a second
CHUNK = 100  # samples that arrive together; the last chunk is shorter
TOLERANCE = 1e-5  # in g, on a signal of up to 5 g
RECORDING = Path(__file__).parent / "data/daphnet.csv"


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


def in_chunks(xp, x, weight, bias):
    """Return y (1, D, L) from chunks of x (1, D, L), and the last state (1, D, WIDTH - 1)."""
    parts, state = [], None  # without a state the signal starts from zeros
    for start in range(0, x.shape[2], CHUNK):
        chunk = x[:, :, start : start + CHUNK]
        y, state = cuseq.causal_conv1d_with_state(chunk, weight, bias, initial_state=state)
        parts.append(y)
    return xp.concatenate(parts, axis=2), state


def sample_by_sample(xp, x, weight, bias):
    """Return y (1, D, L) from one sample of x (1, D, L) at a time, and the state they updated."""
    y = xp.empty_like(x)
    state = xp.zeros((1, x.shape[1], WIDTH - 1), dtype=x.dtype)
    for t in range(x.shape[2]):
        y[:, :, t] = cuseq.causal_conv1d_update(x[:, :, t], state, weight, bias)
    return y, state


def main():
    xp, device = pick_device()
    print(f"device: {device}")

    recording = np.loadtxt(RECORDING, delimiter=",", skiprows=1, dtype=np.float32) / 1000  # g
    x = xp.asarray(recording.T[None])  # (1, D, L)
    _, D, L = x.shape
    window = xp.hanning(WIDTH + 2)[1:-1]
    weight = xp.tile(window / window.sum(), (D, 1)).astype(x.dtype)  # (D, WIDTH)
    bias = -x[0, :, :64].mean(axis=1)  # the first second, at rest, becomes zero
    print(f"signal: {D} channels, {L} samples; filter: {WIDTH} taps")

    whole, final_state = cuseq.causal_conv1d_with_state(x, weight, bias)
    for name, stream in ((f"chunks of {CHUNK}", in_chunks), ("sample by sample", sample_by_sample)):
        y, state = stream(xp, x, weight, bias)
        difference = float(xp.maximum(abs(y - whole).max(), abs(state - final_state).max()))
        print(f"{name}: max difference {difference:.1e}")
        if not difference <= TOLERANCE:  # in this form a NaN fails too
            raise SystemExit(f"{name}: differs from the whole by more than {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
