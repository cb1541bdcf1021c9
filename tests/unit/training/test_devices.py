"""What depends on the kind of device, decided in one place, and on the number of processes."""

from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from didicm import StandardClassifier, UserError, create_model
from didicm.classifier import Loss
from didicm.settings import RunConfig
from didicm.training.devices import (
    agree,
    gather_texts,
    image_layout,
    make_fabric,
    prepare_network,
    seed_device,
    share_statistics,
    tune,
    works_behind,
)


@pytest.mark.parametrize(("device", "behind"), [("cpu", False), ("cuda", True), ("mps", True)])
def test_only_a_cpu_has_no_queue(device, behind):
    assert works_behind(torch.device(device)) is behind


def test_seeding_reaches_the_host_and_the_device_of_the_run_only(monkeypatch):
    seeded = []
    for kind in (torch.cuda, torch.mps, torch.xpu):
        monkeypatch.setattr(kind, "manual_seed", lambda seed, kind=kind: seeded.append((kind, seed)))
        monkeypatch.setattr(
            kind, "manual_seed_all", lambda seed: pytest.fail("a device not in use"), raising=False
        )
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7))
    for device in ("cpu", "cuda:1", "mps"):
        seed_device(torch.device(device), 7)
        assert torch.equal(torch.rand(3), expected)
    assert seeded == [(torch.cuda, 7), (torch.mps, 7)]


def test_a_step_seeds_no_device_that_the_run_does_not_use(train, monkeypatch):
    """PyTorch's own seeding of all devices costs a CPU more than the rest of preparing a batch."""
    seeded, steps = [], []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    train(on_step=lambda done, total: steps.append(len(seeded)))
    assert len(steps) == 5
    assert len(set(steps)) == 1


@pytest.fixture
def cudnn():
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
    yield torch.backends.cudnn
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before
    torch.use_deterministic_algorithms(False)


def test_cudnn_times_its_convolutions_on_gpus_unless_results_must_not_depend_on_it(cudnn):
    tune(torch.device("cpu"))
    assert not cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    tune(torch.device("cuda"))
    torch.use_deterministic_algorithms(False)
    cudnn.deterministic = True
    tune(torch.device("cuda"))
    assert not cudnn.benchmark
    cudnn.deterministic = False
    tune(torch.device("cuda"))
    assert cudnn.benchmark


@pytest.mark.parametrize("method", ["diffusion", "standard"])
@pytest.mark.parametrize(("width", "last"), [(0.25, True), (0.125, False)])
def test_weights_and_batches_are_channels_last_where_that_is_safe(width, last, method, train, monkeypatch):
    seen, forward = [], torch.nn.Conv2d.forward

    def look(self, image):
        for x in (image, self.weight) if self.training else ():
            if x.shape[1] > 1 and x.shape[2] > 1:  # else all layouts are one
                seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return forward(self, image)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", look)
    train("run", method=method, model_args__width=width)
    assert len(seen) > 20
    assert set(seen) == {last}


@pytest.mark.parametrize(
    ("layer", "device", "last"),
    [
        (torch.nn.Conv2d(8, 16, 1, 2), "cpu", False),
        (torch.nn.Conv2d(16, 32, 1, 2), "cpu", True),
        (torch.nn.Conv2d(8, 16, 1, 1), "cpu", True),
        (torch.nn.Conv2d(8, 16, 3, 2), "cpu", True),
        (torch.nn.Conv2d(32, 32, 1, 2, groups=4), "cpu", False),
        (torch.nn.Conv2d(8, 16, 1, 2), "cuda", True),
    ],
)
def test_images_keep_their_channels_first_where_onednn_would_write_past_its_memory(layer, device, last):
    layout = image_layout(torch.nn.Sequential(layer), torch.device(device))
    assert layout == (torch.channels_last if last else torch.contiguous_format)


def _network():
    torch.manual_seed(0)
    return create_model("didirn8_baseline", num_classes=3, in_chans=1, width=0.125, stem="tiny")


def _batch():
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(12, 1, 8, 8, generator=generator) + torch.arange(12).view(-1, 1, 1, 1)
    return image, torch.rand(12, 3, generator=generator).softmax(-1)


def gradients_of(classifier):
    return {name: p.grad.clone() for name, p in classifier.model.named_parameters()}


def _step_in_two_processes(rank, address, results):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    fabric = SimpleNamespace(world_size=2, device=torch.device("cpu"))
    classifier = StandardClassifier(prepare_network(_network(), RunConfig(), fabric)).train()
    image, target = _batch()
    wrapped = DistributedDataParallel(Loss(classifier))
    wrapped(image[6 * rank :][:6], target[6 * rank :][:6]).backward()
    own = classifier.model.stem.bn.running_mean.clone()
    share_statistics(classifier.model, fabric)
    shared = classifier.model.stem.bn.running_mean.clone()
    texts = gather_texts(fabric, ["of both", "ü" * (1 + 3 * rank)])
    results[rank] = gradients_of(classifier), own, shared, agree(fabric, rank == 1, False), texts
    dist.destroy_process_group()


def test_each_process_has_its_own_batch_statistics_and_the_first_ones_are_kept(tmp_path, assert_same):
    with mp.Manager() as manager:
        results = manager.dict()
        arguments = f"file://{tmp_path}/rendezvous", results
        mp.start_processes(_step_in_two_processes, arguments, nprocs=2, start_method="fork")
        results = dict(results)
    image, target = _batch()
    halves = []
    for half in (slice(0, 6), slice(6, 12)):
        classifier = StandardClassifier(_network()).train()
        classifier.loss(image[half], target[half]).backward()
        halves.append((gradients_of(classifier), classifier.model.stem.bn.running_mean))
    expected = {name: (x + halves[1][0][name]) / 2 for name, x in halves[0][0].items()}
    for rank, (gradients, own, shared, votes, texts) in results.items():
        assert_same(gradients, expected, atol=1e-6)
        assert torch.allclose(own, halves[rank][1])
        assert torch.allclose(shared, halves[0][1])
        assert votes == [True, False]
        assert texts == ["of both", "ü", "üüüü"]
    assert not torch.allclose(halves[0][1], halves[1][1])


def test_batch_statistics_of_cpus_cannot_be_joined():
    with pytest.raises(UserError, match="sync_batch_norm needs GPUs"):
        make_fabric(RunConfig(accelerator="cpu", devices=2, sync_batch_norm=True))
    make_fabric(RunConfig(accelerator="cpu", devices=1, sync_batch_norm=True))


def test_batch_statistics_are_joined_by_option():
    fabric = SimpleNamespace(world_size=2, device=torch.device("cuda"))
    kinds = {}
    for joined in (False, True):
        network = prepare_network(_network(), RunConfig(sync_batch_norm=joined), fabric)
        kinds[joined] = {type(m) for m in network.modules() if isinstance(m, _BatchNorm)}
        assert network.layer2[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)
        assert network.state_dict().keys() == _network().state_dict().keys()
    assert kinds == {False: {torch.nn.BatchNorm2d}, True: {torch.nn.SyncBatchNorm}}
