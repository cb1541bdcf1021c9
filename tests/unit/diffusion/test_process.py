from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from didicm.diffusion import Exponential, Geometric, LogLinear, LogRatio, UniformProcess
from didicm.diffusion.process import log_marginal
from tests.oracle import matrices
from tests.oracle.posteriors import all_kinds, distributions, log_score, sigma, sigma_bar

DOUBLE = torch.float64
inside = st.floats(1e-3, 1)


def tensor(x):
    return torch.as_tensor(x, dtype=DOUBLE)


# Of a thousand classes once: their matrices take a second.
@pytest.mark.parametrize(("K", "t"), [*product([2, 3, 10, 100], [0.0, 1e-5, 0.3, 1.0]), (1000, 0.3)])
def test_marginal_is_the_matrix_exponential_and_the_eigendecomposition(K, t):
    process = UniformProcess(K)
    q0 = all_kinds(K)
    q = process.marginal(q0, tensor(t))
    for reference in (matrices.forward_by_exponential, matrices.forward_by_eigenvectors):
        assert (q - reference(q0.T, sigma_bar(process, t)).T).abs().max() < 1e-12


@pytest.mark.parametrize("schedule", [LogLinear(), Exponential(-1.0, 0.01, 6), Geometric(), LogRatio(6)], ids=str)
@given(t=inside)
def test_every_schedule_solves_the_forward_equation(schedule, t):
    process, q0 = UniformProcess(6, schedule), all_kinds(6)[3]
    h = 1e-6 * t
    slope = (process.marginal(q0, tensor(t + h)) - process.marginal(q0, tensor(t - h))) / (2 * h)
    R_t = sigma(process, t) * matrices.rate_matrix(6)
    assert torch.allclose(R_t @ process.marginal(q0, tensor(t)), slope, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("rate", "derivative", "after"),
    [(0.2, [-0.28, 0.14, 0.14], [0.772, 0.114, 0.114]), (2.5, [-3.5, 1.75, 1.75], [0.45, 0.275, 0.275])],
)
def test_worked_examples_of_the_papers_appendix(rate, derivative, after):
    """K = 3. After the step the paper prints (0.774, 0.113, 0.113) and (0.5, 0.25, 0.25), two slips:

    0.96 * 0.8 + 0.02 * 0.2 is 0.772, and 0.5 * 0.8 + 0.25 * 0.2 is 0.45.
    """
    q = tensor([0.8, 0.1, 0.1])
    R = rate * matrices.rate_matrix(3)
    assert torch.allclose(R @ q, tensor(derivative))
    assert torch.allclose((torch.eye(3, dtype=DOUBLE) + 0.1 * R) @ q, tensor(after))
    # The same numbers from our code: a constant score makes the reverse rate the forward one.
    process, t = UniformProcess(3), 0.5
    dt = 0.1 * rate / sigma(process, t)
    step = process.euler_step(q, torch.zeros(3, dtype=DOUBLE), process.schedule.at(t), dt)
    assert torch.allclose(step, tensor(after))


@given(p=distributions(), t=inside)
def test_a_time_per_image_and_one_for_all_give_the_same_noise(p, t):
    process = UniformProcess(p.shape[1])
    assert torch.allclose(
        process.marginal(p, tensor([t])), process.add_noise(p, process.schedule.at(t)), atol=1e-12
    )


def test_hard_and_soft_targets_have_one_marginal():
    process, label, t = UniformProcess(5), torch.tensor([3, 0, 4]), torch.tensor([0.1, 0.5, 1.0])
    assert torch.equal(process.marginal(label, t), process.marginal(torch.eye(5)[label], t))


def test_log_marginal_is_the_log_of_the_marginal_and_survives_underflow():
    process, t = UniformProcess(10), torch.tensor([1e-5, 0.5, 1.0])
    logits = torch.tensor([0.0, -300.0] + 8 * [-1.0]).expand(3, 10)
    log_q = log_marginal(logits.log_softmax(-1), process.schedule.total(t))
    assert torch.allclose(log_q.exp(), process.marginal(logits.softmax(-1), t), rtol=1e-5)
    assert log_q.isfinite().all()


@pytest.mark.parametrize("hard", [True, False])
def test_noisy_labels_follow_the_marginal(hard):
    from scipy.stats import chisquare

    process, t, n = UniformProcess(6), torch.tensor(0.4), 60_000
    target = torch.tensor(2) if hard else torch.tensor([0.5, 0, 0.2, 0.3, 0, 0])
    torch.manual_seed(0)
    label = process.sample_label(target.expand(n, *target.shape), t.expand(n), torch.rand(n, 3))
    expected = process.marginal(target, t).double()
    assert chisquare(label.bincount(minlength=6), n * expected / expected.sum()).pvalue > 1e-3


@given(p=distributions(), t=inside, least=st.floats(0, 0.99))
def test_labels_drawn_more_freely_are_weighted_back_to_the_marginal(p, t, least):
    p, t = p[0], tensor(t)
    process = UniformProcess(len(p))
    label_proposal = process.schedule.lost(t).clamp_min(least)
    drawn = (1 - label_proposal) * p + label_proposal / len(p)  # chance of each label
    weight = process.label_weight(p.expand(len(p), -1), torch.arange(len(p)), t, label_proposal)
    assert torch.allclose(drawn * weight, process.marginal(p, t), atol=1e-12)
    assert weight.max() <= 1 / (1 - least) + 1e-9  # no rare label weighs much


@given(p=distributions(count=2), t=inside, dt=st.floats(1e-4, 0.5), label=st.integers(0, 1))
def test_euler_step_is_the_literal_algorithm_2(p, t, dt, label):
    state, clean = p
    process = UniformProcess(len(state))
    column = log_score(process, clean, label, t)
    reference = matrices.cp_step(state, column.exp(), sigma(process, t), dt)
    scale = reference.abs().max().clamp_min(1)
    step = process.euler_step(state, column, process.schedule.at(t), dt)
    assert (step - reference).abs().max() < 1e-12 * scale


@pytest.mark.parametrize("K", [100, 1000])
def test_euler_step_is_the_literal_algorithm_2_for_many_classes(K):
    process, t, dt = UniformProcess(K), 0.7, 0.125
    for clean, state in zip(all_kinds(K), all_kinds(K).roll(1, 0), strict=True):
        column = log_score(process, clean, 1, t)
        reference = matrices.cp_step(state, column.exp(), sigma(process, t), dt)
        step = process.euler_step(state, column, process.schedule.at(t), dt)
        assert (step - reference).abs().max() < 1e-12


@given(p=distributions(count=2), t=inside, share=st.floats(0, 0.99))
def test_exact_step_is_bayes_rule_with_matrices(p, t, share):
    state, clean = p
    process, s = UniformProcess(len(state)), share * t
    kernel = matrices.reverse_kernel(clean, sigma_bar(process, t), sigma_bar(process, s))
    at_t, at_s = process.schedule.at(t), process.schedule.at(s)
    step = process.exact_step(state, clean, at_t, at_s)
    assert (step - kernel @ state).abs().max() < 1e-9
    for label in range(len(state)):
        chances = process.exact_label_step(torch.tensor(label), clean, at_t, at_s)
        assert (chances - kernel[:, label]).abs().max() < 1e-9


@given(p=distributions(), t=inside, dt=st.floats(1e-4, 1), label=st.integers(0, 1))
def test_euler_label_step_is_the_literal_algorithm_3_where_that_is_proper(p, t, dt, label):
    process = UniformProcess(p.shape[1])
    column = log_score(process, p[0], label, t)
    chances = process.euler_label_step(torch.tensor(label), column, process.schedule.at(t), dt)
    reference = matrices.cl_step(label, column.exp(), sigma(process, t), dt)
    if reference.min() < 0:  # too long a step: no chance to stay, the jumps in proportion
        reference = reference.clamp_min(0) / reference.clamp_min(0).sum()
    assert (chances - reference).abs().max() < 1e-9


@given(p=distributions(count=3), t=inside, share=st.floats(0, 0.99), dt=st.floats(1e-4, 1))
def test_every_result_is_a_distribution(p, t, share, dt):
    clean, state, noise = p
    process, K = UniformProcess(p.shape[1]), p.shape[1]
    t, s = process.schedule.at(t), process.schedule.at(share * t)
    rough = (noise + 1e-6).log() * 3  # a score no process produced
    label = torch.tensor(K - 1)
    results = [
        process.marginal(clean, tensor(t.time)),
        process.add_noise(clean, t),
        process.noisy_posterior(rough, t),
        process.clean_posterior(rough, t),
        process.exact_step(state, clean, t, s),
        process.exact_label_step(label, clean, t, s),
        process.euler_label_step(label, rough - rough[label], t, dt),
    ]
    for result in results:
        assert torch.allclose(result.sum(), tensor(1.0), atol=1e-9)
        assert result.min() >= 0
    assert torch.allclose(process.euler_step(state, rough, t, dt, floor=True).sum(), tensor(1.0), atol=1e-6)


@given(p=distributions(count=2), t=inside, seed=st.integers(0, 9))
def test_permuting_the_classes_commutes_with_everything(p, t, seed):
    clean, state = p
    K = len(state)
    process, order = UniformProcess(K), torch.randperm(K, generator=torch.Generator().manual_seed(seed))
    column = log_score(process, clean, 0, t)
    t, s, dt = process.schedule.at(t), process.schedule.at(0.3 * t), 0.05
    label = torch.tensor(K - 1)
    moved = (order == label).nonzero()[0, 0]
    for result, permuted in [
        (process.add_noise(clean, t), process.add_noise(clean[order], t)),
        (process.clean_posterior(column, t), process.clean_posterior(column[order], t)),
        (process.euler_step(state, column, t, dt), process.euler_step(state[order], column[order], t, dt)),
        (process.exact_step(state, clean, t, s), process.exact_step(state[order], clean[order], t, s)),
        (process.exact_label_step(label, clean, t, s), process.exact_label_step(moved, clean[order], t, s)),
        (process.euler_label_step(label, column, t, dt), process.euler_label_step(moved, column[order], t, dt)),
    ]:
        assert torch.allclose(result[order], permuted, atol=1e-9)


@given(p=distributions(), t=inside)
def test_the_clean_posterior_undoes_the_noise(p, t):
    process = UniformProcess(p.shape[1])
    clean = process.clean_posterior(log_score(process, p, 0, t), process.schedule.at(t))
    assert torch.allclose(clean, p, atol=1e-9)


def test_a_score_without_signal_reads_as_uniform():
    """At t = 1 a flat score lies below no class's floor; nothing may divide zero by zero."""
    process = UniformProcess(4)
    flat = process.clean_posterior(torch.zeros(2, 4), process.schedule.at(1.0))
    assert torch.allclose(flat, torch.full((2, 4), 0.25), atol=1e-3)


@pytest.mark.parametrize("K", [10, 1000])
def test_a_score_that_errs_claims_no_certain_zero(K):
    """The cross-entropy to the truth stays near its entropy; flat zeros would cost tens of nats each."""
    process = UniformProcess(K)
    t = process.schedule.at(0.5)
    truth = all_kinds(K)[:2] * 0.98 + 0.02 / K
    torch.manual_seed(0)
    log_q = process.add_noise(truth, t).log().expand(200, *truth.shape)
    clean = process.clean_posterior(log_q + 0.05 * torch.randn(log_q.shape, dtype=DOUBLE), t)
    excess = (truth * (truth.log() - clean.log())).sum(-1).mean()
    assert excess < 0.05
    zero = (process.noisy_posterior(log_q, t) - 0.5 / K).clamp_min(0)  # a consistent score keeps what it knows
    assert (process.clean_posterior(log_q, t) - zero / zero.sum(-1, keepdim=True)).abs().max() < 1e-3


@pytest.mark.parametrize("t", [1e-5, 0.5, 1.0])
def test_any_logits_are_safe_in_float32(t):
    process = UniformProcess(1000)
    s, t = process.schedule.at(t / 2), process.schedule.at(t)
    wild = torch.zeros(2, 1000)
    wild[0, 3], wild[1, :500] = 6e4, -6e4
    state = torch.full((2, 1000), 1e-3)
    clean = process.clean_posterior(wild, t)
    euler = process.euler_step(state, wild, t, s.time, floor=True)
    for p in (clean, process.exact_step(state, clean, t, s), euler):
        assert p.dtype == torch.float32
        assert p.isfinite().all()
        assert torch.allclose(p.double().sum(-1), torch.ones(2, dtype=DOUBLE), atol=1e-3)


def test_a_process_needs_two_classes():
    with pytest.raises(ValueError, match="at least 2 classes"):
        UniformProcess(1)


@pytest.mark.parametrize("K", [2, 3, 10, 1000, 1024, 21_841])
def test_redrawn_labels_are_exact_without_float64(K):
    u = torch.tensor([0, 1, 2**23, 2**24 - 1]) / 2**24
    u = torch.cat([u, torch.rand(10_000, generator=torch.Generator().manual_seed(K))])
    draws = torch.stack([torch.zeros_like(u), u, torch.zeros_like(u)], -1)
    process = UniformProcess(K, LogLinear(min(1e-3, 1 / K)))
    label = process.sample_label(torch.zeros(len(u), dtype=torch.long), torch.ones_like(u), draws)
    assert torch.equal(label, (u.double() * K).long())
    assert label.max() == K - 1
