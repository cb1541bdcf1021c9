"""The paper's formulas with their K x K matrices written out: slow, literal, the judge of the fast code.

Everything here is in the paper's units, R = 11^T - K I, sigma and total noise sigma_bar, but for the losses:
their sigma is the rate of the process with R / K, so that their size does not shrink with K.
"""

import torch
from torch import Tensor

DOUBLE = torch.float64


def rate_matrix(K: int) -> Tensor:
    return torch.ones(K, K, dtype=DOUBLE) - K * torch.eye(K, dtype=DOUBLE)


def forward_by_exponential(q0: Tensor, sigma_bar: float) -> Tensor:
    """Solve Eq. 1 by the matrix exponential; q0 is (K,) or has a distribution in each column."""
    return torch.linalg.matrix_exp(sigma_bar * rate_matrix(len(q0))) @ q0


def forward_by_eigenvectors(q0: Tensor, sigma_bar: float) -> Tensor:
    """Eq. 2: U exp(sigma_bar Lambda) U^-1 q0."""
    values, U = torch.linalg.eigh(rate_matrix(len(q0)))
    return U @ torch.diag(torch.exp(sigma_bar * values)) @ torch.linalg.inv(U) @ q0


def reverse_rate(q: Tensor, sigma: float) -> Tensor:
    """Eq. 4 with the rank-one score matrix of Eq. 7."""
    S = torch.outer(q, 1 / q)
    SR = S * (sigma * rate_matrix(len(q)))
    return SR - torch.diag(SR.sum(0))


def cp_step(p: Tensor, s: Tensor, sigma: float, dt: float) -> Tensor:
    """Lines 7 to 11 of Algorithm 2 for one image: p_t, score column s."""
    q = s / s.sum()
    return (torch.eye(len(p), dtype=DOUBLE) + reverse_rate(q, sigma) * dt) @ p


def cl_step(label: int, s: Tensor, sigma: float, dt: float) -> Tensor:
    """Lines 7 to 9 of Algorithm 3 for one chain: the vector p_{t - dt | t}."""
    K = len(s)
    e = torch.zeros(K, dtype=DOUBLE)
    e[label] = 1
    r = sigma * torch.ones(K, dtype=DOUBLE) - sigma * K * e
    r_bar = s * r - (s * r).sum() * e
    return e + r_bar * dt


def reverse_kernel(q0: Tensor, sigma_bar_t: float, sigma_bar_s: float) -> Tensor:
    """Bayes' rule: entry (k, j) is P(c_s = k | c_t = j) for the clean posterior q0."""
    R = rate_matrix(len(q0))
    q_s = torch.linalg.matrix_exp(sigma_bar_s * R) @ q0
    between = torch.linalg.matrix_exp((sigma_bar_t - sigma_bar_s) * R)  # (j, k): P(c_t = j | c_s = k)
    joint = between.T * q_s.unsqueeze(1)
    return joint / joint.sum(0)


def paper_cp(scores, K: int, sigma, steps: int) -> Tensor:
    """Algorithm 2; what too long a step leaves below 0, on which it is silent, is clamped as in the released code.

    `scores(label, t)` gives a score column, `sigma(t)` the paper's noise rate.
    """
    p = torch.full((K,), 1 / K, dtype=DOUBLE)
    for i in range(steps):
        t = 1 - i / steps
        p = _on_the_simplex(cp_step(p, scores(int(p.argmin()), t), sigma(t), 1 / steps))
    return p


def released_cp(scores, K: int, sigma, steps: int, eps: float = 1e-5) -> Tensor:
    """CP as released: times linspace(1, eps, n), but steps of (1 - eps) / n, hidden by a clamp to [0, 1]."""
    p = torch.full((K,), 1 / K, dtype=DOUBLE)
    for t in torch.linspace(1, eps, steps, dtype=DOUBLE).tolist():
        p = _on_the_simplex(cp_step(p, scores(int(p.argmin()), t), sigma(t), (1 - eps) / steps))
    return p


def _on_the_simplex(p: Tensor) -> Tensor:
    p = p.clamp(0, 1)
    return p / p.sum()


def score_entropy(log_s_hat: Tensor, q: Tensor, label: int, sigma: float) -> Tensor:
    """Line 7 of Algorithm 1, with A(a) = a (log a - 1)."""
    s = q / q[label]
    return sigma / len(q) * (log_s_hat.exp() - s * log_s_hat + s * (s.log() - 1)).sum()


def expected_score_entropy(log_q_hat: Tensor, q: Tensor, sigma: float) -> Tensor:
    """`score_entropy` averaged over every noisy label j ~ q, for a network that does not see j."""
    losses = [score_entropy(log_q_hat - log_q_hat[j], q, j, sigma) for j in range(len(q))]
    return (q * torch.stack(losses)).sum()


def redrawn_loss(target: Tensor, guess: Tensor, redraw: Tensor, total: float, rate: float) -> Tensor:
    """Expected score entropy of a process on any states, whose state is redrawn from `redraw` at `rate`.

    `target` and `guess` are the true and the believed distribution of the clean state.
    """
    n = len(target)
    R = torch.outer(redraw, torch.ones(n, dtype=DOUBLE)) - torch.eye(n, dtype=DOUBLE)
    forward = torch.linalg.matrix_exp(total * R)
    q, q_hat = forward @ target, forward @ guess
    loss = torch.zeros((), dtype=DOUBLE)
    for j in range(n):
        for i in range(n):
            into_j = rate * R[j, i]
            if i == j or into_j == 0 or q_hat[i] == 0:  # nothing leads there, neither in truth nor in belief
                continue
            s, s_hat = q[i] / q[j], q_hat[i] / q_hat[j]
            loss = loss + q[j] * into_j * (s_hat - torch.xlogy(s, s_hat) + torch.xlogy(s, s) - s)
    return loss
