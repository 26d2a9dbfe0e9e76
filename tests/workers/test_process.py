"""areal/workers/process.py and its guard: I7 (every teardown has a deadline) and no orphans."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import uvloop

from areal.errors import ConfigError, ProcessError
from areal.workers import process
from areal.workers.process import Child, check_owner, check_port, free_port, free_ports

TREE = """
echo $$ > {folder}/main
sleep 300 & echo $! > {folder}/same-group
setsid sh -c 'trap "" TERM; echo $$ > {folder}/other-session; sleep 300; sleep 300' &
setsid sh -c '(trap "" TERM; sh -c "echo \\$PPID > {folder}/orphan"; sleep 300) & exit' &
wait
"""
"""A shell script that leaves processes in its own group, in a new one with setsid, and without a living parent."""
NAMES = ("main", "same-group", "other-session", "orphan")


async def tree(folder: Path, names: Sequence[str] = NAMES) -> list[int]:
    """The process ids of a TREE once all of it runs."""
    async with asyncio.timeout(10):
        while not all((folder / name).exists() and (folder / name).read_text().strip() for name in names):
            await asyncio.sleep(0.01)
    return [int((folder / name).read_text()) for name in names]


def alive(pids: Iterable[int]) -> list[int]:
    """Those that run; one that has ended but was not reaped does not."""
    found = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if ") Z" not in Path(f"/proc/{pid}/stat").read_text():
                found.append(pid)
    return found


async def wait_until_gone(pids: list[int], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while alive(pids):
        assert time.monotonic() < deadline, f"{alive(pids)} of {pids} still run"
        await asyncio.sleep(0.02)


async def started(child: Child, word: str) -> None:
    """Return when the log holds `word`."""
    async with asyncio.timeout(10):
        while word not in child.tail():
            await asyncio.sleep(0.01)


def shell(script: str, folder: Path, **env: str) -> Child:
    return Child.start("worker 7", ["sh", "-c", script], log=folder / "logs" / "child.log", env=env)


async def test_exit_code_log_and_environment(tmp_path: Path) -> None:
    child = shell("echo $WORD; echo oops >&2; cat; exit 3", tmp_path, WORD="hello")
    assert await child.wait() == 3
    assert child.returncode == 3
    assert child.tail().splitlines() == ["hello", "oops"]


async def test_two_runs_append_to_one_log(tmp_path: Path) -> None:
    for word in ("first", "second"):
        await shell(f"echo {word}", tmp_path).wait()
    assert (tmp_path / "logs" / "child.log").read_text() == "first\nsecond\n"


async def test_an_error_names_the_child_and_ends_with_its_last_lines(tmp_path: Path) -> None:
    child = shell("seq 1000; kill -SEGV $$", tmp_path)
    code = await child.wait()
    assert code == 128 + signal.SIGSEGV
    message = str(child.error(f"ended with code {code}"))
    assert message.startswith("worker 7 ended with code 139")
    assert str(child.log) in message
    assert message.endswith("\n999\n1000")
    assert "\n980\n" not in message


async def test_tail_of_a_log_with_endless_lines_is_bounded(tmp_path: Path) -> None:
    child = shell("head -c 5000000 /dev/zero | tr '\\0' x", tmp_path)
    await child.wait()
    assert 100 < len(child.tail()) < 20_000


async def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    child = Child.start("worker", ["/no/such/program"], log=tmp_path / "log")
    assert await child.wait() == 127
    assert "cannot start /no/such/program: No such file or directory" in child.tail()


@pytest.mark.parametrize("fault", ["log", "process", "thread"])
async def test_a_start_that_the_machine_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """It is one failure among those of a start, and leaves no descriptor behind."""
    log = tmp_path / "child.log"
    if fault == "log":
        log.mkdir()
    elif fault == "process":
        monkeypatch.setattr(subprocess, "Popen", Mock(side_effect=BlockingIOError(11, "Resource unavailable")))
    else:
        monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ProcessError, match=r"^server 3 did not start: .*(Is a directory|unavailable|new thread)"):
        Child.start("server 3", ["true"], log=log)
    assert os.listdir("/proc/self/fd") == before


async def test_stop_lets_a_command_end_by_itself(tmp_path: Path) -> None:
    child = shell("trap 'echo bye; exit 5' TERM; echo ready; while :; do sleep 0.05; done", tmp_path)
    await started(child, "ready")
    assert await child.stop(grace_s=10) == 5
    assert child.tail().endswith("bye")
    assert await child.stop() == 5, "may be repeated"


async def test_stop_right_after_start(tmp_path: Path) -> None:
    child = shell("sleep 300", tmp_path)
    assert await asyncio.wait_for(child.stop(grace_s=10), 5) == 128 + signal.SIGTERM


async def test_stop_kills_the_whole_tree_after_the_grace(tmp_path: Path) -> None:
    """I7. One process ignores SIGTERM, two have left the group, one of them has lost its parent."""
    child = shell("trap '' TERM; " + TREE.format(folder=tmp_path) + "wait; wait", tmp_path)
    pids = await tree(tmp_path)
    began = time.monotonic()
    assert await child.stop(grace_s=0.3) == 128 + signal.SIGKILL
    assert 0.3 <= time.monotonic() - began < 3
    assert not alive(pids)


async def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    until = " && ".join(f"[ -s {tmp_path / name} ]" for name in NAMES)
    child = shell(TREE.format(folder=tmp_path).replace("wait", f"until {until}; do sleep 0.02; done"), tmp_path)
    pids = await tree(tmp_path)
    assert await child.wait() == 0
    assert not alive(pids)


async def test_a_cancelled_wait_leaves_the_others(tmp_path: Path) -> None:
    child = shell("sleep 0.3; exit 4", tmp_path)
    first, second = asyncio.create_task(child.wait()), asyncio.create_task(child.wait())
    await asyncio.sleep(0.05)
    first.cancel()
    assert await second == 4
    assert first.cancelled()


async def test_a_cancelled_stop_kills(tmp_path: Path) -> None:
    child = shell("trap '' TERM; " + TREE.format(folder=tmp_path) + "wait; wait", tmp_path)
    pids = await tree(tmp_path)
    stop = asyncio.create_task(child.stop(grace_s=300))
    await asyncio.sleep(0.1)
    stop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stop
    await wait_until_gone(pids)


async def test_stop_gives_up_on_a_process_that_nothing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I7. Nothing ends a guard that is frozen, as nothing ends a process stuck in a driver."""
    monkeypatch.setattr(process, "KILL_TIMEOUT_S", 0.2)
    child = shell("echo ready; sleep 300", tmp_path)
    await started(child, "ready")
    guard = int(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()[-1])
    os.kill(guard, signal.SIGSTOP)
    try:
        with pytest.raises(ProcessError, match=r"worker 7 survived SIGKILL for 0\.2 s"):
            await child.stop(grace_s=0.1)
    finally:
        os.kill(guard, signal.SIGCONT)
    assert await child.wait() in (128 + signal.SIGTERM, 128 + signal.SIGKILL)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
async def test_any_loop_of_any_thread_may_wait(
    tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Started under one loop, watched under another in another thread, stopped under the first."""
    child = shell("sleep 300", tmp_path)

    def elsewhere() -> int:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(child.wait())

    watcher = asyncio.create_task(asyncio.to_thread(elsewhere))
    await asyncio.sleep(0.1)
    assert await child.stop() == await watcher == 128 + signal.SIGTERM


async def test_dropping_a_child_kills_it(tmp_path: Path) -> None:
    child = shell(TREE.format(folder=tmp_path), tmp_path)
    pids = await tree(tmp_path)
    children = [child]
    del child
    with pytest.warns(ResourceWarning):
        children.clear()
    await wait_until_gone(pids)


async def test_kill_works_while_a_fork_of_this_process_lives(tmp_path: Path) -> None:
    """A fork holds a copy of the lifeline, so that its end alone would say nothing."""
    child = shell(TREE.format(folder=tmp_path), tmp_path)
    pids = await tree(tmp_path)
    fork = os.fork()
    if fork == 0:
        time.sleep(60)
        os._exit(0)
    try:
        child.kill()
        assert await asyncio.wait_for(child.wait(), 5) == 128 + signal.SIGKILL
        assert not alive(pids)
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)


CONTROLLER = """
import os, sys, time
from areal.workers.process import Child
folder, ending = sys.argv[1:]
child = Child.start("worker", ["sh", "-c", open(folder + "/script").read()], log=folder + "/log")
if ending == "forked" and os.fork() == 0:  # as multiprocessing does: it outlives this process and holds the lifeline
    open(folder + "/fork", "w").write(str(os.getpid()))
    time.sleep(60)
    os._exit(0)
time.sleep(60) if ending != "returns" else sys.stdin.read()
"""


@pytest.mark.parametrize("ending", ["killed", "forked", "returns"])
async def test_no_orphans_when_the_controller_is_gone(tmp_path: Path, ending: str) -> None:
    """Killed by SIGKILL, with or without a fork that lives on, or ended without stopping its children."""
    (tmp_path / "script").write_text("trap '' TERM; " + TREE.format(folder=tmp_path))
    words = [sys.executable, "-c", CONTROLLER, str(tmp_path), ending]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as controller:
        names = [*NAMES, "fork"] if ending == "forked" else NAMES
        pids = (await tree(tmp_path, names))[: len(NAMES)]
        if ending == "returns":
            controller.communicate(timeout=10)
        else:
            controller.kill()
            controller.wait(10)
        await wait_until_gone(pids, seconds=3)
        if ending == "forked":
            os.kill(int((tmp_path / "fork").read_text()), signal.SIGKILL)


async def test_a_program_of_areal_ends_with_its_guard(tmp_path: Path) -> None:
    program = "import os, time\nfrom areal.workers.guard import die_with_guard\ndie_with_guard()\n"
    program += "print(os.getpid(), os.getppid(), flush=True)\ntime.sleep(60)"
    child = Child.start("worker", [sys.executable, "-c", program], log=tmp_path / "log")
    await started(child, " ")
    mine, guard = map(int, child.tail().split())
    os.kill(guard, signal.SIGKILL)
    await wait_until_gone([mine])
    await child.wait()


async def test_ctrl_c_is_not_for_the_children(tmp_path: Path) -> None:
    child = shell("echo $$ > " + str(tmp_path / "pid") + "; echo ready; sleep 300", tmp_path)
    await started(child, "ready")
    pid = int((tmp_path / "pid").read_text())
    assert os.getsid(pid) != os.getsid(0)
    await child.stop()


def test_a_taken_port_is_refused() -> None:
    port = free_port()
    refusal = f"port {port} on 127.0.0.1: Address already in use; choose another"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigError, match=refusal):
        check_port(port)
    check_port(port)


def test_free_ports_differ_and_can_be_listened_on() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    for port in [*ports, free_port()]:
        check_port(port)


def test_free_ports_are_none_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port()
    monkeypatch.setattr(process, "FREE_PORTS", range(first, first + 2))
    with socket.create_server(("127.0.0.1", first)), pytest.raises(ConfigError, match="2 free ports are needed"):
        free_ports(2)


def test_a_port_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        check_owner(port)
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        with pytest.raises(ProcessError, match=f"port {port} was taken by user {os.geteuid()}"):
            check_owner(port)
    check_owner(port)
