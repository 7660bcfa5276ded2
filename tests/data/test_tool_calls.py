"""Tool calls as models write them, well and badly: what is called, and what the policy is told."""

import doctest
import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_jax import tool_calls
from gspo_jax.errors import UserError
from gspo_jax.tool_calls import FORMATS, MOST_CALLS, MOST_NESTED, Call, Tools, parse


def tool(name, required=(), **properties):
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {
        "type": "function",
        "function": {"name": name, "description": f"The tool {name}.", "parameters": parameters},
    }


TEXT, WHOLE, FLAG = ({"type": kind} for kind in ("string", "integer", "boolean"))
OPTIONAL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
TOOLS = Tools(
    [
        tool("weather", ["city"], city=TEXT, days=WHOLE, celsius=FLAG),
        tool("write", ["path", "text"], path=TEXT, text=TEXT),
        tool(
            "search",
            query={"type": ["string", "array"]},
            most=OPTIONAL,
            within={"type": "number"},
            by={"type": "object"},
        ),
        {"type": "function", "function": {"name": "now"}},
    ]
)
OPEN, CLOSE = "<tool_call>", "</tool_call>"


def hermes(name, arguments):
    return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{CLOSE}"


def written(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def qwen3_coder(name, arguments):
    parameters = "".join(f"<parameter={key}>\n{written(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"{OPEN}\n<function={name}>\n{parameters}</function>\n{CLOSE}"


def glm(name, arguments):
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{written(value)}</arg_value>\n" for key, value in arguments.items()
    )
    return f"{OPEN}{name}\n{pairs}{CLOSE}"


def glm47(name, arguments):
    pairs = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{written(value)}</arg_value>" for key, value in arguments.items()
    )
    return f"{OPEN}{name}{pairs}{CLOSE}"


def spaced(value):
    return json.dumps(value, ensure_ascii=False)


def deepseek(name, arguments):
    """As V3.1 writes it."""
    body = f"{name}<｜tool▁sep｜>{spaced(arguments)}"
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def deepseek_v3(name, arguments):
    """As V3 and R1 write it."""
    body = f"function<｜tool▁sep｜>{name}\n```json\n{spaced(arguments)}\n```"
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def kimi(name, arguments):
    body = f"functions.{name}:0<|tool_call_argument_begin|>{spaced(arguments)}"
    return f"<|tool_calls_section_begin|><|tool_call_begin|>{body}<|tool_call_end|><|tool_calls_section_end|>"


def mistral(name, arguments):
    return f"[TOOL_CALLS] [{spaced({'name': name, 'arguments': arguments, 'id': 'a1b2c3d4e'})}]"


def mistral_later(name, arguments):
    return f"[TOOL_CALLS]{name}[ARGS]{spaced(arguments)}"


def granite(name, arguments):
    return f"<|tool_call|>[{spaced({'name': name, 'arguments': arguments})}]"


WRITERS = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "glm": glm,
    "deepseek": deepseek,
    "kimi": kimi,
    "mistral": mistral,
    "granite": granite,
}
OTHERS = {"glm": [glm47], "deepseek": [deepseek_v3], "mistral": [mistral_later]}
"""Forms of the same format."""
WELL = {
    "one text": ("weather", {"city": "Paris"}),
    "each type": ("weather", {"city": "São Paulo", "days": 3, "celsius": True}),
    "no arguments": ("now", {}),
    "nested braces in a text": ("write", {"path": "a.c", "text": 'if (x) { f("{}"); } // }}]'}),
    "lines": ("write", {"path": "a.py", "text": "def f():\n\n    return 1\n\ttab"}),
    "quotes and backslashes": ("write", {"path": "C:\\new", "text": "\"a\" 'b' \\n \\\\ `c`"}),
    "other scripts": ("write", {"path": "日本.txt", "text": "é 🦆 \u2028 \x85"}),
    "a closing mark in a text": ("write", {"path": "a.md", "text": "ends with </tool_call>, as <tool_call> begins"}),
    "another format in a text": ("write", {"path": "a.xml", "text": "<function=f>\n</function> <arg_key>k</arg_key>"}),
    "a thought in a text": ("write", {"path": "a", "text": "<think>x</think>y</think>"}),
    "an end mark of its format": ("write", {"path": "a", "text": "a </parameter> b </arg_value> c"}),
    "a number as text": ("write", {"path": "7", "text": "null"}),
    "a text or a list": ("search", {"query": ["a", "b"], "most": None, "within": 0.5, "by": {"a": [1, {"b": None}]}}),
    "a whole number as number": ("search", {"query": "a", "within": 2, "most": 7}),
    "a large number": ("weather", {"city": "x", "days": 10**30}),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", WELL)
def test_a_call_is_read_as_it_was_meant(name, form):
    call = Call(*WELL[name])
    for writer in (WRITERS[form], *OTHERS.get(form, [])):
        said = writer(*WELL[name])
        assert parse(said, form, TOOLS) == ("", [call])
        assert parse(f"<think>\nHm, {OPEN}?\n</think>\n\nI look.\n{said}{said} and more", form, TOOLS) == (
            "I look.",
            [call, call],
        )
        assert parse(f"Hm.</think>Look.{said}", form, TOOLS, before="<|im_start|>assistant\n<think>\n") == (
            "Look.",
            [call],
        )


JSON_ERRORS = {
    # what stands between the marks: the name, what the policy is told
    '{"name": "weather", "arguments": {"city": "Paris",}}': (
        "",
        "not valid JSON: Illegal trailing comma|not valid JSON: Exp",
    ),
    "{'name': 'weather', 'arguments': {'city': 'Paris'}}": ("", "not valid JSON: Expecting property name enclosed in"),
    '{"name": "weather", "arguments": {"city": "Pa\nris"}}': (
        "",
        "not valid JSON: Invalid control character at character",
    ),
    '{"name": "weather", "arguments": {"city": "C:\\new"}': (
        "",
        "not valid JSON: Expecting ',' delimiter at character 52",
    ),
    '{"name": "weather", "arguments": {"city": "\\x"}}': ("", "not valid JSON: Invalid \\escape at"),
    '{"name": "weather", "arguments": {"city": "Paris"}}}': ("weather", "there is text after the JSON object"),
    '{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {}}': (
        "now",
        "there is text after the JSON object",
    ),
    '{"name": "weather", "arguments": {"city": NaN}}': ("", "not valid JSON: NaN is not JSON"),
    '{"name": "search", "arguments": {"within": 1e999}}': ("", "not valid JSON: a number is too large"),
    '{"name": "weather", "arguments": {"days": 1' + "0" * 5000 + "}}": ("", "not valid JSON: Exceeds the limit"),
    "[" * 100_000: ("", "not valid JSON: it is nested too deeply|not valid JSON: Expecting value"),
    "": ("", "not valid JSON: Expecting value at character 1"),
    "weather": ("", "not valid JSON: Expecting value at character 1"),
    '```json\n{"name": "now", "arguments": {}}\n```': ("", "not valid JSON: Expecting value at character 1"),
    '[{"name": "now", "arguments": {}}]': ("", 'it is not a JSON object with "name" and "arguments"'),
    '{"arguments": {"city": "Paris"}}': ("", 'it has no "name"'),
    '{"name": "", "arguments": {}}': ("", 'it has no "name"'),
    '{"name": 5, "arguments": {}}': ("", 'it has no "name"'),
    '{"name": "now"}': ("now", 'of now cannot be run: it has no "arguments"'),
    '{"name": "weather", "parameters": {"city": "Paris"}}': ("weather", 'it has no "arguments"'),
    '{"name": "now", "arguments": null}': ("now", '"arguments" is not a JSON object'),
    '{"name": "now", "arguments": ["Paris"]}': ("now", '"arguments" is not a JSON object'),
    '{"name": "now", "arguments": "Paris"}': ("now", '"arguments" is a string that is not valid JSON: Expecting value'),
    '{"name": "now", "arguments": "[1]"}': ("now", '"arguments" is not a JSON object'),
    '{"name": "weather", "arguments": {"city": "\\ud800"}}': ("weather", "its arguments are not Unicode text"),
    '{"name": "search", "arguments": {"by": ' + '{"a": ' * 70 + "1" + "}" * 72: (
        "search",
        "nested more than 64 levels deep",
    ),
}


@pytest.mark.parametrize("body", JSON_ERRORS, ids=lambda body: body[:50])
def test_bad_json_is_told_and_the_next_call_is_read(body):
    name, says = JSON_ERRORS[body]
    assert_error(f"{OPEN}{body}{CLOSE}", "hermes", name, says)


def assert_error(said, form, name, says):
    turn = parse(f"Go.\n{said}\n{WRITERS[form]('now', {})}", form, TOOLS)
    bad, good = turn.calls
    assert (turn.text, good, bad.name, bad.arguments) == ("Go.", Call("now", {}), name, {})
    of = f" of {name}" if name else ""
    prefix = f"Error: the tool call{of} cannot be run: "
    assert bad.error.startswith(prefix) and bad.error.endswith(".") and "\n" not in bad.error and len(bad.error) < 400
    assert any(each in bad.error for each in says.split("|")), bad.error


XML_ERRORS = {
    ("qwen3_coder", f'{OPEN}{{"name": "now", "arguments": {{}}}}{CLOSE}'): (
        "",
        "it does not begin with <function=NAME>",
    ),
    ("qwen3_coder", f"{OPEN}<function=>\n</function>{CLOSE}"): ("", "it has no name"),
    ("qwen3_coder", f"{OPEN}<function=weather>\nParis</function>{CLOSE}"): (
        "weather",
        "a <parameter=NAME> or </function> is",
    ),
    ("qwen3_coder", f"{OPEN}<function=weather>\n<parameter=city>\nParis\n</function>{CLOSE}"): (
        "weather",
        "parameter 'city' does not end with </parameter>",
    ),
    (
        "qwen3_coder",
        f"{OPEN}<function=weather><parameter=city>\nParis\n<parameter=days>\n3\n</parameter>\n</function>{CLOSE}",
    ): ("weather", "parameter 'city' does not end with </parameter>"),
    ("qwen3_coder", f"{OPEN}<function=now></function> now {CLOSE}"): ("now", "there is text between </function> and"),
    ("qwen3_coder", f"{OPEN}<function=now></function>"): ("now", "it does not end with </tool_call>"),
    ("glm", f"{OPEN}\n{CLOSE}"): ("", "it has no name"),
    ("glm", f'{OPEN}{{"name": "now"}}{CLOSE}'): ("", "there is no tool"),
    ("glm", f"{OPEN}weather\ncity: Paris{CLOSE}"): ("weather", "an <arg_key> is missing"),
    ("glm", f"{OPEN}weather\n<arg_key>city</arg_key>Paris{CLOSE}"): ("weather", "an <arg_key> is missing"),
    ("glm", f"{OPEN}weather\n<arg_key>city</arg_key>\n<arg_value>Paris\n{CLOSE}"): (
        "weather",
        "the value of 'city' does not end with </arg_value>",
    ),
    (
        "glm",
        f"{OPEN}weather\n<arg_key>city</arg_key><arg_value>A<arg_key>days</arg_key><arg_value>3</arg_value>{CLOSE}",
    ): (
        "weather",
        "the value of 'city' does not end with </arg_value>",
    ),
    ("glm", f"{OPEN}now\n"): ("now", "it does not end with </tool_call>"),
    ("hermes", f'{OPEN}\n{{"name": "now", "arguments": {{}}}}\n'): ("now", "it does not end with </tool_call>"),
    ("deepseek", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}"): ("now", "it does not end with <｜tool▁call▁end｜>"),
    ("deepseek", "<｜tool▁call▁begin｜>now {}<｜tool▁call▁end｜>"): ("", "the mark of its arguments is missing"),
    ("deepseek", "<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>"): ("", "it has no name"),
    ("deepseek", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{'a': 1}<｜tool▁call▁end｜>"): (
        "now",
        "not valid JSON: Expecting",
    ),
    ("deepseek", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>[]<｜tool▁call▁end｜>"): ("now", "is not a JSON object"),
    ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n``<｜tool▁call▁end｜>"): (
        "now",
        "there is text after the JSON object",
    ),
    ("kimi", "<|tool_call_begin|>functions.now:0<|tool_call_end|>"): ("", "the mark of its arguments is missing"),
    ("kimi", "<|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}<|tool_call_end|>"): ("", "it has no name"),
    ("kimi", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"): (
        "now",
        "it does not end with <|tool_call_end|>",
    ),
    ("kimi", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}}<|tool_call_end|>"): (
        "now",
        "there is text after the JSON object",
    ),
    ("mistral", "[TOOL_CALLS] []"): ("", 'it is not a JSON list of objects with "name" and "arguments"'),
    ("mistral", "[TOOL_CALLS]now"): ("", "it is not valid JSON: Expecting value at character 1"),
    ("mistral", "[TOOL_CALLS]now[ARGS]"): ("now", "its arguments are not valid JSON: Expecting value at character 2"),
    ("mistral", "[TOOL_CALLS][ARGS]{}"): ("", "it has no name"),
    ("mistral", '[TOOL_CALLS] [{"name": "now"}]'): ("now", 'it has no "arguments"'),
    ("granite", '<|tool_call|>{"name": "now", "arguments": {}}'): ("", "it is not a JSON list of objects"),
    ("granite", "<|tool_call|>[7]"): ("", 'it is not a JSON object with "name" and "arguments"'),
    ("granite", '<|tool_call|>[{"name": "now", "arguments": "now"}]'): ("now", "is a string that is not valid JSON"),
}


@pytest.mark.parametrize("case", XML_ERRORS, ids=lambda case: f"{case[0]} {case[1][:60]}")
def test_bad_tags_are_told_and_the_next_call_is_read(case):
    name, says = XML_ERRORS[case]
    assert_error(case[1], case[0], name, says)


SCHEMA_ERRORS = {
    "an unknown tool": (
        "wether",
        {"city": "Paris"},
        "there is no tool 'wether'; did you mean 'weather'? the tools are weather,",
    ),
    "a missing argument": ("weather", {"days": 3}, "argument 'city' is missing"),
    "two faults": (
        "weather",
        {"days": "soon"},
        "argument 'days' must be of type integer, not string; argument 'city' is miss",
    ),
    "two missing arguments": ("write", {}, "argument 'path' is missing; argument 'text' is missing"),
    "a fraction": ("weather", {"city": "x", "days": 2.5}, "argument 'days' must be of type integer, not number"),
    "a nested fault": ("search", {"by": [1]}, "argument 'by' must be of type object, not"),
    "one of several types": (
        "search",
        {"most": "many"},
        "argument 'most': 'many' is not valid under any of the given schemas",
    ),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", SCHEMA_ERRORS)
def test_arguments_are_checked_against_the_schema(name, form):
    called, arguments, says = SCHEMA_ERRORS[name]
    assert_error(WRITERS[form](called, arguments), form, called, says)


@pytest.mark.parametrize(
    ("said", "call"),
    [
        # arguments encoded twice, as some models write them
        (
            f'{OPEN}{{"name": "weather", "arguments": "{{\\"city\\": \\"Paris\\"}}"}}{CLOSE}',
            Call("weather", {"city": "Paris"}),
        ),
        (f'{OPEN}{{"arguments": {{}}, "name": "now", "id": 7}}{CLOSE}', Call("now", {})),
        (
            f'{OPEN} {{"name": "weather", "arguments": {{"city": "\\u00e9\\ud83e\\udd86"}}}} {CLOSE}',
            Call("weather", {"city": "é🦆"}),
        ),
    ],
)
def test_json_of_other_habits(said, call):
    assert parse(said, "hermes", TOOLS).calls == [call]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        (" 3 ", WHOLE, 3),
        ("3.0", WHOLE, 3),
        ("3.5", WHOLE, 3.5),
        ("three", WHOLE, "three"),
        ("1_000", WHOLE, "1_000"),
        ("3", {"type": "number"}, 3),
        ("-1.5e3", {"type": "number"}, -1500.0),
        ("nan", {"type": "number"}, "nan"),
        ("True", FLAG, True),
        ("false", FLAG, False),
        ("yes", FLAG, "yes"),
        ("null", OPTIONAL, None),
        ("None", OPTIONAL, None),
        ("7", OPTIONAL, 7),
        ("null", TEXT, "null"),
        (" 3 ", TEXT, " 3 "),
        ('"3"', TEXT, '"3"'),
        ("3", {"type": ["string", "integer"]}, 3),
        ("3 apples", {"type": ["string", "integer"]}, "3 apples"),
        ("3", {}, "3"),
        ("2", {"enum": [1, 2]}, 2),
        ("b", {"enum": ["a", "b"]}, "b"),
        ("[1]", {"const": [1]}, [1]),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("{'a': 1}", {"type": "object"}, "{'a': 1}"),
        ("2", {"allOf": [{"$ref": "#/$defs/count"}]}, 2),
        ("2", {"$ref": "#/$defs/again"}, "2"),
    ],
)
def test_texts_become_values_of_the_types_of_the_schema(text, schema, value):
    own = tool("f", a=schema)
    own["function"]["parameters"]["$defs"] = {"count": WHOLE, "again": {"$ref": "#/$defs/again"}}
    types = Tools([own]).types("f", "a")
    found = tool_calls._coerced(text, types)
    assert (found, type(found)) == (value, type(value))


def test_a_turn_without_calls_is_its_text():
    for form in FORMATS:
        assert parse("<think>\nHm.\n</think>\n\nIt is 7.\n", form, TOOLS) == ("It is 7.", [])
        assert parse(f"<think>\nI call {WRITERS[form]('now', {})} and", form, TOOLS) == ("", [])
        assert parse("", form, TOOLS) == ("", [])
        assert parse("</tool_call> of what?", form, TOOLS) == ("</tool_call> of what?", [])


@pytest.mark.parametrize("form", FORMATS)
def test_calls_in_thoughts_do_not_count(form):
    call = WRITERS[form]("now", {})
    now = [Call("now", {})]
    assert parse(f"<think>{call}</think>a{call}", form, TOOLS) == ("a", now)
    assert parse(f"{call}</think>a{call}", form, TOOLS) == ("a", now), "a thought opened by a prompt that is not known"
    assert parse(f"{call}</think>7", form, TOOLS) == ("7", [])
    assert parse(f"{call}<think>again</think>{call}", form, TOOLS) == ("", now * 2)
    assert parse(f"a{call}<think>and then {call}", form, TOOLS) == ("a", now)
    assert parse(call, form, TOOLS, before="<think>\n") == ("", [])


def test_the_first_mark_may_be_missing_in_the_format_of_qwen3_coder():
    """A frequent slip of the model, which servers accept."""
    bare = qwen3_coder("weather", {"city": "Paris"}).removeprefix(f"{OPEN}\n")
    for said in (bare, bare.removesuffix(f"\n{CLOSE}")):
        assert parse(f"I look.\n\n{said}", "qwen3_coder", TOOLS) == ("I look.", [Call("weather", {"city": "Paris"})])
        assert len(parse(said + said, "qwen3_coder", TOOLS).calls) == 2


def test_calls_of_one_section():
    """One list, or one section of marks, has several calls; what is between them does not count."""
    calls = ("now", {}), ("weather", {"city": "Rome"}), ("now", {})
    wanted = [Call(*call) for call in calls]
    listed = spaced([{"name": name, "arguments": arguments} for name, arguments in calls])
    assert parse(f"Go. [TOOL_CALLS]{listed}", "mistral", TOOLS) == ("Go.", wanted)
    assert parse(f"Go.<|tool_call|>\n{listed} x", "granite", TOOLS) == ("Go.", wanted)
    later = "".join(mistral_later(*call) for call in calls)
    assert parse(f"Go.{later}", "mistral", TOOLS) == ("Go.", wanted)
    for form, between in (("deepseek", "\n"), ("kimi", "")):
        marks = [mark for mark in re.findall("<[^<>]*>", WRITERS[form]("now", {})) if "call" in mark]
        first, last = marks[0], marks[-1]
        inner = between.join(WRITERS[form](*c).removeprefix(first).removesuffix(last) for c in calls)
        for said in (f"{first}{inner}{last}", inner):
            assert parse(f"Go.\n{said}", form, TOOLS) == ("Go.", wanted)


def test_a_list_of_too_many_calls():
    listed = spaced([{"name": "now", "arguments": {}}] * (MOST_CALLS + 5))
    *calls, last = parse(f"[TOOL_CALLS]{listed}", "mistral", TOOLS).calls
    assert calls == [Call("now", {})] * MOST_CALLS and "at most 32 tool calls" in last.error


def test_ids_are_those_that_templates_take():
    """Kimi's replies name the id that the policy wrote; Mistral's templates reject ids of another length."""

    def id_of(said, form):
        return parse(said, form, TOOLS).calls[0].id

    numbered = kimi("weather", {"city": "Paris"}).replace(":0", ":13")
    assert id_of(numbered, "kimi") == "functions.weather:13"
    assert id_of(numbered.replace("functions.", ""), "kimi") == "weather:13"
    assert id_of(numbered.replace("Paris", "Paris\n"), "kimi") == "functions.weather:13", "an error has it, too"
    assert id_of(mistral("now", {}), "mistral") == "a1b2c3d4e"
    assert id_of(mistral("now", {}).replace("a1b2c3d4e", "7"), "mistral") == ""
    assert id_of("[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}", "mistral") == "a1b2c3d4e"
    assert id_of("[TOOL_CALLS]now[CALL_ID]a1[ARGS]{}", "mistral") == ""
    for form in ("hermes", "granite", "glm"):
        assert id_of(WRITERS[form]("now", {}), form) == ""


def test_a_tool_that_is_called_function():
    """DeepSeek-V3 writes the word before each name."""
    own = Tools([tool("function", n=WHOLE)])
    for writer in (deepseek, deepseek_v3):
        assert parse(writer("function", {"n": 1}), "deepseek", own).calls == [Call("function", {"n": 1})]


@pytest.mark.parametrize("form", FORMATS)
def test_repetition_takes_no_time_and_few_replies(form):
    begun = time.process_time()
    xml, keys = f"{OPEN}<function=a><parameter=b>", f"{OPEN}a<arg_key>b</arg_key><arg_value>"
    texts = OPEN, f"{OPEN}{CLOSE}", f"{OPEN}{{", f"<think>{OPEN}", "</parameter>\n", "<think>", xml, keys
    heads = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<|tool_call_begin|>a:1", "[TOOL_CALLS]a ", "<|tool_call|>[{"
    texts = *texts, *heads, *(f"{head}{' ' * 99}" for head in heads), "<｜tool▁calls▁begin｜>", f"{heads[1]}:1:1"
    for text in (*texts, f"</think>{OPEN}", f"</think>{xml}", f"</think>{keys}"):
        calls = parse(text * 10_000, form, TOOLS).calls
        assert len(calls) <= MOST_CALLS + 1 and all(call.error for call in calls)
    assert time.process_time() - begun < 5
    turn = parse(WRITERS[form]("now", {}) * (MOST_CALLS + 3), form, TOOLS)
    assert [call.error for call in turn.calls] == [""] * MOST_CALLS + [
        f"Error: the tool call cannot be run: a turn may have at most {MOST_CALLS} tool calls."
    ]


SNIPS = [OPEN, CLOSE, "<think>", "</think>", "<function=weather>", "</function>", "<parameter=city>", "</parameter>"]
SNIPS += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", '{"name": "weather", "arguments": {"city": ']
SNIPS += ['"Paris"', "}}", "weather", "\n", "city", "3", "\\ud800", "[", "```json", "{}", "functions.", ":0"]
SNIPS += sorted(tool_calls.MARKS)


@settings(max_examples=150, deadline=None)
@given(said=st.lists(st.sampled_from(SNIPS) | st.text(max_size=3)).map("".join), form=st.sampled_from(FORMATS))
def test_no_turn_raises(said, form):
    turn = parse(said, form, TOOLS)
    for call in turn.calls:
        assert call.error or not TOOLS.problem(call.name, call.arguments)
        assert not (call.error and call.arguments)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(), by=st.dictionaries(st.text(max_size=5), VALUES, max_size=3), within=st.integers(), before=st.text()
)
def test_what_is_written_is_read(text, by, within, before):
    arguments = {"query": text, "by": by, "within": within}
    assert parse(hermes("search", arguments), "hermes", TOOLS).calls == [Call("search", arguments)]
    for form in ("deepseek", "kimi", "mistral", "granite"):
        for writer in (WRITERS[form], *OTHERS.get(form, [])):
            assert parse(writer("search", arguments), form, TOOLS).calls == [Call("search", arguments)]
    for form in ("qwen3_coder", "glm"):
        arguments = {"path": text, "text": before}
        found = parse(WRITERS[form]("write", arguments), form, TOOLS).calls
        assert found == [Call("write", arguments)]
        found = parse(WRITERS[form]("search", {"by": by, "within": within}), form, TOOLS).calls
        assert found == [Call("search", {"by": by, "within": within})]


@pytest.mark.parametrize("form", FORMATS)
def test_formats_are_told_apart_by_what_a_template_writes(form):
    said = WRITERS[form](*tool_calls._TRIAL)
    assert tool_calls.format_of(f"<|im_start|>assistant\n<think>\n\n</think>\n\n{said}<|im_end|>\n") == form
    assert tool_calls.format_of("<function_calls>[trial_tool(number=7)]</function_calls>") is None


REFUSED = {
    "tools are {'type': 'function'": {"type": "function"},
    "tools are 'add'": "add",
    "tool 'add' is no {": ["add"],
    "tool {'name': 'add'} is no {": [{"name": "add"}],
    "a tool is called 'a b'; use at most 128": [tool("a b")],
    "a tool is called None": [{"type": "function", "function": {}}],
    "two tools are called 'f'; give each a name": [tool("f"), tool("f")],
    "the description of tool f is no text": [{"type": "function", "function": {"name": "f", "description": 5}}],
    "the parameters of tool f are [];": [{"type": "function", "function": {"name": "f", "parameters": []}}],
    "the parameters of tool f are {'type': 'array'}": [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
    ],
    "the parameters of tool f are no JSON schema: properties.a.type: 'text' is not": [tool("f", a={"type": "text"})],
    "the parameters of tool f are no JSON schema: required": [tool("f", [5])],
    "the parameters of tool f refer to 'https://example.com/a'": [tool("f", a={"$ref": "https://example.com/a"})],
    "the parameters of tool f refer to '/$defs/a'": [tool("f", a={"$ref": "#/$defs/a"})],
    "the parameters of tool f are no JSON schema: properties.a.pattern: '(' is not a 'regex'": [
        tool("f", a={"type": "string", "pattern": "("})
    ],
    "tool f is not JSON": [tool("f", a={"type": "integer", "default": {1, 2}})],
}


@pytest.mark.parametrize("says", REFUSED)
def test_a_malformed_list_of_tools_is_refused_in_one_sentence(says):
    with pytest.raises(UserError) as error:
        Tools(REFUSED[says])
    assert str(error.value).startswith(says) and "\n" not in str(error.value) and len(str(error.value)) < 400


def test_names_and_data_that_look_like_keywords_are_none():
    own = tool(
        "grep", ["pattern", "$ref"], **{"pattern": TEXT, "$ref": TEXT, "a": {"enum": [{"pattern": "("}], "default": 1}}
    )
    tools = Tools([own])
    arguments = {"pattern": "(", "$ref": "x"}
    assert parse(hermes("grep", arguments), "hermes", tools).calls == [Call("grep", arguments)]


def test_schemas_that_refer_to_themselves():
    node = {"type": "object", "properties": {"inner": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    own = tool("f", a={"anyOf": [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/end"}]}, b={"$ref": "#/$defs/end"})
    own["function"]["parameters"] |= {"$defs": {"node": node, "end": {"$ref": "#/$defs/end"}}, "$schema": "urn:unknown"}
    tools = Tools([own])
    assert parse(qwen3_coder("f", {"a": {"inner": {}}}), "qwen3_coder", tools).calls == [
        Call("f", {"a": {"inner": {}}})
    ]
    assert "refers to itself without end" in parse(hermes("f", {"b": 1}), "hermes", tools).calls[0].error


def test_a_number_beyond_floats_is_told():
    tools = Tools([tool("f", a={"type": "integer", "multipleOf": 0.5})])
    (call,) = parse(hermes("f", {"a": 10**400}), "hermes", tools).calls
    assert call.error == "Error: the tool call of f cannot be run: a number is too large."


def test_arguments_as_deep_as_allowed():
    value = 1
    for _ in range(MOST_NESTED - 1):
        value = [value]
    tools = Tools([tool("f", a={})])
    assert parse(hermes("f", {"a": value}), "hermes", tools).calls == [Call("f", {"a": value})]
    assert "levels deep" in parse(hermes("f", {"a": [value]}), "hermes", tools).calls[0].error


def test_the_page_shows_what_a_call_becomes():
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```pycon\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    test = doctest.DocTestParser().get_doctest(shown, {}, "tools.md", None, None)
    assert doctest.DocTestRunner().run(test) == doctest.TestResults(0, 6)
    (listed,) = re.findall(r"^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert Tools(json.loads(listed)).names == ["weather"]
    assert [form for form in FORMATS if f"| `{form}` |" in page] == list(FORMATS)
