"""The O(K) core against the paper's K x K matrices, written literally, batched, in float32, on one thread."""

import torch
from torch import Tensor

from benchmarks.measure import PeakMemory, Result, ratio
from didicm.diffusion import LogLinear, UniformProcess


def run() -> list[Result]:
    K, B = 1000, 64
    torch.manual_seed(0)
    process = UniformProcess(K)
    target, time = torch.rand(B, K).softmax(-1), torch.rand(B)
    t, s = process.schedule.at(0.5), process.schedule.at(0.375)
    p, log_score = torch.rand(B, K).softmax(-1), process.add_noise(torch.randn(B, K).softmax(-1), t).log()
    R = torch.ones(K, K) - K * torch.eye(K)
    values, U = torch.linalg.eigh(R)
    U_inverse = torch.linalg.inv(U)
    sigma_bar = process.schedule.total(time) / K

    def literal_forward() -> Tensor:
        noise = U * torch.exp(sigma_bar[:, None] * values)[:, None]  # U exp(sigma_bar Lambda), (B, K, K)
        return torch.bmm(noise @ U_inverse, target[..., None])

    def literal_forward_from_the_right() -> Tensor:
        return (torch.exp(sigma_bar[:, None] * values) * (target @ U_inverse.T)) @ U.T

    def literal_euler() -> Tensor:
        q = log_score.softmax(-1)
        S = q[:, :, None] * (1 / q)[:, None]
        SR = S * (t.rate / K * R)
        rate = SR - torch.diag_embed(SR.sum(1))
        return torch.bmm(torch.eye(K) + rate * (t.time - s.time), p[..., None])

    def literal_exact() -> Tensor:
        forward = [noise.keep * torch.eye(K) + noise.lost / K for noise in (t, s)]
        clean = torch.linalg.solve(forward[0], log_score.softmax(-1).T).T
        q_t, q_s = (clean @ matrix for matrix in forward)
        e = t.keep / s.keep
        between = e * torch.eye(K) + (1 - e) / K
        return torch.bmm(q_s[:, :, None] * between / q_t[:, None], p[..., None])

    def euler() -> Tensor:
        return process.euler_step(p, log_score, t, t.time - s.time)

    def exact() -> Tensor:
        return process.exact_step(p, process.clean_posterior(log_score, t), t, s)

    def forward() -> Tensor:
        return process.marginal(target, time)

    assert torch.allclose(literal_forward().squeeze(-1), forward(), atol=1e-4)
    assert torch.allclose(literal_euler().squeeze(-1), euler(), atol=1e-4)
    assert torch.allclose(literal_exact().squeeze(-1), exact(), atol=1e-4)

    results = [
        Result("forward noising, K = 1000, B = 64", ratio(literal_forward, forward), "x faster", 10_000),
        Result(
            "the same, the matrices applied from the right",
            ratio(literal_forward_from_the_right, forward),
            "x faster",
        ),
    ]
    for name, literal, fast in (("Euler", literal_euler, euler), ("exact", literal_exact, exact)):
        results.append(Result(f"CP {name} step, K = 1000, B = 64", ratio(literal, fast), "x faster", 1000))
        with PeakMemory() as memory:
            fast()
        results.append(Result(f"CP {name} step, K = 1000, B = 64", memory.megabytes, "MB", 5, at_least=False))

    K = 21_841
    process = UniformProcess(K, LogLinear(1e-5))
    t, s = process.schedule.at(0.5), process.schedule.at(0.375)
    p, log_score = torch.rand(B, K).softmax(-1), torch.randn(B, K)
    with PeakMemory() as memory:
        exact()
    results.append(Result("CP exact step, K = 21841, B = 64", memory.megabytes, "MB", 200, at_least=False))
    return results
