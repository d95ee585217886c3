"""Slots at different positions give the stock model's logits; the kernel gives the reference's attention."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, LlamaConfig, MambaConfig, T5Config

from ddtree.errors import ConfigError, UnsupportedModelError
from ddtree.train.batch_decoder import (
    BatchDecoder,
    decode_attention,
    decode_attention_torch,
    decode_unsupported_reason,
    graph_unsupported_reason,
)
from interpreter_kit import IS_INTERPRETER, run_interpreted
from tiny_models import tiny_llama, tiny_qwen3


def step_all(model, texts, starts, max_tokens=24):
    """Feed each text to its slot, slot b waiting for starts[b] steps at position 0; logits a text."""
    decoder = BatchDecoder(model, len(texts), max_tokens)
    logits = [[] for _ in texts]
    for now in range(max(len(text) + start for text, start in zip(texts, starts, strict=True))):
        places = [min(max(now - start, 0), len(t) - 1) for t, start in zip(texts, starts, strict=True)]
        tokens = torch.tensor([text[place] for text, place in zip(texts, places, strict=True)])
        out = decoder.step(tokens, torch.tensor(places))
        for b, (text, start) in enumerate(zip(texts, starts, strict=True)):
            if 0 <= now - start < len(text):
                logits[b].append(out[b])
    return [torch.stack(rows) for rows in logits]


def random_texts(lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, 211, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_steps_equal_the_full_forward(make):
    model = make()
    before = model.config._attn_implementation
    texts = random_texts([7, 24, 1, 15])  # the first stands still while others go on
    with torch.no_grad():
        expected = [model(torch.tensor([text])).logits[0] for text in texts]
    for got, want in zip(step_all(model, texts, starts=[0, 5, 9, 2]), expected, strict=True):
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    assert model.config._attn_implementation == before


def test_a_refilled_slot_forgets_the_text_before():
    model = tiny_llama()
    first, second = random_texts([20, 9])
    decoder = BatchDecoder(model, 2, 24)
    for text in (first, second):
        for place, token in enumerate(text):
            out = decoder.step(torch.tensor([token, 5]), torch.tensor([place, 0]))
    with torch.no_grad():
        expected = model(torch.tensor([second])).logits[0, -1]
    torch.testing.assert_close(out[0], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LlamaConfig(layer_types=["full_attention", "sliding_attention"], num_hidden_layers=2), "sliding"),
        (LlamaConfig(sliding_window=8), "sliding window of 8"),
        (LlamaConfig(kv_lora_rank=8), "latent attention"),
        (LlamaConfig(state_size=16), "recurrent state (state_size)"),
        (MambaConfig(), "linear_attention layers"),
        (T5Config(), "encoder-decoder"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "dynamic"),
    ],
)
def test_what_cannot_decode_says_why(config, reason):
    assert reason in decode_unsupported_reason(config)


def test_refusals_are_raised():
    model = tiny_llama(sliding_window=8)
    with pytest.raises(UnsupportedModelError, match="llama cannot generate a corpus here: its layers"):
        BatchDecoder(model, 2, 8)
    with pytest.raises(ConfigError, match="max_tokens=513 is not allowed"):
        BatchDecoder(tiny_llama(), 2, 513)


def test_capped_scores_are_refused():
    config = Gemma2Config(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, layer_types=["full_attention"], use_sliding_window=False,
        pad_token_id=0,
    )  # fmt: skip
    decoder = BatchDecoder(Gemma2ForCausalLM(config).eval(), 1, 8)
    with pytest.raises(UnsupportedModelError, match="caps its scores"):
        decoder.step(torch.tensor([1]), torch.tensor([0]))


def test_experts_are_not_captured():
    assert graph_unsupported_reason(LlamaConfig()) is None
    assert "num_local_experts" in graph_unsupported_reason(LlamaConfig(num_local_experts=4))
    assert decode_unsupported_reason(GPT2Config()) is None


def attention_inputs(positions, num_heads, kv_heads, head_dim, max_tokens, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_heads + max_tokens)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    slots = len(positions)
    cache = normal(2, slots, kv_heads, max_tokens, head_dim)
    for b, position in enumerate(positions):
        cache[:, b, :, position + 1 :] = float("inf")  # what a slot must never read
    return normal(slots, num_heads, head_dim), cache[0], cache[1], torch.tensor(positions)


def check_kernel(device, dtype, atol, shapes):
    from ddtree.train.triton_decode_attention import triton_decode_attention

    for num_heads, kv_heads, head_dim, max_tokens in shapes:
        positions = [0, 1, 62, 63, 64, max_tokens - 1]
        query, key, value, places = attention_inputs(
            positions, num_heads, kv_heads, head_dim, max_tokens, dtype
        )
        out = triton_decode_attention(*(x.to(device) for x in (query, key, value, places)), 0.2)
        finite = [x.masked_fill(x.isinf(), 0).float() for x in (key, value)]
        expected = decode_attention_torch(query.float(), *finite, places, 0.2)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float().cpu(), expected, atol=atol, rtol=atol)


def test_reference_equals_one_softmax_a_head():
    query, key, value, places = attention_inputs([0, 3, 9], 6, 2, 8, 10)
    key, value = key.masked_fill(key.isinf(), 0), value.masked_fill(value.isinf(), 0)
    out = decode_attention(query, key, value, places, 0.3)
    for b, position in enumerate(places.tolist()):
        for head in range(6):
            seen = slice(0, position + 1)
            shares = torch.softmax(key[b, head // 3, seen] @ query[b, head] * 0.3, 0)
            torch.testing.assert_close(out[b, head], shares @ value[b, head // 3, seen])


SHAPES = [(6, 2, 32, 130), (17, 1, 16, 66)]


@pytest.mark.skipif(not IS_INTERPRETER, reason="runs in the interpreter's own process")
def test_interpreted_kernel_equals_the_reference():
    check_kernel("cpu", torch.float32, 1e-5, SHAPES)


@pytest.mark.gpu
@pytest.mark.skipif(IS_INTERPRETER, reason="needs compiled kernels")
def test_compiled_kernel_equals_the_reference():
    check_kernel("cuda", torch.float32, 1e-5, SHAPES)
    check_kernel("cuda", torch.bfloat16, 2e-2, [*SHAPES, (9, 3, 64, 200), (32, 8, 128, 500)])


@pytest.mark.skipif(IS_INTERPRETER, reason="is the interpreter's own process")
def test_kernel_through_the_interpreter():
    pytest.importorskip("triton")
    assert run_interpreted(__file__) == 1
