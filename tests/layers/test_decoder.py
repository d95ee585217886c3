"""The plain decoder stack against transformers' own Llama, Qwen2 and Qwen3."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ddtree.layers.decoder import DecoderLayer, DecoderSpec, DecoderStack, rms_norm
from ddtree.layers.linear import GateUp, Linear
from ddtree.layers.rotary import RotaryTable
from ddtree.layers.window import Window
from layer_kit import make_window, random_layers, random_tree

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
ATOL = 2e-5


def tiny_model(family):
    torch.manual_seed(5)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape)
            weight.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)
    return model.eval()


def stack_of(model):
    """The stack with a transformers model's weights."""
    config = model.config
    layers = []
    for source in model.model.layers:
        attention, mlp = source.self_attn, source.mlp
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
        layers.append(
            DecoderLayer(
                input_norm=source.input_layernorm.weight,
                qkv=Linear(torch.cat([part.weight for part in parts]), bias),
                q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
                k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
                out=Linear(attention.o_proj.weight),
                post_norm=source.post_attention_layernorm.weight,
                gate_up=GateUp(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))),
                down=Linear(mlp.down_proj.weight),
            )
        )
    head_dim = model.model.layers[0].self_attn.head_dim
    spec = DecoderSpec(
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim,
        config.rms_norm_eps,
        (None,) * len(layers),
    )
    return DecoderStack(spec, layers, RotaryTable(model.model.rotary_emb.inv_freq, 128, torch.float32))


def cache_for(stack, capacity=64):
    spec = stack.spec
    return torch.zeros(len(stack.layers), 2, spec.num_kv_heads, capacity, spec.head_dim)


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def model(request):
    return tiny_model(request.param)


@torch.inference_mode()
def test_prefill_then_steps_equal_transformers(model):
    stack, tokens = stack_of(model), torch.randint(0, 97, (20,))
    expected = model(tokens[None], output_hidden_states=True)
    kv, embedding = cache_for(stack), model.get_input_embeddings()
    outputs, taps = [], []
    for start, stop in ((0, 13), (13, 14), (14, 20)):
        window = Window.at(start, torch.arange(start, stop), None)
        hidden, tap = stack.forward(embedding(tokens[start:stop]), window, kv, (0, 1))
        outputs.append(rms_norm(hidden, model.model.norm.weight, stack.spec.rms_norm_eps))
        taps.append(tap)
    torch.testing.assert_close(torch.cat(outputs), expected.hidden_states[-1][0], atol=ATOL, rtol=1e-4)
    expected_taps = torch.cat([expected.hidden_states[i + 1][0] for i in (0, 1)], -1)
    torch.testing.assert_close(torch.cat(taps), expected_taps, atol=ATOL, rtol=1e-4)


@torch.inference_mode()
def test_each_tree_node_equals_its_own_path(model):
    """A tree pass gives every node what plain decoding of its path gives."""
    stack, embedding = stack_of(model), model.get_input_embeddings()
    prefix, nodes = torch.randint(0, 97, (9,)), torch.randint(0, 97, (8,))
    depths, mask = random_tree(8, seed=2)
    kv = cache_for(stack)
    stack.forward(embedding(prefix), Window.at(0, torch.arange(9), None), kv)
    window = Window(9 + depths, torch.tensor([9]), 64, mask, None)
    hidden, _ = stack.forward(embedding(nodes), window, kv)
    for i in range(8):
        path = torch.cat((prefix, nodes[mask[i].nonzero()[:, 0]]))
        expected = model(path[None], output_hidden_states=True).hidden_states[-1][0, -1]
        actual = rms_norm(hidden[i], model.model.norm.weight, stack.spec.rms_norm_eps)
        torch.testing.assert_close(actual, expected, atol=ATOL, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["causal", "full", "tree"])
def test_unknown_start_gives_the_same(kind):
    """What a CUDA graph captures (slots from the device, a longer extent) equals the host-known form."""
    spec, layers, rotary = random_layers(sliding_windows=(None, 6))
    stack, hidden = DecoderStack(spec, layers, rotary), torch.randn(7, 48)
    kv = torch.randn(2, 2, 2, 64, 16)
    other_kv = kv.clone()
    known, _ = stack.forward(hidden, make_window(7, 12, kind), kv)
    unknown, _ = stack.forward(hidden, make_window(7, 12, kind, kv_extent=64), other_kv)
    torch.testing.assert_close(known, unknown, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kv, other_kv, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_sliding_window_hides_distant_keys():
    spec, layers, rotary = random_layers(num_layers=1, sliding_windows=(4,))
    stack, hidden = DecoderStack(spec, layers, rotary), torch.randn(1, 48)
    kv = torch.randn(1, 2, 2, 64, 16)
    far, near = kv.clone(), kv.clone()
    far[:, :, :, :17] += 1.0  # the token at 20 sees positions 17 .. 20
    near[:, :, :, 17] += 1.0
    window = make_window(1, 20, "causal")
    expected, _ = stack.forward(hidden, window, kv)
    assert torch.equal(stack.forward(hidden, window, far)[0], expected)
    assert not torch.equal(stack.forward(hidden, window, near)[0], expected)
