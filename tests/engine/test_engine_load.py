"""`Engine.load` from folders: what loads says the same in every mode, the rest is refused in one line."""

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from ddtree.config import EngineConfig, Mode, SamplingParams
from ddtree.engine import engine as engine_module
from ddtree.engine.engine import Engine
from ddtree.engine.request import FinishReason, Request
from ddtree.errors import (
    CheckpointError,
    DrafterMismatchError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from engine_kit import BLOCK_SIZE, PROMPT, VOCAB_SIZE
from tiny_models import MAX_POSITIONS, tiny_llama, write_tiny_drafter

TINY = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128, "factor": 4.0,
    "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
}  # fmt: skip


def save_tokenizer(folder):
    """Token id = byte, as a byte-level tokenizer.json without merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny target with tokenizer and its drafter, on disk."""
    folder = tmp_path_factory.mktemp("models")
    model = tiny_llama(vocab_size=VOCAB_SIZE)
    model.save_pretrained(folder / "target")
    save_tokenizer(folder / "target")
    return folder / "target", write_tiny_drafter(folder / "drafter", model, BLOCK_SIZE)


@pytest.fixture(autouse=True)
def same_threads_after():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def config_of(model, drafter="none", **fields):
    settings = {"device": "cpu", "dtype": "float32", "threads": 1, "max_context_tokens": 64} | fields
    return EngineConfig(model=str(model), drafter=str(drafter), **settings)


def assert_refused(monkeypatch, folder, error, words):
    """Loading is refused in one line, before weights or a tokenizer are read."""

    def read(*_args, **_fields):
        raise AssertionError("read before the refusal")

    monkeypatch.setattr(engine_module, "load_target", read)
    monkeypatch.setattr(engine_module, "load_tokenizer", read)
    with pytest.raises(error, match=words) as caught:
        Engine.load(config_of(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("max_context", [64, 4096])
def test_a_pair_on_disk_says_the_same_in_every_mode(folders, max_context):
    engine = Engine.load(config_of(*folders, max_context_tokens=max_context))
    assert engine.max_context_tokens == min(max_context, MAX_POSITIONS)
    assert engine.pair.block_size == BLOCK_SIZE
    assert engine.eos_tokens == {2}  # of generation_config.json
    sampling = SamplingParams(max_tokens=10_000, ignore_eos=True, temperature=1.0)
    prompt = PROMPT if max_context == 64 else PROMPT * 25
    expected = engine.generate(Request(prompt, sampling, Mode.AR))
    assert expected.finish_reason is FinishReason.LENGTH
    assert len(prompt) + len(expected.tokens) == engine.max_context_tokens
    for mode, budget in [(Mode.CHAIN, 1), (Mode.TREE, 16), (Mode.TREE, "auto")]:
        got = engine.generate(Request(prompt, sampling, mode, budget))
        assert (got.tokens, got.text) == (expected.tokens, expected.text), (mode, budget)
    assert engine.encode("hi", chat=False) == tuple(engine.tokenizer.encode("hi"))


def test_measured_threads_and_dtype_load_too(folders):
    engine = Engine.load(config_of(*folders, threads=0, dtype="auto"))
    assert engine.target.dtype in (torch.float32, torch.bfloat16)
    assert len(engine.generate(Request(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))).tokens) == 5


def test_a_drafter_of_another_target_is_refused(folders, tmp_path):
    other = write_tiny_drafter(tmp_path / "drafter", tiny_llama(vocab_size=VOCAB_SIZE, hidden_size=72))
    with pytest.raises(DrafterMismatchError, match="hidden_size is 72, the target's 48"):
        Engine.load(config_of(folders[0], other))


def save_model(folder, model_type, **fields):
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **TINY, **fields)).save_pretrained(
        folder
    )


def test_a_saved_model_with_recurrent_state_is_refused(tmp_path, monkeypatch):
    save_model(tmp_path, "mamba", state_size=4)
    assert_refused(monkeypatch, tmp_path, UnsupportedModelError, "target mamba cannot be used.*cannot branch")


@pytest.mark.parametrize("model_type", ["bloom", "rwkv"])
def test_a_saved_model_that_does_not_honour_a_tree_is_refused(tmp_path, model_type):
    """Its config says nothing of it: the loaded weights are tried on a small tree."""
    save_model(tmp_path, model_type, attention_hidden_size=32, n_layer=2, n_head=4)
    save_tokenizer(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"target {model_type} cannot be used with") as caught:
        Engine.load(config_of(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_saved_encoder_decoder_is_refused(tmp_path, monkeypatch):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": VOCAB_SIZE}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path)
    assert_refused(monkeypatch, tmp_path, UnsupportedModelError, "target t5 cannot be used.*encoder-decoder")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "deepseek_v3"}, "multi-head latent attention"),
        ({"model_type": "jamba"}, "state"),
        ({"model_type": "bart"}, "encoder-decoder"),
        ({"model_type": "whisper"}, "encoder-decoder"),
        ({"model_type": "bloom"}, "max_position_embeddings"),
        ({"model_type": "mpt"}, "max_position_embeddings"),
        ({"model_type": "llama", **TINY, "rope_parameters": LONGROPE}, "rope_type longrope"),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_a_config_without_trees_is_refused(tmp_path, monkeypatch, config, words):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_refused(monkeypatch, tmp_path, UnsupportedModelError, f"target .* cannot be used.*({words})")


def test_a_context_length_of_nothing_is_refused(tmp_path, monkeypatch):
    """Some transformers check the field themselves; either way it is named."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", **TINY, "max_position_embeddings": None})
    )
    assert_refused(monkeypatch, tmp_path, ModelError, "max_position_embeddings")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": "no_such_model"}', '{"vocab_size": 3'])
def test_a_broken_config_is_refused(tmp_path, monkeypatch, text):
    (tmp_path / "config.json").write_text(text)
    assert_refused(monkeypatch, tmp_path, CheckpointError, "config.json cannot be used: .")


def test_a_folder_without_weights_or_tokenizer_is_refused(folders, tmp_path):
    shutil.copy(folders[0] / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="cannot be loaded") as caught:
        Engine.load(config_of(tmp_path))
    assert "\n" not in str(caught.value)
    shutil.copy(folders[0] / "model.safetensors", tmp_path)
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* cannot be used") as caught:
        Engine.load(config_of(tmp_path))
    assert "\n" not in str(caught.value)


def test_auto_drafter_is_refused_before_the_target_is_touched(folders, monkeypatch):
    def read(*_args):
        raise AssertionError("the target was read before the refusal")

    for name in ("resolve_target", "load_target_config", "load_target", "load_tokenizer"):
        monkeypatch.setattr(engine_module, name, read)
    with pytest.raises(ModelNotFoundError, match="drafter='auto': no drafter ships for"):
        Engine.load(config_of(folders[0], "auto"))


def test_a_folder_that_is_no_drafter_is_refused_before_weights_are_read(folders, monkeypatch):
    def read(*_args):
        raise AssertionError("weights were read before the refusal")

    monkeypatch.setattr(engine_module, "load_target", read)
    with pytest.raises(UnsupportedModelError, match=r"architectures=.*LlamaForCausalLM"):
        Engine.load(config_of(folders[0], folders[0]))
