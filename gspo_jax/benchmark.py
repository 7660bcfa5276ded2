"""Published benchmarks: samples of every problem, kept to read, and what they say with intervals and the protocol.

    python -m gspo_jax.evaluate --config=configs/gsm8k.py --workdir=runs/gsm8k \\
        --benchmark=aime24 --data=aime24 --samples=32 --json=aime24.json

Answers are written call by call below `benchmarks/` of the run folder, in a file of this protocol. Started again after
a kill, the command samples what is missing, with the same numbers as without. The protocol has all that answers and
scores depend on: they are never those of other weights, problems, files or settings.
"""

import functools
import importlib.metadata
import itertools
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

import gspo_jax
from gspo_jax import engine, estimates, storage
from gspo_jax.data import benchmarks, contents, files
from gspo_jax.data.pipeline import EvalBatches, PromptBatch
from gspo_jax.data.records import Record
from gspo_jax.data.tokenizer import Tokenizer, decode_responses
from gspo_jax.parallel import hosts, processes
from gspo_jax.rewards.answers import final_answer
from gspo_jax.rewards.comparison import canonical
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.rollout.episodes import Player
from gspo_jax.setup import data, inputs, keys, policy, relevance, sampling
from gspo_jax.setup.checks import check
from gspo_jax.setup.meshes import make_meshes
from gspo_jax.storage import open_folder
from gspo_jax.training.digest import digest_tree
from gspo_jax.types import Weights

EXTRACTION = {
    "math_verify": r"strict: behind the last thought, what is announced last, by ####, \boxed{} or 'answer is'",
    "math_verify_flexible": "flexible: the same, else the last number or formula of the text",
}
"""How rewards find the answer, for the protocol."""


def run(config: ConfigDict, workdir: str | Path, *, name: str, place: str, samples: int) -> dict[str, Any]:
    """Sample and score a benchmark with the newest checkpoint of a run folder, or its initial policy.

    Args:
      config: of the run; its prompts' style, sampling and limits are the protocol's.
      workdir: run folder.
      name: a benchmark of data/benchmarks.py, or a file of rows (data/rows.py), which the config's rewards score.
      place: folder or file of the benchmark; "" for a file of rows.
      samples: responses to every problem.

    Returns:
      `benchmark`, `problems`, `samples`; `mean`, `pass` and `majority` by k, and `intervals` of these, of the reward
      that decides; `means`, of every reward; shares `truncated` and `failed`; `left_out`, problems whose prompts do not
      fit; `protocol`; `answers`, the file of answers. None where too few samples have a score. Only the first process
      has them, the others {}.

    Raises:
      UserError: the benchmark is unknown or unreadable, or does not fit the config.
      RuntimeError: no response could be scored.
    """
    benchmark = Benchmark.read(config, name, place, samples=samples)
    config = benchmark.config
    config.sampling.group_size = samples
    check(config, count_devices=jax.device_count)
    policy.check_weights(config)
    with open_folder(workdir, write=False) as files:
        model, tokenizer = policy.read_run(config, files)
        batches = benchmark.prompts(tokenizer)
        meshes = make_meshes(config, model)
        with (
            jax.set_mesh(meshes.trainer),
            benchmark.make_scorer() as scorer,
            sampling.make_replies(config) as replies,
        ):
            made = engine.build(config, model, meshes, sampling.stop_rule_of(config, tokenizer))
            weights, of = policy.newest_weights(config, files, made.policy, meshes.trainer)
            made.sampler.load(weights)
            player = sampling.make_player(config, tokenizer, made.sampler, replies)
            key = keys.eval_key(keys.run_key(config))
            read = inputs.of_run(config, policy.initial_folder(config, files.local))
            answering = Answering(player, tokenizer, weights, of, read, meshes.trainer)
            return benchmark.measure(answering, batches, scorer, key, files.local / storage.BENCHMARKS)


def of_run(config: ConfigDict) -> "dict[str, Benchmark]":
    """Read the benchmarks that a run takes, by their labels.

    Raises:
      UserError: a benchmark is unreadable, or does not fit the config.
    """
    found = {}
    for label, section in config.benchmarks.items():
        if section.every:
            name, place = (label, section.data) if label in benchmarks.BENCHMARKS else (section.data, "")
            found[label] = Benchmark.read(config, name, place, samples=section.samples)
            check(found[label].config)
    return found


@dataclass(frozen=True)
class Answering:
    """A policy that answers benchmarks."""

    player: Player
    """Plays the episodes, with the sampler's loaded weights."""
    tokenizer: Tokenizer
    weights: Weights
    name: str
    """Name in the protocol, such as "iteration 100"."""
    files: Mapping[str, str]
    """Digests of the files that it and the rewards are made from, see setup/inputs.py."""
    mesh: Mesh
    """The trainer's."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark that has been read, and how it is sampled and judged."""

    name: str
    """Name in data/benchmarks.py, or a file of rows."""
    config: ConfigDict
    """Config of the run, with the benchmark's data and rewards."""
    records: Sequence[Record]
    samples: int
    """Responses to every problem."""

    @classmethod
    def read(cls, config: ConfigDict, name: str, place: str, *, samples: int) -> "Benchmark":
        """Read a benchmark for runs of a config; see `run` for the arguments and what is raised."""
        config = _changed(config, name)
        records = data.load_records(config, "test") if _is_file(name) else benchmarks.read(name, place)
        return cls(name, config, records, samples)

    def prompts(self, tokenizer: Tokenizer) -> EvalBatches:
        """The prompts of its records."""
        return data.held_out_prompts(self.config, tokenizer, self.records, scores=self._scores)

    def make_scorer(self) -> Scorer:
        """The benchmark's rewards; all processes have to call it."""
        return data.make_scorer(self.config, scores=self._scores)

    @property
    def _scores(self) -> data.Scores | None:
        return None if _is_file(self.name) else _applies

    def measure(
        self,
        answering: Answering,
        batches: EvalBatches,
        scorer: Scorer,
        key: jax.Array,
        folder: Path,
        *,
        on_call: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Sample and score what `folder` has no answers of; return what `run` does.

        Args:
          answering: the policy; a call samples `sampling.group_size` responses, of which `samples` is a multiple.
          batches: the prompts of `records`.
          scorer: of `make_scorer`.
          key: the same key gives the same sampling noise.
          folder: of the files of answers.
          on_call: called before every sampling call.
        """
        prompts, group = self.config.data.prompts_per_batch, self.config.sampling.group_size
        protocol = self._protocol(answering, batches)
        calls = [
            Call(range(start, min(start + prompts, batches.usable)), range(first, first + group))
            for start in range(0, batches.usable, prompts)
            for first in range(0, self.samples, group)
        ]
        answers = _Answers(folder, Path(self.name).stem, protocol, calls)
        numbered = iter(enumerate(calls))
        for batch in batches:
            for number_, call in itertools.islice(numbered, self.samples // group):
                if number_ >= answers.done:
                    on_call()
                    answers.add(_sampled(answering, batch, key, scorer, call))
        if not processes.is_first():
            return {}
        decides = functools.partial(_decides, self.config, self.name)
        compare = _answers_compare(self.name)
        found = summarize(answers.rows(), tuple(self.config.rewards), decides, majority=compare, seed=self.config.seed)
        facts = {"benchmark": self.name, "problems": batches.usable, "samples": self.samples, **found}
        return facts | {"left_out": batches.skipped, "protocol": protocol, "answers": str(answers.file)}

    def _protocol(self, answering: Answering, batches: EvalBatches) -> dict[str, Any]:
        """Everything that answers and their scores depend on."""
        from gspo_jax.rewards import isolated  # here, as it takes a second

        rewards, device = self.config.rewards, answering.mesh.devices.flat[0]
        packages = ["jax", *(["math-verify"] if any(name in isolated.__all__ for name in rewards) else [])]
        return {
            "benchmark": self.name,
            "problems": batches.content,
            "first_prompt": next(iter(batches)).texts[0],
            "samples": self.samples,
            "model": answering.name,
            "weights": digest_tree(answering.weights.whole),
            "files": dict(answering.files),
            "settings": relevance.of_answers(self.config),
            "extraction": {name: EXTRACTION[name] for name in rewards if name in EXTRACTION},
            "gspo_jax": gspo_jax.__version__,
            "commit": _commit(),
            "source": _source(),
            "versions": {package: importlib.metadata.version(package) for package in packages},
            "devices": {"kind": device.device_kind, "mesh": dict(answering.mesh.shape)},
        }


def summarize(
    rows: Sequence[dict[str, Any]],
    rewards: Sequence[str],
    decides: Callable[[Record], str],
    *,
    majority: bool,
    seed: int,
) -> dict[str, Any]:
    """Return the numbers of answers, see `run`; `decides` is asked with each problem's first row."""
    problems: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        problems.setdefault(row["problem"], []).append(row)
    judged = []  # of each problem: the answers and whether they are right, of the samples that have a score
    for samples in problems.values():
        name = decides(samples[0])
        scored = [row for row in samples if row["scores"][name] is not None]
        judged.append(
            ([row["answer"] for row in scored], np.array([row["scores"][name] > 0.5 for row in scored], bool))
        )
    right, count = (np.array(column, int) for column in zip(*((r.sum(), len(r)) for _, r in judged), strict=True))
    if not count.any():
        raise RuntimeError(f"none of the {len(rows)} responses could be scored; check the benchmark's records")
    most = max(map(len, problems.values()))
    ks = sorted({most, *(2**i for i in range(most.bit_length()) if 2**i <= most)})
    with np.errstate(invalid="ignore"):
        by_problem = {"mean": right / count, **{f"pass {k}": estimates.pass_at(k, right, count) for k in ks}}
    if majority:
        seeds = np.random.SeedSequence(seed).generate_state(len(judged)).tolist()
        by_problem |= {
            f"majority {k}": np.array(
                [estimates.majority_at(k, a, r, seed=own) for own, (a, r) in zip(seeds, judged, strict=True)]
            )
            for k in ks
        }
    # A problem with fewer than k samples that have a score is left out of what needs k.
    mean = {name: _mean(values) for name, values in by_problem.items()}
    between = {name: _finite(estimates.interval(values, seed=seed)) for name, values in by_problem.items()}
    means = {
        name: _mean(np.array([_mean(_scores(samples, name)) for samples in problems.values()], float))
        for name in rewards
    }
    total = sum(map(len, problems.values()))
    return {
        "mean": mean["mean"],
        "pass": {str(k): mean[f"pass {k}"] for k in ks},
        "majority": {str(k): mean[f"majority {k}"] for k in ks} if majority else {},
        "intervals": {
            "mean": between["mean"],
            "pass": {str(k): between[f"pass {k}"] for k in ks},
            "majority": {str(k): between[f"majority {k}"] for k in ks} if majority else {},
        },
        "means": means,
        "truncated": sum(row["truncated"] for row in rows) / total,
        "failed": 1 - int(count.sum()) / total,
    }


def metrics(label: str, facts: dict[str, Any]) -> dict[str, float]:
    """Return a result by its names in metrics.jsonl."""
    k, spans = str(facts["samples"]), facts["intervals"]
    low, high = spans["mean"] or (None, None)
    found = {
        "": facts["mean"],
        "_low": low,
        "_high": high,
        "_pass_at_k": facts["pass"][k],
        "_majority_at_k": facts["majority"].get(k),
        "_failed": facts["failed"],
        "_truncated": facts["truncated"],
    }
    return {f"benchmark/{label}{name}": value for name, value in found.items() if value is not None}


def described(facts: dict[str, Any]) -> str:
    """Return a result in a few lines."""

    def share(value: float | None, between: Sequence[float] | None) -> str:
        return "–" if value is None or between is None else f"{value:.3f} [{between[0]:.3f}, {between[1]:.3f}]"

    n, spans = facts["samples"], facts["intervals"]
    lines = [f"{facts['benchmark']}: {facts['problems']} problems, {n} samples of each"]
    lines[0] += f"; in brackets {estimates.COVERAGE:.0%} intervals"
    lines.append(f"mean@{n} {share(facts['mean'], spans['mean'])}")
    for kind in ("pass", "majority"):
        lines += [f"{kind}@{k} {share(value, spans[kind][k])}" for k, value in facts[kind].items()]
    lines.append("; ".join(f"{name} {'–' if mean is None else f'{mean:.3f}'}" for name, mean in facts["means"].items()))
    lines.append(
        f"{facts['truncated']:.1%} cut, {facts['failed']:.1%} could not be scored; answers: {facts['answers']}"
    )
    return "\n".join(lines)


def answer_of(prompt: str, completion: str) -> str | None:
    """Return the announced final answer, in one form of all that are the same; None if none is announced."""
    found = final_answer(prompt, completion)
    return None if found is None else canonical(found)


def _mean(values: np.ndarray) -> float | None:
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


def _finite(between: tuple[float, float]) -> list[float] | None:
    return list(between) if np.isfinite(between).all() else None


def _scores(samples: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([np.nan if row["scores"][name] is None else row["scores"][name] for row in samples], float)


def _is_file(name: str) -> bool:
    return name.endswith(files.FORMATS)


def _answers_compare(name: str) -> bool:
    return _is_file(name) or benchmarks.BENCHMARKS[name].answers_compare


def _changed(config: ConfigDict, name: str) -> ConfigDict:
    """The config with the benchmark's data and rewards."""
    config = config.copy_and_resolve_references()
    config.step_rewards = ConfigDict()
    config.data.task, config.data.folder, config.data.train, config.data.test = "jsonl", "", name, name
    config.data.sources = ConfigDict()
    config.eval.prompts = 0
    if not _is_file(name):
        if name not in benchmarks.BENCHMARKS:
            benchmarks.read(name, "")  # says what there is
        rewards = benchmarks.BENCHMARKS[name].rewards
        config.rewards = ConfigDict({reward: float(not place) for place, reward in enumerate(rewards)})
        config.eval.correct = rewards[0]
    return config


def _applies(reward: str, record: Record) -> bool:
    """Whether a record has what a reward reads: problems of LiveCodeBench are of two kinds."""
    return {"code_stdin": "inputs", "code_tests": "test"}.get(reward, "") in ("", *_kinds(record))


def _kinds(record: Record) -> list[str]:
    return [kind for kind in ("inputs", "test") if kind in record or (kind == "test" and "test_list" in record)]


def _decides(config: ConfigDict, name: str, row: dict[str, Any]) -> str:
    if _is_file(name):
        return str(config.eval.correct)
    return next(reward for reward in config.rewards if row["asked"][reward])


class Call(NamedTuple):
    """Problems, and samples of each, that one sampling call makes."""

    problems: range
    """Numbers of the problems, among those in use."""
    samples: range
    """Numbers of the samples of each of them."""


def _sampled(
    answering: Answering, batch: PromptBatch, key: jax.Array, scorer: Scorer, call: Call
) -> list[dict[str, Any]]:
    """A row for each answer of a call; only the first process has them.

    Noise is that of the problem and the sample, whatever else is in the batch.
    """
    mesh, tokenizer, group = answering.mesh, answering.tokenizer, len(call.samples)
    key, first = jax.random.fold_in(key, call.samples.start // group), call.problems.start * group
    played = answering.player.play(batch.prompts, batch.texts, batch.records, key, first=first)
    rollout, B = played.rollout, len(played.texts)
    own = hosts.own_rows(mesh, B)
    tokens, mask, cut = hosts.fetch_own_rows(mesh, (rollout.tokens, rollout.mask, rollout.truncated))
    records = played.records[own].tolist()
    scores = scorer.score(played.texts[own].tolist(), decode_responses(tokenizer, tokens, mask), records)
    names = list(scores.by_name)
    asked = np.array([[scorer.asks(name, record) for record in records] for name in names], bool)
    columns = (tokens, mask, cut, np.stack(list(scores.by_name.values()), axis=1), asked.T)
    tokens, mask, cut, values, asked = hosts.allgather_rows(mesh, columns, B)
    if not processes.is_first():
        return []
    completions = decode_responses(tokenizer, tokens, mask)
    return [
        {
            "problem": problem,
            "id": played.records[row]["id"],
            "sample": sample,
            "completion": completions[row],
            "tokens": int(mask[row].sum()),
            "truncated": bool(cut[row]),
            "answer": answer_of(played.texts[row], completions[row]),
            "scores": {n: float(v) if np.isfinite(v) else None for n, v in zip(names, values[row], strict=True)},
            "asked": dict(zip(names, map(bool, asked[row]), strict=True)),
        }
        for row, (problem, sample) in enumerate(itertools.product(call.problems, call.samples))
    ]


class _Answers:
    """The file of answers of one protocol, of which those of whole calls are kept."""

    def __init__(self, folder: Path, name: str, protocol: dict[str, Any], calls: Sequence[Call]) -> None:
        """Open the file, with what it has of whole calls."""
        self.file = folder / f"{name}-{contents.digest(protocol)[:8]}.jsonl"
        done = ""
        if processes.is_first():
            folder.mkdir(parents=True, exist_ok=True)
            rows = self._read() if self.file.exists() else {}
            wanted = [list(itertools.product(*call)) for call in calls]
            whole = list(itertools.takewhile(lambda call: all(answer in rows for answer in call), wanted))
            self._write("w", [rows[answer] for call in whole for answer in call])
            if whole:
                print(f"{self.file} has the answers of {len(whole)} of {len(calls)} batches")
            done = str(len(whole))
        self.done = int(hosts.first_nonempty(done))
        """Number of whole calls, from the first on."""

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append a call's rows, on the disk when this returns."""
        if processes.is_first():
            self._write("a", rows)

    def rows(self) -> list[dict[str, Any]]:
        """All rows, sample by sample of each problem."""
        found = self._read()
        return [found[answer] for answer in sorted(found)]

    def _read(self) -> dict[tuple[int, int], dict[str, Any]]:
        """The rows by the numbers of problem and sample; of equal ones, which two commands may write, the first."""
        found: dict[tuple[int, int], dict[str, Any]] = {}
        with open(self.file, "rb") as lines:
            for line in lines:
                try:
                    row = json.loads(line)
                    found.setdefault((row["problem"], row["sample"]), row)
                except (ValueError, KeyError, TypeError, RecursionError):  # cut or damaged; its call is sampled again
                    break
        return found

    def _write(self, mode: str, rows: Sequence[dict[str, Any]]) -> None:
        with open(self.file, mode, encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
        storage.sync(self.file.parent)


@functools.cache
def _source() -> str:
    """Digest of this package's source files, which its commit leaves open as long as they are changed."""
    folder = Path(__file__).parent
    return contents.digest({str(file.relative_to(folder)): contents.file_digest(file) for file in folder.rglob("*.py")})


@functools.cache
def _commit() -> str:
    """The commit of this package's source, "" if it is not in a repository."""
    try:
        words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
