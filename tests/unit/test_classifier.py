import copy
from itertools import product

import pytest
import torch
from timm.loss import BinaryCrossEntropy
from timm.models.resnet import BasicBlock, ResNet
from torch import nn
from torch.nn import functional as F

from didicm import (
    DiffusionClassifier,
    Ensemble,
    Sampler,
    StandardClassifier,
    UniformProcess,
    UserError,
    create_model,
)
from didicm.classifier import Loss
from didicm.data import Augment, Mixer
from didicm.diffusion import Geometric, Posterior
from didicm.models import BackboneBaseline, cost

SMALL = {"num_classes": 5, "width": 0.125, "stem": "tiny"}


def diffusion(**settings):
    torch.manual_seed(0)
    model = create_model("didirn8", **SMALL, parameterization=settings.pop("parameterization", "score"))
    return DiffusionClassifier(model, **settings)


def backbone(**settings):
    torch.manual_seed(0)
    return DiffusionClassifier(create_model("backbone_score", backbone="test_resnet", num_classes=5), **settings)


def standard(objective="cross-entropy"):
    torch.manual_seed(0)
    return StandardClassifier(create_model("didirn8_baseline", **SMALL), objective)


ALL = {
    "score": diffusion,
    "posterior": lambda: diffusion(parameterization="posterior"),
    "draws": lambda: diffusion(draws_per_image=3, label_proposal=0.5),
    "masked": lambda: diffusion(mask=0.5, parameterization="posterior"),
    "backbone": lambda: backbone(draws_per_image=4),
    "cross-entropy": standard,
    "generalized-cross-entropy": lambda: standard("generalized-cross-entropy"),
    "binary-cross-entropy": lambda: standard("binary-cross-entropy"),
    "multi-label": lambda: standard("multi-label"),
    "marginal": lambda: standard("marginal"),
}
every = pytest.mark.parametrize("kind", ALL)


def batch(size=4, pixels=16):
    torch.manual_seed(1)
    return torch.randn(size, 3, pixels, pixels), F.one_hot(torch.arange(size) % 5, 5).float()


@every
def test_all_classifiers_share_one_interface(kind):
    classifier = ALL[kind]()
    image, target = batch()
    loss = classifier.loss(image, target)
    assert loss.shape == ()
    assert loss.item() >= 0
    loss.backward()
    assert classifier.model.fc.weight.grad.abs().sum() > 0
    classifier.eval()
    probs = classifier(image)
    assert probs.shape == (4, 5)
    assert torch.allclose(probs.sum(-1), torch.ones(4))
    assert not probs.requires_grad
    assert torch.equal(classifier.posterior(image).probs, probs)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *product(["score", "posterior", "masked", "backbone"], ["cp", "cl", "readout"]),
        *((kind, None) for kind in ("cross-entropy", "binary-cross-entropy", "multi-label", "marginal")),
    ],
)
def test_an_image_gets_the_same_posterior_alone_and_in_a_batch(kind, method):
    classifier = ALL[kind]().eval()
    if method:
        classifier.sampler = Sampler(method, steps=3, select="sample")
    image, _ = batch(6)
    together = classifier(image)
    alone = torch.cat([classifier(x[None]) for x in image])
    assert torch.allclose(together, alone, atol=1e-4)


@every
def test_training_lowers_the_loss(kind):
    classifier = ALL[kind]().train()
    image, target = batch(8, pixels=8)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=1e-2, fused=True)

    def held():
        """Of many draws for each image, in one batch: single ones take longer than the training."""
        torch.manual_seed(7)
        with torch.no_grad():
            return classifier.loss(image.repeat(20, 1, 1, 1), target.repeat(20, 1)).item()

    before = held()
    for _ in range(60 if isinstance(classifier, DiffusionClassifier) else 20):
        optimizer.zero_grad()
        classifier.loss(image, target).backward()
        torch.nn.utils.clip_grad_norm_(classifier.parameters(), 1.0)
        optimizer.step()
    assert held() < 0.7 * before


@every
def test_the_loss_works_under_autocast(kind):
    classifier, (image, target) = ALL[kind](), batch()
    torch.manual_seed(3)
    exact = classifier.loss(image, target)
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = classifier.loss(image, target)
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, exact, rtol=0.1)


@pytest.mark.slow
def test_the_marginal_loss_can_be_compiled():
    """That of a diffusion classifier is compiled in whole trainings, and so are networks."""
    torch._dynamo.reset()  # after other tests' batches it would take their number for a variable
    own = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 5))
    own.num_classes = 5
    classifier, (image, target) = StandardClassifier(own, "marginal"), batch()
    compiled = torch.compile(Loss(classifier), backend="aot_eager", fullgraph=True)
    torch.manual_seed(3)
    expected = classifier.loss(image, target)
    torch.manual_seed(3)
    loss = compiled(image, target)
    loss.backward()
    assert torch.allclose(loss, expected, rtol=1e-4)


def test_mixed_precision_wrappers_do_not_round_targets_and_random_numbers():
    """lightning-fabric hands bfloat16 to what it wraps; a time of 8 bits would ruin the loss."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    classifier, (image, target) = diffusion(), batch()
    seen = {}
    classifier.losses = lambda image, target, u: seen.update(target=target, u=u) or image.mean((1, 2, 3))
    u = torch.rand(4, 1, 4)
    fabric.setup(Loss(classifier))(image, Loss.bits(target), Loss.bits(u), None)
    assert torch.equal(seen["u"], u)
    assert torch.equal(seen["target"], target)


@torch.no_grad()
def repeated_losses(classifier, count):
    """The loss of one batch (count,), with noise drawn anew each time."""
    image, target = batch(pixels=8)
    torch.manual_seed(0)
    u = torch.rand(count * len(image), classifier.draws_per_image, classifier.numbers_per_draw)
    losses = classifier.eval().losses(image.repeat(count, 1, 1, 1), target.repeat(count, 1), u)
    return losses.view(count, -1).mean(1)


def test_several_draws_are_the_mean_of_single_ones():
    """Same expectation: over many repeats the averages agree within their errors, and several draws vary less."""
    single, several = repeated_losses(diffusion(), 800), repeated_losses(diffusion(draws_per_image=8), 100)
    error = (single.var() / 800 + several.var() / 100).sqrt()
    assert (single.mean() - several.mean()).abs() < 4 * error
    assert several.std() < single.std()


def test_importance_sampled_labels_leave_the_mean_and_lower_the_spread():
    paper, ours = repeated_losses(diffusion(), 1500), repeated_losses(diffusion(label_proposal=0.5), 1500)
    error = ((paper.var() + ours.var()) / 1500).sqrt()
    assert (paper.mean() - ours.mean()).abs() < 4 * error
    assert ours.std() < 0.7 * paper.std()


@pytest.mark.parametrize("make", [diffusion, backbone])
def test_masked_labels_lead_from_diffusion_to_cross_entropy(make):
    """Draw by draw: a share `mask` of the numbers are a standard classifier's, the others those of DiDiCM."""
    image, target = batch(pixels=16)
    target = 0.8 * target + 0.2 / 5
    u = torch.rand(4, 1, 4)
    u[:, 0, 0] = torch.tensor([0.0, 0.29, 0.3, 0.9])
    plain, mixed = make().eval(), make(mask=0.3).eval()
    only = make(mask=1.0, sampler=Sampler("readout")).eval()
    with torch.no_grad():
        logits = only.model.score(only.model.encode(image), torch.full((4,), -1), torch.ones(4))
        cross_entropy = F.cross_entropy(logits, target, reduction="none")
        assert torch.allclose(only.losses(image, target, u), cross_entropy, atol=1e-6)
        assert torch.allclose(only(image), logits.softmax(-1), atol=1e-6)
        rest = u.clone()
        rest[2:, 0, 0] = torch.tensor([0.0, (0.9 - 0.3) / 0.7])
        expected = torch.cat([cross_entropy[:2], plain.losses(image, target, rest)[2:]])
        assert torch.allclose(mixed.losses(image, target, u), expected, rtol=1e-3)
        assert torch.equal(make(mask=0.0).eval().losses(image, target, u), plain.losses(image, target, u))


@pytest.mark.parametrize("make", [diffusion, lambda **s: diffusion(parameterization="posterior", **s), backbone])
def test_one_call_of_a_network_with_masked_labels_asks_without_one(make):
    classifier, (image, _) = make(mask=0.5).eval(), batch()
    for name in ("project.weight", "condition.label.weight"):
        torch.nn.init.normal_(classifier.model.get_parameter(name))
    features, label = classifier.model.encode(image), torch.tensor([-1, 2, -1, 0])
    total = torch.tensor([0.1, 1.0, 5.0, 2.0])
    mixed = classifier.model.score(features, label, total)
    once = classifier.posterior(image, method="readout")
    assert once.nfe == 1
    assert torch.allclose(mixed.softmax(-1)[::2], once.probs[::2], atol=1e-6)  # no noise either
    assert not torch.allclose(mixed.softmax(-1)[1::2], once.probs[1::2], atol=1e-3)
    assert mixed[1, 2] == mixed[3, 0] == 0
    assert classifier.posterior(image).nfe == 8


@pytest.mark.parametrize("parameterization", ["score", "posterior"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_finite_network_has_an_infinite_loss(parameterization, dtype):
    classifier, (image, target) = diffusion(parameterization=parameterization), batch()
    marginal = standard("marginal")
    for each in (classifier, marginal):
        for sign in (1e4, -1e4):
            torch.nn.init.constant_(each.model.fc.bias, 0)
            with torch.no_grad():
                each.model.fc.bias[1] = sign
            each.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = each.loss(image, target)
            loss.backward()
            assert loss.isfinite()
            assert all(p.grad.isfinite().all() for p in each.parameters() if p.grad is not None)


def test_settings_of_one_call_do_not_stay():
    classifier, (image, _) = diffusion().eval(), batch()
    assert classifier.posterior(image).nfe == 8
    assert classifier.posterior(image, steps=2).nfe == 2
    assert classifier.posterior(image, method="cl", steps=2, chains=3).nfe == 6
    assert classifier.posterior(image, method="readout").nfe == 1
    assert classifier.sampler == Sampler()
    trajectory = []
    classifier.posterior(image, callback=trajectory.append)
    assert len(trajectory) == 8


def test_multi_label_is_timms_binary_cross_entropy_with_a_threshold():
    """As in ResNet strikes back: what shows in a mix is a full positive, and smoothing is gone."""
    classifier, label = standard("multi-label").eval(), torch.tensor([0, 3, 4, 1])
    mixer = Mixer(Augment(mixup=0.2, cutmix=1.0, label_smoothing=0.1), 5, seed=3)
    positives = set()
    for step in range(8):
        image, target = mixer(torch.randn(4, 3, 8, 8), label, step)
        expected = BinaryCrossEntropy(target_threshold=0.2)(classifier.model(image), target)
        assert torch.allclose(classifier.loss(image, target), expected)
        hard = F.binary_cross_entropy_with_logits(classifier.model(image), (target > 0.2).float())
        assert torch.allclose(expected, hard)
        positives |= set((target > 0.2).sum(-1).tolist())
    assert positives == {1, 2}


class Logits(torch.nn.Module):
    """A network whose answer is the input."""

    num_classes = 5

    def forward(self, image):
        return image


def test_generalized_cross_entropy_is_its_formula_for_hard_and_soft_targets():
    torch.manual_seed(0)
    logits, soft = 3 * torch.randn(6, 5), torch.rand(6, 5).softmax(-1)
    classifier, u = StandardClassifier(Logits(), "generalized-cross-entropy"), torch.empty(6, 1, 1)
    for target in (F.one_hot(torch.arange(6) % 5, 5).float(), soft):
        expected = []
        for row, weights in zip(logits.double().softmax(-1), target.double(), strict=True):
            expected.append(sum(w * (1 - p**0.7) / 0.7 for p, w in zip(row, weights, strict=True)))
        assert torch.allclose(classifier.losses(logits, target, u).double(), torch.stack(expected), atol=1e-6)


def test_generalized_cross_entropy_lies_between_cross_entropy_and_absolute_error(monkeypatch):
    torch.manual_seed(0)
    logits, target, u = 3 * torch.randn(6, 5), F.one_hot(torch.arange(6) % 5, 5).float(), torch.empty(6, 1, 1)
    classifier = StandardClassifier(Logits(), "generalized-cross-entropy")
    absolute = (logits.softmax(-1) - target).abs().sum(-1) / 2
    for exponent, limit in ((1e-4, F.cross_entropy(logits, target, reduction="none")), (1.0, absolute)):
        monkeypatch.setattr("didicm.classifier.GENERALIZED_EXPONENT", exponent)
        assert torch.allclose(classifier.losses(logits, target, u), limit, rtol=2e-3)


def test_generalized_cross_entropy_gives_up_a_label_that_is_out_of_reach():
    """Its gradient is that of cross-entropy times p^0.7: bounded loss, finite and vanishing gradient."""
    logits = torch.tensor([[0.0, 4.0, 0.0, 0.0, 0.0], [0.0, 300.0, 0.0, 0.0, 0.0]], requires_grad=True)
    target, u = F.one_hot(torch.zeros(2, dtype=torch.long), 5).float(), torch.empty(2, 1, 1)
    losses = StandardClassifier(Logits(), "generalized-cross-entropy").losses(logits, target, u)
    (generalized,) = torch.autograd.grad(losses.sum(), logits)
    (usual,) = torch.autograd.grad(F.cross_entropy(logits, target, reduction="sum"), logits)
    p = logits.softmax(-1)[:, :1]
    assert torch.allclose(generalized, usual * p**0.7, atol=1e-6)
    assert losses[1].item() == pytest.approx(1 / 0.7)


@pytest.mark.parametrize("objective", ["binary-cross-entropy", "multi-label"])
def test_binary_cross_entropy_reads_each_sigmoid_as_a_probability(objective):
    """At its optimum every sigmoid is P(class); their softmax would be another, sharper distribution."""

    class Fixed(torch.nn.Module):
        num_classes = 3

        def forward(self, image):
            return torch.logit(torch.tensor([[0.6, 0.3, 0.1]])).expand(len(image), 3)

    probs = StandardClassifier(Fixed(), objective)(torch.zeros(2, 1))
    assert torch.allclose(probs, torch.tensor([[0.6, 0.3, 0.1]]).expand(2, 3), atol=1e-6)


def test_the_marginal_objective_uses_the_process_it_is_given():
    model = create_model("didirn8_baseline", **SMALL)
    image, target = batch()
    losses = []
    for schedule in ({}, {"process": UniformProcess(5, Geometric())}):
        torch.manual_seed(0)
        losses.append(StandardClassifier(copy.deepcopy(model), "marginal", **schedule).loss(image, target))
    assert not torch.allclose(*losses)


def test_a_sampler_is_known_by_what_its_method_reads():
    assert Sampler(seed=3).identity() == {
        "method": "cp",
        "steps": 8,
        "solver": "exact",
        "score_time": "midpoint",
        "select": "argmin",
    }
    assert Sampler(solver="euler", floor=True).identity() != Sampler(solver="euler").identity()
    assert Sampler(floor=True).identity() == Sampler().identity()  # exact has no use for it
    assert Sampler("readout", time=0.3).identity() == {"method": "readout", "time": 0.3}
    assert Sampler("cl", chains=3).identity().keys() == {
        "method",
        "steps",
        "solver",
        "score_time",
        "chains",
        "average",
    }
    assert Sampler().changed(method="cl", chains=4, seed=1) == Sampler("cl", chains=4, seed=1)
    assert Sampler("readout").changed(seed=1).seed == 1  # a seed is anybody's


def test_an_ensemble_is_the_mean_of_its_members():
    members, (image, target) = [diffusion().eval(), backbone().eval(), diffusion().eval()], batch()
    torch.nn.init.normal_(members[2].model.fc.weight)
    ensemble = Ensemble(members).eval()
    expected = sum(member(image) for member in members) / 3
    assert torch.allclose(ensemble(image), expected, atol=1e-6)
    assert ensemble.posterior(image).nfe == 24
    assert ensemble.posterior(image, method="readout").nfe == 3
    assert ensemble.sampler == Sampler()
    assert ensemble.num_classes == 5
    price, each = cost(ensemble.model, 16), [cost(member.model, 16) for member in members]
    assert price.parameters == sum(x.parameters for x in each)
    assert abs(price.total(24) - sum(x.total(8) for x in each)) < 24  # calls are shared in whole multiply-adds
    assert sum(p.numel() for p in ensemble.parameters()) == price.parameters
    assert not Ensemble([standard(), standard()]).train().eval().members[0].model.training
    with pytest.raises(UserError, match="train its members"):
        ensemble.loss(image, target)
    with pytest.raises(UserError, match="no trajectory of its own"):
        ensemble.posterior(image, callback=print)
    with pytest.raises(UserError, match="leave out steps"):
        Ensemble([diffusion(), standard()]).posterior(image, steps=2)


def test_an_ensemble_of_members_without_features_has_none():
    class Uniform(StandardClassifier):
        def posterior(self, image, callback=None, **settings):
            return Posterior(torch.full((len(image), self.num_classes), 1 / self.num_classes), nfe=1)

    member = Uniform(standard().model)
    assert Ensemble([member, member]).posterior(batch()[0]).features is None


def test_members_that_sample_differently_have_no_common_sampler():
    ensemble, (image, _) = Ensemble([diffusion().eval(), standard().eval()]), batch()
    assert ensemble.sampler is None
    assert ensemble.posterior(image).nfe == 9
    assert Ensemble([ensemble, standard()]).posterior(image).nfe == 10


class OwnScore(torch.nn.Module):
    """The least that a score network of one's own has to be."""

    num_classes = 5

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3 * 16 * 16 + 1, 5)

    def encode(self, image):
        return image.flatten(1)

    def score(self, features, label, total):
        outputs = self.fc(torch.cat([features, total.unsqueeze(-1)], -1))
        return outputs - outputs.gather(-1, label.unsqueeze(-1))


def test_networks_of_ones_own_are_welcome():
    image, target = batch()
    own = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 5))
    own.num_classes = 5
    for classifier in (DiffusionClassifier(OwnScore(), draws_per_image=2), StandardClassifier(own, "marginal")):
        classifier.loss(image, target).backward()
        assert torch.allclose(classifier(image).sum(-1), torch.ones(4))
    with pytest.raises(UserError, match="Linear does not answer encode and score"):
        DiffusionClassifier(torch.nn.Linear(3, 5))
    with pytest.raises(UserError, match="Linear does not say how many classes it has: set its num_classes"):
        StandardClassifier(torch.nn.Linear(3, 5))
    own.num_classes = 6
    with pytest.raises(ValueError, match=r"logits of shape \(4, 5\) for 4 images and 6 classes"):
        StandardClassifier(own)(image)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: standard("hinge"), "objective must be one of"),
        (
            lambda: DiffusionClassifier(create_model("didirn8", **SMALL), UniformProcess(6)),
            "5 classes, the process 6",
        ),
        (lambda: diffusion(draws_per_image=0), "draws_per_image must be at least 1"),
        (lambda: diffusion(label_proposal=1.0), "label_proposal must lie in"),
        (lambda: diffusion(mask=1.5), r"mask must be .*1\.5"),
        (lambda: diffusion(mask=1), "with mask 1 .* set sampler readout"),
        (lambda: DiffusionClassifier(OwnScore(), mask=0.5), "OwnScore cannot answer: leave it out"),
        (lambda: Ensemble([]), "needs members"),
        (lambda: Ensemble([diffusion(), DiffusionClassifier(create_model("didirn8"))]), "same ones"),
        (lambda: Sampler("ddim"), "method must be one of cp, cl, readout"),
        (lambda: Sampler(solver="heun"), "solver must be one of exact, euler, official"),
        (lambda: Sampler(score_time="end"), "score_time must be one of start, midpoint"),
        (lambda: Sampler(select="best"), "select must be one of argmin, argmax, sample"),
        (lambda: Sampler(average="mean"), "average must be one of probs, one-hot"),
        (lambda: Sampler(steps=0), "steps must be at least 1, got 0"),
        (lambda: Sampler(chains=2.0), "chains must be a whole number, got 2.0"),
        (lambda: Sampler(seed="1"), "seed must be a whole number, got '1'"),
        (lambda: Sampler(time=0), r"time must be in \(0, 1\], got 0"),
        (lambda: Sampler().changed(chains=3), "sampler cp has no chains: leave it out or choose sampler cl"),
        (lambda: Sampler("cl").changed(select="sample"), "sampler cl has no select: .* choose sampler cp"),
        (lambda: Sampler().changed(method="readout", steps=3), "sampler readout has no steps: .* cp or cl"),
        (lambda: Sampler().changed(step=3), "a sampler has no setting 'step': did you mean steps"),
        (lambda: Sampler().changed(method="ddim", steps=3), "method must be one of"),
        (lambda: diffusion().posterior(batch()[0], chains=2), "sampler cp has no chains"),
        (lambda: standard().posterior(batch()[0], method="cl"), "leave out sampler"),
        (lambda: standard().posterior(batch()[0], steps=4), "has no sampler to set: leave out steps"),
        (
            lambda: StandardClassifier(create_model("didirn8_baseline", **SMALL), process=UniformProcess(5)),
            "for objective 'marginal'",
        ),
    ],
)
def test_bad_settings_are_named(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_stored_features_give_the_answer_and_the_features_of_their_images():
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(48, 6))
    backbone.num_features = 6
    classifier = StandardClassifier(BackboneBaseline(backbone=backbone, num_classes=4)).eval()
    image = torch.rand(3, 3, 4, 4)
    with torch.no_grad():
        stored = classifier.model.embed(image)
        whole, later = classifier.posterior(image), classifier.posterior(stored)
    assert torch.equal(whole.probs, later.probs)
    assert torch.equal(whole.features, later.features)
    assert later.features.shape == (3, 6)


@every
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"target": torch.arange(5)}, r"targets must be distributions of shape \(5, 5\), got torch.int64"),
        ({"target": torch.eye(5, dtype=torch.int64)}, r"make them by one_hot\(labels, 5\).float\(\)"),
        ({"weight": torch.ones(5, 1)}, r"weight must be one number per image, \(5,\), got \(5, 1\)"),
    ],
    ids=["labels", "whole numbers", "column of weights"],
)
def test_what_would_be_broadcast_to_a_wrong_loss_is_refused(kind, change, says):
    classifier = ALL[kind]()
    image, target = batch(5)
    with pytest.raises(UserError, match=says):
        classifier.loss(image, **{"target": target, **change})


@every
@pytest.mark.filterwarnings("ignore:std")
def test_no_images_have_no_answers(kind):
    classifier = ALL[kind]().eval()
    image, target = batch()
    assert classifier(image[:0]).shape == (0, 5)
    u = classifier.random_numbers(0)
    assert classifier.losses(image[:0], target[:0], u).shape == (0,)


def test_a_standard_classifier_answers_as_its_network_does():
    class Scaled(ResNet):
        def forward(self, image):
            return 3 * super().forward(image)

    image, _ = batch(pixels=32)
    torch.manual_seed(0)
    network = Scaled(BasicBlock, [1, 1, 1, 1], num_classes=5).eval()
    plain = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5).eval()
    hooked = copy.deepcopy(plain)
    hooked.register_forward_pre_hook(lambda _, given: (given[0] - 1,))
    with torch.no_grad():
        for model in (network, plain, hooked):
            probs = StandardClassifier(model).posterior(image).probs
            assert torch.allclose(probs, model(image).softmax(-1), atol=1e-6)
    assert StandardClassifier(plain).posterior(image).features.shape == (4, 512)  # before the head
