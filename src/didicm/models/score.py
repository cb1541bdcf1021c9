"""The contract of every score network, and the two things its outputs may mean."""

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from didicm.diffusion import Features
from didicm.diffusion.process import log_marginal

Parameterization: TypeAlias = Literal["score", "posterior"]


class ScoreModel(nn.Module):
    """A network that predicts log q_t / q_t[label] for an image, a noisy label and the total noise.

    A subclass writes `encode` and `outputs`. What the outputs mean is `parameterization`:

    - "score": the log-scores themselves (the paper).
    - "posterior": logits of the clean posterior, from which the log-scores follow. Every noise level then
      speaks about the same quantity, and one call already is an estimate of the posterior.
    """

    num_classes: int
    parameterization: Parameterization

    def predict(self, parameterization: Parameterization, num_classes: int) -> None:
        """Set what the outputs mean, and for how many classes."""
        if num_classes < 2:
            raise ValueError(f"a score model needs num_classes of at least 2, got {num_classes}")
        if parameterization not in get_args(Parameterization):
            raise ValueError(
                f"parameterization must be one of {', '.join(get_args(Parameterization))}, got {parameterization!r}"
            )
        self.num_classes = num_classes
        self.parameterization = parameterization

    def encode(self, image: Tensor) -> Features:
        """Compute once per image all that depends on the image (B, C, H, W) alone."""
        raise NotImplementedError

    def outputs(self, features: Features, label: Tensor, total: Tensor) -> Tensor:
        """Raw outputs (B, K) at noisy labels (B,) and total noise (B,)."""
        raise NotImplementedError

    def score(self, features: Features, label: Tensor, total: Tensor) -> Tensor:
        """Log-scores (B, K) in float32 or better, exactly 0 at `label` (B,)."""
        outputs = self.outputs(features, label, total)
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        label = label.unsqueeze(-1)
        if self.parameterization == "score":
            return outputs.scatter(-1, label, 0.0)
        log_q = log_marginal(outputs.log_softmax(-1), total)
        return log_q - log_q.gather(-1, label)

    def forward(self, image: Tensor, label: Tensor, total: Tensor) -> Tensor:
        """Encode and score in one call."""
        return self.score(self.encode(image), label, total)
