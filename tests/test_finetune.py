"""`areal.sft` on a simulated trainer; tests/integration/test_trainer.py has its steps on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import areal
from areal.algorithms.batching import sft_request
from areal.config import Config
from areal.errors import ConfigError, TrainerError
from areal.finetune import Example
from areal.simulation.trainer import SimulatedTrainer
from areal.simulation.weights import Weights
from areal.types import TrainRequest, TrainStats

BATCHES: list[list[Example]] = [
    [([5, 6, 7], [0, 0.5, 1]), ([8, 9], [0, 1])],
    [([3, 4], [0, 0.25])],
    [([1, 2, 3, 4], [0, 1, 1, 1]), ([7, 7], [0, 2]), ([6, 5], [0, 1])],
]


class Ranks(SimulatedTrainer):
    """Two of them. The loss of the step from version v is 10 - v."""

    data_parallel = 2

    def __init__(self) -> None:
        self.requests: list[TrainRequest] = []
        self.closed = False
        super().__init__(
            Weights(),
            life=0,
            version=0,
            tokens_per_s=10**6,
            groups={},
            check=lambda request, weights: self.requests.append(request),
            groups_of=lambda batch: (),
            timeout_s=1.0,
        )

    async def train(self, request: TrainRequest) -> TrainStats:
        return replace(await super().train(request), loss=10.0 - request.from_version)

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Ranks, dict[str, Any]]]:
    """The ranks that were started, each with its arguments."""
    found: list[tuple[Ranks, dict[str, Any]]] = []

    async def start_trainer(config: Config, **arguments: Any) -> Ranks:
        assert Path(arguments["log_folder"]).is_dir()
        found.append((Ranks(), arguments))
        return found[-1][0]

    monkeypatch.setattr("areal.finetune.start_trainer", start_trainer)
    return found


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "model").mkdir()
    schedule = {"train.steps": 3, "optimizer.schedule": "linear", "optimizer.lr": 0.4, "optimizer.warmup_steps": 1}
    return Config.load([], {"model.path": str(tmp_path / "model"), "train.microbatch_tokens": 4, "seed": 5, **schedule})


async def test_one_step_a_batch_and_then_the_model(
    config: Config, started: list[tuple[Ranks, dict[str, Any]]], tmp_path: Path
) -> None:
    folder = tmp_path / "warm" / "model"
    folder.parent.mkdir()
    assert await areal.sft(config, iter(BATCHES), folder) == [10.0, 9.0, 8.0]
    ((ranks, arguments),) = started
    assert (arguments["model_path"], arguments["roots"]) == (config.model.path, [folder.parent])
    assert not Path(arguments["log_folder"]).exists()
    assert ranks.closed
    assert len(Weights.read(folder).logprobs) == 3  # the weights after the last step
    for step, (request, rate) in enumerate(zip(ranks.requests, [0.2, 0.4, 0.0], strict=True)):
        expected = sft_request(
            BATCHES[step],
            life=0,
            from_version=step,
            batch_id=step,
            learning_rate=rate,
            ranks=2,
            budget=4,
            seed=5,
        )
        np.testing.assert_equal(asdict(request), asdict(expected))
        np.testing.assert_array_equal(request.batch.ids, np.concatenate([ids for ids, _ in BATCHES[step]]))
        np.testing.assert_array_equal(request.batch.loss_weights, np.concatenate([w for _, w in BATCHES[step]]))


async def test_a_rank_that_fails_leaves_no_model(
    config: Config, started: list[tuple[Ranks, dict[str, Any]]], tmp_path: Path
) -> None:
    def batches() -> Iterator[list[Example]]:
        yield BATCHES[0]
        started[0][0].trouble.dead = True
        yield BATCHES[1]

    with pytest.raises(TrainerError, match="ended with code -9"):
        await areal.sft(config, batches(), tmp_path / "warm")
    ((ranks, arguments),) = started
    assert ranks.closed
    assert len(ranks.requests) == 1
    assert not (tmp_path / "warm").exists()
    assert not Path(arguments["log_folder"]).exists()


async def test_settings_that_are_wrong_start_nothing(
    config: Config, started: list[tuple[Ranks, dict[str, Any]]], tmp_path: Path
) -> None:
    path = config.model.path
    wrong = [({}, "model.path is empty"), ({"model.path": path, "placement.ranks": [99]}, "device 99")]
    for settings, message in wrong:
        with pytest.raises(ConfigError, match=message):
            await areal.sft(Config.load([], settings), BATCHES, tmp_path / "warm")
    assert not started
