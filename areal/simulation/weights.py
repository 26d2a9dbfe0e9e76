"""What simulated weights are: the name of everything that was trained into them."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import orjson

from areal.types import Floats


@lru_cache
def _logprob(digest: str) -> float:
    number = int.from_bytes(hashlib.blake2b(digest.encode(), digest_size=3).digest(), "big")
    return float(np.float32(-0.1 - number / 2**24))


@dataclass(frozen=True, slots=True)
class Weights:
    """digest: of every batch so far, in order, with its learning rate: equal digests mean equal weights. groups: those
    that were trained, in order. logprobs: by version, what each token's log-prob was under it."""

    digest: str = "start"
    groups: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()

    @property
    def logprob(self) -> float:
        """Of every token that these weights sample: between -1.1 and -0.1, exact in float32."""
        return _logprob(self.digest)

    def step(self, groups: tuple[int, ...], batch: bytes) -> Weights:
        """After a training step on `batch`, which holds (tokens of) `groups`."""
        digest = hashlib.blake2b(self.digest.encode() + batch, digest_size=12).hexdigest()
        return Weights(digest, self.groups + groups, (*self.logprobs, self.logprob))

    def corrupted(self) -> Weights:
        return replace(self, digest=self.digest + " corrupted")

    def score(self, length: int) -> Floats:
        """Log-probs [length] of the probe."""
        scores = np.full(length, self.logprob, np.float32)
        scores[0] = 0
        return scores

    def write(self, folder: Path) -> None:
        """Whole or not at all; a folder of that name is replaced, as the real ranks do."""
        temporary = folder.with_name(f".{folder.name}")
        temporary.mkdir(parents=True, exist_ok=True)
        (temporary / "weights.json").write_bytes(orjson.dumps(self))
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)

    @classmethod
    def read(cls, folder: Path) -> Weights:
        saved = orjson.loads((folder / "weights.json").read_bytes())
        return cls(saved["digest"], tuple(saved["groups"]), tuple(saved["logprobs"]))
