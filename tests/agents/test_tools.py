"""Schemas from signatures, calls from sampled text, and what running one does."""

from __future__ import annotations

import asyncio
import sys
import threading
from enum import Enum
from typing import Any, Literal, Optional

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from areal.agents.tools import MalformedCall, parse_calls, tool
from areal.errors import ConfigError


class Place(BaseModel):
    title: str
    x: float = 0.0


class Unit(Enum):
    METRE = "m"
    FOOT = "ft"


@tool
async def search(query: str, limit: int = 3) -> str:
    """Search the encyclopedia.

    Only English articles.

    Args:
        query: What to look for,
            in plain words.
        limit (int): How many articles.

    Returns:
        The articles.
    """
    return f"{limit} x {query}"


TOOLS = {"search": search}


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


GOOD = call('{"name": "search", "arguments": {"query": "Paris"}}')


def test_schema_of_signature_and_docstring() -> None:
    assert search.schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the encyclopedia.\n\nOnly English articles.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for, in plain words."},
                    "limit": {"type": "integer", "description": "How many articles.", "default": 3},
                },
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }


def test_schema_of_each_type() -> None:
    def f(
        a: float,
        b: bool,
        c: list[int],
        d: dict[str, Any],
        e: Optional[str],  # noqa: UP045 - both spellings must work
        f: int | None,
        g: Literal["x", "y"],
        h: Place,
        json: str,
        title: Unit = Unit.FOOT,
    ) -> None: ...

    parameters = tool(f).schema["function"]["parameters"]
    text_or_null, whole_or_null = ({"anyOf": [{"type": kind}, {"type": "null"}]} for kind in ("string", "integer"))
    assert parameters["properties"] == {
        "a": {"type": "number"},
        "b": {"type": "boolean"},
        "c": {"type": "array", "items": {"type": "integer"}},
        "d": {"type": "object", "additionalProperties": True},
        "e": text_or_null,
        "f": whole_or_null,
        "g": {"type": "string", "enum": ["x", "y"]},
        "h": {"$ref": "#/$defs/Place"},
        "json": {"type": "string"},
        "title": {"$ref": "#/$defs/Unit", "default": "ft"},
    }
    place = {"title": {"type": "string"}, "x": {"type": "number", "default": 0.0}}
    assert parameters["$defs"]["Place"] == {"type": "object", "properties": place, "required": ["title"]}
    assert parameters["required"] == ["a", "b", "c", "d", "e", "f", "g", "h", "json"]


def test_methods_and_callable_objects() -> None:
    class World:
        def look(self, at: str) -> str:
            """Look."""
            return at

        def __call__(self, steps: int) -> None: ...

    assert list(tool(World().look).schema["function"]["parameters"]["properties"]) == ["at"]
    assert list(tool(World()).schema["function"]["parameters"]["properties"]) == ["steps"]


def test_a_tool_can_still_be_called_and_wrapped_twice() -> None:
    @tool
    def double(x: int) -> int:
        return 2 * x

    assert double(4) == 8
    assert tool(double) is double


def untyped(query) -> None: ...  # type: ignore[no-untyped-def]
def variadic(*queries: str) -> None: ...
def keywords(**queries: str) -> None: ...
def positional(query: str, /) -> None: ...
def opaque(query: threading.Lock) -> None: ...
def misspelt(query: str) -> None:
    """Search.

    Args:
        quary: What to look for.
    """


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (untyped, "'query' has no type"),
        (variadic, "queries"),
        (keywords, "queries"),
        (positional, "query"),
        (opaque, "opaque"),
        (misspelt, "quary"),
    ],
)
def test_what_cannot_be_a_tool_is_refused(function: Any, says: str) -> None:
    """I10."""
    with pytest.raises(ConfigError, match=says):
        tool(function)


def test_arguments_are_converted() -> None:
    @tool
    def f(place: Place, unit: Unit, n: int = 1) -> None: ...

    arguments = f.check({"place": {"title": "Paris", "x": 1}, "unit": "m", "n": "7"})
    assert arguments == {"place": Place(title="Paris", x=1.0), "unit": Unit.METRE, "n": 7}
    assert "n" not in f.check({"place": {"title": "Paris"}, "unit": "m"}), "the function has its own default"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "query is missing"),
        ({"query": "a", "limit": "many"}, "limit: Input should be a valid integer"),
        ({"query": "a", "page": 1}, "page is not an argument"),
        ([], "valid dictionary"),
    ],
)
def test_wrong_arguments_are_explained(arguments: Any, says: str) -> None:
    with pytest.raises(MalformedCall, match=says):
        search.check(arguments)


def test_calls_of_a_text() -> None:
    content, calls = parse_calls(
        f"I look.\n{GOOD}\n" + call('{"name":"search","arguments":{"query":"né","limit":2}}'), TOOLS
    )
    assert content == "I look."
    assert [each["function"] for each in calls] == [
        {"name": "search", "arguments": '{"query": "Paris"}'},
        {"name": "search", "arguments": '{"query": "né", "limit": 2}'},
    ]
    assert not any("error" in each for each in calls)


def test_a_text_without_calls_is_content() -> None:
    assert parse_calls(" Paris\n", TOOLS) == (" Paris\n", [])


def test_tags_inside_a_json_string_are_text() -> None:
    _, calls = parse_calls(call('{"name": "search", "arguments": {"query": "<tool_call> and </tool_call>"}}'), TOOLS)
    assert [each["function"]["arguments"] for each in calls] == ['{"query": "<tool_call> and </tool_call>"}']


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (call('{"name": "search", "arguments": {"query": Paris}}'), "bad JSON: Expecting value at character 42"),
        (call(""), "bad JSON"),
        (call("[" * 100_000), "bad JSON"),
        (call('{"name": "search", "arguments": {"query": NaN}}'), "NaN is not JSON"),
        (call('{"name": "search", "arguments": {"query": "\\ud800"}}'), "surrogate"),
        (call('{"name": "search", "arguments": {"query": "Paris"}} please'), "must be followed by </tool_call>"),
        (call("null"), "a call is"),
        (call('{"arguments": {}}'), "a call is"),
        (call('{"name": "search"}'), '"arguments" must be an object'),
        (call('{"name": "search", "arguments": "Paris"}'), '"arguments" must be an object'),
        (call('{"name": "find", "arguments": {"query": "Paris"}}'), "there is no tool 'find'; available: search"),
        (call('{"name": "search", "arguments": {}}'), "query is missing"),
        ('<tool_call>\n{"name": "search", "arguments": {"query": "Paris"}}', "no </tool_call>"),
        ("<tool_call>", "no </tool_call>"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(text: str, says: str) -> None:
    _, (bad, good) = parse_calls(f"{text}\n{GOOD}", TOOLS)
    assert says in bad["error"]
    assert "error" not in good, "what follows is read on its own"


@given(
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                '{"name": "search", ',
                '"arguments": {',
                '"query": "',
                '"',
                "}",
                "\n",
                "\\u",
            ]
        )
        | st.text(max_size=3)
    )
)
def test_no_text_raises(pieces: list[str]) -> None:
    text = "".join(pieces)
    content, calls = parse_calls(text, TOOLS)
    assert text.startswith(content) if calls else content == text
    for each in calls:
        assert isinstance(each.get("error", ""), str)


async def test_results_become_text() -> None:
    for result, text in [
        ("né", "né"),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        (None, "null"),
        (Place(title="P"), '{"title":"P","x":0.0}'),
        (np.float32(1.5), "1.5"),
        ([np.arange(2), {threading}], f'[[0,1],["{threading}"]]'),
    ]:

        async def give(result: Any = result) -> Any:
            return result

        assert await tool(give).run({}) == text


async def test_plain_functions_run_off_the_loop() -> None:
    def where() -> str:
        return threading.current_thread().name

    assert await tool(where).run({}) != threading.current_thread().name


async def test_a_plain_function_may_return_an_awaitable() -> None:
    def later() -> Any:
        return asyncio.sleep(0, "done")

    assert await tool(later).run({}) == "done"


@pytest.mark.parametrize("error", [StopIteration("no more"), SystemExit(1)])
async def test_what_asyncio_cannot_carry_out_of_a_thread_is_an_ordinary_error(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__):
        await tool(fail).run({})


async def test_a_thread_that_never_returns_does_not_hold_up_the_exit_of_the_interpreter() -> None:
    """I7."""
    program = """
import asyncio, threading
from areal.agents.tools import tool
async def main():
    try:
        async with asyncio.timeout(0.05):
            await tool(lambda: threading.Event().wait()).run({})
    except TimeoutError:
        print("gone on")
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(30):
        out, _ = await process.communicate()
    assert (process.returncode, out) == (0, b"gone on\n")
