"""The settings: types, defaults, bounds and descriptions. `load.Config` reads and checks them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from pydantic.fields import FieldInfo

from areal.errors import ConfigError


class Section(BaseModel):
    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class Model(Section):
    path: str = ""
    """Folder of the model in Hugging Face format, or its name on the Hugging Face hub."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights on servers and ranks. Optimizer state is always float32."""
    context_length: int = Field(default=0, ge=0)
    """Maximum sequence length in tokens, prompt plus answer. 0 uses the model's limit, or the size of a server's KV
    cache (`servers.max_total_tokens`) if that is known and smaller. SGLang reserves 6 of these tokens."""
    template_args: dict[str, Any] = {}
    """Extra arguments of the chat template, such as {enable_thinking = false}."""


class Data(Section):
    train: str = ""
    """Training tasks: a .jsonl or .parquet file, a folder saved by `datasets`, or a Hugging Face data set ("name",
    "name:split" or "name:config:split"). Empty if the program passes tasks itself."""
    evaluation: str = ""
    """Evaluation tasks, in the same forms. Empty holds out `evaluation_size` of the training tasks."""
    evaluation_size: int = Field(default=0, ge=0)
    """Number of training tasks held out for evaluation."""
    epochs: int = Field(default=0, ge=0)
    """Passes over the training tasks; 0 repeats for ever."""
    shuffle: bool = True
    """Shuffle each epoch, with an order drawn from the seed. A stream without a length is never shuffled."""


class GroupSettings(Section):
    size: int = Field(default=8, ge=1)
    """Episodes per task, whose rewards are compared (GRPO)."""
    min_members: int = Field(default=0, ge=0)
    """Episodes that must finish, after retries, for a group to be trained; 0 means all. When fewer can still finish,
    the rest are cancelled and the group is dropped."""
    uniform: Literal["train", "replace"] = "train"
    """What to do with a group whose rewards are all equal and which therefore has no gradient: `train` counts it as
    trained, `replace` drops it (reason `uniform`) and admits another."""


class SamplingSettings(Section):
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of training episodes; the ranks divide logits by it. top_p, top_k and penalties are not supported,
    because the ranks could not reproduce the log-probs."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """Maximum number of new tokens per model call."""


class EpisodeSettings(Section):
    timeout_s: float = Field(default=600.0, gt=0)
    """Time limit of one try of an episode, in seconds."""
    tool_timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one tool call, in seconds. The model is told when a tool timed out."""
    retries: int = Field(default=2, ge=0)
    """Times a failed episode is retried before its failure is final."""


class Failures(Section):
    """Limits on consecutive failed tries of episodes, by kind; an episode that finishes resets them."""

    agent: int = Field(default=32, ge=0)
    """Stop the run after more than this many consecutive failed tries due to errors of the agent or its tools."""
    reward: int = Field(default=32, ge=0)
    """The same for tries without a usable reward (RewardError, or not a finite number)."""
    infrastructure: int = Field(default=128, ge=0)
    """The same for tries that timed out, or that failed because of a server."""
    data: int = Field(default=32, ge=0)
    """The same for tries that failed because of their task (DataError)."""


class Staleness(Section):
    max: int = Field(default=2, ge=0)
    """Maximum staleness of a token in the loss, in steps (eta in the paper). 0 is synchronous RL."""
    late: Literal["mask", "drop", "wait"] = "mask"
    """What to do with a group that has stale tokens: `mask` excludes those tokens from the loss, `drop` drops the
    group. `wait` avoids stale tokens: each batch waits for the oldest open groups."""


class Train(Section):
    steps: int = Field(default=100, ge=0)
    """Number of training steps of the run."""
    batch_groups: int = Field(default=16, ge=1)
    """Groups per step (B)."""
    minibatches: int = Field(default=2, ge=1)
    """Optimizer updates per pass over a batch."""
    passes: int = Field(default=1, ge=1)
    """Passes over each batch."""
    microbatch_tokens: int = Field(default=8192, ge=1)
    """Maximum tokens per forward and backward pass of a rank. A longer sequence is a micro-batch of its own."""


class Optimizer(Section):
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate of Adam after the warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate from the end of the warm-up to the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from 0 to `lr`."""
    min_lr: float = Field(default=0.0, ge=0)
    """Final learning rate of `linear` and `cosine`."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Adam beta1."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Adam beta2."""
    eps: float = Field(default=1e-8, gt=0)
    """Adam epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay (AdamW)."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Maximum global gradient norm; 0 disables clipping."""


class Algorithm(Section):
    advantage: Literal["grpo", "dr_grpo"] = "grpo"
    """`grpo`: (reward - group mean) / group standard deviation; `dr_grpo`: without the division."""
    clip: float = Field(default=0.2, gt=0)
    """PPO clip range of the ratio pi / pi_proximal."""
    importance_cap: float = Field(default=5.0, gt=0)
    """Upper bound on a token's importance weight pi_proximal / pi_behaviour (decoupled PPO, eq. 5)."""


class Weights(Section):
    transport: Literal["disk", "group"] = "disk"
    """How new weights reach the servers: `disk` (safetensors files in `folder`) or `group` (torch.distributed
    broadcast over NCCL on GPUs, over gloo elsewhere)."""
    folder: str = ""
    """Where `disk` writes; empty means the run folder. A tmpfs such as /dev/shm is faster."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Time limit of a publication, in seconds. Servers that exceed it are dead and, unless external, restarted."""
    rollout: Literal["all", "rolling"] = "all"
    """Update `all` servers at once, or one after the other while the others generate (`rolling`)."""
    interrupt: Literal["abort", "retract"] = "abort"
    """How an update interrupts requests in flight: `abort` takes their tokens back, and any server continues them;
    `retract` keeps them on their server, which recomputes their KV cache (`transport=disk` only)."""
    verify: bool = True
    """Check each publication by the log-probs of a fixed prompt."""


class Servers(Section):
    count: int = Field(default=1, ge=1)
    """Number of SGLang servers to start."""
    urls: list[str] = []
    """External servers, such as ["http://127.0.0.1:30000"]. Then areal starts none and refuses `count`, `port`,
    `max_total_tokens`, `args` and `restarts`. Their API key comes from the environment variable AREAL_SERVER_KEY."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first server; the others get the next ones. 0 picks free ports."""
    max_running: int = Field(default=64, ge=1)
    """Maximum number of concurrent requests per server."""
    max_total_tokens: int = Field(default=0, ge=0)
    """KV cache size per server, in tokens. 0 lets SGLang decide (32768 on a CPU)."""
    args: list[str] = []
    """Additional command-line arguments for SGLang. Flags that a setting of areal controls are refused."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Time limit for a server to become ready, in seconds."""
    request_timeout_s: float = Field(default=300.0, gt=0)
    """Time limit of one request, in seconds, after which it is aborted and retried on another server."""
    restarts: int = Field(default=3, ge=0)
    """Times a server that died is restarted, with delays of up to 15 s, before the run continues without it."""


class Trainer(Section):
    ranks: int = Field(default=1, ge=1)
    """Number of trainer processes (data parallel)."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Time limit for all ranks to become ready, in seconds."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Time limit of one training step, in seconds."""
    restarts: int = Field(default=3, ge=0)
    """Times the ranks are restarted from the last checkpoint before the run ends."""


class Placement(Section):
    servers: list[list[int]] = []
    """Device indices of each server, one list per server, such as [[0], [1]]. Empty places them automatically: ranks
    first, servers on the remaining devices."""
    ranks: list[int] = []
    """Device index of each trainer rank."""


class Checkpoint(Section):
    every: int = Field(default=50, ge=0)
    """Steps between checkpoints (Hugging Face format); 0 writes only the final one."""
    keep: int = Field(default=2, ge=1)
    """Number of checkpoints to keep; older ones are deleted."""


class Metrics(Section):
    sinks: list[Literal["tensorboard", "wandb"]] = []
    """Where metrics go besides metrics.jsonl. Needs the extra of the same name."""
    project: str = "areal"
    """W&B project."""


class Tree(Section):
    """All settings of a run."""

    name: str = Field(default="run", pattern=r"^\w[\w.-]*$")
    """Name of the run. Its folder is `folder`/`name`-0001, then -0002 for the next run."""
    folder: str = "runs"
    """Directory in which run folders are created."""
    seed: int = Field(default=0, ge=0)
    """Seed of the data order, held-out tasks, episodes and ranks, and of sampling on servers started with
    --enable-deterministic-inference. In asynchronous mode, timing also decides which weights sample a token."""
    view: Literal["auto", "live", "plain", "off"] = "auto"
    """Terminal output: a `live` panel, `plain` lines or nothing (`off`). `auto` is live on a terminal, else plain."""
    watchdog_s: float = Field(default=900.0, gt=0)
    """Stop the run after this many seconds without progress, and report what it was waiting for. Must be longer than
    every other `timeout_s` except `episode.tool_timeout_s`, which `episode.timeout_s` covers."""
    model: Model = Model()
    data: Data = Data()
    group: GroupSettings = GroupSettings()
    sampling: SamplingSettings = SamplingSettings()
    episode: EpisodeSettings = EpisodeSettings()
    failures: Failures = Failures()
    staleness: Staleness = Staleness()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    algorithm: Algorithm = Algorithm()
    weights: Weights = Weights()
    servers: Servers = Servers()
    trainer: Trainer = Trainer()
    placement: Placement = Placement()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def origins(self) -> Mapping[str, str]:
        """Dotted key -> where the value came from. Defaults are left out."""
        return self._origins

    def __getitem__(self, key: str) -> Any:
        """The value of a dotted key."""
        section, _, leaf = key.rpartition(".")
        return getattr(getattr(self, section) if section else self, leaf)


def _settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _settings(field.annotation, f"{name}.")
        else:
            yield prefix + name, field


SETTINGS: Mapping[str, FieldInfo] = dict(_settings(Tree))
"""Dotted key -> pydantic field (default, description, annotation), in the order of the tree."""


def to_text(value: Any, key: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(to_text(item, key) for item in value) + "]"
    if isinstance(value, Mapping):
        items = (f"{to_text(str(name), key)} = {to_text(item, key)}" for name, item in value.items())
        return "{" + ", ".join(items) + "}"
    raise ConfigError(f"{key}: {value!r} cannot be written as TOML; use strings, numbers, true/false, lists and tables")
