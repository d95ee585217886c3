"""Sits at the plugin's worker in the scheduler: plants drafts, writes down every round, plants faults.

A random drafter accepts nothing. So the reference's next tokens are planted in its logits, at a rank that
depends on request and position, or not at all: trees branch early, and paths of all lengths are right.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_kit.files import CONTROL_FILE, PLANS_FILE, ROUNDS_FILE, append_line
from sglang_kit.sizes import VOCAB_SIZE

# Of 100 positions, how many have the right token as the drafter's first, second and third choice.
RANK_PERCENT = (55, 20, 10)
TOP_LOGITS = (6.0, 4.8, 4.2)  # of a row's first choices; the others lie around 0


class PlantedHead:
    """The plugin's own head, given hidden states and weights that add a plan's tokens to its logits."""

    def __init__(self, head: Any, recorder: RoundRecorder) -> None:
        self.head, self.recorder = head, recorder

    def marginals(self, hidden: Tensor, candidate_topk: int) -> Any:
        """`head.marginals`, of logits `hidden @ weight.T` plus what is planted."""
        weight = self.head.weight  # this rank's part of the vocabulary
        change = self.recorder.planted(hidden @ weight.T, self.head.start)
        # One more input dimension a token carries the change through the head's own code.
        head = replace(self.head, weight=torch.cat((weight, torch.eye(len(weight))), 1))
        marginals = head.marginals(torch.cat((hidden, change), -1), candidate_topk)
        self.recorder.drafted = (hidden, marginals)
        return marginals


class RoundRecorder:
    """Writes one line of JSON a request and round; attached to a worker by instance attributes alone."""

    def __init__(self, worker: Any, folder: Path) -> None:
        self.worker, self.folder = worker, folder
        self.plans: dict[str, list[int]] = json.loads((folder / PLANS_FILE).read_text(encoding="utf-8"))
        self.rows: list[tuple[str, int]] = []  # request id and committed tokens of each row
        self.drafted: Any = None
        self.run_round = worker._decode_round
        worker._decode_round = self.record
        worker.tree_sampler.head = PlantedHead(worker.tree_sampler.head, self)
        install_faults(self)

    def control(self) -> dict[str, Any]:
        """What the driver asked for at the start of the current step."""
        control: dict[str, Any] = json.loads((self.folder / CONTROL_FILE).read_text(encoding="utf-8"))
        return control

    def record(self, batch: Any, *args: Any) -> Any:
        self.rows = [
            (req.rid, prefix) for req, prefix in zip(batch.reqs, batch.seq_lens.tolist(), strict=True)
        ]
        roots = batch.spec_info.bonus_tokens.tolist()
        result = self.run_round(batch, *args)
        if self.worker.group.rank_in_group == 0:
            self.write_round(roots, result)
        return result

    def write_round(self, roots: list[int], result: Any) -> None:
        hidden, marginals = self.drafted
        keeps_hidden = self.control().get("hidden", False)
        for i, (rid, prefix_len) in enumerate(self.rows):
            line = {
                "rid": rid,
                "prefix_len": prefix_len,
                "root_token": roots[i],
                "tokens": marginals.tokens[i].tolist(),
                "log_probs": marginals.log_probs[i].tolist(),
                "accept_len": int(result.accept_lens[i]),
                "batch_size": len(self.rows),
            }
            if keeps_hidden:
                line["hidden"] = hidden[i].tolist()
            append_line(self.folder / ROUNDS_FILE, line)

    def planted(self, logits: Tensor, start: int) -> Tensor:
        """What to add to `logits` [bs, L, tokens from `start` on]: nothing for a request without a plan."""
        change = torch.zeros_like(logits)
        for i, (rid, prefix_len) in enumerate(self.rows):
            # The root stands at `prefix_len`, so the block's first draft is the token after it.
            plan = self.plans.get(rid, [])[prefix_len + 1 :]
            for j in range(logits.shape[1] if plan else 0):
                row = planted_row(plan[j] if j < len(plan) else None, rid, prefix_len + 1 + j)
                change[i, j] = row[start : start + logits.shape[2]] - logits[i, j]
        return change


def planted_row(token: int | None, rid: str, position: int) -> Tensor:
    """A row of logits [V] with `token` at the rank of that request and position, and the rest at random.

    How sure it is of its first choices differs from row to row as well, so that the trees do.
    """
    seed = zlib.crc32(f"{rid} {position}".encode())
    rank = sum(seed % 100 >= sum(RANK_PERCENT[: i + 1]) for i in range(len(RANK_PERCENT)))
    row = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    best = [t for t in row.topk(len(TOP_LOGITS) + 1).indices.tolist() if t != token]
    if token is not None:
        row[token] = row.min() - 1.0
        if rank < len(RANK_PERCENT):
            best.insert(rank, token)
    sureness = 0.5 + (seed // 100 % 100) / 100
    for choice, value in zip(best, TOP_LOGITS, strict=False):
        row[choice] = value * sureness + 2.0
    return row


def install_faults(recorder: RoundRecorder) -> None:
    """Let the control file's "fault" break one step of the rounds, for tests that must notice."""
    worker = recorder.worker
    backend, mover = worker.model_runner.attn_backend, worker._kv_mover
    verify, move = worker.target_worker.forward_batch_generation, mover.move
    append = worker._append_target_hidden_to_draft_kv_by_loc
    verify_hidden: list[Tensor] = []

    def verify_with_fault(*args: Any, **kwargs: Any) -> Any:
        fault = recorder.control().get("fault")
        backend.ignores_mask = fault == "no_mask"
        if fault == "node_positions" and kwargs.get("is_verify"):
            forward_batch = kwargs["forward_batch"]
            width = forward_batch.spec_info.draft_token_num
            forward_batch.positions = (forward_batch.seq_lens[:, None] + torch.arange(width)).flatten()
        out = verify(*args, **kwargs)
        verify_hidden[:] = [out.logits_output.hidden_states]
        return out

    def move_with_fault(window: Tensor, accept_indices: Tensor) -> None:
        if recorder.control().get("fault") != "no_kv_move":
            move(window, accept_indices)

    def append_with_fault(**kwargs: Any) -> None:
        if recorder.control().get("fault") == "no_hidden_gather" and "commit_lens" in kwargs:
            bs, block_size = kwargs["cache_loc_2d"].shape
            hidden = verify_hidden[0]
            kwargs["target_hidden"] = hidden.view(bs, -1, hidden.shape[-1])[:, :block_size].flatten(0, 1)
        append(**kwargs)

    mover.move = move_with_fault
    worker.target_worker.forward_batch_generation = verify_with_fault
    worker._append_target_hidden_to_draft_kv_by_loc = append_with_fault
