"""The trainer's end of SGLang's weight-update groups: this rank is rank 0, the servers are the others."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from areal.errors import TrainerError
from areal.workers.protocols import WeightGroup
from areal.workers.store import open_store


class Sender:
    """Joins at most one group at a time. Every wait times out after `timeout_s`; a failure leaves the group."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._name = ""
        self._group: dist.ProcessGroup | None = None
        self._store: dist.Store | None = None

    def join(self, group: WeightGroup) -> None:
        """Open the group's store and wait until all of its ranks have joined. Raises TrainerError."""
        self.leave()
        try:
            size = group.world_size
            self._store = open_store(group.host, group.port, size, is_master=True, timeout=self._timeout)
            # The same calls as in SGLang's servers, because the group's name is part of the store's keys.
            self._group, _ = _new_process_group_helper(
                size,
                0,
                [],
                Backend(group.backend),
                PrefixStore(group.name, self._store),
                group_name=group.name,
                timeout=self._timeout,
            )
            _world.pg_group_ranks[self._group] = {i: i for i in range(size)}
            self._name = group.name
        except Exception as error:
            self.leave()
            raise TrainerError(f"weight group {group.name} of {group.world_size} was not formed: {error}") from error

    def broadcast(self, name: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send the tensors in order. Raises TrainerError, after leaving the group."""
        if self._group is None or name != self._name:
            raise TrainerError(f"weight group {name} is not joined")
        deadline = time.monotonic() + self._timeout.total_seconds()
        try:
            for tensor_name, tensor in tensors:
                work = dist.broadcast(tensor.contiguous(), src=0, group=self._group, async_op=True)
                left = deadline - time.monotonic()
                if left <= 0 or not work.wait(timedelta(seconds=left)):
                    raise TimeoutError(f"{tensor_name} was not received within {self._timeout.total_seconds():g} s")
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            self.leave()
            raise TrainerError(f"weight group {name}: {error}") from error

    def leave(self, name: str | None = None) -> None:
        """Leave the current group if it has this name (or any, for None), and close its store."""
        if name is not None and name != self._name:
            return
        group, self._group, self._name = self._group, None, ""
        if group is not None:
            with suppress(Exception):  # its other ranks may be dead
                dist.destroy_process_group(group)
        self._store = None
