"""The tasks: correct problems, disjoint splits, and files that are damaged, missing or half built."""

import collections
import contextlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

from gspo_jax.data import generated, tasks
from gspo_jax.data.records import CorruptRecord
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import UserError
from gspo_jax.rewards import blocks
from gspo_jax.rewards.environments import rooms
from tests.tiny import mostly_slow

GENERATED = [(task, level) for task in ("arithmetic", "countdown") for level in ("easy", "medium", "hard")]
GENERATED = mostly_slow(
    [*GENERATED, ("arithmetic", "long")],
    always=[("arithmetic", "easy"), ("arithmetic", "long"), ("countdown", "medium")],
)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("tfds"))


@pytest.fixture
def small(tmp_path):
    """Return a freshly built small data set: the arguments to load it with, and its training shard."""
    options = {"data_dir": str(tmp_path / "data"), "train_size": 40, "test_size": 4}
    tasks.load("arithmetic", split="train", **options)
    (shard,) = (tmp_path / "data").rglob("*train.array_record*")
    return options, shard


def canonical(record):
    """Return a key that is equal for problems that differ only in the order of their numbers."""
    if "target" in record:
        return sorted(record["numbers"].split()), record["target"]
    return sorted(re.findall(r"[+-]\d+", "+" + record["question"]))


@pytest.mark.parametrize(("task", "level"), GENERATED)
def test_generated_problems_are_right_and_short(task, level, data_dir):
    train = tasks.load(task, split="train", data_dir=data_dir, difficulty=level)
    test = tasks.load(task, split="test", data_dir=data_dir, difficulty=level)
    for record in [*train[:300], *test[:100]]:
        worked, _, final = record["worked"].rpartition(" #### ")
        assert final == record["answer"] and "#" not in worked
        for step in worked.split():  # every intermediate step is true
            left, _, right = step.partition("=")
            assert eval(left) == int(right) >= 0
        if task == "arithmetic":
            assert eval(record["question"].removesuffix("=?")) == int(final)
        else:
            assert eval(final) == int(record["target"])
            assert sorted(re.findall(r"\d+", final)) == sorted(record["numbers"].split())
            assert record["question"] == f"{record['target']} from {record['numbers']}:"
        assert record["instruction"] == ""
    assert train[0]["id"] == f"{task}/{level}/train/0" and test[-1]["id"] == f"{task}/{level}/test/{len(test) - 1}"

    first = train[:1000]
    tokenizer = Tokenizer.train([r["question"] + r["worked"] for r in first], 384)
    assert max(len(tokenizer.encode(r["question"])) for r in first) <= 16
    assert max(len(tokenizer.encode(r["worked"])) for r in first) <= 30


@pytest.mark.parametrize(("task", "level"), GENERATED)
def test_no_problem_is_in_both_splits(task, level, data_dir):
    splits = [tasks.load(task, split=s, data_dir=data_dir, difficulty=level) for s in ("train", "test")]
    train, test = ({json.dumps(canonical(record)) for record in records} for records in splits)
    assert len(train) == len(splits[0]) and len(test) == len(splits[1]) and not train & test


def written(record):
    """Return the parts of a worked answer to a problem of programs: what comes before, and after, ####."""
    before, _, after = record["worked"].partition("####")
    return before, after.strip()


@pytest.mark.parametrize("level", ["easy", "medium"])
def test_worked_and_terse_programs_pass_their_tests(level, data_dir):
    """And without its bound a program fails the one test that is there for it."""
    train, test = (
        tasks.load("induction", split=s, data_dir=data_dir, difficulty=level)[:200] for s in ("train", "test")
    )
    assert not {r["question"] for r in train} & {r["question"] for r in test}
    bounded = 0
    for record in [*train, *test]:
        before, program = written(record)
        assert program == record["answer"] and before.startswith("# ")
        for step in before[1:].split():
            left, _, right = step.partition("=")
            assert eval(left) == int(right)
        for source in (record["worked"], f"####\n{program}"):
            found = {}
            exec(source, found)
            for assertion in record["test_list"]:
                exec(assertion, found)
            examples = re.findall(r"f\((\d+)\)=(\d+)", record["question"])
            assert [found["f"](int(x)) for x, _ in examples] == [int(y) for _, y in examples]
        without, passed = re.sub(r"(min|max)\(\d+,(.*)\)", r"\2", program), 0
        exec(without, found)
        for assertion in record["test_list"]:
            with contextlib.suppress(AssertionError):
                exec(assertion, found)
                passed += 1
        assert passed == (3 if without != program else 4)
        bounded += without != program
    assert 200 < bounded < 330, "of 400"


def test_turns_through_rooms_are_what_the_environment_says(data_dir):
    train, test = (tasks.load("rooms", split=s, data_dir=data_dir)[:100] for s in ("train", "test"))
    assert not {r["question"] for r in train} & {r["question"] for r in test}
    lengths = collections.Counter()
    for record in [*train, *test]:
        house, turns = rooms(), record["turns"]
        house.reset(record)
        assert record["question"].endswith(f"door {record['doors'].split()[0]}.")
        for said, reply in zip(turns[:-1:2], turns[1::2], strict=True):
            called = [call | {"id": "call"} for call in said["tool_calls"]]
            (found,), reward = house.step(said | {"tool_calls": called})
            assert (found["content"], reward) == (reply["content"], 0.0)
        assert house.step(turns[-1]) == (None, 1.0)
        lengths[len(turns)] += 1
    assert set(lengths) == {5, 7} and min(lengths.values()) > 70


@pytest.mark.parametrize("level", ["medium", "hard"])
def test_expressions_are_worked_by_what_the_tool_replies(level, data_dir):
    train, test = (
        tasks.load("expression", split=s, data_dir=data_dir, difficulty=level)[:200] for s in ("train", "test")
    )
    assert not {r["question"] for r in train} & {r["question"] for r in test}
    for record in [*train, *test]:
        before, answer = written(record)
        (program,) = blocks.programs(before)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(program)
        assert before == f"```python\n{program}```\n{said.getvalue()}" and said.getvalue() == f"{answer}\n"
        assert record["question"] == program.removeprefix("print(").rstrip()[:-1] + "=?" and answer == record["answer"]


@pytest.mark.parametrize("level", ["easy", "long"])
def test_a_machine_s_steps_follow_from_each_other(level, data_dir):
    train, test = (tasks.load("machine", split=s, data_dir=data_dir, difficulty=level) for s in ("train", "test"))
    assert not {r["question"] for r in train[:2000]} & {r["question"] for r in test}
    for record in [*train[:50], *test[:50]]:
        before, answer = written(record)
        state, _, program = record["question"].partition(": ")
        rounds = itertools.cycle(program.split())
        steps = before.split()
        assert len(steps) == 2 * {"easy": 8, "long": 176}[level]
        for instruction, after, wanted in zip(steps[::2], steps[1::2], rounds, strict=False):
            at = "abc".index(instruction[0])
            digit = eval({"+": "{} + 1", "-": "{} - 1", "*": "{} * 2"}[instruction[1]].format(state[at])) % 10
            state = f"{state[:at]}{digit}{state[at + 1 :]}"
            assert (instruction, after) == (wanted, state)
        assert answer == record["answer"] == state


def test_steps_carry_and_borrow():
    # Worked by hand: 7+8=15 keeps 5 and carries 1; 4+2+1=7. 2<8, so 12-8=4 and 5-1-3=1. 100-1 borrows twice.
    assert generated._digit_steps([47, 28], 1) == ["7+8=15", "4+2+1=7"]
    assert generated._digit_steps([52, 38], -1) == ["12-8=4", "5-3-1=1"]
    assert generated._digit_steps([100, 1], -1) == ["10-1=9", "10-0-1=9", "1-0-1=0"]
    assert generated._digit_steps([0, 0], 1) == ["0+0=0"]
    assert generated._digit_steps([7, 95], 1) == ["7+5=12", "0+9+1=10"]
    assert generated._partial_sum_steps([47, 28, 13], [1, 1, -1]) == ["47+28=75", "75-13=62"]


def test_the_seed_decides_everything(tmp_path):
    def questions(folder, seed):
        records = tasks.load(
            "countdown", split="train", data_dir=str(tmp_path / folder), seed=seed, train_size=50, test_size=5
        )
        return [record["question"] for record in records]

    assert questions("a", 1) == questions("b", 1)
    assert questions("a", 1) != questions("a", 2)


def test_records_are_random_access(small):
    options, _ = small
    records = tasks.load("arithmetic", split="train", limit=10, instruction="Be brief.", **options)
    assert len(records) == 10 and records[3] == list(records)[3] == records[-7] == records[2:4][1]
    assert all(isinstance(value, str) for value in records[0].values())
    assert records[0]["instruction"] == "Be brief."
    with pytest.raises(IndexError):
        records[10]
    assert len(tasks.load("arithmetic", split="train", limit=99, **options)) == 40


def test_the_default_place_is_that_of_tfds_and_tensorflow_is_not_imported(tmp_path):
    script = (
        "import sys; from gspo_jax.data import pipeline, tasks\n"
        "records = tasks.load('countdown', split='test', difficulty='easy')\n"
        "assert len(records) == 128 and records[0]['worked']\n"
        "assert not {'tensorflow', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | {"TFDS_DATA_DIR": str(tmp_path)})
    assert (tmp_path / "countdown").is_dir()
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "arithmetics"}, r"unknown task 'arithmetics'; did you mean 'arithmetic'\? there are"),
        ({"task": "x" * 30}, "there are arithmetic, countdown, expression, induction, machine, rooms, gsm8k"),
        ({"split": "validation"}, "no split 'validation'"),
        ({"difficulty": "insane"}, "unknown difficulty 'insane'; use one of easy, medium, hard"),
        ({"dificulty": "easy"}, "no option 'dificulty'; did you mean 'difficulty'"),
        ({"train_size": 0}, "train_size is 0; use 1 or more"),
        ({"limit": 0}, "limit is 0; use 1 or more"),
        ({"folder": "/x"}, "reads no folder /x"),
        ({"data_dir": "gs://bucket/x"}, "data_dir is gs://bucket/x, where a path on this machine"),
        ({"difficulty": "easy", "train_size": 5000}, "has only about 1.* different problems, fewer than .* = 5128"),
        ({"data_dir": "/proc/nowhere"}, "cannot be built in /proc/nowhere"),
        ({"task": "gsm8k"}, "set it to one with train.jsonl"),
        ({"task": "gsm8k", "folder": "/x", "difficulty": "easy"}, "takes no difficulty"),
        ({"task": "gsm8k", "folder": "/nowhere"}, "/nowhere is no folder; set data.folder"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(arguments, message, data_dir):
    call = {"task": "arithmetic", "split": "train"} | arguments
    if call["task"] == "arithmetic":
        call.setdefault("data_dir", data_dir)
    with pytest.raises(UserError, match=message) as error:
        tasks.load(**call)
    assert "\n" not in str(error.value)


BUILD = """
import sys, time
from gspo_jax.data import generated, tasks
{patch}
records = tasks.load("arithmetic", split="train", data_dir=sys.argv[1], difficulty="easy")
print(len(records), records[5]["question"], flush=True)
"""

STALL = """
examples = generated.Arithmetic._generate_examples
def stall(self, split, problems):
    for i, example in enumerate(examples(self, split, problems)):
        if i == 100:
            print("building", file=sys.stderr, flush=True)
            time.sleep(60)
        yield example
generated.Arithmetic._generate_examples = stall
"""


def build(folder, patch=""):
    script = BUILD.format(patch=patch)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=pipe, stderr=pipe, text=True)


@pytest.mark.faults
def test_a_killed_build_is_redone(tmp_path):
    process = build(tmp_path, STALL)
    assert process.stderr is not None
    assert any(line == "building\n" for line in process.stderr)  # absl may log before it
    waiting = build(tmp_path)  # it finds the lock held and must leave the other's build alone
    time.sleep(1.5)
    assert len(list(tmp_path.rglob("incomplete.*"))) == 1 and waiting.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    out, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 0 and out.startswith("1280 ")
    assert not list(tmp_path.rglob("incomplete.*"))
    assert len(tasks.load("arithmetic", split="train", data_dir=str(tmp_path), difficulty="easy")) == 1280


@pytest.mark.slow
def test_builders_at_the_same_time_agree(tmp_path):
    processes = [build(tmp_path) for _ in range(3)]
    said = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, said
    outputs = {out for out, _ in said}
    assert len(outputs) == 1 and outputs.pop().startswith("1280 ")
    assert not list(tmp_path.rglob("incomplete.*"))


def test_a_flipped_byte_costs_one_named_record(small):
    options, shard = small
    content = bytearray(shard.read_bytes())
    content[2000] ^= 1  # one of 40 records of about 140 bytes, which start after byte 64
    shard.write_bytes(content)
    records = tasks.load("arithmetic", split="train", **options)
    bad = []
    for i in range(len(records)):
        try:
            assert records[i]["id"].endswith(f"train/{i}")
        except CorruptRecord as error:
            bad.append(i)
            assert str(error).startswith(f"record {i} of {shard} is corrupt: ")
    assert len(bad) == 1


@pytest.mark.faults
def test_no_flipped_byte_changes_a_record_silently(small):
    options, shard = small
    intact, content = list(tasks.load("arithmetic", split="train", **options)), shard.read_bytes()
    for place in (*range(0, 7500, 250), *range(65_536, 65_600, 8), -1):  # the records, the index, the end
        shard.write_bytes(bytes([*content[:place], content[place] ^ 1, *content[place:][1:]]))
        records = tasks.load("arithmetic", split="train", **options)
        for i, record in enumerate(intact):
            with contextlib.suppress(CorruptRecord):
                assert records[i] == record


def test_a_damaged_data_set_says_so(small):
    options, shard = small
    shard.write_bytes(shard.read_bytes()[:1000])
    records = tasks.load("arithmetic", split="train", **options)
    with pytest.raises(CorruptRecord, match=f"record 0 of {re.escape(str(shard))}"):
        records[0]
    shard.unlink()
    with pytest.raises((UserError, CorruptRecord), match=re.escape(shard.name.split("-")[0])):
        tasks.load("arithmetic", split="train", **options)[0]
    (shard.parent / "dataset_info.json").write_text("{")
    with pytest.raises(UserError, match="delete"):
        tasks.load("arithmetic", split="train", **options)


QUESTIONS = [
    {"question": " How many? ", "answer": "It is 48/2 = <<48/2=24>>24.\nSo 24+1,000=<<24+1000=1024>>1,024\n#### 1,024"},
    {"question": "And left?", "answer": "5 - 7 = -2\n#### -2"},
]


def jsonl(folder: Path, *lines: bytes, name: str = "train.jsonl") -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"".join(line + b"\n" for line in lines))
    return str(folder)


def test_gsm8k_from_jsonl(tmp_path):
    lines = [json.dumps(row).encode() for row in QUESTIONS]
    records = tasks.load("gsm8k", split="train", folder=jsonl(tmp_path, lines[0], b"", lines[1]))
    assert records[0] == {
        "id": "gsm8k/train/0",
        "question": "How many?",
        "answer": "1024",
        "worked": "It is 48/2 = 24.\nSo 24+1,000=1,024\n#### 1024",
        "instruction": "Think step by step, then write the final answer as a number after ####.",
    }
    assert records[1]["answer"] == "-2" and len(records) == 2
    assert len(tasks.load("gsm8k", split="train", folder=str(tmp_path), limit=1)) == 1
    with pytest.raises(
        UserError, match=r"has no test rows: .* test\.jsonl, .* and there is train\.jsonl; put them there"
    ):
        tasks.load("gsm8k", split="test", folder=str(tmp_path))
    with pytest.raises(UserError, match="takes no data_dir"):
        tasks.load("gsm8k", split="train", folder=str(tmp_path), data_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "\xff", "answer": "#### 1"}', r"train\.jsonl, line 2: not UTF-8; correct or remove it"),
        (b'{"question": "\\ud800", "answer": "#### 1"}', r"train\.jsonl, line 2: question is not Unicode text"),
        (b'{"question": "a"', r"train\.jsonl, line 2: not JSON"),
        (b'["question"]', r"train\.jsonl, line 2: not an object"),
        (b'{"question": "a"}', r"line 2: no answer"),
        (b"[" * 100_000, r"train\.jsonl, line 2: nested too deeply"),
        (b'{"question": 5, "answer": "#### 1"}', r"train\.jsonl, line 2: question is not a text"),
        (b'{"question": "a", "answer": "one"}', r"train\.jsonl, line 2: the answer has no number after ####"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    folder = jsonl(tmp_path, json.dumps(QUESTIONS[0]).encode(), line)
    with pytest.raises(UserError, match=message):
        tasks.load("gsm8k", split="train", folder=folder)


def test_an_empty_file_has_no_records(tmp_path):
    says = r"the train split of gsm8k, has no records; .* set data\.folder"
    with pytest.raises(UserError, match=says):
        tasks.load("gsm8k", split="train", folder=jsonl(tmp_path))


@pytest.mark.parametrize(("split", "field"), [("train", r"data\.limit"), ("test", r"eval\.prompts")])
def test_a_limit_below_one_names_the_field_that_set_it(split, field):
    with pytest.raises(UserError, match=rf"limit is -5; .* None for all records \(in a config: {field}, 0 for all\)"):
        tasks.load("arithmetic", split=split, limit=-5)


class Gsm8k(tfds.core.GeneratorBasedBuilder):
    """A data set prepared as a TFDS directory, as TFDS's own gsm8k leaves it."""

    VERSION = tfds.core.Version("1.0.0")
    SKIP_REGISTERING = True
    ROWS = (*QUESTIONS, {"question": "Broken", "answer": "no mark"})

    def _info(self):
        features = tfds.features.FeaturesDict(
            {"question": tfds.features.Text(), "answer": tfds.features.Text(), "short_answer": tfds.features.Text()}
        )
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(), "test": self._generate_examples()}

    def _generate_examples(self):
        for i, row in enumerate(self.ROWS):
            yield i, row | {"short_answer": ""}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    builder = Gsm8k(data_dir=str(tmp_path_factory.mktemp("gsm8k")), file_format="array_record")
    builder.download_and_prepare()
    return Path(builder.data_dir)


def test_gsm8k_from_a_prepared_tfds_directory(built):
    records = tasks.load("gsm8k", split="test", folder=str(built))
    assert len(records) == 3
    good, broken = [], []
    for i in range(3):
        try:
            good.append(records[i])
        except CorruptRecord as error:
            broken.append(str(error))
    assert {r["answer"] for r in good} == {"1024", "-2"} and "no number after ####" in broken[0]
    with pytest.raises(UserError, match="no split 'dev'"):
        tasks.load("gsm8k", split="dev", folder=str(built))


PLANTED = "planted_module"
TEXT = "tensorflow_datasets.core.features.text_feature.Text"
DICT = "tensorflow_datasets.core.features.features_dict.FeaturesDict"
OLD = {"type": f"{PLANTED}.Evil", "content": {}}
FEATURE = {"pythonClassName": f"{PLANTED}.Evil", "text": {}}


def edit(name, change):
    """Return a function that changes the metadata file `name` of a folder."""

    def apply(folder):
        content = json.loads((folder / name).read_text())
        changed = change(content)
        (folder / name).write_text(json.dumps(content if changed is None else changed))

    return apply


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def feature(value):
    return edit("features.json", lambda content: content["featuresDict"]["features"].update(extra=value))


def info(**fields):
    return edit("dataset_info.json", lambda content: content.update(fields))


def split(**fields):
    return edit("dataset_info.json", lambda content: content["splits"][0].update(fields))


METADATA = {
    "class": (feature(FEATURE), f"names the class '{PLANTED}.Evil', whose code would be run; build .* Text, Scalar"),
    "class, other spelling": (feature({"python_class_name": f"{PLANTED}.Evil", "text": {}}), "whose code would be run"),
    "class at the top": (edit("features.json", lambda _: FEATURE), "whose code would be run"),
    "class inside": (
        feature({"pythonClassName": DICT, "featuresDict": {"features": {"deep": FEATURE}}}),
        "whose code would be run",
    ),
    "class in a sequence": (
        feature(
            {
                "pythonClassName": "tensorflow_datasets.core.features.sequence_feature.Sequence",
                "sequence": {"feature": FEATURE},
            }
        ),
        "whose code would be run",
    ),
    "class in JSON text": (
        feature({"pythonClassName": DICT, "jsonFeature": {"json": json.dumps({"x": OLD})}}),
        "FeaturesDict by 'json_feature' instead of 'features_dict'; build it again",
    ),
    "class of an old version": (feature(OLD), r"features\.json is damaged, or not written by a current TFDS"),
    "only a class of an old version": (edit("features.json", lambda _: OLD), "not written by a current TFDS"),
    "class in dataset_info.json": (info(features=FEATURE), r"dataset_info\.json names the class"),
    "no dictionary": (
        edit("features.json", lambda _: {"pythonClassName": TEXT, "text": {}}),
        "describes one feature, not records with several; build it again",
    ),
    "feature name": (
        edit(
            "features.json",
            lambda content: content["featuresDict"]["features"].update({"../x": {"pythonClassName": TEXT, "text": {}}}),
        ),
        r"features\.json has a feature '\.\./x'; name features by letters, digits",
    ),
    "shards above the folder": (
        split(filepathTemplate="../../{SPLIT}"),
        r"filepathTemplate is '\.\./\.\./\{SPLIT\}', but shards are plain files of that folder",
    ),
    "shards elsewhere": (split(filepathTemplate="/etc/{SPLIT}"), "shards are plain files"),
    "shard names of gigabytes": (split(filepathTemplate="{SPLIT:>9999999999}"), "shards are plain files"),
    "name": (info(name="../../x"), r"name is '\.\./\.\./x', but shards are plain files"),
    "format": (info(fileFormat="../x"), "is no data set that TFDS can open"),
    "version": (info(version="new"), "is no data set that TFDS can open"),
    **{
        f"{name} is {value!r}": (write(name, json.dumps(value)), f"{re.escape(name)} (is damaged|holds a JSON)")
        for name in ("dataset_info.json", "features.json")
        for value in (None, 5, [], "x", {"splits": 5})
    },
    "too deep": (
        write("features.json", "[" * 100_000 + "]" * 100_000),
        r"features\.json (is not valid JSON|holds a JSON list)",
    ),
    "no features": (lambda folder: (folder / "features.json").unlink(), r"features\.json does not exist; build"),
}


@pytest.mark.faults
@pytest.mark.parametrize("case", METADATA)
def test_a_prepared_folder_runs_no_code_and_opens_no_other_file(case, built, tmp_path, monkeypatch):
    (tmp_path / f"{PLANTED}.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "gsm8k"
    shutil.copytree(built, folder)
    change, message = METADATA[case]
    change(folder)
    with pytest.raises(UserError, match=message) as error:
        tasks.load("gsm8k", split="train", folder=str(folder))
    assert "\n" not in str(error.value) and not (tmp_path / "ran").exists()


def test_other_features_of_text_and_numbers_are_read(tmp_path):
    class Richer(Gsm8k):
        def _info(self):
            text = tfds.features.Text()
            features = {"question": text, "answer": text, "short_answer": text, "step": np.int32}
            more = {"tags": tfds.features.Sequence(text), "level": tfds.features.ClassLabel(names=["easy", "hard"])}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features | more))

        def _generate_examples(self):
            for i, row in enumerate(QUESTIONS):
                yield i, row | {"short_answer": "", "step": i, "tags": ["a", "b"], "level": "hard"}

    builder = Richer(data_dir=str(tmp_path), file_format="array_record")
    builder.download_and_prepare()
    assert {r["answer"] for r in tasks.load("gsm8k", split="test", folder=str(builder.data_dir))} == {"1024", "-2"}


def test_a_generated_data_set_reads_its_own_shards_only(small):
    options, shard = small
    split(filepathTemplate="../{SPLIT}")(shard.parent)
    with pytest.raises(UserError, match=r"dataset_info\.json: filepathTemplate is '\.\./\{SPLIT\}', but shards are"):
        tasks.load("arithmetic", split="train", **options)
