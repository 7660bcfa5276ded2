"""How many programs with one wrong character still pass their tests: `python -m tests.tools.one_character FILE.jsonl`.

Each line is a program that passes, as for `gspo_jax.score --reward=code_tests`. Of 20 seeded one-character changes
(a character replaced by another of the program's own, removed, or doubled), the first is taken that still parses and
has another syntax tree. Prints the share of those that fail, and the survivors with their change.
"""

import ast
import json
import random
import sys
from pathlib import Path

from gspo_jax.parallel import processes
from gspo_jax.rewards import code
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.sandbox.inside.choose import choose

TRIES = 20
TIMEOUT_S = 5.0


def tree(program: str) -> str | None:
    """Return a program's syntax tree without its docstrings, which change nothing; None if it does not parse."""
    try:
        found = ast.parse(program)
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(found):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(found)


def changed(completion: str, prompt: str, entry_point: str | None, seed: int) -> tuple[str, str] | None:
    """Return a changed completion and what was changed in it; None if no change of TRIES was of use."""
    draw = random.Random(seed)
    before = tree(choose(code.programs_of(prompt, completion, entry_point)))
    for _ in range(TRIES):
        place = draw.randrange(len(completion))
        old = completion[place]
        new = draw.choice([draw.choice(completion), "", 2 * old])
        other = completion[:place] + new + completion[place + 1 :]
        after = tree(choose(code.programs_of(prompt, other, entry_point)))
        if after is not None and after != before:
            line = completion.count("\n", 0, place)
            return other, f"{completion.splitlines()[line].strip()!r} -> {other.splitlines()[line].strip()!r}"
    return None


def main() -> None:
    """Run the command."""
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    prompts, completions, records, changes = [], [], [], []
    for number, row in enumerate(rows):
        prompt = row.get("prompt", "")
        found = changed(row["completion"], prompt, row.get("entry_point"), seed=number)
        if found is not None:
            prompts.append(prompt)
            completions.append(found[0])
            records.append(row)
            changes.append(found[1])
    with Scorer({"code_tests": 1.0}, timeout_s=TIMEOUT_S, workers=processes.own_cores()) as scorer:
        scores = scorer.score(prompts, completions, records)
    failed = int((scores.total < 1).sum())
    print(
        f"{len(completions)} of {len(rows)} programs were changed; {failed} of the changed fail "
        f"({failed / len(completions):.1%}), {scores.failures} have no score, in {scores.seconds:.1f} s"
    )
    for record, change, score in zip(records, changes, scores.total, strict=True):
        if not score < 1:
            print(f"  {record['task_id']}: {score:g}: {change}")


if __name__ == "__main__":
    main()
