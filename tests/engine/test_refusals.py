"""Damaged checkpoints and requests that cannot be honoured are refused in one line, never answered."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from ddtree.config import EngineConfig, Mode, SamplingParams
from ddtree.engine.engine import Engine
from ddtree.engine.request import Request
from ddtree.engine.sampling import apply_top_p
from ddtree.errors import CheckpointError, ConfigError
from tiny_models import tiny_llama

NUM_LAYERS, VOCAB_SIZE = 4, 256
SHARD = "model-0000{}-of-00002.safetensors"


def save_tokenizer(folder):
    """Token id = byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.fixture
def folder(tmp_path):
    """An untied target with its tokenizer, for a test to damage."""
    tiny_llama(vocab_size=VOCAB_SIZE, tie_word_embeddings=False).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def same_threads_after():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def load(folder):
    return Engine.load(
        EngineConfig(
            model=str(folder), drafter="none", device="cpu", dtype="float32", threads=1, max_context_tokens=64
        )
    )


def assert_refused(folder, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def edit_json(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_weights(folder, change):
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder):
    """Split the one file in two, the head in the second, with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: SHARD.format(2 if "lm_head" in name else 1) for name in weights}
    for file in set(weight_map.values()):
        save_file({name: weights[name] for name in weights if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_what_is_not_damaged_loads(folder):
    prompt = tuple(b"some text")
    expected = load(folder).generate(Request(prompt, SamplingParams(max_tokens=8), Mode.AR))
    shard(folder)
    assert (
        load(folder).generate(Request(prompt, SamplingParams(max_tokens=8), Mode.AR)).tokens
        == expected.tokens
    )


def test_a_missing_head_is_not_replaced_by_the_embedding(folder):
    edit_weights(folder, lambda weights: {k: v for k, v in weights.items() if k != "lm_head.weight"})
    assert_refused(folder, r"tensor lm_head\.weight is missing from .*a file of it may be missing")
    edit_json(folder / "config.json", tie_word_embeddings=True)
    load(folder)


@pytest.mark.parametrize("has_index", [True, False])
def test_a_missing_last_shard_is_refused(folder, has_index):
    shard(folder)
    (folder / SHARD.format(2)).unlink()
    if has_index:
        assert_refused(
            folder, r"00002-of-00002\.safetensors, named by model\.safetensors\.index\.json, is missing"
        )
    else:
        (folder / "model.safetensors.index.json").unlink()
        assert_refused(folder, r"tensor lm_head\.weight is missing")


def test_a_file_that_the_index_does_not_name_is_not_read(folder):
    shard(folder)
    save_file({"lm_head.weight": torch.zeros(3)}, folder / "model-old.safetensors")
    load(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float64, torch.int8])
def test_weights_of_other_formats_are_refused(folder, dtype):
    edit_weights(folder, lambda weights: {name: weight.to(dtype) for name, weight in weights.items()})
    assert_refused(folder, f"is {dtype}; bfloat16, float16 and float32 weights are allowed")


def test_layers_that_the_config_does_not_announce_are_refused(folder):
    edit_json(folder / "config.json", num_hidden_layers=NUM_LAYERS - 1)
    assert_refused(folder, r"has tensor model\.layers\.3\..*, config.json says num_hidden_layers=3")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: it must be a whole number from 1 to 1024"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"max_position_embeddings": 15}, "max_position_embeddings=15: it must be a whole number from 16"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "rope_parameters=.*not finite"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_parameters=.*not finite"),
    ],
)
def test_sizes_and_rope_values_that_cannot_be_are_refused(folder, fields, words):
    edit_json(folder / "config.json", **fields)
    assert_refused(folder, words)


@pytest.mark.parametrize(
    "eos", ["abc", [[1]], {"a": 1}, -5, VOCAB_SIZE, 1.0, True, [2, VOCAB_SIZE]], ids=repr
)
def test_end_tokens_outside_the_vocabulary_are_refused(folder, eos):
    edit_json(folder / "generation_config.json", eos_token_id=eos)
    assert_refused(folder, "has eos_token_id=.*: token ids from 0 to 255 are allowed")


@pytest.mark.parametrize("eos", [[], [0, VOCAB_SIZE - 1], 3], ids=repr)
def test_end_tokens_of_the_vocabulary_are_taken(folder, eos):
    edit_json(folder / "generation_config.json", eos_token_id=eos)
    assert load(folder).eos_tokens == set(eos if isinstance(eos, list) else [eos])


@pytest.mark.parametrize("template", ["{% if", "{{ raise_exception('nope') }}", "{{ 1 / 0 }}"])
def test_a_broken_chat_template_is_refused(folder, template):
    engine = load(folder)
    engine.tokenizer.chat_template = template
    with pytest.raises(CheckpointError, match=f"the chat template in {folder} cannot be used: .*; .*--raw"):
        engine.encode("Hi")
    assert engine.encode("Hi", chat=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_no_numbers_are_refused_once_they_are_used(folder, monkeypatch, temperature):
    edit_weights(folder, lambda weights: {k: v * torch.nan for k, v in weights.items()})
    engine = load(folder)
    request = Request((1, 2, 3), SamplingParams(temperature=temperature), Mode.AR)
    with pytest.raises(
        CheckpointError, match=f"logits are NaN or infinite: the checkpoint in {folder} is damaged"
    ):
        engine.generate(request)
    assert not engine.lock.locked()
    monkeypatch.setenv("DDTREE_CACHE", str(folder.parent))
    with pytest.raises(CheckpointError, match=f"; delete {folder} to have it made anew$"):
        engine.generate(request)


def test_a_folder_made_here_says_how_to_have_it_made_anew(folder, monkeypatch):
    monkeypatch.setenv("DDTREE_CACHE", str(folder.parent))
    content = (folder / "model.safetensors").read_bytes()
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        (folder / name).write_bytes(content[:100])
        assert_refused(folder, f"; delete {folder} to have it made anew$")


def test_a_stock_model_with_a_missing_tensor_is_refused(tmp_path):
    """transformers fills what is missing with random numbers."""
    config = AutoConfig.for_model(
        "mistral", vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, sliding_window=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    load(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(tmp_path, lambda weights: {k: v for k, v in weights.items() if k != name})
    assert_refused(tmp_path, f"1 tensors are missing from {tmp_path}, {name} first")


@pytest.mark.parametrize(
    "prompt", ["text", b"text", ("a",), (1.0,), (True,), None, 5, {1: 2}, ((1,),)], ids=repr
)
def test_a_prompt_that_is_no_tuple_of_token_ids_is_refused(prompt):
    with pytest.raises(
        ConfigError, match=r"^prompt_tokens=.* is not allowed: a tuple of token ids; encode a text"
    ):
        Request(prompt)


def test_a_tiny_top_p_keeps_the_most_likely_token():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 5.0, -1.0]])
    kept = apply_top_p(logits, 1e-50)
    assert kept.isfinite().tolist() == [[False, True, False], [True, False, False]]


def test_the_largest_bias_stays_a_number(folder):
    sampling = SamplingParams(
        max_tokens=3, temperature=2e-5, repetition_penalty=10.0, logit_bias={7: 1e30, 8: -1e30}
    )
    assert load(folder).generate(Request((7, 8), sampling, Mode.AR)).tokens == (7, 7, 7)
