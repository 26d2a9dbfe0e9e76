"""One run, from start to stop.

    async with Controller(config) as controller:
        await controller.train(agent, tasks)

`train` is the loop of the paper: take the batch that the scheduler formed, train on it, publish the weights; the
rollout loop generates all the while. Everything that lives as long as the run sits in one TaskGroup, so that a part
that dies ends the run with its own traceback. The library owns no loop and no signal handler: any asyncio program
can hold a Controller, or two.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Self

from areal.agents.episode import Episode
from areal.agents.journal import Journal
from areal.checks import before_run
from areal.config import Config
from areal.controller.cluster import Cluster
from areal.controller.evaluation import Evaluation, evaluate
from areal.controller.ledger import Ledger
from areal.controller.log import RunLog
from areal.controller.membership import Membership
from areal.controller.report import Reporter
from areal.controller.rollout import Agent, Failure, RolloutLoop, name_of, run_episode
from areal.controller.scheduler import Scheduler, SchedulerSettings
from areal.controller.train import TrainLoop
from areal.controller.watchdog import LoopWatch, Progress, Wait, Watchdog, spare_the_loop, waits_of
from areal.data import Tasks, check, evaluation_tasks
from areal.deadlines import DEADLINES, Deadlines
from areal.errors import ArealError, root_cause
from areal.folder import RunFolder
from areal.monitor.metrics import Metrics
from areal.monitor.terminal import open_view
from areal.types import EpisodeRecord, Sampling, Task
from areal.workers.local import LocalWorkers
from areal.workers.protocols import Workers

log = logging.getLogger("areal")

EVALUATION = -1
"""The group number of episodes that are not trained on."""


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
        self._rollouts = 0
        self._trains = False
        self._tasks: Tasks | None = None
        self._membership: Membership | None = None
        self._training: asyncio.Task[None] | None = None
        self._over = False
        self._outside: dict[Episode, None] = {}
        """Episodes in progress that are not trained on."""

    async def __aenter__(self) -> Self:
        """Raises ConfigError before anything starts; ProcessError or TrainerError when a part does not come up."""
        try:
            return await self._start()
        except BaseExceptionGroup as failures:
            cause = root_cause(failures)
            raise cause from cause.__cause__

    async def _start(self) -> Self:
        config = self.config
        await asyncio.to_thread(self._workers.check)
        if config.data.train:
            self._tasks = await asyncio.to_thread(Tasks, None, config)
        if config.data.evaluation:
            await asyncio.to_thread(evaluation_tasks, config)
        inline = self._workers.inline
        if not inline:
            await asyncio.to_thread(before_run, config)
        async with AsyncExitStack() as stack:
            if config.run:
                self.ledger = Ledger.open(config.run / "ledger")  # refuses a run that somebody has
                stack.push_async_callback(self.ledger.close)
                self.folder = await asyncio.to_thread(RunFolder.open, config)
            else:
                self.folder = await asyncio.to_thread(RunFolder.create, config)
                self.ledger = Ledger.create(self.folder.ledger)
                stack.push_async_callback(self.ledger.close)
            stack.enter_context(self.folder.log_file())
            self.log = await asyncio.to_thread(RunLog, self.ledger)
            self.scheduler = Scheduler(SchedulerSettings.from_config(config), self.log.state)
            await asyncio.to_thread(self._replayed)
            metrics = await stack.enter_async_context(
                Metrics(
                    self.folder.path,
                    config.metrics.sinks,
                    config.metrics.project,
                    config.model_dump(),
                    inline=inline,
                )
            )
            view = stack.enter_context(open_view(config.view, self.folder.path.name))
            started = asyncio.get_running_loop().time()
            self._rollout = RolloutLoop(
                self.scheduler,
                self.log,
                self.ledger,
                self._training_episode,
                members=config.group.size,
                timeout_s=config.episode.timeout_s,
                deadlines=self._deadlines,
            )
            self._watchdog = Watchdog(self.folder.logs / "stalled.txt", self._deadlines)
            self._first_group = self.scheduler.state.admitted  # that this controller admits
            self.log.commit(self.scheduler.start())
            loop_watch = None if inline else stack.enter_context(LoopWatch())
            saved = self.scheduler.state.checkpoint
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
            self._reporter = Reporter(
                config, self.scheduler.state, self._rollout, self.cluster, self.folder, metrics, view, loop_watch
            )
            stack.push_async_callback(self._reporter.end)
            servers = f"{len(config.servers.urls)} given" if config.servers.urls else f"starting {config.servers.count}"
            log.info("run folder %s; servers: %s; trainer ranks: %d", self.folder.path, servers, config.trainer.ranks)
            await self._reporter.save_summary()
            async with self._warning(f"servers and ranks to start; their output is in {self.folder.logs}"):
                await stack.enter_async_context(self.cluster)
            background = await stack.enter_async_context(asyncio.TaskGroup())
            if loop_watch:
                stack.callback(background.create_task(loop_watch.run(), name="loop watch").cancel)
            self._membership = Membership(config, self.cluster, self.folder.servers_file)
            await self._membership.begin()
            stack.callback(self._membership.close)
            stack.callback(background.create_task(self._membership.run(), name="membership").cancel)
            if not inline:
                stack.callback(background.create_task(self._membership.watch(), name="servers.toml").cancel)
            self._steps = TrainLoop(
                config,
                self.scheduler,
                self.log,
                self.ledger,
                self._rollout,
                self.cluster,
                self.folder,
                background,
                self._reporter,
            )
            if not inline:
                spare_the_loop()
                stack.callback(gc.unfreeze)  # another Controller of this process, if there is one, loses by that
            async with self._warning("the steps since the checkpoint, which the ranks repeat, and their publication"):
                await self._steps.recover()
            log.info("ready after %.0f s", asyncio.get_running_loop().time() - started)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if isinstance(error, asyncio.CancelledError | ArealError):
            error.add_note(f"go on with: areal resume {self.folder.path}")
        self._over = True
        training = self._training
        if training and training is not asyncio.current_task() and not training.done():
            training.cancel()  # it would go on against servers that are gone
            await asyncio.wait((training,), timeout=self._deadlines.checkpoint_on_stop + 1)
        try:
            return await self._stack.__aexit__(kind, error, trace)
        except BaseExceptionGroup as failures:  # a TaskGroup wraps whatever passes through it
            cause = root_cause(failures)
            if cause is error or any(failure is error for failure in failures.exceptions):
                return False
            raise cause from cause.__cause__

    # -- going on with a run

    @property
    def resumed(self) -> bool:
        """Whether this run goes on with what an earlier controller left."""
        return self.config.run is not None

    @property
    def version(self) -> int:
        """Training steps so far, those before a resume too."""
        return self.scheduler.state.version

    @property
    def success(self) -> dict[str, float]:
        """Label -> success share of each labelled evaluation, those before a resume too."""
        return dict(self.scheduler.state.success)

    def _replayed(self) -> None:
        """Delete checkpoints that the ledger does not name: they were completed too late."""
        saved = self.scheduler.state.checkpoint
        for step, path in self.folder.checkpoints().items():
            if saved is None or step > saved.version:
                shutil.rmtree(path)
        if self.resumed:
            state, start = self.scheduler.state, f"checkpoint {saved.path}" if saved else "model.path"
            repeats = state.version - (saved.version if saved else 0)
            log.info("the run goes on at step %d: from %s, %d steps to repeat", state.version, start, repeats)

    # -- the main loop

    async def train(self, agent: Agent, tasks: Iterable[Task] | AsyncIterable[Task] | None = None) -> None:
        """Train until `train.steps` or the end of the data; then write a checkpoint.

        tasks: rows for the agent; None takes `data.train`. Raises what ended the run early: an agent's own error
        after too many failures, Stalled, TrainerError, PublishError, ProcessError.
        """
        if self._over:
            raise ArealError("the run is over")
        if self._trains:
            raise ArealError("a Controller trains once; start another with model.path=<checkpoint>")
        self._trains = True
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
                while batch := await self._steps.next_batch():
                    stats = await self._steps.train(batch)
                    published = await self._steps.publish(stats.version)
                    await self._steps.checkpoint_if_due()
                    await self._reporter.step(batch, stats, published)
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
        async with self._warning("the last checkpoint"):
            await self._steps.checkpoint()

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
        config = self.config
        async with self._warning() as wait:

            async def one(index: int, task: Task) -> EpisodeRecord | Failure:
                outcome = await self._run_outside(agent, index, task, greedy)
                wait.progress()
                return outcome

            result = await evaluate(
                rows,
                one,
                # As many at once as training would run: more would only wait at the servers, on their deadlines.
                at_once=config.servers.max_running * len(self.cluster.fleet.servers),
                retries=config.episode.retries,
                budget=config.failures.agent,
            )
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
        self._rollouts += 1
        async with self._warning():
            outcome = await self._run_outside(agent, self._rollouts, task, greedy)
        if isinstance(outcome, Failure):
            raise outcome.error
        return outcome

    async def _run_outside(self, agent: Agent, index: int, task: Task, greedy: bool) -> EpisodeRecord | Failure:
        sampling = Sampling(self.config.sampling.max_new_tokens, 0.0 if greedy else self.config.sampling.temperature)
        episode = self.cluster.episode(EVALUATION, index, str(task["id"]), sampling, name_of(agent))
        self._outside[episode] = None
        try:
            return await run_episode(agent, episode, task, self.config.episode.timeout_s, self._deadlines)
        finally:
            del self._outside[episode]

    async def change_servers(self, *, count: int | None = None, urls: Sequence[str] | None = None) -> None:
        """Have `count` servers, or those at `urls`, from now on: others join or leave. `servers.toml` in the run folder
        does the same. Returns once the new ones serve and the others are gone.

        Raises ConfigError for what cannot be, ArealError when a server does not come up: then none leaves.
        """
        if self._membership is None:
            raise ArealError("the run has not begun; enter `async with controller` first")
        given = {"count": count, "urls": None if urls is None else list(urls)}
        await self._membership.change({key: value for key, value in given.items() if value is not None})

    # -- what others tell the controller

    def _training_episode(self, group: int, member: int, task_id: str, agent: str, first: bool) -> Episode:
        sampling = Sampling(self.config.sampling.max_new_tokens, self.config.sampling.temperature)
        recorded = self.ledger.calls(group, member) if first and group < self._first_group else ()
        journal = Journal(partial(self.ledger.append_call, group, member), recorded)
        return self.cluster.episode(group, member, task_id, sampling, agent, journal)

    def _describe(self) -> list[str]:
        return [*waits_of(self.scheduler), *self._describe_episodes(self._rollout.running.values())]

    def _warning(self, what: str = "") -> AbstractAsyncContextManager[Wait]:
        """The watchdog warns when this takes long. what: is waited for; without it, the episodes outside training."""
        return self._watchdog.warning(lambda: [what] if what else self._describe_episodes(self._outside))

    def _describe_episodes(self, episodes: Iterable[Episode]) -> list[str]:
        fleet = getattr(self.cluster, "fleet", None)  # None before the servers are there
        if fleet is None:
            return []
        oldest = sorted(episodes, key=lambda episode: episode.awaits[1])[:8]
        return [*(f"{episode.state}{fleet.where(episode.key)}" for episode in oldest), *fleet.waits()[:8]]
