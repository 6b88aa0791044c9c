"""What the sessions of `esolm tune` share: a run that starts from a model and learns from a file of JSON lines."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ..core.randomness import fold
from ..data import Manifest
from ..data.permutation import permute
from ..model import LanguageModel
from ..net.denoiser import Denoiser
from ..runtime.distributed import Ranks
from ..storage.models import read_model
from ..training.config import RunConfig
from ..training.resolve import enter
from ..training.trainer import Session


class TuneSession(Session):
    """A session whose data are rows of JSON, described by a manifest without shards."""

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        if config.init is None:
            raise ValueError("there is no model to tune: give --init MODEL")
        if config.distill.weight:
            raise ValueError("distill.weight is an option of esolm train: leave it out")
        if config.net.get("dropout") or config.tuning.dropout:
            raise ValueError(
                "net.dropout and tuning.dropout must be 0: tuning compares probabilities of the same network, and "
                "dropout changes them from pass to pass"
            )
        self.model: LanguageModel
        super().__init__(config, ranks)

    @property
    def network(self) -> Denoiser:
        """The network that is trained, without what wraps it."""
        assert isinstance(self.learner.net, Denoiser)
        return self.learner.net

    def describe(self, config: RunConfig) -> Manifest:
        try:
            stored = read_model(str(config.init))
        except (ValueError, OSError):
            if not (Path(str(config.run)) / "checkpoints").is_dir():
                raise
            stored = read_model(str(config.run))  # a run resumes without its model
        self.model = LanguageModel(stored.net, stored.system, stored.tokenizer)
        text, net = stored.tokenizer, stored.net.config
        content = json.dumps(self.read(config), sort_keys=True).encode()
        ids = (net.vocab_size, stored.system.mask_id, text.eos_id, text.bos_id)
        request = {"rows": hashlib.sha256(content).hexdigest()}
        name = Path(config.data).name or "one prompt"  # the folder may change
        return Manifest(name, text.name, text.sha256, *ids, net.length, "rows", {}, request)

    def read(self, config: RunConfig) -> Any:
        """Read the data; returns what the run depends on, as JSON."""
        raise NotImplementedError

    def enter(self, config: RunConfig, manifest: Manifest) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            self.model.tokenizer.save(folder)
            manifest.save(Path(folder))
            return enter(config, manifest, Path(folder))


def shuffled(first: int, count: int, n: int, seed: int) -> list[int]:
    """The rows, of n, that examples first, first + 1, … of a run take: each once in an epoch, in random order."""
    examples = np.arange(first, first + count)
    return [int(permute(np.array([i % n]), n, fold(fold(seed, "data"), int(i // n)))[0]) for i in examples]
