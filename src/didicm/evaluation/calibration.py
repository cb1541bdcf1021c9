"""Temperature scaling: one number that makes a posterior sharper or flatter, fitted on held-out images."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from didicm.errors import UserError
from didicm.evaluation.metrics import TINY, check, check_probs

LOWEST, HIGHEST = 0.05, 20.0
FLAT = 1e-12  # a slope of the NLL that is rounding error


@dataclass(frozen=True)
class Temperature:
    """A fitted temperature, above 1 for a posterior that was too sure."""

    value: float
    nll_before: float
    nll_after: float
    n: int  # images it was fitted on
    warning: str | None  # set where the best value lies outside of what we allow


def fit_temperature(probs: Tensor, labels: Tensor, prior: float = 0.0) -> Temperature:
    """Minimise the NLL of softmax(log p / T) over T in [0.05, 20], for held-out probabilities (N, K).

    The NLL is convex in 1 / T, so its slope has one root, or the minimum lies at a bound. A dozen images that
    happen to be all right would ask for T = 0; `prior` counts as so many more images that confirm the posterior.
    """
    probs, labels = check(probs, labels)
    logits = _log(probs)
    own = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    target = (len(probs) * own + prior * (probs * logits).sum(-1)) / (len(probs) + prior)

    def mean_nll(beta: float) -> float:
        return ((logits * beta).logsumexp(-1) - own * beta).mean().item()

    def slopes(beta: float) -> tuple[float, float]:
        """First and second derivative of the NLL."""
        p = (logits * beta).softmax(-1)
        mean = (p * logits).sum(-1)
        variance = (p * (logits - mean.unsqueeze(-1)).square_()).sum(-1)
        return (mean - target).mean().item(), variance.mean().item()

    start, _ = slopes(1.0)
    value, warning = 1.0, None  # kept where no temperature matters, as for a uniform posterior
    if start < -FLAT and slopes(1 / LOWEST)[0] < 0:
        value, warning = LOWEST, _at_bound(LOWEST, "sharper")
    elif start > FLAT and slopes(1 / HIGHEST)[0] > 0:
        value, warning = HIGHEST, _at_bound(HIGHEST, "flatter")
    elif abs(start) > FLAT:
        value = 1 / _root(slopes, 1 / HIGHEST, 1 / LOWEST)
    return Temperature(value, mean_nll(1.0), mean_nll(1 / value), len(probs), warning)


def apply_temperature(probs: Tensor, temperature: float) -> Tensor:
    """Rescale probabilities (N, K) to softmax(log p / T), in their own precision; the ranking stays."""
    if not temperature > 0:
        raise UserError(f"a temperature must be above 0, got {temperature}")
    probs = check_probs(probs)
    return (_log(probs) / temperature).softmax(-1).to(probs.dtype)


def _root(slopes: Callable[[float], tuple[float, float]], low: float, high: float) -> float:
    """Where a rising function is 0, from its value and slope: Newton's method, held inside a bracket."""
    x = 1.0
    for _ in range(100):
        value, slope = slopes(x)
        low, high = (x, high) if value < 0 else (low, x)
        if abs(value) < FLAT or high / low < 1 + 1e-9:
            break
        newton = x - value / slope if slope > 0 else low
        x = newton if low < newton < high else (low * high) ** 0.5
    return x


def _at_bound(bound: float, way: str) -> str:
    return f"the temperature stopped at its bound {bound}: these images ask for a still {way} posterior"


def _log(probs: Tensor) -> Tensor:
    return probs.double().clamp_min(TINY).log()
