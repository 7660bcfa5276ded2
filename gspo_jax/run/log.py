"""A run's log: metrics, samples, evaluations, progress and warnings."""

import importlib.util
import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.engine import Engine
from gspo_jax.folder.metrics import MetricsWriter, Mirror, read_metrics
from gspo_jax.folder.notes import ORIGIN_FILE, clear_end, note, write_changes, write_config
from gspo_jax.folder.samples import SamplesWriter
from gspo_jax.folder.storage import HELD_OUT
from gspo_jax.folder.weights_and_biases import connect
from gspo_jax.measuring import published
from gspo_jax.measuring.gamed import gamed
from gspo_jax.measuring.held_out import Evaluation, is_evaluated, samples_of
from gspo_jax.objectives import Objective
from gspo_jax.objectives.guards import clip_range_warning, rounding_warning
from gspo_jax.parallel import hosts, processes
from gspo_jax.progress import Progress
from gspo_jax.rollout.rounds import Rounds
from gspo_jax.run.clock import Clock
from gspo_jax.training.metrics import Metrics
from gspo_jax.training.packing import take_minibatch
from gspo_jax.training.shaping import Shaping, differ
from gspo_jax.types import Batch

SHOWN_CHARACTERS = 400
"""Maximum characters of a completion on the terminal."""
LEAST_WHOLE = 0.9
"""Share of tokens whose kept sets should be whole."""


class RunLog:
    """Writes a run's metrics and samples, and shows its progress."""

    def __init__(
        self,
        progress: Progress,
        *,
        writer: MetricsWriter | None = None,
        samples: SamplesWriter | None = None,
        held_out: SamplesWriter | None = None,
        evaluations: Sequence[tuple[int, dict[str, float]]] = (),
    ):
        """The writers are None except on the first process."""
        self.progress, self._writer, self._samples, self._held_out = progress, writer, samples, held_out
        self.evaluations = list(evaluations)
        """Iterations done and metrics of each evaluation."""
        self._warned: set[str] = set()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write metrics of a step. Every process passes the same values."""
        if self._writer is not None:
            self._writer.write(step, metrics)

    def sync(self) -> None:
        """Return once all written metrics are on disk."""
        if self._writer is not None:
            self._writer.sync()

    def note_start(
        self,
        workdir: Path,
        *,
        origin: Mapping[str, Any] | None,
        changes: Sequence[Mapping[str, Any]],
        said: Sequence[str],
    ) -> None:
        """Note in the run folder where the run began and which fields have changed since, and print lines about it."""
        if self._writer is not None:
            write_changes(workdir, changes)
            if origin is not None:
                note(workdir, ORIGIN_FILE, **origin)
        for text in said:
            self.progress.say(text)

    def updates(
        self, step: int, line: Mapping[str, Any], columns: Mapping[str, Any], metrics: list[Metrics], *, group_size: int
    ) -> None:
        """Write one line per update of an iteration. `line`, the iteration's metrics, joins the last.

        `step` is the newest update, and `columns` are from `response_columns`.
        """
        iteration = {"iteration": line["iteration"]}
        for i, seen in enumerate(metrics):
            own = take_minibatch(columns, i, count=len(metrics), group_size=group_size)
            row = {**iteration, "minibatch": i, **response_metrics(own)}
            # Only the first mini-batch is scored with the sampling weights.
            row |= {name: value for name, value in seen.items() if i == 0 or not name.startswith("mismatch/")}
            row |= line if i + 1 == len(metrics) else {}
            self.write(step - len(metrics) + 1 + i, row)
        self.guard_ratios(metrics)

    def evaluated(self, step: int, iteration: int, result: Evaluation) -> None:
        """Record a held-out evaluation on its last update's line, and its examples."""
        self.evaluations.append((iteration, result.metrics()))
        self.write(step, result.metrics())
        if self._held_out is not None:
            self._held_out.write(step, result.examples)
        self.progress.keep(**self._quality())
        self.progress.say(f"update {step}: {result}")
        if result.warning:
            self.warn(result.warning, about="graded")
        if text := gamed(self.evaluations[0][1], result.metrics()):
            self.warn(text, about="gamed")

    def _quality(self) -> dict[str, tuple[float, int] | None]:
        """Return the newest held-out accuracy, or else mean reward, with its iteration."""
        iteration, metrics = self.evaluations[-1] if self.evaluations else (0, dict[str, float]())
        found = {"accuracy": metrics.get("eval/accuracy"), "held_out_reward": metrics.get("eval/reward")}
        if found["accuracy"] is not None:
            found["held_out_reward"] = None
        return {name: None if value is None else (value, iteration) for name, value in found.items()}

    def measured(self, step: int, label: str, facts: dict[str, Any]) -> None:
        """Record a benchmark's result, empty except on the first process."""
        if facts:
            self.write(step, published.metrics(label, facts))
            self.progress.say(f"update {step}: {published.described(facts)}")

    def advance(self, batch: Batch, metrics: list[Metrics], *, tokens_per_s: float) -> None:
        """End an iteration on the progress bar."""
        self.progress.advance(
            reward=float(np.nanmean(batch.rewards.total)) if batch.rewards.by_name else None,
            teacher_kl=float(metrics[-1]["teacher/kl"]) if "teacher/kl" in metrics[-1] else None,
            clip_fraction=float(metrics[-1]["clip_fraction/sequence"]),
            flip_rate=metrics[-1].get("routing/flip_rate"),
            tokens_per_s=tokens_per_s,
            **self._quality(),
        )

    def keep_samples(self, step: int, batch: Batch, tokenizer: Tokenizer, *, count: int) -> None:
        """Write and print about `count` completions, spread over the packed batch."""
        total = batch.rewards.total
        shown = np.arange(0, len(total), max(1, len(total) // count))
        tokens, mask = hosts.fetch_places((batch.rollout.tokens, batch.rollout.mask), batch.packing.places[shown])
        samples = samples_of(batch, batch.rewards, shown, tokens, mask, tokenizer)
        if self._samples is not None:
            self._samples.write(step, samples)
        for i, sample in zip(shown, samples, strict=True):
            shortened = textwrap.shorten(sample["completion"], SHOWN_CHARACTERS, placeholder=" …")
            self.progress.say(f"  reward {total[i]:.4g}  {batch.texts[i]!r} -> {shortened!r}")

    def summary(self, title: str) -> dict[str, dict[str, float]]:
        """Print and return the first and last evaluation, if there is any."""
        if not self.evaluations:
            return {}
        (_, first), (_, last) = self.evaluations[0], self.evaluations[-1]
        rows = [{"": name, "first": first.get(name), "last": last.get(name)} for name in first | last]
        self.progress.table(rows, title=title)
        return {"first": first, "last": last}

    def warn(self, text: str, *, about: str = "") -> None:
        """Print a warning once per run. `about` identifies changing texts."""
        if (about or text) not in self._warned:
            self._warned.add(about or text)
            self.progress.say(f"warning: {text}")

    def guard_config(self, objective: Objective, *, group_size: int, taught: bool) -> None:
        """Warn of settings that prevent learning or clipping. `taught`: there is a teacher."""
        if text := clip_range_warning(objective):
            self.warn(text)
        if group_size == 1 and objective.critic is None and not taught:
            self.warn(
                "sampling.group_size is 1: advantages compare a response with its group, so all are exactly 0 and "
                "nothing is learned; use 2 or more, or ppo, which has a critic"
            )

    def guard_rounding(self, objective: Objective, first: Metrics, *, stale: int, recomputed: bool) -> None:
        """Warn if rounding gates responses in the first mini-batch of an iteration.

        Responses with `stale` tokens, from older policies, are rightly gated unless old log-probs are `recomputed`.
        """
        if recomputed or not stale:
            text = rounding_warning(objective, float(first["clip_fraction/learning"]), recomputed=recomputed)
            if text is not None:
                self.warn(text, about="rounding")

    def guard_kept(self, whole: float) -> None:
        """Warn if truncation left more ids than are recorded for many of an iteration's tokens, all but `whole`."""
        if whole < LEAST_WHOLE:
            self.warn(
                f"for {1 - whole:.0%} of the tokens top_k, top_p or min_p left more ids than sampling.keep_top "
                "records: they are compared over the full softmax, from which they were not sampled, and ratios and KL "
                "are biased; raise sampling.keep_top",
                about="kept",
            )

    def guard_ratios(self, metrics: list[Metrics]) -> None:
        """Warn if importance ratios are still exactly 1 after an update moved the policy."""
        for before, seen in itertools.pairwise(metrics):
            moved = float(before["actor/grad_norm"]) * float(before["actor/lr"]) > 0
            if moved and float(seen["update/tokens"]) and float(seen["ratio/token_log_max"]) == 0:
                self.warn(
                    "the importance ratio is exactly 1 for every token although the policy has been updated since "
                    "sampling: the old log-probs equal the new ones, and nothing is ever clipped"
                )


@contextmanager
def open_log(config: ConfigDict, workdir: Path, *, after_step: int | None, done: int, command: str) -> Iterator[RunLog]:
    """Open a run's log, dropping lines after step `after_step` (None: a new run)."""
    with ExitStack() as stack:
        writer = samples = held_out = None
        mirrors: list[Mirror] = []
        if project := config.log.wandb:
            begin = partial(connect, workdir, project, config.to_dict(), resumed=after_step is not None)
            processes.ask_first(lambda: mirrors.append(begin()))
        if processes.is_first():
            clear_end(workdir)
            write_config(workdir, config.to_dict(), command=command)
            writer = stack.enter_context(MetricsWriter(workdir, after_step=after_step, mirrors=mirrors))
            samples = SamplesWriter(workdir, after_step=after_step)
            held_out = SamplesWriter(workdir, after_step=after_step, folder=HELD_OUT)
        processes.wait_for_all("run folder")  # metrics.jsonl now ends at `after_step`
        progress = stack.enter_context(Progress(config.iterations, label=config.objective.name, done=done))
        evaluations = [] if after_step is None else earlier_evaluations(workdir)
        yield RunLog(progress, writer=writer, samples=samples, held_out=held_out, evaluations=evaluations)


def earlier_evaluations(workdir: Path) -> list[tuple[int, dict[str, float]]]:
    """Return iterations done and metrics of earlier evaluations, oldest first."""
    rows = [row for row in read_metrics(workdir) if is_evaluated(row)]
    return [
        (row.get("iteration", 0), {name: value for name, value in row.items() if name.startswith("eval/")})
        for row in rows
    ]


def opening_lines(folder: str, *, done: int, total: int, resumed: bool, extensible: bool) -> list[str]:
    """Return the lines printed at a run's start. An `extensible` run may get more iterations later."""
    found = [f"curves: tensorboard --logdir={folder}/tb"] if importlib.util.find_spec("tensorboard") else []
    if done >= total:
        longer = f"; --config.iterations={2 * done} goes on" if extensible else ""
        return [*found, f"already finished: {done} iterations are done in {folder}{longer}"]
    return [*found, f"resuming from iteration {done} in {folder}"] if resumed else found


def iteration_metrics(clock: Clock, engine: Engine, batch: Batch, rounds: Rounds | None) -> dict[str, Any]:
    """Return an iteration's metrics by name."""
    sampler = engine.sampler
    stats, rewards = sampler.stats, [batch.rewards] if rounds is None else rounds.rewards
    found = {
        **{f"timing/{phase}_s": seconds for phase, seconds in clock.seconds.items()},
        "timing/reward_share": clock.seconds["reward"] / clock.seconds["iteration"],
        **({} if rounds is None else rounds.metrics()),
        **engine.packer.metrics(batch.packing, batch.lengths, batch.prompt_lengths),
        "reward/failed": sum(int(np.isnan(each.total).sum()) for each in rewards),
        "reshard/bytes": sampler.copy_bytes,
        "timing/prefill_s": stats.prefill_s,
        "timing/decode_s": stats.decode_s,
        "decode/steps": stats.steps,
        "decode/occupancy": stats.occupancy,
        "decode/pool": stats.pool,
        "decode/wasted": stats.slot_steps - stats.busy_steps,
        "decode/tokens_per_step": stats.tokens_per_step,
        "decode/accepted": stats.acceptance,
        "compile/programs": clock.compiled.programs,
        "compile/cached": clock.compiled.cached,
        "compile/seconds": clock.compiled.seconds,
        "throughput/tokens_per_s": stats.sampled_tokens / clock.seconds["iteration"],
        "throughput/sample_tokens_per_s": stats.sampled_tokens / clock.seconds["sample"],
    }
    if batch.failed is not None and batch.failed.any():
        found["episode/failed"] = int(batch.failed.sum())
    for each in rewards:
        for name, failed in each.failed.items():
            found[f"reward/{name}/failed"] = found.get(f"reward/{name}/failed", 0) + int(failed.sum())
    if sampler.sampling.recorded:
        found[f"sampling/kept_{'whole' if sampler.sampling.truncates else 'mass'}"] = stats.kept_share
    without = [each.without_worker for each in rewards if each.without_worker is not None]
    return found | ({"reward/without_worker": float(np.concatenate(without).mean())} if without else {})


def response_columns(batch: Batch, shaping: Shaping, *, turns: bool, older: bool) -> dict[str, np.ndarray]:
    """Return per-response values [B] on the host. Names "reward/…" are also metric names."""
    rewards = batch.rewards
    columns = {f"reward/{name}": x for name, x in rewards.by_name.items()}
    if shaping.penalty:
        columns["reward/overlong"] = shaping.overlong(batch)
    G = shaping.group_size
    if rewards.by_name:
        columns["reward/mean"] = rewards.total
        columns["reward/zero_std"] = np.repeat(~differ(rewards.total, group_size=G), G).astype(np.float32)
    return columns | {
        "length": batch.lengths,
        "truncated": batch.truncated,
        "trainable": shaping.trainable(batch),
        "drawn": batch.drawn,
        **({"turns": batch.turns} if turns else {}),
        **({"older": batch.stale_tokens} if older else {}),
    }


def response_metrics(columns: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return metrics of an update's responses. A reward is NaN only if all its values are."""
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
