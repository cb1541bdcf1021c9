import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from didicm import UserError
from didicm.data import ArraySet, Corruptions, EvalTransform
from didicm.evaluation.metrics import evaluate_probs
from didicm.evaluation.run import Scratch, evaluate, stream

TRANSFORM = EvalTransform(8, 1, crop_pct=1.0)


class Counted(ArraySet):
    """Images that count how often they are decoded, some of them torn."""

    def __init__(self, images, torn=()):
        super().__init__(images.images, images.labels, images.class_names, channels=1)
        self.decoded, self.torn = [], torn

    def original(self, i):
        self.decoded.append(int(i))
        if i in self.torn:
            raise OSError("torn")
        return super().original(i)


@pytest.fixture(params=["diffusion", "standard"])
def classifier(request, make_checkpoint):
    return make_checkpoint(request.param).classifier


@pytest.fixture
def diffusion(make_checkpoint):
    return make_checkpoint("diffusion").classifier


def test_it_says_what_the_classifier_says(classifier, some_images):
    images, seen = some_images(), []
    result = evaluate(classifier, images, TRANSFORM, batch_size=8, progress=lambda *n: seen.append(n))
    expected = classifier(torch.stack([TRANSFORM(images.load(i)) for i in range(20)]))
    assert torch.allclose(result.probs[""], expected, atol=1e-5)
    assert result.probs[""].std(0).max() > 1e-4  # not all the same, by far more than the tolerance
    assert result.labels.tolist() == images.labels.tolist()
    assert result.image_names == [f"array[{i}]" for i in range(20)]
    assert result.nfe == {"": 1 if classifier.sampler is None else 8}
    assert result.images_per_second[""] > 0
    assert seen == [(8, 20), (16, 20), (20, 20)]


def test_an_early_stop_saves_calls_that_are_counted_per_image(diffusion, some_images):
    images, samplers = some_images(), {"": {}, "early": {"tolerance": 0.08}}
    whole = evaluate(diffusion, images, TRANSFORM, samplers, batch_size=20)
    image = torch.stack([TRANSFORM(images.load(i)) for i in range(20)])
    calls = diffusion.posterior(image, tolerance=0.08).calls
    assert whole.nfe[""] == 8
    assert whole.nfe["early"] == pytest.approx(calls.double().mean().item())
    assert 3 < whole.nfe["early"] < 8
    assert evaluate(diffusion, images, TRANSFORM, samplers, batch_size=3).nfe == pytest.approx(whole.nfe)


def test_several_samplers_see_the_same_images_which_are_decoded_once(diffusion, some_images):
    images = Counted(some_images())
    samplers = {"main": {}, "labels": {"method": "cl", "steps": 2, "chains": 5}, "one": {"method": "readout"}}
    together = evaluate(diffusion, images, TRANSFORM, samplers, keep=5)
    assert together.nfe == {"main": 8, "labels": 10, "one": 1}
    assert sorted(set(images.decoded)) == list(range(20))
    for name, settings in samplers.items():
        alone = evaluate(diffusion, some_images(), TRANSFORM, {"": settings})
        assert torch.equal(together.probs[name], alone.probs[""])
    assert len({probs.sum(0).tolist()[0] for probs in together.probs.values()}) == 3


def test_it_keeps_evenly_spaced_images_as_the_network_sees_them(diffusion, some_images):
    images = some_images()
    result = evaluate(diffusion, images, TRANSFORM, keep=4, batch_size=7)
    assert result.kept.tolist() == [0, 6, 12, 19]
    expected = torch.stack([TRANSFORM(images.load(i)) for i in (0, 6, 12, 19)])
    assert torch.equal(result.kept_images, expected)
    assert len(evaluate(diffusion, images, TRANSFORM, keep=100).kept) == 20
    torn = evaluate(diffusion, Counted(images, torn=(6, 7)), TRANSFORM, keep=4)
    assert torn.image_names[torn.kept[1]] == "array[12]"


@pytest.mark.parametrize("settings", [{}, {"method": "cl", "steps": 2, "chains": 3}, {"select": "sample"}])
def test_the_batch_size_changes_nothing(settings, diffusion, some_images):
    noise = Corruptions.parse("noise:3")
    whole, single = (
        evaluate(diffusion, some_images(9), TRANSFORM, {"": settings}, batch_size=n, corruption=noise)
        for n in (9, 2)
    )
    assert torch.allclose(whole.probs[""], single.probs[""], atol=1e-5)


def test_the_seed_decides_the_corruption(diffusion, some_images):
    noise = Corruptions.parse("noise:5")
    noisy = [
        evaluate(diffusion, some_images(), TRANSFORM, corruption=noise, seed=seed).probs[""] for seed in (0, 0, 1)
    ]
    assert torch.equal(noisy[0], noisy[1])
    assert not torch.equal(noisy[0], noisy[2])


def test_processes_share_the_images(diffusion, some_images):
    whole = evaluate(diffusion, some_images(), TRANSFORM)
    parts = [
        evaluate(diffusion, some_images(), TRANSFORM, rank=rank, world_size=2, batch_size=3) for rank in (0, 1)
    ]
    names = [name for part in parts for name in part.image_names]
    assert sorted(names) == sorted(whole.image_names)
    found = dict(zip(names, torch.cat([part.probs[""] for part in parts]), strict=True))
    joined = torch.stack([found[name] for name in whole.image_names])
    assert torch.allclose(joined, whole.probs[""], atol=1e-5)


SAMPLERS = {
    "main": {"steps": 2},
    "labels": {"method": "cl", "steps": 1, "chains": 3},
    "one": {"method": "readout"},
}


@pytest.mark.parametrize(("count", "torn"), [(19, ()), (19, (6, 7)), (2, ()), (1, ())])
def test_processes_of_a_machine_fill_the_same_files(diffusion, some_images, tmp_path, count, torn):
    """In threads here: two processes that only meet at the barrier."""
    images = some_images(count)
    whole = evaluate(diffusion, Counted(images, torn), TRANSFORM, SAMPLERS, keep=4)
    meet = threading.Barrier(2, timeout=1200)

    def share(rank):
        mine = Counted(images, torn)
        scratch = Scratch(tmp_path, meet.wait)
        found = evaluate(
            diffusion, mine, TRANSFORM, SAMPLERS, keep=4, scratch=scratch, batch_size=3, rank=rank, world_size=2
        )
        return found

    diffusion.eval()
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(share, (0, 1)))
    for part in parts:
        assert part.image_names == whole.image_names
        assert torch.equal(part.labels, whole.labels)
        assert part.nfe == whole.nfe == {"main": 2, "labels": 3, "one": 1}
        assert torch.equal(part.kept, whole.kept)
        assert torch.equal(part.kept_images, whole.kept_images)
        for name in SAMPLERS:
            assert torch.allclose(part.probs[name], whole.probs[name], atol=1e-5)
            assert evaluate_probs(part.probs[name], part.labels) == pytest.approx(
                evaluate_probs(whole.probs[name], whole.labels), abs=1e-5
            )


class Kept(TorchDispatchMode):
    """The most bytes of probabilities (any, 3) that lie in memory at once, files that are mapped left out."""

    def __init__(self):
        super().__init__()
        self.live = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        if (
            isinstance(result, torch.Tensor)
            and function is not torch.ops.aten.from_file.default
            and result.shape[-1:] == (3,)
            and result.untyped_storage()._cdata not in given
        ):
            storage = result.untyped_storage()
            self.live += storage.nbytes()
            self.most = max(self.most, self.live)
            weakref.finalize(storage, self.freed, storage.nbytes())
        return result

    def freed(self, size):
        self.live -= size


def test_with_files_no_posterior_of_the_whole_set_is_in_memory(diffusion, some_images, tmp_path):
    images, row = some_images(300), 3 * 4  # bytes; those of a batch and its chains make 240 rows
    with Kept() as in_memory:
        evaluate(diffusion, images, TRANSFORM, SAMPLERS, batch_size=10)
    with Kept() as in_files:
        evaluate(diffusion, images, TRANSFORM, SAMPLERS, batch_size=10, scratch=Scratch(tmp_path))
    assert in_memory.most > 3 * 300 * row
    assert in_files.most < 300 * row


def test_batches_stream_one_by_one(diffusion, some_images):
    images = Counted(some_images())
    batches = stream(diffusion, images, TRANSFORM, batch_size=6)
    image, batch = next(batches)
    assert image.shape == (6, 1, 8, 8)
    assert batch.index.tolist() == list(range(6))
    assert [len(rest.label) for _, rest in batches] == [6, 6, 2]


def test_unreadable_images_are_left_out_and_named(diffusion, some_images):
    images = some_images()
    result = evaluate(diffusion, Counted(images, torn=(1, 4)), TRANSFORM, batch_size=6)
    assert len(result.skipped) == 2
    assert "array[1] cannot be read as an image (torn)" in result.skipped[0]
    kept = [i for i in range(20) if i not in (1, 4)]
    assert result.image_names == [f"array[{i}]" for i in kept]
    assert result.labels.tolist() == [images.labels[i] for i in kept]
    for place, says in (([1, 4], "2 of 2 evaluation images cannot be read"), ([4], "no image can be read")):
        with pytest.raises(UserError, match=says):
            evaluate(diffusion, Counted(images, torn=(1, 4)).select(np.array(place)), TRANSFORM)
