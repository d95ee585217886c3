"""A tiny random target on disk, on which a whole training run goes through on a CPU, nothing downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

# In the order of SmolLM2's first tokens, so that 3 is the mask token here too.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>")
END_OF_TURN = "<|im_end|>"
VOCAB_SIZE = 300
MAX_POSITIONS = 4096
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Enough text for the merges that fill the vocabulary.
SAMPLE = (
    "<|im_start|>user", "<|im_start|>assistant", "Write a Python function that returns the sum of a list.",
    "How many apples does the farmer have in the end?", "Explain why the sky is blue in simple words.",
)  # fmt: skip


def write_tiny_target(folder: Path, seed: int = 0) -> Path:
    """Write a random 4-layer Llama with a ChatML byte tokenizer of 300 tokens; returns the folder."""
    logging.disable_progress_bar()
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_target(len(tokenizer), seed).save_pretrained(folder)
    return folder


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<repo_name>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
    )


def tiny_target(vocab_size: int, seed: int) -> LlamaForCausalLM:
    """A Llama in float32 whose logits differ clearly from token to token."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)
        # Turns should end now and then, and have no other special token in them.
        head = model.get_output_embeddings().weight
        head[: len(SPECIAL_TOKENS)] *= 0.1
        head[SPECIAL_TOKENS.index(END_OF_TURN)] *= 40.0
    return model
