"""The examples run as they are, in a process and a folder of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cuseq

ROOT = Path(__file__).resolve().parents[1]


def run(name, cwd, *arguments, path=(), **environment):
    """Run an example in the folder cwd, check that it succeeded and return what it printed."""
    # The cuseq that this process tests, installed or not, is the one that the example gets.
    search = [*path, Path(cuseq.__file__).parents[1]]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, search)), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_quickstart_output(output):
    assert re.search(r"^device: (GPU|CPU) \(.+\)$", output, re.M)
    assert re.search(r"^soft-DTW of 150 against 150 frames: -?\d+\.\d+ ", output, re.M)
    assert re.search(r"^time: first call [\d.]+ ms, then [\d.]+ ms", output, re.M)
    before, after = re.search(r"^objective fell from (\S+) to (\S+)$", output, re.M).groups()
    assert float(after) < float(before) - 1
    steps = [float(value) for value in re.findall(r"^step +\d+: +(\S+)$", output, re.M)]
    assert len(steps) == 7 and steps == sorted(steps, reverse=True)


def test_quickstart_draws_its_picture(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    check_quickstart_output(run("quickstart.py", tmp_path, "--output", "drawn.png"))
    assert [file.name for file in tmp_path.iterdir()] == ["drawn.png"]
    pixels = image.imread(tmp_path / "drawn.png")
    height, width, _ = pixels.shape
    assert height > 400 and width > 800
    # A picture without the heat map or the curves is nearly all white.
    drawn = (pixels[..., :3] < 0.9).any(axis=-1).mean()
    assert 0.02 < drawn < 0.5


def test_quickstart_on_a_bare_machine(tmp_path):
    """Neither matplotlib nor a GPU: the numbers still come, on the CPU, and no picture."""
    hidden, cwd = tmp_path / "hidden", tmp_path / "cwd"
    hidden.mkdir()
    cwd.mkdir()
    (hidden / "matplotlib.py").write_text("raise ImportError('hidden')\n")
    output = run("quickstart.py", cwd, path=[hidden], CUDA_VISIBLE_DEVICES="")
    check_quickstart_output(output)
    assert "device: CPU" in output
    assert "picture: skipped, matplotlib is not installed" in output
    assert not list(cwd.iterdir())


def test_streaming_conv_equals_the_whole(tmp_path):
    output = run("streaming_conv.py", tmp_path)
    assert re.search(r"^device: (GPU|CPU) \(.+\)$", output, re.M)
    assert "9 channels, 2048 samples" in output
    differences = re.findall(r"^(.+): max difference (\S+)$", output, re.M)
    assert [name for name, _ in differences] == ["chunks of 100", "sample by sample"]
    assert all(float(difference) <= 1e-5 for _, difference in differences)


def test_jax_training_learns_and_streams(tmp_path):
    pytest.importorskip("jax")
    output = run("jax_training.py", tmp_path)
    assert re.search(r"^device: (GPU|CPU) \(.+\)$", output, re.M)
    losses = [float(loss) for loss in re.findall(r"^step +\d+: loss +(\S+)$", output, re.M)]
    assert len(losses) == 5 and 0 < losses[-1] < losses[0] / 2
    found = re.search(r"^held out: .+ signal (\S+) before, (\S+) after$", output, re.M).groups()
    before, after = map(float, found)
    assert 0 < after < 0.75 * before
    samples, difference = re.search(
        r", (\d+) samples: max difference (\S+)$", output, re.M
    ).groups()
    assert int(samples) == 512
    assert float(difference) <= 1e-5


def test_cupy_pipeline_finds_the_nearest_windows(tmp_path):
    """Those that plain NumPy in float64 finds, on either device."""
    output = run("cupy_pipeline.py", tmp_path)
    device = re.search(r"^device: (GPU|CPU) \(.+\)$", output, re.M)[1]

    recording = np.loadtxt(ROOT / "examples/data/daphnet.csv", delimiter=",", skiprows=1)
    channels = ((recording - recording.mean(axis=0)) / recording.std(axis=0)).T
    taps = np.hanning(10)[1:-1] / np.hanning(10).sum()
    smooth = np.stack([np.convolve(channel, taps)[:2048] for channel in channels], axis=1)
    windows = np.stack([smooth[start : start + 64] for start in range(0, 2048 - 63, 16)])
    values = cuseq.soft_dtw(windows, windows[64:65], gamma=0.1)
    nearest = np.argsort(values)[:6]

    assert f"\n{len(windows)} windows; nearest to that at 16.00 s:\n" in output
    found = re.findall(r"^ *(\S+) s: soft-DTW +(\S+)$", output, re.M)
    assert [float(second) for second, _ in found] == [16 * k / 64 for k in nearest]
    assert [float(value) for _, value in found] == pytest.approx(values[nearest], abs=5e-3)

    graph = re.search(r"^graph: (.+)$", output, re.M)[1]
    if device == "CPU":
        assert graph == "skipped, no GPU"
    else:
        windows, difference = re.search(r"on (\d+) other windows, .+ (\S+)$", graph).groups()
        assert int(windows) == 61
        assert float(difference) <= 1e-3
