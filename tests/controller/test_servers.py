"""Servers join and leave while calls and publications run: over real HTTP, token by token, and on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from areal.config import Config
from areal.controller.cluster import Cluster
from areal.controller.fleet import Fleet
from areal.controller.ranks import Ranks
from areal.controller.servers import Membership
from areal.controller.weights import WeightSync, probe_ids
from areal.deadlines import Deadlines
from areal.errors import ArealError, ConfigError, ProcessError, ServerLost, TrainerError
from areal.types import Completion, Sampling
from areal.workers.protocols import ServerClient, Workers
from areal.workers.sglang.client import SGLangClient
from tests.fake_server import EOS, ORIGIN, VOCAB, FakeServer, FakeTrainer, check

TRANSPORTS = pytest.mark.parametrize("transport", ["disk", "group"])


DEADLINES = Deadlines(health=0.1, health_retry=0.02, restart=0.01, group=0.5)


class Machine:
    """The `Workers` that membership asks: servers on this machine by number, and those of somebody else by URL."""

    def __init__(self, places: int) -> None:
        self.servers: dict[int, FakeServer] = {}
        self.broken: set[int] = set()
        self.places = places
        self.grown = 0
        self.slow = asyncio.Event()
        self.slow.set()

    def grow(self, config: Config) -> None:
        if config.servers.count > self.places:
            raise ConfigError(f"servers.count={config.servers.count}: there are {self.places} places")
        self.grown = config.servers.count

    async def start_server(self, index: int) -> ServerClient:
        assert index < self.grown, "it has no place"
        await self.stop_server(index)
        await self.slow.wait()
        if index in self.broken:
            raise ProcessError(f"server {index} ended with code 1")
        self.servers[index] = server = FakeServer(token_s=0.002)
        await server.start()
        return await self.connect(server.url)

    async def stop_server(self, index: int) -> None:
        if server := self.servers.pop(index, None):
            await server.stop()

    async def connect(self, url: str) -> ServerClient:
        client = SGLangClient(url, origin=ORIGIN, vocab_size=VOCAB, timeout_s=5.0)
        if not await client.healthy():
            await client.close()
            raise ConfigError(f"{url} does not answer")
        return client


class Run(SimpleNamespace):
    fleet: Fleet
    weights: WeightSync
    ranks: Ranks
    trainer: FakeTrainer
    machine: Machine
    members: Membership

    def train(self, version: int) -> None:
        """The ranks have taken the steps up to `version`."""
        self.trainer.version = self.ranks.version = version

    async def publish(self, version: int) -> None:
        self.train(version)
        stats = await self.weights.publish(version)
        assert (stats.version, stats.servers, stats.failed) == (version, len(self.fleet.servers), ())

    def calls(self, number: int, tokens: int) -> list[asyncio.Task[Completion]]:
        return [asyncio.create_task(self._call(i, tokens)) for i in range(number)]

    async def _call(self, i: int, tokens: int) -> Completion:
        return await self.fleet.generate(np.array([i, i], np.int32), Sampling(tokens), key=i)

    def indices(self) -> list[int]:
        return [server.index for server in self.fleet.servers]

    async def all_open(self) -> None:
        await until(lambda: all(server.state == "accepting" for server in self.fleet.servers))


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(
    folder: Path, *settings: str, urls: Sequence[str] = (), count: int = 1, places: int = 4
) -> AsyncIterator[Run]:
    """A fleet with publisher and membership, at version 0."""
    machine = Machine(places)
    whose = [f"servers.urls={list(urls)}"] if urls else [f"servers.count={count}"]
    config = Config.load(["weights.timeout_s=5.0", *whose, *settings])
    machine.grown = count
    starts = [machine.connect(url) for url in urls] or [machine.start_server(index) for index in range(count)]
    clients = await asyncio.gather(*starts)
    fleet = Fleet(
        config,
        clients,
        origin=ORIGIN,
        stop_ids=[EOS],
        restart=None if urls else machine.start_server,
        exited=None,
        deadlines=DEADLINES,
    )
    trainer = FakeTrainer()
    ranks = Ranks(cast(Workers, machine), trainer, 0)
    weights = WeightSync(config, fleet, ranks, folder, origin=ORIGIN, probe=probe_ids(VOCAB))
    cluster = cast(Cluster, SimpleNamespace(fleet=fleet, weights=weights, workers=machine))
    members = Membership(config, cluster)
    tasks = [asyncio.create_task(fleet.run(weights.sync_server))]
    try:
        run = Run(
            fleet=fleet,
            weights=weights,
            ranks=ranks,
            trainer=trainer,
            machine=machine,
            members=members,
        )
        await run.publish(0)
        tasks.append(asyncio.create_task(members.run()))
        yield run
    finally:
        for task in tasks[1:]:
            task.cancel()
        members.close()
        async with asyncio.timeout(3):
            await fleet.close()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task
        for index in list(machine.servers):
            await machine.stop_server(index)
    assert fleet.stats().running == fleet.stats().waiting == 0


@TRANSPORTS
@pytest.mark.parametrize("rollout", ["all", "rolling"])
async def test_servers_join_at_the_current_version_and_leave_without_losing_a_token(
    tmp_path: Path, transport: str, rollout: str
) -> None:
    settings = f"weights.transport={transport}", f"weights.rollout={rollout}"
    async with running(tmp_path, *settings) as run:
        calls = run.calls(8, 150)
        await asyncio.sleep(0.02)
        await run.publish(1)
        await run.members.change({"count": 3})
        assert {server.state for server in run.fleet.servers} == {"accepting"}
        assert run.indices() == [0, 1, 2]
        assert run.machine.grown == 3
        assert {server.label for server in run.machine.servers.values()} == {"run.0:1"}
        await run.publish(2)
        calls += run.calls(8, 100)
        await until(lambda: all(server.calls for server in run.fleet.servers))
        gone = run.machine.servers[2]
        await run.members.change({"count": 1})
        assert run.indices() == [0]
        assert list(run.machine.servers) == [0]
        assert not gone.running
        assert gone.groups == {}, "it was not told to forget the group"
        await run.publish(3)
        for i, call in enumerate(calls):
            completion = await call
            versions = check(completion, [i % 8, i % 8], 150 if i < 8 else 100)
            assert versions == sorted(versions)
        assert run.fleet.stats().failures == run.fleet.stats().restarts == 0
        assert run.fleet.lowest_version() == 3


async def test_each_kind_of_nonsense_is_named_and_changes_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, places=2) as run:

        async def refused(wanted: dict[str, Any], *words: str) -> None:
            with pytest.raises(ConfigError) as caught:
                await run.members.change(wanted)
            assert all(word in str(caught.value) for word in words), str(caught.value)
            assert run.indices() == [0]

        await refused({"count": 0}, "servers.count=0 (areal servers)", "greater than or equal to 1")
        await refused({"count": True}, "servers.count=True")
        await refused({"count": "2"}, "servers.count='2'")
        await refused({}, "nothing was given", "count=2")
        await refused({"number": 2}, "number=2 was given", "count=2")
        await refused({"urls": ["http://127.0.0.1:1"]}, "starts its servers itself")
        await refused({"count": 3}, "servers.count=3: there are 2 places")


async def test_what_a_start_raises_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as run:

        async def start(index: int) -> ServerClient:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(run.machine, "start_server", start)
            with pytest.raises(ArealError, match=r"OSError: \[Errno 24\] Too many open files"):
                await run.members.change({"count": 2})
        await run.members.change({"count": 2})


async def test_changes_one_after_the_other_end_with_the_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path) as run:
        for _ in range(10):
            for count in (2, 1):
                await run.members.change({"count": count})
        assert run.indices() == [0]
        assert "ERROR" not in caplog.text


async def test_a_server_that_does_not_start_leaves_the_others(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        run.machine.broken.add(1)
        with pytest.raises(ProcessError, match="server 1 ended with code 1"):
            await run.members.change({"count": 3})
        assert run.indices() == [0, 2], "one came up"
        run.machine.broken.clear()
        await run.members.change({"count": 3})
        assert sorted(run.indices()) == [0, 1, 2]
        await run.all_open()


async def test_servers_that_were_given_up_leave_first_and_are_replaced(tmp_path: Path) -> None:
    async with running(tmp_path, "servers.restarts=0", count=2) as run:
        await run.machine.servers[0].stop()
        await until(lambda: run.fleet.servers[0].state == "gone")
        await run.members.change({"count": 1})
        assert run.indices() == [1]
        call = run.calls(1, 20)[0]
        assert check(await call, [0, 0], 20) == [0] * 20
        await run.members.change({"count": 2})
        await run.machine.servers[1].stop()
        await until(lambda: run.fleet._at(1).state == "gone")
        await run.members.change({"count": 2})
        assert sorted(run.indices()) == [0, 1]
        assert {server.state for server in run.fleet.servers} == {"accepting"}


async def test_one_that_was_given_up_leaves_before_one_that_starts_again(tmp_path: Path) -> None:
    async with running(tmp_path, "servers.restarts=1", count=2) as run:
        run.machine.broken.add(0)
        await run.machine.servers[0].stop()
        await until(lambda: run.fleet.servers[0].state == "gone")
        run.machine.slow.clear()
        await run.machine.servers[1].stop()
        await until(lambda: run.fleet.stats().restarts == 2)
        await run.members.change({"count": 1})
        assert run.indices() == [1]
        run.machine.slow.set()
        assert check(await run.calls(1, 20)[0], [0, 0], 20) == [0] * 20


@pytest.mark.parametrize("lost", [0, 1])
async def test_one_that_is_being_started_again_leaves_before_an_open_one(tmp_path: Path, lost: int) -> None:
    async with running(tmp_path, count=2) as run:
        run.machine.slow.clear()
        await run.machine.servers[lost].stop()
        await until(lambda: run.fleet.stats().restarts == 1)
        await run.members.change({"count": 1})
        assert [(server.index, server.state) for server in run.fleet.servers] == [(1 - lost, "accepting")]
        run.machine.slow.set()
        await asyncio.sleep(0.1)
        assert list(run.machine.servers) == [1 - lost], "its restart went on"
        await run.publish(1)


async def test_the_one_that_came_last_leaves_whoever_takes_weights_just_then(tmp_path: Path) -> None:
    async with running(tmp_path, count=2) as run:
        run.machine.servers[0].load_s = 0.3
        publishing = asyncio.create_task(run.publish(1))
        await until(lambda: [server.state for server in run.fleet.servers] == ["draining", "accepting"])
        await run.members.change({"count": 1})
        await publishing
        assert run.indices() == [0]


async def test_the_one_that_came_last_may_have_the_lowest_number(tmp_path: Path) -> None:
    async with running(tmp_path, count=3) as run:
        run.machine.slow.clear()
        run.fleet.fail(run.fleet.servers[0], "its process ended")
        await run.members.change({"count": 2})
        run.machine.slow.set()
        await run.members.change({"count": 3})
        assert run.indices() == [1, 2, 0]
        await run.members.change({"count": 2})
        assert run.indices() == [1, 2]


async def test_a_change_goes_on_when_whoever_asked_for_it_is_gone(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        run.machine.slow.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await run.members.change({"count": 3})
        run.machine.slow.set()
        await until(lambda: len(run.fleet.servers) == 3)
        await run.all_open()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await run.members.change({"count": 1})
        await until(lambda: len(run.machine.servers) == 1)
        assert run.indices() == [0]


async def test_after_the_end_there_are_no_changes(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        run.machine.slow.clear()
        late = [asyncio.create_task(run.members.change({"count": 1 + i})) for i in (1, 2)]
        await asyncio.sleep(0.05)
    for change in late:
        with pytest.raises(ArealError, match="the run ended before"):
            await change
    with pytest.raises(ArealError, match="the run is over"):
        await run.members.change({"count": 2})


async def test_who_shall_replace_the_others_must_serve_before_they_leave(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(FakeServer("theirs", token_s=0.002))
        new = await stack.enter_async_context(FakeServer("theirs", token_s=0.002))
        run = await stack.enter_async_context(running(tmp_path, urls=[old.url]))
        new.faults["/update_weights_from_disk"] = ["refuse"] * 3
        with pytest.raises(ServerLost, match="died before it accepted requests"):
            await run.members.change({"urls": [new.url]})
        assert [server.client.url for server in run.fleet.servers] == [old.url]
        assert check(await run.calls(1, 20)[0], [0, 0], 20) == [0] * 20


async def test_ranks_that_fail_do_not_take_the_fleet_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server joins, and its weights cannot be had: the next publication brings them."""
    async with running(tmp_path, "weights.transport=group") as run:

        async def export(folder: str) -> None:
            raise TrainerError("trainer rank 0: connection refused")

        with monkeypatch.context() as patch:
            patch.setattr(run.trainer, "export", export)
            change = asyncio.create_task(run.members.change({"count": 2}))
            await until(lambda: len(run.fleet.servers) == 2 and run.fleet.servers[1].state == "waiting")
            await asyncio.sleep(0.05)
        assert not change.done()
        await run.publish(1)
        await change
        assert {server.label for server in run.machine.servers.values()} == {"run.0:1"}


async def test_time_stood_still_is_that_of_the_servers_of_its_day(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        run.machine.servers[0].load_s = 0.2
        await run.publish(1)
        before = run.fleet.stats().paused_s
        assert before > 0.2
        run.machine.servers[0].load_s = 0.0
        await run.members.change({"count": 3})
        assert run.fleet.stats().paused_s == before
        await run.members.change({"count": 1})
        assert before <= run.fleet.stats().paused_s < before + 0.1


async def test_places_that_the_settings_name_are_the_most_there_can_be(tmp_path: Path) -> None:
    async with running(tmp_path, "placement.servers=[[0], [1]]", count=2) as run:
        await run.members.change({"count": 1})
        assert run.indices() == [0]
        await run.members.change({"count": 2})
        assert run.indices() == [0, 1]
        with pytest.raises(
            ConfigError, match=r"placement.servers=.* places 2 servers, servers.count=3 \(areal servers\)"
        ):
            await run.members.change({"count": 3})


@TRANSPORTS
async def test_servers_of_somebody_else(tmp_path: Path, transport: str) -> None:
    theirs = [FakeServer("theirs", token_s=0.002) for _ in range(2)]
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(server) for server in theirs]
        run = await stack.enter_async_context(running(tmp_path, f"weights.transport={transport}", urls=[first.url]))
        calls = run.calls(4, 150)
        await until(lambda: first.running)
        await run.members.change({"urls": [first.url, second.url + "/"]})
        await run.all_open()
        assert second.label == "run.0:0"
        with pytest.raises(ConfigError, match="does not answer"):
            await run.members.change({"urls": ["http://127.0.0.1:1"]})
        with pytest.raises(ConfigError, match="has external servers"):
            await run.members.change({"count": 1})
        with pytest.raises(ConfigError, match="urls="):
            await run.members.change({"urls": []})
        assert len(run.fleet.servers) == 2
        await run.members.change({"urls": [second.url]})
        assert [server.client.url for server in run.fleet.servers] == [second.url]
        assert not first.running
        await run.publish(1)
        assert (first.label, second.label) == ("run.0:0", "run.0:1")
        for i, call in enumerate(calls):
            check(await call, [i, i], 150)


async def test_changes_while_versions_are_published(tmp_path: Path) -> None:
    """Neither waits for the other for ever, and every token is of the version that its server said."""
    async with running(tmp_path, "weights.transport=group") as run:
        calls = run.calls(12, 400)

        async def publications() -> None:
            for version in range(1, 7):
                run.train(version)
                await run.weights.publish(version)
                await asyncio.sleep(0.05)

        publishing = asyncio.create_task(publications())
        for count in (3, 2, 4, 1, 2):
            await run.members.change({"count": count})
        await publishing
        for i, call in enumerate(calls):
            check(await call, [i, i], 400)
        assert run.fleet.stats().failures == 0
