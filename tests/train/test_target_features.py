"""The frozen target on packed rows against each conversation run alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel

from ddtree.errors import ConfigError, UnsupportedModelError
from ddtree.train.packed_batch import PackedBatch
from ddtree.train.target_features import FrozenTarget
from packed_kit import pack, random_conversations
from tiny_models import spread_weights, tiny_llama, tiny_qwen3

ROW_TOKENS = 32
ROWS = ((9, 14), (20,))  # tokens of each conversation
TAPS = (0, 2)
VOCAB = 211


def tiny_gemma3(**overrides):
    """Alternating sliding and full attention, scaled embeddings."""
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2, **overrides,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    spread_weights(model, seed=0, scale=0.1)
    return model


def llama():
    """FlexAttention has no heads of fewer than 16 numbers on CUDA."""
    return tiny_llama(num_heads=3, num_kv_heads=1)


MODELS = {"llama": llama, "qwen3": tiny_qwen3, "gemma3": tiny_gemma3}


@pytest.fixture(params=sorted(MODELS))
def model(request):
    return MODELS[request.param]()


@pytest.fixture
def batch() -> PackedBatch:
    conversations = iter(random_conversations([n for row in ROWS for n in row], VOCAB))
    rows = [[next(conversations) for _ in row] for row in ROWS]
    return pack(rows, ROW_TOKENS, [[3, 12], [2, 9]], draft_depth=7)


def alone(model, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Taps and final hidden states of each conversation by itself, in the packed layout; zeros elsewhere."""
    hidden_size = model.config.hidden_size
    taps = torch.zeros(len(ROWS), ROW_TOKENS, len(TAPS) * hidden_size)
    hidden = torch.zeros(len(ROWS), ROW_TOKENS, hidden_size)
    for r, lengths in enumerate(ROWS):
        start = 0
        for n in lengths:
            here = slice(start, start + n)
            with torch.no_grad():
                output = model.get_decoder()(batch.tokens[r : r + 1, here], output_hidden_states=True)
            taps[r, here] = torch.cat([output.hidden_states[i + 1][0] for i in TAPS], -1)
            hidden[r, here] = output.last_hidden_state[0]
            start += n
    return taps, hidden


def used(batch: PackedBatch) -> Tensor:
    """[rows, row_tokens] bool, where a conversation's tokens are."""
    lengths = torch.tensor([sum(lengths) for lengths in ROWS])
    return torch.arange(ROW_TOKENS) < lengths[:, None]


def test_packed_conversations_do_not_see_each_other(model, batch):
    expected_taps, expected_hidden = alone(model, batch)
    target = FrozenTarget(model, TAPS, "dense")
    taps, (same_taps, hidden) = target.taps(batch), target.taps_and_hidden(batch)
    here = used(batch)
    torch.testing.assert_close(taps[here], expected_taps[here], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden[here], expected_hidden[here], rtol=1e-5, atol=1e-5)
    assert torch.equal(taps, same_taps)


def test_the_tolerance_tells_a_dropped_document_mask(model, batch):
    target = FrozenTarget(model, TAPS, "dense")
    leaking = replace(batch, document_starts=torch.zeros_like(batch.document_starts))
    difference = (target.taps(leaking) - target.taps(batch)).abs().amax(-1)
    first, second = ROWS[0]
    assert difference[0, :first].max() == 0
    assert difference[0, first : first + second].min() > 1e-3


def test_padding_gives_finite_features(model, batch):
    features = FrozenTarget(model, TAPS, "dense").taps_and_hidden(batch)
    assert features.taps.isfinite().all()
    assert features.hidden.isfinite().all()


def test_taps_run_no_layer_after_the_last_tapped(model, batch):
    ran = []
    for i, layer in enumerate(model.get_decoder().layers):
        layer.register_forward_hook(lambda *_args, i=i: ran.append(i))
    target = FrozenTarget(model, (0, 1), "dense")
    target.taps(batch)
    assert ran == [0, 1]
    ran.clear()
    target.taps_and_hidden(batch)
    assert ran == [0, 1, 2, 3]


def test_embedding_and_head_are_the_models_own(model):
    target = FrozenTarget(model, TAPS, "dense")
    tokens = torch.tensor([[5, 7]])
    assert torch.equal(target.embed(tokens), model.get_input_embeddings()(tokens))
    hidden = torch.randn(3, model.config.hidden_size)
    torch.testing.assert_close(hidden @ target.head_weight.T, model.lm_head(hidden))


def test_nothing_can_be_trained_in_the_target(model, batch):
    target = FrozenTarget(model, TAPS, "dense")
    assert not any(weight.requires_grad for weight in model.parameters())
    assert not target.taps(batch).requires_grad
    assert not target.embed(batch.tokens).requires_grad


def test_autocast_does_not_reach_the_target(batch):
    target = FrozenTarget(tiny_llama(), TAPS, "dense")
    with torch.autocast("cpu", torch.bfloat16):
        low = target.taps(batch)
    assert torch.equal(low, target.taps(batch))


def biased_head():
    model = tiny_llama(tie_word_embeddings=False)
    model.lm_head = torch.nn.Linear(48, VOCAB)
    return model


def with_config(model, **fields):
    for name, value in fields.items():
        setattr(model.config, name, value)
    return model


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (biased_head, "output head has a bias"),
        (lambda: tiny_gemma3(final_logit_softcapping=30.0), "final_logit_softcapping=30.0"),
        (lambda: with_config(tiny_llama(), logits_scaling=8.0), "logits_scaling=8.0"),
        (lambda: with_config(tiny_llama(), logit_scale=0.0625), "logit_scale=0.0625"),
        (lambda: with_config(tiny_llama(), attention_chunk_size=8), "chunked attention"),
        (lambda: with_config(tiny_llama(), conv_kernel=4), "recurrent state"),
        (lambda: with_config(tiny_llama(), is_encoder_decoder=True), "encoder-decoder"),
        (
            lambda: with_config(tiny_llama(), layer_types=["linear_attention"] + ["full_attention"] * 3),
            "linear_attention layers",
        ),
    ],
)
def test_targets_that_cannot_be_handled_are_refused(make, named):
    with pytest.raises(UnsupportedModelError, match=named):
        FrozenTarget(make(), TAPS, "dense")


@pytest.mark.parametrize("layer_ids", [(), (2, 1), (1, 1), (0, 4), (-1, 2)])
def test_layers_that_the_target_lacks_are_refused(layer_ids):
    with pytest.raises(ConfigError, match="target_layer_ids"):
        FrozenTarget(tiny_llama(), layer_ids, "dense")


def test_another_name_of_the_layer_list_is_found():
    config = GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=48, n_layer=4, n_head=4, bos_token_id=1)
    model = GPT2LMHeadModel(config).eval()
    spread_weights(model, seed=0, scale=0.1)
    conversation = random_conversations([9], VOCAB)
    batch = pack([conversation], 9, [[2]], draft_depth=3)
    taps = FrozenTarget(model, TAPS, "dense").taps(batch)
    with torch.no_grad():
        states = model(conversation[0][None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(taps, torch.cat([states[i + 1] for i in TAPS], -1), rtol=1e-5, atol=1e-5)


def test_compiled_layers_give_each_layer_its_own_features(batch, monkeypatch):
    """Hooks change from layer to layer and from call to call; one compiled graph serves all layers."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    target, compiled = (FrozenTarget(tiny_llama(), TAPS, "dense") for _ in range(2))
    compiled.compile_layers()
    for tokens in (batch.tokens, batch.tokens.flip(1)):
        changed = replace(batch, tokens=tokens)
        torch.testing.assert_close(compiled.taps(changed), target.taps(changed))


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(MODELS))
def test_flex_on_cuda_gives_the_dense_features(name, batch):
    batch = batch.to(torch.device("cuda"))
    dense = FrozenTarget(MODELS[name]().cuda(), TAPS, "dense").taps_and_hidden(batch)
    compiled = FrozenTarget(MODELS[name]().cuda(), TAPS, "flex")
    compiled.compile_layers()
    here = used(batch).cuda()
    for flex, expected in zip(compiled.taps_and_hidden(batch), dense, strict=True):
        # FlexAttention multiplies float32 in TF32, 10 bits.
        torch.testing.assert_close(flex[here], expected[here], rtol=0.02, atol=0.02)
