"""Everything that differs on a machine without CUDA. Call `install` before the first import of Megatron-core.

Megatron-core hard-codes CUDA as the device of buffers and in the type strings by which optimizers select parameters.
With a few functions of torch redirected it runs unmodified on a CPU, over gloo. The changes are process-wide and
`Tensor.type` returns wrong names, so only rank processes, which run nothing else, may install them. Data parallelism
needs each of them, with and without the distributed optimizer; pipeline parallelism and overlapped communication would
need streams and events too.

`fix_adam_state` is also for GPUs: without Transformer Engine and apex, Megatron-core falls back to torch's AdamW, whose
state it does not load correctly.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
FACTORIES = ("tensor", "zeros")
"""Functions that Megatron-core calls with an explicit device="cuda"."""


def install() -> bool:
    """Redirect CUDA to the CPU if there is no CUDA; returns whether it did."""
    if torch.cuda.is_available():
        return False
    torch.cuda.current_device = lambda: CPU
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.type = _cuda_type(torch.Tensor.type)
    torch.compile = _no_compile  # Megatron-core compiles small functions at import, which takes seconds
    return True


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return create


def _cuda_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's optimizers only accept parameters whose `type()` is "torch.cuda.FloatTensor" or similar."""

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        return original(self, dtype, *args, **kwargs)

    return type_


def _no_compile(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    return function if callable(function) else lambda function: function


def fix_adam_state() -> bool:
    """Make the distributed optimizer load the state of torch's AdamW correctly; returns whether it uses AdamW.

    It expects a step count per group, as fused optimizers have. torch's AdamW counts per parameter: without this fix
    the count is missing after loading, or is one tensor shared by all parameters and advanced once for each of them.
    """
    if importlib.util.find_spec("transformer_engine") or importlib.util.find_spec("apex"):
        return False
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    @torch.no_grad()
    def load(self: Any, parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, index = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        if "step" in state:
            state["step"] = state["step"].clone()
            tensors = {**tensors, "step": state["step"]}
        original(self, parameter, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = load
    return True
