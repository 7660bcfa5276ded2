"""Drafts against a search written from scratch, and the acceptance that `accept` tells against a decode by hand."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import accept
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.rollout.drafts import CONTEXT, LEAST, Texts, accepted, newest_tokens, propose
from gspo_jax.studies.acceptance import Group, measure


def naive(newest, sources, count):
    """Search every place of every text: (drafts, matched tokens)."""
    best, where = (0,), None
    for number, rows in enumerate(sources):
        for r, row in enumerate(rows):
            for at in range(len(row) - 1):
                matched = 0
                while matched < min(len(newest), at + 1) and row[at - matched] == newest[matched] >= 0:
                    matched += 1
                if matched and (matched, -number, at, -r) > best:
                    best, where = (matched, -number, at, -r), row[at + 1 : at + 1 + count]
    return (where, best[0]) if where is not None and best[0] >= LEAST else ([], best[0])


def test_drafts_follow_the_longest_occurrence():
    random = np.random.default_rng(0)
    for _ in range(60):
        P, Q, S, T, R, H, k = 2, 3, 7, 12, 3, 2, int(random.integers(1, 5))
        prompts, tokens, earlier = (random.integers(0, 3, (P, *shape)) for shape in ((S,), (R, T), (H, T)))
        prompt_lengths, lengths = random.integers(1, S + 1, P), random.integers(0, T + 1, (P, Q))
        seen, seen_earlier = random.integers(0, T + 1, (P, Q, R)), random.integers(0, T + 1, (P, Q, H))
        newest = newest_tokens(*map(jnp.asarray, (prompts, prompt_lengths, tokens, lengths)))
        sources = [
            Texts(jnp.asarray(tokens), jnp.asarray(seen)),
            Texts(jnp.asarray(earlier), jnp.asarray(seen_earlier)),
        ]
        found = propose(newest, sources, k)
        for p in range(P):
            for q in range(Q):
                whole = [*prompts[p, : prompt_lengths[p]], *tokens[p, q, : lengths[p, q]]]
                own = whole[::-1][:CONTEXT]
                assert newest[p, q].tolist() == own + [-1] * (CONTEXT - len(own))
                rows = [[tokens[p, r, : seen[p, q, r]].tolist() for r in range(R)]]
                rows.append([earlier[p, h, : seen_earlier[p, q, h]].tolist() for h in range(H)])
                drafts, _ = naive(own, rows, k)
                assert found.tokens[p, q, : found.count[p, q]].tolist() == drafts, (own, rows)


def test_accepted_up_to_the_first_wrong_draft():
    drafts = jnp.array([[1, 2, 3], [1, 2, 3], [1, 9, 3], [9, 2, 3]])
    count = jnp.array([3, 2, 3, 3])
    assert accepted(drafts, count, jnp.array([[1, 2, 3, 4]] * 4)).tolist() == [3, 2, 1, 0]


def by_hand(group, drafter, count, together):
    """Decode known responses with `naive`: advances, in the order of steps and responses."""
    known = [min(1, len(response)) for response in group.responses]
    begun, found = [False] * len(known), []
    while any(k < len(r) for k, r in zip(known, group.responses, strict=True)):
        left = [i for i, r in enumerate(group.responses) if known[i] < len(r)][:together]
        begun = [begun[i] or i in left or known[i] > 1 for i in range(len(known))]
        seen = [r[:k] if b else [] for r, k, b in zip(group.responses, known, begun, strict=True)]
        before = list(known)
        for i in left:
            response = group.responses[i]
            own = [*group.prompt, *response[: before[i]]][::-1][:CONTEXT]
            sources = [[s if drafter != "own" or j == i else [] for j, s in enumerate(seen)], [group.prompt]]
            sources += [group.earlier] if drafter == "history" else []
            drafts, _ = naive(own, sources, count)
            right = 0
            while (
                right < len(drafts) and response[before[i] + right : before[i] + right + 1] == drafts[right : right + 1]
            ):
                right += 1
            known[i] = min(before[i] + right + 1, len(response))
            found.append(known[i] - before[i])
    return found


@pytest.mark.parametrize("drafter", ["own", "group", "history"])
@pytest.mark.parametrize("together", [None, 2])
def test_measured_acceptance_is_that_of_a_decode_by_hand(drafter, together):
    random = np.random.default_rng(0)
    rows = lambda count, longest: [random.integers(0, 3, random.integers(2, longest)).tolist() for _ in range(count)]  # noqa: E731
    groups = [Group(rows(1, 9)[0], rows(3, 40), rows(2, 40)) for _ in range(3)]
    found = measure(groups, drafter, 4, together=together)
    own = [by_hand(group, drafter, 4, together) for group in groups]
    assert found.tokens_per_step == pytest.approx(np.mean(np.concatenate(own)))
    assert found.by_group == pytest.approx(tuple(np.quantile([np.mean(x) for x in own], (0.25, 0.5, 0.75))))


def test_a_longer_context_is_not_needed_for_a_repeated_text():
    text = list(range(10)) * 4
    found = measure([Group([], [text])], "own", 8)
    assert found.tokens_per_step > 2.5 and found.accepted > 0.7
    assert dataclasses.asdict(found)["drafter"] == "own"


@pytest.fixture
def files(tmp_path):
    folder, source = tmp_path / "tokenizer", tmp_path / "rows.jsonl"
    Tokenizer.train(["1+2=3, 2+1=3, 3+3=6"] * 3, 280).save(folder)
    rows = [{"question": "1+2=?", "answer": f"1+2={n}", "epoch": epoch} for epoch in (0, 1) for n in ("3", "3", "30")]
    source.write_text("\n".join(map(json.dumps, rows)))
    return source, folder


def test_the_command_tells_every_drafter(files, tmp_path, capsys):
    source, folder = files
    facts = tmp_path / "facts.json"
    words = [str(source), f"--tokenizer={folder}", "--prompt=question", "--completion=answer", "--drafts=1,4"]
    assert accept.main([*words, f"--json={facts}"]) == 0
    (rows,) = json.loads(facts.read_text()).values()
    assert [(row["drafter"], row["drafts"]) for row in rows] == [
        (name, count) for name in ("own", "group", "history") for count in (1, 4)
    ]
    assert rows[-1]["tokens_per_step"] > rows[0]["tokens_per_step"] > 1
    assert "history" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--drafts=0"], "--drafts is 0; use whole numbers from 1 to 8"),
        (["--drafts=1,x"], "--drafts is 1,x"),
        (["--together=0"], "--together is 0"),
        (["--prompt=problem"], "has no text `problem`; name its fields"),
    ],
)
def test_a_mistake_is_one_sentence(files, capsys, change, says):
    source, folder = files
    words = [str(source), f"--tokenizer={folder}", "--prompt=question", "--completion=answer"]
    assert accept.main([*words, *change]) == 2
    assert says in capsys.readouterr().err


def test_completions_of_one_token_are_no_measure(files, tmp_path, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"prompt": "1+2=?", "completion": ""}')
    assert accept.main([str(empty), f"--tokenizer={files[1]}"]) == 2
    assert "has only completions of one token" in capsys.readouterr().err


def test_a_file_needs_a_tokenizer(files, capsys):
    assert accept.main([str(files[0]), "--prompt=question", "--completion=answer"]) == 2
    assert "--tokenizer" in capsys.readouterr().err
