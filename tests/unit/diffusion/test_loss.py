import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from didicm.diffusion import LogLinear, UniformProcess, marginal_score_entropy, score_entropy
from didicm.diffusion.loss import sample_time
from didicm.diffusion.process import log_marginal
from tests.oracle import matrices
from tests.oracle.posteriors import distributions, log_score

times = st.floats(1e-5, 1)


def tensor(x):
    return torch.as_tensor(x, dtype=torch.float64)


@given(p=distributions(count=2), t=times, label=st.integers(0, 1))
def test_score_entropy_is_the_literal_algorithm_1(p, t, label):
    target, guess = p
    process = UniformProcess(len(target))
    q, rate = process.marginal(target, tensor(t)), process.schedule.at(t).rate
    column = log_score(process, guess, label, t)
    loss = score_entropy(column[None], torch.tensor([label]), target[None], tensor([t]), process)
    # The literal form subtracts numbers of the size of the ratios, so it can only judge to that precision.
    precision = 1e-12 * rate * (q.max() / q.min()).item()
    assert torch.allclose(loss[0], matrices.score_entropy(column, q, label, rate), rtol=1e-8, atol=precision)


@given(p=distributions(count=2), t=times)
def test_marginal_form_is_the_sum_over_all_labels(p, t):
    target, guess = p
    process = UniformProcess(len(target))
    q, rate = process.marginal(target, tensor(t)), process.schedule.at(t).rate
    log_q_hat = process.marginal(guess, tensor(t)).log()
    loss = marginal_score_entropy(log_q_hat[None], target[None], tensor([t]), process)
    precision = 1e-10 * rate * (q.max() / q.min()).item()
    assert torch.allclose(loss[0], matrices.expected_score_entropy(log_q_hat, q, rate), rtol=1e-7, atol=precision)


@given(p=distributions(), t=times, label=st.integers(0, 1), noise=st.floats(-5, 5))
def test_losses_are_zero_at_the_truth_and_positive_elsewhere(p, t, label, noise):
    process, t, label = UniformProcess(p.shape[1]), tensor([t]), torch.tensor([label])
    log_q = process.marginal(p, t).log()
    truth = log_q - log_q.gather(-1, label[:, None])
    assert score_entropy(truth, label, p, t, process).item() == 0
    assert marginal_score_entropy(log_q, p, t, process).abs().item() < 1e-12
    other = 1 - label
    off = truth.scatter_add(-1, other[:, None], tensor([[noise]]))
    loss = score_entropy(off, label, p, t, process).item()
    assert loss >= 0
    assert loss > 0 or abs(noise) < 1e-6


def test_permuting_the_classes_changes_no_loss():
    process, t, order = UniformProcess(6), tensor([0.3]), torch.tensor([4, 2, 0, 5, 1, 3])
    torch.manual_seed(0)
    target, log_q = torch.rand(1, 6).double().softmax(-1), torch.randn(1, 6).double().log_softmax(-1)
    label = torch.tensor([2])
    moved = (order == label).nonzero()[0]
    column = log_q - log_q[:, label]
    assert torch.allclose(
        score_entropy(column, label, target, t, process),
        score_entropy(column[:, order], moved, target[:, order], t, process),
    )
    assert torch.allclose(
        marginal_score_entropy(log_q, target, t, process),
        marginal_score_entropy(log_q[:, order], target[:, order], t, process),
    )


@pytest.mark.parametrize("K", [2, 10, 1000, 21_841])
@pytest.mark.parametrize("t", [1e-5, 1e-3, 0.5, 1.0])
def test_float32_is_finite_and_right_to_four_digits(K, t):
    process = UniformProcess(K, LogLinear(1e-5))
    torch.manual_seed(0)
    label, noisy = torch.arange(2), torch.tensor([0, 0])  # one clean label, one noised
    guess = torch.randn(2, K)
    guess[:, 0] = 0
    t = torch.tensor([t, t])
    loss = score_entropy(guess, noisy, label, t, process)
    marginal = marginal_score_entropy(guess.log_softmax(-1), label, t, process)
    with_double = process.distribution(label).double(), t.double(), process
    assert torch.allclose(loss.double(), score_entropy(guess.double(), noisy, *with_double), rtol=1e-4)
    assert torch.allclose(
        marginal.double(), marginal_score_entropy(guess.double().log_softmax(-1), *with_double), rtol=1e-4
    )


def test_tiny_errors_are_seen_in_float32():
    """e^d - 1 - d is d^2 / 2: written literally, float32 would round it to zero or below."""
    process, t = UniformProcess(10), torch.tensor([0.5])
    log_q = process.marginal(torch.tensor([3]), t).log()
    truth = log_q - log_q[:, :1]
    off = truth.clone()
    off[0, 3] += 1e-3
    loss = score_entropy(off, torch.tensor([0]), torch.tensor([3]), t, process)
    expected = process.schedule.rate(t) / 10 * truth[0, 3].exp() * 5e-7
    assert torch.allclose(loss, expected, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_inside_autocast_are_lossed_in_float32(dtype):
    process, t = UniformProcess(1000), torch.tensor([1e-5, 1.0])
    torch.manual_seed(0)
    scores = torch.randn(2, 1000).to(dtype)
    scores[:, 7] = 0
    label, target = torch.tensor([7, 7]), torch.tensor([7, 8])
    with torch.autocast("cpu", torch.bfloat16):
        inside = score_entropy(scores, label, target, t, process)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, score_entropy(scores.float(), label, target, t, process))


def unlimited(log_score, label, target, t, process):
    """The loss without a limit, as it is for log-scores that training meets."""
    log_q = process.marginal(target, t).log()
    log_s = log_q - log_q.gather(-1, label[:, None])
    d = log_score - log_s
    series = torch.ones_like(d)
    for k in range(8, 2, -1):
        series = 1 + d / k * series
    excess = torch.where(d.abs() < 0.1, d * d / 2 * series, torch.expm1(d) - d)
    return process.schedule.rate(t) / process.num_classes * (log_s.exp() * excess).sum(-1)


def column_of(log_score, label):
    return log_score.scatter(-1, label[:, None], 0.0).requires_grad_()


@pytest.mark.parametrize("K", [2, 10, 1000])
@pytest.mark.parametrize("size", [0.05, 3.0, 19.9])
def test_the_limit_changes_no_bit_of_log_scores_below_20(K, size):
    process, generator = UniformProcess(K, LogLinear(1e-4)), torch.Generator().manual_seed(K)
    t, label = torch.tensor([1e-5, 1e-3, 0.1, 0.5, 0.9, 1.0]), torch.randint(K, (6,), generator=generator)
    target = torch.rand(6, K, generator=generator).pow(8).div(0.01).softmax(-1)
    guess = size * (2 * torch.rand(6, K, generator=generator) - 1)
    answers = []
    for loss in (score_entropy, unlimited):
        column = column_of(guess, label)
        losses = loss(column, label, target, t, process)
        answers.append((losses, *torch.autograd.grad(losses.sum(), column)))
    assert all(torch.equal(*pair) for pair in zip(*answers, strict=True))


@pytest.mark.parametrize("K", [2, 10, 1000, 21_841])
@pytest.mark.parametrize("size", [1e2, 1e4, 1e6, 1e30, 3e38])
@pytest.mark.parametrize("autocast", [False, True])
def test_no_finite_log_score_gives_a_loss_or_gradient_without_end(K, size, autocast):
    process, label = UniformProcess(K, LogLinear(1e-5)), torch.arange(6) % 2
    t, target = torch.tensor([1e-5, 1e-3, 0.1, 0.5, 0.9, 1.0]), torch.ones(6, dtype=torch.long)
    for sign in (torch.ones(K), -torch.ones(K), torch.linspace(-1, 1, K)):
        column = column_of((size * sign).expand(6, K), label)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            scores = column.bfloat16() if autocast else column
            losses = score_entropy(scores, label, target, t, process)
        (gradient,) = torch.autograd.grad(losses.sum(), column)
        assert losses.isfinite().all()
        assert gradient.isfinite().all()
        assert gradient.square().sum().isfinite()  # Adam's second moment
        if size > 1e20:
            continue  # so far away there is nothing to pull
        far = torch.ones_like(column).scatter(-1, label[:, None], 0).bool() & (column.detach() > 30)
        assert (gradient[far] > 0).all()  # they are pulled back, not left alone


@given(p=distributions(), t=times, x=st.floats(20, 200))
def test_beyond_the_limit_the_loss_is_its_tangent(p, t, x):
    process, label = UniformProcess(p.shape[1]), torch.tensor([0])
    q, rate = process.marginal(p, tensor([t])), process.schedule.at(t).rate
    s = (q / q[:, :1])[0, 1]
    limit = max(20.0, s.log().item() + 5)
    column = torch.zeros_like(p)

    def literal(x):
        column[0, 1] = x
        return matrices.score_entropy(column[0], q[0], 0, rate)

    column[0, 1] = x
    loss = score_entropy(column.clone(), label, p, tensor([t]), process)[0]
    slope = rate / p.shape[1] * (torch.tensor(limit).double().exp() - s)
    expected = literal(min(x, limit)) + slope * max(0.0, x - limit)
    assert torch.allclose(loss, expected, rtol=1e-6)


TARGETS = {
    "hard": torch.tensor([0.0, 0, 1, 0]),
    "smoothed": 0.9 * torch.tensor([0.0, 0, 1, 0]) + 0.1 / 4,
    "mixup": torch.tensor([0.7, 0, 0.3, 0]),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_gradient_descent_on_a_free_table_finds_the_true_ratios(kind):
    """A table with one row per (time, label) is the freest network; its optimum must be q_t / q_t[j]."""
    process, target = UniformProcess(4), TARGETS[kind].double()
    t = tensor([0.2, 0.2, 0.2, 0.2, 0.9, 0.9, 0.9, 0.9])
    label = torch.arange(4).repeat(2)
    table = torch.zeros(8, 4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([table], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def own_label_is_zero():
        return table - table.gather(-1, label[:, None])

    def closure():
        optimizer.zero_grad()
        loss = score_entropy(own_label_is_zero(), label, target.expand(8, 4), t, process).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    q = process.marginal(target.expand(8, 4), t)
    assert torch.allclose(own_label_is_zero().exp(), q / q.gather(-1, label[:, None]), rtol=1e-3)


def test_the_best_answer_to_two_labels_of_one_image_is_their_posterior():
    """Hard labels drawn from a posterior teach that posterior: the marginal loss is a proper scoring rule."""
    process, truth = UniformProcess(3), tensor([0.6, 0.3, 0.1])
    t = tensor([0.1, 0.5, 0.9])[:, None].expand(3, 3)
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        log_q = log_marginal(logits.log_softmax(-1).expand(3, 3, 3), process.schedule.total(t))
        loss = (truth * marginal_score_entropy(log_q, torch.eye(3).double(), t, process)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert torch.allclose(logits.softmax(-1), truth, atol=1e-4)


def test_several_draws_share_one_target():
    process, target = UniformProcess(5), torch.tensor([1, 4])
    t = torch.rand(3, 2)
    log_q = torch.randn(3, 2, 5).log_softmax(-1)
    together = marginal_score_entropy(log_q, target, t, process)
    for i in range(3):
        assert torch.allclose(together[i], marginal_score_entropy(log_q[i], target, t[i], process))


@settings(max_examples=20)
@given(p=distributions(count=2))
def test_the_mean_loss_of_the_times_is_its_integral(p):
    """The loss summed over all labels, by the midpoint rule over the times and over others, with weights."""
    target, guess = p[0], 0.9 * p[1] + 0.1 / p.shape[1]  # a loss that a grid can resolve
    process = UniformProcess(len(target), LogLinear(0.01))
    u = (torch.arange(4_000, dtype=torch.float64) + 0.5) / 4_000

    def mean(t, weight=1):
        log_q = process.marginal(guess.expand(len(t), -1), t).log()
        losses = marginal_score_entropy(log_q, target.expand(len(t), -1), t, process)
        return (losses * weight).mean()

    reference = mean(sample_time(u**3), 3 * u**2)
    assert torch.allclose(mean(sample_time(u)), reference, rtol=5e-3, atol=1e-6)


def test_times_stay_within_bounds():
    t = sample_time(torch.tensor([0.0, 0.5, 1.0]))
    assert torch.allclose(t, torch.tensor([1e-5, 0.5, 1.0]), rtol=1e-4)


def test_a_process_that_masks_or_redraws_leads_from_cross_entropy_to_score_entropy():
    """Brute force on K + 1 states: if all redraws are masks it integrates to cross-entropy, if none, to ours."""
    torch.manual_seed(0)
    K, points = 4, 400
    target, guess = torch.randn(2, K, dtype=torch.float64).softmax(-1)
    process = UniformProcess(K, LogLinear(1e-3))

    def loss(mask, t):
        redraw = torch.cat([torch.full((K,), (1 - mask) / K), tensor([mask])]).double()
        noise, none = process.schedule.at(t), torch.zeros(1, dtype=torch.float64)
        states = torch.cat([target, none]), torch.cat([guess, none])
        return matrices.redrawn_loss(*states, redraw, noise.total, noise.rate)

    times = [(i + 0.5) / points for i in range(points)]
    integral = sum(loss(1.0, t) for t in times) / points
    divergence = (target * (target / guess).log()).sum()  # cross-entropy without the entropy of the target
    assert torch.allclose(integral, (1 - process.schedule.at(1.0).keep) * divergence, rtol=1e-6)
    for t in (0.1, 0.5, 0.9):
        log_q = process.marginal(guess[None], tensor([t])).log()
        assert torch.allclose(loss(0.0, t), marginal_score_entropy(log_q, target[None], tensor([t]), process)[0])
