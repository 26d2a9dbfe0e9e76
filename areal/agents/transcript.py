"""Messages <-> token ids, exactly (I5).

A transcript is a tree of turns. A turn holds the ids added before a model call and the ids that the call sampled; the
path from a root to a turn, concatenated, is exactly what the server saw and sampled. A new call continues the longest
recorded path with which its messages (or ids) start; recorded messages are never rendered or tokenised again. Leaves
are trajectories.

Calls that continue the same turn are branches (best of n, or a context reset to an earlier turn). A call that changes a
sampled turn, or the messages or tools before it, is a fork: it starts with a new render.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal.agents.template import Template
from areal.agents.tools import Tool, parse_calls
from areal.types import NOT_SAMPLED, Completion, Floats, Ints, Message, Trajectory


@dataclass(slots=True, eq=False)
class Prompt:
    """The prompt of a model call: all `ids` [P], and the last of them, `new`, which are not recorded yet."""

    ids: Ints
    new: Ints
    parent: Turn | None
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None


@dataclass(slots=True, eq=False)
class Turn:
    """One model call: the prompt since the parent's turn, and what was sampled."""

    parent: Turn | None
    prompt: Ints
    sampled: Ints
    logprobs: Floats
    versions: Ints
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    reply: Message | None = None
    handed_out: Message | None = None  # the dict object that the agent got, to distinguish branches with equal texts
    children: list[Turn] = field(default_factory=list)

    def path(self) -> list[Turn]:
        """From the root to this turn."""
        turns = [self]
        while (turn := turns[-1].parent) is not None:
            turns.append(turn)
        return turns[::-1]


class Transcript:
    """All turns of one episode. `template` is shared by all episodes; None allows `extend_ids` only."""

    __slots__ = ("_calls", "_chats", "_sequences", "_template", "forks")

    def __init__(self, template: Template | None) -> None:
        self._template = template
        self._chats: list[Turn] = []
        self._sequences: list[Turn] = []
        self._calls = 0
        self.forks = 0

    async def prompt(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> Prompt:
        """The prompt of a conversation, including the generation prompt. Raises ForkRefused."""
        assert self._template is not None
        parent, known = self._longest(messages, tools)
        new = [snapshot(message) for message in messages[known:]]
        if self._retells(parent, new):
            self.forks += 1
        if parent is None:
            ids = await self._template.start(new, tools)
            return Prompt(ids, ids, None, new, tools)
        last = int(parent.sampled[-1]) if len(parent.sampled) else -1
        ids = await self._template.extend(last, new, tools)
        return Prompt(np.concatenate([*_ids(parent), ids]), ids, parent, new, tools)

    async def reply(
        self, prompt: Prompt, completion: Completion, tools: dict[str, Tool], stops: Collection[int]
    ) -> Message:
        """Record a completion of `prompt`; returns the assistant's message, with `reasoning_content` and `tool_calls`
        if any. stops: additional ids that end an answer; neither these nor the end of turn are in the content."""
        assert self._template is not None
        ids = completion.output_ids
        if completion.finish == "stop" and len(ids) and (ids[-1] in self._template.special_ids or ids[-1] in stops):
            ids = ids[:-1]
        reasoning, content = self._template.split_thinking(await self._template.text(ids))
        calls: list[dict[str, Any]] = []
        if tools:
            content, calls = parse_calls(content, tools)
        message: Message = {"role": "assistant", "content": content}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [{"id": self._call_id(), **call} for call in calls]
        turn = self._record(prompt, completion, self._chats)
        turn.reply, turn.handed_out = snapshot(message), message
        return message

    def extend_ids(self, ids: Ints) -> Prompt:
        """A prompt given as ids, which continues the longest recorded sequence with which it starts."""
        parent, known = None, 0
        stack = [(turn, 0) for turn in self._sequences]
        while stack:
            turn, start = stack.pop()
            middle = start + len(turn.prompt)
            end = middle + len(turn.sampled)
            if (
                end <= len(ids)
                and np.array_equal(ids[start:middle], turn.prompt)
                and np.array_equal(ids[middle:end], turn.sampled)
            ):
                if end > known or parent is None:
                    parent, known = turn, end
                stack += [(child, end) for child in turn.children]
        return Prompt(ids, ids[known:], parent)

    def record_ids(self, prompt: Prompt, completion: Completion) -> None:
        """Record a completion of a prompt that `extend_ids` made."""
        self._record(prompt, completion, self._sequences)

    def trajectories(self) -> tuple[Trajectory, ...]:
        """One per leaf, in the order of the calls (empty answers last). A sampled token shared by several leaves is in
        the loss of the first only; a leaf without loss tokens of its own is omitted."""
        counted: set[Turn] = set()
        leaves = [turn for turn in _turns([*self._chats, *self._sequences]) if not turn.children]
        leaves.sort(key=lambda turn: not len(turn.sampled))  # the path of an empty one is mostly shared
        trajectories = [_trajectory(leaf, counted) for leaf in leaves]
        return tuple(trajectory for trajectory in trajectories if len(trajectory.ids))

    def _record(self, prompt: Prompt, completion: Completion, roots: list[Turn]) -> Turn:
        sampled = completion.output_ids, completion.logprobs, completion.versions
        turn = Turn(prompt.parent, prompt.new, *sampled, prompt.messages, prompt.tools)
        (roots if prompt.parent is None else prompt.parent.children).append(turn)
        return turn

    def _longest(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> tuple[Turn | None, int]:
        """The turn that ends the longest recorded prefix of `messages`, and the length of that prefix."""
        best, known = None, 0
        stack = [(turn, 0) for turn in self._chats if turn.tools == tools]
        while stack:
            turn, start = stack.pop()
            at = start + len(turn.messages)
            if at >= len(messages) or turn.messages != messages[start:at] or not _same_reply(messages[at], turn.reply):
                continue
            if at >= known or messages[at] is turn.handed_out:
                best, known = turn, at + 1
            stack += [(child, at + 1) for child in turn.children]  # children have their root's tools
        return best, known

    def _retells(self, parent: Turn | None, new: list[Message]) -> bool:
        """Whether `new`, added after `parent`, changes a sampled turn or what precedes it."""
        said = [message for message in new if message.get("role") == "assistant"]
        if not said:
            return False
        for turn in self._chats if parent is None else parent.children:
            at = len(turn.messages)
            if at < len(new) and turn.messages == new[:at] and new[at].get("role") == "assistant":
                return True
        return any(_same_reply(message, turn.reply) for message in said for turn in _turns(self._chats))

    def _call_id(self) -> str:
        self._calls += 1
        return f"call{self._calls:05d}"  # nine letters and digits, as the strictest templates require


def _same_reply(message: Message, reply: Message | None) -> bool:
    """Whether a caller's message is the sampled one. The reasoning may be missing, since templates drop it, too."""
    if reply is None or message.get("role") != "assistant" or (message.get("content") or "") != reply["content"]:
        return False
    reasoning = message.get("reasoning_content")
    if reasoning is not None and reasoning != reply.get("reasoning_content", ""):
        return False
    calls, own = message.get("tool_calls") or (), reply.get("tool_calls", ())
    return len(calls) == len(own) and all(a.get("function") == b["function"] for a, b in zip(calls, own, strict=True))


def snapshot(value: Any) -> Any:
    """A deep copy of a message, so that a caller's later changes are noticed."""
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(snapshot, value))
    return value


def _turns(roots: list[Turn]) -> Iterator[Turn]:
    stack = roots[::-1]
    while stack:
        yield (turn := stack.pop())
        stack += turn.children[::-1]


def _ids(turn: Turn) -> list[Ints]:
    return [piece for step in turn.path() for piece in (step.prompt, step.sampled)]


def _trajectory(leaf: Turn, counted: set[Turn]) -> Trajectory:
    """The path to a leaf, up to its last loss token. `counted`: turns that are already in a loss."""
    path = leaf.path()
    while path and (path[-1] in counted or not len(path[-1].sampled)):
        path.pop()
    length = sum(len(turn.prompt) + len(turn.sampled) for turn in path)
    ids = np.empty(length, dtype=np.int32)
    mask = np.zeros(length, dtype=np.bool_)
    logprobs = np.zeros(length, dtype=np.float32)
    versions = np.empty(length, dtype=np.int32)
    start = 0
    for turn in path:
        middle = start + len(turn.prompt)
        end = middle + len(turn.sampled)
        ids[start:middle] = turn.prompt
        versions[start:middle] = NOT_SAMPLED
        ids[middle:end] = turn.sampled
        logprobs[middle:end] = turn.logprobs
        versions[middle:end] = turn.versions
        mask[middle:end] = turn not in counted
        counted.add(turn)
        start = end
    return Trajectory(ids, mask, logprobs, versions)
