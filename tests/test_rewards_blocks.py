"""Which program a response holds: its blocks by CommonMark, and of these the last that is Python and compiles."""

import time

import pytest

from gspo_jax.rewards import blocks, code
from gspo_jax.sandbox.inside.choose import choose

F = "def f(x):\n    return x\n"
FENCED = f"```python\n{F}```\n"


def indented(text, columns):
    return "".join(" " * columns + line for line in text.splitlines(keepends=True))


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (FENCED, F),
        (f"~~~python\n{F}~~~", F),
        (f"````python\n{F}x = '''\n```\n'''\n````", F + "x = '''\n```\n'''\n"),
        (f"~~~\n{F}s = '''\n```\n'''\n~~~\n", F + "s = '''\n```\n'''\n"),
        (f"1. Write:\n\n{indented(FENCED, 3)}\n2. Run it.\n", F),
        (f"- Write:\n  - here:\n\n{indented(FENCED, 4)}", F),
        (f"10. Write:\n{indented(FENCED, 4)}", F),
        (f"- ```python\n{indented(F, 2)}  ```\n", F),
        ("1. Write:\n\n\t```python\n\tdef f(x):\n\t    return x\n\t```\n", F),
        ("1. Write:\n   ```python\nx = 1\ny = 2\n   ```\n", "x = 1\ny = 2\n"),  # left of the list, as models write it
        (indented(FENCED, 3), F),
        (f"Write:\n\n{indented(FENCED, 4)}", F),  # an indented block that holds a fence
        (f"Write:\n\n{indented(F, 4)}\nDone.", F + "\n"),
        ("".join(f"> {line}\n" for line in FENCED.splitlines()), F),
        (f"<think>{FENCED}</think>", F),
        (f"<think>\n{FENCED}", F),
        (f"</think>{FENCED}", F),
        (f"</think>\n\n{FENCED}</answer>", F),
        (f"<answer>```python\n{F}```</answer>", F),
        (FENCED.replace("\n", "\r\n"), F.replace("\n", "\r\n")),
        (f"```python\n{F}", F),  # runs to the end: cut off, or stopped by the fence itself
        *(
            (f"```{tag}\n{F}```", F)
            for tag in ("", "py", "Python", "python3", "PYTHON", "{.python}", "{.python .x #y}")
        ),
        *((f"``` {tag}\n{F}```", F) for tag in ('python title="a.py"', "python:a.py", "python,linenos", "solution.py")),
        *(
            (f"{FENCED}Then:\n```{tag}\nf = 1\n```\n", F)
            for tag in ("bash", "sh", "output", "text", "console", "json", "pycon", "python-repl", "js", "plaintext")
        ),
        *(
            (f"{FENCED}Output:\n```\n{out}\n```\n", F)
            for out in ("42", "[1, 2]", "YES", "1\n2", "3 4", "Hello, world!", "")
        ),
        (f"```\nx = 1\n```\nBetter:\n{FENCED}", F),
        (f"{FENCED}Better:\n```\nx = 1\n```", "x = 1\n"),
        (f"{FENCED}Cut off:\n```python\ndef f(x):\n    return (", F),
        (f"```js\nf\n```\n{F}", f"```js\nf\n```\n{F}"),
        ("```python\ndef f():\n    '''\n```\nf()\n```\n    '''\n```\n", "def f():\n    '''\n```\nf()\n```\n    '''\n"),
        (
            "```python\ndef f():\n    '''\n    ```\n    f()\n    ```\n    '''\n```\nOutput:\n```\n1\n```",
            "def f():\n    '''\n    ```\n    f()\n    ```\n    '''\n",
        ),
        (
            "```python\ndef f():\n    '''\n```py\nf()\n```\n    '''\n```\n",
            "def f():\n    '''\n```py\nf()\n```\n    '''\n",
        ),
        (
            'def f(x):\n    """\n```\nf(1)\n```\n    """\n    return x\n',
            'def f(x):\n    """\n```\nf(1)\n```\n    """\n    return x\n',
        ),
        ("Call `f` with ```x``` inline.\n" + FENCED, F),
        (
            "```python\nx = 1\ns = '''\n~~~\n'''\n```\n",
            "x = 1\ns = '''\n~~~\n'''\n",
        ),  # another character closes nothing
        ("# A\n#python\n```python\nx = '\u2028\x0c'\n```", "x = '\u2028\x0c'\n"),
    ],
)
def test_the_program_is_the_last_block_that_is_python_and_compiles(text, program):
    assert choose(code.programs_of("", text)) == program


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (f"{FENCED}Usage:\n```python\nprint(f(1))\n```", {"entry_point": "f"}),
        (f"{FENCED}Usage:\n```python\nprint(f(1))\n```", {"tests": ["assert f(1) == 1"]}),
    ],
)
def test_a_block_that_shows_how_to_call_it_is_not_the_program(text, names):
    assert choose(code.programs_of("", text, **names)) == F


@pytest.mark.parametrize(
    ("turn", "program"),
    [
        (f"Run:\n{FENCED}", F),
        (f"1. Run:\n{indented(FENCED, 3)}\n", F),
        (f"~~~py\n{F}~~~ \n\n", F),
        (f"{FENCED}```bash\nls\n```", None),
        (f"{FENCED}Done.", None),
        (f"```python\n{F}", None),
        ("", None),
    ],
)
def test_a_turn_ends_in_a_program_only_if_its_block_closes_there(turn, program):
    assert blocks.last_of_text(turn) == program


@pytest.mark.parametrize(
    "piece",
    [
        *("```a\n", "```\n", "```\nx\n```\n", "`", "\n", " ", "> ", "- ", "1. a\n", "- a\n  ", "> ```\n", "~~~\n"),
        *("\t", "```python\nx\n", "- ```\n", "    x\n", "def f(x):\n", "- - - -\n", "<a>", "<a> ", "1. "),
    ],
)
def test_hostile_responses_cost_little(piece):
    text, begun = piece * (50_000 // len(piece)), time.process_time()
    found = code.programs_of("def f(x):\n", text, "f")
    blocks.last_of_text(text)
    assert time.process_time() - begun < 1 and sum(map(len, found)) < 10 * len(text)
