"""Publishes new weights to the servers.

    weights = WeightSync(config, fleet, ranks, folder, origin="search.0", probe=probe_ids(vocab_size))
    stats = await weights.publish(version)      # the trainer holds `version`, and does until this returns

While the servers still generate, the weights are exported (transport `disk`) or the broadcast group is formed
(`group`). Then each server, independently, stops accepting requests, has those in flight aborted, loads, flushes its KV
cache, is compared with the trainer by the log-probs of a fixed prompt, and accepts requests at the new label.
With weights.rollout `rolling` the servers do this one after the other; with weights.interrupt `retract` the requests
stay in their paused server instead, which computes their prompts again under the new weights.

A server that fails in any of this, or takes longer than weights.timeout_s, is dead: the fleet restarts it, and
`sync_server` brings it to the current version before it gets a request. So a server serves a known version or none
(I6), and a publication ends in time (I7).
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from areal.config import Config
from areal.controller.broadcast import Broadcast
from areal.controller.fleet import Fleet
from areal.controller.ranks import Ranks
from areal.controller.server import Server
from areal.controller.signal import Signal
from areal.deadlines import DEADLINES, Deadlines
from areal.errors import ArealError, PublishError, ServerError, ServerLost, ServerRefused, TrainerError
from areal.types import Floats, Ints
from areal.workers.protocols import make_label

FLOAT32_TOLERANCE = 1e-4
"""Largest log-prob difference of any token of the probe between server and trainer."""
BFLOAT16_TOLERANCE = 0.1
"""The same for the mean over its tokens: single tokens differ by several tenths between two correct engines."""

log = logging.getLogger("areal")


@dataclass(frozen=True, slots=True)
class PublishStats:
    """prepare_s: export, or forming the group, while the servers generate. pause_s, pause_max_s: how long the mean and
    the slowest server did not generate. gap: log-prob difference found (see the tolerances; NaN when weights.verify is
    off). failed: why a server did not take this version."""

    version: int
    servers: int
    prepare_s: float
    pause_s: float
    pause_max_s: float
    gap: float
    failed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Current:
    """What servers must hold. expected: the trainer's log-probs of the probe, None when they are not verified."""

    version: int
    label: str
    expected: Floats | None


def probe_ids(vocab_size: int, length: int = 64) -> Ints:
    """A fixed prompt with ids from all over the vocabulary."""
    return (np.arange(1, length + 1) * 7919 % vocab_size).astype(np.int32)


class WeightSync:
    """See the module.

    folder: where versions are exported; only the current one is kept. probe: the prompt of the verification.
    changed: notified when `owing` becomes true. host: address of the trainer's first rank, for `group`.
    """

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        ranks: Ranks,
        folder: Path,
        *,
        origin: str,
        probe: Ints,
        changed: Signal | None = None,
        host: str = "127.0.0.1",
        backend: str = "gloo",
        deadlines: Deadlines = DEADLINES,
    ) -> None:
        self._settings = config.weights
        self._exact = config.model.dtype == "float32"
        self._fleet = fleet
        self._ranks = ranks
        self._folder = folder
        self._origin = origin
        self._probe = probe
        self._changed = changed or Signal()
        self._lock = asyncio.Lock()
        self._current: Current | None = None
        self._exported: int | None = None
        self.owing = False
        """Whether a server waits for weights that the ranks failed to give; `catch_up` gives them."""
        self._retracts = config.weights.interrupt == "retract"
        widths = [len(devices) for devices in config.placement.servers]
        self._broadcast: Broadcast | None = None
        if config.weights.transport == "group":
            self._broadcast = Broadcast(ranks, origin, host, backend, config.weights.timeout_s, widths, deadlines)

    async def publish(self, version: int) -> PublishStats:
        """Bring all servers to the weights that the trainer holds, as `version`.

        Raises PublishError when every server refused them; TrainerError when the trainer could not give them: then,
        with `disk`, no server was touched. The fleet restarts and syncs servers that were lost.
        """
        async with self._lock:
            now = asyncio.get_running_loop().time
            started = now()
            expected = (await self._ranks.client.logprobs([self._probe]))[0] if self._settings.verify else None
            servers = await self._fleet.ready()
            taken: dict[Server, tuple[float, float]] = {}
            failed: dict[Server, ArealError] = {}

            def fail(server: Server, error: ArealError) -> None:
                failed[server] = error
                self._fleet.fail(server, str(error))

            if not self._broadcast:
                await self._export(version)
            elif self._settings.rollout == "all":
                await self._broadcast.prepare(servers, fail)
            prepared = ready = now()
            current = self._current = Current(version, make_label(self._origin, version), expected)

            async def finish(server: Server) -> None:
                gap = await self._finish(server, current)
                taken[server] = now() - prepared, gap

            async def update(server: Server) -> None:
                try:
                    async with self._deadline(server):
                        await (self._fleet.pause if self._retracts else self._fleet.interrupt)(server)
                        await server.client.load_disk(str(self._path(version)), current.label, abort=not self._retracts)
                        await finish(server)
                except ServerError as error:
                    fail(server, error)

            todo = [server for server in servers if server not in failed]
            for some in [[server] for server in todo] if self._settings.rollout == "rolling" else [todo]:
                if not (some := [server for server in some if not server.is_dead]):
                    continue  # it died while others took theirs
                if self._broadcast:  # in a rolling publication, another group of two for each server
                    some = await self._broadcast.prepare(some, fail)
                prepared = now()
                if self._broadcast:
                    await asyncio.gather(*(self._fleet.interrupt(server) for server in some))
                    await self._broadcast.send(some, current.label, finish, fail)
                else:
                    await asyncio.gather(*(update(server) for server in some))
            reasons = [str(error) for error in failed.values()]
            if servers and sum(isinstance(error, ServerRefused) for error in failed.values()) == len(servers):
                raise PublishError(f"no server took version {version}:\n  " + "\n  ".join(reasons))
            await self._prune()
            return _stats(version, ready - started, taken.values(), reasons)

    async def sync_server(self, server: Server) -> None:
        """Bring one server that just came up to the current version. Raises ServerError.

        Before the first publication a server accepts requests if its label is of this run and life. When the weights
        are not available (transport `group`, while a step is in flight) the server keeps waiting, and the next
        publication includes it. When the ranks fail to give them, `owing` says so until `catch_up`.
        """
        try:
            await self._bring(server)
        except TrainerError as error:
            log.warning("%s waits for its weights: %s", server.client.url, error)
            self.owing = True
            self._changed.notify()

    async def _bring(self, server: Server) -> None:
        async with self._lock:
            if server.state != "waiting":
                return  # a publication included it, or it has died
            current = self._current
            if current is None:
                if server.version is not None and server.label:
                    self._fleet.accept(server, server.label)
                return
            if self._exported != current.version:
                if self._ranks.version != current.version:
                    return
                await self._export(current.version)
                if self._ranks.version != current.version:  # a step began meanwhile, and may have changed the weights
                    self._exported = None
                    return
            async with self._deadline(server):
                if self._retracts:
                    await server.client.resume()  # an external server may have been left paused
                await server.client.load_disk(str(self._path(current.version)), current.label)
                await self._finish(server, current)

    async def catch_up(self) -> None:
        """Bring servers up to date that came up while the ranks restarted or failed (see `sync_server`), where no
        publication follows. Raises TrainerError."""
        self.owing = False
        for server in tuple(self._fleet.servers):
            if server.state == "waiting":
                try:
                    await self._bring(server)
                except ServerError as error:
                    self._fleet.fail(server, str(error))

    async def reload(self, server: Server) -> None:
        """Load the current version into a server again, from a new export, whatever the transport is. For a trainer
        that still holds that version. Raises ServerError, TrainerError."""
        async with self._lock:
            current, self._exported = self._current, None
            assert current is not None
            await self._export(current.version)
            async with self._deadline(server):
                await self._fleet.interrupt(server)
                await server.client.load_disk(str(self._path(current.version)), current.label)
                await self._finish(server, current)

    async def leave(self, index: int) -> None:
        """Take a server out of the fleet, between two publications."""
        async with self._lock:
            if self._broadcast:
                await self._broadcast.leave_with(index)
            await self._fleet.leave(index)

    async def close(self) -> None:
        """Leave the broadcast group, so that servers that run on can forget it."""
        if self._broadcast:
            await self._broadcast.leave()

    async def _finish(self, server: Server, current: Current) -> float:
        """Flush, verify, open; the log-prob gap. A load leaves old KV behind when something still ran; in a pause
        nothing does, and the load itself has flushed."""
        if server.state == "paused":
            await server.client.resume()
        else:
            await server.client.flush()
        gap = float("nan")
        if current.expected is not None:
            difference = np.abs(await server.client.score(self._probe) - current.expected)
            gap = float(difference.max() if self._exact else difference.mean())
            tolerance = FLOAT32_TOLERANCE if self._exact else BFLOAT16_TOLERANCE
            if not gap <= tolerance:
                raise ServerRefused(
                    f"{server.client.url}: after loading {current.label} its log-probs differ from the trainer's by "
                    f"{gap:.3g}, more than {tolerance:g}"
                )
        self._fleet.accept(server, current.label)
        return gap

    def _deadline(self, server: Server) -> _Deadline:
        return _Deadline(server.client.url, self._settings.timeout_s)

    def _path(self, version: int) -> Path:
        return self._folder / f"version-{version}"

    async def _export(self, version: int) -> None:
        if self._exported != version:
            await self._ranks.client.export(str(self._path(version)))
            self._exported = version

    async def _prune(self) -> None:
        keep = self._path(self._exported) if self._exported is not None else None
        for path in self._folder.glob("version-*"):
            if path != keep:
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)


def _stats(
    version: int, prepare_s: float, taken: Collection[tuple[float, float]], failed: Sequence[str]
) -> PublishStats:
    """taken: the pause and the gap of each server that took the version."""
    pauses, gaps = [pause for pause, _ in taken], [gap for _, gap in taken]
    mean_s = sum(pauses) / max(1, len(pauses))
    gap = max(gaps, default=float("nan"))
    return PublishStats(version, len(taken), prepare_s, mean_s, max(pauses, default=0.0), gap, tuple(failed))


class _Deadline:
    """`asyncio.timeout` whose end is a ServerLost that names the server."""

    def __init__(self, url: str, seconds: float) -> None:
        self._message = f"{url} did not take the new weights within weights.timeout_s={seconds:g}"
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        try:
            await self._timeout.__aexit__(*error)  # type: ignore[arg-type]
        except TimeoutError:
            raise ServerLost(self._message) from None
