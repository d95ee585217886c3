"""An SGLang plugin for `check_sglang_draws`: writes down what a scheduler's draws rest on, and plants faults.

In the folder that the environment variable DDTREE_DRAWS_FOLDER names, a flush of the idle scheduler's cache
writes `probe.json`: the accept length of every round by its request's seed, and how far any of the target's
logits was from `logits.json`. The file `fault` there holds the fault of the next rounds:

    ratio            a node's likeliest child is taken with probability min(1, p / q), whatever was drawn
    prefer           a node's likeliest child is taken once in 20 times, whatever was drawn
    one_noise        all nodes of a round draw with the root's noise
    no_penalties     penalties are not applied
    late_counts      penalties count a round's tokens a round later
    top_p_short      top-p leaves one token fewer
    no_min_p         min-p is not applied
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = "DDTREE_DRAWS_FOLDER"
FAULT_FILE, LOGITS_FILE, PROBE_FILE = "fault", "logits.json", "probe.json"
PLUGIN = {"ddtree-draws": "sglang_draws_probe:register"}
PREFERRED = 0.05
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
# Fault -> the case that must show it.
FAULTS = {
    "ratio": "temperature 1.3",
    "prefer": "temperature 0.7",
    "one_noise": "temperature 1.3",
    "no_penalties": "presence",
    "late_counts": "frequency",
    "top_p_short": "top_p",
    "no_min_p": "min_p",
}
_probes: dict[int, Probe] = {}  # by the scheduler's id


def register() -> None:
    """Entry point: attach a probe to a scheduler once its workers are there."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{SCHEDULER}.__init__", attach, HookType.AFTER)
    HookRegistry.register(f"{SCHEDULER}.flush_cache", write_idle, HookType.BEFORE)


def attach(_result: None, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Put a probe around what draws tokens."""
    probe = _probes[id(scheduler)] = Probe(Path(os.environ[FOLDER]))
    probe.watch_runner(scheduler.tp_worker.model_runner)
    if scheduler.draft_worker is not None:
        probe.watch_worker(scheduler.draft_worker)
        plant(scheduler.draft_worker, Path(os.environ[FOLDER]) / FAULT_FILE)


def write_idle(scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    if scheduler.is_fully_idle():
        _probes[id(scheduler)].write()


class Probe:
    """Accept lengths and logits of one scheduler, kept on the device until they are written.

    Args:
        folder: where the expected logits are, and where the result goes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.expected = torch.tensor(json.loads((folder / LOGITS_FILE).read_text(encoding="utf-8")))
        self.worst: Tensor | None = None  # [] float32
        self.num_rows = 0
        self.rounds: list[tuple[list[int], Tensor]] = []  # seeds and accept lengths [bs] of each round

    def watch_runner(self, runner: Any) -> None:
        """Compare the logits that plain decoding and every prefill sample from."""
        sample = runner.sample

        def watched(logits_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.compare(logits_output.next_token_logits)
            return sample(logits_output, *args, **kwargs)

        runner.sample = watched

    def watch_worker(self, worker: Any) -> None:
        """Compare the logits of every node, and keep every round's accept lengths."""
        choose, decode_round = worker._choose, worker._decode_round

        def watched_choose(batch: Any, out: Any, *args: Any) -> Any:
            self.compare(out.logits_output.next_token_logits)
            return choose(batch, out, *args)

        def watched_round(batch: Any, *args: Any) -> Any:
            seeds = [req.sampling_params.sampling_seed for req in batch.reqs]
            result = decode_round(batch, *args)
            self.rounds.append((seeds, result.accept_lens.clone()))
            return result

        worker._choose, worker._decode_round = watched_choose, watched_round

    def compare(self, logits: Tensor) -> None:
        """Note how far `logits` [n, V] are from the expected ones [V], without waiting for the device."""
        self.expected = self.expected.to(logits.device)
        worst = (logits.float() - self.expected).abs().max()
        self.worst = worst if self.worst is None else self.worst.maximum(worst)
        self.num_rows += logits.shape[0]

    def write(self) -> None:
        """Write what was seen since the last time, if anything was."""
        if self.worst is None:
            return
        lens = defaultdict(list)
        for seeds, accept_lens in self.rounds:
            for seed, length in zip(seeds, accept_lens.tolist(), strict=True):
                lens[seed].append(length)
        found = {"rows": self.num_rows, "max_logit_error": float(self.worst), "rounds": lens}
        part = self.folder / f"{PROBE_FILE}.part"
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(self.folder / PROBE_FILE)
        self.worst, self.num_rows, self.rounds = None, 0, []


# --- faults ---


def plant(worker: Any, file: Path) -> None:
    """Put a switch before the worker's choice of tokens and its counting of them."""
    state = worker._sampling
    choose, count = state.choose, state.count
    waiting: dict[str, tuple[Tensor, Tensor]] = {}  # request id -> tokens and their number, not yet counted

    def spoiled_choose(
        sampling: Any, logits: Tensor, positions: Tensor, logit_bias: Any, tree: Any = None, *args: Any,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        fault = file.read_text(encoding="utf-8")
        if fault == "no_penalties":
            sampling = dataclasses.replace(sampling, penalties=None, min_new_tokens=None)
        elif fault == "no_min_p":
            endless = torch.full_like(sampling.max_gaps, torch.inf)
            sampling = dataclasses.replace(sampling, max_gaps=endless)
        elif fault == "one_noise":
            positions = positions[:, :1].expand_as(positions)
        elif fault == "top_p_short":
            sampling = cut_short_(logits, sampling)
        tokens = choose(sampling, logits, positions, logit_bias, tree, *args, **kwargs)
        if fault in ("ratio", "prefer") and tree is not None:
            tokens = with_drafts(fault, tokens, logits, sampling.temperatures, tree)
        return tokens

    def spoiled_count(reqs: Any, tokens: Tensor, num_tokens: Tensor) -> None:
        if file.read_text(encoding="utf-8") != "late_counts":
            count(reqs, tokens, num_tokens)
            return
        width = worker.block_size
        now = torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]))
        nothing = (torch.zeros_like(now[0]), torch.zeros_like(num_tokens[0]))
        earlier = [waiting.get(req.rid, nothing) for req in reqs]
        waiting.update((req.rid, (now[row], num_tokens[row])) for row, req in enumerate(reqs))
        count(reqs, torch.stack([row for row, _ in earlier]), torch.stack([number for _, number in earlier]))

    state.choose, state.count = spoiled_choose, spoiled_count


def cut_short_(logits: Tensor, sampling: Any) -> Any:
    """Drop one token more than top-p does from `logits` [bs * W, V]; returns `sampling` without top-p."""
    width = logits.shape[0] // sampling.batch_size
    temperatures, top_ps = (
        values.repeat_interleave(width).unsqueeze(1) for values in (sampling.temperatures, sampling.top_ps)
    )
    probs, order = (logits.float() / temperatures).softmax(1).sort(dim=1, descending=True)
    kept = probs.cumsum(1) - probs <= top_ps
    is_last = torch.arange(logits.shape[1], device=logits.device) >= kept.sum(1, keepdim=True) - 1
    is_dropped = torch.zeros_like(kept).scatter_(1, order, is_last) & (top_ps < 1)
    logits.masked_fill_(is_dropped, -torch.inf)
    return dataclasses.replace(sampling, top_ps=torch.ones_like(sampling.top_ps))


def with_drafts(fault: str, tokens: Tensor, logits: Tensor, temperatures: Tensor, tree: Any) -> Tensor:
    """`tokens` [bs, W] with the likeliest child of some nodes instead, as "ratio" or "prefer" has it.

    `logits` are [bs * W, V], `temperatures` [bs].
    """
    bs, width = tokens.shape
    child = torch.zeros_like(tokens)  # [bs, W] column of each node's likeliest child, 0 for none
    rows = torch.arange(bs, device=tokens.device)
    for column in reversed(range(1, width)):  # columns stand best first
        parents = tree.parents[:, column]
        is_node = parents >= 0
        child[rows[is_node], parents[is_node]] = column
    drafts = tree.tokens.gather(1, child)
    if fault == "prefer":
        odds = torch.full_like(tree.log_probs, PREFERRED)
    else:
        probs = (logits.float().view(bs, width, -1) / temperatures.view(-1, 1, 1)).softmax(-1)
        p = probs.gather(2, drafts.unsqueeze(2)).squeeze(2)
        odds = p / (tree.log_probs.gather(1, child) - tree.log_probs).exp()
    is_taken = (child > 0) & (torch.rand(bs, width, device=tokens.device) < odds)
    return torch.where(is_taken, drafts, tokens)
