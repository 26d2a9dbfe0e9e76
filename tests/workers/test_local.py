"""The workers of a run as processes of this machine, without SGLang: what they are started with, and how they end."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from areal.config import Config
from areal.errors import ConfigError, ProcessError
from areal.workers import local
from areal.workers.local import LocalWorkers
from areal.workers.sglang.client import UNUSABLE_TOKENS
from areal.workers.sglang.launcher import context_of


class Child:
    """A process that survives `stubborn` tries to stop it."""

    def __init__(self, stubborn: int = 0) -> None:
        self.stubborn = stubborn
        self.stopped = False

    async def stop(self, grace_s: float) -> int:
        if self.stubborn:
            self.stubborn -= 1
            raise ProcessError("server 0 is not gone 5 s after SIGKILL")
        self.stopped = True
        return 0


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalWorkers:
    made = LocalWorkers(Config())
    made._folder, made._origin, made._version = tmp_path, "run.1", 40
    made._model, made._weights = tmp_path / "model", tmp_path / "checkpoints" / "step-40"
    made._weights.mkdir(parents=True)
    made._placement = local.place(Config(), 0)
    monkeypatch.setattr(made, "_client", lambda url, key: SimpleNamespace(url=url))

    async def ready(*_: Any) -> None: ...

    monkeypatch.setattr(local, "wait_ready", ready)
    return made


async def test_a_server_that_starts_after_its_checkpoint_was_pruned_takes_the_models_own_weights(
    workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    async def launch(config: Config, index: int, *, model_path: str, **_: Any) -> Child:
        started.append(Path(model_path).name)
        return Child()

    monkeypatch.setattr(local, "launch_server", launch)
    await workers.start_server(0)
    shutil.rmtree(workers._weights)
    await workers.start_server(0)
    assert started == ["step-40", "model"]


@pytest.mark.parametrize("tokens", [0, 40_000])
def test_a_context_that_no_server_could_hold_is_refused(tokens: int) -> None:
    config = Config.load([f"servers.max_total_tokens={tokens}", "model.context_length=65536"])
    with pytest.raises(ConfigError, match=f"65536 is more than a server's KV cache.*={tokens or 32768}; raise"):
        context_of(config, cast(Any, SimpleNamespace(context=131072)), on_gpus=False)
    if not tokens:
        assert context_of(config, cast(Any, SimpleNamespace(context=131072)), on_gpus=True) == 65536


async def test_a_server_that_could_not_be_stopped_is_not_forgotten(
    workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next one would start beside it, on its devices and its port."""
    child = workers._children[0] = Child(stubborn=2)  # type: ignore[assignment]

    async def launch(*_: Any, **__: Any) -> Child:
        assert child.stopped
        return Child()

    monkeypatch.setattr(local, "launch_server", launch)
    for _ in range(2):
        with pytest.raises(ProcessError, match="is not gone"):
            await workers.start_server(0)
    await workers.start_server(0)
    assert workers._children[0] is not child


@pytest.mark.parametrize(
    ("settings", "context"),
    [
        ([], 1024),
        (["servers.max_total_tokens=600"], 600),
        (["servers.max_total_tokens=600", "model.context_length=512", "sampling.max_new_tokens=64"], 512),
        (["servers.max_total_tokens=4096"], 1024),
        (['servers.urls=["http://127.0.0.1:1"]'], 1024),
    ],
)
async def test_a_prompt_that_no_server_could_hold_is_over_the_context(
    workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: list[str], context: int
) -> None:
    """SGLang refuses it, which would count as a failure of the server."""
    monkeypatch.setattr(local.Architecture, "read", lambda _: SimpleNamespace(vocab=300, context=1024))

    async def start(*_: Any) -> Any:
        return None

    for name in ("_start_trainer", "start_server", "connect"):
        monkeypatch.setattr(workers, name, start)
    monkeypatch.setattr(local, "load_tokenizer", lambda _: None)
    monkeypatch.setattr(local, "Template", lambda *_: None)
    monkeypatch.setattr(local, "end_tokens", lambda *_: set())
    workers._config = Config.load(settings)
    await workers.start(tmp_path, 0, 0, None)
    await workers.close()
    assert workers.context_length == context - UNUSABLE_TOKENS
