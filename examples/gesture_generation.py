"""Gestures of our own: a recurrent generator that learns from soft-DTW alone, no discriminator.

    python examples/gesture_generation.py [--output gestures.png] [--steps 200]

Five people picked up a remote control, each in their own way and at their own pace; the generator
turns noise into such gestures. Its loss compares all that it generates for a person with all that
the person did by soft-DTW, whatever the lengths, and asks for three things: each generated gesture
is like a recorded one, each recorded gesture is like a generated one, and the generated ones differ
as much as the recorded. This is the idea of M. Maghoumi, E. M. Taranta and J. J. LaViola, "DeepNAG:
deep non-adversarial gesture generation", IUI 2021. Runs on the GPU where PyTorch finds one and on
the CPU otherwise, in a minute or two.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch

import cuseq.torch

GAMMA = 0.02  # in units of the squared difference: small is sharp, large is smooth
PEOPLE = 2, 5, 6, 7, 9  # whose gestures to learn, of ten
DECIMATION = 6  # samples averaged into one
GENERATED = 4  # gestures a person in each step
NOISE, HIDDEN = 4, 48  # numbers that a gesture is made of, and channels of the recurrent layers
RATE = 1e-2  # of Adam
RECORDING = Path(__file__).parent / "data/pickup_gestures.csv.gz"


def load(device):
    """Return gestures (2, people, 5, N, 1), in g with rest at 0, and lengths (2, people, 5).

    The first half is for training and the second is held out. Beyond its length a gesture is NaN.
    """
    rows = np.loadtxt(RECORDING, delimiter=",", dtype=np.float32)
    halves = [[half[half[:, 0] == who, 1:] for who in PEOPLE] for half in np.split(rows, 2)]
    samples = torch.tensor(np.array(halves), device=device)
    lengths = (~samples.isnan()).sum(dim=-1) // DECIMATION
    N = int(lengths.max())
    points = samples[..., : N * DECIMATION].unflatten(-1, (N, DECIMATION)).mean(dim=-1) - 1
    return points[..., None], lengths


class Generator(torch.nn.Module):
    """From noise (P, K, NOISE) and lengths (P, K) to K gestures a person, (P, K, N, 1)."""

    def __init__(self, N):
        super().__init__()
        self.N = N
        self.styles = torch.nn.Parameter(torch.randn(len(PEOPLE), 1, NOISE))
        self.recurrent = torch.nn.GRU(2 * NOISE + 2, HIDDEN, num_layers=2, batch_first=True)
        self.position = torch.nn.Linear(HIDDEN, 1)

    def forward(self, noise, lengths):
        ingredients = torch.cat([noise, self.styles.expand_as(noise)], dim=-1)
        progress = torch.arange(self.N, device=noise.device) / lengths[..., None]  # from 0 to 1
        pace = (lengths[..., None] / self.N).expand_as(progress)
        each_step = ingredients[..., None, :].expand(-1, -1, self.N, -1)
        x = torch.cat([each_step, torch.stack([progress, pace], dim=-1)], dim=-1)
        hidden, _ = self.recurrent(x.flatten(0, 1))
        return self.position(hidden).unflatten(0, noise.shape[:2])


def divergences(loss, x, lengths_x, y, lengths_y):
    """Return the divergence (P, K, L) of each of x (P, K, N, 1) from each of y (P, L, N, 1)."""
    shape = *lengths_x.shape, lengths_y.shape[1]
    pairs = loss(
        x[:, :, None].expand(*shape, -1, -1).flatten(0, 2),
        y[:, None].expand(*shape, -1, -1).flatten(0, 2),
        lengths_x=lengths_x[:, :, None].expand(shape).flatten(),
        lengths_y=lengths_y[:, None].expand(shape).flatten(),
    )
    # Less what each has with itself: else the longest would be nearest, having the most paths.
    own_x, own_y = (
        loss(z.flatten(0, 1), z.flatten(0, 1), n.flatten(), n.flatten()).reshape(n.shape)
        for z, n in ((x, lengths_x), (y, lengths_y))
    )
    return pairs.reshape(shape) - (own_x[:, :, None] + own_y[:, None]) / 2


def average_hausdorff(D):
    """Return how far apart two sets are: each member from the nearest of the other, on average.

    Given the divergences (P, K, L) of two sets a person, it is one number a person, (P,).
    """
    return D.min(dim=2).values.mean(dim=1) + D.min(dim=1).values.mean(dim=1)


def spread(D):
    """Return the mean divergence between two of a set, (P,), from all within the set (P, K, K)."""
    K = D.shape[1]
    return D.sum(dim=(1, 2)) / (K * (K - 1))


def assess(name, made, lengths, held_out, held_lengths):
    """Print how near gestures are to those held out, whose they seem, and how they differ."""
    P, K = lengths.shape
    D = cuseq.soft_dtw_divergence_cdist(
        made.flatten(0, 1),
        held_out.flatten(0, 1),
        gamma=GAMMA,
        lengths_a=lengths.flatten(),
        lengths_b=held_lengths.flatten(),
    ).reshape(P, K, P, -1)
    of_same = torch.stack([D[k, :, k].min(dim=1).values for k in range(P)])
    seems = D.min(dim=3).values.argmin(dim=2)  # whose gesture is the nearest
    right = (seems == torch.arange(P, device=made.device)[:, None]).float().mean()
    within = divergences(cuseq.torch.SoftDTWLoss(GAMMA, reduction="none"), *2 * (made, lengths))
    print(
        f"{name:9} to the nearest held out {of_same.mean():6.3f}, of the right person"
        f" {right:4.0%}, to each other {spread(within).mean():6.3f}"
    )


def draw(output, rows, history):
    """Save the picture: gestures of each person, recorded and generated, and the falling loss."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.2), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[2.6, 1])
    grid = above.subplots(len(rows), len(PEOPLE), sharex="col", sharey=True)
    for panels, (title, gestures, lengths, colour) in zip(grid, rows, strict=True):
        panels[0].set_ylabel(f"{title}\nacceleration, g")
        for axes, of_person, those in zip(panels, gestures, lengths, strict=True):
            for gesture, length in zip(of_person, those, strict=True):
                axes.plot(DECIMATION * np.arange(length), gesture[:length], color=colour, alpha=0.7)
            axes.spines[["top", "right"]].set_visible(False)
    for axes, who in zip(grid[0], PEOPLE, strict=True):
        axes.set_title(f"person {who}")
    for axes in grid[-1]:
        axes.set_xlabel("sample")
    axes = below.subplots()
    axes.plot(history, color="black", lw=1.5)
    axes.set(xlabel="step of training", ylabel="loss", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="gestures.png", help="where to save the picture")
    parser.add_argument("--steps", type=int, default=200, help="how many steps to train")
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    print(
        f"device: GPU ({torch.cuda.get_device_name()})"
        if on_gpu
        else "device: CPU (PyTorch finds no GPU)"
    )
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the layers are small: more threads would wait for each other
    (real, held_out), (lengths, held_lengths) = load(device)
    print(f"{lengths.numel()} gestures of {lengths.min()} to {lengths.max()} points to learn from")

    generator = Generator(real.shape[2]).to(device)
    optimizer = torch.optim.Adam(generator.parameters(), lr=RATE)
    loss = cuseq.torch.SoftDTWLoss(GAMMA, reduction="none")
    real_spread = spread(divergences(loss, real, lengths, real, lengths))

    shown_noise = torch.randn(*held_lengths.shape, NOISE).to(device)  # the same on any device
    with torch.no_grad():
        first = generator(shown_noise, held_lengths)
    history = []
    start = time.perf_counter()
    for _ in range(arguments.steps):
        noise = torch.randn(len(PEOPLE), GENERATED, NOISE).to(device)
        chosen = lengths[:, torch.randperm(lengths.shape[1])[:GENERATED]]
        fake = generator(noise, chosen)
        both, both_lengths = torch.cat([real, fake], dim=1), torch.cat([lengths, chosen], dim=1)
        D = divergences(loss, fake, chosen, both, both_lengths)
        to_real, to_fake = D.split([real.shape[1], GENERATED], dim=2)
        value = (average_hausdorff(to_real) + (spread(to_fake) - real_spread).abs()).mean()
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(generator.parameters(), 1.0)
        optimizer.step()
        history.append(value.detach())
    history = torch.stack(history).cpu().numpy()
    print(f"trained {len(history)} steps in {time.perf_counter() - start:.1f} s")
    for part in np.array_split(np.arange(len(history)), 5):
        print(f"steps {part[0]:3d} to {part[-1]:3d}: mean loss {history[part].mean():7.3f}")

    with torch.no_grad():
        last = generator(shown_noise, held_lengths)
    for name, gestures, those in (
        ("before:", first, held_lengths),
        ("after:", last, held_lengths),
        ("recorded:", real, lengths),
    ):
        assess(name, gestures, those, held_out, held_lengths)

    rows = [
        (title, x[..., 0].cpu().numpy(), n.tolist(), colour)
        for title, x, n, colour in (
            ("recorded", held_out, held_lengths, "#2166ac"),
            ("generated", last, held_lengths, "#d95f02"),
        )
    ]
    try:
        draw(arguments.output, rows, history)
    except ImportError:
        print("picture: skipped, matplotlib is not installed (pip install matplotlib)")
    else:
        print(f"picture: {arguments.output}")


if __name__ == "__main__":
    main()
