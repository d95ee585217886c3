"""A GGUF file becomes the checkpoint it was made from: same weights, same answers, same tokens."""

import json

import pytest
import torch

from ddtree.dequantise import halves_from_pairs, weight_name, write_checkpoint
from ddtree.errors import CheckpointError

gguf = pytest.importorskip("gguf")

HEADS, KV_HEADS, HEAD_DIM, LAYERS, HIDDEN = 4, 2, 8, 2, 32
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def byte_tokens():
    """The 256 byte symbols of byte-level BPE."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def tiny_llama(vocab_size):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=vocab_size, max_position_embeddings=64,
        rms_norm_eps=1e-5, rope_theta=100000.0, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    return model


def pairs_from_halves(weight, num_heads):
    """What llama.cpp does to query and key rows when it makes the file."""
    return weight.view(num_heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def gguf_weights(model):
    """Names and values of the weights as the GGUF file holds them."""
    state = model.state_dict()
    yield "token_embd.weight", state["model.embed_tokens.weight"]
    yield "output_norm.weight", state["model.norm.weight"]
    for layer in range(LAYERS):
        for theirs, ours in NAMES.items():
            weight = state[f"model.layers.{layer}.{theirs}.weight"]
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(ours)
            yield f"blk.{layer}.{ours}.weight", pairs_from_halves(weight, heads) if heads else weight


def write_gguf(path, model, tokens, architecture="llama"):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ Ġ", "h i", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, weight in gguf_weights(model):
        writer.add_tensor(name, weight.numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A tiny model and the checkpoint folder that comes back from its GGUF file."""
    tokens = [*SPECIAL, *byte_tokens(), "ĠĠ", "hi", "12"]
    folder = tmp_path_factory.mktemp("gguf")
    model = tiny_llama(len(tokens))
    write_gguf(folder / "tiny.gguf", model, tokens)
    write_checkpoint(folder / "tiny.gguf", folder / "checkpoint")
    return model, folder / "checkpoint"


def test_weights_and_logits_come_back(pair):
    from transformers import AutoModelForCausalLM

    model, folder = pair
    back = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    state = back.state_dict()
    assert state.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(state[name], weight), name
    tokens = torch.arange(12).unsqueeze(0)  # [1, 12]
    with torch.no_grad():
        assert torch.equal(back(tokens).logits, model(tokens).logits)


def test_config_keeps_what_changes_the_answer(pair):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(pair[1])
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings is True
    assert config.eos_token_id == 2
    assert json.loads((pair[1] / "generation_config.json").read_text())["eos_token_id"] == 2


def test_tokenizer_round_trip_and_digits(pair):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair[1])
    for text in ("hi  12", "a\n\n b\t3.14 é 木", "<|im_start|>x<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # "12" is a token, and "Ġ1" could begin with the space: a digit takes neither neighbour.
    assert tokenizer.tokenize("12") == ["1", "2"]
    assert tokenizer.tokenize("  1") == ["ĠĠ", "1"]
    assert tokenizer.tokenize("hi") == ["hi"]


def test_chat_template_and_special_tokens(pair):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair[1])
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>hi<|im_end|>"
    assert tokenizer.encode(text)[0] == 1
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.decode([1, 2, 0], skip_special_tokens=True) == ""


def test_rotary_rows_are_the_inverse_of_the_file_s_order():
    weight = torch.arange(HEADS * HEAD_DIM * 3).view(HEADS * HEAD_DIM, 3)  # [heads * head_dim, 3]
    assert not torch.equal(pairs_from_halves(weight, HEADS), weight)
    assert torch.equal(halves_from_pairs(pairs_from_halves(weight, HEADS), HEADS), weight)


def test_unknown_architecture_is_refused(tmp_path):
    tokens = [*SPECIAL, *byte_tokens()]
    write_gguf(tmp_path / "other.gguf", tiny_llama(len(tokens)), tokens, architecture="mamba")
    with pytest.raises(
        CheckpointError, match=r"general\.architecture='mamba' is not supported: 'llama' only"
    ):
        write_checkpoint(tmp_path / "other.gguf", tmp_path / "out")


@pytest.mark.parametrize("name", ["blk.0.ssm_in.weight", "rope_freqs.weight", "blk.3.token_embd.weight"])
def test_unknown_weight_is_refused(name):
    with pytest.raises(CheckpointError, match="is not one of a Llama model"):
        weight_name(name)
