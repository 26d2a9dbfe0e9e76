"""What a person is told of a run: the length bias of what was dropped."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from areal.config import Config
from areal.controller.fleet import FleetStats
from areal.controller.report import Reporter
from areal.controller.state import Lengths, State
from areal.controller.weights import PublishStats
from areal.folder import RunFolder
from areal.monitor.terminal import View
from areal.types import Batch, EpisodeRecord, Group, TrainStats

FLEET = FleetStats(0, 0, 0, 0, 0, 0, 0, 0, 1, 0.0)
STATS = TrainStats(1, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 10, 10, 1.0)
BATCH = Batch(0, 0, (Group(0, "t", (EpisodeRecord(0, 0, "t", 1.0, (), 1, 0, 1.0, {}),)),))
PUBLISHED = PublishStats(1, 1, 0.0, 0.0, 0.0, 0.0, ())


class Parts:
    """Stands for the parts that a report reads: a fleet that stands still, no episodes, a sink for metrics."""

    running: dict[Any, Any] = {}  # noqa: RUF012

    @property
    def fleet(self) -> Parts:
        return self

    def stats(self) -> FleetStats:
        return FLEET

    def log(self, step: int, values: dict[str, Any]) -> None:
        self.logged = values


def reporter_of(kept: Lengths, lost: Lengths, folder: Path) -> Reporter:
    parts: Any = Parts()
    state = State(kept=kept, lost=lost)
    reporter = Reporter(Config(), state, parts, parts, RunFolder(folder, 1), parts, View(), None)
    reporter.begin()
    return reporter


async def told(reporter: Reporter, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a step says."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "areal"):
        await reporter.step(BATCH, STATS, PUBLISHED)
    return caplog.messages


@pytest.mark.parametrize(("mean", "favours"), [(900, "short"), (20, "long")])
async def test_episodes_that_are_dropped_for_their_length_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mean: int, favours: str
) -> None:
    (text,) = await told(reporter_of(Lengths(180, 180 * 300), Lengths(20, 20 * mean), tmp_path), caplog)
    assert f"10.0 % of the episodes were dropped, with {mean} tokens on average; those trained on have 300" in text
    assert f"training favours the {favours} ones" in text


@pytest.mark.parametrize(
    ("kept", "lost"),
    [
        (Lengths(180, 180 * 300), Lengths(20, 20 * 310)),  # as long as the others
        (Lengths(180, 180 * 300), Lengths(19, 19 * 900)),  # too few
        (Lengths(1800, 1800 * 300), Lengths(20, 20 * 900)),  # too small a share
        (Lengths(), Lengths(20, 20 * 900)),  # nothing to compare with
    ],
)
async def test_no_bias_is_told_of_where_there_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: Lengths, lost: Lengths
) -> None:
    assert not await told(reporter_of(kept, lost, tmp_path), caplog)


async def test_a_bias_is_told_again_when_twice_as_many_were_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost = Lengths(20, 20 * 900)
    reporter = reporter_of(Lengths(180, 180 * 300), lost, tmp_path)
    assert len(await told(reporter, caplog)) == 1
    lost.add(19, 19 * 900)
    assert not await told(reporter, caplog)
    lost.add(1, 900)
    assert len(await told(reporter, caplog)) == 1
