"""Should a finished output have ended where it did?"""

from __future__ import annotations

from collections.abc import Sequence

from ddtree.trace.outputs import Output


def ending_problem(output: Output, stop_tokens: Sequence[int], context_tokens: int | None) -> str | None:
    """Why an output should not have ended where it did; None where it should, or where nothing is known.

    Args:
        output: with SGLang's finish_reason, or just its type, as `finish`.
        stop_tokens: the model's own end tokens.
        context_tokens: where the engine's context ends, None where it is not known.
    """
    sampling, tokens, finish = output.read_sampling(), output.tokens, output.finish
    early = early_end(output, stop_tokens)
    if early is not None:
        return f"token {tokens[early]} at place {early} of {len(tokens)} should have ended it"
    if finish is None or finish["type"] == "cancel":
        return None
    if finish["type"] == "length":
        # At the context's end SGLang stops one or two tokens short of it.
        total = len(output.prompt) + len(tokens)
        at_limit = context_tokens is None or total >= context_tokens - 2
        if len(tokens) != sampling.max_tokens and not at_limit:
            return f"ended by length after {len(tokens)} tokens, not {sampling.max_tokens}"
    elif finish["type"] == "stop":
        stops, matched = {*stop_tokens, *sampling.stop_token_ids}, finish.get("matched")
        if isinstance(matched, int) and (tokens[-1] != matched or matched not in stops):
            return f"ended by token {matched}, but the last one is {tokens[-1]}"
        if "matched" not in finish and not sampling.stop and tokens[-1] not in stops:
            return f"ended by stop, but its last token {tokens[-1]} is no end token and it has no stop string"
    else:
        return f"ended by {finish['type']}"
    return None


def early_end(output: Output, stop_tokens: Sequence[int]) -> int | None:
    """Place of the first token that should have ended an output before its last one; None without any."""
    sampling = output.read_sampling()
    if sampling.ignore_eos and output.order == "sglang":
        return None
    stops = {*(() if sampling.ignore_eos else stop_tokens), *sampling.stop_token_ids}
    return next((place for place, token in enumerate(output.tokens[:-1]) if token in stops), None)


def is_overrun(output: Output, stop_tokens: Sequence[int], round_tokens: int) -> bool:
    """Whether a round of at most `round_tokens` ran from before an end token to the output's length limit.

    SGLang 0.5.17 looks at the length first and so keeps what such a round has behind the end token, with any
    speculation; from 0.5.18 on it looks at the end token first (`Req.update_finish_state`).
    """
    early, length = early_end(output, stop_tokens), len(output.tokens)
    ended_by = None if output.finish is None else output.finish["type"]
    at_limit = ended_by == "length" and length == output.read_sampling().max_tokens
    # The token at place 0 is prefill's, alone.
    return early is not None and early > 0 and at_limit and length - early <= round_tokens
