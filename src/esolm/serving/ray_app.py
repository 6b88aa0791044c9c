"""The server as a Ray Serve application: replicas of one engine each, behind Ray's proxy.

`serve run esolm.serving.ray_app:app model=stories num_replicas=2`; Ray's own configuration sets replicas, autoscaling
and resources (docs/serving.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

try:
    from ray import serve
except ImportError as error:
    raise ImportError("esolm.serving.ray_app needs Ray Serve: pip install 'esolm[ray]'") from error

from .engine import Engine
from .options import EngineOptions, ServerOptions, key_and_name


@dataclass(frozen=True)
class ReplicaOptions:
    """What a replica loads, and how many there are."""

    model: str | None = None
    """A run, a model folder or a bundled model; null is the variable ESOLM_MODEL."""
    num_replicas: int = 1
    """Replicas, if Ray's configuration does not say."""
    device: str = "auto"
    precision: str = "auto"
    engine: str = "auto"
    weights: str = "ema"
    which: str = "best"
    threads: int | None = None
    """CPU threads of a replica."""


KINDS = (ReplicaOptions, EngineOptions, ServerOptions)
_running: list[Engine] = []  # the engine of this process


def parsed(args: Mapping[str, Any]) -> dict[str, Any]:
    """The options by name, from words or values. Raises ValueError."""
    from pydantic import ConfigDict, ValidationError, create_model

    fields: dict[str, Any] = {}
    for kind in KINDS:
        hints = get_type_hints(kind)
        fields |= {name: (hints[name], field.default) for name, field in kind.__dataclass_fields__.items()}
    try:
        model = create_model("RayOptions", __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)
        found = model(**args).model_dump()
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ValueError(f"{name}: {first['msg']}; the options are {', '.join(fields)}") from error
    found["model"] = found["model"] or os.environ.get("ESOLM_MODEL")
    if not found["model"]:
        raise ValueError("there is no model: give model=FOLDER, or set the variable ESOLM_MODEL")
    found |= key_and_name(found, found["model"])
    for kind in KINDS:
        _options(kind, found)  # wrong values fail here, not on every replica
    return found


def _options(kind: type[Any], found: Mapping[str, Any]) -> Any:
    return kind(**{name: found[name] for name in kind.__dataclass_fields__})


def build(options: Mapping[str, Any]) -> Any:
    """The HTTP application of one replica, with the model loaded."""
    import torch

    from ..model import load
    from ..runtime.machine import keep_memory
    from .routes import make_app

    keep_memory()
    if options["threads"] is not None:
        torch.set_num_threads(max(options["threads"], 1))
    how = [options[name] for name in ("weights", "which", "device", "precision", "engine")]
    engine = Engine(load(options["model"], *how), _options(EngineOptions, options))
    _running[:] = [engine]
    return make_app(engine, _options(ServerOptions, options))


class EsolmReplica:
    """One engine; requests come through the HTTP application that Ray wraps around it."""

    def check_health(self) -> None:
        """Called by Ray, which replaces a replica that raises."""
        if not all(engine.alive for engine in _running):
            raise RuntimeError("the engine does not run")

    def about(self) -> dict[str, int]:
        """The process, and what its engine did: to tell replicas apart."""
        engine = _running[0]
        return {"pid": os.getpid(), "passes": engine.passes, "committed": engine.committed}


def app(args: Mapping[str, Any]) -> serve.Application:
    """The application for `serve run` and for Ray's configuration files; args are the fields of the options above."""
    options = parsed(args)

    def built() -> Any:
        return build(options)

    replica = serve.deployment(serve.ingress(built)(EsolmReplica)).options(
        name="EsolmReplica",
        num_replicas=options["num_replicas"],
        max_ongoing_requests=options["max_batch"] + options["max_queue"],  # the engine has the queue, and says 429
    )
    return replica.bind()
