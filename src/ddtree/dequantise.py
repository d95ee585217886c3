"""Turns a quantised GGUF file of a Llama model into an ordinary checkpoint folder.

    python -m ddtree.dequantise MODEL.gguf FOLDER

The folder holds what transformers and SGLang load: `config.json`, `model.safetensors` (bfloat16),
the tokenizer with its chat template, and `generation_config.json`. The weights are those of the
quantised file, so they are not bit for bit the ones it was made from. The result depends on no
version of transformers. Run as a program of its own, its memory goes back to the system.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree.errors import CheckpointError

if TYPE_CHECKING:
    import torch

CONTROL_TOKEN = 3
ROTARY_PROJECTIONS = ("attn_q", "attn_k")
MODEL_WEIGHTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_checkpoint(gguf_file: Path, folder: Path) -> None:
    """Write the model of `gguf_file` into `folder`, which is made if need be.

    Raises:
        CheckpointError: the file is no Llama model with a byte-level BPE tokenizer.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for name, value in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")):
        if fields.get(name) != value:
            raise CheckpointError(
                f"{gguf_file}: {name}={fields.get(name)!r} is not supported: {value!r} only"
            )
    folder.mkdir(parents=True, exist_ok=True)
    weights = read_weights(reader, fields)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    documents = {
        "config.json": model_config(fields, is_tied="lm_head.weight" not in weights),
        "generation_config.json": generation_config(fields),
        "tokenizer.json": tokenizer(fields),
        "tokenizer_config.json": tokenizer_config(fields),
    }
    for name, document in documents.items():
        (folder / name).write_text(
            json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def read_weights(reader: Any, fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """All weights in bfloat16, under the names transformers gives them."""
    import numpy as np
    import torch
    from gguf.quants import dequantize

    num_heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        values = np.require(dequantize(tensor.data, tensor.tensor_type), requirements="W")
        weight = torch.from_numpy(values)  # [out] or [out, in]
        part = tensor.name.split(".")[-2]
        if part in ROTARY_PROJECTIONS:
            weight = halves_from_pairs(weight, num_heads[part])
        weights[weight_name(tensor.name)] = weight.to(torch.bfloat16, copy=True).contiguous()
    return weights


def weight_name(name: str) -> str:
    """The name in transformers: `blk.0.attn_q.weight` is `model.layers.0.self_attn.q_proj.weight`."""
    *block, part, kind = name.split(".")
    if not block and part in MODEL_WEIGHTS:
        return f"{MODEL_WEIGHTS[part]}.{kind}"
    if block[:1] == ["blk"] and part in LAYER_WEIGHTS:
        return f"model.layers.{block[1]}.{LAYER_WEIGHTS[part]}.{kind}"
    raise CheckpointError(f"weight {name!r} is not one of a Llama model")


def halves_from_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of a query or key projection, `[num_heads * head_dim, hidden]`.

    GGUF rotates neighbouring rows (2i, 2i+1) of a head together, transformers rows (i, i + head_dim / 2).
    """
    paired = weight.view(num_heads, -1, 2, weight.shape[-1])  # [num_heads, head_dim / 2, 2, hidden]
    return paired.transpose(1, 2).reshape(weight.shape)


def model_config(fields: Mapping[str, Any], *, is_tied: bool) -> dict[str, Any]:
    """`config.json` of the model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": is_tied,
        "dtype": "bfloat16",
        **special_token_ids(fields),
    }


def generation_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`generation_config.json`: where a generation begins and ends."""
    return special_token_ids(fields)


def special_token_ids(fields: Mapping[str, Any]) -> dict[str, int]:
    ids = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }
    padding = fields.get("tokenizer.ggml.padding_token_id")
    return ids if padding is None else {**ids, "pad_token_id": padding}


def tokenizer(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`tokenizer.json`: byte-level BPE in which every digit is a token of its own."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    splitters = [digits, byte_level] if fields["tokenizer.ggml.pre"] == "smollm" else [byte_level]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": token, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": True}
            for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splitters},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }  # fmt: skip


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`tokenizer_config.json`: special tokens, context length and chat template."""
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
        **{
            name.removesuffix("_id"): tokens[token_id] for name, token_id in special_token_ids(fields).items()
        },
    }


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))
