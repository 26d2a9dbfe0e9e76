import json
import logging
import sys
import threading

import numpy as np
import pytest

from areal.errors import ConfigError
from areal.monitor.metrics import Metrics, Rate, StepReport, staleness_of
from areal.types import Batch, EpisodeRecord, Group, Trajectory


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


async def test_one_json_object_a_line_and_nan_is_null(tmp_path):
    async with Metrics(tmp_path) as metrics:
        metrics.log(1, {"reward": float("nan"), "gap": np.float32(0.5), "staleness": {0: 3, 1: 1}, "note": "x"})
        metrics.log(2, {"reward": 0.25})
    first, second = rows(tmp_path)
    assert first.pop("time") <= second.pop("time")
    assert first == {"step": 1, "reward": None, "gap": 0.5, "staleness": {"0": 3, "1": 1}, "note": "x"}
    assert second == {"step": 2, "reward": 0.25}


async def test_a_second_life_appends(tmp_path):
    for step in (1, 2):
        async with Metrics(tmp_path) as metrics:
            metrics.log(step, {})
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


async def test_a_report_is_logged_under_its_names(tmp_path):
    report = StepReport(step=3, steps=9, version=3, reward_mean=0.5, staleness={0: 4}, notes=("hello",))
    async with Metrics(tmp_path) as metrics:
        metrics.log(report.step, report.metrics())
    row = rows(tmp_path)[0]
    assert (row["step"], row["reward"], row["staleness"], row["success"]) == (3, 0.5, {"0": 4}, None)


async def test_lines_are_there_before_the_end_and_written_off_the_loop(tmp_path):
    written = threading.Event()
    threads = []

    class Witness:
        def write(self, step, values):
            threads.append(threading.current_thread())
            written.set()

        def close(self):
            pass

    async with Metrics(tmp_path) as metrics:
        metrics._sinks.append(Witness())
        metrics.log(1, {"reward": 1.0})
        assert written.wait(10)
        assert rows(tmp_path)[0]["reward"] == 1.0
    assert threads != [threading.current_thread()]


async def test_a_failing_write_warns_once_and_the_rest_is_written(tmp_path, caplog):
    async with Metrics(tmp_path) as metrics:
        metrics.log(1, {"reward": object()})
        metrics.log(2, {"reward": object()})
        metrics.log(3, {"reward": 1.0})
    assert [row["step"] for row in rows(tmp_path)] == [3]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "metrics are incomplete" in caplog.text


@pytest.mark.parametrize("sink", ["tensorboard", "wandb"])
def test_a_missing_package_is_refused_before_anything_starts(tmp_path, monkeypatch, sink):
    """I10."""
    monkeypatch.setattr(sys, "path", [])
    for name in [name for name in sys.modules if name.partition(".")[0] == sink]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(ConfigError, match=rf'pip install "areal\[{sink}\]"'):
        Metrics(tmp_path, [sink])
    assert list(tmp_path.iterdir()) == []


async def test_tensorboard_reads_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    async with Metrics(tmp_path, ["tensorboard"]) as metrics:
        metrics.log(1, {"reward": 0.25, "staleness": {0: 3}, "note": "x"})
        metrics.log(2, {"reward": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"reward", "staleness/0"}
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 0.25), (2, 0.5)]


async def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    async with Metrics(tmp_path, ["wandb"], "my-project", {"seed": 7}) as metrics:
        metrics.log(1, {"reward": 0.25, "staleness": {0: 3}})
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    for text in (b"my-project", tmp_path.name.encode(), b"reward", b"0.25", b"staleness/0", b"seed"):
        assert text in content


def test_rate_over_a_sliding_window():
    rate = Rate(10.0, now=100.0)
    assert rate.per_second(100.0) == 0.0
    rate.add(50, 101.0)
    assert rate.per_second(102.0) == 25.0
    rate.add(50, 109.0)
    assert rate.per_second(110.0) == 10.0
    assert rate.per_second(111.5) == 5.0
    assert rate.per_second(130.0) == 0.0


def test_staleness_counts_loss_tokens_only():
    def trajectory(versions, mask):
        size = len(versions)
        return Trajectory(
            ids=np.zeros(size, np.int32),
            loss_mask=np.array(mask, bool),
            logprobs=np.zeros(size, np.float32),
            versions=np.array(versions, np.int32),
        )

    episodes = (
        EpisodeRecord(0, 0, "a", 1.0, (trajectory([-1, 5, 4], [0, 1, 1]), trajectory([5, 3], [1, 0]))),
        EpisodeRecord(0, 1, "a", 0.0, (trajectory([-1, 3], [0, 1]),)),
    )
    assert staleness_of(Batch(0, 5, (Group(0, "a", episodes),))) == {0: 2, 1: 1, 2: 1}
    assert staleness_of(Batch(0, 5, ())) == {}
