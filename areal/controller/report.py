"""What a person sees of a run: a report of each step, a summary at its end."""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress
from dataclasses import asdict

import numpy as np

from areal.config import Config
from areal.controller.cluster import Cluster
from areal.controller.evaluation import Evaluation
from areal.controller.rollout import RolloutLoop
from areal.controller.scheduler import State
from areal.controller.watchdog import LoopWatch
from areal.controller.weights import PublishStats
from areal.folder import RunFolder
from areal.monitor.metrics import Metrics, StepReport, staleness_of
from areal.monitor.terminal import View
from areal.types import Batch, TrainStats

BIAS_EPISODES, BIAS_SHARE, BIAS_RATIO = 20, 0.02, 1.5
"""A length bias is warned of from so many dropped episodes on, such a share, and such a ratio of mean lengths."""

log = logging.getLogger("areal")


class Reporter:
    """loop_watch: None where nothing can block the event loop (a simulation); no curve is drawn then."""

    def __init__(
        self,
        config: Config,
        state: State,
        rollout: RolloutLoop,
        cluster: Cluster,
        folder: RunFolder,
        metrics: Metrics,
        view: View,
        loop_watch: LoopWatch | None,
    ) -> None:
        self.config = config
        self._success = math.nan
        """Of the last sampled evaluation."""
        self._state = state
        self._rollout = rollout
        self._cluster = cluster
        self._folder = folder
        self._metrics = metrics
        self._view = view
        self._loop_watch = loop_watch
        self._started = asyncio.get_running_loop().time()
        self._trained_tokens = 0
        self._train_s = self._paused_s = 0.0
        self._lost_told = 0
        self._gap_max = self._reward = math.nan

    def begin(self) -> None:
        """Training begins: the first step counts from here."""
        self._last_step, self._fleet_stats = asyncio.get_running_loop().time(), self._cluster.fleet.stats()

    async def step(self, batch: Batch, stats: TrainStats, published: PublishStats) -> None:
        """One step, to the view, the metrics and the summary."""
        loop_time = asyncio.get_running_loop().time()
        seconds, self._last_step = loop_time - self._last_step, loop_time
        before, self._fleet_stats = self._fleet_stats, self._cluster.fleet.stats()
        self._train_s += seconds
        self._paused_s += self._fleet_stats.paused_s - before.paused_s
        self._trained_tokens += stats.tokens
        self._gap_max = float(np.fmax(self._gap_max, stats.logprob_gap_max))
        self._reward = float(np.mean([episode.reward for group in batch.groups for episode in group.episodes]))
        ages = staleness_of(batch)
        stale = sum(count for age, count in ages.items() if age > self.config.staleness.max)
        report = StepReport(
            step=stats.version,
            steps=self.config.train.steps,
            version=stats.version,
            reward_mean=self._reward,
            groups=len(batch.groups),
            staleness={age: count for age, count in ages.items() if age <= self.config.staleness.max},
            masked_share=stale / max(1, sum(ages.values())),
            generated_tokens_per_s=(self._fleet_stats.tokens - before.tokens) / seconds,
            trained_tokens_per_s=stats.tokens / stats.seconds,
            paused_share=(self._fleet_stats.paused_s - before.paused_s) / seconds,
            logprob_gap=stats.logprob_gap_max,
            success=self._success,
            episodes_running=len(self._rollout.running),
            groups_open=len(self._state.open),
            seconds=seconds,
        )
        lengths = {"kept": self._state.kept, "lost": self._state.lost}
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
        await self.save_summary()

    def evaluated(self, result: Evaluation) -> None:
        """A sampled evaluation ended: the reports of the steps that follow show its success."""
        self._success = result.success

    def status(self) -> dict[str, object]:
        """For a person who asks: seconds since the start, and the mean reward of the last step."""
        reward = None if math.isnan(self._reward) else self._reward
        return {"seconds": asyncio.get_running_loop().time() - self._started, "reward": reward}

    def repeated(self, stats: TrainStats) -> None:
        """A step that ranks took again after a restart, to the metrics."""
        self._metrics.log(stats.version, {"repeated": True, "train": asdict(stats)})

    def _warn_of_length_bias(self) -> None:
        """Dropping long episodes teaches the model to be short, and the other way round."""
        kept, lost = self._state.kept, self._state.lost
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

    async def save_summary(self) -> None:
        """summary.json as of now: a run that is killed leaves one, too."""
        with suppress(OSError):  # a full disk: the metrics warn of it, and `end` raises
            await asyncio.to_thread(self._folder.write_summary, self._summary(), last=False)

    async def end(self) -> None:
        """The last summary, and the reward curve: of every run, however it ended."""
        await asyncio.to_thread(self._folder.write_summary, self._summary())
        curve = None if self._loop_watch is None else await asyncio.to_thread(self._folder.draw_curve)
        log.info("summary: %s%s", self._folder.summary_file, f"; reward curve: {curve}" if curve else "")

    def _summary(self) -> dict[str, object]:
        state = self._state
        fleet = self._cluster.fleet.stats() if hasattr(self._cluster, "fleet") else None
        return {
            "steps": state.version,
            "version": state.version,
            "wall_s": asyncio.get_running_loop().time() - self._started,
            **state.success,
            "max_staleness_trained": state.max_staleness,
            "groups": {
                "admitted": state.admitted,
                "trained": state.trained,
                "dropped": dict(state.dropped),
                "open": len(state.open),
            },
            "tokens_generated": fleet.tokens if fleet else 0,
            "tokens_trained": self._trained_tokens,
            "weights_pause_share": self._paused_s / self._train_s if self._train_s else 0.0,
            "logprob_gap_max": self._gap_max,
        }
