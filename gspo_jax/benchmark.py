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
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

import gspo_jax
from gspo_jax import engine, estimates, storage
from gspo_jax.data import benchmarks
from gspo_jax.data.pipeline import EvalBatches
from gspo_jax.data.records import Record
from gspo_jax.data.tokenizer import Tokenizer, decode_responses
from gspo_jax.parallel import hosts, processes
from gspo_jax.rewards import isolated
from gspo_jax.rewards.certain import announced
from gspo_jax.rewards.functions import final_answer, number
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.rollout.episodes import Player
from gspo_jax.setup import data, keys, policy, sampling
from gspo_jax.setup.checks import check
from gspo_jax.setup.meshes import make_meshes
from gspo_jax.storage import open_folder
from gspo_jax.training.digest import digests
from gspo_jax.types import Weights

FOLDER = "benchmarks"
"""Folder of the answers, in a run folder."""
EXTRACTION = {
    "math_verify": r"strict: what follows the last ####, \boxed{}, 'answer is' or 'answer:'",
    "math_verify_flexible": "flexible: the last number or formula of the text",
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
    config = _changed(config, name, samples)
    records = data.load_records(config, "test") if _is_file(name) else benchmarks.read(name, place)
    check(config, count_devices=jax.device_count)
    policy.check_weights(config)
    with open_folder(workdir, write=False) as files:
        model, tokenizer = policy.read_run(config, files)
        batches = data.held_out_prompts(config, tokenizer, records)
        meshes = make_meshes(config, model)
        scores = None if _is_file(name) else _applies
        with (
            jax.set_mesh(meshes.trainer),
            data.make_scorer(config, scores=scores) as scorer,
            sampling.make_replies(config) as replies,
        ):
            made = engine.build(config, model, meshes, sampling.stop_rule_of(config, tokenizer))
            weights, of = policy.newest_weights(config, files, made.policy, meshes.trainer)
            made.sampler.load(weights)
            player = sampling.make_player(config, tokenizer, made.sampler, replies)
            protocol = _protocol(config, name, batches, model=of, weights=_digest(weights))
            starts = range(0, batches.usable, config.data.prompts_per_batch)
            sizes = [samples * min(config.data.prompts_per_batch, batches.usable - start) for start in starts]
            answers = _Answers(files.local / FOLDER, Path(name).stem, protocol, sizes)
            key = keys.eval_key(keys.run_key(config))
            for number_, batch in enumerate(batches):
                if number_ >= answers.done:
                    key_of = jax.random.fold_in(key, number_)
                    rows = _sampled(player, batch, key_of, tokenizer, scorer, meshes.trainer, samples)
                    answers.add(number_, rows)
    if not processes.is_first():
        return {}
    decides = functools.partial(_decides, config, name)
    found = summarize(list(answers), tuple(config.rewards), decides, majority=_answers_compare(name), seed=config.seed)
    facts = {"benchmark": name, "problems": batches.usable, "samples": samples, **found}
    return facts | {"left_out": batches.skipped, "protocol": protocol, "answers": str(answers.file)}


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


def answer_of(completion: str) -> str | None:
    """Return the announced final answer, a number in one form of all that it has; None if none is announced."""
    found = final_answer(completion)
    if found is None:
        text = announced(completion)
        if text is None or not text[:1].isalpha():
            return None
        found = text.partition(":" if text[6:7] == ":" else "is")[2].partition("\n")[0].strip(" .$*")
    value = number(found)
    return " ".join(found.split()) if value is None else format(value.normalize(), "f")


def _mean(values: np.ndarray) -> float | None:
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


def _finite(between: tuple[float, float]) -> list[float] | None:
    return list(between) if np.isfinite(between).all() else None


def _scores(samples: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([np.nan if row["scores"][name] is None else row["scores"][name] for row in samples], float)


def _is_file(name: str) -> bool:
    return name.endswith((".jsonl", ".parquet"))


def _answers_compare(name: str) -> bool:
    return _is_file(name) or benchmarks.BENCHMARKS[name].answers_compare


def _changed(config: ConfigDict, name: str, samples: int) -> ConfigDict:
    """The config with the benchmark's data, rewards and number of samples."""
    config = config.copy_and_resolve_references()
    config.sampling.group_size = samples
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
    player: Player, batch: Any, key: jax.Array, tokenizer: Tokenizer, scorer: Scorer, mesh: Mesh, samples: int
) -> list[dict[str, Any]]:
    """The rows of a batch's answers; only the first process has them."""
    played = player.play(batch.prompts, batch.texts, batch.records, key)
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
            "sample": row % samples,
            "completion": completions[row],
            "tokens": int(mask[row].sum()),
            "truncated": bool(cut[row]),
            "answer": answer_of(completions[row]),
            "scores": {n: float(v) if np.isfinite(v) else None for n, v in zip(names, values[row], strict=True)},
            "asked": dict(zip(names, map(bool, asked[row]), strict=True)),
        }
        for row in range(B)
        if batch.valid[row // samples]
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


def _digest(weights: Weights) -> str:
    """One digest of all weights, the same on any mesh."""
    leaves = jax.tree_util.tree_leaves_with_path(weights.whole)
    found = digests({jax.tree_util.keystr(path): leaf for path, leaf in leaves})
    return hashlib.sha256(json.dumps({name: one.words for name, one in found.items()}).encode()).hexdigest()[:16]


def _protocol(config: ConfigDict, name: str, batches: EvalBatches, *, model: str, weights: str) -> dict[str, Any]:
    """Everything that the numbers depend on."""
    first, math = next(iter(batches)), any(name in isolated.__all__ for name in config.rewards)
    packages = ["jax", "math-verify"] if math else ["jax"]
    return {
        "benchmark": name,
        "model": model,
        "weights": weights,
        "gspo_jax": gspo_jax.__version__,
        "commit": _commit(),
        "first_prompt": first.texts[0],
        "system": config.data.system,
        "few_shot": config.data.few_shot,
        "instruction": first.records[0].get("instruction", ""),
        "environment": config.environment.name,
        "sampling": {k: str(v) for k, v in vars(sampling.make_sampling(config)).items()},
        "samples": config.sampling.group_size,
        "max_prompt_tokens": config.data.max_prompt_length,
        "max_response_tokens": config.sampling.max_response_length,
        "dtype": config.model.dtype,
        "rewards": list(config.rewards),
        "extraction": {name: EXTRACTION[name] for name in config.rewards if name in EXTRACTION},
        "timeout_s": config.scoring.timeout_s,
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "seed": config.seed,
    }


def _commit() -> str:
    """The commit of this package's source, "" if it is not in a repository."""
    try:
        words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
