r"""Time math-verify on 2000 GSM8K answers as a run scores them, half of them right: seconds, and how they were decided.

    python -m tests.tools.time_rewards gsm8k

The folder has train.jsonl. An answer is the worked solution, then `#### 12`, `\boxed{12}`, `The answer is 12.`, or a
fraction, which math-verify alone can compare; one line for each. One worker for each core.
"""

import random
import re
import sys
import time

import psutil

from gspo_jax.data import tasks
from gspo_jax.parallel import processes
from gspo_jax.rewards.scorer import Scorer

COUNT = 2000
FORMS = (
    "{worked}\n#### {answer}",
    "{worked}\nSo it is $\\boxed{{{answer}}}$.",
    "{worked}\nThe answer is {answer}.",
    "{worked}\nThe answer is $\\frac{{{answer}}}{{1}}$.",
)


def main(folder: str) -> None:
    """Print a line for each form of answers."""
    records = list(tasks.load("gsm8k", split="train", folder=folder))
    chosen = random.Random(0).sample(records, COUNT)
    with Scorer({"math_verify": 1.0}, timeout_s=20.0, workers=processes.cores()) as scorer:
        unsure = ["The answer is 1/2, or 3."] * 8 * processes.cores()
        scorer.score(unsure, unsure, [{"answer": str(number)} for number in range(len(unsure))])  # starts all workers
        for form in FORMS:
            answers = []
            for number, record in enumerate(chosen):
                worked = re.sub(r"<<.*?>>", "", record["worked"].rpartition("####")[0]).strip()
                wrong = str(int(float(record["answer"])) + 1 + number % 7)
                answers.append(form.format(worked=worked, answer=wrong if number % 2 else record["answer"]))
            begun = time.perf_counter()
            scores = scorer.score([record["question"] for record in chosen], answers, chosen)
            took = time.perf_counter() - begun
            assert scores.without_worker is not None
            print(
                f"{form.rpartition(chr(10))[2]!r}: {took:.2f} s, {scores.total.mean():.3f} right, "
                f"{scores.without_worker.mean():.3f} without a worker"
            )
        assert scorer._pool is not None
        workers = [psutil.Process(pid) for pid in scorer._pool.pids]
        sizes = [max(each.memory_info().rss for each in [worker, *worker.children()]) for worker in workers]
        print(f"{len(workers)} workers, at most {max(sizes) / 1e6:.0f} MB each")


if __name__ == "__main__":
    main(*sys.argv[1:])
