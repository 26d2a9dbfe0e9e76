"""Threads for work that may hang for ever, such as a write to a disk that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonExecutor(Executor):
    """For `loop.run_in_executor`: each piece of work gets a daemon thread. The interpreter waits at its end for the
    threads of a ThreadPoolExecutor; for these it does not."""

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, function: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(function(*args, **options))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name=self._name, daemon=True).start()
        return future
