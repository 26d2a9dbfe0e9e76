"""What the controller asks of a server and of the trainer.

The real clients are `workers.rollout.client.SGLangClient` and `workers.trainer.client.HttpTrainer`; a simulation
stands in at these two borders and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from areal.types import Floats, Generation, Ints, Sampling, TensorSpec, TrainRequest, TrainStats


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """`label` names the weights a server holds: "<run>.<attempt>:<version>", or anything else if not ours."""

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

    async def load_disk(self, folder: str, label: str) -> None:
        """Load the Hugging Face folder and take `label`. Running requests are aborted by the load."""
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

    async def close(self) -> None: ...


class TrainerClient(Protocol):
    """The trainer ranks as one. Every method raises TrainerError (names the rank)."""

    data_parallel: int

    async def train(self, request: TrainRequest) -> TrainStats:
        """One step. VersionConflict when the ranks are elsewhere; a repeat of the last gets its stored answer."""
        ...

    async def logprobs(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Log-probs [L] of each sequence's tokens at temperature 1; entry 0 is 0."""
        ...

    async def export(self, folder: str) -> None:
        """Write the weights in Hugging Face format (config, tokenizer and safetensors), whole or not at all."""
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
