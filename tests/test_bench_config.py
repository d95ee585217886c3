"""What a benchmark run may be told, and how a wrong value is refused."""

import dataclasses

import pytest

from ddtree.bench_config import BenchConfig, is_url
from ddtree.config import Mode
from ddtree.errors import ConfigError

URL = "http://127.0.0.1:8080/v1"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engines", ()),
        ("engines", ["embedded"]),
        ("engines", ("vllm",)),
        ("engines", ("http://",)),
        ("engines", ("http://[::1/v1",)),
        ("engines", ("http://host /v1",)),
        ("engines", ("http://host:99999/v1",)),
        ("engines", ("http://host:0/v1",)),
        ("engines", ("embedded", "embedded")),
        ("modes", ("beam",)),
        ("modes", ()),
        ("budgets", (0,)),
        ("budgets", ("16",)),
        ("budgets", (1025,)),
        ("budgets", ("Auto",)),
        ("budgets", (True,)),
        ("concurrency", (0,)),
        ("concurrency", (8,)),
        ("concurrency", (1.5,)),
        ("temperatures", (-0.1,)),
        ("temperatures", (float("nan"),)),
        ("temperatures", (0.0, 0.0)),
        ("sets", ("",)),
        ("sets", tuple(map(str, range(65)))),
        ("prompts", -1),
        ("prompt_seed", -1),
        ("max_tokens", 0),
        ("repeats", 0),
        ("seed", 2**63),
        ("warm_up_tokens", -1),
        ("rank_prompts", 1.5),
        ("run_code", 1),
        ("model", ""),
        ("drafter", "none"),
        ("device", "tpu"),
        ("dtype", "int8"),
        ("threads", -1),
        ("max_context_tokens", 1),
        ("sglang_python", "a\0b"),
        ("sglang_args", "--flag 'open"),
        ("memory_share", 1.0),
        ("servers_at_once", "two"),
        ("start_timeout_s", 0),
        ("request_timeout_s", float("inf")),
        ("api_key_env", None),
    ],
)
def test_a_wrong_value_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=f"^{field}=.* is not allowed"):
        BenchConfig(**{field: value})


def test_every_field_has_a_help_text():
    assert all(spec.metadata["help"] for spec in dataclasses.fields(BenchConfig))


def test_an_automatic_budget_is_refused_of_sglang_alone():
    with pytest.raises(ConfigError, match="'auto' is not allowed: whole numbers with the engine sglang"):
        BenchConfig(engines=("embedded", "sglang"), budgets=(8, "auto"))
    BenchConfig(engines=("embedded", URL), budgets=("auto",))
    BenchConfig(engines=("sglang",), budgets=("auto",), modes=(Mode.CHAIN,))


def test_budgets_are_not_read_without_trees():
    assert BenchConfig(modes=(Mode.AR,), budgets=()).budgets == ()


@pytest.mark.parametrize("engines", [("sglang",), ("embedded", "sglang"), (URL,)])
def test_any_concurrency_is_allowed_where_an_engine_takes_it(engines):
    assert BenchConfig(engines=engines, concurrency=(8,)).concurrency == (8,)


def test_no_drafter_is_needed_where_nothing_drafts_here():
    assert BenchConfig(modes=(Mode.AR,), drafter="none").engine_config().drafter == "none"
    assert BenchConfig(engines=(URL,), drafter="none").drafter == "none"


def test_the_engine_is_told_what_the_run_says_and_drafts_only_if_asked():
    config = BenchConfig(model="some/model", drafter="mine", device="cpu", dtype="float32", threads=3)
    engine = config.engine_config()
    assert (engine.model, engine.drafter, engine.device, engine.dtype, engine.threads) == (
        "some/model", "mine", "cpu", "float32", 3,
    )  # fmt: skip
    assert dataclasses.replace(config, modes=(Mode.AR,)).engine_config().drafter == "none"


def test_flags_are_split_as_a_shell_does():
    assert BenchConfig(sglang_args="--a 'b c' --d=1").sglang_flags() == ["--a", "b c", "--d=1"]


@pytest.mark.parametrize(("engine", "expected"), [(URL, True), ("https://h", True), ("sglang", False)])
def test_urls(engine, expected):
    assert is_url(engine) is expected
