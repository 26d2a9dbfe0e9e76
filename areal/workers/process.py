"""Start, watch and stop child processes. `guard.py` runs between a child and this process, so that no orphans remain.

A Child belongs to no event loop: any thread's loop may start it, wait for it or stop it. No signal handler is
installed, and two controllers in one process share nothing.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path

from areal.errors import ConfigError, ProcessError
from areal.masking import mask, without_secrets

GUARD = Path(__file__).with_name("guard.py")
KILL_TIMEOUT_S = 5.0
"""Time limit for a process tree to disappear after SIGKILL; only a process stuck in the kernel takes longer."""
LISTENING, LOOPBACK, ANY = "0A", "0100007F", "00000000"
"""A state and two addresses as /proc/net/tcp writes them on a little-endian machine."""
FREE_PORTS = range(10000, 20000)
"""The range of free ports: below the ephemeral ports (32768 and up), one of which an outgoing connection could take
before a slow child binds it."""


class Child:
    """A running command, its descendants, and its log file. Dropping the last reference kills them."""

    def __init__(self, name: str, log: Path, lifeline: int, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.log = log
        self._lifeline = FileIO(lifeline, "w")
        self._exit: Future[int] = Future()
        self._exit.set_running_or_notify_cancel()  # cancelling one `wait` must not cancel the others
        try:
            threading.Thread(target=_reap, args=(process, self._exit), name=f"wait-{name}", daemon=True).start()
        except RuntimeError:  # no more threads
            self._lifeline.close()  # kills the command
            raise

    @classmethod
    def start(
        cls, name: str, command: Sequence[str], *, log: Path | str, env: Mapping[str, str] | None = None
    ) -> Child:
        """Start `command` with this process's environment without its secrets (`is_secret`), plus `env`.

        Files and sockets that the command creates are accessible to this user only. Output is appended to `log`, whose
        folder is created if needed. A command that does not exist exits with code 127 and the reason in its log.
        Raises ProcessError if no log, process or thread can be created.
        """
        log = Path(log)
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            return cls(name, log, *_spawn(command, log, env or {}))
        except (OSError, RuntimeError) as error:
            raise ProcessError(f"{name} did not start: {error}") from None

    @property
    def returncode(self) -> int | None:
        """None while it runs; 128 + n if signal n ended it."""
        return self._exit.result() if self._exit.done() else None

    async def wait(self) -> int:
        """Return the exit code once the command and all its descendants are gone. May be cancelled."""
        code = await asyncio.wrap_future(self._exit)
        self._lifeline.close()
        return code

    async def stop(self, grace_s: float = 10.0) -> int:
        """Send SIGTERM to its process group, and SIGKILL to all descendants after `grace_s`. May be repeated.

        Returns the exit code. Raises ProcessError if a process survives SIGKILL for KILL_TIMEOUT_S.
        """
        self._tell(b"T")
        try:
            async with asyncio.timeout(grace_s):
                return await self.wait()
        except TimeoutError:
            pass
        finally:
            self.kill()
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                return await self.wait()
        except TimeoutError:
            raise ProcessError(f"{self.name} survived SIGKILL for {KILL_TIMEOUT_S:g} s; log: {self.log}") from None

    def kill(self) -> None:
        """Send SIGKILL to the command and all its descendants, without waiting."""
        self._tell(b"K")  # closing alone has no effect while a fork of this process holds a copy
        self._lifeline.close()

    def tail(self, lines: int = 20) -> str:
        """The last lines of the log, without secrets."""
        with open(self.log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 400 * lines))
            return mask("\n".join(file.read().decode(errors="replace").splitlines()[-lines:]))

    def error(self, what: str) -> ProcessError:
        """A ProcessError "<name> <what>" that ends with the last lines of the log."""
        return ProcessError(f"{self.name} {what}; the last lines of {self.log}:\n{self.tail()}")

    def _tell(self, byte: bytes) -> None:
        with suppress(BrokenPipeError, ValueError):  # it has ended or was killed
            self._lifeline.write(byte)


def _spawn(command: Sequence[str], log: Path, env: Mapping[str, str]) -> tuple[int, subprocess.Popen[bytes]]:
    """The write end of the lifeline, and the guard process that runs `command`."""
    read_end, write_end = os.pipe()
    try:
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), str(read_end), str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**without_secrets(os.environ), **env},
                umask=0o077,
                pass_fds=(read_end,),
                start_new_session=True,  # Ctrl-C in the terminal must reach the controller only
            )
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return write_end, process


def _reap(process: subprocess.Popen[bytes], exit: Future[int]) -> None:
    exit.set_result(process.wait())


def check_port(port: int, host: str = "127.0.0.1") -> None:
    """Raise ConfigError if `port` cannot be listened on."""
    try:
        _bind(port, host).close()
    except OSError as error:
        raise ConfigError(f"port {port} on {host}: {error.strerror}; choose another, or 0 for a free one") from None


def check_owner(port: int) -> None:
    """Raise ProcessError if another user listens on `port` of 127.0.0.1, having taken it before a slow child did."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, _, _, _, owner, *_ = line.split()
        address, _, number = local.partition(":")
        if state == LISTENING and int(number, 16) == port and address in (LOOPBACK, ANY) and int(owner) != os.getuid():
            raise ProcessError(f"port {port} was taken by user {owner} of this machine; restart on another port")


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` distinct ports on which nothing is listening."""
    start = random.SystemRandom().randrange(len(FREE_PORTS))  # not seeded: concurrent runs may share a seed
    ports: list[int] = []
    with ExitStack() as held:
        for port in (*FREE_PORTS[start:], *FREE_PORTS[:start]):
            if len(ports) == count:
                break
            try:
                held.enter_context(_bind(port, host))
            except OSError:
                continue
            ports.append(port)
    if len(ports) < count:
        raise ConfigError(f"{count} free ports are needed on {host}, but {FREE_PORTS} has only {len(ports)}")
    return ports


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which nothing is listening."""
    return free_ports(1, host)[0]


def _bind(port: int, host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: ignores TIME_WAIT
        listener.bind((host, port))
        listener.listen()  # bind alone succeeds if another socket with SO_REUSEADDR has bound the port
    except BaseException:
        listener.close()
        raise
    return listener
