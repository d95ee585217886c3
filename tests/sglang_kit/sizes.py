"""Sizes of the tiny pair, apart from what makes it, which imports transformers."""

VOCAB_SIZE = 300
BLOCK_SIZE = 8
EOS_TOKEN = 2
FIRST_PLAIN_TOKEN = 4  # behind the special tokens
