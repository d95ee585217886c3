"""Values that are not allowed are refused by name, whatever their type."""

import math

import pytest

from ddtree.config import EngineConfig, SamplingParams, parse_budget
from ddtree.errors import ConfigError, short_repr

HUGE = 10**400  # no float holds it


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, HUGE) for name in ("temperature", "top_p", "min_p", "repetition_penalty", "seed")),
        ("presence_penalty", HUGE), ("frequency_penalty", -HUGE), ("temperature", 10**5000),
        ("temperature", -HUGE), ("temperature", "1"), ("temperature", True), ("temperature", math.nan),
        ("repetition_penalty", 1e-40), ("repetition_penalty", 0.009), ("repetition_penalty", 10.1),
        ("logit_bias", {1: 1e39}), ("logit_bias", {1: -1.1e30}), ("logit_bias", {1: HUGE}),
        ("logit_bias", {1: math.inf}), ("logit_bias", {"1": 1.0}), ("logit_bias", {-1: 1.0}),
        ("logit_bias", [(1, 1.0)]), ("logit_bias", 5), ("logit_bias", None),
        ("ignore_eos", 1), ("ignore_eos", "no"), ("ignore_eos", None),
        ("max_tokens", 0), ("top_k", 1.0), ("stop", "text"), ("stop_token_ids", [1]),
    ],
    ids=short_repr,
)  # fmt: skip
def test_sampling_values_that_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"^{name}=.* is not allowed: "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 0.01), ("repetition_penalty", 10), ("logit_bias", {1: -1e30, 2: 1e30}),
        ("top_p", 1e-50), ("temperature", 100), ("ignore_eos", True),
    ],
)  # fmt: skip
def test_sampling_values_at_the_limits(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    "device", ["cuda:01", "cuda:\N{ARABIC-INDIC DIGIT ONE}", "cuda:", "cuda:99999", "CPU", "cpu\n", 0]
)
def test_devices_that_are_refused(device):
    with pytest.raises(ConfigError, match=r"^device=.* is not allowed: auto, cpu, cuda or cuda:N"):
        EngineConfig(device=device)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:10"])
def test_devices_that_are_allowed(device):
    assert EngineConfig(device=device).device == device


def test_switches_of_the_engine_are_true_or_false():
    with pytest.raises(ConfigError, match=r"^cuda_graphs=1 is not allowed"):
        EngineConfig(cuda_graphs=1)


@pytest.mark.parametrize("value", ["0", "1025", "x", "9" * 5000, HUGE], ids=short_repr)
def test_a_budget_is_refused_under_the_name_its_caller_gives(value):
    with pytest.raises(ConfigError, match=r"^node_budget=.* is not allowed: a whole number from 1 to 1024"):
        parse_budget(value)
    with pytest.raises(ConfigError, match=r"^--budget=.* is not allowed"):
        parse_budget(value, "--budget")
