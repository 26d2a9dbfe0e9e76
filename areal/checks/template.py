"""Checks that messages become the right tokens: the chat template, and the tool-call parser."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import orjson

from areal.agents.template import Template
from areal.agents.tools import parse_calls, tool
from areal.agents.transcript import Transcript
from areal.checks.findings import Level, Result
from areal.config import Config
from areal.errors import ConfigError, ForkRefused
from areal.types import Completion, Message


@tool
def weather(city: str, details: dict[str, Any] | None = None) -> str:
    """Tell the weather of a city.

    Args:
        city: Name of the city.
        details: Other information wanted.
    """
    return "sunny"


TOOLS = {weather.name: weather}
_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}


def _says(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


PLAIN: list[Message] = [
    _says("user", "Where is Paris?"),
    _says("assistant", "In France."),
    _says("user", "And where is Rome?"),
    _says("assistant", "In Italy."),
    _says("user", "Which of the two is larger?"),
]
WITH_TOOLS: list[Message] = [
    _says("user", "What is the weather in Paris?"),
    _says("assistant", "I will look.", tool_calls=[_CALL]),
    _says("tool", "Sunny, 21 degrees.", name="weather"),
    _says("assistant", "It is sunny."),
    _says("user", "Is that warm?"),
]


class _Stop(Exception):
    """(level, message, remedy): the conversation cannot be continued."""


def template(tokenizer: Any, args: Mapping[str, Any] | None = None) -> Iterator[Result]:
    """Whether a Transcript of a conversation has the tokens of a render of the whole conversation (I5).

    Thinking may differ, because templates add and strip it in earlier turns.
    """
    shared = Template(tokenizer, dict(args or {}))
    render = partial(tokenizer.apply_chat_template, tokenize=False, **(args or {}))
    good = True
    played = [("", PLAIN, False)]
    if "tool" in tokenizer.chat_template:  # else it does not support tools
        played.append((" with tools", WITH_TOOLS, True))
    for name, conversation, tools in played:
        try:
            seams = asyncio.run(_follow(tokenizer, shared, render, conversation, tools))
            if seams:
                yield (
                    "warning",
                    f"at {seams} turns of a conversation{name} the tokens differ from those of a render of the whole "
                    "conversation with the same text: a server that renders whole conversations gives the model other "
                    "tokens",
                    "start and end turns with special tokens in the chat template",
                )
            good = good and not seams
        except _Stop as stop:
            yield stop.args
            good = False
        except ForkRefused as error:
            level: Level = "warning" if tools else "problem"
            yield level, f"a conversation{name} cannot be continued: {error}", "fix the chat template, or avoid this"
            good = False
    if good:
        yield f"earlier turns do not change{', with tools too' if len(played) > 1 else ''}"


async def _follow(
    tokenizer: Any, template: Template, render: Callable[..., str], conversation: list[Message], tools: bool
) -> int:
    """Feed a conversation to a Transcript, with answers as the template would write them. Returns the number of prompts
    with other ids for the same text. Raises _Stop for other text, ForkRefused if the template cannot render."""
    transcript = Transcript(template)
    schemas = [each.schema for each in TOOLS.values()] if tools else None
    known = TOOLS if tools else {}
    said: list[Message] = []
    before, seams = "", 0
    for message in [*conversation, None]:
        if message is not None and message["role"] != "assistant":
            said.append(message if message["role"] != "tool" else {**message, "tool_call_id": _call_id(said)})
            continue
        prompt = await transcript.prompt(said, schemas)
        whole = await template.start(said, schemas)
        own_text, whole_text = await template.text(prompt.ids), await template.text(whole)
        _compare(_unthought(before), _unthought(own_text), _unthought(whole_text), bool(schemas))
        seams += own_text == whole_text and not np.array_equal(prompt.ids, whole)
        if message is None:
            break
        answer = _as_written(render, said, message, own_text, schemas)
        ids = np.array(tokenizer.encode(answer, add_special_tokens=False), np.int32)
        zeros = np.zeros(len(ids), np.int32)
        completion = Completion(prompt.ids, ids, zeros.astype(np.float32), zeros, "length")
        reply = await transcript.reply(prompt, completion, known, ())
        if len(reply.get("tool_calls", ())) != len(message.get("tool_calls", ())):
            raise _Stop(
                "warning",
                f"it writes a tool call as {answer!r}, which areal cannot parse: this model's calls are never run",
                "use a model with Hermes/Qwen tool calls, <tool_call>{JSON}</tool_call>, or agents without tools",
            )
        said.append(reply)
        before = own_text + answer
    return seams


def _call_id(said: Sequence[Message]) -> str:
    return said[-1]["tool_calls"][0]["id"]


def _as_written(
    render: Callable[..., str],
    said: Sequence[Message],
    answer: Message,
    prompt: str,
    tools: list[dict[str, Any]] | None,
) -> str:
    """The answer as the model would sample it: as the template writes it, without the end of the turn."""
    start = "</think>\n\n" if prompt.rstrip().endswith("<think>") else ""
    user, stand_in = _says("user", "."), _says("assistant", "stand5in")
    closing = render([user, stand_in], tools=tools).partition("stand5in")[2]
    asked = [_plain(message) for message in said]
    head, text = render(asked, tools=tools, add_generation_prompt=True), render([*asked, answer], tools=tools)
    if start or not text.startswith(head):
        text = head + start + answer["content"] + text.rpartition(answer["content"])[2]
    return text[len(head) :].removesuffix(closing)


def _plain(message: Message) -> Message:
    """Arguments of tool calls as objects, which templates expect."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    function = {**calls[0]["function"], "arguments": orjson.loads(calls[0]["function"]["arguments"])}
    return {**message, "tool_calls": [{**calls[0], "function": function}]}


def _unthought(text: str) -> str:
    return re.sub(r"<think>.*?</think>\s*", "", text, flags=re.DOTALL)


def _compare(before: str, own: str, whole: str, tools: bool) -> None:
    if own == whole:
        return
    at = next((i for i, (a, b) in enumerate(zip(own, whole, strict=False)) if a != b), min(len(own), len(whole)))
    shown = f"{own[max(0, at - 20) : at + 40]!r} becomes {whole[max(0, at - 20) : at + 40]!r}"
    where = " of a conversation with tools" if tools else ""
    if at < len(before):
        raise _Stop(
            "problem",
            f"it changes earlier messages{where} when later ones are added: {shown}. Training keeps the original "
            "tokens, while a server that renders whole conversations shows the model the changed ones, and an agent "
            "that copies from such a render forks at every turn",
            "remove from the chat template what depends on later messages",
        )
    raise _Stop(
        "warning",
        f"new messages{where} differ after recorded tokens from a render of the whole conversation: {shown}",
        "remove from the chat template what depends on the number of messages",
    )


CALL_TEXTS = (
    'I will look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {"city": "x", "details": {"a": {"b": [1, {"c": null}]}}}}'
    "\n</tool_call>",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "\\u6771\\u4eac 東京 \\ud83d\\ude00 é"}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {"city": "a \\"</tool_call>\\" b"}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {"city": "two\\nlines"}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}',
    '<tool_call>\n{"name": "no such tool", "arguments": {}}\n</tool_call>',
    "<tool_call>\nweather(Paris)\n</tool_call>\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "<tool_call>\n[]\n</tool_call>",
    'No call: {"name": "weather", "arguments": {"city": "Paris"}}',
)
"""Complete, several, nested, escaped, truncated, malformed and no calls. Both parsers must agree on the runnable ones.
(areal reports the others to the model as errors; SGLang drops them.)"""


def parser_of(config: Config) -> str:
    """The name of the servers' tool parser: from servers.args, else the one for Qwen, whose format areal parses."""
    words = [part for word in config.servers.args for part in word.split("=", 1)]
    return next((b for a, b in itertools.pairwise(words) if a == "--tool-call-parser"), "qwen25")


def parser(name: str) -> Iterator[Result]:
    """Whether SGLang's parser `name` and areal parse the same calls. Imports SGLang, which takes seconds."""
    from sglang.srt.entrypoints.openai.protocol import Tool as ServerTool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    if name not in FunctionCallParser.ToolCallParserEnum:
        raise ConfigError(f"servers.args: --tool-call-parser {name} is not one of SGLang's parsers")
    tools = [ServerTool(**each.schema) for each in TOOLS.values()]

    def read_there(text: str) -> tuple[str, list[tuple[str, Any]]]:
        content, calls = FunctionCallParser(tools, name).parse_non_stream(text)
        return content, [(call.name, orjson.loads(call.parameters)) for call in calls]

    def read_here(text: str) -> tuple[str, list[tuple[str, Any]]]:
        content, calls = parse_calls(text, TOOLS)
        good = [call["function"] for call in calls if "error" not in call]
        return content, [(each["name"], orjson.loads(each["arguments"])) for each in good]

    logger = logging.getLogger("sglang.srt.function_call")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns about malformed calls
    try:
        wrong = [(text, here, there) for text in CALL_TEXTS if (here := read_here(text)) != (there := read_there(text))]
    finally:
        logger.setLevel(level)
    for text, here, there in wrong[:1]:
        yield (
            "problem",
            f"SGLang's parser {name!r} and areal disagree on {len(wrong)} of {len(CALL_TEXTS)} texts; the first, "
            f"{text!r}, is {there} for SGLang and {here} for areal",
            "areal parses Hermes/Qwen tool calls: serve this model with --tool-call-parser qwen25, or train without "
            "tools",
        )
    if not wrong:
        yield f"SGLang's {name} and areal agree on {len(CALL_TEXTS)} texts"
