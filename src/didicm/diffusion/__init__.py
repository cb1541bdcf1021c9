"""The paper's mathematics on plain tensors: schedules, the process, losses and samplers."""

from didicm.diffusion.loss import marginal_score_entropy, score_entropy
from didicm.diffusion.process import UniformProcess
from didicm.diffusion.sampler import Sampler
from didicm.diffusion.sampling import Posterior, Step, readout, sample_cl, sample_cp, sample_naive
from didicm.diffusion.schedule import Exponential, Geometric, LogLinear, LogRatio, Schedule, schedule_from_dict
from didicm.diffusion.solver import Features, ScoreFunction

__all__ = [
    "Exponential",
    "Features",
    "Geometric",
    "LogLinear",
    "LogRatio",
    "Posterior",
    "Sampler",
    "Schedule",
    "ScoreFunction",
    "Step",
    "UniformProcess",
    "marginal_score_entropy",
    "readout",
    "sample_cl",
    "sample_cp",
    "sample_naive",
    "schedule_from_dict",
    "score_entropy",
]
