"""What can be wrong before a run, as far as it shows without a server and a rank: template, data, machine.

    for finding in short(config): print(finding)

A check is a generator of findings. What it raises becomes one too: an ArealError is a problem, anything else a warning,
so that a fault of a check never keeps a run from its start.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from itertools import islice
from typing import Any, Literal

import numpy as np
import orjson

from areal import machine
from areal.agents.template import Template
from areal.agents.tools import parse_calls, tool
from areal.agents.transcript import Transcript
from areal.config import Config
from areal.data import evaluation_tasks, read
from areal.errors import ArealError, ConfigError, ForkRefused
from areal.types import Completion, Message, Task
from areal.workers.local import load_tokenizer, model_folder
from areal.workers.rollout.client import UNUSABLE_TOKENS
from areal.workers.rollout.launcher import check_model
from areal.workers.trainer.architecture import Architecture

log = logging.getLogger("areal")

Level = Literal["ok", "warning", "problem"]

SCANNED_ROWS = 50_000
"""Rows of a data set that are looked at; ids are compared over all of them."""
TOKENISED_ROWS = 64
"""Longest prompts, by bytes, of which the tokens are counted."""
PROMPT_KEYS = ("messages", "prompt", "question", "problem", "instruction", "query", "input", "text")
"""Where a row has its prompt: the first of these that is there."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. level: `ok`, `warning` (the run works, worse than it could) or `problem` (it does not, or
    does something else than it seems to). remedy: what to do; "" for ok."""

    check: str
    level: Level
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        """One line."""
        return f"{self.level:8} {self.check}: {self.message}" + (f"; {self.remedy}" if self.remedy else "")


Result = tuple[Level, str, str] | str
"""What a check yields: (level, message, remedy), or the message of an ok."""


def collect(check: str, results: Iterable[Result]) -> list[Finding]:
    """The findings of a check."""
    findings: list[Finding] = []
    try:
        for result in results:
            findings.append(Finding(check, *(("ok", result) if isinstance(result, str) else result)))
    except ArealError as error:  # areal's errors name the remedy themselves
        findings.append(Finding(check, "problem", str(error)))
    except Exception as error:
        log.debug("the check %r failed", check, exc_info=True)
        findings.append(Finding(check, "warning", f"could not be checked ({type(error).__name__}: {error})"))
    return findings


def short(config: Config, tasks: Sequence[Task] | None = None) -> list[Finding]:
    """The checks that start no process. tasks: those that the program passes; None takes `data.train`.

    Blocks, for the reading of the data and of the tokenizer: call it in a thread where an event loop is running.
    """
    findings = collect("placement", machine.placement(config)) + collect("ports", machine.ports(config))
    findings += collect("open files", machine.open_files(config))
    tokenizer, architecture = None, None
    try:
        folder = model_folder(config.model.path)
        check_model(folder, config.model.context_length)
        architecture = Architecture.read(folder)
        tokenizer = load_tokenizer(folder)
    except ConfigError as error:
        findings.append(Finding("model", "problem", str(error)))
    if architecture is not None:
        findings += collect("disk", machine.disk(config, architecture))
        findings += collect("memory", machine.memory(config, architecture))
    if tokenizer is not None:
        findings += collect("template", check_template(tokenizer, config.model.template_args))
    context = config.model.context_length or (architecture.context if architecture else 0)
    return findings + collect("data", check_data(config, tasks, tokenizer, context - UNUSABLE_TOKENS))


def before_run(config: Config) -> None:
    """`short` at the start of a run: logs the warnings, raises a ConfigError of all problems. Blocks."""
    findings = short(config)
    for finding in findings:
        if finding.level == "warning":
            log.warning("%s", str(finding).removeprefix("warning").strip())
    if problems := [str(each).removeprefix("problem").strip() for each in findings if each.level == "problem"]:
        raise ConfigError("\n".join(problems))


# -- the chat template


@tool
def weather(city: str, details: dict[str, Any] | None = None) -> str:
    """Tell the weather of a city.

    Args:
        city: Name of the city.
        details: What else is wanted.
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
    """(level, message, remedy): the conversation cannot be followed any further."""


def check_template(tokenizer: Any, args: Mapping[str, Any] | None = None) -> Iterator[Result]:
    """Whether what a Transcript keeps of a conversation is what a whole render of it would be (I5).

    Thinking may differ: templates add and strip it in earlier turns.
    """
    template = Template(tokenizer, dict(args or {}))
    render = partial(tokenizer.apply_chat_template, tokenize=False, **(args or {}))
    good = True
    for name, conversation, tools in (("", PLAIN, False), (" with tools", WITH_TOOLS, True)):
        try:
            seams = asyncio.run(_follow(tokenizer, template, render, conversation, tools))
            if seams:
                yield (
                    "warning",
                    f"at the {seams} turns of a conversation{name} the tokens are others than those of a whole render, "
                    "for the same text: a server that renders whole conversations gives the model other tokens",
                    "let turns begin and end with special tokens in the chat template",
                )
            good = good and not seams
        except _Stop as stop:
            yield stop.args  # type: ignore[misc]
            good = False
        except ForkRefused as error:
            level: Level = "warning" if tools else "problem"
            yield level, f"a conversation{name} cannot go on: {error}", "mend the chat template, or do without this"
            good = False
    if good:
        yield "a conversation of several turns and one with tools stay what they are as they grow"


async def _follow(
    tokenizer: Any, template: Template, render: Callable[..., str], conversation: list[Message], tools: bool
) -> int:
    """Play a conversation into a Transcript, the answers as the template itself would write them. Returns the number of
    prompts with other ids for the same text; raises _Stop for other text, ForkRefused for what cannot be rendered."""
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
                f"it writes a tool call as {answer!r}, which areal does not read: this model's calls are never run",
                "use a model that calls tools in Qwen's form, <tool_call>{JSON}</tool_call>, or agents without tools",
            )
        said.append(reply)
        before = own_text + answer
    return seams


def _call_id(said: Sequence[Message]) -> str:
    return said[-1]["tool_calls"][0]["id"]


def _as_written(
    render: Callable[..., str], said: Sequence[Message], answer: Message, prompt: str, tools: list[dict[str, Any]] | None
) -> str:
    """What the model would sample for an answer: as the template writes it, without the end of the turn."""
    start = "</think>\n\n" if prompt.rstrip().endswith("<think>") else ""
    user, stand_in = _says("user", "."), _says("assistant", "stand5in")
    closing = render([user, stand_in], tools=tools).partition("stand5in")[2]
    asked = [_plain(message) for message in said]
    head, text = render(asked, tools=tools, add_generation_prompt=True), render([*asked, answer], tools=tools)
    if start or not text.startswith(head):
        text = head + start + answer["content"] + text.rpartition(answer["content"])[2]
    return text[len(head) :].removesuffix(closing)


def _plain(message: Message) -> Message:
    """Arguments of tool calls as objects: what templates are written for."""
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
    shown = f"where {own[max(0, at - 20) : at + 40]!r} was said it has {whole[max(0, at - 20) : at + 40]!r}"
    where = " of a conversation with tools" if tools else ""
    if at < len(before):
        raise _Stop(
            "problem",
            f"it changes earlier messages{where} when later ones come: {shown}. Training keeps what was said; a server "
            "that renders whole conversations shows the model something else, and an agent that copies from such a "
            "render forks at every turn",
            "take out of the chat template what depends on later messages",
        )
    raise _Stop(
        "warning",
        f"new messages{where} look otherwise after recorded tokens than in a whole render: {shown}",
        "take out of the chat template what depends on how many messages there are",
    )


# -- the tool parser

CALL_TEXTS = (
    'I will look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {"city": "x", "details": {"a": {"b": [1, {"c": null}]}}}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {"city": "\\u6771\\u4eac 東京 \\ud83d\\ude00 é"}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {"city": "a \\"</tool_call>\\" b"}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {"city": "two\\nlines"}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}',
    '<tool_call>\n{"name": "no such tool", "arguments": {}}\n</tool_call>',
    '<tool_call>\nweather(Paris)\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "<tool_call>\n[]\n</tool_call>",
    'No call: {"name": "weather", "arguments": {"city": "Paris"}}',
)
"""Whole, several, nested, with escapes, cut off, malformed and none: of each, what can be run is what both must agree
on. (What cannot be run areal hands to the model as an error; SGLang drops it.)"""


def parser_of(config: Config) -> str:
    """The name of the servers' tool parser: of servers.args, else that of Qwen's form, which is areal's."""
    words = [part for word in config.servers.args for part in word.split("=", 1)]
    return next((b for a, b in zip(words, words[1:], strict=False) if a == "--tool-call-parser"), "qwen25")


def check_parser(name: str) -> Iterator[Result]:
    """Whether SGLang's parser `name` and areal read the same calls. Imports SGLang, which takes seconds."""
    from sglang.srt.entrypoints.openai.protocol import Tool as ServerTool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    if name not in FunctionCallParser.ToolCallParserEnum:
        raise ConfigError(f"servers.args: --tool-call-parser {name} is none of SGLang's parsers")
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
    logger.setLevel(logging.ERROR)  # it warns of the malformed ones
    try:
        wrong = [(text, here, there) for text in CALL_TEXTS if (here := read_here(text)) != (there := read_there(text))]
    finally:
        logger.setLevel(level)
    for text, here, there in wrong[:1]:
        yield (
            "problem",
            f"SGLang's parser {name!r} reads {len(wrong)} of {len(CALL_TEXTS)} texts otherwise than areal, the first "
            f"{text!r} as {there}, not {here}",
            "areal reads calls in Qwen's form: serve this model with --tool-call-parser qwen25, or train without tools",
        )
    if not wrong:
        yield f"SGLang's {name} and areal read {len(CALL_TEXTS)} texts alike"


# -- the data


def check_data(config: Config, tasks: Sequence[Task] | None, tokenizer: Any | None, room: int) -> Iterator[Result]:
    """Whether the rows can be trained on. room: tokens that a prompt may have at most; needs a `tokenizer`."""
    if tasks is None and not config.data.train:
        yield "the program passes its own tasks"
        return
    rows = read(config.data.train) if tasks is None else tasks
    evaluation: Sequence[Task] = []
    held_out: set[str] = set()
    if config.data.evaluation:
        evaluation = read(config.data.evaluation)
    elif config.data.evaluation_size and tasks is None:
        evaluation = evaluation_tasks(config)
        held_out = {row["id"] for row in evaluation}
    seen = [row for row in islice(rows, SCANNED_ROWS) if row["id"] not in held_out]
    bad = [*_keys(seen), *_prompts(seen, tokenizer, room), *_leaks(seen, evaluation)]
    if (count := len(rows) - len(held_out)) < config.train.batch_groups:
        bad.append(
            (
                "warning",
                f"{count} tasks are fewer than a batch, train.batch_groups={config.train.batch_groups}: each step trains "
                "several times on one task",
                "lower train.batch_groups, or add tasks",
            )
        )
    yield from bad
    if not bad:
        yield f"{count} tasks to train on, {len(evaluation)} to evaluate on"


def _keys(rows: Sequence[Task]) -> Iterator[Result]:
    kinds = Counter(frozenset(row) for row in rows)
    usual, number = kinds.most_common(1)[0]
    if other := next((row for row in rows if frozenset(row) != usual), None):
        yield (
            "warning",
            f"{len(rows) - number} of {len(rows)} rows have other keys than most, such as {other['id']!r}: "
            f"{', '.join(sorted(usual ^ frozenset(other)))}",
            "give all rows the same keys",
        )


def _prompts(rows: Sequence[Task], tokenizer: Any | None, room: int) -> Iterator[Result]:
    texts = {row["id"]: text for row in rows if (text := _prompt(row)) is not None}
    if empty := [name for name, text in texts.items() if not text.strip()]:
        yield "warning", f"{len(empty)} rows have an empty prompt, such as {empty[0]!r}", "take them out"
    if tokenizer is None:
        return
    # A token is a byte at least: most rows need no tokenizer.
    sizes = {name: size for name, text in texts.items() if (size := len(text.encode(errors="replace"))) > room}
    longest = nlargest(TOKENISED_ROWS, sizes, key=sizes.__getitem__)
    counts = {name: len(tokenizer.encode(texts[name], add_special_tokens=False)) for name in longest}
    if huge := {name: count for name, count in counts.items() if count > room}:
        name = max(huge, key=huge.__getitem__)
        level: Level = "problem" if len(huge) == len(rows) else "warning"
        least = "at least " if len(huge) == TOKENISED_ROWS else ""
        yield (
            level,
            f"{least}{len(huge)} prompts leave no room for an answer in the model's context; the longest, {name!r}, has "
            f"{huge[name]} tokens, {room} fit: such episodes all fail",
            "take them out, or raise model.context_length",
        )


def _prompt(row: Task) -> str | None:
    value = next((row[key] for key in PROMPT_KEYS if key in row), None)
    if isinstance(value, list):
        value = "\n".join(str(each.get("content") or "") for each in value if isinstance(each, Mapping))
    return value if isinstance(value, str) else None


def _leaks(rows: Sequence[Task], evaluation: Sequence[Task]) -> Iterator[Result]:
    known = {_content(row): row["id"] for row in islice(evaluation, SCANNED_ROWS)}
    leaked = [(row["id"], known[content]) for row in rows if known and (content := _content(row)) in known]
    if leaked:
        yield (
            "warning",
            f"{len(leaked)} evaluation rows are among the training rows, such as {leaked[0][1]!r} (training row "
            f"{leaked[0][0]!r}): success would be measured on what was trained",
            "take them out of one of the two",
        )


def _content(row: Task) -> bytes:
    bare = {key: value for key, value in row.items() if key != "id"}
    return orjson.dumps(bare, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY)
