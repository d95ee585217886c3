"""Conversations on disk: safetensors shards that a writer appends to and a `Corpus` reads.

A shard `shard-00000.safetensors` holds `tokens` (uint16, uint32 above 65,536 ids; conversations end to
end), `lengths` and `answer_starts` (int32), `temperatures` (float32) and `ids` (int64), one entry a
conversation. Its header has the format, the vocabulary size and the fingerprint of the data settings.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ddtree.config import check
from ddtree.errors import CheckpointError, ConfigError
from ddtree.train.whole_file import write_whole

logger = logging.getLogger(__name__)

FORMAT = "ddtree-corpus-1"
# One conversation in so many may be held out, so that a growing corpus keeps the same ones.
HELD_OUT_EVERY = 2
DTYPES = {
    "lengths": np.int32,
    "answer_starts": np.int32,
    "temperatures": np.float32,
    "ids": np.int64,
}
# SplitMix64's finaliser, as in `ddtree.tree.noise`.
GOLDEN, MULTIPLIERS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Conversation(NamedTuple):
    """A user turn and its answer, with the chat template around them.

    `tokens` [n] uint16 or uint32; `answer_start` is the index of the answer's first token, `temperature`
    that of the answer, `id` its number in the corpus.
    """

    tokens: NDArray[Any]
    answer_start: int
    temperature: float
    id: int


@dataclass(frozen=True, slots=True)
class ShardData:
    """The arrays of one or more shards: `tokens` [num_tokens], the others [conversations]."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    answer_starts: NDArray[np.int32]
    temperatures: NDArray[np.float32]
    ids: NDArray[np.int64]


class Corpus:
    """All conversations of a folder, in memory; `corpus[i]` is a view.

    Args:
        data: the arrays of all shards.
        vocab_size: number of token ids.
        fingerprint: what tells these data settings from others.
    """

    def __init__(self, data: ShardData, vocab_size: int, fingerprint: str) -> None:
        self.vocab_size, self.fingerprint = vocab_size, fingerprint
        self._data = data
        self._ends = np.cumsum(data.lengths, dtype=np.int64)  # [conversations]

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read every shard of a folder.

        Raises:
            CheckpointError: the folder has no shard, or a shard is broken or unlike the first.
        """
        paths = shard_paths(folder)
        if not paths:
            raise CheckpointError(f"{folder} holds no shards of conversations; generate the corpus first")
        vocab_size, fingerprint = read_header(paths[0])
        for path in paths[1:]:
            if read_header(path) != (vocab_size, fingerprint):
                raise CheckpointError(
                    f"{path} comes from other data settings than {paths[0].name}; remove it"
                )
        return cls(joined([read_shard(path) for path in paths]), vocab_size, fingerprint)

    def __len__(self) -> int:
        return len(self._data.ids)

    def __getitem__(self, index: int) -> Conversation:
        if not -len(self) <= index < len(self):
            raise IndexError(f"conversation {index} of a corpus of {len(self)}")
        data, end = self._data, int(self._ends[index])
        return Conversation(
            data.tokens[end - int(data.lengths[index]) : end],
            int(data.answer_starts[index]),
            float(data.temperatures[index]),
            int(data.ids[index]),
        )

    def __iter__(self) -> Iterator[Conversation]:
        return (self[i] for i in range(len(self)))

    @property
    def num_tokens(self) -> int:
        """Tokens of all conversations, templates included."""
        return len(self._data.tokens)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each conversation, [conversations] int32."""
        return self._data.lengths

    @property
    def ids(self) -> NDArray[np.int64]:
        """Each conversation's id, [conversations] int64."""
        return self._data.ids

    def split(self, held_out: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Indices for training and indices held out, each ascending int64.

        Held out are the first conversations whose (seed, id) hash to the held-out share, so a corpus
        that has grown keeps the ones it had.

        Raises:
            ConfigError: the corpus is too small for that many.
        """
        is_candidate = hash_ids(self._data.ids, seed) % np.uint64(HELD_OUT_EVERY) == 0
        candidates = np.flatnonzero(is_candidate)
        check(
            0 <= held_out <= len(candidates), "held_out", held_out,
            f"from 0 to {len(candidates)} for this corpus of {len(self)} conversations",
            "generate more tokens or hold out fewer",
        )  # fmt: skip
        chosen = candidates[:held_out].astype(np.int64)
        return np.setdiff1d(np.arange(len(self), dtype=np.int64), chosen), chosen


class CorpusWriter:
    """Appends conversations to a folder, a shard at a time; each shard appears whole or not at all.

    A folder with shards is gone on with. Call `close` at the end: it writes the last, smaller shard.

    Args:
        folder: where the shards are, made if missing.
        vocab_size: number of token ids.
        fingerprint: what tells these data settings from others.
        shard_tokens: tokens after which a shard is written.

    Raises:
        ConfigError: the folder's shards come from other data settings.
        CheckpointError: one of its shards is broken.
    """

    def __init__(self, folder: Path, vocab_size: int, fingerprint: str, shard_tokens: int) -> None:
        self.folder, self.vocab_size, self.fingerprint = folder, vocab_size, fingerprint
        self.num_duplicates = 0
        self._shard_tokens = shard_tokens
        self._num_done = 0
        self._turns: set[bytes] = set()  # hashes of the tokens before the answers
        self._pending: list[Conversation] = []
        self._pending_tokens = 0
        folder.mkdir(parents=True, exist_ok=True)
        paths = shard_paths(folder)
        self._next_shard = 1 + max((int(path.stem.split("-")[1]) for path in paths), default=-1)
        self._resume(paths)

    def add(self, conversation: Conversation) -> bool:
        """Take a conversation; False, and counted, where its user turn has been written already."""
        if not self._remember(conversation):
            self.num_duplicates += 1
            return False
        self._pending.append(conversation)
        self._pending_tokens += len(conversation.tokens)
        if self._pending_tokens >= self._shard_tokens:
            self._write_shard()
        return True

    def close(self) -> None:
        """Write what waits for its shard."""
        if self._pending:
            self._write_shard()

    def _resume(self, paths: list[Path]) -> None:
        for path in paths:
            if read_header(path) != (self.vocab_size, self.fingerprint):
                raise ConfigError(
                    f"{path} was made with other data settings or another target; "
                    "choose another folder for the corpus, restore the settings, or delete the old shards"
                )
        if paths:
            for conversation in Corpus.open(self.folder):
                self._remember(conversation)
            logger.info("%s holds %d conversations already", self.folder, self._num_done)

    def _remember(self, conversation: Conversation) -> bool:
        """Note a conversation; False if one with the same tokens before the answer is known."""
        # The template is the same for all, so equal tokens before the answer are equal user turns.
        opening = conversation.tokens[: conversation.answer_start].astype(np.uint32).tobytes()
        key = hashlib.blake2b(opening, digest_size=16).digest()
        if key in self._turns:
            return False
        self._turns.add(key)
        self._num_done += 1
        return True

    def _write_shard(self) -> None:
        rows = self._pending
        tokens = np.concatenate([row.tokens for row in rows])
        arrays = {
            "tokens": tokens.astype(token_dtype(self.vocab_size)),
            "lengths": np.array([len(row.tokens) for row in rows], DTYPES["lengths"]),
            "answer_starts": np.array([row.answer_start for row in rows], DTYPES["answer_starts"]),
            "temperatures": np.array([row.temperature for row in rows], DTYPES["temperatures"]),
            "ids": np.array([row.id for row in rows], DTYPES["ids"]),
        }
        path = self.folder / f"shard-{self._next_shard:05d}.safetensors"
        header = {"format": FORMAT, "fingerprint": self.fingerprint, "vocab_size": str(self.vocab_size)}
        write_whole(path, lambda file: save_file(arrays, file, header))
        self._next_shard += 1
        self._pending, self._pending_tokens = [], 0


def token_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """The smaller of uint16 and uint32 that holds every token id."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a folder, in the order they were written.

    Raises:
        CheckpointError: one before the last is missing.
    """
    paths = sorted(folder.glob("shard-[0-9][0-9][0-9][0-9][0-9].safetensors"))
    for number, path in enumerate(paths):
        if path.name != f"shard-{number:05d}.safetensors":
            raise CheckpointError(
                f"{folder} has {path.name} but no shard {number}; delete the shards after it too, "
                "and generation goes on from there"
            )
    return paths


def hash_ids(ids: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """A hash [n] uint64 of each id with the seed: output `id` of a SplitMix64 generator started there."""
    start = np.uint64(seed % (1 << 64))
    words = start + (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(multiplier)
    return words ^ (words >> np.uint64(31))


def read_header(path: Path) -> tuple[int, str]:
    """(vocab_size, fingerprint) of a shard; `CheckpointError` where it is none or is broken."""
    try:
        with safe_open(path, "numpy") as shard:
            header = shard.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise broken(path, str(error)) from None
    if header.get("format") != FORMAT:
        raise broken(path, f"its format is {header.get('format')!r}, not {FORMAT!r}")
    try:
        return int(header["vocab_size"]), header["fingerprint"]
    except (KeyError, ValueError) as error:
        raise broken(path, f"its header lacks {error}") from None


def read_shard(path: Path) -> ShardData:
    """The arrays of one shard, checked against each other."""
    try:
        with safe_open(path, "numpy") as shard:
            arrays = {name: shard.get_tensor(name) for name in ("tokens", *DTYPES)}
    except (OSError, SafetensorError) as error:
        raise broken(path, str(error)) from None
    wrong = [name for name, dtype in DTYPES.items() if arrays[name].dtype != dtype]
    if wrong or arrays["tokens"].dtype not in (np.uint16, np.uint32):
        raise broken(path, f"the dtype of {', '.join(wrong) or 'tokens'} is wrong")
    if len({arrays[name].shape for name in DTYPES}) != 1:
        raise broken(path, "its tables differ in length")
    lengths, starts = arrays["lengths"], arrays["answer_starts"]
    if lengths.sum(dtype=np.int64) != len(arrays["tokens"]):
        raise broken(path, "the lengths do not add up to its tokens")
    if np.any((starts < 1) | (starts > lengths)):
        raise broken(path, "an answer begins outside its conversation")
    return ShardData(**arrays)


def joined(shards: list[ShardData]) -> ShardData:
    """The arrays of several shards end to end."""
    return ShardData(
        np.concatenate([shard.tokens for shard in shards]),
        np.concatenate([shard.lengths for shard in shards]),
        np.concatenate([shard.answer_starts for shard in shards]),
        np.concatenate([shard.temperatures for shard in shards]),
        np.concatenate([shard.ids for shard in shards]),
    )


def broken(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is no whole shard of conversations: {reason}; delete it and those after it, and run again"
    )
