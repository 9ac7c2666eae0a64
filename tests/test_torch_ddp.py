"""Training by torch's DistributedDataParallel: two processes are as good as one."""

from datetime import timedelta

import pytest

from tests.samples import normal

torch = pytest.importorskip("torch")
adapter = pytest.importorskip("cuseq.torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

PROCESSES, STEPS = 2, 4
BATCH, LENGTH, TARGET, DIM, OUT = 6, 12, 9, 5, 2


class Model(torch.nn.Module):
    """The short convolution, then a linear map of each position."""

    def __init__(self):
        super().__init__()
        self.conv = adapter.CausalConv1d(DIM, 4, layout="bld", dtype=torch.float64)
        self.linear = torch.nn.Linear(DIM, OUT, dtype=torch.float64)

    def forward(self, x):
        return self.linear(self.conv(x))


def first_model():
    torch.manual_seed(0)
    return Model()


def samples():
    """x (B, N, DIM), y (B, M, OUT) and the lengths of both."""
    x, y = normal(BATCH, LENGTH, DIM), normal(BATCH, TARGET, OUT, seed=1)
    lengths = [12, 5, 7, 12, 1, 9], [9, 9, 2, 4, 8, 1]
    return *map(torch.from_numpy, (x, y)), *map(torch.tensor, lengths)


def train(model, batch):
    """A few steps on a batch: the loss at each."""
    x, y, lengths_x, lengths_y = batch
    loss = adapter.SoftDTWLoss(gamma=0.5, normalize=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    values = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(model(x), y, lengths_x, lengths_y)
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values


def share_of(rank):
    size = BATCH // PROCESSES
    return [tensor[rank * size : (rank + 1) * size] for tensor in samples()]


def train_share(rank, folder):
    """What each process does: its share of the batch; the weights go to a file."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=(folder / "meeting").as_uri(),
        rank=rank,
        world_size=PROCESSES,
        timeout=timedelta(seconds=30),
    )
    torch.manual_seed(rank)
    model = first_model() if rank == 0 else Model()  # DDP hands out the weights of the first
    train(torch.nn.parallel.DistributedDataParallel(model), share_of(rank))
    torch.save(model.state_dict(), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_train_as_one(tmp_path):
    whole, half = first_model(), first_model()
    values = train(whole, samples())
    train(half, share_of(0))
    torch.multiprocessing.spawn(train_share, (tmp_path,), nprocs=PROCESSES)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(PROCESSES))
    assert values[-1] < values[0]
    for name, wanted in whole.state_dict().items():
        assert not torch.allclose(wanted, first_model().state_dict()[name], rtol=1e-3)
        assert not torch.allclose(wanted, half.state_dict()[name], rtol=1e-3)
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], wanted, rtol=1e-11, atol=1e-12)
