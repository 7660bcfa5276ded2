"""Which program a response holds: its blocks by CommonMark, and of these the last that is Python and compiles."""

import time

import pytest

from gspo_jax.rewards import blocks, code
from gspo_jax.sandbox.inside.choose import choose

F = "def f(x):\n    return x\n"
FENCED = f"```python\n{F}```\n"
G = 'def f(x):\n    """\n```\nf(1)\n```\n    """\n    return 2 * x\n'
DOCUMENTED = f"```python\n{G}```\n"
USAGE = "```python\nprint(f(1))\n```\n"


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
        (f"{FENCED}Better:\n{DOCUMENTED}", G),  # a fence in a docstring, behind a draft
        (f"{FENCED}Better:\n```\n{G}```\nOutput:\n```\n2\n```\n", G),
        (f"{DOCUMENTED}Better:\n{FENCED}", F),
        (f"{FENCED}Its signature:\n```python\ndef f(x: int) -> int: ...\n```\n", F),
        ("```python\ndef f(x: int) -> int: ...\n```\n", "def f(x: int) -> int: ...\n"),
        *(
            (f"```python\n{F}```{end}", F)
            for end in (
                "<|eot_id|>",
                "<|im_end|>",
                "<|endoftext|>",
                "<｜end▁of▁sentence｜>",
                "<end_of_turn>",
                "<eos>\n",
            )
        ),
        *((f"```python\n{F.strip()}{end}", F.strip()) for end in ("```", "```\n\nDone.", "```.\n")),
        (f"```python\n{F}``` is what you asked for.\n", F),
        *(
            2 * (f"```python\n{F}{broken}f(\n```",)  # nothing compiles
            for broken in ("# ```\n", "```py\n", "x = '```'\n")
        ),
        (f"{F}```\n", F),  # the block was opened before the response
        (f"{F}```\n\nIt doubles:\n\n```python\nprint(f(1))\n```\n", F),
        (f"{F}```<|im_end|>", F),
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
    "prompt",
    ["Write f.\n```python\n", "Write f.\n```python", "```py\n1\n```\nWrite f.<|im_end|>\n~~~\n", "```python\nx = "],
)
def test_a_block_that_the_prompt_opens_goes_on_in_the_response(prompt):
    opened = "x = " if prompt.endswith("= ") else ""
    mark = "~~~" if "~" in prompt else "```"
    for behind in ("", "\nIt is right.\n"):
        response = f"1\n{F}{mark}\n{behind}"
        assert choose(code.programs_of(prompt, response)).strip() == f"{opened}1\n{F}".strip()
    assert choose(code.programs_of(prompt, f"1\n{mark}\nBetter:\n{DOCUMENTED}")) == G


@pytest.mark.parametrize("prompt", ["", "Why?\n```\nx = (", "Mind the ```python\nfence<|im_end|>\n"])
def test_a_prompt_that_leaves_a_block_open_by_mistake_hides_no_program(prompt):
    assert choose(code.programs_of(prompt, f"So:\n{FENCED}")) == F
    assert choose(code.programs_of(prompt, f"So:\n{FENCED}or\n{DOCUMENTED}.")) == G


DEFINED = (
    *(
        F,
        "async " + F,
        "f = lambda x: x\n",
        "f: Callable = lambda x: x\n",
        "f, g = 1, 2\n",
        "g, f = 1, 2\n",
        "g = f = 1\n",
    ),
    *("from operator import neg as f\n", "from a import (\n    f,\n)\n", "from operator import f, g\n"),
    *(f"if True:\n{indented(F, 4)}", "try:\n    f = 1\nexcept ValueError:\n    pass\n", "class f:\n    pass\n"),
)


@pytest.mark.parametrize("program", DEFINED)
@pytest.mark.parametrize(
    "names", [{"entry_point": "f"}, {"tests": ["assert f(1) == 1"]}, {"tests": ["assert sorted(f(1)) == [1]"]}]
)
def test_a_block_that_shows_how_to_call_it_is_not_the_program(program, names):
    for usage in (USAGE, "```\nf(1)\n```\n", "```python\nsorted = f(1) == 1\nassert f(2) == 2\n```"):
        assert choose(code.programs_of("", f"```python\n{program}```\nUsage:\n{usage}", **names)) == program


SOLUTION = f"class Solution:\n{indented(F, 4)}"


@pytest.mark.parametrize(
    ("blocks", "names", "program"),
    [
        ((SOLUTION, "s = Solution()\nprint(s.f(1))\n"), {"entry_point": "Solution().f"}, 0),
        ((SOLUTION, "s = Solution()\nprint(s.f(1))\n"), {"tests": ["assert Solution().f(1) == 1"]}, 0),
        ((SOLUTION, F), {"tests": ["assert Solution().f(1) == 1"]}, 0),
        ((SOLUTION, F), {"tests": ["assert f(1) == 1"]}, 1),
        ((F, SOLUTION), {"tests": ["assert f(1) == 1"]}, 0),
        ((F, "from solution import f\nprint(f(1))\n"), {"tests": ["assert f(1) == 1"]}, 0),
        ((F, G), {"tests": ["assert f(1) == 1"]}, 1),
        ((SOLUTION, SOLUTION + "# better\n"), {"entry_point": "Solution().f"}, 1),
    ],
)
def test_the_program_defines_what_is_called(blocks, names, program):
    response = "Or:\n".join(f"````python\n{block}````\n" for block in blocks)
    assert choose(code.programs_of("", response, **names)) == blocks[program]


def test_a_body_in_a_block_goes_on_from_the_prompt():
    prompt = "def f(x):\n    # the same\n"
    for response in ("```python\n    return x\n```\n", "    return x\n```\n", "    return x\n"):
        assert choose(code.programs_of("", response, entry_point="f", given=(prompt,))) == prompt + "    return x\n"


PRINTS = ("print(2 * int(input()))\n", "import sys\nsys.stdout.write(input())\n", F + "print(f(1))\n")
BEHIND = (
    *("Input: 2\nOutput: 4", "n: 1", "O(n)", "O(n * m)", "y = 2 * x", "max(a, b)", "dp[i] = dp[i-1] + dp[i-2]"),
    *("assert f(2) == 4", "import sys", "x = 1", "input()", F),
)


@pytest.mark.parametrize("program", PRINTS)
@pytest.mark.parametrize("behind", BEHIND)
def test_a_whole_program_prints(program, behind):
    for tag in ("", "python"):
        assert choose(code.programs_of("", f"```python\n{program}```\nso:\n```{tag}\n{behind}\n```\n")) == program
    assert choose(code.programs_of("", f"```\n{behind}\n```\nso:\n```\n{program}```\n")) == program


@pytest.mark.parametrize(
    "usage",
    [
        "print(f(5))\n",
        "assert f(2) == 2\nprint('ok')\n",
        "for x in range(3):\n    print(f(x))\n",
        "from solution import f\nprint(f(5))\n",
    ],
)
def test_a_block_that_only_calls_what_another_one_defines_is_not_the_whole_program(usage):
    program = F + "print(f(int(input())))\n"
    assert choose(code.programs_of("", f"```python\n{program}```\nUse:\n```python\n{usage}```\n")) == program
    for broken in (
        usage.replace("f(", "Counter("),
        F + usage,
        "from os import abc as f\n" + usage,
    ):  # a name that nobody has
        assert choose(code.programs_of("", f"```python\n{program}```\n```python\n{broken}```\n")) == broken


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
        *(
            "f,",
            "f = ",
            "f: ",
            "import f,\n",
            "import (\n",
            "from f import f",
            "def ",
            "f\n```\n",
            "```python\nf = '``` '\n```\n",
        ),
    ],
)
def test_hostile_responses_cost_little(piece):
    text, begun = piece * (50_000 // len(piece)), time.process_time()
    found = code.programs_of("def f(x):\n", text, entry_point="f")
    blocks.last_of_text(text)
    assert time.process_time() - begun < 1 and sum(map(len, found)) < 10 * len(text)
