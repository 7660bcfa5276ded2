"""Published benchmarks: samples of every problem, kept to read, and what they say with intervals and the protocol.

    python -m gspo_jax.evaluate --config=configs/gsm8k.py --workdir=runs/gsm8k \\
        --benchmark=aime24 --data=aime24 --samples=32 --json=aime24.json

Answers are written batch by batch below `benchmarks/` of the run folder, in a file of this protocol. Started again
after a kill, the command goes on behind the last whole batch, with the same numbers as without.
"""

import collections
import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

import gspo_jax
from gspo_jax import engine, estimates, storage
from gspo_jax.data import benchmarks, rows
from gspo_jax.data.pipeline import EvalBatches, PromptBatch
from gspo_jax.data.records import Record
from gspo_jax.data.tokenizer import Tokenizer, decode_responses
from gspo_jax.parallel import hosts, processes
from gspo_jax.rewards.answers import final_answer
from gspo_jax.rewards.comparison import canonical
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.rollout.episodes import Player
from gspo_jax.setup import data, keys, policy, sampling
from gspo_jax.setup.checks import check
from gspo_jax.setup.meshes import make_meshes
from gspo_jax.storage import open_folder
from gspo_jax.training.digest import digest_tree
from gspo_jax.types import Weights

FOLDER = "benchmarks"
"""Folder of the answers, in a run folder."""
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
        batches = data.held_out_prompts(config, tokenizer, benchmark.records)
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
            answering = Answering(player, tokenizer, weights, of, meshes.trainer)
            return benchmark.measure(answering, batches, scorer, key, files.local / FOLDER)


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

    def make_scorer(self) -> Scorer:
        """The benchmark's rewards; all processes have to call it."""
        return data.make_scorer(self.config, scores=None if _is_file(self.name) else _applies)

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
        calls = self.samples // group
        protocol = self._protocol(answering, batches)
        starts = range(0, batches.usable, prompts)
        sizes = [group * min(prompts, batches.usable - start) for start in starts for _ in range(calls)]
        answers = _Answers(folder, Path(self.name).stem, protocol, sizes)
        for number_, batch in enumerate(batches):
            for call in range(number_ * calls, (number_ + 1) * calls):
                if call >= answers.done:
                    on_call()
                    first = (call - number_ * calls) * group
                    answers.add(call, _sampled(answering, batch, jax.random.fold_in(key, call), scorer, group, first))
        if not processes.is_first():
            return {}
        decides = functools.partial(_decides, self.config, self.name)
        compare = _answers_compare(self.name)
        found = summarize(list(answers), tuple(self.config.rewards), decides, majority=compare, seed=self.config.seed)
        facts = {"benchmark": self.name, "problems": batches.usable, "samples": self.samples, **found}
        return facts | {"left_out": batches.skipped, "protocol": protocol, "answers": str(answers.file)}

    def _protocol(self, answering: Answering, batches: EvalBatches) -> dict[str, Any]:
        """Everything that the numbers depend on."""
        from gspo_jax.rewards import isolated  # here, as it takes a second

        config = self.config
        first, math = next(iter(batches)), any(name in isolated.__all__ for name in config.rewards)
        packages = ["jax", "math-verify"] if math else ["jax"]
        return {
            "benchmark": self.name,
            "model": answering.name,
            "weights": digest_tree(answering.weights.whole),
            "gspo_jax": gspo_jax.__version__,
            "commit": _commit(),
            "first_prompt": first.texts[0],
            "system": config.data.system,
            "few_shot": config.data.few_shot,
            "instruction": first.records[0].get("instruction", ""),
            "environment": config.environment.name,
            "sampling": {k: str(v) for k, v in vars(sampling.make_sampling(config)).items()},
            "samples": self.samples,
            "max_prompt_tokens": config.data.max_prompt_length,
            "max_response_tokens": config.sampling.max_response_length,
            "dtype": config.model.dtype,
            "rewards": list(config.rewards),
            "extraction": {name: EXTRACTION[name] for name in config.rewards if name in EXTRACTION},
            "timeout_s": config.scoring.timeout_s,
            "versions": {package: importlib.metadata.version(package) for package in packages},
            "seed": config.seed,
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
    problems: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        problems.setdefault(row["id"], []).append(row)
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
        by_problem |= {
            f"majority {k}": np.array(
                [estimates.majority_at(k, a, r, seed=seed + i) for i, (a, r) in enumerate(judged)]
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
    return name.endswith(rows.FORMATS)


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


def _sampled(
    answering: Answering, batch: PromptBatch, key: jax.Array, scorer: Scorer, group: int, first: int
) -> list[dict[str, Any]]:
    """Rows of `group` answers to each problem of a batch, numbered from `first`; only the first process has them."""
    mesh, tokenizer = answering.mesh, answering.tokenizer
    played = answering.player.play(batch.prompts, batch.texts, batch.records, key)
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
            "id": played.records[row]["id"],
            "sample": first + row % group,
            "completion": completions[row],
            "tokens": int(mask[row].sum()),
            "truncated": bool(cut[row]),
            "answer": answer_of(played.texts[row], completions[row]),
            "scores": {n: float(v) if np.isfinite(v) else None for n, v in zip(names, values[row], strict=True)},
            "asked": dict(zip(names, map(bool, asked[row]), strict=True)),
        }
        for row in range(B)
        if batch.valid[row // group]
    ]


class _Answers:
    """The file of answers of one protocol, of which whole batches are kept."""

    def __init__(self, folder: Path, name: str, protocol: dict[str, Any], sizes: Sequence[int]) -> None:
        """Open the file, with the whole ones of its batches; `sizes` are the rows of each."""
        digest = hashlib.sha256(json.dumps(protocol, sort_keys=True).encode()).hexdigest()[:8]
        self.file = folder / f"{name}-{digest}.jsonl"
        done = ""
        if processes.is_first():
            folder.mkdir(parents=True, exist_ok=True)
            rows = list(self) if self.file.exists() else []
            there = collections.Counter(row["batch"] for row in rows)
            whole = next((number for number, size in enumerate(sizes) if there[number] < size), len(sizes))
            kept = [row for row in rows if row["batch"] < whole]
            self._write("w", kept)
            if whole:
                print(f"{self.file} has the answers of {whole} of {len(sizes)} batches")
            done = str(whole)
        self.done = int(hosts.first_nonempty(done))
        """Number of whole batches."""

    def add(self, batch: int, rows: Sequence[dict[str, Any]]) -> None:
        """Append a batch's rows, on the disk when this returns."""
        if processes.is_first():
            self._write("a", [{"batch": batch, **row} for row in rows])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with open(self.file, encoding="utf-8") as lines:
            for line in lines:
                try:
                    yield json.loads(line)
                except ValueError:  # cut by a kill; its batch is sampled again
                    return

    def _write(self, mode: str, rows: Sequence[dict[str, Any]]) -> None:
        with open(self.file, mode, encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
        storage.sync(self.file.parent)


def _commit() -> str:
    """The commit of this package's source, "" if it is not in a repository."""
    try:
        words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
