"""TFDS builders of generated tasks, with disjoint train and test splits.

They suit models of a hundred thousand parameters. Problems that differ only in the order of their numbers count as the
same, so test problems have no variants in training.
"""

import contextlib
import dataclasses
import fcntl
import io
import itertools
import json
import random
import shutil
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from absl import logging
from google.protobuf import json_format

from gspo_jax.data.records import Record
from gspo_jax.errors import UserError

_MAX_TRIES = 200
"""Repeated draws in a row that mean a difficulty is exhausted."""


@dataclasses.dataclass
class TaskConfig(tfds.core.BuilderConfig):
    """Options of a task. `name` names the data set's folder."""

    difficulty: str = ""
    train_size: int = 0
    test_size: int = 0
    seed: int = 0
    digits: tuple[int, ...] = ()
    """Maximum digits per number."""
    largest: int = 0
    """Largest number, or term of a function."""
    operators: str = ""
    """Operators of the hidden solution."""
    steps: int = 0
    """Instructions that a program runs, or the maximum number of doors."""


class _Generated(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")
    SKIP_REGISTERING = True  # loaded only through tasks.load
    FIELDS: tuple[str, ...] = ()
    """Texts in a record."""
    LISTS: tuple[str, ...] = ()
    """Lists of texts in a record."""

    @property
    def options(self) -> Any:
        """`builder_config`, but never None."""
        return self.builder_config

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.options.description,
            features=tfds.features.FeaturesDict(
                {field: tfds.features.Text() for field in self.FIELDS}
                | {field: tfds.features.Sequence(tfds.features.Text()) for field in self.LISTS}
            ),
            disable_shuffling=True,  # already random, and keys stay record indices
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager
        config = self.options
        problems = self._distinct_problems()
        return {
            "train": self._generate_examples("train", problems[: config.train_size]),
            "test": self._generate_examples("test", problems[config.train_size :]),
        }

    def _generate_examples(self, split: str, problems: list[Record]) -> Iterator[tuple[int, Record]]:
        for i, problem in enumerate(problems):
            yield i, {"id": f"{self.name}/{self.options.difficulty}/{split}/{i}"} | problem

    def _distinct_problems(self) -> list[Record]:
        config = self.options
        wanted = config.train_size + config.test_size
        rng = random.Random(f"{self.name} {config.difficulty} {config.seed}")
        seen: set[Hashable] = set()
        problems: list[Record] = []
        tries = 0
        while len(problems) < wanted:
            key, problem = self.draw(rng)
            tries = tries + 1 if key in seen else 0
            if tries > _MAX_TRIES:
                raise UserError(
                    f"{self.name} {config.difficulty} has only about {len(seen)} different problems, fewer than "
                    f"train_size + test_size = {wanted}; lower the sizes or choose a harder difficulty"
                )
            if tries == 0:
                seen.add(key)
                problems.append(problem)
        return problems

    def draw(self, rng: random.Random) -> tuple[Hashable, Record]:
        """Draw (key, problem). Reordered numbers have equal keys."""
        raise NotImplementedError


class Arithmetic(_Generated):
    """Sums and differences such as `47+28=?`, worked by digits or, with three numbers, by partial sums.

    No intermediate result is negative.
    """

    BUILDER_CONFIGS = [  # noqa: RUF012 - TFDS's own declaration
        TaskConfig(name="easy", difficulty="easy", train_size=1280, test_size=128, digits=(2, 1)),
        TaskConfig(name="medium", difficulty="medium", train_size=4096, test_size=512, digits=(2, 2)),
        TaskConfig(name="hard", difficulty="hard", train_size=8192, test_size=512, digits=(2, 2, 2)),
        TaskConfig(name="long", difficulty="long", train_size=8192, test_size=512, digits=(3, 3)),
    ]
    FIELDS = ("id", "question", "answer", "worked")

    def draw(self, rng: random.Random) -> tuple[Hashable, Record]:
        digits = self.options.digits
        numbers = [rng.randrange(10**d) for d in digits]
        total, signs = numbers[0], [1]
        for number in numbers[1:]:
            sign = -1 if rng.randrange(2) and number <= total else 1
            total += sign * number
            signs.append(sign)
        key = tuple(sorted(s * n for s, n in zip(signs, numbers, strict=True)))
        text = str(numbers[0]) + "".join(f"{_sign(s)}{n}" for s, n in zip(signs[1:], numbers[1:], strict=True))
        steps = _digit_steps(numbers, signs[1]) if len(numbers) == 2 else _partial_sum_steps(numbers, signs)
        answer = str(total)
        return key, {"question": f"{text}=?", "answer": answer, "worked": " ".join([*steps, "####", answer])}


class Countdown(_Generated):
    """Targets from three numbers, each used once, with + - *: `22 from 3 5 7:` is solved by `3*5+7`."""

    BUILDER_CONFIGS = [  # noqa: RUF012 - TFDS's own declaration
        TaskConfig(name="easy", difficulty="easy", train_size=768, test_size=128, largest=12, operators="+-"),
        TaskConfig(name="medium", difficulty="medium", train_size=1024, test_size=128, largest=9, operators="+-*"),
        TaskConfig(name="hard", difficulty="hard", train_size=4096, test_size=512, largest=19, operators="+-*"),
    ]
    FIELDS = ("id", "question", "answer", "worked", "numbers", "target")

    def draw(self, rng: random.Random) -> tuple[Hashable, Record]:
        config = self.options
        while True:
            a, b, c = (1 + rng.randrange(config.largest) for _ in range(3))
            first, second = (config.operators[rng.randrange(len(config.operators))] for _ in range(2))
            middle = _apply(a, first, b)
            target = _apply(middle, second, c)
            if middle > 0 and 0 < target < 100:
                break
        # Only a sum or difference that is multiplied needs brackets.
        inner = f"({a}{first}{b})" if second == "*" and first != "*" else f"{a}{first}{b}"
        expression = f"{inner}{second}{c}"
        given = [a, b, c]
        rng.shuffle(given)
        numbers = " ".join(map(str, given))
        return (tuple(sorted(given)), target), {
            "question": f"{target} from {numbers}:",
            "answer": expression,
            "worked": f"{a}{first}{b}={middle} {middle}{second}{c}={target} #### {expression}",
            "numbers": numbers,
            "target": str(target),
        }


class Expression(_Generated):
    """Values of expressions such as `(317-48)*26=?`, worked by a Python program.

    The worked answer is a code block, then the reply of the environment `python`.
    """

    BUILDER_CONFIGS = [  # noqa: RUF012 - TFDS's own declaration
        TaskConfig(name="medium", difficulty="medium", train_size=4096, test_size=512, digits=(2, 2, 2)),
        TaskConfig(name="hard", difficulty="hard", train_size=8192, test_size=512, digits=(3, 3, 2)),
    ]
    FIELDS = ("id", "question", "answer", "worked")

    def draw(self, rng: random.Random) -> tuple[Hashable, Record]:
        a, b, c = (rng.randrange(1, 10**digits) for digits in self.options.digits)
        sign = rng.choice("+-")
        expression = f"({a}{sign}{b})*{c}"
        answer = str(_apply(a, sign, b) * c)
        key = (*sorted((a, b)), sign, c)
        worked = f"```python\nprint({expression})\n```\n{answer}\n#### {answer}"
        return key, {"question": f"{expression}=?", "answer": answer, "worked": worked}


class Induction(_Generated):
    """Programs from examples: `f(3)=13 f(4)=16 f>=7:` is solved by `def f(x): return max(7,3*x+4)`.

    The function is linear, with at most one bound. The worked answer derives it in a comment,
    `# 16-13=3 3*3=9 13-9=4 ####`, so all of it is the program. `test_list` has four asserts at other arguments, one
    decided by a bound. Held-out problems have other examples, perhaps of functions seen in training.
    """

    BUILDER_CONFIGS = [  # noqa: RUF012 - TFDS's own declaration
        TaskConfig(name="easy", difficulty="easy", train_size=6144, test_size=256, largest=49),
        TaskConfig(name="medium", difficulty="medium", train_size=8192, test_size=512, largest=99),
    ]
    FIELDS = ("id", "question", "answer", "worked")
    LISTS = ("test_list",)

    def draw(self, rng: random.Random) -> tuple[Hashable, Record]:
        factor, term = rng.randint(2, 9), rng.randint(1, self.options.largest)
        at, kind = rng.randint(2, 9), rng.choice(("", "max", "min"))
        first, second = factor * at + term, factor * (at + 1) + term
        asked = sorted([*rng.sample(range(at), 2), *rng.sample(range(at + 2, 21), 2)])
        values = [factor * x + term for x in asked]
        body, question = f"{factor}*x+{term}", f"f({at})={first} f({at + 1})={second}"
        if kind:  # the bound lies beyond the examples and decides the assert farthest from them
            function, bound, mark = (max, values[1], ">") if kind == "max" else (min, values[2], "<")
            values = [function(bound, value) for value in values]
            body, question = f"{kind}({bound},{body})", f"{question} f{mark}={bound}"
        answer = f"def f(x): return {body}"
        steps = f"{second}-{first}={factor} {at}*{factor}={factor * at} {first}-{factor * at}={term}"
        return (factor, term, at, kind), {
            "question": f"{question}:",
            "answer": answer,
            "worked": f"# {steps} ####\n{answer}",
            "test_list": [f"assert f({x}) == {value}" for x, value in zip(asked, values, strict=True)],
        }


class Machine(_Generated):
    """Final state of a loop on three registers, worked step by step: `371: a+ c* b-` goes by `a+ 471 c* 472 b- 462`.

    A loop has three instructions. A register holds a digit: `+` adds one, `-` subtracts one and `*` doubles it, mod 10.
    One wrong step spoils the rest.
    """

    BUILDER_CONFIGS = [  # noqa: RUF012 - TFDS's own declaration
        TaskConfig(name="easy", difficulty="easy", train_size=8192, test_size=256, steps=8),
        TaskConfig(name="medium", difficulty="medium", train_size=8192, test_size=256, steps=16),
        TaskConfig(name="hard", difficulty="hard", train_size=8192, test_size=256, steps=32),
        TaskConfig(name="long", difficulty="long", train_size=2048, test_size=256, steps=176),
    ]
    FIELDS = ("id", "question", "answer", "worked")

    def draw(self, rng: random.Random) -> tuple[Hashable, Record]:
        registers = {name: rng.randrange(10) for name in "abc"}
        start = "".join(map(str, registers.values()))
        program = [rng.choice("abc") + rng.choice("+-*") for _ in range(3)]
        worked, state = [], start
        for name, operator in itertools.islice(itertools.cycle(program), self.options.steps):
            digit = registers[name]
            registers[name] = {"+": digit + 1, "-": digit - 1, "*": 2 * digit}[operator] % 10
            state = "".join(map(str, registers.values()))
            worked.append(f"{name}{operator} {state}")
        question = f"{start}: {' '.join(program)}"
        return question, {"question": question, "answer": state, "worked": f"{' '.join(worked)} #### {state}"}


class Rooms(_Generated):
    """A key behind several doors, for the environment `rooms`: `Bado, door 4.` is answered by calls of its tool.

    A door of the house Bado shows the number of the next one, and the last door the key, a digit, which is the answer.
    `turns` is JSON.
    """

    BUILDER_CONFIGS = [  # noqa: RUF012 - TFDS's own declaration
        TaskConfig(name="easy", difficulty="easy", train_size=1024, test_size=128, steps=2),
        TaskConfig(name="medium", difficulty="medium", train_size=1024, test_size=128, steps=3),
    ]
    FIELDS = ("id", "question", "answer", "turns", "doors")

    def draw(self, rng: random.Random) -> tuple[Hashable, Record]:
        doors = [str(rng.randrange(1, 10)) for _ in range(rng.randint(2, self.options.steps))]
        name = "".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(2)).capitalize()
        question, answer = f"{name}, door {doors[0]}.", str(rng.randrange(10))
        turns: list[dict[str, Any]] = []
        for door, seen in zip(doors, [*(f"door {door}" for door in doors[1:]), f"key {answer}"], strict=True):
            call = {"type": "function", "function": {"name": "open", "arguments": {"door": int(door)}}}
            turns += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": seen}]
        turns.append({"role": "assistant", "content": f"#### {answer}"})
        made = {"question": question, "answer": answer, "turns": json.dumps(turns), "doors": " ".join(doors)}
        return question, made


BUILDERS = {builder.name: builder for builder in (Arithmetic, Countdown, Expression, Induction, Machine, Rooms)}


def prepare(
    task: str,
    *,
    data_dir: str | None = None,
    difficulty: str = "medium",
    seed: int = 0,
    train_size: int | None = None,
    test_size: int | None = None,
) -> tfds.core.DatasetBuilder:
    """Return a data set's builder, building the data set first if it is missing.

    A lock file makes concurrent processes wait. Leftovers of killed builds are removed.

    Raises:
      UserError: an argument is invalid, or the task has too few distinct problems.
    """
    config = _config(BUILDERS[task], difficulty=difficulty, seed=seed, train_size=train_size, test_size=test_size)
    builder = _open(task, config, data_dir)
    folder = Path(builder.data_dir)
    if not folder.exists():  # TFDS renames it into place once complete
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / ".lock"):
            for left in folder.parent.glob(f"incomplete.*_{folder.name}"):  # a live build holds the lock
                shutil.rmtree(left)
                logging.info("removed %s, left by a build that was killed", left)
            # Silent: this takes a second and downloads nothing.
            tfds.disable_progress_bar()
            with contextlib.redirect_stdout(io.StringIO()):
                builder.download_and_prepare()  # does nothing if another process built it
            logging.info("built %s in %s", task, folder)
    # A fresh builder reads what another process may have written since the first was opened.
    return _open(task, config, data_dir)


def _open(task: str, config: TaskConfig, data_dir: str | None) -> tfds.core.DatasetBuilder:
    try:
        return BUILDERS[task](data_dir=data_dir, config=config, file_format="array_record")
    except (json_format.ParseError, RecursionError) as error:
        where = "TFDS's default folder" if data_dir is None else data_dir
        raise UserError(
            f"the data set in {where} is damaged: {error!s:.200}; delete it, and it is built again"
        ) from error


def _config(
    cls: type[_Generated], *, difficulty: str, seed: int, train_size: int | None, test_size: int | None
) -> TaskConfig:
    """Return a difficulty's config, renamed if a size or the seed differs."""
    named: dict[str, Any] = {config.name: config for config in cls.BUILDER_CONFIGS}
    if difficulty not in named:
        raise UserError(f"unknown difficulty {difficulty!r}; use one of {', '.join(named)}")
    base = named[difficulty]
    sizes = {
        "train_size": base.train_size if train_size is None else train_size,
        "test_size": base.test_size if test_size is None else test_size,
        "seed": seed,
    }
    for key in ("train_size", "test_size"):
        if sizes[key] < 1:
            raise UserError(f"{key} is {sizes[key]}; use 1 or more")
    config = dataclasses.replace(base, **sizes)
    if config == base or all(getattr(config, k) == getattr(base, k) for k in sizes):
        return base
    config.name = "{}-{train_size}-{test_size}-seed{seed}".format(difficulty, **sizes)
    return config


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sign(sign: int) -> str:
    return "+" if sign > 0 else "-"


def _apply(a: int, operator: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


def _digit_steps(numbers: list[int], sign: int) -> list[str]:
    """Work a sum or difference by columns: 47+28 -> `7+8=15`, `4+2+1=7`; 52-38 -> `12-8=4`, `5-3-1=1`."""
    mark = _sign(sign)
    steps, carry = [], 0
    for place in range(len(str(max(numbers)))):
        x, y = (number // 10**place % 10 for number in numbers)
        # Borrow ten, written before the digit. The next column gives it back.
        borrow = int(sign < 0 and x < y + carry)
        x += 10 * borrow
        value = x + sign * (y + carry)
        steps.append(f"{x}{mark}{y}" + (f"{mark}{carry}" if carry else "") + f"={value}")
        carry = borrow if sign < 0 else value // 10
    return steps


def _partial_sum_steps(numbers: list[int], signs: list[int]) -> list[str]:
    """Work a sum by partial sums: 47+28-13 -> `47+28=75`, `75-13=62`."""
    total, steps = numbers[0], []
    for number, sign in zip(numbers[1:], signs[1:], strict=True):
        steps.append(f"{total}{_sign(sign)}{number}={total + sign * number}")
        total += sign * number
    return steps
