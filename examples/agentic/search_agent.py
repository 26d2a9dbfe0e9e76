"""A small model learns to use a search tool, by asynchronous reinforcement learning.

    python examples/agentic/search_agent.py                                # builds a tiny model, runs on any CPU
    python examples/agentic/search_agent.py model.path=Qwen/Qwen3-0.6B \\
        optimizer.lr=1e-6 sampling.max_new_tokens=512

Who lives where is drawn at random for every question, so that the model cannot memorise facts and must search: once for
a city, twice for a country. Only a quarter of the demonstrations in its warm start are right.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import tempfile
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from areal import Config, Controller, Episode, EpisodeError, Message, Task, launch, sft, tool

DEFAULTS = {
    "name": "search",
    "train.steps": 50,
    "train.batch_groups": 16,
    "train.minibatches": 4,
    "group.size": 8,
    "staleness.max": 2,
    "sampling.max_new_tokens": 40,
    "optimizer.lr": 5e-4,
    "optimizer.schedule": "linear",
    "optimizer.beta2": 0.99,  # near the end few groups have a gradient, and a long average keeps their updates small
    "episode.timeout_s": 120.0,
    "checkpoint.every": 0,
}
WARM_START = {
    "train.steps": 450,
    "optimizer.lr": 8e-3,
    "optimizer.schedule": "cosine",
    "optimizer.warmup_steps": 20,
    "optimizer.beta2": 0.98,
}
TEST_QUESTIONS = 256

# -- The world: people live in cities, cities belong to countries. Names are fixed; facts are random for each question.

PEOPLE = [
    a + b
    for a in ("Al", "Be", "Co", "Da", "El", "Fa", "Gi", "Ha", "Io", "Ju")
    for b in ("lun", "mir", "nok", "ran", "sia", "tev")
]
CITIES = [a + b for a in ("Kor", "Lun", "Mar", "Nov", "Ost", "Pel") for b in ("burg", "dale", "ford", "haven", "ville")]
COUNTRIES = [a + b for a in ("Arv", "Bel", "Cor", "Dra") for b in ("estan", "land", "onia")]
RELATIONS = {"lives in": (PEOPLE, CITIES), "belongs to": (CITIES, COUNTRIES), "trades with": (COUNTRIES, COUNTRIES)}
QUESTION = "In which {kind} does {person} live? Answer with one name or unknown."


def draw_facts(world: str) -> dict[str, tuple[str, str]]:
    """All facts of a world: subject -> (relation, object)."""
    rng = random.Random(world)
    return {a: (relation, rng.choice(to)) for relation, (those, to) in RELATIONS.items() for a in those}


def look_up(world: str, query: str) -> str:
    """The result of a search: the fact, then an irrelevant one of another kind."""
    facts = draw_facts(world)
    if query not in facts:
        return "Nothing found."
    distraction = random.Random(f"{world} {query}").choice(COUNTRIES if query in PEOPLE else PEOPLE)
    return " ".join(f"{subject} {' '.join(facts[subject])}." for subject in (query, distraction))


def make_task(world: str) -> Task:
    """A question about a world. `path` lists the person and what successive searches find; `searches` are needed."""
    rng, facts = random.Random(f"question {world}"), draw_facts(world)
    person = rng.choice(PEOPLE)
    city = facts[person][1]
    searches = rng.choices([1, 2], [0.25, 0.75])[0]
    question = QUESTION.format(kind="city" if searches == 1 else "country", person=person)
    return {"id": world, "question": question, "path": [person, city, facts[city][1]], "searches": searches}


# -- The search service: a separate process, with the latency of a busy web service.


async def serve() -> None:
    """Print the address, then answer searches until standard input ends."""

    async def search(request: web.Request) -> web.Response:
        await asyncio.sleep(min(max(random.lognormvariate(-2.3, 1.0), 0.01), 2.0))  # median 0.1 s, long tail
        return web.Response(text=look_up(request.query["world"], request.query["query"]))

    app = web.Application()
    app.router.add_get("/search", search)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print("http://{}:{}".format(*runner.addresses[0][:2]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


@asynccontextmanager
async def search_service() -> AsyncIterator[aiohttp.ClientSession]:
    """Start the service. It exits when its standard input closes, so that it never outlives this process."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "serve", stdin=pipe, stdout=pipe, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            url = (await process.stdout.readline()).decode().strip()
        async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
            yield session
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


# -- The agent: the same for the tiny model and for a real one.


def make_agent(service: aiohttp.ClientSession) -> Callable[[Episode, Task], Awaitable[float]]:
    world: ContextVar[str] = ContextVar("world")  # one per episode, since each episode is an asyncio task

    @tool
    async def search(query: str) -> str:
        """Look up a person, a city or a country.

        Args:
            query: The name and nothing else.
        """
        try:
            async with service.get("/search", params={"world": world.get(), "query": query}) as response:
                return await response.text()
        except aiohttp.ClientError as error:
            raise EpisodeError(f"search service: {error}") from error

    async def search_agent(episode: Episode, task: Task) -> float:
        """Up to four turns. 1 for the right answer, -0.2 for each turn with a malformed call."""
        world.set(task["id"])
        messages: list[Message] = [{"role": "user", "content": task["question"]}]
        reward = 0.0
        for _ in range(4):
            reply = await episode.chat(messages, tools=[search])
            if not reply.get("tool_calls"):
                return reward + (reply["content"].strip(" .\n") == task["path"][task["searches"]])
            reward -= 0.2 * any("error" in call for call in reply["tool_calls"])
            messages += [reply, *await episode.run_tools(reply)]
        return reward

    return search_agent


# -- The warm start of the tiny model: conversations that show how to write a search, most of them bad.


def demonstrate(rng: random.Random) -> list[Message]:
    """A conversation that does not search (68 %), searches too little or too much (8 %), or is right (24 %)."""
    task = make_task(f"demonstration {rng.random()}")
    path, right = task["path"], task["searches"]
    searches = rng.choices([0, 3 - right, right], [0.68, 0.08, 0.24])[0]
    messages: list[Message] = [{"role": "user", "content": task["question"]}]
    for query in path[:searches]:
        call = {"type": "function", "function": {"name": "search", "arguments": {"query": query}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": look_up(task["id"], query)})
    return [*messages, {"role": "assistant", "content": path[searches] if searches else "unknown"}]


def texts() -> list[str]:
    """Texts that contain every word that the tiny model needs."""
    sentences = [f"{those[0]} {relation} {to[0]}." for relation, (those, to) in RELATIONS.items()]
    question = QUESTION.format(kind="city or country", person=PEOPLE[0])
    return [question, *sentences, "Nothing found.", "search", "unknown"]


def weigh(tokenizer: Any, conversations: list[list[Message]]) -> list[tuple[list[int], list[float]]]:
    """Token ids and loss weights: 1 for the assistant's tokens, and little for the rest, in which names recur."""
    encoded = tokenizer.apply_chat_template(conversations, return_dict=True, return_assistant_tokens_mask=True)
    weights = [[1.0 if own else 0.03 for own in mask] for mask in encoded["assistant_masks"]]
    return list(zip(encoded["input_ids"], weights, strict=True))


def warm_folder(config: Config) -> Path:
    """The cache folder of the warm-started model for this seed; its name changes with the source files."""
    sources = b"".join(path.read_bytes() for path in (Path(__file__), Path(__file__).with_name("tiny_model.py")))
    return Path(config.folder, f"warm-start-{zlib.crc32(sources):08x}-{config.seed}")


async def warm_start(config: Config, folder: Path) -> None:
    """Build a tiny model, train it on demonstrations and write it to `folder`."""
    import tiny_model  # imports transformers, which takes seconds

    rng = random.Random(f"demonstrations {config.seed}")
    with tempfile.TemporaryDirectory() as blank:
        tokenizer = tiny_model.build(Path(blank), PEOPLE + CITIES + COUNTRIES, texts(), config.seed)
        settings = Config.load(defaults={**WARM_START, "model.path": blank, "seed": config.seed})
        steps = range(settings.train.steps)
        await sft(settings, (weigh(tokenizer, [demonstrate(rng) for _ in range(32)]) for _ in steps), folder)


async def main(config: Config) -> None:
    if not config.model.path:
        folder = warm_folder(config)
        if not await asyncio.to_thread(folder.is_dir):
            print(f"warm start of the tiny model, kept in {folder}", flush=True)
            await warm_start(config, folder)
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    test = [make_task(f"test {config.seed} {i}") for i in range(TEST_QUESTIONS)]
    questions = (make_task(f"train {config.seed} {i}") for i in count())
    async with search_service() as service, Controller(config) as controller:
        agent = make_agent(service)
        for label, greedy in {"success_before": False, "greedy_before": True}.items():
            if controller.version == 0 and label not in controller.success:  # a resumed run may already have it
                await controller.evaluate(agent, test, label=label, greedy=greedy)
        await controller.train(agent, questions)
        await controller.evaluate(agent, test, label="success_after")
        await controller.evaluate(agent, test, label="greedy_after", greedy=True)
    for name, label in {"sampled": "success", "greedy": "greedy"}.items():
        before, after = (controller.success.get(f"{label}_{when}", math.nan) for when in ("before", "after"))
        print(f"{name} success on {TEST_QUESTIONS} new questions: {before:.2f} -> {after:.2f}")


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        asyncio.run(serve())
    else:
        launch(main, DEFAULTS)
