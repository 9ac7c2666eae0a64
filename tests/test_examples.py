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


def check_picture(pixels):
    """It has a size, and is neither nearly all white, without its curves, nor nearly all dark."""
    height, width, _ = pixels.shape
    assert height > 400 and width > 800
    drawn = (pixels[..., :3] < 0.9).any(axis=-1).mean()
    assert 0.02 < drawn < 0.5


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
    check_picture(image.imread(tmp_path / "drawn.png"))


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


def hard_dtw(A, B):
    """DTW (n, m) of all A (n, N) with all B (m, M), cell by cell, of all pairs at once."""
    n, m, N, M = len(A), len(B), A.shape[1], B.shape[1]
    above = [np.zeros((n, m))] + [np.full((n, m), np.inf)] * M
    for i in range(N):
        row = [np.full((n, m), np.inf)]
        for j in range(M):
            best = np.minimum(np.minimum(above[j], above[j + 1]), row[j])
            row.append((A[:, i, None] - B[:, j]) ** 2 + best)
        above = row
    return above[-1]


def gunpoint():
    rows = np.loadtxt(ROOT / "examples/data/gunpoint_all.csv.gz", delimiter=",")
    return rows[:50, 1:], rows[:50, 0], rows[50:, 1:], rows[50:, 0]


def test_the_gunpoint_file_has_the_published_errors():
    """The archive's figures, from plain NumPy: rounding the file has not moved a neighbour."""
    X, classes, T, true = gunpoint()
    euclidean = ((T[:, None] - X) ** 2).sum(axis=-1)
    assert round((classes[euclidean.argmin(axis=1)] != true).mean(), 4) == 0.0867
    assert round((classes[hard_dtw(T, X).argmin(axis=1)] != true).mean(), 4) == 0.0933


def check_neighbours(output, published):
    assert re.search(r"^device: (GPU|CPU) \(.+\)$", output, re.M)
    rows = re.findall(r"^(\S.*?) +(0\.\d{4}) +(0\.\d{4})? +(\d+\.\d{3})$", output, re.M)
    names = [name for name, *_ in rows]
    assert names[:3] == ["Euclidean", "DTW, learnt window", "DTW, no window"]
    assert len(names) == 4 and re.fullmatch(r"soft-DTW, gamma [\d.]+", names[3])
    assert [figure for _, _, figure, _ in rows] == published
    return [float(error) for _, error, _, _ in rows]


def test_nearest_neighbours_are_those_of_plain_numpy(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    output = run("nearest_neighbour.py", tmp_path, "--subset", "8", "--output", "drawn.png")
    errors = check_neighbours(output, [""] * 4)
    X, classes, T, true = (part[:8] for part in gunpoint())
    euclidean = ((T[:, None] - X) ** 2).sum(axis=-1)
    for k, D in (0, euclidean), (2, hard_dtw(T, X)):
        assert errors[k] == round((classes[D.argmin(axis=1)] != true).mean(), 4)
    left_out = re.search(r" by window: 0: (\d+), .+, None: (\d+)$", output, re.M).groups()
    euclidean = ((X[:, None] - X) ** 2).sum(axis=-1)
    for count, D in zip(left_out, (euclidean, hard_dtw(X, X)), strict=True):
        np.fill_diagonal(D, np.inf)
        assert int(count) == (classes[D.argmin(axis=1)] != classes).sum()
    check_picture(image.imread(tmp_path / "drawn.png"))


@pytest.mark.gpu
def test_all_nearest_neighbours_give_the_published_errors(tmp_path):
    errors = check_neighbours(
        run("nearest_neighbour.py", tmp_path), ["0.0867", "0.0867", "0.0933", ""]
    )
    assert errors == [0.0867, 0.0867, 0.0933, 0.02]


def test_gesture_generation_learns_from_people(tmp_path):
    pytest.importorskip("torch")
    image = pytest.importorskip("matplotlib.image")
    output = run("gesture_generation.py", tmp_path, "--steps", "20", "--output", "drawn.png")
    assert re.search(r"^device: (GPU|CPU) \(.+\)$", output, re.M)
    assert "25 gestures of 11 to 40 points" in output
    losses = [float(loss) for loss in re.findall(r"^steps .+: mean loss +(\S+)$", output, re.M)]
    assert len(losses) == 5 and 0 < losses[-1] < 0.8 * losses[0]
    found = re.findall(
        r"^(\w+): +to the nearest held out +(\S+), of the right person +(\d+)%"
        r", to each other +(\S+)$",
        output,
        re.M,
    )
    assert [name for name, *_ in found] == ["before", "after", "recorded"]
    before, after, recorded = ([float(number) for number in numbers] for _, *numbers in found)
    assert after[0] < 0.75 * before[0]
    assert before[2] < after[2] < 2 * recorded[2]
    # What is said of the recorded gestures does not depend on training.
    assert recorded == pytest.approx([0.341, 88, 0.688], abs=2e-3)
    check_picture(image.imread(tmp_path / "drawn.png"))


def test_clustering_finds_the_activities(tmp_path):
    pytest.importorskip("scipy")
    image = pytest.importorskip("matplotlib.image")
    output = run("clustering.py", tmp_path, "--subset", "4", "--output", "drawn.png")
    assert re.search(r"^device: (GPU|CPU) \(.+\)$", output, re.M)
    assert "12 recordings of 50 samples, 6 channels" in output
    starts = re.findall(r"^start \d: inertia (.+)$", output, re.M)
    inertias = [[float(value) for value in start.split(", ")] for start in starts]
    assert len(inertias) == 3
    for falling in inertias:
        assert len(falling) > 1 and falling == sorted(falling, reverse=True)
    best = re.search(r"^best inertia (\S+), ", output, re.M)[1]
    assert float(best) == min(falling[-1] for falling in inertias)
    clusters = re.findall(r"^cluster \d: (.+)$", output, re.M)
    assert sorted(clusters) == ["4 badminton", "4 running", "4 walking"]
    assert "adjusted Rand index 1.000" in output
    check_picture(image.imread(tmp_path / "drawn.png"))
