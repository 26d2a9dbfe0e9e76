"""Fleet over real HTTP, against servers that fail on demand. Each completion is checked token by token."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest

from areal.config import Config
from areal.controller.calls import random_rids
from areal.controller.fleet import Fleet
from areal.deadlines import Deadlines
from areal.errors import ConfigError, EpisodeError, ProcessError, ServerError, ServerLost, root_cause
from areal.types import Completion, Ints, Sampling
from areal.workers.protocols import ServerClient
from areal.workers.sglang.client import SGLangClient
from tests.fake_server import EOS, ORIGIN, VOCAB, FakeServer, check

PROMPT = [5, 17, 42]


DEADLINES = Deadlines(health=0.1, health_retry=0.02, restart=0.01)


def ids(tokens: Sequence[int]) -> Ints:
    return np.array(tokens, np.int32)


def client_of(server: FakeServer) -> SGLangClient:
    return SGLangClient(server.url, origin=ORIGIN, vocab_size=VOCAB, timeout_s=1.0)


@asynccontextmanager
async def running(
    *servers: FakeServer,
    settings: Sequence[str] = (),
    restart: Callable[[int], Awaitable[ServerClient]] | None = None,
    exited: Callable[[int], Awaitable[str]] | None = None,
    on_serving: Callable[[int], None] = lambda version: None,
    deadlines: Deadlines = DEADLINES,
) -> AsyncIterator[Fleet]:
    """A fleet over these servers, which are started; at the end nothing of it is left."""
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        fleet = Fleet(
            Config.load(settings),
            [client_of(server) for server in servers],
            origin=ORIGIN,
            stop_ids=[EOS],
            restart=restart,
            exited=exited,
            on_serving=on_serving,
            deadlines=deadlines,
            rids=random_rids("0"),
        )
        task = asyncio.create_task(fleet.run())
        try:
            await fleet.ready()
            yield fleet
        finally:
            async with asyncio.timeout(3):
                await fleet.close()
                with suppress(ProcessError, ServerLost, ExceptionGroup):
                    await task
        assert fleet.stats().running == fleet.stats().waiting == 0


async def generate(fleet: Fleet, count: int, key: str = "episode", prompt: Sequence[int] = PROMPT) -> Completion:
    return await fleet.generate(ids(prompt), Sampling(count), key=key)


async def new_weights(fleet: Fleet, server: FakeServer, version: int) -> None:
    """What a publication does to one server."""
    await fleet.interrupt(fleet.servers[0])
    server.version, server.label = version, f"{ORIGIN}:{version}"
    fleet.accept(fleet.servers[0], server.label)


async def test_one_call() -> None:
    async with running(FakeServer()) as fleet:
        completion = await generate(fleet, 7)
        assert check(completion, PROMPT, 7) == [0] * 7
        assert (completion.finish, completion.interruptions, completion.cached_tokens) == ("length", 0, 3)
        assert completion.input_ids.tolist() == PROMPT
        stats = fleet.stats()
        assert (stats.requests, stats.tokens, stats.failures, stats.accepting) == (1, 7, 0, 1)


async def test_i6_an_interrupted_call_goes_on_under_the_new_weights() -> None:
    server = FakeServer(token_s=0.002)
    async with running(server) as fleet:
        call = asyncio.create_task(generate(fleet, 60))
        versions = []
        for version in (1, 2):
            await server.until(lambda: any(len(run.out) >= 10 for run in server.running.values()))
            await new_weights(fleet, server, version)
        completion = await call
        versions = check(completion, PROMPT, 60)
        assert versions == sorted(versions)
        assert set(versions) == {0, 1, 2}
        assert completion.interruptions == fleet.stats().interruptions == 2
        assert len(set(server.rids)) == 3
        assert fleet.stats().paused_s > 0


async def test_an_abort_that_arrives_with_the_end_token_ends_the_call() -> None:
    """SGLang looks at the abort first: the answer says `abort` though its last token is the end of the turn. To go
    on after it would put tokens into the training data that the model never meant to sample."""
    server = FakeServer(token_s=0.01, eos_at=5)
    async with running(server) as fleet:
        call = asyncio.create_task(generate(fleet, 60))
        await server.until(lambda: any(len(run.out) == 5 for run in server.running.values()))
        await fleet.interrupt(fleet.servers[0])
        completion = await call
        assert (completion.finish, len(completion.output_ids), completion.output_ids[-1]) == ("stop", 6, EOS)
        assert len(server.rids) == 1


async def test_an_abort_at_the_last_token_is_the_full_length() -> None:
    server = FakeServer(token_s=0.01)
    async with running(server) as fleet:
        call = asyncio.create_task(generate(fleet, 5))
        await server.until(lambda: any(len(run.out) == 4 for run in server.running.values()))
        await fleet.interrupt(fleet.servers[0])
        completion = await call
        assert (completion.finish, len(server.rids)) == ("length", 1)
        check(completion, PROMPT, 5)


async def test_least_loaded_server_and_affinity() -> None:
    servers = FakeServer(token_s=0.01), FakeServer(token_s=0.01)
    async with running(*servers) as fleet:
        await generate(fleet, 1, "warm")
        calls = [asyncio.create_task(generate(fleet, 30, f"e{i}", [i])) for i in range(6)]
        await servers[0].until(lambda: len(servers[0].running) == 3)
        assert [len(server.calls) for server in fleet.servers] == [3, 3]
        await asyncio.gather(*calls)
        # six more turns of the same episode stay together, though the other server is idle
        homes = [server.count["/generate"] for server in servers]
        await asyncio.gather(*(generate(fleet, 2, "e0") for _ in range(6)))
        grown = [server.count["/generate"] - before for server, before in zip(servers, homes, strict=True)]
        assert sorted(grown) == [0, 6]


async def test_affinity_ends_when_the_server_is_much_busier() -> None:
    servers = FakeServer(token_s=0.01), FakeServer(token_s=0.01)
    async with running(*servers) as fleet:
        await asyncio.gather(*(generate(fleet, 5, "e0") for _ in range(20)))
        assert min(server.count["/generate"] for server in servers) >= 5


async def test_the_first_server_to_open_takes_only_its_share() -> None:
    """Else it would get every call that a publication interrupted."""
    servers = FakeServer(token_s=0.005), FakeServer(token_s=0.005)
    async with running(*servers) as fleet:
        calls = [asyncio.create_task(generate(fleet, 50, f"e{i}", [i])) for i in range(8)]
        await servers[1].until(lambda: len(servers[1].running) == 4)
        await asyncio.gather(*(fleet.interrupt(server) for server in fleet.servers))
        fleet.accept(fleet.servers[0], f"{ORIGIN}:0")
        await asyncio.sleep(0.05)
        assert 1 <= len(fleet.servers[0].calls) <= 5
        assert fleet.stats().waiting >= 3
        fleet.accept(fleet.servers[1], f"{ORIGIN}:0")
        for i, call in enumerate(calls):
            check(await call, [i], 50)


async def test_no_server_is_open_so_the_call_waits() -> None:
    server = FakeServer()
    async with running(server) as fleet:
        await fleet.interrupt(fleet.servers[0])
        call = asyncio.create_task(generate(fleet, 4))
        await asyncio.sleep(0.05)
        assert fleet.stats().waiting == 1
        assert any("episode" in line and "slot" in line for line in fleet.waits())
        fleet.accept(fleet.servers[0], f"{ORIGIN}:0")
        check(await call, PROMPT, 4)


async def test_i7_the_wait_for_a_server_has_a_deadline() -> None:
    async with running(FakeServer(), settings=["servers.request_timeout_s=0.1"]) as fleet:
        await fleet.interrupt(fleet.servers[0])
        with pytest.raises(ServerError, match=r"no slot on a server for 0\.1 s: http.* is draining"):
            await generate(fleet, 4)


async def test_i8_cancelling_posts_the_abort_at_once_and_frees_the_place_when_the_server_says_so() -> None:
    server = FakeServer(token_s=0.005)
    server.abort_s = 0.1
    async with running(server) as fleet:
        call = asyncio.create_task(generate(fleet, 10_000))
        await server.until(lambda: bool(server.running))
        before = asyncio.get_running_loop().time()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert asyncio.get_running_loop().time() - before < 0.05
        assert fleet.stats().running == 1
        await server.until(lambda: not server.running)
        assert server.aborts[0][0] - before < 0.1
        await asyncio.sleep(0.05)
        assert fleet.stats().running == 0


async def test_i8_an_abort_that_overtakes_its_request_is_repeated() -> None:
    server = FakeServer(token_s=0.005)
    server.register_s = 0.15
    async with running(server) as fleet:
        call = asyncio.create_task(generate(fleet, 10_000))
        await asyncio.sleep(0.05)
        await fleet.interrupt(fleet.servers[0])
        assert len(server.aborts) == 2
        assert not fleet.servers[0].calls
        fleet.accept(fleet.servers[0], f"{ORIGIN}:0")
        call.cancel()


async def test_an_abort_of_everything_that_is_never_answered_is_given_up() -> None:
    server = FakeServer(token_s=0.005)
    server.faults["/abort_request"] = ["hang"]
    async with running(server) as fleet:
        call = asyncio.create_task(generate(fleet, 8))
        await server.until(lambda: bool(server.running))
        before = asyncio.get_running_loop().time()
        await fleet.interrupt(fleet.servers[0])
        assert 0.4 < asyncio.get_running_loop().time() - before < 0.8
        fleet.accept(fleet.servers[0], f"{ORIGIN}:0")
        check(await call, PROMPT, 8)


async def test_an_abort_of_everything_that_comes_late_hits_no_call_of_the_next_version() -> None:
    """The calls ended by themselves before a busy server came to the abort; those after it must not pay for that."""
    server = FakeServer(token_s=0.005)
    server.faults["/abort_request"] = ["late"]
    async with running(server) as fleet:
        first = asyncio.create_task(generate(fleet, 8))
        await server.until(lambda: bool(server.running))
        await new_weights(fleet, server, 1)
        second = await generate(fleet, 60)
        assert (second.interruptions, fleet.stats().failures) == (0, 0)
        assert check(second, PROMPT, 60) == [1] * 60
        assert check(await first, PROMPT, 8) == [0] * 8
        assert len(server.aborts) == 1


async def test_i8_a_request_that_ignores_its_abort_loses_its_socket() -> None:
    server = FakeServer(token_s=0.005)
    server.abort_s = 60.0
    async with running(server) as fleet:
        call = asyncio.create_task(generate(fleet, 10_000))
        await server.until(lambda: bool(server.running))
        before = asyncio.get_running_loop().time()
        await fleet.interrupt(fleet.servers[0])
        assert 0.4 < asyncio.get_running_loop().time() - before < 0.8
        await server.until(lambda: not server.running)
        server.abort_s = 0.0
        fleet.accept(fleet.servers[0], f"{ORIGIN}:0")
        await server.until(lambda: bool(server.running))
        assert fleet.stats().failures == 0
        call.cancel()


@pytest.mark.parametrize("fault", ["500", "garbage", "short", "drop", "half", "foreign", "empty"])
async def test_a_failed_request_is_made_again_elsewhere(fault: str) -> None:
    servers = FakeServer(), FakeServer()
    servers[0].faults["/generate"] = [fault]
    async with running(*servers) as fleet:
        check(await generate(fleet, 6), PROMPT, 6)
        assert fleet.stats().failures == 1
        assert [server.count["/generate"] for server in servers] == [1, 1]


async def test_connections_that_break_once_are_no_death() -> None:
    """The call's connection breaks, then that of the question what the server holds: it still serves, unrestarted."""
    fake = FakeServer()
    async with running(fake) as fleet:
        (server,) = fleet.servers
        fake.faults["/generate"] = ["drop"]
        fake.faults["/model_info"] = ["drop"]
        check(await generate(fleet, 5), PROMPT, 5)
        assert fleet.servers == [server]
        assert server.state == "accepting"
        assert fake.count["/model_info"] >= 3
        assert fleet.stats().restarts == 0


async def test_i9_a_call_that_always_fails_is_an_error() -> None:
    server = FakeServer()
    server.faults["/generate"] = ["500"] * 9
    async with running(server) as fleet:
        with pytest.raises(
            ServerError, match=r"3 requests of one call failed, the last one: http.*/generate: HTTP 500"
        ):
            await generate(fleet, 6)
        assert server.count["/generate"] == 3
        server.faults.clear()
        check(await generate(fleet, 6), PROMPT, 6)


async def test_a_wrong_prompt_is_the_episodes_error_alone() -> None:
    async with running(FakeServer()) as fleet:
        with pytest.raises(EpisodeError, match="token id 101"):
            await generate(fleet, 6, prompt=[1, VOCAB])
        check(await generate(fleet, 6), PROMPT, 6)


async def test_a_slow_request_is_aborted_and_goes_on_with_its_tokens() -> None:
    servers = FakeServer(token_s=0.02), FakeServer()
    async with running(*servers, settings=["servers.request_timeout_s=0.2"]) as fleet:
        completion = await generate(fleet, 30)
        check(completion, PROMPT, 30)
        assert completion.interruptions == 1
        assert [server.count["/generate"] for server in servers] == [1, 1]


async def test_a_server_that_answers_nothing_is_dead() -> None:
    """/health may go on answering while the scheduler behind it hangs."""
    servers = FakeServer(), FakeServer()
    servers[0].faults["/generate"] = ["hang"]
    async with running(*servers, settings=["servers.request_timeout_s=0.2"], restart=never) as fleet:
        check(await generate(fleet, 6), PROMPT, 6)
        assert fleet.servers[0].state == "dead"
        assert "answered nothing for 0.2 s" in fleet.servers[0].reason


async def never(index: int) -> ServerClient:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_server_killed_in_mid_generation_is_started_again() -> None:
    server = FakeServer(token_s=0.005)
    started = []

    async def restart(index: int) -> ServerClient:
        started.append(index)
        await server.start()
        return client_of(server)

    async with running(server, restart=restart) as fleet:
        call = asyncio.create_task(generate(fleet, 40))
        await server.until(lambda: any(len(run.out) >= 10 for run in server.running.values()))
        await server.stop()
        check(await call, PROMPT, 40)
        assert started == [0]
        assert fleet.stats().restarts == 1


async def test_the_cause_of_failed_requests_is_said_once_for_all_of_a_server(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "areal")
    servers = FakeServer(token_s=0.01), FakeServer(token_s=0.01)
    async with running(*servers) as fleet:
        calls = [asyncio.create_task(generate(fleet, 60, f"e{i}", [i])) for i in range(40)]
        await servers[0].until(lambda: len(servers[0].running) == 20)
        await servers[0].stop()
        for i, call in enumerate(calls):
            check(await call, [i], 60)
        assert fleet.stats().failures >= 20
    said = [record.getMessage() for record in caplog.records if "a request failed" in record.getMessage()]
    assert 1 <= len(said) <= 3, said
    assert servers[0].url in said[0]


async def test_calls_of_a_dead_server_fail_over_at_once() -> None:
    """The child's exit is seen before any connection breaks or health check is due."""
    servers = FakeServer(token_s=0.005), FakeServer(token_s=0.005)
    exits = [asyncio.get_running_loop().create_future() for _ in servers]

    async def exited(index: int) -> str:
        return await asyncio.shield(exits[index])

    async with running(*servers, exited=exited, restart=never) as fleet:
        calls = [asyncio.create_task(generate(fleet, 40, f"e{i}", [i])) for i in range(4)]
        await servers[0].until(lambda: len(servers[0].running) == 2)
        servers[0].faults["/abort_request"] = ["hang"] * 9
        exits[0].set_result("server 0 ended with code -9")
        await asyncio.sleep(0.02)
        assert [len(server.calls) for server in fleet.servers] == [0, 4]
        for i, call in enumerate(calls):
            check(await call, [i], 40)
        assert "ended with code -9" in fleet.waits()[0]


async def test_a_foreign_server_that_comes_back_serves_again() -> None:
    server = FakeServer()
    async with running(server) as fleet:
        check(await generate(fleet, 4), PROMPT, 4)
        await server.stop()
        call = asyncio.create_task(generate(fleet, 4))
        await asyncio.sleep(0.3)
        assert fleet.servers[0].state == "dead"
        await server.start()
        check(await call, PROMPT, 4)


async def test_a_foreign_server_with_other_weights_is_not_used() -> None:
    """I6: somebody started it again, or loaded something; its label says so."""
    server = FakeServer()
    async with running(server, settings=["servers.request_timeout_s=0.3"]) as fleet:
        check(await generate(fleet, 4), PROMPT, 4)
        server.label = "default"
        server.faults["/generate"] = ["foreign"] * 9
        holder = fleet.servers[0]
        with pytest.raises(ServerError):
            await generate(fleet, 4)
        async with asyncio.timeout(1):
            await holder.until("dead")
        assert "holds weights 'default' instead of 'run.0:0'" in holder.reason


async def test_no_server_left_ends_the_run_with_the_log() -> None:
    async def restart(index: int) -> ServerClient:
        raise ProcessError("server 0 ended with code 1; the last lines of its log:\nout of memory")

    server = FakeServer()
    async with running(server, settings=["servers.restarts=2"], restart=restart) as fleet:
        await server.stop()
        with pytest.raises(ServerError, match="the fleet is closed"):
            async with asyncio.timeout(3):
                await generate(fleet, 4)


@pytest.mark.parametrize("failure", [ProcessError("its log:\nout of memory"), OSError(24, "out of memory for files")])
async def test_no_server_left_is_a_process_error(failure: Exception) -> None:
    async def restart(index: int) -> ServerClient:
        raise failure

    client = SGLangClient("http://127.0.0.1:9", origin=ORIGIN, vocab_size=VOCAB)
    fleet = Fleet(Config.load(["servers.restarts=2"]), [client], origin=ORIGIN, restart=restart, deadlines=DEADLINES)
    with pytest.raises(ExceptionGroup) as group:
        async with asyncio.timeout(30):
            await fleet.run()
    error = root_cause(group.value)
    assert isinstance(error, ProcessError)
    assert "servers.restarts=2" in str(error)
    assert "out of memory" in str(error)
    await fleet.close()


async def test_each_further_restart_of_a_server_waits_longer() -> None:
    deadlines = replace(DEADLINES, restart=0.4, longest_restart=0.8)
    times: list[float] = []

    async def restart(index: int) -> ServerClient:
        times.append(asyncio.get_running_loop().time())
        raise ProcessError("no memory")

    servers = FakeServer(), FakeServer()
    async with running(*servers, settings=["servers.restarts=4"], restart=restart, deadlines=deadlines) as fleet:
        died = asyncio.get_running_loop().time()
        fleet.fail(fleet.servers[0], "its process ended")
        async with asyncio.timeout(6):
            while fleet.servers[0].state != "gone":
                await asyncio.sleep(0.01)
        gaps = np.diff([died, *times])
        assert len(gaps) == 4
        assert np.all(gaps >= [0.0, 0.4, 0.8, 0.8])
        assert np.all(gaps < [0.4, 0.8, 1.2, 1.2])


async def test_the_run_goes_on_with_the_servers_that_are_left(caplog: pytest.LogCaptureFixture) -> None:
    async def restart(index: int) -> ServerClient:
        raise ProcessError("no memory")

    servers = FakeServer(), FakeServer()
    async with running(*servers, settings=["servers.restarts=1"], restart=restart) as fleet:
        await servers[0].stop()
        for _ in range(4):
            check(await generate(fleet, 4), PROMPT, 4)
        async with asyncio.timeout(30):
            while fleet.servers[0].state != "gone":
                await asyncio.sleep(0.01)
        assert "server 0 is given up; the run continues with 1 of 2" in caplog.text


async def test_a_server_in_its_last_restart_is_not_lost_yet() -> None:
    """The other one has none left: the run goes on when this one comes back."""
    servers = FakeServer(), FakeServer()
    came_back = asyncio.Event()

    async def restart(index: int) -> ServerClient:
        if index == 0:
            raise ConfigError("port 30000 on 127.0.0.1: Address already in use")
        await came_back.wait()
        await servers[1].start()
        return client_of(servers[1])

    async with running(*servers, settings=["servers.restarts=1"], restart=restart) as fleet:
        await servers[1].stop()
        async with asyncio.timeout(3):
            while fleet.stats().restarts < 1:
                await asyncio.sleep(0.01)
        await servers[0].stop()
        async with asyncio.timeout(3):
            while fleet.servers[0].state != "gone":
                await asyncio.sleep(0.01)
        came_back.set()
        check(await generate(fleet, 4), PROMPT, 4)


async def test_i7_a_place_that_was_lost_at_once_leaves_the_deadline_in_force() -> None:
    """The gate closes between the place and the request: what comes of the next place can time out as any other."""
    server = FakeServer()
    async with running(server, settings=["servers.request_timeout_s=0.3"]) as fleet:
        (holder,) = fleet.servers
        await fleet.interrupt(holder)
        call = asyncio.create_task(generate(fleet, 4))
        await asyncio.sleep(0.02)
        server.faults["/generate"] = ["hang"] * 9
        fleet.accept(holder, f"{ORIGIN}:0")
        assert holder.calls
        await fleet.interrupt(holder)
        assert not holder.calls
        fleet.accept(holder, f"{ORIGIN}:0")
        with pytest.raises(ServerError):
            async with asyncio.timeout(5):
                await call


async def test_a_call_whose_server_dies_before_it_is_sent_goes_on_elsewhere() -> None:
    """Its task is cancelled before its first step, and so never runs a `finally`."""
    servers = FakeServer(), FakeServer()
    async with running(*servers) as fleet:
        call = asyncio.create_task(generate(fleet, 4))
        while not (holder := next((server for server in fleet.servers if server.calls), None)):
            await asyncio.sleep(0)
        (sent,) = holder.calls.values()
        assert sent.task
        assert sent.task.get_coro().cr_frame.f_lasti == 0, "it has begun"  # type: ignore[union-attr]
        fleet.fail(holder, "its process ended")
        async with asyncio.timeout(5):
            check(await call, PROMPT, 4)


async def test_i1_the_lowest_version_of_open_servers() -> None:
    seen: list[int] = []
    servers = FakeServer(f"{ORIGIN}:3"), FakeServer(f"{ORIGIN}:3")
    async with running(*servers, on_serving=seen.append) as fleet:
        assert fleet.lowest_version() == 3
        first, second = fleet.servers
        await fleet.interrupt(first)
        fleet.accept(first, f"{ORIGIN}:4")
        assert fleet.lowest_version() == 3
        await fleet.interrupt(second)
        assert fleet.lowest_version() == 4
        fleet.accept(second, f"{ORIGIN}:4")
        assert seen == [3, 4]


async def test_close_aborts_what_runs() -> None:
    server = FakeServer(token_s=0.005)
    async with running(server) as fleet:
        call = asyncio.create_task(generate(fleet, 10_000))
        await server.until(lambda: bool(server.running))
        before = asyncio.get_running_loop().time()
        await fleet.close()
        assert asyncio.get_running_loop().time() - before < 0.3
        with pytest.raises(ServerError, match="the fleet is closed"):
            await call
        with pytest.raises(ServerError, match="the fleet is closed"):
            await generate(fleet, 4)


def test_rids_have_one_width_and_follow_the_seed() -> None:
    draw, again = random_rids("3"), random_rids("3")
    rids = [draw() for _ in range(1000)]
    assert {len(rid) for rid in rids} == {32}
    assert len(set(rids)) == 1000
    assert rids == [again() for _ in range(1000)]


async def test_many_calls_through_two_publications() -> None:
    """64 calls on two servers, all interrupted twice: none is lost, none has a wrong token (I5, I6)."""
    servers = FakeServer(token_s=0.002), FakeServer(token_s=0.002)
    async with running(*servers) as fleet:
        calls = [asyncio.create_task(generate(fleet, 60, f"e{i}", [i, i + 1])) for i in range(64)]
        for version in (1, 2):
            await asyncio.sleep(0.15)

            async def load(index: int, version: int = version) -> None:
                await fleet.interrupt(fleet.servers[index])
                assert not servers[index].running
                servers[index].version = version
                fleet.accept(fleet.servers[index], f"{ORIGIN}:{version}")

            await asyncio.gather(load(0), load(1))
        interrupted = 0
        for i, call in enumerate(calls):
            completion = await call
            versions = check(completion, [i, i + 1], 60)
            assert versions == sorted(versions)
            interrupted += completion.interruptions
        assert interrupted == fleet.stats().interruptions >= 64


async def test_a_dead_server_is_not_paused() -> None:
    """It died between the choice of a publication's servers and its turn: it stays dead, and is restarted once."""
    async with running(FakeServer()) as fleet:
        (server,) = fleet.servers
        fleet.fail(server, "its process ended")
        with suppress(ServerError):
            await fleet.pause(server)
        await fleet.interrupt(server)
        assert server.state == "dead"
