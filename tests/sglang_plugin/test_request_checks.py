"""Requests that DDTREE cannot serve as asked end with the reason."""

from types import SimpleNamespace

import pytest

from ddtree.sglang_plugin.request_checks import abort_refused_requests, request_refusal
from sglang_fakes import fake_modules

# As 0.5.17 has it; later versions know more.
PLAIN = {
    "custom_logit_processor": None,
    "return_hidden_states": False,
    "lora_id": None,
    "return_logprob": False,
    "return_sampling_mask": False,
    "return_routed_experts": False,
    "return_indexer_topk": False,
    "to_finish": None,
}


def make_request(**changes):
    sampling_params = SimpleNamespace(**changes.pop("sampling_params", {}))
    return SimpleNamespace(**{**PLAIN, **changes}, sampling_params=sampling_params)


@pytest.mark.parametrize("supports_logprobs", [True, False])
def test_a_plain_request_is_served(supports_logprobs):
    assert request_refusal(make_request(), supports_logprobs=supports_logprobs) is None
    newest = make_request(beam_group=None, sampling_params={"watermark": None})
    assert request_refusal(newest, supports_logprobs=supports_logprobs) is None


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"custom_logit_processor": "{}"}, "custom_logit_processor: use logit_bias"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"return_hidden_states": "last"}, "return_hidden_states"),
        ({"lora_id": "0f"}, "LoRA adapters"),
        ({"return_sampling_mask": True}, "return_sampling_mask"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"return_indexer_topk": True}, "return_indexer_topk"),
        ({"beam_group": object()}, "beam search"),
        ({"sampling_params": {"watermark": {"enabled": True}}}, "watermark"),
    ],
)
def test_a_request_for_more_is_refused(asked, told):
    reason = request_refusal(make_request(**asked), supports_logprobs=True)
    assert reason.startswith("DDTREE speculative decoding does not support")
    assert told in reason


def test_logprobs_depend_on_the_version():
    req = make_request(return_logprob=True)
    assert request_refusal(req, supports_logprobs=True) is None
    assert "return_logprob" in request_refusal(req, supports_logprobs=False)


def test_refused_requests_of_a_batch_end_and_the_others_go_on(monkeypatch):
    fake_modules(
        monkeypatch, {"sglang.srt.managers.schedule_batch": {"FINISH_ABORT": lambda *args: ("abort", *args)}}
    )
    plain, refused = make_request(), make_request(lora_id="0f")
    ended = make_request(lora_id="0f", to_finish="ended by its client")
    abort_refused_requests([plain, refused, ended], supports_logprobs=True)
    assert plain.to_finish is None
    assert ended.to_finish == "ended by its client"
    abort, message, status, kind = refused.to_finish
    assert (abort, int(status), kind) == ("abort", 400, "BadRequestError")
    assert "LoRA" in message
