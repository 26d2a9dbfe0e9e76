"""Tools: Python functions that a model can call, and parsing of its calls.

    @tool
    async def search(query: str) -> str:
        \"\"\"Search the encyclopedia.

        Args:
            query: What to look for.
        \"\"\"

The schema comes from signature and docstring. Calls are parsed in the Hermes/Qwen format,

    <tool_call>
    {"name": "search", "arguments": {"query": "Paris"}}
    </tool_call>

A malformed call raises nothing: its `error` is reported to the model.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import re
import textwrap
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, cast, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import to_json
from typing_extensions import TypedDict

from areal.errors import ConfigError


class MalformedCall(ValueError):
    """A malformed tool call. The message is meant for the model."""


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """A function and its `schema` for the model, in OpenAI's function format."""

    name: str
    schema: dict[str, Any]
    function: Callable[..., Any]
    _arguments: TypeAdapter[dict[str, Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself."""
        return self.function(*args, **kwargs)

    def check(self, arguments: Any) -> dict[str, Any]:
        """Convert arguments to the annotated types. Raises MalformedCall."""
        try:
            return self._arguments.validate_python(arguments)
        except ValidationError as error:
            problems = "; ".join(map(_explain, error.errors()))
            raise MalformedCall(f"wrong arguments for {self.name}: {problems}") from None

    async def run(self, arguments: Mapping[str, Any]) -> str:
        """Call the function with checked arguments; returns its result as text (JSON unless it is a string).

        A plain function runs in its own thread, which cancelling abandons.
        """
        if inspect.iscoroutinefunction(self.function):
            result = await self.function(**arguments)
        else:
            call = functools.partial(contextvars.copy_context().run, self.function, **arguments)
            result = await asyncio.get_running_loop().run_in_executor(_DaemonThread(), call)
            if inspect.isawaitable(result):  # a callable object or partial of something async
                result = await result
        return result if isinstance(result, str) else to_json(result, fallback=_plain).decode()


def tool(function: Callable[..., Any]) -> Tool:
    """Make a tool of a plain or async function (or method).

    Every parameter needs a type that pydantic can check; a default makes it optional. The docstring's first part is the
    description, and its `Args:` section (Google style) describes the parameters. Raises ConfigError for a parameter
    without a type, for *args, **kwargs and positional-only ones, and for a documented parameter that does not exist.
    """
    if isinstance(function, Tool):
        return function
    name = getattr(function, "__name__", type(function).__name__)
    where = f"tool {name!r}"
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        hints = get_type_hints(target, include_extras=True)
    except NameError as error:
        raise ConfigError(f"{where}: {error}; define its types at module level") from None
    description, documented = _read_docstring(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    annotated, typed_dict = cast(Any, Annotated), cast(Any, TypedDict)  # creates types at run time
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{where}: parameter {parameter} cannot be passed by name; use a plain parameter")
        if parameter.name not in hints:
            raise ConfigError(f"{where}: parameter {parameter.name!r} has no type; annotate it")
        required = parameter.default is parameter.empty
        extra = None if required else {"default": json.loads(to_json(parameter.default, fallback=_plain))}
        field = Field(description=documented.pop(parameter.name, None), json_schema_extra=extra)
        hint = annotated[hints[parameter.name], field]
        fields[parameter.name] = hint if required else NotRequired[hint]  # the function supplies its own default
    if documented:
        raise ConfigError(f"{where}: the docstring describes {', '.join(documented)}, which is not a parameter")
    arguments = typed_dict(name, fields)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")
    try:
        adapter = TypeAdapter(arguments)
        parameters = _without_titles(adapter.json_schema())
    except PydanticUserError as error:
        raise ConfigError(f"{where}: {error.message.splitlines()[0]}") from None
    schema = {"name": name, "description": description, "parameters": parameters}
    return Tool(name, {"type": "function", "function": schema}, function, adapter)


def parse_calls(text: str, tools: Mapping[str, Tool]) -> tuple[str, list[dict[str, Any]]]:
    """(content, calls) of a sampled text; content is the text before the first call.

    A call is {"type": "function", "function": {"name", "arguments"}}, with arguments as JSON text. A malformed call
    also has an "error", and its arguments are the text between the tags. Never raises.
    """
    content, opened, rest = text.partition(_OPEN)
    if not opened:
        return text, []
    calls = []
    while opened:
        call, rest = _read_call(rest, tools)
        calls.append(call)
        _, opened, rest = rest.partition(_OPEN)
    return content.rstrip("\n"), calls


def read_arguments(name: str, arguments: Any, tools: Mapping[str, Tool]) -> dict[str, Any]:
    """Parse (if JSON text) and check the arguments of a call of tools[name]. Raises MalformedCall."""
    if name not in tools:
        raise MalformedCall(f"there is no tool {name!r}; available: {', '.join(tools) or 'none'}")
    if isinstance(arguments, str):
        arguments = _read_json(arguments, 0)[0]
    return tools[name].check(arguments)


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"\s*")


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject)


def _read_json(text: str, at: int) -> tuple[Any, int]:
    """(value, end) of the JSON value at `at`. Raises MalformedCall, also for a value that cannot be encoded again."""
    try:
        value, end = _DECODER.raw_decode(text, at)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate such as "\\ud800" has no UTF-8
    except json.JSONDecodeError as error:
        raise MalformedCall(f"bad JSON: {error.msg} at character {error.pos - at}") from None
    except UnicodeEncodeError:
        raise MalformedCall("bad JSON: a lone surrogate is not a character") from None
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"bad JSON: {error}") from None
    return value, end


def _read_call(text: str, tools: Mapping[str, Tool]) -> tuple[dict[str, Any], str]:
    """The call at the start of `text`, which follows an opening tag, and the remaining text."""
    name = ""
    close, following = text.find(_CLOSE), text.find(_OPEN)
    try:
        value, end = _read_json(text, _SPACE.match(text).end())  # type: ignore[union-attr]
        end = _SPACE.match(text, end).end()  # type: ignore[union-attr]
        if not text.startswith(_CLOSE, end):
            raise MalformedCall(f"the JSON object must be followed by {_CLOSE}")
        close, following = end, -1  # the tags found before may be inside a JSON string
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise MalformedCall('a call is {"name": <tool>, "arguments": {...}}')
        name = value["name"]
        if not isinstance(value.get("arguments"), dict):
            raise MalformedCall('"arguments" must be an object')
        read_arguments(name, value["arguments"], tools)
        return _call(name, json.dumps(value["arguments"], ensure_ascii=False)), text[close + len(_CLOSE) :]
    except MalformedCall as error:
        problem = str(error)
    if close < 0 or 0 <= following < close:
        raw, rest = (text, "") if following < 0 else (text[:following], text[following:])
        problem = f"no {_CLOSE} after {_OPEN}"
    else:
        raw, rest = text[:close], text[close + len(_CLOSE) :]
    return _call(name, raw) | {"error": problem}, rest


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _plain(value: Any) -> Any:
    """Fallback for values that pydantic cannot write as JSON: arrays become lists, anything else text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _explain(error: Any) -> str:
    path = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{path} is missing"
    if error["type"] == "extra_forbidden":
        return f"{path} is not an argument"
    return f"{path}: {error['msg']}" if path else error["msg"]


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?):\s*$", re.MULTILINE)
_ENTRY = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """(description, parameter -> description) of a Google-style docstring."""
    parts = _SECTION.split(text)
    documented: dict[str, str] = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title not in ("Args", "Arguments", "Parameters"):
            continue
        name = ""
        for line in textwrap.dedent(body.strip("\n")).splitlines():
            entry = None if line[:1].isspace() else _ENTRY.match(line)
            if entry:
                name = entry[1]
                documented[name] = entry[2].strip()
            elif name:
                documented[name] = f"{documented[name]} {line.strip()}".strip()
    return parts[0].strip(), documented


def _without_titles(schema: Any, properties: bool = False) -> Any:
    """Remove pydantic's titles, which repeat the names, from a JSON schema (a property may be named "title")."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value, properties=not properties and key in ("properties", "$defs"))
        for key, value in schema.items()
        if properties or key != "title"
    }


class _DaemonThread(Executor):
    """Runs each call in a new daemon thread, so that one that never returns blocks neither a pool nor exit."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = function(*args, **kwargs)
                except BaseException as error:  # asyncio cannot carry StopIteration; SystemExit would end the loop
                    plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                    future.set_exception(error if plain else RuntimeError(repr(error)))
                else:
                    future.set_result(result)

        threading.Thread(target=run, name="areal-tool", daemon=True).start()
        return future
