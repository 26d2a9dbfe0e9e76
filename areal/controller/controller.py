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
import logging
import math
import shutil
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import numpy as np

from areal.agents.episode import Episode
from areal.agents.journal import Journal
from areal.algorithms.batching import build_request, learning_rate
from areal.config import Config
from areal.controller.cluster import Cluster
from areal.controller.facts import Admitted, Completed, Dropped, Fact, Finished, Trained
from areal.controller.ledger import Ledger
from areal.controller.rollout import Agent, Failure, RolloutLoop, Signal, attempt, name_of
from areal.controller.scheduler import Scheduler, SchedulerSettings
from areal.controller.watchdog import LoopWatch, Watchdog
from areal.controller.weights import PublishStats
from areal.data import Tasks, check, evaluation_tasks
from areal.doctor import before_run
from areal.errors import ArealError, TooManyFailures, TrainerError, VersionConflict, root_cause
from areal.masking import MaskingFormatter
from areal.metrics import Metrics, StepReport, staleness_of
from areal.run import RunFolder
from areal.types import Batch, EpisodeRecord, Group, Sampling, Task, TrainRequest, TrainStats
from areal.view import open_view
from areal.workers.local import LocalWorkers
from areal.workers.protocols import Workers

log = logging.getLogger("areal")

T = TypeVar("T")

EVALUATION = -1
"""The group number of episodes that are not trained on."""
BIAS_EPISODES, BIAS_SHARE, BIAS_RATIO = 20, 0.02, 1.5
"""A length bias is warned of from so many dropped episodes on, such a share, and such a ratio of mean lengths."""
CHECKPOINT_ON_STOP_S = 4.0
"""A stopped run may take this long for a last checkpoint; else the one before is named."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """rewards: of the episodes that finished, by task id. A failed episode is in `failed`, never a reward (I9)."""

    rewards: dict[str, list[float]]
    failed: int

    @property
    def mean(self) -> float:
        """Mean reward; NaN when no episode finished."""
        return self._mean(lambda reward: reward)

    @property
    def success(self) -> float:
        """Share of episodes with a reward of at least 1; NaN when no episode finished."""
        return self._mean(lambda reward: float(reward >= 1))

    def _mean(self, value: Callable[[float], float]) -> float:
        values = [value(reward) for rewards in self.rewards.values() for reward in rewards]
        return sum(values) / len(values) if values else math.nan


class Controller:
    """Starts servers and ranks, runs agents, trains. Use as `async with`; one run each."""

    scheduler: Scheduler
    ledger: Ledger
    cluster: Cluster
    folder: RunFolder

    def __init__(self, config: Config, workers: Callable[[Config], Workers] = LocalWorkers) -> None:
        self.config = config
        self._workers = workers(config)
        self._stack = AsyncExitStack()
        self._changed = Signal()
        self._trained_tokens = 0
        self._train_s = self._still_s = 0.0
        self._rollouts = 0
        self._trains = False
        self._tasks: Tasks | None = None
        self._request: TrainRequest | None = None
        self._writing: asyncio.Task[None] | None = None
        self._completed = 0
        self._trainer_restarts = 0
        self._lost_told = 0
        self._gap_max = math.nan
        self._last_success = math.nan

    async def __aenter__(self) -> Self:
        """Raises ConfigError before anything starts; ProcessError or TrainerError when a part does not come up."""
        config = self.config
        self.scheduler = Scheduler(SchedulerSettings.from_config(config), self._record)
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
                self.ledger = Ledger.open(config.run / "ledger", inline=inline)  # refuses a run that somebody has
                stack.push_async_callback(self.ledger.close)
                self.folder = await asyncio.to_thread(RunFolder.open, config)
            else:
                self.folder = await asyncio.to_thread(RunFolder.create, config)
                self.ledger = Ledger.create(self.folder.ledger, inline=inline)
                stack.push_async_callback(self.ledger.close)
            stack.enter_context(self._log_file())
            await asyncio.to_thread(self._replay)
            self._metrics = await stack.enter_async_context(
                Metrics(
                    self.folder.path,
                    config.metrics.sinks,
                    config.metrics.project,
                    config.model_dump(),
                    inline=inline,
                )
            )
            self._view = stack.enter_context(open_view(config.view, self.folder.path.name))
            self._started = asyncio.get_running_loop().time()
            self._rollout = RolloutLoop(
                self.scheduler,
                self.ledger,
                self._changed,
                self._training_episode,
                members=config.group.size,
                timeout_s=config.episode.timeout_s,
            )
            stacks = self.folder.logs / "stalled.txt"
            self._watchdog = Watchdog(config.watchdog_s, self._describe, lambda: self._rollout.idle, stacks)
            self._first_group = self.scheduler.state.admitted  # that this controller admits
            attempt = self.scheduler.start()
            self._loop_watch = None if inline else stack.enter_context(LoopWatch())
            saved = self.scheduler.state.checkpoint
            self.cluster = Cluster(
                config,
                self._workers,
                self.folder.path,
                attempt=attempt,
                version=saved.version if saved else 0,
                checkpoint=self.folder.path / "checkpoints" / saved.path if saved else None,
                on_serving=self.scheduler.serving,
            )
            stack.push_async_callback(self._write_summary)
            servers = f"{len(config.servers.urls)} given" if config.servers.urls else f"starting {config.servers.count}"
            log.info("run folder %s; servers: %s; trainer ranks: %d", self.folder.path, servers, config.trainer.ranks)
            await stack.enter_async_context(self.cluster)
            self._background = await stack.enter_async_context(asyncio.TaskGroup())
            if self._loop_watch:
                beats = self._background.create_task(self._loop_watch.run(), name="loop watch")
                stack.callback(beats.cancel)
            await self._recover()
            log.info("ready after %.0f s", asyncio.get_running_loop().time() - self._started)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if isinstance(error, asyncio.CancelledError | ArealError):
            error.add_note(f"go on with: areal resume {self.folder.path}")
        try:
            return await self._stack.__aexit__(kind, error, trace)
        except BaseExceptionGroup as failures:  # a TaskGroup wraps whatever passes through it
            cause = root_cause(failures)
            if cause is error or any(failure is error for failure in failures.exceptions):
                return False
            raise cause from cause.__cause__

    @contextmanager
    def _log_file(self) -> Iterator[None]:
        """What areal logs, this run's folder has, whatever the program does with its own logging."""
        handler = logging.FileHandler(self.folder.logs / "controller.log", delay=True)
        handler.setFormatter(MaskingFormatter("%(asctime)s %(levelname)s %(message)s"))
        level = log.level
        log.addHandler(handler)
        if log.getEffectiveLevel() > logging.INFO:
            log.setLevel(logging.INFO)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
            handler.close()

    # -- going on with a run

    @property
    def resumed(self) -> bool:
        """Whether this run goes on with what an earlier controller left."""
        return self.config.run is not None

    def _replay(self) -> None:
        """Fold what the ledger has; nothing for a new run. A checkpoint that it does not name came to be too late."""
        for fact in self.ledger.facts():
            self.scheduler.apply(fact)
        saved = self.scheduler.state.checkpoint
        for step, path in self.folder.checkpoints().items():
            if saved is None or step > saved.version:
                shutil.rmtree(path)

    async def _recover(self) -> None:
        """Bring the ranks to where the run was, and publish."""
        await self._with_ranks(self._repeat)
        state = self.scheduler.state
        if state.attempt:
            await self._with_ranks(partial(self.cluster.weights.publish, state.version))
            self.scheduler.published(state.version)

    async def _repeat(self) -> None:
        """Take the steps after the checkpoint again, with their recorded batches and learning rates (I4)."""
        state = self.scheduler.state
        for formed in list(state.repeatable):
            if formed.from_version < (self.cluster.held or 0):
                continue
            batch = Batch(formed.batch, formed.from_version, tuple(map(self._recorded, formed.groups)))
            stats = await self._train_step(batch, formed.learning_rate)
            self._metrics.log(stats.version, {"repeated": True, "train": asdict(stats)})
            log.info("repeated step %d of %d: loss %.6g", stats.version, state.version, stats.loss)

    def _recorded(self, number: int) -> Group:
        episodes = self.ledger.episodes(number)
        return Group(number, episodes[0].task_id, episodes)

    # -- the main loop

    async def train(self, agent: Agent, tasks: Iterable[Task] | AsyncIterable[Task] | None = None) -> None:
        """Train until `train.steps` or the end of the data; then write a checkpoint.

        tasks: rows for the agent; None takes `data.train`. Raises what ended the run early: an agent's own error
        after too many failures, Stalled, TrainerError, PublishError, ProcessError.
        """
        if self._trains:
            raise ArealError("a Controller trains once; start another with model.path=<checkpoint>")
        self._trains = True
        source = self._tasks if tasks is None and self._tasks else await asyncio.to_thread(Tasks, tasks, self.config)
        self._last_step, self._fleet_stats = asyncio.get_running_loop().time(), self.cluster.fleet.stats()
        try:
            async with asyncio.TaskGroup() as loops:
                background = [
                    loops.create_task(self._rollout.run(agent, source), name="rollout"),
                    loops.create_task(self._watchdog.run(), name="watchdog"),
                ]
                while batch := await self._next_batch():
                    rate = learning_rate(batch.from_version, self.config)
                    stats = await self._with_ranks(partial(self._train_step, batch, rate))
                    self.scheduler.trained(batch.id)
                    published = await self._with_ranks(partial(self.cluster.weights.publish, stats.version))
                    self.scheduler.published(stats.version)
                    if self.config.checkpoint.every and stats.version % self.config.checkpoint.every == 0:
                        await self._with_ranks(self._begin_checkpoint)
                    self._report(batch, stats, published)
                for task in background:
                    task.cancel()
        except asyncio.CancelledError:
            with suppress(ArealError, TimeoutError, OSError):
                async with asyncio.timeout(CHECKPOINT_ON_STOP_S):
                    await self._end_step()
                    await self._checkpoint()
            raise
        except BaseExceptionGroup as failures:
            cause = root_cause(failures)
            raise cause from cause.__cause__
        await self._with_ranks(self._checkpoint)

    async def _next_batch(self) -> Batch | None:
        """Wait for the next batch, on disk. None at the last step and when the data is used up."""
        formed = self.scheduler.state.batch  # of an earlier controller, which did not come to its end
        while formed is None:
            rate = learning_rate(self.scheduler.state.version, self.config)
            formed = self.scheduler.next_batch(final=self._rollout.exhausted, learning_rate=rate)
            if formed:
                break
            if self._rollout.exhausted or self.scheduler.state.version >= self.scheduler.settings.last_version:
                return None
            await self._changed.wait()
        await self.ledger.barrier()
        groups = []
        for number in formed.groups:
            here = self._rollout.finished.pop(number, {})
            if len(here) == len(self.scheduler.state.open[number].rewards):
                episodes = tuple(here[member] for member in sorted(here))
                groups.append(Group(number, episodes[0].task_id, episodes))
            else:  # begun by an earlier controller
                groups.append(self._recorded(number))
        return Batch(formed.batch, formed.from_version, tuple(groups))

    async def _train_step(self, batch: Batch, rate: float) -> TrainStats:
        request = await asyncio.to_thread(
            build_request,
            batch,
            self.config,
            attempt=self.scheduler.state.attempt,
            learning_rate=rate,
            ranks=self.cluster.trainer.data_parallel,
            seed=self.config.seed,
        )
        self._request, self.cluster.held = request, None
        stats = await self.cluster.trainer.train(request)
        self._request, self.cluster.held = None, stats.version
        return stats

    async def _end_step(self) -> None:
        """After a stop in mid-step: the ranks finish it all the same, and a repeat gets their answer (I4)."""
        if self._request is not None:
            stats = await self.cluster.trainer.train(self._request)
            self.scheduler.trained(self._request.batch_id)
            self._request, self.cluster.held = None, stats.version

    async def _with_ranks(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do what needs the ranks. When they fail they are started again, from the last checkpoint, and it is done once
        more. The same failure twice is no accident: it ends the run, and so do trainer.restarts of them."""
        failed = False
        while True:
            try:
                return await work()
            except VersionConflict:
                raise
            except TrainerError as error:
                if failed or self._trainer_restarts == self.config.trainer.restarts:
                    raise
                failed = True
                self._trainer_restarts += 1
                limit = self.config.trainer.restarts
                log.warning("the ranks are started again, %d of %d: %s", self._trainer_restarts, limit, error)
            saved = self.scheduler.state.checkpoint
            version, path = (saved.version, self.folder.path / "checkpoints" / saved.path) if saved else (0, None)
            await self.cluster.restart_trainer(version, path)
            await self._repeat()

    async def _begin_checkpoint(self) -> None:
        """Copy the trainer's state aside; it is written while the run goes on. One at a time."""
        version = self.scheduler.state.version
        if self._writing:
            await self._writing
        saved = self.scheduler.state.checkpoint
        if saved is None or saved.version != version:
            await self.cluster.trainer.stage(str(self.folder.checkpoint(version)))
            self._writing = self._background.create_task(self._write_checkpoint(version), name="checkpoint")

    async def _write_checkpoint(self, version: int) -> None:
        try:
            await self.cluster.trainer.write()
        except TrainerError as error:
            if not self.cluster.trainer.lost:
                raise
            log.warning("the checkpoint of step %d was lost with its rank: %s", version, error)
            return
        self.scheduler.checkpointed(version, self.folder.checkpoint(version).name)
        await self.ledger.barrier()
        await asyncio.to_thread(self.folder.prune)

    async def _checkpoint(self) -> None:
        await self._begin_checkpoint()
        if self._writing:
            await self._writing

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
        rewards: dict[str, list[float]] = {}
        failures: list[Failure] = []

        async def one(index: int, task: Task) -> None:
            for left in reversed(range(self.config.episode.retries + 1)):
                outcome = await self._attempt(agent, index, task, greedy)
                if isinstance(outcome, EpisodeRecord):
                    rewards.setdefault(task["id"], []).append(outcome.reward)
                    return
                if not left:
                    failures.append(outcome)
                    log.warning("evaluation of task %s failed: %s", task["id"], outcome.summary)
            if len(failures) > self.config.failures.agent:
                raise TooManyFailures(f"{len(failures)} evaluation episodes failed; the last:\n{failures[-1].message}")

        # As many at once as training would run: more would only wait at the servers, on their deadlines.
        room = asyncio.Semaphore(self.config.servers.max_running * len(self.cluster.fleet.servers))
        try:
            async with asyncio.TaskGroup() as episodes:
                for index, task in enumerate(rows):
                    await room.acquire()
                    episodes.create_task(one(index, task)).add_done_callback(lambda _: room.release())
        except BaseExceptionGroup as group:
            cause = root_cause(group)
            raise cause from cause.__cause__
        result = Evaluation(rewards, len(failures))
        kind = "greedy" if greedy else "sampled"
        failed = f", {result.failed} failed" if result.failed else ""
        log.info(
            "evaluated %d tasks%s, %s: success %.3f, mean reward %.3f",
            len(rows),
            failed,
            kind,
            result.success,
            result.mean,
        )
        if label:
            self.scheduler.evaluated(label, result.success)
        if not greedy:
            self._last_success = result.success
        return result

    async def rollout(self, agent: Agent, task: Task, *, greedy: bool = False) -> EpisodeRecord:
        """One episode on the current weights, not trained on. Raises what the agent raised."""
        self._rollouts += 1
        outcome = await self._attempt(agent, self._rollouts, task, greedy)
        if isinstance(outcome, Failure):
            raise outcome.error
        return outcome

    async def _attempt(self, agent: Agent, index: int, task: Task, greedy: bool) -> EpisodeRecord | Failure:
        sampling = Sampling(self.config.sampling.max_new_tokens, 0.0 if greedy else self.config.sampling.temperature)
        episode = self.cluster.episode(EVALUATION, index, str(task["id"]), sampling, name_of(agent))
        return await attempt(agent, episode, task, self.config.episode.timeout_s)

    # -- what others tell the controller

    def _training_episode(self, group: int, member: int, task_id: str, agent: str, first: bool) -> Episode:
        sampling = Sampling(self.config.sampling.max_new_tokens, self.config.sampling.temperature)
        recorded = self.ledger.calls(group, member) if first and group < self._first_group else ()
        journal = Journal(partial(self.ledger.append_call, group, member), recorded)
        return self.cluster.episode(group, member, task_id, sampling, agent, journal)

    def _record(self, fact: Fact) -> None:
        """Each fact of the scheduler: to the ledger, and to whoever waits for it."""
        record = self._rollout.finished[fact.group][fact.member] if isinstance(fact, Finished) else None
        self.ledger.append(fact, record)
        if isinstance(fact, Dropped):
            self._rollout.drop(fact.group)
        if isinstance(fact, Trained):
            self._completed = 0
        if isinstance(fact, Completed):
            self._completed += 1
        # That many complete groups without a step are a livelock: each of them was dropped as too old.
        enough = self._completed <= self.config.train.batch_groups * (self.config.staleness.max + 2)
        woke = isinstance(fact, Admitted) and self._rollout.woken  # after an idle time a new wait begins
        if woke or (enough and isinstance(fact, Completed | Trained)):
            self._watchdog.progress()
        self._changed.notify()

    def _describe(self) -> list[str]:
        oldest = sorted(self._rollout.running.values(), key=lambda episode: episode.awaits[1])[:8]
        fleet = self.cluster.fleet
        episodes = [f"{episode.state}{fleet.where(episode.key)}" for episode in oldest]
        return [*self.scheduler.describe(), *episodes, *fleet.waits()[:8]]

    # -- what a person sees

    def _report(self, batch: Batch, stats: TrainStats, published: PublishStats) -> None:
        """One step, to the view and the metrics."""
        loop_time = asyncio.get_running_loop().time()
        seconds, self._last_step = loop_time - self._last_step, loop_time
        before, self._fleet_stats = self._fleet_stats, self.cluster.fleet.stats()
        self._train_s += seconds
        self._still_s += self._fleet_stats.still_s - before.still_s
        self._trained_tokens += stats.tokens
        self._gap_max = float(np.fmax(self._gap_max, stats.logprob_gap_max))
        ages = staleness_of(batch)
        late = sum(count for age, count in ages.items() if age > self.config.staleness.max)
        report = StepReport(
            step=stats.version,
            steps=self.config.train.steps,
            version=stats.version,
            reward_mean=float(np.mean([episode.reward for group in batch.groups for episode in group.episodes])),
            groups=len(batch.groups),
            staleness={age: count for age, count in ages.items() if age <= self.config.staleness.max},
            masked_share=late / max(1, sum(ages.values())),
            generated_tokens_per_s=(self._fleet_stats.tokens - before.tokens) / seconds,
            trained_tokens_per_s=stats.tokens / stats.seconds,
            still_share=(self._fleet_stats.still_s - before.still_s) / seconds,
            logprob_gap=stats.logprob_gap_max,
            success=self._last_success,
            episodes_running=len(self._rollout.running),
            groups_open=len(self.scheduler.state.open),
            seconds=seconds,
        )
        lengths = {"kept": self.scheduler.state.kept, "lost": self.scheduler.state.lost}
        self._metrics.log(
            report.step,
            {
                **report.metrics(),
                "train": asdict(stats),
                "publish": asdict(published),
                "episodes": {f"{name}_{key}": v for name, of in lengths.items() for key, v in asdict(of).items()},
                "loop_lag_s": self._loop_watch.lag_s() if self._loop_watch else 0.0,
            },
        )
        self._warn_of_length_bias()
        self._view.step(report)

    def _warn_of_length_bias(self) -> None:
        """Dropping long episodes teaches the model to be short, and the other way round."""
        kept, lost = self.scheduler.state.kept, self.scheduler.state.lost
        if lost.episodes < max(self._lost_told, BIAS_EPISODES) or not kept.tokens:
            return
        share, ratio = lost.episodes / (kept.episodes + lost.episodes), lost.mean / kept.mean
        if share > BIAS_SHARE and not 1 / BIAS_RATIO < ratio < BIAS_RATIO:
            self._lost_told = 2 * lost.episodes
            log.warning(
                "%.1f %% of the episodes were dropped, with %.0f tokens on average; those trained on have %.0f: "
                "training favours the %s ones. Look at `areal inspect` for why they were dropped",
                100 * share,
                lost.mean,
                kept.mean,
                "short" if ratio > 1 else "long",
            )

    async def _write_summary(self) -> None:
        """summary.json and the reward curve: of every run, however it ended."""
        state, fleet = self.scheduler.state, self.cluster.fleet.stats() if hasattr(self.cluster, "fleet") else None
        wall_s = asyncio.get_running_loop().time() - self._started
        summary = {
            "steps": state.version,
            "version": state.version,
            "wall_s": wall_s,
            **state.success,
            "max_staleness_trained": state.max_staleness,
            "groups": {
                "admitted": state.admitted,
                "trained": state.trained,
                "dropped": state.dropped,
                "open": len(state.open),
            },
            "tokens_generated": fleet.tokens if fleet else 0,
            "tokens_trained": self._trained_tokens,
            "weights_pause_share": self._still_s / self._train_s if self._train_s else 0.0,
            "logprob_gap_max": self._gap_max,
        }
        await asyncio.to_thread(self.folder.write_summary, summary)
        curve = None if self._workers.inline else await asyncio.to_thread(self.folder.draw_curve)
        log.info("summary: %s%s", self.folder.summary_file, f"; reward curve: {curve}" if curve else "")
