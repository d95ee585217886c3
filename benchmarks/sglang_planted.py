"""An SGLang plugin that plants right tokens among the drafts of DFLASH and DDTREE (`planted_acceptance`).

The drafter's pass, the output head's product, the top-K and what ranks exchange all run as they are; then
the candidates are replaced on the device, in the drafter's CUDA graph where there is one. Both arms pay for
that with the same few gathers. The folder that DDTREE_PLANTED_FOLDER names holds the target's `Walk`.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

PLANTED_FOLDER = "DDTREE_PLANTED_FOLDER"
PLUGIN = {"ddtree-planted": "sglang_planted:register"}


def register() -> None:
    """Entry point: plant in a scheduler process before its workers are made."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", plant, HookType.BEFORE)


@functools.cache
def drafts_on(device: Any, draft_depth: int) -> Any:
    """The planted drafts with their tables on a device."""
    from planted_acceptance import PlantedDrafts, Walk

    return PlantedDrafts(Walk.read(Path(os.environ[PLANTED_FOLDER])), draft_depth).to(device)


def plant(*_args: Any, **_kwargs: Any) -> None:
    """Replace the methods that choose drafts; samplers make the tables, before graphs are captured."""
    from sglang.srt.speculative import dflash_worker_v2 as dflash

    from ddtree.sglang_plugin.draft_sampler import TreeDraftSampler

    sampler, worker = dflash._DflashDraftSampler, dflash.DFlashWorkerV2
    sampler.__init__ = planting_init(sampler.__init__, lambda made: made.weight.device)
    sampler.__call__ = planted_chain(sampler.__call__)
    worker._greedy_sample_from_vocab_parallel_head = planted_eager_chain(
        worker._greedy_sample_from_vocab_parallel_head
    )
    # Methods of classes, which mypy takes for constants.
    TreeDraftSampler.__init__ = planting_init(  # type: ignore[method-assign]
        TreeDraftSampler.__init__, lambda made: made.head.weight.device
    )
    TreeDraftSampler.build = planted_build(TreeDraftSampler.build)  # type: ignore[method-assign]


def planting_init(init: Any, device_of: Any) -> Any:
    """A sampler's `__init__` that also makes the tables."""

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        drafts_on(device_of(self), self.block_size - 1)

    return wrapper


def planted_chain(call: Any) -> Any:
    """DFLASH's sampler within the drafter's graph."""

    @functools.wraps(call)
    def wrapper(self: Any, hidden_states: Any, input_ids: Any = None) -> None:
        call(self, hidden_states, input_ids)
        roots = input_ids.view(-1, self.block_size)[:, 0]
        out = self.out[: roots.shape[0] * (self.block_size - 1)]
        drafts = drafts_on(out.device, self.block_size - 1)
        out.copy_(drafts.chain(out.view(roots.shape[0], -1), roots).view(-1))

    return wrapper


def planted_eager_chain(sample: Any) -> Any:
    """DFLASH's choice outside of graphs; it is only asked for drafts."""

    @functools.wraps(sample)
    def wrapper(self: Any, **arguments: Any) -> Any:
        tokens = sample(self, **arguments).view(-1, self.block_size - 1)
        roots = self._draft_block_ids_buf[: tokens.shape[0], 0]
        return drafts_on(tokens.device, self.block_size - 1).chain(tokens, roots).view(-1)

    return wrapper


def planted_build(build: Any) -> Any:
    """DDTREE's step from candidates to trees."""

    @functools.wraps(build)
    def wrapper(self: Any, marginals: Any, root_tokens: Any, prefix_lens: Any) -> Any:
        drafts = drafts_on(marginals.tokens.device, self.block_size - 1)
        return build(self, drafts.marginals(marginals.tokens, root_tokens), root_tokens, prefix_lens)

    return wrapper
