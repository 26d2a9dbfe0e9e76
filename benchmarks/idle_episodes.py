"""What it costs to have 10,000 episodes wait for their tools: nothing but memory.

Real episodes, run as the rollout loop does, each after one model call and asleep in an async tool. Goal: below 0.5 % of
a core.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal.agents.episode import Episode
from areal.agents.template import Template
from areal.agents.tools import tool
from areal.controller.rollout import run_episode
from areal.types import Completion, Ints, Sampling, Task
from benchmarks.table import arguments, report

EPISODES = 10_000
SECONDS = 10.0
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Paris"}}\n</tool_call>'


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: what a tokenizer knows does not matter here."""
    vocabulary = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = CHAT_TEMPLATE
    return fast


async def measure() -> dict[str, Any]:
    tokenizer = byte_tokenizer()
    template = Template(tokenizer)
    answer = np.array(tokenizer.encode(CALL), dtype=np.int32)
    logprobs, versions = np.full(len(answer), -1.0, np.float32), np.zeros(len(answer), np.int32)
    asleep = 0
    all_asleep, over = asyncio.Event(), asyncio.Event()

    async def generate(input_ids: Ints, sampling: Sampling, *, key: str) -> Completion:
        return Completion(input_ids, answer, logprobs, versions, "stop")

    @tool
    async def search(query: str) -> str:
        """Search the encyclopedia."""
        nonlocal asleep
        asleep += 1
        if asleep == EPISODES:
            all_asleep.set()
        await asyncio.sleep(3600)
        return query

    async def agent(episode: Episode, task: Task) -> float:
        reply = await episode.chat([{"role": "user", "content": f"Question {task['id']}?"}], tools=[search])
        await episode.run_tools(reply)
        return 1.0

    async def run(number: int) -> None:
        episode = Episode(
            generate=generate,
            template=template,
            sampling=Sampling(256),
            context_length=4096,
            tool_timeout_s=3600,
            group=number,
        )
        await run_episode(agent, episode, {"id": str(number)}, 7200)

    async with asyncio.TaskGroup() as group:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tasks = [group.create_task(run(number)) for number in range(EPISODES)]
        await all_asleep.wait()
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        gc.collect()
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            async with asyncio.timeout(SECONDS):
                await over.wait()
        except TimeoutError:
            pass
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        for task in tasks:
            task.cancel()
    return {
        "episodes": EPISODES,
        "seconds": round(wall, 2),
        "cpu_ms": round(1000 * cpu, 2),
        "core_percent": round(100 * cpu / wall, 4),
        "kb_per_episode": round(memory / EPISODES, 1),
    }


def main() -> None:
    json_path = arguments().json
    report("10,000 episodes asleep in a tool call", [asyncio.run(measure())], json_path)


if __name__ == "__main__":
    main()
