"""Tool calls in a policy's turn, by the format of the model's family, and lists of tools.

Whatever a policy writes is a call or an error that can be sent back as the tool's reply; nothing it writes raises. What
runs the calls, and how replies become tokens (`data.tokenizer.Tokenizer.reply`), is not here.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any, NamedTuple

import jsonschema
import jsonschema.validators
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from gspo_jax import thoughts
from gspo_jax.errors import UserError, nearest
from gspo_jax.limited import quoted

_DEEPSEEK = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"))
_KIMI = tuple(
    f"<|tool_{name}|>"
    for name in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end")
)
_MISTRAL, _GRANITE = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), "<|tool_call|>"
MARKS = frozenset(
    f"<{slash}{name}>" for name in ("tool_call", "tool_response", "arg_key", "arg_value") for slash in ("", "/")
) | {*_DEEPSEEK, *_KIMI, *_MISTRAL, _GRANITE}
"""Marks of calls and replies. Some may be a tokenizer's added tokens."""
MOST_CALLS = 32
"""Calls per turn. One more is an error, and is the last."""
MOST_NESTED = 64
"""Depth of lists and objects in arguments."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_NAME = re.compile(r"[\w.:/-]{1,128}")
_SPACE = re.compile(r"\s*")
_FUNCTION = re.compile(r"<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>")
_PARAMETER_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_GLM_NAME = re.compile(r"\s*([^<>\n]*)")
_GLM_KEY = re.compile(r"<arg_key>([^<>\n]*)</arg_key>\s*<arg_value>")
_GLM_VALUE_END = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))")
_NAMED = r"\s*+(?P<name>[^<>{}\[\]`\n]{0,200}?)\s*+"
_DEEPSEEK_HEAD = re.compile(  # of V3.1: name, mark, JSON. Of V3 and R1: "function", mark, name, JSON in a fence
    rf"(?:{_DEEPSEEK[0]}\s*)?{_DEEPSEEK[1]}(?:\s*function{_DEEPSEEK[2]})?{_NAMED}"
    rf"(?:{_DEEPSEEK[2]}|(?P<fence>```)json)"
)
_KIMI_HEAD = re.compile(
    rf"(?:{re.escape(_KIMI[0])}\s*)?{re.escape(_KIMI[1])}\s*+"
    rf"(?P<id>(?:functions\.)?{_NAMED}(?::[0-9]+)?)\s*{re.escape(_KIMI[2])}"
)
_MISTRAL_HEAD = re.compile(rf"\[TOOL_CALLS\]{_NAMED}(?:\[CALL_ID\](?P<id>[A-Za-z0-9]*)\s*)?\[ARGS\]")
_MISTRAL_ID = re.compile("[A-Za-z0-9]{9}")
_SHOWN_ERRORS = 3
_NONE: dict[str, Any] = {"type": "object", "properties": {}}
_NO_SCHEMA = "const", "default", "enum", "examples"
"""Keywords whose values are data."""
_UNCLOSED = f"it does not end with {_CLOSE}"


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool call."""

    name: str
    """"" if the call has none, or one that no tool can have."""
    arguments: dict[str, Any]
    """Checked against the tool's schema; empty if there is an `error`."""
    error: str = ""
    """A reply to the policy that says why the call cannot be run. "" if it can."""
    id: str = dataclasses.field(default="", compare=False)
    """As the policy wrote it, for the reply; "" in a format without ids."""


class Turn(NamedTuple):
    """A policy's turn."""

    text: str
    """What is said outside thoughts, before the calls."""
    calls: list[Call]
    """In the order of the text."""


class Tools:
    """A checked list of tools: `schemas` in OpenAI's form, as chat templates take them."""

    def __init__(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        """Take objects {"type": "function", "function": {"name", "description", "parameters"}}.

        `parameters`, a JSON schema of an object, may be missing from tools without arguments.

        Raises:
          UserError: a tool is malformed, two have one name, or a schema is invalid or refers to another file.
        """
        self.schemas = check(schemas)
        functions = [schema["function"] for schema in self.schemas]
        self._parameters = {function["name"]: function.get("parameters", _NONE) for function in functions}
        self._validators = {name: _validator(name, parameters) for name, parameters in self._parameters.items()}

    def __len__(self) -> int:
        return len(self.schemas)

    @property
    def names(self) -> list[str]:
        return list(self._parameters)

    def types(self, name: str, argument: str) -> set[str]:
        """Return the JSON types that a tool's schema allows for an argument, none if it does not say."""
        parameters = self._parameters.get(name, {})
        properties = parameters.get("properties", {})
        return _types(properties.get(argument, {}), parameters, set())

    def problem(self, name: str, arguments: dict[str, Any]) -> str:
        """Return what is wrong with a call of a tool by its schema, "" if nothing."""
        try:
            errors = list(islice(self._validators[name].iter_errors(arguments), _SHOWN_ERRORS))
        except ArithmeticError:  # a number beyond float64 against multipleOf
            return "a number is too large"
        except RecursionError:
            return "the schema of its arguments refers to itself without end"
        return "; ".join(_said(error) for error in errors)


def check(schemas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a list of tools if it has the form that `Tools` takes, else raise UserError.

    Whether the parameters are a valid JSON schema is not checked, which would take a millisecond for each tool.
    """
    if isinstance(schemas, Mapping | str) or not isinstance(schemas, Sequence):
        raise UserError(f"tools are {schemas!r:.100}; give a list of objects with type and function")
    names: set[str] = set()
    for schema in schemas:
        name = _checked_name(schema)
        if name in names:
            raise UserError(f"two tools are called {name!r}; give each a name of its own")
        names.add(name)
    return [dict(schema) for schema in schemas]


def parse(turn: str, form: str, tools: Tools, *, before: str = "") -> Turn:
    """Return the text and the tool calls of a policy's turn.

    Calls inside thoughts (thoughts.py) do not count, nor does text after a call.

    Args:
      turn: without the token that ends it.
      form: one of FORMATS.
      before: the text that the turn continues, whose end may open a thought.
    """
    opening, read = _READERS[form]
    scan = thoughts.Scan(before, turn)
    starts: list[int] = []
    calls: list[Call] = []
    text, at, tries = None, 0, 0
    while found := opening.search(turn, at):
        scan.read(at, found.start())
        at = found.end()
        if scan.open:
            continue
        if scan.unopened > (starts[0] if starts else 0):
            starts, calls, text = [], [], None
        text = turn[scan.begin : found.start()] if text is None else text
        own, at = read(turn, found.start(), tools)
        starts.append(found.start())
        calls += own[: MOST_CALLS - tries]
        if (tries := tries + len(own)) > MOST_CALLS:
            calls.append(_error("", f"a turn may have at most {MOST_CALLS} tool calls"))
            break
    else:
        scan.read(at, len(turn))
        if scan.unopened > (starts[0] if starts else 0):
            calls, text = [], None
    if text is None:
        text = thoughts.answer_part(before, turn) or ""
    return Turn(text.strip(), calls)


def _hermes(turn: str, start: int, tools: Tools) -> tuple[Call, int]:
    begin = _behind_space(turn, start + len(_OPEN))
    try:
        found, end = _DECODER.raw_decode(turn, begin)
    except (ValueError, RecursionError) as error:
        end, closed = _next_close(turn, begin)
        return _error("", f"it is not valid JSON: {_why(error, begin)}" if closed else _UNCLOSED), end
    behind = _behind_space(turn, end)
    name = found.get("name") if isinstance(found, dict) else None
    if not turn.startswith(_CLOSE, behind):
        end, closed = _next_close(turn, behind)
        shown = name if isinstance(name, str) else ""
        return _error(shown, "there is text after the JSON object" if closed else _UNCLOSED), end
    return _of_object(found, tools), behind + len(_CLOSE)


def _of_object(found: Any, tools: Tools) -> Call:
    """Return the call that a JSON object with its name and its arguments is."""
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(found, dict):
        return _error("", 'it is not a JSON object with "name" and "arguments"')
    if not isinstance(name, str) or not name:
        return _error("", 'it has no "name"')
    if "arguments" not in found:
        return _error(name, 'it has no "arguments"')
    return _of_arguments(name, found["arguments"], tools)


def _of_arguments(name: str, arguments: Any, tools: Tools) -> Call:
    if isinstance(arguments, str):  # some models encode them twice
        try:
            arguments = _decoded(arguments)
        except (ValueError, RecursionError) as error:
            return _error(name, f'"arguments" is a string that is not valid JSON: {_why(error)}')
    if not isinstance(arguments, dict):
        return _error(name, '"arguments" is not a JSON object')
    return _checked_call(name, arguments, tools)


def _headed(turn: str, start: int, tools: Tools, head: re.Pattern[str], opening: str, closing: str) -> tuple[Call, int]:
    """Read a call whose `head` has its name, and perhaps its id, and whose arguments are a JSON object behind it."""
    found = head.match(turn, start)
    groups = {} if found is None else found.groupdict()
    name, fence = groups.get("name", ""), groups.get("fence") or ""
    begin = turn.index(opening, start) + len(opening) if found is None else _behind_space(turn, found.end())

    def failed(why: str, at: int) -> tuple[Call, int]:
        end, closed = _next_close(turn, at, opening, closing)
        error = _error(name, why if closed else f"it does not end with {closing}")
        return dataclasses.replace(error, id=groups.get("id") or ""), end

    if found is None:
        return failed("the mark of its arguments is missing", begin)
    try:
        arguments, end = _DECODER.raw_decode(turn, begin)
    except (ValueError, RecursionError) as error:
        return failed(f"its arguments are not valid JSON: {_why(error, begin)}", begin)
    end = _behind_space(turn, end)
    behind = _behind_space(turn, end + len(fence)) if turn.startswith(fence, end) else end
    if not turn.startswith(closing, behind):
        return failed("there is text after the JSON object", behind)
    call = _of_arguments(name, arguments, tools) if name else _error("", "it has no name")
    return dataclasses.replace(call, id=groups.get("id") or ""), behind + len(closing)


def _deepseek(turn: str, start: int, tools: Tools) -> tuple[Call, int]:
    return _headed(turn, start, tools, _DEEPSEEK_HEAD, _DEEPSEEK[1], _DEEPSEEK[3])


def _kimi(turn: str, start: int, tools: Tools) -> tuple[Call, int]:
    return _headed(turn, start, tools, _KIMI_HEAD, _KIMI[1], _KIMI[3])


def _mistral(turn: str, start: int, tools: Tools) -> tuple[list[Call], int]:
    """Read a list of calls or, of later models, one call with its name before its arguments."""
    if _MISTRAL_HEAD.match(turn, start) is None:
        return _listed(turn, start + len(_MISTRAL[0]), tools)
    call, end = _headed(turn, start, tools, _MISTRAL_HEAD, _MISTRAL[0], "")
    return [_with_id(call, call.id)], end


def _granite(turn: str, start: int, tools: Tools) -> tuple[list[Call], int]:
    return _listed(turn, start + len(_GRANITE), tools)


def _listed(turn: str, start: int, tools: Tools) -> tuple[list[Call], int]:
    """Read a JSON list of calls."""
    begin = _behind_space(turn, start)
    try:
        found, end = _DECODER.raw_decode(turn, begin)
    except (ValueError, RecursionError) as error:
        return [_error("", f"it is not valid JSON: {_why(error, begin)}")], begin
    if not isinstance(found, list) or not found:
        return [_error("", 'it is not a JSON list of objects with "name" and "arguments"')], end
    return [_with_id(_of_object(each, tools), each.get("id") if isinstance(each, dict) else "") for each in found], end


def _with_id(call: Call, id: Any) -> Call:
    """Return a call with its id if it is one that Mistral's templates take."""
    return dataclasses.replace(call, id=id if isinstance(id, str) and _MISTRAL_ID.fullmatch(id) else "")


def _qwen3_coder(turn: str, start: int, tools: Tools) -> tuple[Call, int]:
    wrapped = turn.startswith(_OPEN, start)
    at = _behind_space(turn, start + len(_OPEN)) if wrapped else start

    def failed(name: str, why: str) -> tuple[Call, int]:
        end, closed = _next_close(turn, at)
        return _error(name, why if closed else _UNCLOSED), end

    head = _FUNCTION.match(turn, at)
    if head is None:
        return failed("", "it does not begin with <function=NAME>")
    name, at, arguments = head[1].strip(), head.end(), {}
    while not turn.startswith("</function>", at := _behind_space(turn, at)):
        parameter = _PARAMETER.match(turn, at)
        if parameter is None:
            return failed(name, "a <parameter=NAME> or </function> is missing")
        key, begin = parameter[1].strip(), parameter.end()
        closing = _PARAMETER_END.search(turn, begin)
        if closing is None or _PARAMETER.search(turn, begin, closing.start()):
            return failed(name, f"parameter {key!r:.100} does not end with </parameter>")
        value = turn[begin : closing.start()].removeprefix("\n").removesuffix("\n")
        arguments[key], at = _coerced(value, tools.types(name, key)), closing.end()
    at += len("</function>")
    behind = _behind_space(turn, at)
    closed = turn.startswith(_CLOSE, behind)
    if wrapped and not closed:
        return failed(name, f"there is text between </function> and {_CLOSE}")
    end = behind + len(_CLOSE) if closed else at
    return (_checked_call(name, arguments, tools) if name else _error("", "it has no name")), end


def _glm(turn: str, start: int, tools: Tools) -> tuple[Call, int]:
    head = _GLM_NAME.match(turn, start + len(_OPEN))
    assert head is not None  # it matches the empty text
    name, at, arguments = head[1].strip(), head.end(), {}
    while not turn.startswith(_CLOSE, at := _behind_space(turn, at)):
        key = _GLM_KEY.match(turn, at)
        closing = None if key is None else _GLM_VALUE_END.search(turn, key.end())
        if key is None or closing is None or _GLM_KEY.search(turn, key.end(), closing.start()):
            end, closed = _next_close(turn, at)
            why = "an <arg_key>" if key is None else f"the value of {key[1]!r:.100}"
            why = f"{why} is missing" if key is None else f"{why} does not end with </arg_value>"
            return _error(name, why if closed else _UNCLOSED), end
        value = turn[key.end() : closing.start()]
        arguments[key[1].strip()] = _coerced(value, tools.types(name, key[1].strip()))
        at = closing.end()
    return (_checked_call(name, arguments, tools) if name else _error("", "it has no name")), at + len(_CLOSE)


_Reader = Callable[[str, int, Tools], tuple[list[Call], int]]
"""(turn, where calls begin, tools) -> the calls, and where they end."""


def _one(read: Callable[[str, int, Tools], tuple[Call, int]]) -> _Reader:
    def reader(turn: str, start: int, tools: Tools) -> tuple[list[Call], int]:
        call, end = read(turn, start, tools)
        return [call], end

    return reader


_READERS: dict[str, tuple[re.Pattern[str], _Reader]] = {
    "hermes": (re.compile(_OPEN), _one(_hermes)),
    "qwen3_coder": (re.compile(f"{_OPEN}|<function="), _one(_qwen3_coder)),  # the model may leave out the first
    "glm": (re.compile(_OPEN), _one(_glm)),
    "deepseek": (re.compile(rf"(?:{_DEEPSEEK[0]}\s*)?{_DEEPSEEK[1]}"), _one(_deepseek)),
    "kimi": (re.compile(rf"(?:{re.escape(_KIMI[0])}\s*)?{re.escape(_KIMI[1])}"), _one(_kimi)),
    "mistral": (re.compile(re.escape(_MISTRAL[0])), _mistral),
    "granite": (re.compile(re.escape(_GRANITE)), _granite),
}
FORMATS = tuple(_READERS)
"""JSON of Hermes, Qwen 2.5 and Qwen3; XML of Qwen3-Coder and Qwen 3.5; keys and values of GLM 4.5 to 5; names and JSON
of DeepSeek-V3 and R1; ids and JSON of Kimi-K2; lists of Mistral, names and JSON of its later models; lists of
Granite 3."""
TRIAL_NAME = "trial_tool"
_TRIAL = TRIAL_NAME, {"text": "a b", "number": 7}
TRIAL_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": TRIAL_NAME,
            "description": "Try a chat template.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "number": {"type": "integer"}},
                "required": ["text", "number"],
            },
        },
    }
]
"""A tool that shows how a chat template writes tools."""
TRIAL_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "trial0001", "type": "function", "function": {"name": TRIAL_NAME, "arguments": _TRIAL[1]}}],
}
"""A turn that shows how a chat template writes calls."""


def format_of(written: str) -> str | None:
    """Return the format of a chat template that writes TRIAL_CALL so, None if it is none of FORMATS."""
    tools = Tools(TRIAL_TOOLS)
    return next((form for form in FORMATS if parse(written, form, tools).calls == [Call(*_TRIAL)]), None)


def with_named_ids(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation whose calls have ids as Kimi's, functions.NAME:NUMBER, and whose replies name them.

    Such ids stay as they are. A reply without the id of a call before it answers the first call that has no reply.
    """
    found: list[dict[str, Any]] = []
    named: dict[Any, str] = {}
    open_calls: list[str] = []
    numbers = count()
    for turn in turns:
        own = dict(turn)
        if turn.get("tool_calls"):
            calls = own["tool_calls"] = [dict(call) for call in turn["tool_calls"]]
            for call in calls:
                given, prefix, number = call.get("id"), f"functions.{call['function']['name']}:", next(numbers)
                call["id"] = named[given] = str(given) if str(given).startswith(prefix) else f"{prefix}{number}"
                open_calls.append(named[given])
        elif turn["role"] == "tool" and open_calls:
            given = turn.get("tool_call_id")
            answered = own["tool_call_id"] = open_calls[0] if given is None else named.get(given, open_calls[0])
            open_calls = [call for call in open_calls if call != answered]
        found.append(own)
    return found


def _checked_call(name: str, arguments: dict[str, Any], tools: Tools) -> Call:
    if name not in tools.names:
        near = nearest(name, tools.names)
        known = f"did you mean {near!r}? " if near else ""
        known += f"the tools are {', '.join(tools.names)}" if len(tools) else "there are none"
        return _error(name, f"there is no tool {name[:100]!r}; {known}")
    if _is_deep(arguments):
        return _error(name, f"its arguments are nested more than {MOST_NESTED} levels deep")
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can spell
        return _error(name, "its arguments are not Unicode text")
    problem = tools.problem(name, arguments)
    return _error(name, problem) if problem else Call(name, arguments)


def _error(name: str, why: str) -> Call:
    name = name if _NAME.fullmatch(name) else ""
    of = f" of {name}" if name else ""
    return Call(name, {}, f"Error: the tool call{of} cannot be run: {why}.")


def _next_close(turn: str, at: int, opened: str = _OPEN, closed: str = _CLOSE) -> tuple[int, bool]:
    """Return where a malformed call ends, and whether it is closed: at the next mark of a call, or the turn's end."""
    closing, opening = turn.find(closed, at), turn.find(opened, at)
    if closing < 0 or 0 <= opening < closing:
        return (len(turn) if opening < 0 else opening), False
    return closing + len(closed), True


def _behind_space(turn: str, at: int) -> int:
    found = _SPACE.match(turn, at)
    assert found is not None  # it matches the empty text
    return found.end()


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return value


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_number)


def _decoded(text: str) -> Any:
    return _DECODER.decode(text)


def _why(error: BaseException, begin: int = 0) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at character {error.pos - begin + 1}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else quoted(error)


def _is_deep(value: Any) -> bool:
    left = [value]
    for _ in range(MOST_NESTED + 1):
        left = [
            inner
            for each in left
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return bool(left)


def _coerced(text: str, types: set[str]) -> Any:
    """Return an argument written as text, by the types that its schema allows; the text if it fits none of them."""
    word = text.strip()
    if "null" in types and word in ("null", "None"):  # templates may write values as Python does
        return None
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if types & {"integer", "number", "object", "array"}:
        try:
            found = _decoded(word)
        except (ValueError, RecursionError):
            return text
        if _type_of(found) in types or (_type_of(found) == "integer" and "number" in types):
            return found
        if isinstance(found, float) and "integer" in types and (found.is_integer() or "string" not in types):
            return int(found) if found.is_integer() else found  # a fraction is told as such
    return text


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _types(schema: Any, root: Mapping[str, Any], seen: set[str]) -> set[str]:
    """Return the JSON types that a schema allows, but for those that only references `seen` allow."""
    if not isinstance(schema, Mapping):
        return set()
    found = schema.get("type", [])
    types = {found} if isinstance(found, str) else set(found)
    if not types:
        types |= {_type_of(value) for value in schema.get("enum", [])}
        types |= {_type_of(schema["const"])} if "const" in schema else set()
    for part in (*schema.get("anyOf", []), *schema.get("oneOf", []), *schema.get("allOf", [])):
        types |= _types(part, root, seen)
    if isinstance(to := schema.get("$ref"), str) and to not in seen:
        seen.add(to)
        types |= _types(_resolved(to, root), root, seen)
    return types


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    return Registry().resolver_with_root(DRAFT202012.create_resource(root)).lookup(reference).contents


def _checked_name(schema: Any) -> str:
    """Return the name of a tool of the right form."""
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping) or schema.get("type") != "function":
        form = '{"type": "function", "function": {"name", "description", "parameters"}}'
        raise UserError(f"tool {schema!r:.100} is no {form}; write it so")
    name, parameters = function.get("name"), function.get("parameters", _NONE)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(f"a tool is called {name!r:.200}; use at most 128 letters, digits, _, ., :, / and -")
    if not isinstance(function.get("description", ""), str):
        raise UserError(f"the description of tool {name} is no text; write it as one")
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        form = '{"type": "object", "properties": …}'
        raise UserError(
            f"the parameters of tool {name} are {parameters!r:.100}; give the JSON schema of an object, {form}"
        )
    try:
        json.dumps(schema, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"tool {name} is not JSON ({quoted(error)}); use texts, numbers, lists and objects") from None
    return name


def _validator(name: str, parameters: dict[str, Any]) -> Any:
    of = f"the parameters of tool {name}"
    kind: Any = jsonschema.validators.validator_for(parameters, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(parameters)
    except jsonschema.SchemaError as error:
        place = ".".join(map(str, error.absolute_path)) or "the schema"
        raise UserError(f"{of} are no JSON schema: {place}: {quoted(error.message)}; correct it") from None
    for schema in _parts(parameters):
        try:
            if isinstance(to := schema.get("$ref"), str):
                _resolved(to, parameters)
        except Unresolvable as error:
            raise UserError(f"{of} refer to {error.ref!r:.100}, which is not in them; put it there") from None
    return kind(parameters, registry=Registry())


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Return a schema and those inside it."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            yield part
            left += [value for key, value in part.items() if key not in _NO_SCHEMA]
        elif isinstance(part, list):
            left += part


def _said(error: jsonschema.ValidationError) -> str:
    place, wanted = ".".join(map(str, error.absolute_path)), error.validator_value
    if error.validator == "required" and isinstance(wanted, list) and isinstance(error.instance, dict):
        missing = next((name for name in wanted if error.message.startswith(f"{name!r} ")), "")
        return f"argument {f'{place}.{missing}' if place else missing!r} is missing"
    if error.validator == "type":
        words = " or ".join(wanted) if isinstance(wanted, list) else wanted
        return f"argument {place!r} must be of type {words}, not {_type_of(error.instance)}"
    return f"argument {place!r}: {quoted(error.message)}" if place else quoted(error.message)
