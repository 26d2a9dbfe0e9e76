"""The handle that an agent gets: model calls, tools, metrics, random numbers.

    async def agent(episode: Episode, task: Task) -> float:
        messages = [{"role": "user", "content": task["question"]}]
        reply = await episode.chat(messages, tools=[search])
        messages += [reply, *await episode.run_tools(reply)]

An episode has no timer and does not poll: while it waits, it costs only memory. Calls of one episode may run
concurrently (asyncio.gather). The caller of the agent enforces the deadline.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import numbers
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol
from zlib import crc32

import numpy as np

from areal.agents.journal import Journal, model_key, tool_key
from areal.agents.template import Template
from areal.agents.tools import MalformedCall, Tool, read_arguments, tool
from areal.agents.transcript import Transcript
from areal.deadlines import DEADLINES, Deadlines
from areal.errors import ArealError, ContextOverflow, EpisodeError, RewardError
from areal.types import Completion, EpisodeRecord, Ints, Message, Sampling


class Generate(Protocol):
    """The fleet's model call. `key` names the episode, whose calls stay on the server that caches their prefix."""

    async def __call__(self, input_ids: Ints, sampling: Sampling, *, key: str) -> Completion: ...


class Episode:
    """One run of an agent on one task.

    template: None if the agent only uses token ids. context_length: maximum tokens of prompt and answer. agent: its
    name, for error messages. journal: records calls, so that they can be recalled after a crash.
    """

    def __init__(
        self,
        *,
        generate: Generate,
        template: Template | None,
        sampling: Sampling,
        context_length: int,
        tool_timeout_s: float = 60.0,
        group: int = 0,
        member: int = 0,
        task_id: str = "",
        seed: int = 0,
        agent: str = "agent",
        journal: Journal | None = None,
        deadlines: Deadlines = DEADLINES,
    ) -> None:
        self._deadlines = deadlines
        self.group = group
        self.member = member
        self.task_id = task_id
        self.turns = 0
        self.metrics: dict[str, float] = {}
        self.tool_timeout_s = tool_timeout_s
        self._generate = generate
        self._template = template
        self._sampling = sampling
        self._context_length = context_length
        self._agent = agent
        self._journal = journal
        self._seed = f"{seed}/{group}/{member}"
        self.key = f"{group}/{member}"
        self._rng: random.Random | None = None
        self._transcript = Transcript(template)
        self._tools: dict[Any, Tool] = {}
        self._tools_of_call: dict[str, dict[str, Tool]] = {}
        self._waits: list[tuple[str, float]] = []
        self._since = asyncio.get_running_loop().time()
        self._left_behind: set[asyncio.Task[str]] = set()
        self._calls = 0
        self.tokens = 0
        """Number of tokens sampled so far."""
        self._finished = False
        self._abandoned = False

    @property
    def forks(self) -> int:
        """Number of times that the agent changed an earlier turn."""
        return self._transcript.forks

    @property
    def rng(self) -> random.Random:
        """Random numbers that depend only on the run's seed, the group and the member."""
        if self._rng is None:
            self._rng = random.Random(self._seed)
        return self._rng

    @property
    def awaits(self) -> tuple[str, float]:
        """(what, since): what the agent has been awaiting for the longest time, and since when (loop time)."""
        return self._waits[0] if self._waits else ("its own code", self._since)

    @property
    def state(self) -> str:
        """`awaits` as text."""
        what, since = self.awaits
        seconds = asyncio.get_running_loop().time() - since
        turn = f"task {self.task_id}, turn {self.turns + 1}"
        return f"episode {self.group}.{self.member} ({turn}) awaits {what}, for {seconds:.1f} s"

    def record(self, name: str, value: float) -> None:
        """Record a metric of this episode, replacing an earlier value of the same name."""
        self.metrics[name] = float(value)

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool | Callable[..., Any]] | None = None,
        max_new_tokens: int | None = None,
    ) -> Message:
        """The model's answer to a conversation: {"role", "content"}, with "reasoning_content" if it thought and
        "tool_calls" if it called `tools`. A malformed call has an "error".

        Append the answer to `messages` and continue: sampled tokens are kept exactly (I5). max_new_tokens: overrides
        sampling.max_new_tokens; both are limited by the room left in the context. Raises ContextOverflow if there is
        none, ForkRefused if the template cannot render the messages.
        """
        if self._template is None:
            raise EpisodeError("episode.chat needs a chat template; this episode has only generate(input_ids)")
        if not messages:
            raise EpisodeError("episode.chat got no messages; it needs at least one")
        known = self._known(tools or ())
        prompt = await self._transcript.prompt(list(messages), [each.schema for each in known.values()] or None)
        completion = await self._complete(prompt.ids, max_new_tokens)
        reply = await self._transcript.reply(prompt, completion, known, self._sampling.stop_token_ids)
        for call in reply.get("tool_calls", ()):
            self._tools_of_call[call["id"]] = known
        return reply

    async def generate(self, input_ids: Sequence[int] | Ints, max_new_tokens: int | None = None) -> Completion:
        """Sample after `input_ids` [P]. Ids that start with an earlier prompt and its answer continue that sequence;
        others start a new one. Raises ContextOverflow."""
        given = np.asarray(input_ids)
        ids = given.astype(np.int32)  # a copy, because the caller may change its array later
        if ids.ndim != 1 or not len(ids) or (given.dtype != np.int32 and not np.array_equal(ids, given)):
            raise EpisodeError(f"episode.generate needs a flat, non-empty list of token ids, not {input_ids!r}")
        prompt = self._transcript.extend_ids(ids)
        completion = await self._complete(ids, max_new_tokens)
        self._transcript.record_ids(prompt, completion)
        return completion

    async def run_tools(self, reply: Message) -> list[Message]:
        """Run the tool calls of a reply concurrently; returns a message {"role": "tool"} for each, in order.

        If a call is malformed, or the tool raises or times out after `tool_timeout_s`, its message has the error text.
        Only areal's own errors are raised.
        """
        calls = reply.get("tool_calls") or ()
        journal = self._journal
        recorded = [journal.recall(tool_key(call)) if journal else None for call in calls]
        results = [content if isinstance(content, str) else None for content in recorded]
        todo = [call for call, content in zip(calls, results, strict=True) if content is None]
        if todo:
            new = iter(await self._results(todo))
            results = [next(new) if content is None else content for content in results]
        return [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": content}
            for call, content in zip(calls, results, strict=True)
        ]

    async def _results(self, calls: Sequence[dict[str, Any]]) -> list[str]:
        """Run tool calls concurrently; returns the text for the model of each."""
        tasks = [asyncio.create_task(self._run_tool(call), name=f"tool {call['function']['name']}") for call in calls]
        wait = self._begin_wait("tool " + ", ".join(call["function"]["name"] or "?" for call in calls))
        try:
            _, late = await asyncio.wait(tasks, timeout=self.tool_timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            if late:
                self._cancel(late)
                await asyncio.wait(late, timeout=self._deadlines.tool)
        finally:
            self._end_wait(wait)
            self._cancel(task for task in tasks if not task.done())
        for call, task in zip(calls, tasks, strict=True):
            if task not in late and task.cancelled():  # not by us; must not look like a cancellation of the episode
                raise EpisodeError(f"{self._agent}: tool {call['function']['name']!r} cancelled itself")
            if task not in late and (failure := task.exception()) is not None:
                raise failure
        timed_out = f"took longer than {self.tool_timeout_s:g} s and was stopped"
        results = [
            f"Error: {call['function']['name']} {timed_out}" if task in late else task.result()
            for call, task in zip(calls, tasks, strict=True)
        ]
        # Replace lone surrogates, which could neither be recorded nor tokenised.
        results = [text.encode(errors="replace").decode() for text in results]
        if self._journal and not self._finished:
            for call, content in zip(calls, results, strict=True):
                self._journal.keep(tool_key(call), content)
        return results

    def finish(self, reward: object, seconds: float) -> EpisodeRecord:
        """End the episode and return its record for the ledger. Raises RewardError for a non-finite reward (I9).

        seconds: wall time from the start to the agent's return.
        """
        self.end()
        try:
            value = float(reward) if isinstance(reward, numbers.Real | np.bool_) else math.nan
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise RewardError(
                f"{self._agent} returned {reward!r} as the reward of task {self.task_id!r}: return a finite number, "
                "such as float(reward) (raise an exception if there is no reward)"
            )
        return EpisodeRecord(
            group=self.group,
            member=self.member,
            task_id=self.task_id,
            reward=value,
            trajectories=self._transcript.trajectories(),
            turns=self.turns,
            forks=self.forks,
            seconds=seconds,
            metrics=dict(self.metrics),
        )

    async def _complete(self, ids: Ints, max_new_tokens: int | None) -> Completion:
        if self._abandoned:  # with an error, a loop that catches everything would spin
            await asyncio.get_running_loop().create_future()
        if self._finished:
            await asyncio.sleep(self._deadlines.refusal)
            raise EpisodeError(f"{self._agent} called the model after the episode of task {self.task_id!r} had ended")
        wanted = self._sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        if wanted < 1:
            raise EpisodeError(f"max_new_tokens={wanted}: an answer has at least one token")
        room = self._context_length - len(ids)
        if room < 1:
            await asyncio.sleep(0)  # lets the deadline cancel an agent that catches everything and retries
            raise ContextOverflow(
                f"the prompt of turn {self.turns + 1} (task {self.task_id!r}) has {len(ids)} tokens and leaves no room "
                f"for an answer in a context of {self._context_length}: shorten it, or raise model.context_length"
            )
        seed = crc32(f"{self._seed}/{self._calls}".encode())
        self._calls += 1
        sampling = dataclasses.replace(self._sampling, max_new_tokens=min(wanted, room), seed=seed)
        completion = await self._recorded_or_new(ids, sampling)
        self.turns += 1
        self.tokens += len(completion.output_ids)
        return completion

    def end(self) -> None:
        """The agent has ended, with or without a reward. Calls from tasks that it left running are refused."""
        self._finished = True

    def abandon(self) -> None:
        """The agent ignored its cancellation. From now on, its calls never return."""
        self._abandoned = True

    async def _recorded_or_new(self, ids: Ints, sampling: Sampling) -> Completion:
        key = model_key(ids, sampling) if self._journal else b""
        if self._journal and isinstance(recorded := self._journal.recall(key), Completion):
            return dataclasses.replace(recorded, input_ids=ids)
        wait = self._begin_wait("the model")
        try:
            completion = await self._generate(ids, sampling, key=self.key)
        finally:
            self._end_wait(wait)
        if self._journal and not self._finished:
            self._journal.keep(key, completion)
        return completion

    async def _run_tool(self, call: dict[str, Any]) -> str:
        name, arguments, error = call["function"]["name"], call["function"]["arguments"], call.get("error")
        known = self._tools_of_call.get(call["id"])
        if known is None:
            raise EpisodeError(f"{self._agent} ran tool call {call['id']!r}, which episode.chat never returned")
        try:
            if error is not None:
                raise MalformedCall(error)
            checked = read_arguments(name, arguments, known)
        except MalformedCall as problem:
            return f"Error: this call was not run: {problem}"
        try:
            return await known[name].run(checked)
        except ArealError:
            raise
        except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as problem:  # also SystemExit, and what libraries derive from BaseException
            return f"Error: {type(problem).__name__}: {problem}"

    def _cancel(self, tasks: Iterable[asyncio.Task[str]]) -> None:
        """Cancel tasks, and keep references to them until they end, since some may ignore their cancellation."""
        for task in tasks:
            task.cancel()
            self._left_behind.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[str]) -> None:
        self._left_behind.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved, which avoids asyncio's warning

    def _known(self, tools: Sequence[Tool | Callable[..., Any]]) -> dict[str, Tool]:
        known: dict[str, Tool] = {}
        for each in tools:
            if not isinstance(each, Tool):  # a bare function: read once per episode
                each = self._tools.get(each) or self._tools.setdefault(each, tool(each))
            if known.setdefault(each.name, each) is not each:
                raise EpisodeError(f"two tools have the name {each.name!r}")
        return known

    def _begin_wait(self, what: str) -> tuple[str, float]:
        wait = (what, asyncio.get_running_loop().time())
        self._waits.append(wait)
        return wait

    def _end_wait(self, wait: tuple[str, float]) -> None:
        self._waits.remove(wait)
        self._since = asyncio.get_running_loop().time()
