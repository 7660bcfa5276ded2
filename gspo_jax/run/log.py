"""A run's log: metrics, samples, evaluations, progress and warnings."""

import importlib.util
import itertools
import math
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from ml_collections import ConfigDict

from gspo_jax import benchmark
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.evaluate import Evaluation
from gspo_jax.objectives import Objective
from gspo_jax.objectives.guards import clip_range_warning, rounding_warning
from gspo_jax.parallel import hosts, processes
from gspo_jax.reporting.progress import Progress
from gspo_jax.reporting.weights_and_biases import connect
from gspo_jax.reporting.writers import MetricsWriter, Mirror, SamplesWriter, clear_end, read_metrics, write_config
from gspo_jax.rewards.shaping import differ
from gspo_jax.rollout.sampler import Sampler
from gspo_jax.run.clock import Clock
from gspo_jax.run.rounds import Rounds
from gspo_jax.run.scored import Scored
from gspo_jax.run.shaping import Shaping
from gspo_jax.training.batches import take_minibatch
from gspo_jax.training.metrics import Metrics

SHOWN_CHARACTERS = 400
"""Maximum characters of a completion shown on the terminal; the file under samples/ has the whole text."""


class RunLog:
    """Writes a run's metrics and samples (first process only) and shows its progress."""

    def __init__(
        self,
        progress: Progress,
        *,
        writer: MetricsWriter | None = None,
        samples: SamplesWriter | None = None,
        evaluations: Sequence[tuple[int, dict[str, float]]] = (),
    ):
        """`writer` and `samples` are None on every process but the first; `evaluations` are from before a resume."""
        self.progress, self._writer, self._samples = progress, writer, samples
        self.evaluations = list(evaluations)
        """Every evaluation so far: iterations done before it, and its metrics by name."""
        self._warned: set[str] = set()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write metrics of a step to the run folder; every process calls this with the same values."""
        if self._writer is not None:
            self._writer.write(step, metrics)

    def sync(self) -> None:
        """Return once all metrics written so far are on the disk."""
        if self._writer is not None:
            self._writer.sync()

    def updates(
        self, step: int, line: Mapping[str, Any], columns: Mapping[str, Any], metrics: list[Metrics], *, group_size: int
    ) -> None:
        """Write one line per update of an iteration; the iteration's own metrics join the last.

        Args:
          step: the newest update's number.
          line: the iteration's own metrics, and its number under "iteration".
          columns: per-response values [B] on the host, from `response_columns`.
          metrics: metrics of each update.
          group_size: adjacent rows of one group.
        """
        iteration = {"iteration": line["iteration"]}
        for i, seen in enumerate(metrics):
            own = take_minibatch(columns, i, count=len(metrics), group_size=group_size)
            row = {**iteration, "minibatch": i, **response_metrics(own)}
            # Only the first mini-batch is scored with the same weights that sampled it.
            row |= {name: value for name, value in seen.items() if i == 0 or not name.startswith("mismatch/")}
            row |= line if i + 1 == len(metrics) else {}
            self.write(step - len(metrics) + 1 + i, row)
        self.guard_ratios(metrics)

    def evaluated(self, step: int, iteration: int, result: Evaluation) -> None:
        """Record a held-out evaluation after an iteration, on the line of its last update."""
        self.evaluations.append((iteration, result.metrics()))
        self.write(step, result.metrics())
        self.progress.keep(accuracy=self._accuracy())
        self.progress.say(f"update {step}: {result}")

    def _accuracy(self) -> tuple[float, int] | None:
        """The newest accuracy, and the iterations done before it; None before the first evaluation."""
        if not self.evaluations:
            return None
        iteration, metrics = self.evaluations[-1]
        return metrics["eval/accuracy"], iteration

    def measured(self, step: int, label: str, facts: dict[str, Any]) -> None:
        """Record a benchmark's result on the line of its last update; only the first process has it."""
        if facts:
            self.write(step, benchmark.metrics(label, facts))
            self.progress.say(f"update {step}: {benchmark.described(facts)}")

    def advance(self, scored: Scored, metrics: list[Metrics], *, tokens_per_s: float) -> None:
        """End an iteration on the progress bar."""
        self.progress.advance(
            reward=float(np.nanmean(scored.total)),
            clip_fraction=float(metrics[-1]["clip_fraction/sequence"]),
            flip_rate=metrics[-1].get("routing/flip_rate"),
            tokens_per_s=tokens_per_s,
            accuracy=self._accuracy(),
        )

    def keep_samples(self, step: int, scored: Scored, tokenizer: Tokenizer, *, count: int) -> None:
        """Write and print about `count` completions, spread over the batch."""
        shown = np.arange(0, len(scored.total), max(1, len(scored.total) // count))
        tokens, mask = hosts.allgather((scored.rollout.tokens, scored.rollout.mask))
        kept = [row[keep].tolist() for row, keep in zip(tokens[shown], mask[shown], strict=True)]
        completions = [tokenizer.decode(ids, skip_special=False) for ids in kept]
        if self._samples is not None:
            self._samples.write(
                step,
                prompts=scored.texts[shown].tolist(),
                completions=completions,
                rewards=scored.total[shown].tolist(),
                answers=[record["answer"] for record in scored.records[shown]],
                special=tokenizer.special,
            )
        for i, completion in zip(shown, completions, strict=True):
            shortened = textwrap.shorten(completion, SHOWN_CHARACTERS, placeholder=" …")
            self.progress.say(f"  reward {scored.total[i]:.4g}  {scored.texts[i]!r} -> {shortened!r}")

    def summary(self, title: str) -> dict[str, dict[str, float]]:
        """Print and return the first and the last evaluation."""
        (_, first), (_, last) = self.evaluations[0], self.evaluations[-1]
        rows = [{"": name, "first": first[name], "last": last[name]} for name in first]
        self.progress.table(rows, title=title)
        return {"first": first, "last": last}

    def warn(self, text: str, *, about: str = "") -> None:
        """Print a warning, once per run; `about` tells it from others if its text changes."""
        if (about or text) not in self._warned:
            self._warned.add(about or text)
            self.progress.say(f"warning: {text}")

    def guard_config(self, objective: Objective, *, group_size: int) -> None:
        """Warn of settings under which nothing can be learned or clipped."""
        if text := clip_range_warning(objective):
            self.warn(text)
        if group_size == 1 and objective.critic is None:
            self.warn(
                "sampling.group_size is 1: advantages compare a response with its group, so all are exactly 0 and "
                "nothing is learned; use 2 or more, or ppo, which has a critic"
            )

    def guard_rounding(self, objective: Objective, first: Metrics, *, stale: int, recomputed: bool) -> None:
        """Warn if rounding gates responses in the first mini-batch of an iteration.

        Responses with `stale` tokens, which older policies sampled in partial rollouts, are off-policy and rightly
        gated, unless old log-probs are `recomputed`.
        """
        if recomputed or not stale:
            text = rounding_warning(objective, float(first["clip_fraction/sequence"]), recomputed=recomputed)
            if text is not None:
                self.warn(text, about="rounding")

    def guard_ratios(self, metrics: list[Metrics]) -> None:
        """Warn if an update has moved the policy but the importance ratios are still exactly 1."""
        for before, seen in itertools.pairwise(metrics):
            moved = float(before["actor/grad_norm"]) * float(before["actor/lr"]) > 0
            if moved and float(seen["update/tokens"]) and float(seen["ratio/token_log_max"]) == 0:
                self.warn(
                    "the importance ratio is exactly 1 for every token although the policy has been updated since "
                    "sampling: the old log-probs equal the new ones, and nothing is ever clipped"
                )


@contextmanager
def open_log(config: ConfigDict, workdir: Path, *, after_step: int | None, done: int) -> Iterator[RunLog]:
    """Open a run's log, dropping lines after step `after_step` (None: a new run); `done` iterations are over."""
    with ExitStack() as stack:
        writer = samples = None
        mirrors: list[Mirror] = []
        if project := config.log.wandb:
            copy = connect(workdir, project, config.to_dict(), resumed=after_step is not None)
            processes.check_first(lambda: mirrors.append(stack.enter_context(copy)))
        if processes.is_first():
            words = ["python", "-m", "gspo_jax.train", *sys.argv[1:]]
            command = shlex.join(words) if flags.FLAGS.is_parsed() else ""  # "" for a run from a notebook
            clear_end(workdir)
            write_config(workdir, config.to_dict(), command=command)
            writer = stack.enter_context(MetricsWriter(workdir, after_step=after_step, mirrors=mirrors))
            samples = SamplesWriter(workdir, after_step=after_step)
        processes.wait_for_all("run folder")  # from here on metrics.jsonl ends at `after_step`
        progress = stack.enter_context(Progress(config.iterations, label=config.objective.name, done=done))
        evaluations = [] if after_step is None else earlier_evaluations(workdir)
        yield RunLog(progress, writer=writer, samples=samples, evaluations=evaluations)


def earlier_evaluations(workdir: Path) -> list[tuple[int, dict[str, float]]]:
    """Evaluations recorded in metrics.jsonl, oldest first: iterations done, 0 for the first policy, and metrics."""
    rows = [row for row in read_metrics(workdir) if "eval/accuracy" in row]
    return [
        (row.get("iteration", 0), {name: value for name, value in row.items() if name.startswith("eval/")})
        for row in rows
    ]


def opening_lines(folder: str, *, done: int, total: int, resumed: bool, extensible: bool) -> list[str]:
    """Lines at the start of a run: where its curves are, if they can be looked at here, and where it goes on.

    An `extensible` one may have more iterations than it began with.
    """
    found = [f"curves: tensorboard --logdir={folder}/tb"] if importlib.util.find_spec("tensorboard") else []
    if done >= total:
        longer = f"; --config.iterations={2 * done} goes on" if extensible else ""
        return [*found, f"already finished: {done} iterations are done in {folder}{longer}"]
    return [*found, f"resuming from iteration {done} in {folder}"] if resumed else found


def iteration_metrics(clock: Clock, rounds: Rounds, sampler: Sampler) -> dict[str, Any]:
    """Metrics of a whole iteration, by name: times, sampling effort, compilation, throughput."""
    stats = sampler.stats
    return {
        **{f"timing/{phase}_s": seconds for phase, seconds in clock.seconds.items()},
        "timing/reward_share": clock.seconds["reward"] / clock.seconds["iteration"],
        **rounds.metrics(),
        **rounds.reward_metrics(),
        "reward/failed": rounds.failures,
        "reshard/bytes": sampler.copy_bytes,
        "timing/prefill_s": stats.prefill_s,
        "timing/decode_s": stats.decode_s,
        "decode/steps": stats.steps,
        "decode/occupancy": stats.occupancy,
        "decode/wasted": stats.slot_steps - stats.decode_tokens,
        "compile/programs": clock.compiled.programs,
        "compile/cached": clock.compiled.cached,
        "compile/seconds": clock.compiled.seconds,
        "throughput/tokens_per_s": stats.sampled_tokens / clock.seconds["iteration"],
        "throughput/sample_tokens_per_s": stats.sampled_tokens / clock.seconds["sample"],
    }


def response_columns(scored: Scored, shaping: Shaping, *, turns: bool, older: bool) -> dict[str, np.ndarray]:
    """Per-response values [B] on the host; those named "reward/…" become metrics of that name.

    `turns` and `older` select the columns of multi-turn episodes and of partial rollouts.
    """
    columns = {"reward/mean": scored.total} | {f"reward/{name}": x for name, x in scored.by_name.items()}
    if shaping.penalty:
        columns["reward/overlong"] = shaping.overlong(scored)
    G = shaping.group_size
    columns["reward/zero_std"] = np.repeat(~differ(scored.total, group_size=G), G).astype(np.float32)
    return columns | {
        "length": scored.lengths,
        "truncated": scored.truncated,
        "trainable": shaping.trainable_rows(scored),
        "drawn": scored.drawn,
        **({"turns": scored.turns} if turns else {}),
        **({"older": scored.stale_tokens} if older else {}),
    }


def response_metrics(columns: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Metrics of the responses of an update, by name; NaN for a reward that is NaN in all of them."""
    lengths = columns["length"]
    rewards = {name: x for name, x in columns.items() if name.startswith("reward/")}
    drawn, of_episodes = columns["drawn"].sum(), {}
    if "turns" in columns:
        of_episodes = {"response/turns": float(columns["turns"].mean()), "response/drawn": float(drawn / lengths.sum())}
    if "older" in columns:
        of_episodes["response/older"] = float(columns["older"].sum() / drawn)
    return {
        **{name: float(np.nanmean(x)) if np.isfinite(x).any() else math.nan for name, x in rewards.items()},
        "response_length/mean": float(lengths.mean()),
        "response_length/max": int(lengths.max()),
        "response/truncated": float(columns["truncated"].mean()),
        "response/empty": float(((lengths == 1) & ~columns["truncated"]).mean()),
        "response/learned": float(columns["trainable"].mean()),
        **of_episodes,
    }
