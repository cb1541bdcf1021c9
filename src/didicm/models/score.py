"""Score networks: what they have in common, and DiDiRN, the paper's.

DiDiRN is a ResNet whose blocks are conditioned on the noisy label and its noise.
"""

import math
from typing import Annotated, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from didicm.diffusion import Features
from didicm.diffusion.process import at_least_float32, log_marginal
from didicm.diffusion.solver import NO_LABEL
from didicm.models.resnet import Architecture, Block, StemKind, Trunk
from didicm.values import Range, coerce

WIDTH = 128  # of the embedding of the condition
WAVES = 128  # frequencies of the noise embedding, each as a cosine and a sine
LOG_SCALE, LEAST_TOTAL = 10.0, 1e-8  # of the logarithmic noise embedding

Parameterization: TypeAlias = Literal["score", "posterior"]
Layout: TypeAlias = Literal["paper", "official", "resnet"]
NoiseEmbedding: TypeAlias = Literal["linear", "log"]


class ScoreModel(nn.Module):
    """A network that predicts log q_t / q_t[label] for an image, a noisy label and the total noise.

    A subclass writes `encode` and `outputs`. What the outputs mean is `parameterization`:

    - "score": the log-scores themselves (the paper).
    - "posterior": logits of the clean posterior, from which the log-scores follow. Every noise level then
      speaks about the same quantity, and one call already is an estimate of the posterior.

    At the label `NO_LABEL` both are logits of the clean posterior, whatever the noise.
    """

    num_classes: int
    parameterization: Parameterization

    def predict(self, parameterization: Parameterization, num_classes: int) -> None:
        """Set what the outputs mean, and for how many classes."""
        self.num_classes = coerce(num_classes, Annotated[int, Range(2)], "num_classes")
        self.parameterization = coerce(parameterization, Parameterization, "parameterization")

    def encode(self, image: Tensor) -> Features:
        """Compute once per image all that depends on the image (B, C, H, W) alone."""
        raise NotImplementedError

    def outputs(self, features: Features, label: Tensor, total: Tensor) -> Tensor:
        """Raw outputs (B, K) at noisy labels (B,) and total noise (B,)."""
        raise NotImplementedError

    def score(self, features: Features, label: Tensor, total: Tensor) -> Tensor:
        """Log-scores (B, K) in float32 or better, exactly 0 at `label` (B,); without a label, logits."""
        outputs, label = at_least_float32(self.outputs(features, label, total)), label.unsqueeze(-1)
        if self.parameterization == "score":
            return outputs.masked_fill(torch.arange(self.num_classes, device=label.device) == label, 0.0)
        log_q = log_marginal(outputs.log_softmax(-1), total)
        return torch.where(label == NO_LABEL, outputs, log_q - log_q.gather(-1, label.clamp_min(0)))

    def forward(self, image: Tensor, label: Tensor, total: Tensor) -> Tensor:
        return self.score(self.encode(image), label, total)


class Condition(nn.Module):
    """Sum of a label embedding and an embedding of the total noise, (B, WIDTH).

    Total noise spans 1e-5 to 7: as it is (`linear`, the paper), its waves hardly move below 0.1; the logarithm of
    its odds (`log`, as in EDM) spreads all of it. Without a label there is no condition: it is zero.
    """

    wave: Tensor

    def __init__(self, num_classes: int, noise_embedding: NoiseEmbedding = "linear") -> None:
        super().__init__()
        self.noise_embedding = coerce(noise_embedding, NoiseEmbedding, "noise_embedding")
        self.label = nn.Embedding(num_classes, WIDTH)
        self.noise = nn.Sequential(nn.Linear(2 * WAVES, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        wave = torch.exp(-math.log(10_000) * torch.arange(WAVES) / WAVES)
        self.register_buffer("wave", wave, persistent=False)

    def forward(self, label: Tensor, total: Tensor) -> Tensor:
        if self.noise_embedding == "log":
            total = total.clamp_min(LEAST_TOTAL)  # below: log(e^total - 1), written so that nothing overflows
            total = LOG_SCALE * (total + torch.log(-torch.expm1(-total)))
        angle = total.to(self.wave.dtype).unsqueeze(-1) * self.wave
        embedded: Tensor = self.label(label.clamp_min(0)) + self.noise(torch.cat([angle.cos(), angle.sin()], -1))
        return embedded.masked_fill((label == NO_LABEL).unsqueeze(-1), 0.0)


class DiDiRN(Trunk, ScoreModel):
    """Score network on a ResNet trunk.

    Layouts: `paper` merges a block as SiLU(GroupNorm(residual + skip + condition)); `official`, the released
    code, as relu(skip + SiLU(GroupNorm(residual + condition))) with the `small` stem. These two have the same
    parameters. `resnet` is the block of the standard classifier, relu(residual + skip + condition): without a
    label, such a network is that classifier. The stem and both branches of the first block do not see the
    condition: `encode` computes them.
    """

    def __init__(
        self,
        architecture: Architecture,
        num_classes: int = 1000,
        in_chans: int = 3,
        stem: StemKind | None = None,
        width: float = 1.0,
        global_pool: str = "avg",
        layout: Layout = "paper",
        parameterization: Parameterization = "score",
        noise_embedding: NoiseEmbedding = "linear",
    ) -> None:
        coerce(layout, Layout, "layout")
        stem = stem or ("small" if layout == "official" else "resnet")
        super().__init__(architecture, num_classes, in_chans, stem, width, global_pool)
        self.predict(parameterization, num_classes)
        self.layout = layout
        self.condition = Condition(num_classes, noise_embedding)
        # One matrix product gives every block its condition: far fewer calls than one per block.
        self.project = nn.Linear(WIDTH, sum(self.block_channels))
        if layout == "official":
            self.init_residuals(1)
        else:  # else blocks add noise before they have learnt anything: deep trunks lose the image
            nn.init.zeros_(self.project.weight)
            nn.init.zeros_(self.project.bias)
            self.zero_started = ("project.weight",)  # for optimisers that scale a step with the weights' norm
        # 32 groups, as in the paper; other widths have 16 channels per group, as the paper's last stage. In
        # smaller groups little is left of the condition, and of images that have shrunk to a pixel, only signs.
        groups = [32 if width == 1 else math.gcd(32, max(1, n // 16)) for n in self.block_channels]
        self.norms = nn.ModuleList(
            nn.Identity() if layout == "resnet" else nn.GroupNorm(g, n)
            for g, n in zip(groups, self.block_channels, strict=True)
        )

    def encode(self, image: Tensor) -> Features:
        """Stem and first block up to the first conditioning."""
        residual, skip = self.run(self.blocks()[0], self.run(self.stem, image))
        return (residual, skip) if self.layout == "official" else residual + skip

    def outputs(self, features: Features, label: Tensor, total: Tensor) -> Tensor:
        return self.forward_head(self._trunk(features, label, total))

    def forward_features(self, image: Tensor, label: Tensor, total: Tensor) -> Tensor:
        return self._trunk(self.encode(image), label, total)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Start anew with another number of classes: the last layer and the label embedding."""
        self.predict(self.parameterization, num_classes)
        super().reset_classifier(num_classes, global_pool)
        self.condition.label = nn.Embedding(num_classes, WIDTH)

    def _trunk(self, features: Features, label: Tensor, total: Tensor) -> Tensor:
        projected = self.project(F.silu(self.condition(label, total)))[..., None, None]
        conditions = torch.split(projected, self.block_channels, dim=1)
        x: Tensor = self.run(self._merge, features, self.norms[0], conditions[0])  # `encode` ran the first block
        for block, norm, condition in list(zip(self.blocks(), self.norms, conditions, strict=True))[1:]:
            x = self.run(self._advance, x, block, norm, condition)
        return x

    def _advance(self, x: Tensor, block: Block, norm: nn.Module, condition: Tensor) -> Tensor:
        return self._merge(block(x), norm, condition)

    def _merge(self, branches: Features, norm: nn.Module, condition: Tensor) -> Tensor:
        if self.layout == "official":
            residual, skip = branches
            return F.relu(skip + F.silu(norm(residual + condition)))
        merged = (branches if isinstance(branches, Tensor) else branches[0] + branches[1]) + condition
        return F.relu(merged) if self.layout == "resnet" else F.silu(norm(merged))
