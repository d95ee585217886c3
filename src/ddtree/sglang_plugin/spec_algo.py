"""DDTREE as SGLang's scheduler sees it: a DFLASH whose verify pass has a width of its own."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from ddtree.errors import DDTreeError

NAME = "DDTREE"


class DDTreeSpecAlgo(CustomSpecAlgo):
    """What SGLang asks of its algorithm (sibling: `SpeculativeAlgorithm.DFLASH`).

    `need_topk`, `carries_draft_hidden_states` and `create_future_map` are asked of every algorithm, but
    `CustomSpecAlgo` of 0.5.17 to 0.5.23 has none of them.
    """

    def is_dflash(self) -> bool:
        """Hidden states for the drafter, the drafter's KV and its input embeddings hang on this."""
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        """The drafter's block runs as a verify pass."""
        return True

    def supports_grammar_overlap(self) -> bool:
        """The worker advances grammars between rounds by itself."""
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        """Nothing reads the token table after the target's prefill (asked from 0.5.21 on)."""
        return True

    def has_draft_kv(self) -> bool:
        """False: drafts need no KV pages per branch, since a tree shares one verify window."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        """SGLang's relay of a round's results to the next one under overlap scheduling."""
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Tokens of a request in a verify pass: the drafter runs its block, the target the verify width."""
        if is_draft_worker:
            return int(get_spec().speculative_dflash_block_size)
        return num_draft_tokens

    def handle_server_args(self, server_args: Any) -> None:
        """Refuse or complete the server's arguments (`ConfigError`)."""
        from ddtree.sglang_plugin.server_args import handle_server_args

        handle_server_args(server_args)


def validate_server_args(server_args: Any) -> None:
    """The registry's first look at the server's arguments (`ConfigError`)."""
    from ddtree.sglang_plugin.server_args import validate_server_args

    validate_server_args(server_args)


def load_worker(server_args: Any) -> type:
    """The worker class, imported when a scheduler makes its worker; `server_args` is not needed.

    Raises:
        DDTreeError: other plugins have changed what the hook contract names.
    """
    from ddtree.sglang_plugin import contract
    from ddtree.sglang_plugin.worker_v2 import DDTreeWorkerV2

    report = contract.check_imported()
    if not report.is_ok:
        raise DDTreeError(
            f"DDTREE cannot run, SGLang was changed after DDTREE was registered.\n{report.text}"
        )

    return DDTreeWorkerV2
