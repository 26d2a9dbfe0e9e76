"""What the controller asks of a server and of the trainer.

The real clients are `workers.rollout.client.SGLangClient` and `workers.trainer.client.HttpTrainer`; a simulation
stands in at these two borders and nowhere else. `Workers` is who starts both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal.agents.template import Template
from areal.config import Config
from areal.types import Floats, Generation, Ints, Sampling, TensorSpec, TrainRequest, TrainStats


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """`label` names the weights a server holds: "<run>.<life>:<version>", or anything else if not ours."""

    label: str
    model_path: str
    context_length: int


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A torch.distributed group for weight broadcast: rank 0 is the trainer's sender, rank 1.. are servers."""

    name: str
    host: str
    port: int
    world_size: int
    backend: str


class ServerClient(Protocol):
    """One SGLang server. Every method raises ServerLost (not reachable) or ServerRefused (error or garbage)."""

    url: str

    async def info(self) -> ServerInfo: ...

    async def healthy(self) -> bool:
        """Whether the server answers its health check; False instead of ServerLost."""
        ...

    async def generate(self, rid: str, input_ids: Ints, sampling: Sampling) -> Generation:
        """Sample. `finish == "abort"` with partial output when it was aborted; versions come from the answer (I6)."""
        ...

    async def abort(self, rid: str) -> None:
        """Ask the server to abort `rid` (and whatever starts with it, so "" is all); no error when it is not known."""
        ...

    async def pause(self) -> None:
        """Stop sampling at once; what runs keeps its tokens and its connection, and what comes is held."""
        ...

    async def resume(self) -> None:
        """The end of a pause; no error when there is none."""
        ...

    async def load_disk(self, folder: str, label: str, *, abort: bool = True) -> None:
        """Load the Hugging Face folder and take `label`. Running requests are aborted by the load, unless they are
        paused and `abort` is False."""
        ...

    async def join_group(self, group: WeightGroup, rank: int) -> None:
        """Join a broadcast group; returns when all ranks have joined."""
        ...

    async def load_group(self, group: str, specs: Sequence[TensorSpec], label: str) -> None:
        """Receive `specs` in order from rank 0 of the group and take `label`."""
        ...

    async def leave_group(self, group: str) -> None: ...

    async def flush(self) -> None:
        """Empty the KV cache; returns when the server says that it did."""
        ...

    async def score(self, ids: Ints) -> Floats:
        """Log-probs [L] of the tokens themselves at temperature 1; entry 0 is 0."""
        ...

    async def checksums(self) -> dict[str, str]:
        """A checksum of each weight tensor, under the server's own name: to compare with the same server's only, since
        it lays tensors together, pads and splits them."""
        ...

    async def scramble(self) -> None:
        """Overwrite all weights with random numbers, so that a load shows what it does not set."""
        ...

    async def close(self) -> None: ...


class TrainerClient(Protocol):
    """The trainer ranks as one. Every method raises TrainerError (names the rank)."""

    data_parallel: int

    @property
    def lost(self) -> str:
        """Why a rank is gone for good; "" while all are there."""
        ...

    async def train(self, request: TrainRequest) -> TrainStats:
        """One step. VersionConflict when the ranks are elsewhere; a repeat of the last gets its stored answer."""
        ...

    async def logprobs(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Log-probs [L] of each sequence's tokens at temperature 1; entry 0 is 0."""
        ...

    async def export(self, folder: str) -> None:
        """Write the weights in Hugging Face format (config, tokenizer and safetensors), whole or not at all."""
        ...

    async def stage(self, folder: str) -> None:
        """Begin a checkpoint of the current version, for `folder`. Returns when weights and optimizer state are copied
        aside: the next step may change them. One that was staged and not written is forgotten."""
        ...

    async def write(self) -> None:
        """Bring what was staged to disk while training goes on. `folder` appears whole or not at all, a model folder
        from which the ranks can also go on exactly. Written or failed, what was staged is forgotten then."""
        ...

    async def specs(self) -> list[TensorSpec]:
        """The tensors that `broadcast` sends, in its order."""
        ...

    async def join_group(self, group: WeightGroup) -> None:
        """Join a broadcast group as rank 0; returns when all ranks have joined."""
        ...

    async def broadcast(self, group: str) -> None:
        """Send the current weights to the group, tensor by tensor."""
        ...

    async def leave_group(self, group: str) -> None: ...

    async def close(self) -> None: ...


class Workers(Protocol):
    """Starts the servers and ranks of one run, and ends them. The real ones are `workers.local.LocalWorkers`.

    inline: whether all of the run happens in one thread (a simulation). can_restart: whether a dead server can be
    started again; else it belongs to somebody. The others are known once `start` has returned: group_backend is that
    of torch.distributed for weight groups; context_length counts the tokens that a prompt and its answer may have.
    """

    inline: bool
    can_restart: bool
    group_backend: str
    vocab_size: int
    context_length: int
    stop_ids: set[int]
    template: Template | None

    def check(self) -> None:
        """What can be refused before anything starts, ConfigError: model, placement, ports. Blocks."""
        ...

    async def start(
        self, folder: Path, life: int, version: int, checkpoint: Path | None
    ) -> tuple[TrainerClient, list[ServerClient]]:
        """Everything at once, side by side, at `version`: the weights of `checkpoint`, or of `model.path` when there is
        none yet. folder: the run's. Raises ProcessError or TrainerError for what does not come up."""
        ...

    async def restart_trainer(self, version: int, checkpoint: Path | None) -> TrainerClient:
        """End what is left of the ranks and start them again, as `start` does. Raises TrainerError."""
        ...

    def grow(self, config: Config) -> None:
        """Take the placement of more servers than there were. Raises ConfigError when they do not fit. Blocks."""
        ...

    async def start_server(self, index: int) -> ServerClient:
        """End what is left of a server that ran before, start it, return once it is ready. Raises ProcessError."""
        ...

    async def connect(self, url: str) -> ServerClient:
        """A server that somebody else runs. Raises ConfigError when it is not there or not the right one."""
        ...

    async def stop_server(self, index: int) -> None:
        """End the process of a server; nothing for one that somebody else runs. Raises ProcessError."""
        ...

    async def server_exited(self, index: int) -> str:
        """Returns why, once the process of that server has ended."""
        ...

    async def close(self) -> None:
        """End all of it."""
        ...
