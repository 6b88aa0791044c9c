"""The initial model of a run, which tuning stays close to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..net.adapters import is_adapted
from ..net.denoiser import Denoiser
from ..runtime.distributed import Ranks
from ..storage.models import read_model
from ..training import parallel
from ..training.config import RunConfig
from ..training.options import Compute


@dataclass(frozen=True)
class Reference:
    """A frozen network; with LoRA the trained one, without its adapters."""

    net: Denoiser
    shared: bool = False

    @classmethod
    def of(cls, config: RunConfig, net: Denoiser, compute: Compute, ranks: Ranks) -> Reference:
        """The model that `init` names; net: the one that is trained. An adapter to start from is part of the model."""
        if config.tuning.parts == "lora" and not config.tuning.embeddings and config.adapter is None:
            return cls(net, shared=True)
        if config.adapter is not None:
            raise ValueError(
                "a reference needs a model without an adapter beside it: merge it first with `esolm export MODEL OUT "
                f"--adapter {config.adapter}`, and tune OUT"
            )
        own = ranks.everywhere(lambda: read_model(str(config.init))).net
        own.requires_grad_(False)
        parallel.shard(own, compute, ranks)
        return cls(own)

    @contextmanager
    def active(self) -> Iterator[Denoiser]:
        """The network, as the reference inside the block."""
        layers: list[Any] = [layer for layer in self.net.modules() if is_adapted(layer)] if self.shared else []
        scales = [dict(layer.scaling) for layer in layers]
        for layer in layers:
            layer.scaling.update(dict.fromkeys(layer.scaling, 0.0))  # W x + 0 B A x
        training = self.net.training
        self.net.eval()
        try:
            yield self.net
        finally:
            self.net.train(training)
            for layer, scale in zip(layers, scales, strict=True):
                layer.scaling.update(scale)
