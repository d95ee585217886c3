"""Any OpenAI-compatible server as an arm: who it is, how it is asked, and our own server's modes."""

import pytest

from ddtree.bench.http_client import ServerError
from ddtree.bench.openai_engine import arms_of, open_engine, served_model
from ddtree.bench.run_format import Arm
from ddtree.bench.server_facts import Address, address_of
from ddtree.bench_config import BenchConfig
from ddtree.config import Mode
from ddtree.errors import ConfigError
from fake_server import CHAT_PATH, HELLO, MODELS, chunk, respond, says, serving, usage
from server_kit import MODEL, live_server, served_engine

CHATS = [[{"role": "user", "content": text}] for text in ("One.", "Two?", "Three!")]
SAMPLED = {"max_tokens": 9, "temperature": 0.7, "seeds": [1, 2, 3], "concurrency": 2}
SGLANG = {"version": "0.5.23", "internal_states": [{}], "dtype": "bfloat16", "api_key": "secret"}


def config_of(url, **settings):
    return BenchConfig(engines=(url,), modes=(Mode.AR, Mode.CHAIN, Mode.TREE), budgets=(4, 8), **settings)


@pytest.fixture
def opened():
    """Opens engines of servers and closes them after the test."""
    engines = []

    def open_it(url, arm=None, **settings):
        engines.append(open_engine(arm or Arm(url, None), config_of(url, **settings)))
        return engines[-1]

    yield open_it
    for engine in engines:
        engine.close()
        engine.close()


# -- who is there -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:1", Address("http://h:1", "/v1")),
        ("http://h:1/", Address("http://h:1", "/v1")),
        ("http://h:1/v1/", Address("http://h:1", "/v1")),
        ("https://h/proxy/v1#a/b", Address("https://h/proxy", "/v1", "a/b")),
    ],
)
def test_the_parts_of_a_url(url, address):
    assert address_of(url) == address


@pytest.mark.parametrize("user", ["me:secret", "secret", ":secret", "a@b:secret"])
def test_a_url_with_a_password_is_refused_without_showing_it(user):
    with pytest.raises(ConfigError, match="no user and password") as raised:
        address_of(f"http://{user}@host:8000/v1")
    assert "secret" not in str(raised.value)


def test_a_url_with_a_query_is_refused():
    with pytest.raises(ConfigError, match="no query"):
        address_of("http://h/v1?key=1")


@pytest.mark.parametrize(
    ("handlers", "kind"),
    [
        ({}, "other"),
        ({"/version": lambda asked: respond({"version": "0.11"})}, "vllm"),
        ({"/server_info": lambda asked: respond(SGLANG)}, "sglang"),
        ({"/get_server_info": lambda asked: respond(SGLANG)}, "sglang"),
        ({"/v1/ddtree/stats": lambda asked: respond({"version": "1", "engine": {"drafter": "d"}})}, "ddtree"),
        ({"/version": lambda asked: respond(b"<html>")}, "other"),
    ],
)
def test_whose_server_it_is(opened, handlers, kind):
    with serving(handlers, chat=says(*HELLO)) as fake:
        info = opened(fake.url).info()
    assert (info["server"], info["model"]) == (kind, "fake")
    assert "secret" not in str(info)


@pytest.mark.parametrize(
    ("models", "fragment", "named"),
    [
        ({"data": [{"id": "a"}, {"id": "b"}]}, "", "several models: 'a', 'b'; name one as in URL#MODEL"),
        ({"data": [{"id": f"m{i}"} for i in range(99)]}, "#other", "and 91 more"),
        ({"data": []}, "", "lists no model"),
        ([], "", "lists no model"),
        ({"data": [{"id": 3}, 4]}, "", "lists no model"),
    ],
)
def test_which_model(models, fragment, named):
    with serving({"/v1/models": lambda asked: respond(models)}) as fake:
        url = fake.url + fragment
        with pytest.raises((ConfigError, ServerError)) as raised:
            served_model(url, config_of(url))
    assert named in str(raised.value)


@pytest.mark.parametrize("body", [b"", b"\xff<html>", b"[" * 100_000, b'{"error": "loading"}'])
@pytest.mark.parametrize("status", [200, 500])
def test_a_server_that_tells_no_models_is_shown_with_its_status(body, status):
    with serving({"/v1/models": lambda asked: respond(body, status)}) as fake:
        url = fake.url
        with pytest.raises(ServerError, match=rf"lists no model \(status {status}\)"):
            served_model(url, config_of(url))


def test_a_model_named_behind_the_url_is_asked_for(opened):
    many = {"data": [{"id": "a"}, {"id": "b"}]}
    with serving({"/v1/models": lambda asked: respond(many)}, chat=says(*HELLO)) as fake:
        opened(f"{fake.url}/v1#b")
        assert {chat["model"] for chat in fake.chats()} == {"b"}


def test_a_key_from_the_environment(opened, monkeypatch):
    with serving(chat=says(*HELLO)) as fake:
        with pytest.raises(ConfigError, match="BENCH_KEY"):
            opened(fake.url, api_key_env="BENCH_KEY")
        monkeypatch.setenv("BENCH_KEY", " key\n")
        opened(fake.url, api_key_env="BENCH_KEY")
        assert {asked.headers.get("authorization") for asked in fake.asked} == {"Bearer key"}


# -- how it is asked --------------------------------------------------------------------------------


def test_what_a_request_has(opened):
    with serving(chat=says(*HELLO)) as fake:
        engine = opened(fake.url)
        fake.asked.clear()
        wall_s, answers = engine.run(CHATS, **SAMPLED)
        engine.run(CHATS[:1], **SAMPLED | {"temperature": 0.0, "seeds": [1]})
        *sampled, greedy = sorted(fake.chats(), key=lambda body: body["temperature"], reverse=True)
    assert [answer.text for answer in answers] == ["Hello!"] * 3
    assert wall_s > 0
    assert sorted((body["messages"][0]["content"], body["seed"]) for body in sampled) == [
        ("One.", 1), ("Three!", 3), ("Two?", 2),
    ]  # fmt: skip
    assert sampled[0] == {
        "model": "fake", "messages": sampled[0]["messages"], "max_tokens": 9, "temperature": 0.7,
        "top_p": 1.0, "seed": sampled[0]["seed"], "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert "seed" not in greedy
    assert "top_p" not in greedy


def test_fields_that_a_server_does_not_know_are_left_out(opened):
    unknown = ["continuous_usage_stats", "stream_options", "max_tokens: use max_completion_tokens",
               "seed", "return_spec_tokens_details"]  # fmt: skip

    def strict(asked):
        body = asked.json()
        for said in unknown:
            name = said.partition(":")[0]
            if name in body or name in body.get("stream_options", {}):
                return respond({"error": {"message": f"unknown field {said}"}}, 400)
        return says(*HELLO[:4], HELLO[5])(asked)

    with serving({"/server_info": lambda asked: respond(SGLANG)}, chat=strict) as fake:
        engine = opened(fake.url)
        engine.run(CHATS, **SAMPLED)
        body = fake.chats()[-1]
    assert body["max_completion_tokens"] == 9
    assert {"stream_options", "seed", "max_tokens", "return_spec_tokens_details"}.isdisjoint(body)
    assert body["repetition_penalty"] == 1.0  # else the model's generation_config.json has a say
    assert engine.info()["has_seed"] is False
    assert engine.info()["token_counts"] == "estimated: one a chunk"


def test_a_refusal_of_what_cannot_be_left_out_is_told(opened):
    with (
        serving(chat=lambda asked: respond({"detail": "no chat template"}, 400)) as fake,
        pytest.raises(ConfigError, match="no chat template"),
    ):
        opened(fake.url)


def test_how_tokens_are_counted_is_told(opened):
    with serving(chat=says(*HELLO)) as fake:
        assert opened(fake.url).info()["token_counts"] == "by the server"
    with serving({"/v1/models": lambda asked: respond(MODELS)}, chat=says(*HELLO[:4])) as fake:
        assert opened(fake.url).info()["token_counts"] == "estimated: one a chunk"


def test_tokens_of_a_server_that_does_not_count_are_counted_here(opened, tmp_path):
    from server_kit import byte_tokenizer

    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    name = str(tmp_path)
    models = {"data": [{"id": name}]}
    answer = says(chunk(content="12345"), chunk(content="678"), chunk("stop"))
    with serving({"/v1/models": lambda asked: respond(models)}, chat=answer) as fake:
        engine = opened(fake.url, model=name)
        _, [made] = engine.run(CHATS[:1], max_tokens=9, temperature=0.0, seeds=[1], concurrency=1)
    assert (made.new_tokens, [count for _, count in made.chunk_times]) == (8, [5, 3])
    assert engine.info()["token_counts"] == "by the tokenizer, of the text"


def test_a_bad_answer_among_good_ones_fails_the_cell(opened):
    with serving(chat=says(*HELLO)) as fake:
        engine = opened(fake.url)
        fake.handlers[CHAT_PATH] = says(HELLO[0], HELLO[1])
        with pytest.raises(ServerError, match="broke off"):
            engine.run(CHATS, **SAMPLED)


def test_only_sglangs_cache_is_emptied_until_it_is_done(opened, monkeypatch):
    busy = iter([respond({}, 400), respond({}, 400)])
    flush = {"/flush_cache": lambda asked: next(busy, None) or respond({})}
    with serving(flush | {"/server_info": lambda asked: respond(SGLANG)}, chat=says(*HELLO)) as fake:
        opened(fake.url).flush()
        assert [asked.method for asked in fake.asked if asked.path == "/flush_cache"] == ["POST"] * 3
    with serving(flush, chat=says(*HELLO)) as fake:
        opened(fake.url).flush()
        assert not [asked for asked in fake.asked if asked.path == "/flush_cache"]


def test_a_server_that_others_keep_busy_is_measured_all_the_same(opened, monkeypatch, caplog):
    monkeypatch.setattr("ddtree.bench.openai_engine.FLUSH_LIMIT_S", 0.1)
    handlers = {
        "/server_info": lambda asked: respond(SGLANG),
        "/flush_cache": lambda asked: respond({}, 400),
    }
    with serving(handlers, chat=says(*HELLO)) as fake:
        opened(fake.url).flush()
    assert "was not emptied" in caplog.text


def test_a_server_that_is_not_there():
    with serving() as fake:
        pass
    with pytest.raises(ServerError, match="cannot be reached"):
        arms_of(fake.url, config_of(fake.url))


def test_another_server_is_one_arm():
    with serving() as fake:
        assert arms_of(fake.url, config_of(fake.url)) == [Arm(fake.url, None)]


# -- ddtree serve -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    with live_server(served_engine(tmp_path_factory.mktemp("live"))) as server:
        yield server


def test_our_own_server_is_an_arm_for_each_mode(live):
    arms = arms_of(live.url, config_of(live.url))
    assert [arm.plan for arm in arms] == ["ar", "chain", "tree:4", "tree:8"]
    assert served_model(live.url, config_of(live.url)) == MODEL


def test_our_own_server_without_a_drafter_decodes_plainly(tmp_path):
    with live_server(served_engine(tmp_path, has_drafter=False)) as live:
        assert [arm.plan for arm in arms_of(live.url, config_of(live.url))] == ["ar"]
        with pytest.raises(ConfigError, match="no drafter"):
            arms_of(live.url, BenchConfig(engines=(live.url,), modes=(Mode.TREE,)))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_all_modes_of_our_own_server_say_the_same(live, opened, temperature):
    texts, rounds = {}, {}
    for arm in arms_of(live.url, config_of(live.url)):
        _, answers = opened(live.url, arm).run(CHATS, **SAMPLED | {"temperature": temperature})
        texts[arm.plan] = [answer.text for answer in answers]
        rounds[arm.plan] = [answer.rounds for answer in answers]
        last = [request.mode for request in live.engine.started[-3:]]
        assert last == [arm.mode] * 3
        for answer in answers:
            assert 1 <= answer.new_tokens <= 9
            assert answer.begin_s < answer.first_s <= answer.end_s
            assert answer.decode_s is not None
            assert sum(count for _, count in answer.chunk_times) in (0, answer.new_tokens)
    assert len({tuple(said) for said in texts.values()}) == 1
    assert all(b <= a for a, b in zip(rounds["ar"], rounds["tree:8"], strict=True))


def test_budgets_reach_our_own_server(live, opened):
    engine = opened(live.url, Arm(live.url, Mode.TREE, 8))
    engine.run(CHATS[:1], max_tokens=4, temperature=0.0, seeds=[1], concurrency=1)
    assert live.engine.started[-1].node_budget == 8
    assert engine.info()["block_size"] is not None


def test_usage_is_what_makes_tokens(live, opened):
    engine = opened(live.url, Arm(live.url, Mode.AR))
    _, [answer] = engine.run(CHATS[:1], max_tokens=5, temperature=0.0, seeds=[1], concurrency=1)
    assert answer.new_tokens == 5 or answer.finish_reason == "stop"
    assert answer.prompt_tokens > len("One.")
    assert usage(1, 5)["usage"]["completion_tokens"] == 5
