"""Files of rows as users bring them: every format says the same, folders are named as on a hub, nulls are absent."""

import datetime
import decimal
import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from configs import tiny
from gspo_jax import coldstart
from gspo_jax.config import source
from gspo_jax.data import benchmarks, files, pipeline, rows, tasks
from gspo_jax.data.rows import Source
from gspo_jax.errors import UserError
from gspo_jax.setup import data as setup_data

BOM, ROW = b"\xef\xbb\xbf", b'{"question": "1+1=", "answer": "2"}'
READ = {"question": "1+1=", "answer": "2"}
LINES = b"question,answer\r\n"

CONTENTS = {
    # name of the file, its bytes: the rows, or the name of a row's defect
    "one line": ("a.jsonl", ROW, [READ]),
    "a mark, which is no data": ("a.jsonl", BOM + ROW, [READ]),
    "a mark in the middle, of a file that was appended": ("a.jsonl", ROW + b"\n" + BOM + ROW, [READ, READ]),
    "compressed": ("a.jsonl.gz", gzip.compress(BOM + ROW), [READ]),
    "nulls are absent": ("a.jsonl", b'{"question": "a", "messages": null, "x": {"y": null, "z": 1}}',
                         [{"question": "a", "x": {"z": 1}}]),
    "a list keeps its places": ("a.jsonl", b'{"x": [1, null, {"y": null}]}', [{"x": [1, None, {}]}]),
    "lines in .json": ("a.json", ROW + b"\n" + ROW, [READ, READ]),
    "an array": ("a.json", b"[\n" + ROW + b",\n" + ROW + b"\n]\n", [READ, READ]),
    "an array behind a mark": ("a.json", BOM + b"[" + ROW + b"]", [READ]),
    "an array in .jsonl": ("a.jsonl", b"[" + ROW + b",\n" + ROW + b"]", [READ, READ]),
    "an array under data": ("a.json", b'{"version": 1, "data": [' + ROW + b"]}", [READ]),
    "one object over several lines": ("a.json", ROW.replace(b", ", b",\n"), [READ]),
    "an empty array": ("a.json", b"[]", []),
    "a defect in an array": ("a.json", b'[{"x": 1, "x": 2}, ' + ROW + b', {"x": NaN}, 5]',
                             ["field given twice", READ, "NaN or Infinity, which is not JSON", "not an object"]),
    "lists as lines": ("a.jsonl", b'[{"x": 1}]\n[{"x": 2}]', ["not an object", "not an object"]),
    "a table": ("a.csv", LINES + b"1+1=,2\r\n", [READ]),
    "a table behind a mark": ("a.csv", BOM + LINES + b"1+1=,2\n", [READ]),
    "quotes, commas, several lines": ("a.csv", b'question,answer\n"Say ""x, y"".\n\nThen?",2\n',
                                      [{"question": 'Say "x, y".\n\nThen?', "answer": "2"}]),
    "numbers stay as they are written": ("a.csv", b"question,answer,level\na,007,1.50\n",
                                         [{"question": "a", "answer": "007", "level": "1.50"}]),
    "empty cells are absent": ("a.csv", b'question,answer,messages\na,,""\n', [{"question": "a"}]),
    "an index without a name": ("a.csv", b",question,answer\n0,1+1=,2\n", [READ]),
    "blank lines": ("a.csv", LINES + b"\r\n1+1=,2\r\n\r\n", [READ]),
    "a long cell": ("a.csv", LINES + b"q" * 200_000 + b",2\n", [{"question": "q" * 200_000, "answer": "2"}]),
    "a cell too many": ("a.csv", LINES + b"1+1=,2,3\n1+1=,2\n", ["more or fewer cells than columns", READ]),
    "a quote that is not closed": ("a.csv", LINES + b'1+1=,2\n"1+1=,2\n', [READ, "not CSV"]),
    "a quote that a later one closes": ("a.csv", LINES + b'"1+1=,2\n1+1=,2\n"1+1=",2\n1+1=,2\n',
                                        ["not CSV", "not CSV", "not CSV", READ]),
    "marks before names and texts": ("a.json", '{"\ufeffquestion": "\ufeff1+1=", "answer": "2"}'.encode(), [READ]),
    "marks inside": ("a.json", '[{"x": ["\ufeffa", {"\ufeffy": 1}], "z": "a\ufeff"}]'.encode(),
                     [{"x": ["a", {"y": 1}], "z": "a\ufeff"}]),
    "a name with and without a mark": ("a.json", '[{"\ufeffx": 1, "x": 2}]'.encode(), ["field given twice"]),
    "two marks": ("a.json", BOM + BOM + b"[" + ROW + b"]", [READ]),
    "a table behind two marks": ("a.csv", BOM + BOM + LINES + BOM + b"1+1=,2\n", [READ]),
    "text behind a quote": ("a.csv", LINES + b'"1+"1=,2\n1+1=,2\n', ["not CSV", READ]),
    "another encoding": ("a.csv", LINES + b"caf\xe9,2\n1+1=,2\n", ["not UTF-8", READ]),
    "a compressed table": ("a.csv.gz", gzip.compress(LINES + b"1+1=,2"), [READ]),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTENTS)
def test_what_a_file_says(name, tmp_path):
    file, content, wanted = CONTENTS[name]
    (tmp_path / file).write_bytes(content)
    found = [row.content for row in files.read(str(tmp_path / file), "train")]
    assert [str(row) if isinstance(row, files.Defect) else row for row in found] == wanted


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("a.jsonl", '{"x": 1}'.encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
        ("a.csv", "question,answer\n".encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
        ("a.json", b"[" + ROW + b", {", "begins as a JSON array and is none"),
        ("a.json", b'[{"x": "\xff"}]', "begins as a JSON array and is none"),
        ("a.csv", b"question;answer\n1+1=;2\n", "separates its columns by ';'; save it with commas"),
        ("a.csv", b"question\tanswer\n1+1=\t2\n", r"separates its columns by '\\t'; save it with commas"),
        ("a.csv", b"answer,answer\n1,2\n", "has two columns 'answer'; rename one"),
        (
            "a.csv",
            LINES + b'1+1=,2\n"1+1=,2\n' + b"1+1=,2\n" * 9,
            "a quote of the row at line 3 is not closed; close it",
        ),
        ("a.csv", b"question,r\xe9ponse\n1+1=,2\n", "has names of columns that are not UTF-8; save it as UTF-8"),
        ("a.csv", b'question,"answer\n' + b"1+1=,2\n" * 9, "the header is not CSV .*; correct its quotes"),
        ("a.jsonl.gz", ROW, r"cannot be read: Not a gzipped file .*; restore it"),
        ("a.jsonl.gz", gzip.compress(ROW * 99)[:-20], "cannot be read: Compressed file ended .*; restore it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_says_nothing_ends_with_one_sentence(file, content, says, tmp_path):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=says) as error:
        list(files.read(str(tmp_path / file), "train"))
    assert "\n" not in str(error.value)


FOLDERS = {
    # the files of a folder: in what order train and test are read from it, or what is said
    ("train.jsonl", "test.jsonl"): (["train.jsonl"], ["test.jsonl"]),
    ("train.json", "test.csv"): (["train.json"], ["test.csv"]),
    ("main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"): (
        ["main/train-00000-of-00001.parquet"], ["main/test-00000-of-00001.parquet"]),
    ("data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet",
     "data/test-00000-of-00001-a09b74b3ef9c3b56.parquet"): (
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
        ["data/test-00000-of-00001-a09b74b3ef9c3b56.parquet"]),
    ("default/train/0000.parquet", "default/train/0001.parquet", "default/test/0000.parquet"): (
        ["default/train/0000.parquet", "default/train/0001.parquet"], ["default/test/0000.parquet"]),
    ("train_10.jsonl", "train_9.jsonl", "dev.jsonl"): (["train_9.jsonl", "train_10.jsonl"], ["dev.jsonl"]),
    ("my-train.jsonl", "my-validation.jsonl", "README.json", ".cache/train.jsonl"): (
        ["my-train.jsonl"], ["my-validation.jsonl"]),
    ("train.jsonl", "train_socratic.jsonl", "test.jsonl", "test_socratic.jsonl", "example.jsonl"): (
        ["train.jsonl"], ["test.jsonl"]),
    ("0000.parquet", "0001.parquet"): (["0000.parquet", "0001.parquet"], "has no test rows"),
    ("rows.jsonl",): (["rows.jsonl"], "and there is rows.jsonl; put them there, or name files"),
    ("a.jsonl", "b.jsonl"): ("has 2 data sets with train rows, in a.jsonl and b.jsonl; .* such as .*/a.jsonl", ""),
    ("main/train-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet"): (
        "has 2 data sets with train rows, in main/.* and socratic/.*; give one of them, such as .*/main$", ""),
    ("main/train/0.parquet", "socratic/train/0.parquet"): ("give one of them, such as .*/main$", ""),
    ("main/train/0.parquet", "main/test/0.parquet", "extra/train.jsonl"): (
        "give one of them, such as .*/extra$", ["main/test/0.parquet"]),
    ("train/algebra/1.json", "train/algebra/2.json", "train/geometry/1.json"): (
        "has 2 data sets .*, such as .*/train/algebra$", ""),
    ("data/train_sft-00000-of-00002.parquet", "data/train_sft-00001-of-00002.parquet", "data/train_gen.parquet"): (
        "has 2 data sets .*, such as .*/data/train_gen.parquet$", ""),
    ("x/data/train.jsonl", "x/data/test.jsonl", "x/data/train_socratic.jsonl", "x/data/old/train.jsonl"): (
        ["x/data/train.jsonl"], ["x/data/test.jsonl"]),
    ("train/algebra.jsonl", "train/geometry.jsonl"): (["train/algebra.jsonl", "train/geometry.jsonl"], ""),
    ("train.jsonl", "train.parquet"): ("has rows twice, in .*/train.jsonl and .*/train.parquet; remove one", ""),
    ("train.jsonl", "train.jsonl.gz"): ("has rows twice, in .*/train.jsonl and .*/train.jsonl.gz; remove one", ""),
    ("train-00000-of-00003.parquet", "train-00002-of-00003.parquet"): ("has 2 of 3 files, such as ", ""),
    ("train-00000-of-00001.parquet", "train-00000-of-00001-a09b74b3ef9c.parquet"): ("rows twice, in .*; remove", ""),
    ("train/data-00000-of-00001.arrow", "dataset_dict.json"): ("has Arrow files, which are not read; write each", ""),
    ("train/data-00000-of-00001.arrow", "train/dataset_info.json", "train/state.json", "dataset_dict.json"): (
        "has Arrow files, which are not read; write each", "has Arrow files, which are not read; write each"),
    ("train.jsonl", "train/state.json", "dataset_infos.json", "config.json"): (["train.jsonl"], "has no test rows"),
}  # fmt: skip


@pytest.mark.parametrize("names", FOLDERS)
def test_a_folder_is_read_as_it_is_named_on_a_hub(names, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for split, wanted in zip(("train", "test"), FOLDERS[names], strict=True):
        if isinstance(wanted, list):
            found = files.find(tmp_path, split)
            assert [file.relative_to(tmp_path).as_posix() for file in found] == wanted
        elif wanted:
            with pytest.raises(UserError, match=wanted) as error:
                files.find(tmp_path, split)
            assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("names", "gives", "count"),
    [
        (("main/train/0000.parquet", "socratic/train/0000.parquet"), "main", 1),
        (("train/algebra/1.json", "train/algebra/2.json", "train/geometry/1.json"), "train/algebra", 2),
        (("data/a/train_x-00000-of-00001.jsonl", "data/b/train.jsonl"), "data/a", 1),
        (("train_a-00000-of-00002.jsonl", "train_a-00001-of-00002.jsonl", "train_b.jsonl"), "train_a", 2),
        (("train_a.jsonl", "train_b.jsonl"), "train_a.jsonl", 1),
    ],
)  # fmt: skip
def test_what_a_message_names_of_several_data_sets_is_read_whole(names, gives, count, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(ROW)
    with pytest.raises(UserError) as error:
        files.find(tmp_path, "train")
    place = str(error.value).rpartition(" ")[2]
    assert place == str(tmp_path / gives)
    if not names[0].endswith(".parquet"):
        assert len(list(files.read(place, "train"))) == count


def test_one_of_several_files_is_read_alone_with_a_warning(tmp_path, caplog):
    for number in range(3):
        (tmp_path / f"train-0000{number}-of-00003.jsonl").write_bytes(ROW)
    (tmp_path / "train-more-00000-of-00001.jsonl").write_bytes(ROW)
    assert len(list(files.read(str(tmp_path / "train"), "train"))) == 3 and not caplog.text
    assert len(list(files.read(str(tmp_path / "train-00001-of-00003.jsonl"), "train"))) == 1
    assert f"-00001-of-00003.jsonl is one of 3 files; {tmp_path / 'train'} stands for all of them" in caplog.text
    (tmp_path / "train-00002-of-00003.jsonl").unlink()
    with pytest.raises(UserError, match=r"train has 2 of 3 files, such as .*; download the others"):
        list(files.read(str(tmp_path / "train"), "train"))


def test_files_of_a_folder_for_one_split_need_no_names(tmp_path):
    for split, count in (("train", 2), ("test", 1)):
        (tmp_path / split).mkdir()
        (tmp_path / split / "0000.jsonl").write_bytes((ROW + b"\n") * count)
    source_ = {"": Source(str(tmp_path / "train"), str(tmp_path / "test"))}
    assert [len(rows.load(source_, split=split, limit=None)) for split in ("train", "test")] == [2, 1]
    with pytest.raises(UserError, match="has no test rows"):
        rows.load({"": Source(str(tmp_path / "test"), str(tmp_path / "test"))}, split="test", limit=None)


def parquet(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def test_gsm8k_and_jsonl_read_the_folder_of_a_hub(tmp_path):
    for split, count in (("train", 3), ("test", 1)):
        texts = [f"{split} {i}?" for i in range(count)], [f"It is so.\n#### {i}" for i in range(count)]
        parquet(tmp_path / "main" / f"{split}-00000-of-00001.parquet", question=texts[0], answer=texts[1])
    for folder in (tmp_path, tmp_path / "main"):
        for task in ("gsm8k", "jsonl"):
            for split, count in (("train", 3), ("test", 1)):
                records = tasks.load(task, split=split, folder=str(folder))
                assert [record["question"] for record in records] == [f"{split} {i}?" for i in range(count)]
    assert tasks.load("gsm8k", split="train", folder=str(tmp_path))[2]["answer"] == "2"
    assert [record["answer"] for record in benchmarks.read("gsm8k", str(tmp_path))] == ["0"], "the test split"


def test_columns_of_every_type_beside_the_prompt(tmp_path):
    """Python's times have no nanoseconds, no year 3168 and no zones of their own, and pandas need not be installed."""
    time, whole = pyarrow.timestamp, 1_700_000_000_123_456_789
    kinds = {
        "at": pyarrow.array([whole, None], time("ns")),
        "here": pyarrow.array([whole, None], time("ns", "America/New_York")),
        "elsewhere": pyarrow.array([whole // 10**9, None], time("ms", "Mars/Phobos")),
        "far": pyarrow.array([10**17, None], time("us")),
        "day": pyarrow.array([10**8, None], pyarrow.date32()),
        "clock": pyarrow.array([1, None], pyarrow.time64("ns")),
        "took": pyarrow.array([whole, None], pyarrow.duration("ns")),
        "inside": pyarrow.array([{"at": whole, "n": 1}, None], pyarrow.struct([("at", time("ns")), ("n", "int64")])),
        "several": pyarrow.array([[whole], None], pyarrow.list_(time("ns"))),
        "pair": pyarrow.array([[whole, whole], None], pyarrow.list_(time("ns"), 2)),
        "map": pyarrow.array([[("k", whole)], None], pyarrow.map_(pyarrow.string(), time("ns"))),
        "price": pyarrow.array([decimal.Decimal("1E+3"), None], pyarrow.decimal128(10, 2)),
        "image": pyarrow.array([b"\x89\xff", None], pyarrow.binary()),
        "nothing": pyarrow.nulls(2),
    }
    place = parquet(tmp_path / "rows.parquet", question=["1+1=", "1+2="], answer=["2", "3"], **kinds)
    first, second = rows.load({"": Source(place, place)}, split="train", limit=None)
    assert first["at"] == "2023-11-14 22:13:20.123456789" and first["inside"] == {"at": first["at"], "n": 1}
    assert first["here"].startswith("2023-11-14 22:13:20.123456789") and first["several"] == [first["at"]]
    assert first["price"] == "1000.00" and not set(kinds) & set(second)
    record, _ = rows.load({"": Source(place, place)}, split="train", answer="", limit=None)
    assert record["answer"] == "2"
    place = parquet(tmp_path / "dates.parquet", question=["When?"], answer=[datetime.date(2024, 7, 26)])
    assert rows.load({"": Source(place, place)}, split="train", limit=None)[0]["answer"] == "2024-07-26"


def test_a_parquet_column_that_stands_twice_is_named(tmp_path):
    table = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["answer", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet has two columns 'answer'; rename one$"):
        list(files.read(str(tmp_path / "a.parquet"), "train"))


def test_null_is_absent_in_every_format_alike(tmp_path):
    user = {"role": "user", "content": "1+1=", "reasoning_content": None, "tool_calls": None}
    given = [
        {"question": "1+1=", "prompt": None, "messages": None, "answer": "2", "id": None, "worked": None},
        {
            "question": None,
            "prompt": None,
            "messages": [user, None],
            "answer": "2",
            "system": None,
            "more": {"x": None},
        },
        {"question": "1+1=", "prompt": None, "messages": None, "answer": None},
        {"question": "1+1=", "answer": "2", "instruction": None, "more": {"x": 1}},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    (tmp_path / "a.json").write_text(json.dumps(given))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict.fromkeys(given[1]) | row for row in given]),
                                tmp_path / "a.parquet")  # fmt: skip
    found = []
    for name in ("a.jsonl", "a.json", "a.parquet"):
        place = str(tmp_path / name)
        records = rows.load({"": Source(place, place)}, split="train", limit=None)
        assert records.left_out == {"no answer": 1}
        found.append([{key: value for key, value in record.items() if key != "id"} for record in records])
    assert found[0] == found[1] == found[2] and len(found[0]) == 3
    assert found[0][1]["messages"] == [{"role": "user", "content": "1+1="}]
    assert [record.get("more") for record in found[0]] == [None, {}, {"x": 1}]


def test_a_function_s_row_may_leave_out_fields_by_none():
    def task(split):
        yield {"question": "1+1=", "answer": "2", "messages": None, "system": None, "worked": None}

    (record,) = tasks.load("mine", split="train", own={"mine": task})
    assert record["worked"] == "2" and not {"messages", "system"} & set(record)


SEVERAL = {"prompt": "1+2=", "messages": [{"role": "user", "content": "1+3="}], "problem": "1+4=", "in": {"it": "1+5="}}


@pytest.mark.parametrize(
    ("prompt", "question"),
    [("prompt", "1+2="), ("messages", "1+3="), ("problem", "1+4="), ("in.it", "1+5="), ("question", None)],
)
def test_a_field_chooses_the_prompt(prompt, question, tmp_path):
    place = tmp_path / "rows.jsonl"
    place.write_text(json.dumps(SEVERAL | {"answer": 2}) + "\n")
    config = tiny.get_config()
    config.data.task, config.data.train, config.data.held_out, config.data.prompt = "jsonl", str(place), 0.0, prompt
    if question is None:
        with pytest.raises(UserError, match=r"left out are no question; set data\.prompt to a field that they have"):
            setup_data.load_records(config, "train")
        return
    (record,) = setup_data.load_records(config, "train")
    assert record["question"] == question and ("messages" in record) == (prompt == "messages")
    assert record["problem"] == "1+4=", "further fields reach the rewards"


def test_what_is_ambiguous_says_which_field_decides(tmp_path):
    place = tmp_path / "rows.jsonl"
    place.write_text(json.dumps(SEVERAL | {"answer": 2}) + "\n")
    with pytest.raises(UserError, match=r"; choose one, such as --config\.data\.prompt=messages$"):
        rows.load({"": Source(str(place))}, split="train", held_out=0.0, limit=None)
    place.write_text('{"problem": "1+1=", "answer": 2}')
    with pytest.raises(UserError, match=r"; name the prompt's field, --config\.data\.prompt=FIELD$"):
        rows.load({"": Source(str(place))}, split="train", held_out=0.0, limit=None)


def test_sources_name_their_own_prompts(tmp_path):
    config = tiny.get_config()
    config.data.task, config.data.held_out, config.data.prompt = "jsonl", 0.0, "problem"
    for name in ("problem", "question"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({name: f"a {name}?", "answer": 2}))
    config.data.sources.a = source(str(tmp_path / "problem.jsonl"))
    config.data.sources.b = source(str(tmp_path / "question.jsonl"), prompt="question")
    assert [record["question"] for record in setup_data.load_records(config, "train")] == ["a problem?", "a question?"]
    config.data.sources = {}
    config.data.task = "arithmetic"
    with pytest.raises(UserError, match=r"data\.prompt is for the task 'jsonl'"):
        setup_data.sources(config)


def test_conversations_are_the_messages_whatever_is_beside_them(tmp_path):
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2", "reasoning_content": None}]
    (tmp_path / "said.json").write_bytes(BOM + json.dumps([{"prompt": "1+1=", "messages": turns, "id": None}]).encode())
    (record,) = rows.conversations(str(tmp_path / "said.json"))
    assert [turn["content"] for turn in record["messages"]] == ["1+1=", "2"]
    (tmp_path / "said.csv").write_text("question,completion\n1+1=,2\n")
    (record,) = rows.conversations(str(tmp_path / "said.csv"))
    assert [turn["content"] for turn in record["messages"]] == ["1+1=", "2"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows-00000-of-00001.jsonl"])
def test_a_file_is_no_folder_of_both_splits(name, tmp_path):
    (tmp_path / name).write_bytes(ROW)
    config = tiny.get_config()
    config.data.task, config.data.folder, config.data.options = (
        "jsonl",
        str(tmp_path / name.replace("-00000-of-00001.jsonl", "")),
        {},
    )
    with pytest.raises(UserError, match=r"a file, which would be held out too; set data\.train to it"):
        setup_data.sources(config)
    config.data.train, config.data.folder, config.data.held_out = config.data.folder, "", 0.0
    assert len(setup_data.load_records(config, "train")) == 1


def read_rows(tmp_path, *given, **fields):
    """Return the records of rows that a run's data section reads, without their ids."""
    place = tmp_path / "rows.jsonl"
    place.write_text("".join(json.dumps(row) + "\n" for row in given))
    config = tiny.get_config()
    config.data.task, config.data.train, config.data.held_out = "jsonl", str(place), 0.0
    config.data.update(fields)
    return [record | {"id": ""} for record in setup_data.load_records(config, "train")]


ALPACA = {"instruction": "Give 8+8", "input": "now", "output": "16"}
FLAT = {"in.text": "1+1=", "reward_model.ground_truth": "2", "in": {"text": "1+2="}, "reward_model": {"x": 0}}
NAMED = {
    # the fields that are named, a row: the prompt, the answer
    "a role of its own": ({"prompt": "instruction", "answer": "output"}, ALPACA, "Give 8+8", "16"),
    "another field's role": ({"prompt": "input", "answer": "output"}, ALPACA, "now\nGive 8+8", "16"),
    "the answer's": ({"prompt": "input", "answer": "instruction"}, ALPACA, "now", "Give 8+8"),
    "inside": ({"prompt": "system.text"}, {"system": {"text": "1+1="}, "answer": 2}, "1+1=", "2"),
    "the system prompt": ({"prompt": "system"}, {"system": "1+1=", "answer": 2}, "1+1=", "2"),
    "names with dots": ({"prompt": "in.text", "answer": "reward_model.ground_truth"}, FLAT, "1+1=", "2"),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_field_that_is_named_has_no_other_role(name, tmp_path):
    fields, row, prompt, answer = NAMED[name]
    (record,) = read_rows(tmp_path, row, **fields)
    turns = pipeline.conversation(record, pipeline.PLAIN)
    assert turns == [{"role": "user", "content": prompt}] and record["answer"] == answer == record["worked"]


def test_empty_texts_about_a_row_are_absent_in_every_format(tmp_path):
    empty = {"system": "", "instruction": "", "worked": " ", "id": "", "prompt": "", "reasoning_content": ""}
    user = {"role": "user", "content": "1+1=", "reasoning_content": ""}
    turns = [[{"role": "system", **content}, user] for content in ({"content": ""}, {"content": None})]
    records = read_rows(tmp_path, READ | empty, *({"messages": said, "answer": "2"} | empty for said in turns))
    assert [record["worked"] for record in records] == ["2"] * 3
    (tmp_path / "said.jsonl").write_text(json.dumps(READ | {"messages": "", "completion": "", "worked": ""}))
    assert rows.conversations(str(tmp_path / "said.jsonl"))[0]["messages"][1]["content"] == "2"
    style = pipeline.PromptStyle("Add.")
    wanted = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    assert [pipeline.conversation(record, style) for record in records] == [wanted] * 3
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([READ | empty]), tmp_path / "a.parquet")
    assert len(rows.load({"": Source(str(tmp_path / "a.parquet"))}, split="train", held_out=0.0, limit=None)) == 1


def test_the_prompt_that_a_message_proposes_is_one(tmp_path):
    """A prompt stands beside a conversation that the assistant ends, as in data sets of preferences."""
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    row = {"prompt": "1+1=", "messages": turns, "answer": "2"}
    with pytest.raises(UserError) as error:
        read_rows(tmp_path, row)
    name = str(error.value).rpartition("--config.data.prompt=")[2]
    assert name == "prompt" and len(read_rows(tmp_path, row, prompt=name)) == 1


def test_conversations_and_examples_have_fields_by_name_too(tmp_path):
    place = tmp_path / "said.jsonl"
    place.write_text(json.dumps({"problem": "1+1=", "solution": {"text": "2"}}))
    config = tiny.get_config()
    config.coldstart.conversations = config.data.few_shot = str(place)
    for flag, says in (("prompt=problem", "--config.data.prompt=FIELD"), ("answer=solution.text", "data.answer=FIELD")):
        with pytest.raises(UserError, match=f"{says}$"):
            coldstart.load(config)
        name, _, field = flag.partition("=")
        config.data[name] = field
    wanted = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    assert coldstart.load(config)[0]["messages"] == wanted == list(setup_data.prompt_style(config).shots)
    assert setup_data.sources(config) == {}, "of the task arithmetic"


@pytest.mark.parametrize("field", ["prompt", "messages", "asked"])
def test_messages_in_a_cell_are_messages(field, tmp_path):
    turns = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "+1="},
    ]
    named = {"prompt": field} if field == "asked" else {}
    (record,) = read_rows(tmp_path, {field: json.dumps(turns), "answer": "3"}, **named)
    assert record["messages"] == turns and record["question"] == "+1=" and not record.get("verbatim_prompt")
    with pytest.raises(UserError, match=f"are {field} has messages as a text that is not JSON; write them as JSON"):
        read_rows(tmp_path, {field: str(turns), "answer": "3"}, **named)
