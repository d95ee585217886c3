"""The speculative worker: SGLang's DFLASH worker with a tree between its draft pass and its verify pass."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.kernels.ops.speculative.dflash import _prepare_dflash_draft_block_unchecked
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_exec, get_spec
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.eagle_utils import eagle_prepare_for_verify
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from torch import Tensor

from ddtree.sglang_plugin import compat
from ddtree.sglang_plugin.accept_path import AcceptPath, accept_path
from ddtree.sglang_plugin.cuda_graph_runner import DDTreeDecodeCudaGraphRunner
from ddtree.sglang_plugin.draft_sampler import (
    DraftedTrees,
    TreeDraftSampler,
    VocabularyShard,
    check_equal_trees,
)
from ddtree.sglang_plugin.first_token import FirstTokenSampler
from ddtree.sglang_plugin.greedy_graph import GreedyGraph
from ddtree.sglang_plugin.info import DDTreeDraftInput, DDTreeVerifyInput
from ddtree.sglang_plugin.kv_move import KVMover
from ddtree.sglang_plugin.metrics import make_round_metrics
from ddtree.sglang_plugin.request_checks import abort_refused_requests
from ddtree.sglang_plugin.sampling_state import SamplingState, warm_up
from ddtree.sglang_plugin.settings import plugin_config
from ddtree.sglang_plugin.trace_rows import full_rows
from ddtree.sglang_plugin.trace_writer import RoundBegin, make_round_tracer
from ddtree.sglang_plugin.verify_mask import TREE_TOPK, mask_numel, write_verify_mask
from ddtree.trace_format import Detail

logger = logging.getLogger(__name__)


class DDTreeWorkerV2(DFlashWorkerV2):
    """Drafts with DFLASH's drafter, verifies the tree of the most probable prefixes, commits one path."""

    _fused_kv_helper: Any  # of DFLASH, which gives it its value

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any, ps: Any = None
    ) -> None:
        self.config = plugin_config()
        block_size = int(get_spec().speculative_dflash_block_size)
        with compat.draft_settings(block_size):
            super().__init__(
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                target_worker=target_worker,
                **compat.base_worker_arguments(server_args, block_size, ps),
            )
        self.server_args = server_args
        self.num_verify_tokens = self.config.verify_width(self.block_size)
        compat.gather_verify_logits(self)
        if self.draft_model_runner.dtype != torch.bfloat16:
            self.draft_model.forward = compat.cast_draft_inputs(
                self.draft_model.forward, self.draft_model_runner.dtype
            )
        self.group = compat.tensor_parallel_group()
        head = VocabularyShard.of(getattr(self.model_runner.model, "lm_head", None), self.group)
        self.tree_sampler = TreeDraftSampler(head, self.config, self.block_size)
        self.model_runner._decode_cuda_graph_runner_cls = lambda: DDTreeDecodeCudaGraphRunner
        self._greedy_graph: GreedyGraph | None = None
        self._graph_mask: Tensor | None = None

    # -- start-up --------------------------------------------------------------------------------

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        """Make the draft pool, then what depends on the target's pools, which exist by now."""
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        self._kv_mover = KVMover(_kv_buffers(self.model_runner.token_to_kv_pool))
        self._sampling = SamplingState(
            num_slots=self.model_runner.req_to_token_pool.req_to_token.shape[0],
            vocab_size=self.model_runner.model_config.vocab_size,
            device=torch.device(self.device),
            server_seed=int(self.target_worker.random_seed),
            broadcast=self._broadcast if self.group.world_size > 1 else None,
            like_flashinfer=compat.sampling_backend() == "flashinfer",
        )
        self._first_token = FirstTokenSampler(self._sampling)
        self.model_runner.sampler = self._first_token
        self._metrics = make_round_metrics(
            self.config,
            tp_rank=self.group.rank_in_group,
            block_size=self.block_size,
            device=torch.device(self.device),
        )
        self._tracer = make_round_tracer(
            self.config,
            self,
            tp_rank=self.group.rank_in_group,
            seed_of=self._sampling.seed_of,
        )

    def init_attention_backends(self) -> None:
        """The drafter's backend sees a block without a tree. What graphs need is made here, before any."""
        with compat.draft_settings(self.block_size):
            super().init_attention_backends()
        decode_graphs = get_exec().graph.cuda_graph_config.decode
        if decode_graphs.backend == Backend.DISABLED:
            return
        # SGLang captures no batch that its request pool could not hold, but may align it to the ranks.
        num_ranks = self.group.world_size
        pool_size = -(-self.model_runner.req_to_token_pool.size // num_ranks) * num_ranks
        max_bs = min(max(decode_graphs.bs), pool_size)
        self.tree_sampler.prepare_capture(max_bs)
        # Ranks take over rank 0's tokens, which is not done within a graph.
        if self.group.world_size == 1:
            eager_helper = self._fused_kv_helper
            if eager_helper is not None:
                self._init_fused_kv_helper()
            self._graph_kv_helper, self._fused_kv_helper = self._fused_kv_helper, eager_helper
            self._greedy_graph = GreedyGraph(
                self.tree_sampler,
                self._commit_in_graph,
                max_bs,
                self.config.max_accept_tokens,
                torch.device(self.device),
            )
            self.model_runner.capture_tail_hooks.append(self._greedy_graph)

    def prewarm_sampling(self) -> Any:
        """The target's own warm-up: DFLASH's rehearses an accept step that is not used here."""
        return self.model_runner.prewarm_sampling()

    def init_cuda_graphs(self) -> None:
        """Capture the drafter with trees behind it, and the mask where the target's graphs read one."""
        if self.tree_sampler.max_captured:
            self.draft_model_runner.capture_tail_hooks.append(self.tree_sampler.capture)
            verify_mask = self.model_runner.attn_backend.verify_mask
            if verify_mask is not None and verify_mask.fits(self.tree_sampler.max_captured):
                self._graph_mask = verify_mask.buffer
                self.tree_sampler.then(partial(write_tree_cells, verify_mask.buffer))
        super().init_cuda_graphs()
        if torch.device(self.device).type == "cuda":
            warm_up(self._sampling, self.num_verify_tokens)

    def _maybe_build_draft_sampler(self) -> None:
        """DFLASH's sampler is not needed: the graph's tail builds trees."""

    def _validate_phase1_sampling_support(self, batch: Any) -> None:
        """DFLASH warns here that it samples greedily where it lacks kernels; this worker never does."""

    def _make_next_draft_input_prefill(self, *, bonus_tokens: Tensor, seq_lens: Tensor) -> DDTreeDraftInput:
        return DDTreeDraftInput.of(bonus_tokens, seq_lens)

    def _make_next_draft_input_decode(
        self, *, bonus_tokens: Tensor, new_seq_lens: Tensor
    ) -> DDTreeDraftInput:
        return DDTreeDraftInput.of(bonus_tokens, new_seq_lens)

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """Count a round whose accept lengths have reached the host."""
        if self._metrics is not None:
            self._metrics.observe(num_correct_drafts_per_req)
        if self._tracer is not None:
            self._tracer.arrive()

    # -- a round ---------------------------------------------------------------------------------

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[[Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """A prefill, or a round of decoding: draft, verify, choose, accept, commit."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            abort_refused_requests(batch.reqs, supports_logprobs=compat.SUPPORTS_LOGPROBS)
            if self._tracer is not None:
                self._tracer.see(batch.reqs)
            self._first_token.stage(batch)
            return super().forward_batch_generation(batch, on_publish, grammar_barrier)
        if batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, on_publish, grammar_barrier)
        if batch.seq_lens.is_cuda:
            # The lengths may have been made on the scheduler's stream.
            batch.seq_lens.record_stream(torch.get_device_module(self.device).current_stream())
        with torch.inference_mode():
            return self._decode_round(batch, on_publish, grammar_barrier)

    def _decode_round(
        self,
        batch: Any,
        on_publish: Callable[[Tensor], None] | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> GenerationBatchResult:
        clamp_lens(batch, self.model_runner.model_config.context_len)
        bs, prefix_lens = len(batch.seq_lens), batch.seq_lens  # [bs] committed tokens: the roots' positions
        begin = None if self._tracer is None else self._tracer.begin(prefix_lens.device)
        window = compat.KVWindow(self, batch, self.num_verify_tokens)
        trees, has_mask = self._draft(batch, window)
        if self.config.check_ranks:
            check_equal_trees(trees, self.group)
        # The links start their way to the host before the verify pass is queued behind them.
        grammar_tree = GrammarTree.from_device(*trees.links, trees.tree.tokens) if batch.has_grammar else None
        greedy_graph = self._announce_greedy(batch)
        forward_batch, out = self._verify(batch, window, trees, has_mask)
        if greedy_graph is not None and out.can_run_cuda_graph:
            path, target_tokens, new_seq_lens = greedy_graph.take(bs)
        else:
            target_tokens = self._choose(batch, out, trees, grammar_tree, grammar_barrier)
            path = accept_path(trees, target_tokens, self.block_size, self.config.max_accept_tokens)
            new_seq_lens, greedy_graph = prefix_lens + path.lens, None
        if on_publish is not None:
            on_publish(new_seq_lens)
        if greedy_graph is None:
            hidden = out.logits_output.hidden_states
            self._commit_path(window.slots, window.draft_slots(self.block_size), prefix_lens, hidden, path)
        self._record(batch, out.logits_output, target_tokens, path)
        if begin is not None:
            self._trace(batch, trees, path, out.logits_output, prefix_lens, begin)
        return GenerationBatchResult(
            logits_output=out.logits_output,
            next_token_ids=path.tokens.reshape(-1),
            accept_lens=path.lens,
            can_run_cuda_graph=out.can_run_cuda_graph,
            next_draft_input=DDTreeDraftInput.of(path.bonus_tokens, new_seq_lens),
            new_seq_lens=new_seq_lens,
            extra_keep_alive_refs=[forward_batch],
            **compat.result_widths(self.num_verify_tokens, self.block_size),
        )

    def _draft(self, batch: Any, window: compat.KVWindow) -> tuple[DraftedTrees, bool]:
        """The drafter's pass over the block: its trees, and whether its graph has written their mask."""
        bs, block_size = len(batch.seq_lens), self.block_size
        block_tokens, positions = self._draft_block(batch)  # [bs, block]
        seq_lens_cpu = self._draft_seq_lens_cpu(batch)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=block_tokens.view(-1),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=window.draft_slots(block_size),
            seq_lens_sum=int(seq_lens_cpu.sum()),
            seq_lens_cpu=seq_lens_cpu,
            positions=positions.view(-1),
            input_embeds=compat.block_embeddings(self, block_tokens),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            **compat.draft_batch_fields(batch, bs * block_size, self.device),
        )
        window.bind_draft(forward_batch, block_size)
        sampler = self.tree_sampler
        with compat.draft_scope(self):
            out = self.draft_model_runner.forward(forward_batch)
            if out.can_run_graph:
                return sampler.captured(bs), sampler.writes_mask
            trees = sampler.draft(out.logits_output.hidden_states, block_tokens.view(-1), batch.seq_lens)
        if bs <= sampler.max_captured:
            # The target's graph reads trees where the drafter's would have left them.
            sampler.captured(bs).copy_(trees)
        return trees, False

    def _announce_greedy(self, batch: Any) -> GreedyGraph | None:
        """The graph's tail if it may commit this batch, which asks for the best tokens and no more."""
        if self._greedy_graph is None:
            return None
        info = batch.sampling_info
        is_greedy = (
            info.is_all_greedy
            and info.logit_bias is None
            and not batch.has_grammar
            and not self._sampling.of(batch.reqs).needs_counts
        )
        self._greedy_graph.announce(len(batch.seq_lens) if is_greedy else 0)
        return self._greedy_graph if is_greedy else None

    def _draft_block(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The block's tokens, bonus token and masks, and their positions, each [bs, block] int64."""
        bs = len(batch.seq_lens)
        self._ensure_draft_block_buffers(bs)
        tokens, positions = self._draft_block_ids_buf[:bs], self._draft_block_positions_buf[:bs]
        bonus_tokens = batch.spec_info.bonus_tokens
        if batch.seq_lens.is_cuda:
            _prepare_dflash_draft_block_unchecked(
                bonus_tokens=bonus_tokens.view(-1),
                prefix_lens=batch.seq_lens.view(-1),
                req_pool_indices=batch.req_pool_indices.view(-1),
                req_to_token=self.model_runner.req_to_token_pool.req_to_token,
                block_ids_out=tokens,
                positions_out=positions,
                cache_loc_out=self._draft_verify_out_cache_loc_buf[:bs],
                mask_token_id=int(self._mask_token_id),
            )
        else:
            tokens.fill_(int(self._mask_token_id))
            tokens[:, 0].copy_(bonus_tokens)
            torch.add(batch.seq_lens.unsqueeze(1), self._block_pos_offsets, out=positions)
        return tokens, positions

    def _draft_seq_lens_cpu(self, batch: Any) -> Tensor:
        """Upper bounds of the lengths after the draft block, [bs] int32, on the host."""
        lens: Tensor = self._draft_seq_lens_cpu_buf[: len(batch.seq_lens)]
        reserved_lens, _ = compat.reserved_kv_lens(batch.spec_info)
        if batch.seq_lens_cpu is not None:
            lens.copy_(batch.seq_lens_cpu)
            lens.add_(self.block_size)
        elif reserved_lens is not None:
            lens.copy_(reserved_lens)
        else:
            lens.copy_(torch.tensor([req.kv.kv_allocated_len for req in batch.reqs]))
        return lens

    def _verify(
        self, batch: Any, window: compat.KVWindow, trees: DraftedTrees, has_mask: bool
    ) -> tuple[Any, Any]:
        """The target's pass over the trees: its forward batch and its result."""
        verify_input = DDTreeVerifyInput(
            draft_token=trees.tree.tokens.reshape(-1),
            custom_mask=self._verify_mask(batch, trees, has_mask),
            positions=trees.positions.reshape(-1),
            retrieve_index=None,
            retrieve_next_token=trees.links.next_token,
            retrieve_next_sibling=trees.links.next_sibling,
            retrieve_cum_len=None,
            spec_steps=self.block_size - 1,
            topk=TREE_TOPK,
            draft_token_num=self.num_verify_tokens,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=None,
            **window.verify_fields(),
        )
        draft_input, batch.spec_info = batch.spec_info, verify_input
        forward_batch, _ = eagle_prepare_for_verify(
            verify_input, self.model_runner.req_to_token_pool, batch, self.target_worker
        )
        window.found(batch.out_cache_loc)
        out = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )
        batch.spec_info = draft_input
        return forward_batch, out

    def _verify_mask(self, batch: Any, trees: DraftedTrees, has_mask: bool) -> Tensor:
        """The tree mask, flat: in the backend's own buffer, which its graphs read, if it has one."""
        bs = len(batch.seq_lens)
        backend_mask = self.model_runner.attn_backend.verify_mask
        if backend_mask is not None and backend_mask.fits(bs):
            buffer: Tensor = backend_mask.buffer
            # A target that was captured anew has another buffer than the drafter's graph writes to.
            if not has_mask or buffer is not self._graph_mask:
                write_tree_cells(buffer, trees, batch.seq_lens)
            return buffer
        num_cells = mask_numel(bs, self.num_verify_tokens, self._prefix_lens_sum(batch))
        mask = torch.empty(num_cells, dtype=torch.bool, device=batch.seq_lens.device)
        write_verify_mask(mask, trees.ancestor_mask, batch.seq_lens, fill_prefix=True)
        return mask

    def _prefix_lens_sum(self, batch: Any) -> int:
        """The requests' committed lengths together, or an upper bound of it, without a device wait."""
        if batch.seq_lens_cpu is not None:
            return int(batch.seq_lens_cpu.sum())
        _, reserved_sum = compat.reserved_kv_lens(batch.spec_info)
        if reserved_sum is not None:
            return reserved_sum
        return sum(int(req.kv.kv_allocated_len) for req in batch.reqs)

    def _choose(
        self,
        batch: Any,
        out: Any,
        trees: DraftedTrees,
        grammar_tree: Any,
        grammar_barrier: Callable[[], None] | None,
    ) -> Tensor:
        """The target's own token after each node, [bs, W]; leaves the processed logits in `out`."""
        logits = out.logits_output.next_token_logits  # [bs * W, vocab]
        apply_grammar = None
        if grammar_tree is not None:
            grammar_mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar_tree,
                sampling_info=batch.sampling_info,
                device=logits.device,
                barrier=grammar_barrier,
            )
            apply_grammar = None if grammar_mask is None else grammar_mask.apply
        return self._sampling.choose(
            self._sampling.of(batch.reqs),
            logits,
            trees.positions,
            batch.sampling_info.logit_bias,
            trees.tree,
            trees.ancestor_mask,
            apply_grammar,
        )

    def _commit_path(
        self,
        window: Tensor,  # [bs, W] slots
        draft_slots: Tensor,  # [bs * block]
        prefix_lens: Tensor,  # [bs]
        hidden: Tensor,  # [bs * W, context features]
        path: AcceptPath,
    ) -> None:
        """Keep the path's KV in the target and its hidden states in the drafter; device work alone."""
        self._kv_mover.move(window, path.indices)
        rows = path.rows(self.num_verify_tokens).clamp(min=0)  # [bs, block]
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden[rows.view(-1)],
            cache_loc=draft_slots,
            cache_loc_2d=draft_slots.view(rows.shape),
            positions=(prefix_lens.unsqueeze(1) + self._block_pos_offsets).view(-1),
            commit_lens=path.lens,
        )

    def _commit_in_graph(
        self, window: Tensor, draft_slots: Tensor, prefix_lens: Tensor, hidden: Tensor, path: AcceptPath
    ) -> None:
        """`_commit_path` with scratch memory of its own: DFLASH's moves when a prefill needs more of it."""
        eager_helper, self._fused_kv_helper = self._fused_kv_helper, self._graph_kv_helper
        try:
            self._commit_path(window, draft_slots, prefix_lens, hidden, path)
        finally:
            self._fused_kv_helper = eager_helper

    def _record(self, batch: Any, logits_output: Any, target_tokens: Tensor, path: AcceptPath) -> None:
        """What is told and counted of a path beside what it commits."""
        if batch.return_logprob:
            rows = path.rows(self.num_verify_tokens)
            compat.write_logprobs(batch, logits_output, target_tokens.reshape(-1), rows)
        self._sampling.count(batch.reqs, path.tokens, path.lens)
        if self._metrics is not None:
            self._metrics.device_counters.add(path.indices)
        # Otherwise SGLang would copy all of them to the host.
        logits_output.hidden_states = None

    def _trace(
        self,
        batch: Any,
        trees: DraftedTrees,
        path: AcceptPath,
        logits_output: Any,
        prefix_lens: Tensor,
        begin: RoundBegin,
    ) -> None:
        """Give a round to the tracer; at detail `full` with its trees and the target's figures."""
        assert self._tracer is not None
        full = None
        if self._tracer.detail is Detail.FULL:
            # What changes logits before the temperature is written over the target's own.
            is_changed = (
                batch.has_grammar
                or batch.sampling_info.logit_bias is not None
                or self._sampling.of(batch.reqs).needs_counts
            )
            full = full_rows(trees.tree, path, None if is_changed else logits_output.next_token_logits)
        self._tracer.add(batch.reqs, trees.tree.tokens[:, 0], prefix_lens, path, begin, full)

    def _broadcast(self, tokens: Tensor) -> Tensor:
        """Rank 0's `tokens`, on every rank."""
        tokens = tokens.contiguous()
        self.group.broadcast(tokens, src=0)
        return tokens


def clamp_lens(batch: Any, context_len: int) -> None:
    """Keep the batch's lengths within the context, for which the backends' graphs have their buffers.

    Under overlap a request that has reached its end may run once more before that is known, and its tokens
    are thrown away; but its lengths are beyond what tables and masks were made for.
    """
    batch.seq_lens = batch.seq_lens.clamp(max=context_len)
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu.clamp(max=context_len)


def write_tree_cells(mask: Tensor, trees: DraftedTrees, prefix_lens: Tensor) -> None:
    """Write the trees into a mask whose reader takes the prefix [bs] as visible without reading it."""
    write_verify_mask(mask, trees.ancestor_mask, prefix_lens, fill_prefix=False)


def _kv_buffers(pool: Any) -> list[Tensor]:
    """K and V of all layers of the target's pool; `ValueError` for a layout whose rows cannot be moved."""
    if type(pool) is not MHATokenToKVPool or pool.use_hnd:
        raise ValueError(
            f"DDTREE cannot move rows of the KV pool {type(pool).__name__}"
            f"{' in HND layout' if getattr(pool, 'use_hnd', False) else ''}: it covers MHATokenToKVPool; "
            "use a target with plain multi-head attention and an unquantized or fp8 KV cache, "
            "or --speculative-algorithm DFLASH"
        )
    return [*pool.k_buffer, *pool.v_buffer]
