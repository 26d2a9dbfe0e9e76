"""Runs the stock SGLang server on a machine without a GPU.

    AREAL_SERVER_KEY=... python -m areal.workers.sglang.cpu_server --model-path DIR --port N [flags of SGLang]

SGLang 0.5.23 imports two modules that have no build for such a machine: `sgl_kernel` (CUDA kernels, none of which a
dense model with torch's attention calls) and `torchvision` (image transforms; PyPI's build is linked to CUDA). Stubs
replace them, whose functions raise when called. No installed file is changed. Access is restricted as in `server.py`.

It also halves the startup time. SGLang spawns its scheduler and detokenizer, which import everything again, because a
process that uses CUDA cannot fork. Here both are forked, while the process still has a single thread.
"""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
import types
from pathlib import Path
from typing import Any

from areal.workers.guard import die_with_guard
from areal.workers.models.architecture import FAMILIES
from areal.workers.sglang.server import close_http, close_store


class Missing(types.ModuleType):
    """A stub package from which any name can be imported; calling what was imported raises."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []
        sys.modules[name] = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(f"{name} has no build for this CPU")

        missing = type(name, (), {"__init__": refuse})  # a class, because some code subclasses what it imports
        setattr(self, name, missing)
        return missing


def prepare() -> None:
    """Set up this process. Call it before importing anything of SGLang."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # SGLang does not detect the absence of CUDA
    sglang = importlib.machinery.PathFinder.find_spec("sglang")
    if sglang is None or sglang.origin is None:
        raise SystemExit("SGLang is not installed; run `make install`")
    # To find one model, SGLang would import all it knows, some 200 modules.
    models = {file.stem for file in (Path(sglang.origin).parent / "srt" / "models").glob("*.py")}
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(sorted(models - set(FAMILIES))))

    from transformers.utils import is_torchvision_available

    if not is_torchvision_available():  # caches the answer, so that transformers does not use the stub
        vision: Any = Missing("torchvision")
        vision.transforms = Missing("torchvision.transforms")
        vision.transforms.functional = Missing("torchvision.transforms.functional")
    if importlib.util.find_spec("sgl_kernel") is None:
        Missing("sgl_kernel")


def main(arguments: list[str]) -> None:
    die_with_guard()
    gc.disable()  # imports create a million objects and hardly any garbage
    prepare()
    close_store()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from areal.workers.sglang.seeded import allow_on_cpu

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None  # SGLang would set "spawn"
    allow_on_cpu()
    args = prepare_server_args(["--device", "cpu", "--attention-backend", "torch_native", *arguments])
    close_http(args)
    importlib.import_module("sglang.srt.entrypoints.http_server")  # import the rest before the fork
    gc.freeze()
    gc.enable()
    try:
        run_server(args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
