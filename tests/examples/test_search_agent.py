"""The search agent's world, service, agent and demonstrations; learning itself is tests/integration's."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import search_agent
import tiny_model

from areal import Config, EpisodeError
from areal.agents.template import Template
from areal.types import Sampling
from tests.agents.conftest import Model

NAMES = {*search_agent.PEOPLE, *search_agent.CITIES, *search_agent.COUNTRIES}


@pytest.fixture(scope="module")
def model() -> Model:
    tokenizer = tiny_model.build_tokenizer(sorted(NAMES), search_agent.texts())
    return Model(tokenizer, Template(tokenizer))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[aiohttp.ClientSession]:
    async with search_agent.search_service() as session:
        yield session


shares_service = pytest.mark.asyncio(loop_scope="module")


def say(text: str) -> str:
    return f"{text}<|im_end|>"


def call(query: str) -> str:
    arguments = json.dumps({"name": "search", "arguments": {"query": query}})
    return say(f"<tool_call>\n{arguments}\n</tool_call>")


def task_with(searches: int) -> dict[str, Any]:
    return next(t for i in range(1000) if (t := search_agent.make_task(f"w{i}"))["searches"] == searches)


async def run(service: aiohttp.ClientSession, model: Model, task: dict[str, Any], *script: str) -> float:
    agent = search_agent.make_agent(service)
    return await agent(model.episode(*script, task_id=task["id"], sampling=Sampling(40)), task)


# -- the world


def test_all_names_differ() -> None:
    assert (len(search_agent.PEOPLE), len(search_agent.CITIES), len(search_agent.COUNTRIES)) == (60, 30, 12)
    assert len(NAMES) == 102


def test_facts_are_new_in_each_world_and_the_same_in_one() -> None:
    homes = Counter(search_agent.draw_facts(f"world {i}")["Allun"][1] for i in range(1500))
    assert set(homes) == set(search_agent.CITIES)
    assert max(homes.values()) < 100, "a home could be remembered"
    assert search_agent.draw_facts("world 1") == search_agent.draw_facts("world 1")


def test_searches_along_the_path_find_the_answer() -> None:
    for i in range(200):
        task = search_agent.make_task(f"world {i}")
        person, city, country = task["path"]
        assert search_agent.look_up(task["id"], person).startswith(f"{person} lives in {city}. ")
        assert search_agent.look_up(task["id"], city).startswith(f"{city} belongs to {country}. ")
        kind = {1: "city", 2: "country"}[task["searches"]]
        assert task["question"].startswith(f"In which {kind} does {person} live?")


def test_a_distraction_never_has_a_name_of_the_kind_that_was_asked_for() -> None:
    kinds = {"city": search_agent.CITIES, "country": search_agent.COUNTRIES}
    for i in range(200):
        person, city, _ = search_agent.make_task(f"world {i}")["path"]
        for query, kind in ((person, "city"), (city, "country")):
            _, distraction = search_agent.look_up(f"world {i}", query).removesuffix(".").split(". ")
            assert not set(distraction.split()) & set(kinds[kind]), distraction


def test_a_quarter_of_the_questions_needs_one_search() -> None:
    needed = Counter(search_agent.make_task(f"world {i}")["searches"] for i in range(2000))
    assert needed[1] / 2000 == pytest.approx(0.25, abs=0.03)


def test_an_unknown_query_finds_nothing() -> None:
    assert search_agent.look_up("world", "Paris") == "Nothing found."


# -- the service


async def test_the_service_answers_with_latency_and_ends_with_its_context() -> None:
    loop = asyncio.get_running_loop()

    async def ask() -> float:
        start = loop.time()
        async with service.get("/search", params={"world": "w", "query": "Allun"}) as response:
            assert await response.text() == search_agent.look_up("w", "Allun")
        return loop.time() - start

    async with search_agent.search_service() as service:
        seconds = sorted(await asyncio.gather(*(ask() for _ in range(200))))
        url = service._base_url
    assert seconds[0] >= 0.01
    assert 0.05 < seconds[100] < 0.4
    assert seconds[-1] > 2 * seconds[100]
    with pytest.raises(aiohttp.ClientConnectionError):
        async with aiohttp.ClientSession(url) as again:
            await again.get("/search")


async def test_the_service_ends_when_its_user_is_gone() -> None:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, search_agent.__file__, "serve", stdin=pipe, stdout=pipe, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert (await process.stdout.readline()).startswith(b"http://127.0.0.1:")
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()


# -- the agent


@shares_service
async def test_the_reward_is_1_for_the_right_answer_only(model: Model, service: aiohttp.ClientSession) -> None:
    one, two = task_with(1), task_with(2)
    assert await run(service, model, one, call(one["path"][0]), say(one["path"][1])) == 1
    assert "lives in" in model.text(model.prompts[1])
    assert await run(service, model, two, *map(call, two["path"][:2]), say(two["path"][2])) == 1
    assert await run(service, model, two, call(two["path"][0]), say(two["path"][1])) == 0
    assert await run(service, model, one, say("unknown")) == 0


@shares_service
async def test_an_agent_has_four_turns(model: Model, service: aiohttp.ClientSession) -> None:
    task = task_with(1)
    assert await run(service, model, task, *[call(task["path"][0])] * 5) == 0
    assert len(model.calls) == 4


@shares_service
async def test_each_malformed_turn_costs(model: Model, service: aiohttp.ClientSession) -> None:
    task = task_with(1)
    broken = say("<tool_call>\nAllun\n</tool_call>")
    reward = await run(service, model, task, broken, broken, call(task["path"][0]), say(task["path"][1]))
    assert reward == pytest.approx(0.6)
    assert "Error: this call was not run" in model.text(model.prompts[1])
    assert await run(service, model, task, broken, say("unknown")) == pytest.approx(-0.2)


@shares_service
async def test_each_episode_searches_its_own_world(model: Model, service: aiohttp.ClientSession) -> None:
    agent = search_agent.make_agent(service)
    tasks = [task for i in range(30) if (task := search_agent.make_task(f"other {i}"))["searches"] == 1]
    models = [Model(model.tokenizer, model.template) for _ in tasks]
    episodes = [
        each.episode(call(task["path"][0]), say(task["path"][1])) for each, task in zip(models, tasks, strict=True)
    ]
    rewards = await asyncio.gather(*(agent(e, t) for e, t in zip(episodes, tasks, strict=True)))
    assert len(tasks) > 3
    assert set(rewards) == {1}
    for each, task in zip(models, tasks, strict=True):
        assert f"lives in {task['path'][1]}." in each.text(each.prompts[1])


async def test_a_search_service_that_is_gone_is_no_reward(model: Model) -> None:
    """I9"""
    task = task_with(1)
    async with search_agent.search_service() as service:
        url = service._base_url
    async with aiohttp.ClientSession(url) as gone:
        with pytest.raises(EpisodeError, match="search service"):
            await run(gone, model, task, call("Allun"), say("unknown"))


# -- the warm start


def test_most_demonstrations_are_bad() -> None:
    rng = random.Random(0)
    outcomes: Counter[str] = Counter()
    for _ in range(3000):
        messages = search_agent.demonstrate(rng)
        needed = 1 if "city" in messages[0]["content"] else 2
        searches = sum(message["role"] == "tool" for message in messages)
        outcomes["gives up" if not searches else "right" if searches == needed else "wrong"] += 1
    assert outcomes["gives up"] / 3000 == pytest.approx(0.68, abs=0.03)
    assert outcomes["right"] / 3000 == pytest.approx(0.24, abs=0.03)


def test_what_demonstrations_say_stands_in_the_conversation() -> None:
    """Every name of an answer or a query can be copied from what was said before."""
    rng = random.Random(1)
    for _ in range(200):
        before = ""
        for message in search_agent.demonstrate(rng):
            text = message["content"] + str(message.get("tool_calls", ""))
            if message["role"] == "assistant":
                assert set(re.findall("[A-Z][a-z]+", text)) & NAMES <= set(re.findall("[A-Z][a-z]+", before))
            before += text


def test_demonstrations_need_no_byte_tokens_and_weigh_what_the_assistant_says(model: Model) -> None:
    rng = random.Random(2)
    conversations = [search_agent.demonstrate(rng) for _ in range(50)]
    for messages, (ids, weights) in zip(conversations, search_agent.weigh(model.tokenizer, conversations), strict=True):
        rendered = model.tokenizer.apply_chat_template(messages, tokenize=False)
        assert model.text(ids) == rendered
        assert len(ids) < 100
        assert all(len(model.text([token])) > 1 or model.text([token]) in "\n .?" for token in ids), rendered
        said = model.text([token for token, weight in zip(ids, weights, strict=True) if weight == 1])
        assert said.count("<|im_end|>") == sum(message["role"] == "assistant" for message in messages)
        assert said.endswith(f"{messages[-1]['content']}<|im_end|>")


async def test_an_episode_has_the_tokens_of_the_demonstration(model: Model) -> None:
    """The model sees in RL what it saw in its warm start."""
    question, *rest = next(m for i in range(99) if len(m := search_agent.demonstrate(random.Random(i))) == 6)
    sampled = [call(m["tool_calls"][0]["function"]["arguments"]["query"]) for m in rest[0:4:2]]
    episode = model.episode(*sampled, say(rest[-1]["content"]))
    messages = [question]
    for found in rest[1:4:2]:
        messages += [await episode.chat(messages, tools=[]), found]
    await episode.chat(messages, tools=[])
    [trajectory] = episode.finish(1.0, 0.0).trajectories
    demonstration = model.tokenizer.apply_chat_template([question, *rest], tokenize=False)
    assert model.text(trajectory.ids.tolist()) + "\n" == demonstration


def test_the_warm_start_is_kept_for_each_seed(tmp_path: Path) -> None:
    folders = {
        search_agent.warm_folder(Config.load([f"seed={seed}"], {**search_agent.DEFAULTS, "folder": str(tmp_path)}))
        for seed in (0, 0, 1)
    }
    assert len(folders) == 2
    assert {folder.parent for folder in folders} == {tmp_path}


def test_the_settings_are_valid() -> None:
    Config.load([], search_agent.DEFAULTS)
    Config.load([], search_agent.WARM_START)
