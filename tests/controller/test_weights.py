"""WeightSync over real HTTP, with a trainer that holds a version number instead of weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from areal.config import Config
from areal.controller.fleet import Fleet
from areal.controller.ranks import Ranks
from areal.controller.weights import WeightSync, probe_ids
from areal.deadlines import Deadlines
from areal.errors import ProcessError, PublishError, TrainerError
from areal.types import Completion, Sampling
from areal.workers.protocols import ServerClient, Workers
from areal.workers.sglang.client import SGLangClient
from tests.fake_server import EOS, ORIGIN, VOCAB, FakeServer, FakeTrainer, check

TRANSPORTS = pytest.mark.parametrize("transport", ["disk", "group"])


DEADLINES = Deadlines(health=0.1, group=0.5)


class Restarted:
    """Workers whose ranks come back at once."""

    async def restart_trainer(self, version: int, checkpoint: Path | None) -> FakeTrainer:
        return FakeTrainer()


@dataclass
class Run:
    fleet: Fleet
    weights: WeightSync
    ranks: Ranks
    trainer: FakeTrainer
    folder: Path

    def train(self, version: int) -> None:
        """The ranks have taken the steps up to `version`."""
        self.trainer.version = self.ranks.version = version

    async def publish(self, version: int) -> None:
        """A step of the trainer, then its publication to all servers."""
        self.train(version)
        stats = await self.weights.publish(version)
        assert (stats.version, stats.servers, stats.failed) == (version, len(self.fleet.servers), ())

    async def generate(self, prompt: Sequence[int], count: int) -> Completion:
        return await self.fleet.generate(np.array(prompt, np.int32), Sampling(count), key=str(prompt))


@asynccontextmanager
async def running(
    folder: Path, *servers: FakeServer, settings: Sequence[str] = (), restarts: bool = False
) -> AsyncIterator[Run]:
    """A fleet with a publisher. A restarted server comes up at version 0, with the label of version 0."""

    def client(server: FakeServer) -> SGLangClient:
        return SGLangClient(server.url, origin=ORIGIN, vocab_size=VOCAB, timeout_s=5.0)

    async def restart(index: int) -> ServerClient:
        server = servers[index]
        await server.stop()
        server.version, server.label, server.in_session, server.groups = 0, f"{ORIGIN}:0", False, {}
        await server.start()
        return client(server)

    async def never(index: int) -> ServerClient:
        await asyncio.Event().wait()
        raise AssertionError

    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        config = Config.load(["weights.timeout_s=1.0", *settings])
        clients = [client(server) for server in servers]
        fleet = Fleet(
            config, clients, origin=ORIGIN, stop_ids=[EOS], restart=restart if restarts else never, deadlines=DEADLINES
        )
        trainer = FakeTrainer()
        ranks = Ranks(cast(Workers, Restarted()), trainer, 0)
        weights = WeightSync(
            config,
            fleet,
            ranks,
            folder,
            origin=ORIGIN,
            probe=probe_ids(VOCAB),
            deadlines=DEADLINES,
        )
        task = asyncio.create_task(fleet.run(weights.sync_server))
        try:
            await fleet.ready()
            yield Run(fleet, weights, ranks, trainer, folder)
        finally:
            async with asyncio.timeout(3):
                await fleet.close()
                with suppress(ProcessError, ExceptionGroup):
                    await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(3):
        while not condition():
            await asyncio.sleep(0.01)


def exports(run: Run) -> list[str]:
    return sorted(path.name for path in run.folder.iterdir()) if run.folder.exists() else []


@TRANSPORTS
@pytest.mark.parametrize("count", [1, 2])
async def test_running_calls_go_on_under_each_new_version(tmp_path: Path, transport: str, count: int) -> None:
    """I5, I6: a completion that three versions sampled, right token by token."""
    servers = [FakeServer(token_s=0.002) for _ in range(count)]
    async with running(tmp_path, *servers, settings=[f"weights.transport={transport}"]) as run:
        await run.publish(0)
        calls = [asyncio.create_task(run.generate([i, i], 80)) for i in range(8)]
        for version in (1, 2):
            await asyncio.sleep(0.06)
            await run.publish(version)
        for i, call in enumerate(calls):
            completion = await call
            versions = check(completion, [i, i], 80)
            assert versions == sorted(versions)
            assert set(versions) == {0, 1, 2}
            assert completion.interruptions == 2
        assert [(s.version, s.label, s.in_session) for s in servers] == [(2, "run.0:2", False)] * count
        assert run.fleet.lowest_version() == 2
        assert exports(run) == (["version-2"] if transport == "disk" else [])
        assert 0 < run.fleet.stats().paused_s < 1


async def test_labels_of_another_life_are_loaded_over(tmp_path: Path) -> None:
    server = FakeServer("run.7:4")
    async with running(tmp_path, server) as run:
        assert run.fleet.servers[0].state == "waiting"
        call = asyncio.create_task(run.generate([1, 2], 5))
        await run.publish(37)
        assert check(await call, [1, 2], 5) == [37] * 5


async def test_a_server_of_this_life_serves_before_the_first_publication(tmp_path: Path) -> None:
    async with running(tmp_path, FakeServer()) as run:
        assert check(await run.generate([1, 2], 5), [1, 2], 5) == [0] * 5


@TRANSPORTS
@pytest.mark.parametrize("where", ["load", "verify", "die"])
async def test_a_server_that_fails_is_closed_and_brought_up_to_date(tmp_path: Path, transport: str, where: str) -> None:
    """I6: the other one serves version 1; the failed one serves nothing until it holds it too."""
    servers = FakeServer(token_s=0.002), FakeServer(token_s=0.002)
    async with running(tmp_path, *servers, settings=[f"weights.transport={transport}"], restarts=True) as run:
        await run.publish(0)
        calls = [asyncio.create_task(run.generate([i, i], 60)) for i in range(8)]
        await asyncio.sleep(0.04)
        load = "/update_weights_from_disk" if transport == "disk" else "/update_weights_from_distributed"
        servers[0].faults[load] = [{"load": "refuse", "verify": "wrong", "die": "drop"}[where]]
        if where == "die" and transport == "group":
            for source in servers[0].groups.values():
                asyncio.get_running_loop().call_later(0.1, source.break_up)
        run.train(1)
        failing = run.fleet.servers[0]
        stats = await run.weights.publish(1)
        assert stats.servers == 1
        assert len(stats.failed) == 1
        assert servers[0].url in stats.failed[0]
        assert failing.state == "dead"
        for i, call in enumerate(calls):
            versions = check(await call, [i, i], 60)
            assert set(versions) == {0, 1}
        await until(lambda: run.fleet.stats().accepting == 2)
        assert [server.label for server in servers] == ["run.0:1"] * 2
        assert servers[0].version == servers[1].version == 1
        await run.publish(2)


@TRANSPORTS
async def test_i7_a_server_that_hangs_is_given_up_after_the_deadline(tmp_path: Path, transport: str) -> None:
    servers = FakeServer(), FakeServer()
    async with running(tmp_path, *servers, settings=[f"weights.transport={transport}", "weights.timeout_s=1.0"]) as run:
        await run.publish(0)
        servers[0].faults["/flush_cache"] = ["hang"]
        run.train(1)
        before = asyncio.get_running_loop().time()
        stats = await run.weights.publish(1)
        assert asyncio.get_running_loop().time() - before < 4
        assert stats.servers == 1
        assert run.fleet.servers[0].state == "dead"
        assert check(await run.generate([1, 2], 5), [1, 2], 5) == [1] * 5


async def test_the_first_server_that_is_done_serves_at_once(tmp_path: Path) -> None:
    servers = FakeServer(), FakeServer()
    async with running(tmp_path, *servers) as run:
        await run.publish(0)
        servers[1].load_s = 0.4
        run.train(1)
        publication = asyncio.create_task(run.weights.publish(1))
        await asyncio.sleep(0.1)
        assert check(await run.generate([1, 2], 5), [1, 2], 5) == [1] * 5
        assert not publication.done()
        stats = await publication
        assert stats.pause_max_s > 0.4 > stats.pause_s


@TRANSPORTS
async def test_new_weights_with_old_kv_are_flushed_before_the_gate_opens(tmp_path: Path, transport: str) -> None:
    server = FakeServer()
    async with running(tmp_path, server, settings=[f"weights.transport={transport}"]) as run:
        load = "/update_weights_from_disk" if transport == "disk" else "/update_weights_from_distributed"
        server.faults[load] = ["not flushed"]
        server.faults["/flush_cache"] = ["busy", "busy", "ok"]
        await run.publish(1)
        assert (server.dirty, server.label) == (False, "run.0:1")


@TRANSPORTS
async def test_no_server_takes_it(tmp_path: Path, transport: str) -> None:
    servers = FakeServer(), FakeServer()
    async with running(tmp_path, *servers, settings=[f"weights.transport={transport}"]) as run:
        await run.publish(0)
        load = "/update_weights_from_disk" if transport == "disk" else "/update_weights_from_distributed"
        for server in servers:
            server.faults[load] = ["refuse"] * 3
        run.train(1)
        with pytest.raises(PublishError, match=r"no server took version 1:\n  http.*\n  http"):
            await run.weights.publish(1)
        assert {server.state for server in run.fleet.servers} == {"dead"}


async def test_a_trainer_that_cannot_export_leaves_the_servers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, FakeServer()) as run:
        await run.publish(0)

        async def export(folder: str) -> None:
            raise TrainerError("no space left on device")

        monkeypatch.setattr(run.trainer, "export", export)
        with pytest.raises(TrainerError, match="no space"):
            await run.weights.publish(1)
        assert check(await run.generate([1, 2], 5), [1, 2], 5) == [0] * 5


@TRANSPORTS
async def test_a_server_that_died_between_publications_gets_the_current_weights(tmp_path: Path, transport: str) -> None:
    server = FakeServer(token_s=0.002)
    async with running(tmp_path, server, settings=[f"weights.transport={transport}"], restarts=True) as run:
        await run.publish(0)
        await run.publish(1)
        call = asyncio.create_task(run.generate([1, 2], 50))
        await server.until(lambda: any(len(r.out) > 5 for r in server.running.values()))
        await server.stop()
        assert check(await call, [1, 2], 50) == [1] * 50
        await run.publish(2)


async def test_i6_a_trainer_on_its_way_to_the_next_version_is_not_asked(tmp_path: Path) -> None:
    """Its weights are no longer those of the current version; the restarted server waits for the next publication."""
    server = FakeServer()
    async with running(tmp_path, server, settings=["weights.transport=group"], restarts=True) as run:
        await run.publish(0)
        run.train(1)  # trained, not yet published
        await server.stop()
        call = asyncio.create_task(run.generate([1, 2], 5))
        await until(lambda: run.fleet.servers[0].state == "waiting")
        await asyncio.sleep(0.1)
        assert not call.done()
        assert exports(run) == []
        await run.publish(1)
        assert check(await call, [1, 2], 5) == [1] * 5


async def test_the_group_is_kept_and_formed_again_without_the_dead(tmp_path: Path) -> None:
    servers = FakeServer(), FakeServer(), FakeServer()
    async with running(tmp_path, *servers, settings=["weights.transport=group"]) as run:
        await run.publish(0)
        await run.publish(1)
        assert [server.count["/init_weights_update_group"] for server in servers] == [1, 1, 1]
        await servers[1].stop()
        run.train(2)
        stats = await run.weights.publish(2)
        assert stats.servers == 2
        assert [server.count["/init_weights_update_group"] for server in servers] == [2, 1, 2]
        assert [server.label for server in servers] == ["run.0:2", "run.0:1", "run.0:2"]


async def test_rolling_by_group_goes_on_and_on(tmp_path: Path) -> None:
    """The ranks are in one group at most: each server gets its own anew."""
    servers = FakeServer(), FakeServer()
    async with running(tmp_path, *servers, settings=["weights.transport=group", "weights.rollout=rolling"]) as run:
        for version in range(4):
            await run.publish(version)
            assert [server.label for server in servers] == [f"run.0:{version}"] * 2
        assert run.fleet.stats().failures == run.fleet.stats().restarts == 0


@TRANSPORTS
async def test_one_that_dies_while_others_take_theirs_is_left_out(tmp_path: Path, transport: str) -> None:
    """Else the run would wait for its deadline."""
    servers = FakeServer(), FakeServer()
    settings = [f"weights.transport={transport}", "weights.rollout=rolling"]
    async with running(tmp_path, *servers, settings=settings) as run:
        await run.publish(0)
        servers[0].load_s = 0.3
        run.train(1)
        publishing = asyncio.create_task(run.weights.publish(1))
        first, second = run.fleet.servers
        await until(lambda: first.state == "draining")
        run.fleet.fail(second, "its process ended")
        stats = await publishing
        assert (stats.servers, stats.failed) == (1, ())
        assert [server.label for server in servers] == ["run.0:1", "run.0:0"]


@pytest.mark.parametrize("rollout", ["all", "rolling"])
async def test_ranks_that_were_started_again_form_the_group_again(tmp_path: Path, rollout: str) -> None:
    server = FakeServer()
    settings = ["weights.transport=group", f"weights.rollout={rollout}"]
    async with running(tmp_path, server, settings=settings) as run:
        await run.publish(0)
        await run.ranks.restart(1, None)
        again = cast(FakeTrainer, run.ranks.client)
        again.version = 1
        stats = await run.weights.publish(1)
        assert (stats.servers, stats.failed) == (1, ())
        assert server.label == "run.0:1"
        assert len(server.groups) == len(again.groups) == 1


async def test_a_group_whose_trainer_failed_is_formed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    async with running(tmp_path, server, settings=["weights.transport=group"]) as run:
        await run.publish(0)

        async def broadcast(group: str) -> None:
            await run.trainer.leave_group(group)
            raise TrainerError("trainer rank 0: out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(run.trainer, "broadcast", broadcast)
            with pytest.raises(TrainerError, match="out of memory"):
                await run.weights.publish(1)
        await run.publish(2)
        assert server.label == "run.0:2"
        assert run.fleet.stats().restarts == 0


async def test_closing_leaves_the_group(tmp_path: Path) -> None:
    server = FakeServer()
    async with running(tmp_path, server, settings=["weights.transport=group"]) as run:
        await run.publish(0)
        assert len(server.groups) == len(run.trainer.groups) == 1
        await run.weights.close()
        assert len(server.groups) == len(run.trainer.groups) == 0
        await run.publish(1)


async def test_a_server_that_cannot_join_the_group_is_left_out(tmp_path: Path) -> None:
    servers = FakeServer(), FakeServer()
    servers[1].faults["/init_weights_update_group"] = ["refuse"]
    settings = ["weights.transport=group", "weights.timeout_s=5"]
    async with running(tmp_path, *servers, settings=settings) as run:
        run.train(1)
        stats = await run.weights.publish(1)
        assert stats.servers == 1
        assert "no such interface" in stats.failed[0]


async def test_without_servers_the_weights_wait_for_them(tmp_path: Path) -> None:
    server = FakeServer()
    async with running(tmp_path, server, restarts=True) as run:
        run.fleet.fail(run.fleet.servers[0], "killed")
        run.train(1)
        stats = await run.weights.publish(1)
        assert stats.servers in (0, 1)
        assert check(await run.generate([1, 2], 5), [1, 2], 5) == [1] * 5


async def test_verification_can_be_switched_off(tmp_path: Path) -> None:
    server = FakeServer()
    server.faults["/update_weights_from_disk"] = ["wrong"]
    async with running(tmp_path, server, settings=["weights.verify=false"]) as run:
        stats = await run.weights.publish(1)
        assert np.isnan(stats.gap)
        assert server.count["/generate"] == 0


def test_the_probe_touches_the_vocabulary() -> None:
    probe = probe_ids(151936)
    assert probe.dtype == np.int32
    assert len(set(probe.tolist())) == 64
    assert 0 <= probe.min() < 10_000 < 140_000 < probe.max() < 151936
