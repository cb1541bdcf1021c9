import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from didicm.diffusion import Exponential, Geometric, LogLinear, LogRatio, UniformProcess, schedule_from_dict

SCHEDULES = [LogLinear(), LogLinear(1e-4), Exponential(-1.0, 0.01, 10), Geometric(1e-3, 20.0), LogRatio(10)]
times = st.floats(1e-5, 1)


def tensor(x):
    return torch.tensor(x, dtype=torch.float64)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@given(t=times)
def test_rate_is_the_derivative_of_total(schedule, t):
    h = 1e-6 * t
    difference = (schedule.total(tensor(t + h)) - schedule.total(tensor(t - h))) / (2 * h)
    assert torch.allclose(schedule.rate(tensor(t)), difference, rtol=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@given(t=times)
def test_keep_lost_and_total_agree_and_are_the_noise_at_a_time(schedule, t):
    noise, t = schedule.at(t), tensor(t)
    for name in ("total", "rate", "keep", "lost"):
        assert getattr(noise, name) == pytest.approx(getattr(schedule, name)(t).item(), rel=1e-14)
    assert torch.allclose(schedule.keep(t), torch.exp(-schedule.total(t)), rtol=1e-9)
    assert torch.allclose(schedule.keep(t) + schedule.lost(t), tensor(1.0), rtol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_starts_clean_and_loses_nothing_to_float32(schedule):
    assert schedule.total(tensor(0.0)) == 0
    assert schedule.keep(tensor(0.0)) == 1
    t = torch.tensor([1e-5, 1e-3, 0.5, 1.0])
    for function in (schedule.lost, schedule.keep, schedule.rate):
        assert torch.allclose(function(t).double(), function(t.double()), rtol=2e-6)


def test_exponential_is_the_papers_example():
    a, b, K, t = -0.9, 0.02, 7, 0.3
    schedule = Exponential(a, b, K)
    assert math.isclose(schedule.total(tensor(t)) / K, a * b**t - a)
    assert math.isclose(schedule.rate(tensor(t)) / K, a * b**t * math.log(b))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_survives_a_config_file(schedule):
    assert schedule_from_dict(schedule.to_dict()) == schedule


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"name": "cosine"}, "choose one of log-linear"),
        ({"eps": 0.1}, "choose one of log-linear"),
        ({"name": ["log-linear"]}, "choose one of log-linear"),
        ({"name": "log-linear", "epsilon": 1}, "log-linear: there is no key 'epsilon': choose one of eps"),
        ({"name": "exponential", "a": -1.0}, "b, num_classes must be given"),
        ({"name": "log-linear", "eps": 0.0}, "between 0 and 1"),
        ({"name": "log-linear", "eps": "small"}, "eps must be a number"),
        ({"name": "geometric", "max": math.inf}, "max must be a number"),
        ({"name": "log-ratio", "num_classes": 2.5}, "num_classes must be a whole number"),
    ],
)
def test_bad_configs_are_refused(config, says):
    with pytest.raises(ValueError, match=says):
        schedule_from_dict(config)


def test_numbers_that_yaml_takes_for_text_are_numbers():
    assert schedule_from_dict({"name": "log-linear", "eps": "1e-4"}) == LogLinear(1e-4)


@pytest.mark.parametrize(
    ("num_classes", "schedule", "advice"),
    [
        (10, LogLinear(0.05), "eps of at most 0.01"),
        (21_841, LogLinear(1e-3), "eps of at most 9.1e-05"),
        (10, Geometric(1e-3, 1.0), "max of at least 4.7"),
        (1000, Geometric(1e-3, 5.0), "max of at least 6.3"),
    ],
)
def test_a_schedule_must_end_near_uniform_for_its_classes(num_classes, schedule, advice):
    with pytest.raises(ValueError, match=f"not near uniform at t = 1 for {num_classes} classes.*{advice}"):
        UniformProcess(num_classes, schedule)


@given(num_classes=st.integers(2, 50_000), b=st.floats(0.01, 0.9))
def test_following_the_advice_is_enough(num_classes, b):
    for make, bad in (
        (lambda eps: LogLinear(eps), 0.9),
        (lambda a: Exponential(a, b, num_classes), -1e-9),
        (lambda top: Geometric(1e-3, top), 0.5),
    ):
        with pytest.raises(ValueError, match="not near uniform") as error:
            UniformProcess(num_classes, make(bad))
        advice = float(re.search(r"of at (?:most|least) (\S+)$", str(error.value)).group(1))
        UniformProcess(num_classes, make(advice))


def test_an_exponential_schedule_belongs_to_its_number_of_classes():
    with pytest.raises(ValueError, match="made for 10 classes, the process has 11"):
        UniformProcess(11, Exponential(-1.0, 0.01, 10))
