"""Sampling parameters, stop rule, episodes and partial rollouts, from a config."""

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ml_collections import ConfigDict

from gspo_jax.data.pipeline import prompt_text
from gspo_jax.data.records import Record
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import UserError
from gspo_jax.rewards.replies import Replies, Setting
from gspo_jax.rollout.drafting import NO_DRAFTS, Drafting
from gspo_jax.rollout.episodes import Buffer, Episodes, Player
from gspo_jax.rollout.history import History
from gspo_jax.rollout.sampler import Sampler
from gspo_jax.rollout.sampling import SamplingParams, StopRule
from gspo_jax.setup import data, functions
from gspo_jax.setup.turns import TokenTurns


def make_sampling(config: ConfigDict) -> SamplingParams:
    """Return the sampling distribution of training rollouts."""
    s = config.sampling
    try:
        return SamplingParams(
            temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, keep_top=s.keep_top
        )
    except UserError as error:
        raise UserError(f"sampling.{error}") from None


def truncation(config: ConfigDict, vocab_size: int) -> SamplingParams:
    """Return the sampling distribution of training rollouts, without a top_k that leaves out no token."""
    sampling = make_sampling(config)
    return dataclasses.replace(sampling, top_k=0) if sampling.top_k >= vocab_size else sampling


def truncation_warning(config: ConfigDict, vocab_size: int) -> str | None:
    """Return a one-sentence warning if responses are sampled from another distribution than the trainer scores."""
    sampling, whole = truncation(config, vocab_size), SamplingParams()
    names = [name for name in ("top_k", "top_p", "min_p") if getattr(sampling, name) != getattr(whole, name)]
    if 0 < sampling.keep_top < sampling.top_k and names == ["top_k"]:
        return (
            f"sampling.top_k {sampling.top_k} always leaves more ids than sampling.keep_top {sampling.keep_top} "
            "records, so all tokens are compared over the full softmax, and ratios and KL are biased; set "
            f"--config.sampling.keep_top={sampling.top_k}"
        )
    if sampling.keep_top or not sampling.truncates:
        return None
    given = " and ".join(f"sampling.{name} {getattr(sampling, name)}" for name in names)
    return (
        f"{given}: responses are sampled from another distribution than the full softmax that the trainer scores, and "
        f"ratios and KL are biased; set --config.sampling.keep_top={sampling.top_k or min(64, vocab_size)} to compare "
        "both over the tokens that were left (docs/decoding.md#kept-sets)"
    )


def make_drafting(config: ConfigDict) -> Drafting:
    """Return what decoding drafts."""
    drafter = config.sampling.draft
    return NO_DRAFTS if drafter == "none" else Drafting(drafter, config.sampling.draft_tokens)


def stop_ids(config: ConfigDict, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token ids of `sampling.stop_ids`. Raise a UserError for a text of several tokens."""
    found = []
    for stop in config.sampling.stop_ids:
        ids = tokenizer.encode(stop) if isinstance(stop, str) else [stop]
        if len(ids) != 1:
            raise UserError(
                f"sampling.stop_ids has {stop!r}, which is {len(ids)} tokens; use texts of one token each, or ids"
            )
        found += ids
    return tuple(found)


def make_stop_rule(config: ConfigDict, *, eos_ids: tuple[int, ...], pad_id: int) -> StopRule:
    """Return the stop rule for `eos_ids` and the length limit."""
    return StopRule(max_length=config.sampling.max_response_length, eos_ids=eos_ids, pad_id=pad_id)


def stop_rule_of(config: ConfigDict, tokenizer: Tokenizer) -> StopRule:
    """Return the stop rule for EOS, `sampling.stop_ids` and the length limit."""
    eos_ids = tuple(dict.fromkeys((*tokenizer.eos_ids, *stop_ids(config, tokenizer))))
    return make_stop_rule(config, eos_ids=eos_ids, pad_id=tokenizer.pad_id)


def opening(config: ConfigDict, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of `sampling.prefix`. Raise a UserError if they fill a response."""
    tokens, limit = tokenizer.encode(config.sampling.prefix), config.sampling.max_response_length
    if len(tokens) >= limit:
        raise UserError(
            f"sampling.prefix has {len(tokens)} tokens and sampling.max_response_length is {limit}; use a shorter "
            f"text, or a limit above {len(tokens)}"
        )
    return tokens


def make_replies(config: ConfigDict) -> AbstractContextManager[Replies | None]:
    """Return the environment, if any, with sandboxes if it runs programs."""
    if not config.environment.name:
        return nullcontext()
    scoring = config.scoring
    setting = Setting(
        own=functions.own(config),
        limits=data.call_limits(config),
        most_failed=scoring.most_failed,
        timeout_s=scoring.timeout_s,
        workers=data.scoring_workers(config),
        unsafe=scoring.unsafe,
    )
    return Replies(config.environment.name, setting)


def make_player(config: ConfigDict, tokenizer: Tokenizer, sampler: Sampler, replies: Replies | None) -> Player:
    """Return the player of episodes.

    Raises:
      UserError: the environment has tools, which the chat template cannot show, or whose calls it writes in a format
        that is not known.
    """
    history = History(sampler.stop.max_length) if config.sampling.draft == "history" else None
    given: Any = {"opening": opening(config, tokenizer), "history": history}
    if replies is None:
        return Player(sampler, **given)
    if replies.tools is not None:
        replies.tool_format = tokenizer.tool_format(config.environment.tool_format)
    style = data.prompt_style(config)

    def encode(record: Record) -> list[int]:
        return tokenizer.encode(prompt_text(record, tokenizer, style))

    environment = TokenTurns(replies, tokenizer, encode, config.data.max_prompt_length)
    turns, patience_s = config.environment.turns, config.environment.patience_s
    return Player(sampler, environment=environment, max_turns=turns, patience_s=patience_s, **given)


def make_buffer(config: ConfigDict, player: Player, unfinished: Episodes | None = None) -> Buffer | None:
    """Return the buffer of partial rollouts, if configured, with `unfinished` episodes."""
    partial = config.sampling.partial
    if partial.prompts is None:
        return None
    return Buffer(
        player,
        groups=config.data.prompts_per_batch,
        group_size=config.sampling.group_size,
        in_flight=partial.prompts,
        min_ended=partial.share,
        episodes=unfinished,
    )
