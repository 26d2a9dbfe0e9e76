"""Runs the stock SGLang server on a machine without a GPU.

    python -m areal.workers.rollout.cpu_server --model-path DIR --port N [flags of SGLang]

SGLang 0.5.23 imports two modules that have no build for such a machine: `sgl_kernel` (CUDA kernels, of which dense
models on torch's attention call none) and `torchvision` (image transforms; PyPI's build is linked to CUDA). Here any
name can be imported from them, and calling it raises. Nothing installed is changed.

It must be the main module, as a file or with -m: SGLang spawns its scheduler, and spawning imports the main module
again, which puts the stand-ins there too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # what SGLang goes by, not whether CUDA is there


class _Missing(types.ModuleType):
    """A package from which every name can be imported; what it gives raises when it is called."""

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


def _stand_in() -> None:
    from transformers.utils import is_torchvision_available

    # The answer is cached: transformers must go on seeing torchvision as absent.
    if not is_torchvision_available():
        vision = _Missing("torchvision")
        vision.transforms = _Missing("torchvision.transforms")
        vision.transforms.functional = _Missing("torchvision.transforms.functional")
    if importlib.util.find_spec("sgl_kernel") is None:
        _Missing("sgl_kernel")


def main(arguments: list[str]) -> None:
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(["--device", "cpu", "--attention-backend", "torch_native", *arguments]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


_stand_in()
if __name__ == "__main__":
    main(sys.argv[1:])
