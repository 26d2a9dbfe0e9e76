"""Runs the stock SGLang server, accessible only with this run's key.

    AREAL_SERVER_KEY=... python -m areal.workers.sglang.server --model-path DIR --port N [flags of SGLang]

Like `python -m sglang.launch_server --api-key ...`, except that

- the key comes from the environment, because `ps` shows command lines to every user and SGLang logs its arguments;
- every path requires it; SGLang leaves /health, /health_generate and /metrics open;
- a store of torch.distributed with a loopback address listens only there, not on all addresses; and the server's own
  store is not a port but the file that AREAL_STORE names.
"""

from __future__ import annotations

import hmac
import importlib
import os
import sys
from datetime import timedelta
from typing import Any

from areal.workers.guard import die_with_guard

SERVER_KEY = "AREAL_SERVER_KEY"
"""Environment variable with the API key of the servers that areal starts, and of those in servers.urls."""


class Key(str):
    """A string whose repr hides it, because SGLang logs the repr of its arguments."""

    def __repr__(self) -> str:
        return "'***'"


def close_http(args: Any) -> None:
    """Make the server with arguments `args` require the key for every request."""
    key = os.environ.pop(SERVER_KEY, "")
    if not key:
        raise SystemExit(f"{SERVER_KEY} is not set: without a key, any user could control the server; set a secret")
    args.api_key = Key(key)

    from sglang.srt.utils import auth

    expected = f"Bearer {key}".encode()

    def decide(*, authorization_header: str | None, **_: Any) -> auth.AuthDecision:
        given = (authorization_header or "").encode(errors="surrogateescape")
        return auth.AuthDecision(allowed=hmac.compare_digest(given, expected))

    auth.decide_request_auth = decide
    auth._get_auth_level_from_app_and_scope = lambda *_: None  # slow: matches each request with a hundred routes


def close_store() -> None:
    """Restrict the stores of this process to a file, or to the address that they are given."""
    import torch.distributed as dist

    from areal.workers.store import STORE, is_loopback, open_store

    def create(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
    ) -> dist.Store:
        if (file := os.environ.pop(STORE, "")) and is_loopback(hostname):  # else ranks on other machines may join
            return dist.PrefixStore(str(port), dist.FileStore(file, world_size))
        return open_store(hostname, port, world_size, is_master=rank == 0, timeout=timeout, use_libuv=use_libuv)

    # A function of the same name in torch.distributed hides the module.
    importlib.import_module("torch.distributed.rendezvous")._create_c10d_store = create  # type: ignore[attr-defined]


def main(arguments: list[str]) -> None:
    die_with_guard()
    close_store()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    args = prepare_server_args(arguments)
    close_http(args)
    try:
        run_server(args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
elif __name__ == "__mp_main__":  # a scheduler, which SGLang spawns
    close_store()
