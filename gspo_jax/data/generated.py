"""TFDS builders of the generated tasks: seeded, with disjoint train and test splits.

The tasks need no download and are easy enough for a model of a hundred thousand parameters. Problems that differ only
in the order of their numbers count as the same problem, so that no variant of a test problem is in the train split.
"""

import contextlib
import dataclasses
import fcntl
import io
import itertools
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
"""Consecutive draws without a new problem after which a difficulty counts as exhausted."""


@dataclasses.dataclass
class TaskConfig(tfds.core.BuilderConfig):
    """Options of all tasks. The data set's folder is named after the config's name."""

    difficulty: str = ""
    train_size: int = 0
    test_size: int = 0
    seed: int = 0


@dataclasses.dataclass
class ArithmeticConfig(TaskConfig):
    """Options of arithmetic; `digits` has one entry per number, its maximum number of digits."""

    digits: tuple[int, ...] = ()


@dataclasses.dataclass
class CountdownConfig(TaskConfig):
    """Options of countdown; numbers are 1..`largest`, and the hidden solution uses only `operators`."""

    largest: int = 0
    operators: str = ""


@dataclasses.dataclass
class ExpressionConfig(TaskConfig):
    """Options of expression; `digits` has one entry per number, its maximum number of digits."""

    digits: tuple[int, ...] = ()


@dataclasses.dataclass
class InductionConfig(TaskConfig):
    """Options of induction: factors are 2..`largest_factor`, added numbers 1..`largest_term`."""

    largest_factor: int = 0
    largest_term: int = 0


@dataclasses.dataclass
class MachineConfig(TaskConfig):
    """Options of machine; a program is run round and round, for `steps` instructions."""

    steps: int = 0


class _Generated(tfds.core.GeneratorBasedBuilder):
    """Base of the builders: draws distinct problems and divides them into splits."""

    VERSION = tfds.core.Version("1.0.0")
    SKIP_REGISTERING = True  # loaded through tasks.load, never by name through tfds.load
    FIELDS: tuple[str, ...] = ()
    """Names of the texts in a record."""
    LISTS: tuple[str, ...] = ()
    """Names of the lists of texts in a record."""

    @property
    def options(self) -> Any:
        """The builder's TaskConfig; unlike TFDS's `builder_config` never None."""
        return self.builder_config

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.options.description,
            features=tfds.features.FeaturesDict(
                {field: tfds.features.Text() for field in self.FIELDS}
                | {field: tfds.features.Sequence(tfds.features.Text()) for field in self.LISTS}
            ),
            disable_shuffling=True,  # already in random order; keys stay the records' indices
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager  # nothing to download
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
        """Draw (key, problem); problems that differ only in the order of their numbers have equal keys."""
        raise NotImplementedError


class Arithmetic(_Generated):
    """Sums and differences such as `47+28=?`, worked digit by digit (two numbers) or by partial sums (three numbers).

    No intermediate result is negative.
    """

    BUILDER_CONFIGS = [  # noqa: RUF012 - TFDS's own declaration
        ArithmeticConfig(name="easy", difficulty="easy", train_size=1280, test_size=128, digits=(2, 1)),
        ArithmeticConfig(name="medium", difficulty="medium", train_size=4096, test_size=512, digits=(2, 2)),
        ArithmeticConfig(name="hard", difficulty="hard", train_size=8192, test_size=512, digits=(2, 2, 2)),
        ArithmeticConfig(name="long", difficulty="long", train_size=8192, test_size=512, digits=(3, 3)),
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
    """Reach a target from three numbers, each used once, with + - *: `22 from 3 5 7:` is solved by `3*5+7`."""

    BUILDER_CONFIGS = [  # noqa: RUF012 - TFDS's own declaration
        CountdownConfig(name="easy", difficulty="easy", train_size=768, test_size=128, largest=12, operators="+-"),
        CountdownConfig(name="medium", difficulty="medium", train_size=1024, test_size=128, largest=9, operators="+-*"),
        CountdownConfig(name="hard", difficulty="hard", train_size=4096, test_size=512, largest=19, operators="+-*"),
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
        # Only a sum or difference that is then multiplied needs brackets; anything else evaluates left to right.
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
    """Values of expressions such as `(317-48)*26=?`, beyond mental arithmetic; worked by a Python program.

    The worked answer is the program in a code block, then what the environment `python` replies to it.
    """

    BUILDER_CONFIGS = [  # noqa: RUF012 - TFDS's own declaration
        ExpressionConfig(name="medium", difficulty="medium", train_size=4096, test_size=512, digits=(2, 2, 2)),
        ExpressionConfig(name="hard", difficulty="hard", train_size=8192, test_size=512, digits=(3, 3, 2)),
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

    The function is linear, and bounded from below, from above or not at all. The worked answer derives it in a comment,
    `# 16-13=3 3*3=9 13-9=4 ####`, so that the whole of it is the program. `test_list` has four asserts at other
    arguments, one of which a bound decides. Held-out problems have other examples; their functions may have been seen.
    """

    BUILDER_CONFIGS = [  # noqa: RUF012 - TFDS's own declaration
        InductionConfig(
            name="easy", difficulty="easy", train_size=6144, test_size=256, largest_factor=9, largest_term=49
        ),
        InductionConfig(
            name="medium", difficulty="medium", train_size=8192, test_size=512, largest_factor=9, largest_term=99
        ),
    ]
    FIELDS = ("id", "question", "answer", "worked")
    LISTS = ("test_list",)

    def draw(self, rng: random.Random) -> tuple[Hashable, Record]:
        config = self.options
        factor, term = rng.randint(2, config.largest_factor), rng.randint(1, config.largest_term)
        at, kind = rng.randint(2, 9), rng.choice(("", "max", "min"))
        first, second = factor * at + term, factor * (at + 1) + term
        asked = sorted([*rng.sample(range(at), 2), *rng.sample(range(at + 2, 21), 2)])
        values = [factor * x + term for x in asked]
        body, question = f"{factor}*x+{term}", f"f({at})={first} f({at + 1})={second}"
        if kind:  # the bound is reached beyond the examples, and decides the assert farthest from them
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
    """Last state of a loop on three registers, worked step by step: `371: a+ c* b-` goes by `a+ 471 c* 472 b- 462`.

    A program has three instructions. A register holds a digit; `+` adds one to it, `-` takes one away, and `*` doubles
    it, mod 10. The program begins again when it is through. Every step of the worked answer follows from the one before
    and the program, and a wrong one spoils the rest.
    """

    BUILDER_CONFIGS = [  # noqa: RUF012 - TFDS's own declaration
        MachineConfig(name="easy", difficulty="easy", train_size=8192, test_size=256, steps=8),
        MachineConfig(name="medium", difficulty="medium", train_size=8192, test_size=256, steps=16),
        MachineConfig(name="hard", difficulty="hard", train_size=8192, test_size=256, steps=32),
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


BUILDERS: dict[str, type[_Generated]] = {
    "arithmetic": Arithmetic,
    "countdown": Countdown,
    "expression": Expression,
    "induction": Induction,
    "machine": Machine,
}
"""Builders of the generated tasks, by name."""


def prepare(
    task: str,
    *,
    data_dir: str | None = None,
    difficulty: str = "medium",
    seed: int = 0,
    train_size: int | None = None,
    test_size: int | None = None,
) -> tfds.core.DatasetBuilder:
    """Return the builder of a data set under `data_dir`, building the data set first if it is missing.

    A lock file beside the data makes concurrent processes wait; a build removes what a killed one has left. Raises
    UserError for an unknown difficulty, or if the task does not have enough distinct problems.
    """
    if data_dir is not None and "://" in data_dir:
        raise UserError(
            f"data_dir {data_dir} is remote; generated tasks are built on local disk, so use a local folder"
        )
    config = _config(BUILDERS[task], difficulty=difficulty, seed=seed, train_size=train_size, test_size=test_size)
    builder = _open(task, config, data_dir)
    folder = Path(builder.data_dir)
    if folder.exists():  # complete: TFDS renames it into place at the end
        return builder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / ".lock"):
        for left in folder.parent.glob(f"incomplete.*_{folder.name}"):  # of a dead process: a live one holds the lock
            shutil.rmtree(left)
            logging.info("removed %s, left by a build that was killed", left)
        # Silences TFDS's progress bars and its printed download notice: this takes a second and downloads nothing.
        tfds.disable_progress_bar()
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare()  # does nothing if another process has built it meanwhile
        logging.info("built %s in %s", task, folder)
    # A fresh builder, since the first one has not read what another process may have written.
    return _open(task, config, data_dir)


def _open(task: str, config: TaskConfig, data_dir: str | None) -> tfds.core.DatasetBuilder:
    """Return the builder of a data set; raises UserError if its dataset_info.json is damaged."""
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
    """Return the config of a difficulty, or a copy under a name of its own if a size or the seed differs."""
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
    """Hold an exclusive lock on `path`; the kernel releases it if the process dies."""
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
        # A column that is too small borrows ten, written before its digit; the next column gives it back.
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
