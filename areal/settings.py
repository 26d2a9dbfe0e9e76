"""The sections of the settings: types, defaults, bounds, and what each one means. `Config` is their tree."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class Model(Section):
    path: str = ""
    """Folder of the model in Hugging Face format (or a hub name, where a hub can be reached)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights on servers and ranks (optimizer state is always float32)."""
    context_length: int = Field(default=0, ge=0)
    """Longest sequence in tokens, prompt and answer; 0 takes the model's own limit, or the size of a server's KV cache
    where that is less and known (`servers.max_total_tokens`). SGLang keeps 6 of them free."""
    template_args: dict[str, Any] = {}
    """Extra arguments of the chat template, such as {enable_thinking = false}."""


class Data(Section):
    train: str = ""
    """Tasks to train on: a .jsonl or .parquet file, a folder saved by `datasets`, or a Hugging Face data set
    ("name", "name:split" or "name:config:split"). Empty when the program passes tasks itself."""
    evaluation: str = ""
    """Tasks to evaluate on; empty takes `evaluation_size` rows away from the training tasks."""
    evaluation_size: int = Field(default=0, ge=0)
    """Rows held out of the training tasks for evaluation; 0 holds out none."""
    epochs: int = Field(default=0, ge=0)
    """Times that the training tasks are gone through; 0 is without end."""
    shuffle: bool = True
    """Whether each epoch has its own order, drawn from the seed. A stream without a length is taken as it comes."""


class GroupSettings(Section):
    size: int = Field(default=8, ge=1)
    """Episodes per task (n)."""
    min_members: int = Field(default=0, ge=0)
    """Episodes that must finish for a group to be usable; 0 means all of them. When fewer can still finish, the
    rest are cancelled and the group is dropped (I8)."""
    uniform: Literal["train", "replace"] = "train"
    """A group whose rewards are all equal teaches nothing: `train` lets it count as trained, `replace` drops it
    (reason `uniform`) and admits another."""


class SamplingSettings(Section):
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of training episodes; the ranks divide logits by it. There is no top_p, top_k or penalty: the
    ranks could not reproduce the log-probs (I10)."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """Most tokens that one model call may sample."""


class EpisodeSettings(Section):
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds an episode may take from its start."""
    tool_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds one tool call may take; the model is told when it ran out."""
    retries: int = Field(default=2, ge=0)
    """Times a failed episode is started again before its failure is final."""


class Failures(Section):
    """Failed tries of episodes, since the last that finished, after which the run ends with the last traceback (I9)."""

    agent: int = Field(default=32, ge=0)
    """Tries in a row that the agent or one of its tools failed."""
    reward: int = Field(default=32, ge=0)
    """Tries in a row without a usable reward (RewardError, or no finite number)."""
    infrastructure: int = Field(default=128, ge=0)
    """Tries in a row that a server failed, or that ran out of time."""
    data: int = Field(default=32, ge=0)
    """Tries in a row that failed of their task (DataError)."""


class Staleness(Section):
    max: int = Field(default=2, ge=0)
    """Largest staleness, in steps, that may enter a loss (eta). 0 is synchronous RL."""
    late: Literal["mask", "drop", "wait"] = "mask"
    """What happens to a group with older tokens: `mask` takes those tokens out of the loss, `drop` drops it. `wait`
    lets none come to be: a batch is the oldest open groups, waited for."""


class Train(Section):
    steps: int = Field(default=100, ge=0)
    """Training steps of this run."""
    batch_groups: int = Field(default=16, ge=1)
    """Groups per step (B)."""
    minibatches: int = Field(default=2, ge=1)
    """Optimizer updates per pass over a batch."""
    passes: int = Field(default=1, ge=1)
    """Times each batch is gone through."""
    microbatch_tokens: int = Field(default=8192, ge=1)
    """Most tokens of one forward and backward pass of a rank (a longer sequence goes alone)."""


class Optimizer(Section):
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate after the warm-up (Adam)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate from the end of the warm-up to the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0 to `lr`."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the last step of `linear` and `cosine`."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Adam's decay of the mean."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Adam's decay of the square."""
    eps: float = Field(default=1e-8, gt=0)
    """Adam's term against division by zero."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""


class Algorithm(Section):
    advantage: Literal["grpo", "dr_grpo"] = "grpo"
    """`grpo`: reward minus group mean, over group standard deviation; `dr_grpo`: without the division."""
    clip: float = Field(default=0.2, gt=0)
    """PPO's clip of the ratio pi / pi_proximal."""
    importance_cap: float = Field(default=5.0, gt=0)
    """Largest weight pi_proximal / pi_behaviour of a token (decoupled PPO, eq. 5)."""


class Weights(Section):
    transport: Literal["disk", "group"] = "disk"
    """How new weights reach the servers: `disk` (safetensors in `folder`) or `group` (torch.distributed broadcast;
    NCCL on GPUs, gloo elsewhere)."""
    folder: str = ""
    """Where `disk` writes; empty is the run folder. A tmpfs such as /dev/shm is faster."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Seconds a publication may take before the servers that lag are closed."""
    rollout: Literal["all", "rolling"] = "all"
    """Whether `all` servers take a version at once, or one after the other while the others generate (`rolling`)."""
    interrupt: Literal["abort", "retract"] = "abort"
    """What new weights do to running requests: `abort` brings their tokens back, and they go on at any server;
    `retract` leaves them in their server, which computes their prompts again (`transport=disk` only)."""
    verify: bool = True
    """Whether each publication is checked by the log-probs of a fixed prompt."""


class Servers(Section):
    count: int = Field(default=1, ge=1)
    """SGLang servers to start."""
    urls: list[str] = []
    """Servers that run already, such as ["http://127.0.0.1:30000"]; none is started then, and `count`, `port`,
    `max_total_tokens`, `args` and `restarts` are refused. Their API key is in the variable AREAL_SERVER_KEY."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first server, the next ones follow; 0 takes free ports."""
    max_running: int = Field(default=64, ge=1)
    """Requests that one server runs at the same time."""
    max_total_tokens: int = Field(default=0, ge=0)
    """Size of one server's KV cache in tokens; 0 lets SGLang decide (on a CPU: 32768)."""
    args: list[str] = []
    """Further command-line arguments of SGLang; those that a setting of areal stands for are refused."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds until a server must be ready."""
    request_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds one call may take before it is aborted and tried elsewhere."""
    restarts: int = Field(default=3, ge=0)
    """Times a server that died is started again, up to 15 s later each time, before the run does without it."""


class Trainer(Section):
    ranks: int = Field(default=1, ge=1)
    """Trainer processes (data parallel)."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds until all ranks must be ready."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds one training step may take."""
    restarts: int = Field(default=3, ge=0)
    """Times that the ranks are started again from the last checkpoint before the run ends."""


class Placement(Section):
    servers: list[list[int]] = []
    """Device numbers of each server, such as [[0], [1]]; one list per server. Empty places them automatically:
    ranks first, servers on the devices that remain."""
    ranks: list[int] = []
    """Device number of each trainer rank."""


class Checkpoint(Section):
    every: int = Field(default=50, ge=0)
    """Steps between checkpoints in Hugging Face format; 0 writes only the last one."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept; older ones are deleted."""


class Metrics(Section):
    sinks: list[Literal["tensorboard", "wandb"]] = []
    """Where metrics go besides metrics.jsonl (extras `tensorboard`, `wandb`)."""
    project: str = "areal"
    """Project name for W&B."""
