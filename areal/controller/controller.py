"""One run, from start to stop.

    async with Controller(config) as controller:
        await controller.train(agent, tasks)

`train` is a loop of public verbs, and a program may write its own: `generating` keeps episodes running, while
`next_batch`, `train_step`, `publish`, `checkpoint` and `report` are one training step. Everything that lives as long as
the run is in one TaskGroup, so that a part that dies ends the run with its own traceback. The library owns no event
loop and installs no signal handler: any asyncio program can hold a Controller, or two.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from areal.agents.episode import Episode
from areal.agents.journal import Journal
from areal.checks import before_run
from areal.config import Config
from areal.controller.cluster import Cluster
from areal.controller.evaluation import Evaluation, Outside
from areal.controller.ledger import Ledger
from areal.controller.log import RunLog
from areal.controller.report import Reporter
from areal.controller.rollout import Agent, RolloutLoop
from areal.controller.scheduler import Scheduler, SchedulerSettings
from areal.controller.servers import Membership
from areal.controller.train import TrainLoop
from areal.controller.watchdog import LoopWatch, Progress, Wait, Watchdog, spare_the_loop, waits_of
from areal.controller.weights import PublishStats
from areal.data import Tasks, check, evaluation_tasks
from areal.deadlines import DEADLINES, Deadlines
from areal.errors import ArealError, ConfigError, Stopped, root_cause
from areal.folder import RunFolder
from areal.monitor.endpoint import Endpoint
from areal.monitor.metrics import Metrics
from areal.monitor.terminal import open_view
from areal.types import Batch, EpisodeRecord, Sampling, Task, TrainStats
from areal.workers.local import LocalWorkers
from areal.workers.protocols import Workers

log = logging.getLogger("areal")


class Controller:
    """Starts servers and ranks, runs agents, trains. Use as `async with`; one run each."""

    log: RunLog
    scheduler: Scheduler
    ledger: Ledger
    cluster: Cluster
    folder: RunFolder

    def __init__(
        self,
        config: Config,
        workers: Callable[[Config], Workers] = LocalWorkers,
        deadlines: Deadlines = DEADLINES,
    ) -> None:
        self.config = config
        self._deadlines = deadlines
        self._workers = workers(config)
        self._stack = AsyncExitStack()
        self._has_trained = False
        self._tasks: Tasks | None = None
        self._membership: Membership | None = None
        self._training: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._over = False

    # -- start and end

    async def __aenter__(self) -> Self:
        """Raises ConfigError before anything starts; ProcessError or TrainerError when a part does not come up."""
        try:
            return await self._start()
        except BaseExceptionGroup as failures:
            cause = root_cause(failures)
            raise cause from cause.__cause__

    async def _start(self) -> Self:
        await self._check()
        started = asyncio.get_running_loop().time()
        async with AsyncExitStack() as stack:
            await self._open(stack)
            loop_watch = None if self._workers.inline else stack.enter_context(LoopWatch())
            await self._begin_reports(stack, loop_watch)
            # In a group of its own: a stop must leave alone the one in which the last checkpoint is written.
            stop = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(stop.create_task(self._stopped(), name="stop").cancel)
            async with self._warning(f"servers and ranks to start; their output is in {self.folder.logs}"):
                await stack.enter_async_context(self.cluster)
            background = await stack.enter_async_context(asyncio.TaskGroup())
            self._membership = Membership(self.config, self.cluster)
            stack.callback(self._membership.close)
            stack.callback(background.create_task(self._membership.run(), name="membership").cancel)
            if loop_watch:
                stack.callback(background.create_task(loop_watch.run(), name="loop watch").cancel)
            self._steps = TrainLoop(
                self.config,
                self.scheduler,
                self.log,
                self.ledger,
                self._rollout,
                self.cluster,
                self.folder,
                background,
                self._reporter,
            )
            if not self._workers.inline:
                spare_the_loop()
                stack.callback(gc.unfreeze)  # another Controller of this process, if there is one, loses by that
                await stack.enter_async_context(Endpoint(self.folder.path, self._routes()))
            async with self._warning("the steps since the checkpoint, which the ranks repeat, and their publication"):
                await self._steps.recover()
            log.info("ready after %.0f s", asyncio.get_running_loop().time() - started)
            self._stack = stack.pop_all()
        return self

    async def _check(self) -> None:
        """What can be refused before there is a run folder."""
        config = self.config
        await asyncio.to_thread(self._workers.check)
        if config.data.train:
            self._tasks = await asyncio.to_thread(Tasks, None, config)
        if config.data.evaluation:
            await asyncio.to_thread(evaluation_tasks, config)
        if not self._workers.inline:
            await asyncio.to_thread(before_run, config)

    async def _open(self, stack: AsyncExitStack) -> None:
        """The folder, the ledger, and what decides: the run as it was left, before anything runs."""
        config = self.config
        if config.run:
            self.ledger = Ledger.open(config.run / "ledger")  # refuses a run that another controller has
            stack.push_async_callback(self.ledger.close)
            self.folder = await asyncio.to_thread(RunFolder.open, config)
        else:
            self.folder = await asyncio.to_thread(RunFolder.create, config)
            self.ledger = Ledger.create(self.folder.ledger)
            stack.push_async_callback(self.ledger.close)
        stack.enter_context(self.folder.log_file())
        self.log = await asyncio.to_thread(RunLog, self.ledger)
        self.scheduler = Scheduler(SchedulerSettings.from_config(config), self.log.state)
        await asyncio.to_thread(self._delete_unknown_checkpoints)
        self._watchdog = Watchdog(self.folder.logs / "stalled.txt", self._deadlines)
        self._rollout = RolloutLoop(
            self.scheduler,
            self.log,
            self.ledger,
            self._training_episode,
            members=config.group.size,
            timeout_s=config.episode.timeout_s,
            deadlines=self._deadlines,
        )
        self._first_group = self.log.state.admitted  # that this life admits
        self.log.commit(self.scheduler.start())
        saved = self.log.state.checkpoint
        self.cluster = Cluster(
            config,
            self._workers,
            self.folder.path,
            life=self.log.state.life,
            version=saved.version if saved else 0,
            checkpoint=self.folder.path / "checkpoints" / saved.path if saved else None,
            on_serving=lambda version: self.log.commit(self.scheduler.serving(version)),
            changed=self.log.changed,
            deadlines=self._deadlines,
        )
        self._outside = Outside(config, self.cluster, self._watchdog, self._deadlines)

    def _delete_unknown_checkpoints(self) -> None:
        """Those that the ledger does not name were completed too late."""
        state = self.log.state
        saved = state.checkpoint
        for step, path in self.folder.checkpoints().items():
            if saved is None or step > saved.version:
                shutil.rmtree(path)
        if self.resumed:
            start = f"checkpoint {saved.path}" if saved else "model.path"
            repeats = state.version - (saved.version if saved else 0)
            log.info("resuming at step %d: from %s, %d steps to repeat", state.version, start, repeats)

    async def _begin_reports(self, stack: AsyncExitStack, loop_watch: LoopWatch | None) -> None:
        config, sinks = self.config, self.config.metrics
        metrics = await stack.enter_async_context(
            Metrics(self.folder.path, sinks.sinks, sinks.project, config.model_dump(), inline=self._workers.inline)
        )
        view = stack.enter_context(open_view(config.view, self.folder.path.name))
        self._reporter = Reporter(
            config, self.log.state, self._rollout, self.cluster, self.folder, metrics, view, loop_watch
        )
        stack.push_async_callback(self._reporter.end)
        servers = f"{len(config.servers.urls)} external" if config.servers.urls else f"starting {config.servers.count}"
        log.info("run folder %s; servers: %s; trainer ranks: %d", self.folder.path, servers, config.trainer.ranks)
        await self._reporter.save_summary()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if isinstance(error, asyncio.CancelledError | ArealError):
            error.add_note(self._how_to_resume)
        self._over = True
        training = self._training
        if training and training is not asyncio.current_task() and not training.done():
            training.cancel()  # it would continue against servers that are gone
            await asyncio.wait((training,), timeout=self._deadlines.checkpoint_on_stop + 1)
        try:
            return await self._stack.__aexit__(kind, error, trace)
        except BaseExceptionGroup as failures:  # a TaskGroup wraps whatever passes through it
            cause = root_cause(failures)
            if cause is error or any(failure is error for failure in failures.exceptions):
                return False
            raise cause from cause.__cause__

    @property
    def _how_to_resume(self) -> str:
        return f"resume with: areal resume {self.folder.path}"

    def stop(self) -> None:
        """End the run as Ctrl-C does: `train` writes a last checkpoint if there is time, and the `async with` block of
        this controller is left with the error Stopped."""
        self._stop.set()

    async def _stopped(self) -> None:
        await self._stop.wait()
        raise Stopped(f"the run was stopped; {self._how_to_resume}")

    # -- where the run is

    @property
    def resumed(self) -> bool:
        """Whether this run continues what an earlier life left."""
        return self.config.run is not None

    @property
    def version(self) -> int:
        """Training steps so far, including those before a resume."""
        return self.log.state.version

    @property
    def success(self) -> dict[str, float]:
        """Label -> success share of each labelled evaluation, including those before a resume."""
        return dict(self.log.state.success)

    # -- training

    async def train(self, agent: Agent, tasks: Iterable[Task] | AsyncIterable[Task] | None = None) -> None:
        """Train until `train.steps` or the end of the data; then write a checkpoint. Arguments and errors are those of
        `generating`."""
        async with self.generating(agent, tasks):
            while batch := await self.next_batch():
                stats = await self.train_step(batch)
                published = await self.publish()
                await self.checkpoint(if_due=True)
                await self.report(batch, stats, published)
        await self.checkpoint()

    @asynccontextmanager
    async def generating(
        self, agent: Agent, tasks: Iterable[Task] | AsyncIterable[Task] | None = None
    ) -> AsyncIterator[None]:
        """While inside, keep as many episodes running as the staleness bound admits, under the watchdog. Once a run.

        tasks: rows for the agent; None takes `data.train`. Raises what ended the run early: an agent's own error after
        too many failures, Stalled, TrainerError, PublishError, ProcessError. On cancellation, the step in flight is
        finished and a last checkpoint written, if that takes no longer than `Deadlines.checkpoint_on_stop`.
        """
        if self._over:
            raise ArealError("the run is over")
        if self._has_trained:
            raise ArealError("a Controller trains once; start another with model.path=<checkpoint>")
        self._has_trained = True
        self._training = asyncio.current_task()
        source = self._tasks if tasks is None and self._tasks else await asyncio.to_thread(Tasks, tasks, self.config)
        self._reporter.begin()
        wait = Wait(self._describe, self.config.watchdog_s, lambda: self._rollout.idle)
        groups_per_step = self.config.train.batch_groups * (self.config.staleness.max + 2)
        self.log.observers.append(Progress(wait, self._rollout, groups_per_step).observe)
        try:
            async with asyncio.TaskGroup() as loops:
                background = [
                    loops.create_task(self._rollout.run(agent, source), name="rollout"),
                    loops.create_task(self._watchdog.watch(wait), name="watchdog"),
                ]
                yield
                for task in background:
                    task.cancel()
        except asyncio.CancelledError:
            with suppress(ArealError, TimeoutError, OSError):
                async with asyncio.timeout(self._deadlines.checkpoint_on_stop):
                    await self._steps.stop()
            raise
        except BaseExceptionGroup as failures:
            cause = root_cause(failures)
            raise cause from cause.__cause__

    async def next_batch(self) -> Batch | None:
        """Wait for the next batch of groups. None after the last step, and when the data is used up."""
        return await self._steps.next_batch()

    async def train_step(self, batch: Batch) -> TrainStats:
        """Take the training step of `batch`. Raises TrainerError when the ranks fail, and fail again."""
        return await self._steps.train(batch)

    async def publish(self) -> PublishStats:
        """Bring the current weights to the servers. Raises PublishError, TrainerError."""
        return await self._steps.publish()

    async def checkpoint(self, *, if_due: bool = False) -> None:
        """A checkpoint of the current version, on disk when this returns. if_due: only when `checkpoint.every` says so,
        and written while the run continues. Raises TrainerError, LedgerError."""
        if if_due:
            await self._steps.checkpoint_if_due()
        else:
            async with self._warning("the last checkpoint"):
                await self._steps.checkpoint()

    async def report(self, batch: Batch, stats: TrainStats, published: PublishStats) -> None:
        """Show the step in the terminal, the metrics and summary.json."""
        await self._reporter.step(batch, stats, published)

    # -- outside training

    async def evaluate(
        self,
        agent: Agent,
        tasks: Iterable[Task] | None = None,
        *,
        greedy: bool = False,
        label: str = "",
    ) -> Evaluation:
        """Run the agent once on each task with the current weights; nothing is trained.

        tasks: None takes `data.evaluation` or the held-out rows. label: puts the success share into summary.json
        under this name. Raises TooManyFailures when more than `failures.agent` episodes failed for good.
        """
        rows = await asyncio.to_thread(evaluation_tasks, self.config) if tasks is None else check(list(tasks))
        result = await self._outside.evaluate(agent, rows, greedy=greedy)
        kind = "greedy" if greedy else "sampled"
        failed = f", {result.failed} failed" if result.failed else ""
        success, mean = result.success, result.mean
        log.info("evaluated %d tasks%s, %s: success %.3f, mean reward %.3f", len(rows), failed, kind, success, mean)
        if label:
            self.log.commit(self.scheduler.evaluated(label, result.success))
        if not greedy:
            self._reporter.evaluated(result)
        return result

    async def rollout(self, agent: Agent, task: Task, *, greedy: bool = False) -> EpisodeRecord:
        """One episode on the current weights, not trained on. Raises what the agent raised."""
        return await self._outside.rollout(agent, task, greedy=greedy)

    def _training_episode(self, group: int, member: int, task_id: str, agent: str, first: bool) -> Episode:
        sampling = Sampling(self.config.sampling.max_new_tokens, self.config.sampling.temperature)
        recorded = self.ledger.calls(group, member) if first and group < self._first_group else ()
        journal = Journal(partial(self.ledger.append_call, group, member), recorded)
        return self.cluster.episode(group, member, task_id, sampling, agent, journal)

    # -- from outside

    async def change_servers(self, *, count: int | None = None, urls: Sequence[str] | None = None) -> None:
        """Have `count` servers, or those at `urls`, from now on: others join or leave. `areal servers RUN` does the
        same. Returns once the new ones accept requests and the others are gone.

        Raises ConfigError for what cannot be, ArealError when a server does not come up: then none leaves.
        """
        given = {"count": count, "urls": None if urls is None else list(urls)}
        await self._change_servers({key: value for key, value in given.items() if value is not None})

    async def _change_servers(self, wanted: Any) -> None:
        if self._membership is None:
            raise ArealError("the run has not begun; enter `async with controller` first")
        if not isinstance(wanted, dict):
            raise ConfigError(f"{wanted!r} says nothing about servers; give count=3 or urls=[...]")
        await self._membership.change(wanted)

    def _routes(self) -> dict[str, Callable[[Any], Any]]:
        async def status(body: Any) -> dict[str, Any]:
            return self.status()

        async def stop(body: Any) -> str:
            self.stop()
            return self._how_to_resume

        return {"GET /status": status, "POST /servers": self._change_servers, "POST /stop": stop}

    def status(self) -> dict[str, Any]:
        """What the run does now, for `areal status`: numbers, texts, lists and dicts only."""
        state, fleet, ranks = self.log.state, self.cluster.fleet, self.cluster.ranks
        return {
            "run": self.folder.path.name,
            "life": state.life,
            "step": state.version,
            "steps": self.scheduler.settings.last_version,
            **self._reporter.status(),
            "groups": {"open": len(state.open), "trained": state.trained, "dropped": dict(state.dropped)},
            "episodes": len(self._rollout.running) + len(self._outside.running),
            "ranks": {"count": self.config.trainer.ranks, "version": ranks.version, "restarts": ranks.restarts},
            "servers": fleet.describe(),
            "queued": fleet.stats().waiting,
            "waits": self._describe(),
        }

    def _warning(self, what: str) -> AbstractAsyncContextManager[Wait]:
        """The watchdog warns when this takes long."""
        return self._watchdog.warning(lambda: [what])

    def _describe(self) -> list[str]:
        return [*waits_of(self.scheduler), *self.cluster.describe(self._rollout.running.values())]
