"""The ledger on a real disk, with real kills and a real limit on what can be written."""

import asyncio
import contextlib
import inspect
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from areal import folder as run_folder
from areal.agents.journal import RecordedCall
from areal.controller import codec
from areal.controller import ledger as ledger_module
from areal.controller.facts import Admitted, BatchFormed, Checkpointed, Completed, Dropped, Failed, Finished, Trained
from areal.controller.ledger import Ledger
from areal.errors import LedgerError
from areal.types import EpisodeRecord, Trajectory


def episode(group: int, member: int, length: int = 256) -> EpisodeRecord:
    ids = np.arange(length, dtype=np.int32) + group
    trajectory = Trajectory(ids, ids % 2 == 0, -ids.astype(np.float32), ids // 100)
    return EpisodeRecord(group, member, f"task {group}", float(member), (trajectory,), turns=group)


def story(group: int, with_episodes: bool = True):
    """The facts of one group, each with its episode."""
    yield Admitted(group, f"task {group}", group, 2), None
    for member in range(2):
        yield Finished(group, member, float(member), ((0, 128),)), episode(group, member) if with_episodes else None
    yield Completed(group), None


_IMPORTS = """
import asyncio, resource, sys
import numpy as np
from areal.controller.facts import Admitted, Completed, Finished
from areal.controller.ledger import Ledger
from areal.errors import LedgerError
from areal.types import EpisodeRecord, Trajectory
"""


def start_writer(body: str, folder) -> subprocess.Popen:
    """Run `body` in a child process that has `story`; it prints what was acknowledged."""
    source = "\n".join((_IMPORTS, inspect.getsource(episode), inspect.getsource(story), textwrap.dedent(body)))
    return subprocess.Popen([sys.executable, "-c", source, str(folder)], stdout=subprocess.PIPE, text=True)


def same_episode(a: EpisodeRecord, b: EpisodeRecord) -> bool:
    return codec.encode(a) == codec.encode(b)


@contextlib.asynccontextmanager
async def ledger_at(folder, make=Ledger.open, **options):
    ledger = make(folder, **options)
    try:
        yield ledger
    finally:
        await ledger.close()


async def test_what_was_appended_comes_back_in_order(tmp_path):
    folder = tmp_path / "run" / "ledger"
    expected = []
    async with ledger_at(folder, Ledger.create) as ledger:
        for group in range(20):
            for fact, record in story(group):
                ledger.append(fact, record)
                expected.append(fact)
        await ledger.barrier()
        assert list(ledger.facts()) == expected
        assert same_episode(ledger.episode(7, 1), episode(7, 1))
        ledger.append(Completed(99))
        expected.append(Completed(99))
    async with ledger_at(folder) as ledger:
        assert list(ledger.facts()) == expected
        assert same_episode(ledger.episode(19, 0), episode(19, 0))
        ledger.append(Completed(100))
        await ledger.barrier()
        assert list(ledger.facts()) == [*expected, Completed(100)]


async def test_create_and_open_refuse_each_others_folders(tmp_path):
    with pytest.raises(LedgerError, match="has no ledger"):
        Ledger.open(tmp_path)
    await Ledger.create(tmp_path).close()
    with pytest.raises(LedgerError, match="has a ledger already: resume"):
        Ledger.create(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as database:
        database.execute("PRAGMA user_version = 9")
    with pytest.raises(LedgerError, match="has format 9"):
        Ledger.open(tmp_path)
    (tmp_path / "ledger.db").write_bytes(b"no database" * 1000)
    with pytest.raises(LedgerError, match="not a database"):
        Ledger.open(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError, match="cannot be created"):
        Ledger.create(tmp_path / "file")


async def test_a_closed_ledger_takes_nothing_more(tmp_path):
    ledger = Ledger.create(tmp_path)
    await ledger.close()
    await ledger.close()
    with pytest.raises(LedgerError, match="is closed"):
        ledger.append(Completed(0))
    with pytest.raises(LedgerError, match="is closed"):
        await ledger.barrier()
    for thread in [thread for thread in threading.enumerate() if thread.name == "ledger"]:
        thread.join(10)  # it may be about to end
        assert not thread.is_alive()


async def test_a_mistaken_episode_is_refused(tmp_path):
    async with ledger_at(tmp_path, Ledger.create) as ledger:
        with pytest.raises(ValueError, match="is not the end of the episode of group 1, member 1"):
            ledger.append(Finished(1, 0, 0.0, ()), episode(1, 1))
        with pytest.raises(LedgerError, match=r"episode of group 1, member 1: none"):
            ledger.episode(1, 1)


async def test_an_unknown_fact_or_a_damaged_trajectory_is_named(tmp_path):
    async with ledger_at(tmp_path, Ledger.create) as ledger:
        ledger.append(Finished(0, 0, 0.0, ()), episode(0, 0))
        await ledger.barrier()
        with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as database, database:
            (whole,) = database.execute("SELECT record FROM episodes").fetchone()
            database.execute("UPDATE episodes SET record = ?", (whole[:500] + b"damage" + whole[506:],))
        with pytest.raises(LedgerError, match="group 0, member 0: the record is torn or damaged"):
            ledger.episode(0, 0)
        with pytest.raises(LedgerError, match="group 0, member 0: the record is torn or damaged"):
            await ledger.batch(BatchFormed(0, 0, (0,), 0, 0))
        with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as database, database:
            database.execute("""INSERT INTO facts (body) VALUES ('["Vanished",{}]')""")
        with pytest.raises(LedgerError, match="fact 2: unknown fact 'Vanished'"):
            list(ledger.facts())


# -- how long trajectories live


async def test_i4_a_trajectory_lives_until_it_is_dropped_or_covered_by_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "KEPT_STEPS", 0)
    async with ledger_at(tmp_path, Ledger.create) as ledger:
        for group in range(5):
            for fact, record in story(group):
                ledger.append(fact, record)

        async def living():
            await ledger.barrier()
            found = []
            for group in range(5):
                with contextlib.suppress(LedgerError):
                    found.append((ledger.episode(group, 0).group, ledger.episode(group, 1).group)[0])
            return found

        ledger.append(BatchFormed(0, 0, (0, 2), 0, 0))
        ledger.append(Trained(0, 1))
        ledger.append(BatchFormed(1, 1, (1,), 0, 0))
        ledger.append(Dropped(3, "stale"))
        assert await living() == [0, 1, 2, 4]
        ledger.append(Checkpointed(0, "c0"))
        assert await living() == [0, 1, 2, 4]
        ledger.append(Checkpointed(1, "c1"))
        assert await living() == [1, 4]
        ledger.append(Trained(1, 2))
        ledger.append(Checkpointed(2, "c2"))
        assert await living() == [4]


async def test_trajectories_of_the_last_steps_before_a_checkpoint_stay(tmp_path):
    """A person looks at them when a run is over."""
    async with ledger_at(tmp_path, Ledger.create) as ledger:
        for group in (0, 1):
            for fact, record in story(group):
                ledger.append(fact, record)
        ledger.append(BatchFormed(0, 0, (0,), 0, 0))
        ledger.append(Trained(0, 1))
        ledger.append(BatchFormed(1, 1, (1,), 0, 0))
        ledger.append(Checkpointed(run_folder.KEPT_STEPS, "c"))
        await ledger.barrier()
        assert ledger.episode(0, 0).group == 0
        ledger.append(Checkpointed(run_folder.KEPT_STEPS + 1, "c"))
        await ledger.barrier()
        with pytest.raises(LedgerError, match=r"episode of group 0, member 0: none"):
            ledger.episode(0, 0)
        assert ledger.episode(1, 0).group == 1


async def test_the_room_of_what_is_deleted_is_used_again(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "KEPT_STEPS", 0)
    async with ledger_at(tmp_path, Ledger.create) as ledger:
        for step in range(30):
            for fact, record in story(step):
                ledger.append(fact, record and episode(step, record.member, length=20_000))
            ledger.append(BatchFormed(step, step, (step,), 0, 0))
            ledger.append(Trained(step, step + 1))
            ledger.append(Checkpointed(step + 1, "c"))
            await ledger.barrier()
    assert (tmp_path / "ledger.db").stat().st_size < 3 * 2 * 8.2 * 20_000, "two or three steps of two episodes"


async def test_calls_live_until_their_episode_ends(tmp_path):
    def call(text):
        return RecordedCall(b"key", text)

    async with ledger_at(tmp_path, Ledger.create) as ledger:
        for member in range(3):
            ledger.append_call(0, member, call(f"first of {member}"))
            ledger.append_call(0, member, call(f"second of {member}"))
        ledger.append_call(1, 0, call("of another group"))
        ledger.append(Finished(0, 0, 0.0, ()), episode(0, 0))
        ledger.append(Failed(0, 1, "agent", "why"))
        await ledger.barrier()
        assert [ledger.calls(0, member) for member in (0, 1)] == [[], []]
        assert ledger.calls(0, 2) == [call("first of 2"), call("second of 2")]
    async with ledger_at(tmp_path) as ledger:
        ledger.append(Dropped(0, "cancelled"))
        await ledger.barrier()
        assert [ledger.calls(0, 2), ledger.calls(1, 0)] == [[], [call("of another group")]]


# -- kills


async def test_i4_after_sigkill_everything_acknowledged_is_there_and_each_finished_fact_has_its_trajectory(tmp_path):
    writer = start_writer(
        """
        async def main():
            ledger = Ledger.create(sys.argv[1])
            for group in range(1_000_000):
                for fact, record in story(group):
                    ledger.append(fact, record)
                if group % 7 == 0:
                    await ledger.barrier()
                    print(group, flush=True)
                await asyncio.sleep(0)
        asyncio.run(main())
        """,
        tmp_path,
    )
    try:
        for line in writer.stdout:
            if int(line) == 70:
                with pytest.raises(LedgerError, match="written by another run"):
                    Ledger.open(tmp_path)
            if int(line) >= 200:
                break
    finally:
        writer.send_signal(signal.SIGKILL)
        rest = writer.communicate()[0].split()
    acknowledged = int(rest[-1]) if rest else int(line)

    async with ledger_at(tmp_path) as ledger:
        found = list(ledger.facts())
        expected = [fact for group in range(acknowledged + 100) for fact, _ in story(group, with_episodes=False)]
        assert found == expected[: len(found)]
        assert len(found) >= 4 * (acknowledged + 1)
        for fact in found:
            if isinstance(fact, Finished):
                assert same_episode(ledger.episode(fact.group, fact.member), episode(fact.group, fact.member))
        ledger.append(Completed(10**6))
        await ledger.barrier()
        assert list(ledger.facts()) == [*found, Completed(10**6)]


async def test_an_abandoned_ledger_has_what_a_barrier_acknowledged(tmp_path):
    ledger = Ledger.create(tmp_path)
    ledger.append(Completed(0))
    await ledger.barrier()
    ledger.append(Completed(1))
    ledger.abandon()
    async with ledger_at(tmp_path) as after_the_crash:
        assert list(after_the_crash.facts()) == [Completed(0)]


async def test_one_ledger_at_a_time_in_one_process_too(tmp_path):
    async with ledger_at(tmp_path, Ledger.create):
        with pytest.raises(LedgerError, match="written by another run"):
            Ledger.open(tmp_path)
    await Ledger.open(tmp_path).close()


# -- a disk that is full or slow


@pytest.mark.parametrize("with_episodes", [True, False], ids=["episodes", "facts"])
async def test_a_full_disk_fails_the_next_append_and_barrier_with_the_cause(tmp_path, with_episodes):
    writer = start_writer(
        f"""
        limit = 1_000_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        async def main():
            ledger = Ledger.create(sys.argv[1])
            try:
                for group in range(10_000):
                    for fact, record in story(group, {with_episodes}):
                        ledger.append(fact, record)
                    if group % 7 == 0:
                        await ledger.barrier()
                        print(group)
            except LedgerError as error:
                print(error)
                print(type(error.__cause__).__name__)
            for call in (ledger.barrier, ledger.ready, ledger.close):
                try:
                    await call()
                except LedgerError as error:
                    print("again")
            try:
                ledger.append(Completed(0))
            except LedgerError as error:
                print("again")
        asyncio.run(main())
        """,
        tmp_path,
    )
    *groups, error, cause, barrier, ready, close, append = writer.communicate(timeout=60)[0].splitlines()
    assert writer.returncode == 0
    assert f"ledger {tmp_path} cannot be written: " in error
    assert cause == "OperationalError"
    assert [barrier, ready, close, append] == ["again"] * 4

    async with ledger_at(tmp_path) as ledger:
        found = list(ledger.facts())
        assert len(found) >= 4 * (int(groups[-1]) + 1) > 100
        assert found == [fact for group in range(1000) for fact, _ in story(group, False)][: len(found)]
        for fact in found:
            if isinstance(fact, Finished) and with_episodes:
                assert same_episode(ledger.episode(fact.group, fact.member), episode(fact.group, fact.member))


class SlowDisk:
    """Holds every write of a ledger until `go` is set."""

    def __init__(self, ledger, monkeypatch):
        self.go = threading.Event()
        self.entered = threading.Event()
        write = ledger._write

        def slow(entries):
            self.entered.set()
            self.go.wait(30)
            write(entries)

        monkeypatch.setattr(ledger, "_write", slow)


async def test_a_slow_disk_blocks_neither_append_nor_the_loop(tmp_path, monkeypatch):
    ledger = Ledger.create(tmp_path)
    disk = SlowDisk(ledger, monkeypatch)
    monkeypatch.setattr(ledger_module, "BACKLOG_BYTES", 100_000)
    count = 0
    while ledger._unwritten_bytes <= 100_000:
        await asyncio.wait_for(ledger.ready(), 1)
        ledger.append(Finished(count, 0, 0.0, ()), episode(count, 0))
        count += 1
    waiting = [asyncio.create_task(ledger.ready()), asyncio.create_task(ledger.barrier())]
    done, _ = await asyncio.wait(waiting, timeout=0.2)
    assert disk.entered.wait(5)
    assert not done, "back-pressure, while the loop runs"
    ledger.append(Completed(0))
    waiting[1].cancel()
    disk.go.set()
    await asyncio.wait_for(waiting[0], 10)
    await asyncio.wait_for(ledger.barrier(), 10)
    assert len(list(ledger.facts())) == count + 1
    await ledger.close()


async def test_close_has_a_deadline(tmp_path, monkeypatch):
    ledger = Ledger.create(tmp_path)
    disk = SlowDisk(ledger, monkeypatch)
    ledger.append(Finished(0, 0, 0.0, ()), episode(0, 0))
    with pytest.raises(LedgerError, match=r"took longer than 0\.1 s; 1 facts may be lost"):
        await ledger.close(deadline_s=0.1)
    disk.go.set()
    for thread in threading.enumerate():
        if thread.name == "ledger":
            thread.join(10)
    async with ledger_at(tmp_path) as ledger:
        assert list(ledger.facts()) == [Finished(0, 0, 0.0, ())]


def test_a_disk_that_never_answers_does_not_keep_the_process(tmp_path):
    writer = start_writer(
        """
        import threading

        async def main():
            ledger = Ledger.create(sys.argv[1])
            ledger._write = lambda entries: threading.Event().wait()
            ledger.append(Completed(0))
            try:
                await ledger.close(deadline_s=0.1)
            except LedgerError as error:
                print(error)
        asyncio.run(main())
        """,
        tmp_path,
    )
    assert "took longer than 0.1 s; 1 facts may be lost" in writer.communicate(timeout=60)[0]
    assert writer.returncode == 0
