"""The fixed times of a controller: what a user may want to change is a setting instead. Tests pass shorter ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Deadlines:
    """All in seconds."""

    health: float = 5.0
    """Between two health checks of a server."""
    health_retry: float = 1.0
    """From a failed health check to the next; MISSES failed ones in a row mean that the server is dead."""
    abort: float = 0.5
    """For an aborted request to come back; then its socket is closed. The abort is posted again halfway, since one that
    overtook its request did nothing."""
    close: float = 5.0
    """For all requests to end when a fleet closes."""
    restart: float = 2.0
    """Before a server is restarted for the second time, doubled each time: what ended it, such as a device whose memory
    another process has, may need time. The first restart is immediate."""
    longest_restart: float = 15.0
    group: float = 10.0
    """For the members of a broken weight group to notice that it is broken."""
    refusal: float = 1.0
    """Before a call after the end of its episode or fleet is refused: an agent that catches every error would spin."""
    tool: float = 1.0
    """For a tool to end after it was cancelled; then it is left behind."""
    agent: float = 5.0
    """For an agent to end after it was cancelled; then it is left behind."""
    retry: Mapping[str, float] = field(
        default_factory=lambda: {"server": 0.5, "reward": 0.5, "data": 0.5, "agent": 0.1, "timeout": 0.0}
    )
    """Kind of failure -> before the episode is tried again, doubled each time: what an agent, its tools, its reward or
    its data depend on may be overloaded. A time-out has waited already."""
    longest_retry: float = 30.0
    idle: float = 1.0
    """A task source that takes longer while nothing runs makes the run idle, which is no stall."""
    first_warning: float = 45.0
    """Without progress before the watchdog says what is waited for; then after twice as long, and so on."""
    checkpoint_on_stop: float = 4.0
    """For a last checkpoint when a run is stopped; without it, the one before is resumed from."""


DEADLINES = Deadlines()
