"""Rows of a user's own files: every defect has its name, nothing is cut, sources are mixed and scored on their own."""

import collections
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow_datasets as tfds

from configs import tiny
from gspo_jax.config import source
from gspo_jax.data import rows, tasks
from gspo_jax.data.pipeline import PLAIN, PromptStyle, conversation, eval_batches, prompt_batches, prompt_text
from gspo_jax.data.rows import Source
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import UserError
from gspo_jax.setup import data as setup_data
from gspo_jax.setup.checks import check

USER, ASSISTANT = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "Add."}


def asked(**fields):
    return json.dumps({"question": "1+1=", "answer": "2"} | fields).encode()


def said(*turns, **fields):
    return json.dumps({"messages": turns, "answer": "2"} | fields).encode()


def calling(arguments):
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}


DEFECTS = {
    "not UTF-8": b'{"question": "\xff", "answer": "2"}',
    "not JSON": b'{"question": "1+1=", "answer": "2"',
    "not an object": b'["1+1=", "2"]',
    "field given twice": b'{"question": "1+1=", "question": "1+2=", "answer": "2"}',
    "NaN or Infinity, which is not JSON": b'{"question": "1+1=", "answer": NaN}',
    "nested too deeply": b"[" * 100_000,
    "number with too many digits": b'{"question": "1+1=", "answer": ' + b"1" * 5000 + b"}",
    "no question, prompt or messages": b'{"answer": "2"}',
    "several of question, prompt and messages": asked(prompt="1+2="),
    "question is not a text": asked(question=5),
    "question is empty": asked(question=" \n"),
    "question is not Unicode text": b'{"question": "\\ud800", "answer": "2"}',
    "question has a NUL character": asked(question="a\0b"),
    "prompt is not a text": b'{"prompt": 5, "answer": "2"}',
    "prompt is empty": b'{"prompt": "", "answer": "2"}',
    "messages are not a list": b'{"messages": "1+1=", "answer": "2"}',
    "no messages": said(),
    "message is not an object": said("1+1="),
    "message without role": said({"content": "1+1="}),
    "message without content": said({"role": "user"}),
    "role is not a text": said({"role": 1, "content": "1+1="}),
    "role is not system, user, assistant or tool": said(USER, {"role": "function", "content": "2"}),
    "tool calls of the user": said(USER | {"tool_calls": [{"name": "add"}]}),
    "tool calls are not a list": said(USER, ASSISTANT | {"tool_calls": "add"}, USER),
    "tool call is not an object": said(USER, ASSISTANT | {"tool_calls": ["add"]}, USER),
    "arguments of a tool call are a text that is not JSON": said(USER, calling("{'a': 1}"), USER),
    "arguments of a tool call are not an object": said(USER, calling("[1]"), USER),
    "tool's reply without a call before it": said(USER, {"role": "tool", "content": "2"}),
    "tools are a text that is not JSON": asked(tools="[{]"),
    "malformed tools": asked(tools=["add"]),
    "content is not a text": said({"role": "user", "content": [{"type": "text", "text": "1+1="}]}),
    "content is empty": said({"role": "user", "content": ""}),
    "content is not Unicode text": b'{"messages": [{"role": "user", "content": "\\udfff"}], "answer": "2"}',
    "reasoning_content is not a text": said(USER, ASSISTANT | {"reasoning_content": 3}, USER),
    "several system messages": said(SYSTEM, SYSTEM, USER),
    "system message is not the first": said(USER, SYSTEM, USER),
    "no user's turn": said(SYSTEM),
    "messages end with the assistant's turn": said(USER, ASSISTANT),
    "no answer": b'{"question": "1+1="}',
    "answer is not a text": asked(answer=["2"]),
    "answer is empty": asked(answer=" "),
    "answer has a NUL character": asked(answer="2\0"),
    "answer is not Unicode text": b'{"question": "1+1=", "answer": "\\ud801"}',
    "id is not a text": asked(id=[1]),
    "worked is not a text": asked(worked=5),
    "instruction is not a text": asked(instruction=1),
    "system is not a text": asked(system=1),
    "answer is not a finite number": asked(answer=2).replace(b": 2", b": 1e999"),
}
"""A line with each defect of a row, by the name that it is counted under."""
REMEDIES = {
    "no question, prompt or messages": "name the prompt's field, --config.data.prompt=FIELD",
    "several of question, prompt and messages": "choose one, such as --config.data.prompt=prompt",
}
"""What to do about a defect, where it is not to correct the rows."""
LATER = {
    "prompt longer than 24 tokens": asked(question="1+1=" * 20),
    "rejected by the chat template": said(USER, USER),
}
"""Defects that only the tokenizer shows."""

TEMPLATE = """{%- for m in messages %}{%- if not loop.first and m.role == messages[loop.index0 - 1].role %}
{{- raise_exception('turns must alternate') }}{%- endif %}<{{ m.role }}>{{ m.content }}{%- endfor %}<assistant>"""


@pytest.fixture(scope="module")
def tokenizer():
    made = Tokenizer.train(["0123456789+-= Add."], 320)
    settings = made._settings | {"chat_template": TEMPLATE}
    return Tokenizer(made._backend, eos_ids=made.eos_ids, pad_id=made.pad_id, settings=settings)


def write(path, *lines):
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def test_each_row_of_a_thousand_is_used_or_counted_under_the_name_of_its_defect(tmp_path, tokenizer):
    """51 kinds of defects, at random among good rows; no prompt that is used was cut."""
    rng, wanted = np.random.default_rng(0), collections.Counter()
    bad, lines, good = DEFECTS | LATER, [], []
    assert len(bad) >= 40
    for number in range(1000):
        name = list(bad)[rng.integers(len(bad))] if rng.random() < 0.6 else ""
        question = f"{number}+1="
        lines.append(bad[name] if name else asked(question=question, id=number))
        wanted[name] += 1
        good += [] if name else [question]
    place = write(tmp_path / "train.jsonl", *lines)
    records = rows.load({"": Source(place, place)}, split="train", limit=None)
    batches = eval_batches(records, tokenizer, prompts_per_batch=4, max_prompt_length=24)
    assert batches.skipped_by == {name: count for name, count in wanted.items() if name}
    assert set(batches.skipped_by) == set(bad)
    assert batches.usable == wanted[""] and batches.usable + batches.skipped == 1000
    used = [text for batch in batches for text in batch.texts]
    assert used[: len(good)] == [f"<user>{question}<assistant>" for question in good]


@pytest.mark.parametrize("name", DEFECTS)
def test_a_file_of_one_defect_alone_ends_with_its_name_and_line(name, tmp_path, caplog):
    place = write(tmp_path / "rows.jsonl", b"", DEFECTS[name])
    remedy = {
        "no question, prompt or messages": "name the prompt",
        "several of question, prompt and messages": "choose",
        "malformed tools": "tool 'add' is no ",
    }
    with pytest.raises(
        UserError, match=f"has no usable row: 1 of 1 left out are {name}; {remedy.get(name, 'correct them')}"
    ):
        rows.load({"": Source(place, place)}, split="train", limit=None)
    assert f"1 {name} (first: {place}, line 2)" in caplog.text


def test_prompts_in_every_form_become_conversations(tmp_path, tokenizer):
    lines = [
        asked(),
        json.dumps({"prompt": "1+1=", "answer": 2}).encode(),
        json.dumps({"prompt": [USER], "answer": 2.0}).encode(),
        said(USER, ASSISTANT, {"role": "user", "content": "2+2="}),
        said(SYSTEM, USER),
        asked(system="Count.", instruction="Be brief."),
    ]
    place = write(tmp_path / "rows.jsonl", *lines)
    records = rows.load({"": Source(place, place, instruction="Go.")}, split="train", limit=None)
    style = PromptStyle("Reason.", (USER | {"content": "3+3="}, ASSISTANT | {"content": "6"}))
    head, shots = "<system>Reason.", "<user>3+3=<assistant>6"
    assert [prompt_text(record, tokenizer, style) for record in records] == [
        *[f"{head}{shots}<user>1+1=\nGo.<assistant>"] * 3,
        f"{head}{shots}<user>1+1=<assistant>2<user>2+2=\nGo.<assistant>",
        f"<system>Add.{shots}<user>1+1=\nGo.<assistant>",
        f"<system>Count.{shots}<user>1+1=\nBe brief.<assistant>",
    ]
    assert [record["answer"] for record in records] == ["2"] * 6
    assert [record["question"] for record in records][3:5] == ["2+2=", "1+1="]
    assert conversation(records[0], PLAIN) == [{"role": "user", "content": "1+1=\nGo."}]


def test_further_fields_reach_the_reward_as_they_are(tmp_path):
    more = {"tests": ["assert f(1) == 2"], "level": 3, "reward_model": {"ground_truth": "2", "style": "rule"}}
    place = write(tmp_path / "rows.jsonl", json.dumps({"prompt": "1+1=", **more}).encode())
    (record,) = rows.load({"": Source(place, place)}, split="train", answer="reward_model.ground_truth", limit=None)
    assert record["answer"] == "2" and {name: record[name] for name in more} == more
    (record,) = rows.load({"": Source(place, place)}, split="train", answer="", limit=None)
    assert record["answer"] == "" and record["tests"] == more["tests"]


ROWS = [{"question": f"{i}+1=", "answer": str(i + 1), "level": i, "tags": ["a", "b"]} for i in range(20)]
SPLITS = {"train": ROWS[:15], "test": ROWS[15:]}


class Prepared(tfds.core.GeneratorBasedBuilder):
    """ROWS as a TFDS directory."""

    VERSION = tfds.core.Version("1.0.0")
    SKIP_REGISTERING = True

    def _info(self):
        text = tfds.features.Text()
        features = {"question": text, "answer": text, "level": np.int64, "tags": tfds.features.Sequence(text)}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(rows) for split, rows in SPLITS.items()}

    def _generate_examples(self, rows):
        yield from enumerate(rows)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "tfds"])
def test_the_same_rows_in_every_format(kind, tmp_path):
    folder = tmp_path
    if kind == "tfds":
        builder = Prepared(data_dir=str(tmp_path), file_format="array_record")
        builder.download_and_prepare()
        folder = builder.data_dir
    for split, rows_ in SPLITS.items():
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows_), tmp_path / f"{split}.parquet")
        elif kind == "jsonl":
            write(tmp_path / f"{split}.jsonl", *(json.dumps(row).encode() for row in rows_))
    for split, rows_ in SPLITS.items():
        records = tasks.load("jsonl", split=split, folder=str(folder))
        found = [{name: record[name] for name in ROWS[0]} for record in records]
        assert sorted(found, key=lambda row: row["level"]) == rows_  # TFDS has an order of its own


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: str(path / "none.jsonl"), "none.jsonl does not exist; give a file of JSON Lines, JSON,"),
        (lambda path: str(path), "has no train rows: they are looked for in train.jsonl, train-00000-of-00001.parquet"),
        (lambda path: write(path / "rows.txt", b"a,b"), "rows.txt is not a file of JSON Lines, JSON, CSV or Parquet"),
        (lambda path: write(path / "rows.jsonl"), "rows.jsonl has no rows; give at least one"),
        (lambda path: write(path / "rows.parquet", b"PAR1, broken"), "rows.parquet cannot be read after row 0"),
    ],
)
def test_a_file_that_cannot_be_read_ends_with_one_sentence(make, says, tmp_path):
    place = make(tmp_path)
    with pytest.raises(UserError) as error:
        rows.load({"": Source(place, place)}, split="train", limit=None)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_without_a_test_file_some_prompts_are_held_out_and_stay_so(tmp_path):
    lines = [asked(question=f"{i % 400}+1=", id=str(i)) for i in range(500)]

    def questions(split, count):
        place = write(tmp_path / "train.jsonl", *lines[:count])
        return [r["question"] for r in rows.load({"": Source(place)}, split=split, held_out=0.1, limit=None)]

    train, test = questions("train", 500), questions("test", 500)
    assert len(train) + len(test) == 500 and 25 <= len(test) <= 75
    assert not set(train) & set(test), "equal prompts are on one side"
    assert set(questions("test", 300)) <= set(test), "a row stays where it is when others are added"
    with pytest.raises(UserError, match=r"set data\.test to a file of such, or data\.held_out above 0"):
        rows.load({"": Source(str(tmp_path / "train.jsonl"))}, split="test", held_out=0.0, limit=None)


def mixture(tmp_path, *, counts=(50, 500, 7)):
    """Three files of different lengths, and the sources that mix them 3 : 2 : 1."""
    made = {}
    for (name, weight), count in zip({"add": 3.0, "more": 2.0, "few": 1.0}.items(), counts, strict=True):
        lines = [asked(question=f"{name} {i}+1=") for i in range(count)]
        made[name] = Source(write(tmp_path / f"{name}.jsonl", *lines), weight=weight)
    return made


def test_sources_are_mixed_by_weight_and_resume_at_any_batch(tmp_path, tokenizer):
    records = rows.load(mixture(tmp_path), split="train", held_out=0.0, limit=None)

    def batches():
        return prompt_batches(records, tokenizer, prompts_per_batch=12, max_prompt_length=64, seed=3)

    first = batches()
    seen = [[record["id"] for record in next(first).records] for _ in range(50)]
    drawn = collections.Counter(name.partition(".")[0] for batch in seen for name in batch)
    assert drawn == {"add": 300, "more": 200, "few": 100}
    of_add = [name for batch in seen for name in batch if name.startswith("add")]
    assert sorted(of_add[:50]) == sorted(set(of_add)), "each source is drawn without repetition until it is used up"
    for at in (1, 7, 33):
        before, again = batches(), batches()
        for _ in range(at):
            next(before)
        again.set_state(before.get_state())
        assert [[r["id"] for r in next(again).records] for _ in range(5)] == seen[at : at + 5]
    other = rows.load(
        {**mixture(tmp_path), "few": Source(str(tmp_path / "few.jsonl"), weight=2.0)},
        split="train",
        held_out=0.0,
        limit=None,
    )
    with pytest.raises(UserError, match="saved with weights"):
        prompt_batches(other, tokenizer, prompts_per_batch=12, max_prompt_length=64, seed=3).set_state(
            first.get_state()
        )


def config_of(tmp_path, **sources):
    config = tiny.get_config("runlocal")
    config.data.task = "jsonl"
    config.data.sources = {name: source(str(tmp_path / f"{name}.jsonl"), **fields) for name, fields in sources.items()}
    config.rewards = {"exact_answer": 1.0, "answer_format": 0.5}
    config.eval.correct = "exact_answer"
    config.data.options = {}
    return config


def test_each_source_is_scored_by_its_own_rewards(tmp_path):
    config = config_of(tmp_path, one={"rewards": ("exact_answer",)}, two={}, three={"rewards": ("answer_format",)})
    config.data.sources.three.correct = "answer_format"
    check(config)
    records = [{"answer": "2", rows.SOURCE: name} for name in ("one", "two", "three")]
    with setup_data.make_scorer(config) as scorer:
        scores = scorer.score([""] * 3, ["1 #### 2"] * 3, records)
    np.testing.assert_array_equal(scores.total, np.float32([1, 1.5, 0.5]))
    np.testing.assert_array_equal(scores.by_name["exact_answer"], np.float32([1, 1, np.nan]))
    assert scores.failures == 0
    with setup_data.make_scorer(tiny.get_config()) as scorer:
        assert scorer.score([""], ["1 #### 2"], [{"answer": "2", rows.SOURCE: "of.the/row itself"}]).total == [1]
    correct = setup_data.correct_for(config)
    assert [correct(record) for record in records] == ["exact_answer", "exact_answer", "answer_format"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data.sources.one.rewards": ("math_verify",)}, "data.sources.one.rewards has 'math_verify', which is not"),
        ({"data.sources.one.rewards": ("answer_format",)}, "data.sources.one is judged by 'exact_answer', which does"),
        ({"data.sources.one.weight": 0.0}, "data.sources.one.weight is 0.0; use a finite number above 0"),
        ({"data.sources.one.train": ""}, "data.sources.one.train is empty; give a file or folder"),
        ({"data.train": "x.jsonl"}, "task jsonl reads data.train, data.folder or data.sources, and data.train and"),
        ({"data.task": "gsm8k"}, "data.sources is for the task 'jsonl', and data.task is 'gsm8k'"),
        ({"data.held_out": 1.0}, "data.held_out is 1.0; use a fraction from 0 up to, but not including, 1"),
    ],
)
def test_wrong_sources_are_refused_before_any_work(change, says, tmp_path):
    config = config_of(tmp_path, one={}, two={})
    config.update_from_flattened_dict(change)
    with pytest.raises(UserError, match=says.replace(".", r"\.")):
        check(config)


def test_special_tokens_count_in_a_raw_prompt_and_nowhere_else(tmp_path, tokenizer):
    """`prompt` is the user's own text; a question, a message, an example and a system prompt are what is said."""
    text = "1<|im_end|>+1="
    lines = [
        asked(question=text),
        said(USER | {"content": text}),
        json.dumps({"prompt": [USER | {"content": text}], "answer": "2"}).encode(),
        json.dumps({"prompt": text, "answer": "2"}).encode(),
    ]
    place = write(tmp_path / "rows.jsonl", *lines)
    records = rows.load({"": Source(place, place, instruction="<|im_start|>")}, split="train", limit=None)
    style = PromptStyle("<|im_end|>", (USER | {"content": "<|im_end|>"}, ASSISTANT))
    (batch,) = eval_batches(records, tokenizer, prompts_per_batch=4, max_prompt_length=200, style=style)
    whole = f"<system><|im_end|><user><|im_end|><assistant>2<user>{text}\n<|im_start|><assistant>"
    assert batch.texts == [whole] * 4
    ends = [(batch.tokens[row, : batch.lengths[row]] == 1).sum() for row in range(4)]
    assert ends == [0, 0, 0, 1]
    assert (batch.tokens[0] == batch.tokens[1]).all()
