"""Runs one command and kills all its descendants at the end: no orphans remain even if the controller is killed.

    python -I -S guard.py LIFELINE_FD PARENT_PID command ...

A separate program that imports nothing of areal and starts in about 20 ms. The lifeline is the read end of a pipe whose
write end the parent holds. The byte T on it sends SIGTERM to the command's process group; any other byte, end of file
or the death of the parent (a fork of which may still hold the write end) sends SIGKILL to the whole tree. As a
subreaper, the guard inherits every orphaned descendant, in any session or group, and kills it once the command ended.

Exit code: that of the command, 128 + n if signal n ended it, 127 if it could not be started.
"""

import ctypes
import os
import select
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GUARD = "AREAL_GUARD"
"""Environment variable of the command: the guard's process id."""
TERMINATE = b"T"


def main(lifeline: int, parent: int, command: list[str]) -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the command gets these itself; the guard must outlive it
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(lifeline, False)
    try:
        parent_fd = os.pidfd_open(parent)
    except ProcessLookupError:
        return 128 + signal.SIGKILL
    try:
        environment = {**os.environ, GUARD: str(os.getpid())}
        pid = os.posix_spawnp(command[0], command, environment, setpgroup=0, setsigdef=signal.valid_signals())
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    try:
        child_fd = os.pidfd_open(pid)
        poll = select.poll()
        for fd in (lifeline, parent_fd, child_fd):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if child_fd in ready or parent_fd in ready or os.read(lifeline, 1) != TERMINATE:
                break
            os.killpg(pid, signal.SIGTERM)
    finally:
        os.kill(pid, signal.SIGKILL)  # safe even if the command has ended: it is not reaped yet
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        kill_descendants()
    return code if code >= 0 else 128 - code


def die_with_guard() -> None:
    """Called by areal's own programs, so that they die even if the guard itself gets SIGKILL."""
    if guard := os.environ.pop(GUARD, ""):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(guard):  # it is already dead
            os.kill(os.getpid(), signal.SIGKILL)


def kill_descendants() -> None:
    """Kill what is left of the tree. This process inherits the children of each process it kills, so repeat."""
    while pids := children():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def children() -> list[int]:
    me = os.getpid()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    stat = file.read()
            except OSError:  # ended since the listing
                continue
            if int(stat[stat.rindex(b")") + 2 :].split()[1]) == me:
                found.append(int(entry))
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
