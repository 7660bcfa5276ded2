"""The data pipeline: batches determined by the seed alone, exact resumption, and no record cut or lost silently."""

import itertools
import json
import logging as standard_logging

import numpy as np
import pytest
import tokenizers

from gspo_jax.data import pipeline, tasks
from gspo_jax.data.records import CorruptRecord, Part, Records
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import UserError

S = 8


def make_record(i, question=None):
    question = f"{i}+{i}=?" if question is None else question
    return {"id": f"r{i}", "question": question, "worked": f"{i} #### {2 * i}", "answer": str(2 * i), "instruction": ""}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([f"{i}+{i}=?{i} #### {2 * i}" for i in range(99)], 300)


@pytest.fixture
def source():
    return [make_record(i) for i in range(30)]


def ids(batch):
    return [record["id"] for record in batch.records]


def batches(source, tokenizer, **options):
    arguments = {"prompts_per_batch": 8, "max_prompt_length": S, "seed": 3} | options
    return pipeline.prompt_batches(source, tokenizer, **arguments)


def test_a_batch_holds_tokens_texts_and_records(source, tokenizer):
    batch = next(batches(source, tokenizer))
    tokens, lengths = batch.tokens, batch.lengths
    assert type(tokens) is np.ndarray and tokens.dtype == lengths.dtype == np.int32
    assert tokens.shape == (8, S) and lengths.shape == (8,) and batch.valid.all()
    for row, length, text, record in zip(tokens, lengths, batch.texts, batch.records, strict=True):
        assert text == record["question"]
        assert row[:length].tolist() == tokenizer.encode(text)
        assert (row[length:] == tokenizer.pad_id).all()


def test_every_epoch_has_every_prompt_once_in_a_new_order(source, tokenizer):
    stream = itertools.chain.from_iterable(ids(b) for b in batches(source, tokenizer))
    first, second = ([next(stream) for _ in range(30)] for _ in range(2))
    assert sorted(first) == sorted(second) == sorted(r["id"] for r in source)
    assert first != second and first != [r["id"] for r in source]
    assert first[:8] != ids(next(batches(source, tokenizer, seed=4)))


def test_resuming_is_exact(source, tokenizer):
    unbroken = [ids(batch) for batch in itertools.islice(batches(source, tokenizer), 11)]
    first = batches(source, tokenizer)
    for _ in range(5):
        next(first)
    state = first.get_state()
    assert isinstance(state, str) and json.loads(state)
    again = batches(source, tokenizer)
    next(again)
    again.set_state(state)  # its prefetched batches must be discarded
    assert [ids(next(again)) for _ in range(6)] == unbroken[5:]
    first.set_state(state)
    assert ids(next(first)) == unbroken[5]


def test_the_state_before_the_first_batch_is_the_start(source, tokenizer):
    iterator = batches(source, tokenizer)
    state = iterator.get_state()
    first = [ids(next(iterator)) for _ in range(3)]
    iterator.set_state(state)
    assert [ids(next(iterator)) for _ in range(3)] == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, "with seed 3, but this run has 4"),
        ({"prompts_per_batch": 4}, "with batch size 8, but this run has 4"),
        ({"max_prompt_length": 4}, "with usable prompts 30, but this run has 10"),
        ({"source": [make_record(i) | {"answer": "7"} for i in range(30)]}, "they differ in answer; put back"),
        ({"source": [make_record(i) | {"worked": "7"} for i in range(30)]}, "they differ in worked;"),
        ({"source": [make_record(i) | {"hint": i == 9} for i in range(30)]}, "they differ in hint;"),
        ({"source": [make_record(i) | {"id": f"r{29 - i}"} for i in range(30)]}, "they differ in id;"),
        ({"source": [make_record(i, f"{i}+{i}=!") for i in range(30)]}, "they differ in prompt as tokens, question;"),
        ({"style": pipeline.PromptStyle(system="7")}, "they differ in prompt as tokens;"),
    ],
)
def test_a_state_of_another_run_is_refused(source, tokenizer, change, message):
    state = batches(source, tokenizer).get_state()
    with pytest.raises(UserError, match=message):
        batches(**({"source": source, "tokenizer": tokenizer} | change)).set_state(state)


def test_no_epoch_of_a_seed_or_of_a_source_has_the_order_of_another(source, tokenizer):
    """Three epochs each of seeds that follow each other, alone and with a second source as long as the first."""

    def epochs(records, seed):
        stream = batches(records, tokenizer, seed=seed, prompts_per_batch=len(records))
        drawn = [name for batch in itertools.islice(stream, 3) for name in ids(batch)]
        for part in {name[0] for name in drawn}:
            own = [int(name[1:]) for name in drawn if name.startswith(part)]
            yield from (tuple(own[start : start + 30]) for start in range(0, len(own), 30))

    second = [record | {"id": "s" + record["id"][1:]} for record in source]
    parts = [Part("r", 30, 1.0), Part("s", 30, 1.0)]
    mixed = Records("mixed", [*source, *second], parts=parts)
    found = [order for seed in (0, 1, 2**32 - 1) for order in epochs(source, seed)]
    found += [order for seed in (2, 3) for order in epochs(mixed, seed)]
    assert len(found) == len(set(found)) == 3 * 3 + 2 * 2 * 3
    assert all(sorted(order) == list(range(30)) for order in found)


def test_the_order_of_an_epoch_is_the_same_everywhere(source, tokenizer):
    stream = itertools.chain.from_iterable(ids(batch) for batch in batches(source, tokenizer, seed=0))
    assert list(itertools.islice(stream, 24, 36)) == [f"r{i}" for i in (1, 6, 26, 2, 9, 4, 11, 16, 14, 17, 7, 4)]


@pytest.mark.faults
def test_unusable_prompts_are_counted_and_left_out(source, tokenizer, caplog):
    caplog.set_level(standard_logging.WARNING, logger="absl")
    source[3] = make_record(3, "12345678")  # exactly as long as the limit
    source[4] = make_record(4, "123456789")  # one token over the limit
    source[5] = make_record(5, "")
    source[6] = make_record(6, " \n")
    iterator = batches(source, tokenizer, prompts_per_batch=27)
    assert (iterator.skipped, iterator.usable) == (3, 27)
    assert iterator.skipped_by == {"prompt longer than 8 tokens": 1, "empty prompt": 2}
    assert set(ids(next(iterator))) == {f"r{i}" for i in range(30) if i not in (4, 5, 6)}
    (message,) = [r.getMessage() for r in caplog.records]
    assert message == "3 of 30 records are left out: 2 empty prompt, 1 prompt longer than 8 tokens"


def test_repeated_prompts_are_counted_and_kept(source, tokenizer, caplog):
    source[7], source[8] = (make_record(i, source[2]["question"]) for i in (7, 8))
    source[9] = make_record(9, "")
    source[10] = make_record(10, "")  # left out, so no repetition
    iterator = batches(source, tokenizer, prompts_per_batch=28)
    assert sorted(ids(next(iterator))) == sorted(f"r{i}" for i in range(30) if i not in (9, 10))
    assert "2 of 28 usable records repeat an earlier question; they are kept" in caplog.text


def test_no_usable_prompt_is_an_error(source, tokenizer):
    # "0+0=?" has four tokens ("=?" is one) and "10+10=?" has six. The shortest record comes neither first nor last.
    remedy = r"the shortest has 4, so set data\.max_prompt_length to 4 or more$"
    with pytest.raises(
        UserError, match=rf"none of the 30 records of .* is usable \(30 prompt longer than 2 tokens\); {remedy}"
    ):
        batches(source[15:] + source[:15], tokenizer, max_prompt_length=2)
    with pytest.raises(UserError, match=r"\[\] has no records; give at least one$"):
        batches([], tokenizer)
    blank = [make_record(0, ""), make_record(1, " "), make_record(2)]
    with pytest.raises(UserError, match=r"2 tokens\); give each record a question$"):
        batches(blank, tokenizer, max_prompt_length=2)


def test_no_worked_response_that_fits_is_an_error(source, tokenizer):
    # "0 #### 0" is five or more tokens, depending on the learned merges; the end of the sequence adds one.
    least = min(len(tokenizer.encode(record["worked"])) + 1 for record in source)
    remedy = rf"the shortest has {least}, so set sampling\.max_response_length to {least} or more$"
    arguments = {"batch": 3, "max_prompt_length": S, "seed": 0}
    with pytest.raises(UserError, match=rf"\(30 worked response longer than {least - 1} tokens\); {remedy}"):
        pipeline.worked_batches(source[15:] + source[:15], tokenizer, max_response_length=least - 1, **arguments)
    assert pipeline.worked_batches(source, tokenizer, max_response_length=least, **arguments).usable > 0


def test_tokens_outside_the_vocabulary_are_seen(tmp_path):
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "<eos>": 1, "one": 2, "two": 3}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>", "unk_token": "<unk>"}')
    source = [make_record(0, "one two"), make_record(1, "one three")]
    iterator = batches(source, Tokenizer.load(tmp_path), prompts_per_batch=1)
    assert iterator.skipped_by == {"token outside the vocabulary": 1} and ids(next(iterator)) == ["r0"]
    with pytest.raises(UserError, match=r"use a tokenizer whose vocabulary covers the questions$"):
        batches(source[1:], Tokenizer.load(tmp_path), prompts_per_batch=1)
    with pytest.raises(UserError, match="1 prompt longer than 1 tokens"):
        batches(source[1:], Tokenizer.load(tmp_path), prompts_per_batch=1, max_prompt_length=1)


def test_corrupt_records_are_left_out_up_to_a_limit(tmp_path, tokenizer, monkeypatch):
    options = {"data_dir": str(tmp_path), "train_size": 40, "test_size": 4}
    whole = [r["id"] for r in tasks.load("arithmetic", split="train", **options)]
    (shard,) = tmp_path.rglob("*train.array_record*")
    content = bytearray(shard.read_bytes())
    for place in (1000, 2000, 3000):
        content[place] ^= 1
    shard.write_bytes(content)
    damaged = tasks.load("arithmetic", split="train", **options)
    iterator = batches(damaged, tokenizer, prompts_per_batch=37)
    assert iterator.skipped_by == {"corrupt": 3}
    seen = ids(next(iterator))
    assert len(seen) == len(set(seen)) == 37 and set(seen) < set(whole)
    monkeypatch.setattr(pipeline, "_MAX_CORRUPT", 2)
    with pytest.raises(UserError, match=rf"more than 2 corrupt records in Records\(arithmetic/.*{shard.name}"):
        batches(damaged, tokenizer)


def test_a_record_that_breaks_later_is_an_error(source, tokenizer):
    fine = True

    def convert(index, row):
        if index == 3 and not fine:
            raise ValueError("bit rot")
        return row

    records = Records("rows", source, convert=convert, where=lambda _: "a file")
    iterator = batches(records, tokenizer, prompts_per_batch=len(source))
    fine = False
    with pytest.raises(CorruptRecord, match="record 3 of a file is corrupt: bit rot"):
        next(iterator)


def test_the_chat_template_and_the_instruction_make_the_prompt(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    template = "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}>{% endif %}")
    record = make_record(5) | {"instruction": "Be brief."}
    batch = next(batches([record], Tokenizer.load(tmp_path), prompts_per_batch=1, max_prompt_length=40))
    assert batch.texts == ["<|im_start|>user:5+5=?\nBe brief.>"]
    empty = make_record(6, "")  # the template's own tokens do not make an empty question a prompt
    loaded = batches([record, empty], Tokenizer.load(tmp_path), prompts_per_batch=1, max_prompt_length=40)
    assert loaded.skipped_by == {"empty prompt": 1}


def test_evaluation_sees_every_prompt_once(source, tokenizer):
    source[4] = make_record(4, "123456789")
    held_out = pipeline.eval_batches(source, tokenizer, prompts_per_batch=8, max_prompt_length=S)
    assert len(held_out) == 4 and held_out.skipped == 1
    for _ in range(2):  # the batches can be iterated repeatedly
        seen = list(held_out)
        assert all(batch.tokens.shape == (8, S) for batch in seen)
        rows = [row for batch in seen for row in zip(ids(batch), batch.valid.tolist(), strict=True)]
        assert [name for name, valid in rows if valid] == [f"r{i}" for i in range(30) if i != 4]
        assert rows[29:] == [("r29", False)] * 3


def test_worked_batches_hold_prompt_and_response(source, tokenizer):
    source[4] = make_record(4, "123456789")
    source[5] = make_record(5) | {"worked": "1" * 12}  # 12 tokens, plus the end-of-sequence token
    source[6] = make_record(6) | {"worked": "1" * 11}
    iterator = pipeline.worked_batches(source, tokenizer, batch=28, max_prompt_length=S, max_response_length=12, seed=0)
    assert iterator.skipped_by == {"prompt longer than 8 tokens": 1, "worked response longer than 12 tokens": 1}
    batch = next(iterator)
    assert batch.prompts.shape == (28, S) and batch.tokens.shape == batch.mask.shape == (28, 12)
    assert batch.tokens.dtype == batch.prompts.dtype == np.int32 and batch.mask.dtype == bool
    worked = {record["question"]: record["worked"] for record in source}
    for prompt, length, tokens, mask in zip(batch.prompts, batch.prompt_lengths, batch.tokens, batch.mask, strict=True):
        real = tokens[mask].tolist()
        assert real[-1] == tokenizer.eos_ids[0] and mask[: len(real)].all()
        assert tokenizer.decode(real) == worked[tokenizer.decode(prompt[:length])]
        assert (tokens[~mask] == tokenizer.pad_id).all()
    state = iterator.get_state()
    following = next(iterator).tokens
    iterator.set_state(state)
    np.testing.assert_array_equal(next(iterator).tokens, following)


def test_a_batch_may_be_larger_than_the_data_which_is_said(source, tokenizer, caplog):
    assert sorted(ids(next(batches(source[:3], tokenizer, prompts_per_batch=9)))) == sorted(["r0", "r1", "r2"] * 3)
    assert "a batch of 9 takes the 3 usable records more than once; give more records, or use a smaller" in caplog.text
    caplog.clear()
    batches(source[:3], tokenizer, prompts_per_batch=3)
    assert not caplog.text
