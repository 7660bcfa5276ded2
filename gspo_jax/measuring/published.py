"""Published benchmarks: samples of every problem, and results with intervals and protocol.

    python -m gspo_jax.evaluate --config=configs/gsm8k.py --workdir=runs/gsm8k \\
        --benchmark=aime24 --data=aime24 --samples=32 --json=aime24.json

Answers are written call by call below `benchmarks/` of the run folder, a file per protocol. A restarted command samples
what is missing, with the same results. The protocol holds all that answers and scores depend on, so they are never
reused for other weights, problems, files or settings.
"""

import functools
import importlib.metadata
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

import gspo_jax
from gspo_jax import estimates
from gspo_jax.data import benchmarks, contents, files
from gspo_jax.data.pipeline import EvalBatches
from gspo_jax.data.records import Record
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import ScoringFailed
from gspo_jax.folder import storage
from gspo_jax.measuring.answers import Answers, Call
from gspo_jax.measuring.opened import open_policy
from gspo_jax.parallel import hosts, processes
from gspo_jax.rewards.answers import final_answer
from gspo_jax.rewards.batches import BatchScorer
from gspo_jax.rewards.comparison import canonical
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.rollout.episodes import Player
from gspo_jax.setup import data, keys, relevance
from gspo_jax.setup.checks import check
from gspo_jax.training.digest import digest_tree
from gspo_jax.types import Prompts, Weights

EXTRACTION = {
    "math_verify": r"strict: after the last thought, what is announced last, by ####, \boxed{} or 'answer is'",
    "math_verify_flexible": "flexible: the same, else the last number or formula of the text",
}
"""How rewards find the answer, for the protocol."""


def run(config: ConfigDict, workdir: str | Path, *, name: str, place: str, samples: int) -> dict[str, Any]:
    """Sample and score a benchmark with a run folder's newest checkpoint, or its initial policy.

    Args:
      config: the run's. Its prompt style, sampling and limits apply.
      workdir: run folder.
      name: a benchmark of data/benchmarks.py, or a file of rows (data/rows.py), scored by the config's rewards.
      place: folder or file of the benchmark. "" for a file of rows.
      samples: responses per problem.

    Returns:
      `benchmark`, `problems`, `samples`, `protocol`, `answers` (a file), `left_out` (prompts that do not fit),
      fractions `truncated` and `failed`, `means` of every reward, and for the deciding reward `mean`, `pass` and
      `majority` by k with `intervals`, None and {} if it gives no verdicts of 0 or 1, or none decides. Results are None
      with too few scored samples. {} on all but the first process.

    Raises:
      UserError: the benchmark is unknown or unreadable, or does not fit the config.
      ScoringFailed: no response could be scored.
    """
    benchmark = Benchmark.read(config, name, place, samples=samples)
    config = benchmark.config
    config.sampling.group_size = samples
    with open_policy(config, workdir, make_scorer=benchmark.make_scorer) as opened:
        batches, (weights, of) = benchmark.prompts(opened.tokenizer), opened.load()
        mesh = opened.engine.meshes.trainer
        answering = Answering(opened.player, opened.tokenizer, weights, of, opened.inputs, mesh)
        assert opened.files is not None
        key, folder = keys.eval_key(keys.run_key(config)), opened.files.local / storage.BENCHMARKS
        return benchmark.measure(answering, batches, opened.scorer, key, folder)


def of_run(config: ConfigDict) -> "dict[str, Benchmark]":
    """Read a run's benchmarks, by label, with the errors of `Benchmark.read`."""
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
    """Player with weights loaded in its sampler."""
    tokenizer: Tokenizer
    weights: Weights
    name: str
    """Name in the protocol, such as "iteration 100"."""
    files: Mapping[str, str]
    """Digests of the files behind policy and rewards."""
    mesh: Mesh
    """The trainer's."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark, and how it is sampled and judged."""

    name: str
    """Name in data/benchmarks.py, or a file of rows."""
    config: ConfigDict
    """The run's, with the benchmark's data and rewards."""
    records: Sequence[Record]
    samples: int
    """Responses per problem."""

    @classmethod
    def read(cls, config: ConfigDict, name: str, place: str, *, samples: int) -> "Benchmark":
        """Read a benchmark, with the arguments and errors of `run`."""
        config = _changed(config, name)
        records = data.load_records(config, "test") if _is_file(name) else benchmarks.read(name, place)
        return cls(name, config, records, samples)

    def prompts(self, tokenizer: Tokenizer) -> EvalBatches:
        """Return batches of its prompts."""
        return data.held_out_prompts(self.config, tokenizer, self.records, scores=self._scores)

    def make_scorer(self) -> Scorer:
        """Build the benchmark's rewards. All processes have to call it."""
        return data.make_scorer(self.config, scores=self._scores)

    @property
    def _scores(self) -> data.Scores | None:
        return None if _is_file(self.name) else _applies

    def measure(
        self,
        answering: Answering,
        batches: EvalBatches,
        scorer: BatchScorer,
        key: jax.Array,
        folder: Path,
        *,
        on_call: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Sample and score what `folder` lacks, and return what `run` does.

        Args:
          answering: samples `sampling.group_size` responses a call, a divisor of `samples`.
          key: fixes the sampling noise.
          folder: folder of answer files.
          on_call: called before every sampling call.
        """
        prompts, group = self.config.data.prompts_per_batch, self.config.sampling.group_size
        protocol = self._protocol(answering, batches)
        calls = [
            Call(range(start, min(start + prompts, batches.usable)), range(first, first + group))
            for start in range(0, batches.usable, prompts)
            for first in range(0, self.samples, group)
        ]
        answers = Answers(folder, Path(self.name).stem, protocol, calls)
        numbered = iter(enumerate(calls))
        for batch in batches:
            for number_, call in itertools.islice(numbered, self.samples // group):
                if number_ >= answers.done:
                    on_call()
                    answers.add(_sampled(answering, batch, key, scorer, call))
        if not processes.is_first():
            return {}
        decides = functools.partial(_decides, self.config, self.name)
        compare = _is_file(self.name) or "math_verify" in self.config.rewards  # a majority of programs means nothing
        found = summarize(answers.rows(), tuple(self.config.rewards), decides, majority=compare, seed=self.config.seed)
        facts = {"benchmark": self.name, "problems": batches.usable, "samples": self.samples, **found}
        return facts | {"left_out": batches.skipped, "protocol": protocol, "answers": str(answers.file)}

    def _protocol(self, answering: Answering, batches: EvalBatches) -> dict[str, Any]:
        from gspo_jax.rewards import isolated  # takes a second

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
    """Return the results of answers, as in `run`. `decides` gets each problem's first row; "": none decides."""
    problems: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        problems.setdefault(row["problem"], []).append(row)
    total = sum(map(len, problems.values()))
    means = {
        name: _mean(np.array([_mean(_scores(samples, name)) for samples in problems.values()], float))
        for name in rewards
    }
    shared = {"means": means, "truncated": sum(row["truncated"] for row in rows) / total}
    if not all(_is_judged(samples, decides(samples[0])) for samples in problems.values()):
        if not any(mean is not None for mean in means.values()):
            raise ScoringFailed(f"none of the {len(rows)} responses could be scored; check the benchmark's records")
        failed = np.mean([all(score is None for score in row["scores"].values()) for row in rows])
        nothing = {"mean": None, "pass": {}, "majority": {}}
        return nothing | {"intervals": nothing} | shared | {"failed": float(failed)}
    judged = []  # per problem: answers and correctness of scored samples
    for samples in problems.values():
        name = decides(samples[0])
        scored = [row for row in samples if row["scores"][name] is not None]
        judged.append(([row["answer"] for row in scored], np.array([row["scores"][name] == 1 for row in scored], bool)))
    right, count = (np.array(column, int) for column in zip(*((r.sum(), len(r)) for _, r in judged), strict=True))
    if not count.any():
        raise ScoringFailed(f"none of the {len(rows)} responses could be scored; check the benchmark's records")
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
    # A problem with fewer than k scored samples does not count where k are needed.
    mean = {name: _mean(values) for name, values in by_problem.items()}
    between = {name: _finite(estimates.interval(values, seed=seed)) for name, values in by_problem.items()}
    kinds = {"pass": ks, "majority": ks if majority else ()}

    def by_k(found: Mapping[str, Any]) -> dict[str, Any]:
        return {"mean": found["mean"]} | {kind: {str(k): found[f"{kind} {k}"] for k in kinds[kind]} for kind in kinds}

    return {
        **by_k(mean),
        "intervals": by_k(between),
        **shared,
        "failed": 1 - int(count.sum()) / total,
    }


def metrics(label: str, facts: dict[str, Any]) -> dict[str, float]:
    """Return a result under its names in metrics.jsonl."""
    k, spans = str(facts["samples"]), facts["intervals"]
    low, high = spans["mean"] or (None, None)
    found = {
        "": facts["mean"],
        "_low": low,
        "_high": high,
        "_pass_at_k": facts["pass"].get(k),
        "_majority_at_k": facts["majority"].get(k),
        "_failed": facts["failed"],
        "_truncated": facts["truncated"],
    }
    found |= {f"/{name}": mean for name, mean in facts["means"].items()}
    return {f"benchmark/{label}{name}": value for name, value in found.items() if value is not None}


def described(facts: dict[str, Any]) -> str:
    """Format a result in a few lines."""

    def share(value: float | None, between: Sequence[float] | None) -> str:
        return "–" if value is None or between is None else f"{value:.3f} [{between[0]:.3f}, {between[1]:.3f}]"

    n, spans = facts["samples"], facts["intervals"]
    lines = [f"{facts['benchmark']}: {facts['problems']} problems, {n} samples of each"]
    if facts["pass"]:
        lines[0] += f"; in brackets {estimates.COVERAGE:.0%} intervals"
        lines.append(f"mean@{n} {share(facts['mean'], spans['mean'])}")
    else:
        lines[0] += "; means of the rewards, since none gives verdicts of 0 or 1"
    for kind in ("pass", "majority"):
        lines += [f"{kind}@{k} {share(value, spans[kind][k])}" for k, value in facts[kind].items()]
    lines.append("; ".join(f"{name} {'–' if mean is None else f'{mean:.3f}'}" for name, mean in facts["means"].items()))
    lines.append(
        f"{facts['truncated']:.1%} cut, {facts['failed']:.1%} could not be scored; answers: {facts['answers']}"
    )
    return "\n".join(lines)


def answer_of(prompt: str, completion: str) -> str | None:
    """Return the announced final answer in canonical form, None if none is announced."""
    found = final_answer(prompt, completion)
    return None if found is None else canonical(found)


def _mean(values: np.ndarray) -> float | None:
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


def _finite(between: tuple[float, float]) -> list[float] | None:
    return list(between) if np.isfinite(between).all() else None


def _scores(samples: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([np.nan if row["scores"][name] is None else row["scores"][name] for row in samples], float)


def _is_judged(samples: Sequence[dict[str, Any]], name: str) -> bool:
    """Return True if a reward decides a problem's samples, by 0 or 1."""
    return name != "" and all(row["scores"][name] in (0, 1, None) for row in samples)


def _is_file(name: str) -> bool:
    return name.endswith(files.FORMATS)


def _changed(config: ConfigDict, name: str) -> ConfigDict:
    config = config.copy_and_resolve_references()
    config.step_rewards = ConfigDict()
    config.data.task, config.data.folder, config.data.train, config.data.test = "jsonl", "", name, name
    config.data.sources = ConfigDict()
    config.eval.prompts = 0
    if not _is_file(name):
        if name not in benchmarks.BENCHMARKS:
            benchmarks.read(name, "")  # raises, and lists the choices
        rewards = benchmarks.BENCHMARKS[name].rewards
        config.rewards = ConfigDict({reward: float(not place) for place, reward in enumerate(rewards)})
        config.eval.correct = rewards[0]
    return config


def _applies(reward: str, record: Record) -> bool:
    """Return True if a record has what a reward reads. LiveCodeBench has problems of two kinds."""
    return {"code_stdin": "inputs", "code_tests": "test"}.get(reward, "") in ("", *_kinds(record))


def _kinds(record: Record) -> list[str]:
    return [kind for kind in ("inputs", "test") if kind in record or (kind == "test" and "test_list" in record)]


def _decides(config: ConfigDict, name: str, row: dict[str, Any]) -> str:
    if _is_file(name):
        return str(config.eval.correct)
    return next(reward for reward in config.rewards if row["asked"][reward])


def _sampled(
    answering: Answering, prompts: Prompts, key: jax.Array, scorer: BatchScorer, call: Call
) -> list[dict[str, Any]]:
    """Sample a call and return a row per answer, on the first process only.

    Noise depends on the problem and the sample, not on the rest of the batch.
    """
    group = len(call.samples)
    key, first = jax.random.fold_in(key, call.samples.start // group), call.problems.start * group
    played = answering.player.answer(prompts, key, first=first)
    scores = scorer.score(played).by_name
    tokens, mask = hosts.allgather((played.rollout.tokens, played.rollout.mask))
    if not processes.is_first():
        return []
    completions = [answering.tokenizer.decode(row[kept].tolist()) for row, kept in zip(tokens, mask, strict=True)]
    return [
        {
            "problem": problem,
            "id": played.records[row]["id"],
            "sample": sample,
            "completion": completions[row],
            "tokens": int(played.lengths[row]),
            "truncated": bool(played.truncated[row]),
            "answer": answer_of(played.texts[row], completions[row]),
            "scores": {name: float(x[row]) if np.isfinite(x[row]) else None for name, x in scores.items()},
            "asked": {name: scorer.scorer.asks(name, played.records[row]) for name in scores},
        }
        for row, (problem, sample) in enumerate(itertools.product(call.problems, call.samples))
    ]


@functools.cache
def _source() -> str:
    """Digest the sources of this package."""
    folder = Path(gspo_jax.__file__).parent
    return contents.digest({str(file.relative_to(folder)): contents.file_digest(file) for file in folder.rglob("*.py")})
