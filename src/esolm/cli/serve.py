"""`esolm serve`: a model behind OpenAI's HTTP API, with infilling, likelihood and a page."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..serving.options import EngineOptions, ServerOptions, key_and_name
from .generation_options import MODEL, add_loading
from .layout import group
from .parsing import announce, parse, parser


def make_parser() -> Any:
    """The parser."""
    made = parser("serve MODEL", "Serve a model over HTTP.")
    made.add_argument("run", **MODEL)
    option = made.add_argument
    option("--host", type=str, default="127.0.0.1", help="Address to listen on; 0.0.0.0 lets other machines in.")
    option("--port", type=int, default=8000, help="Port to listen on; 0 takes a free one.")
    made.add_class_arguments(EngineOptions)
    made.add_class_arguments(ServerOptions)
    option("--cors", type=str, help="Let pages of this origin call the API, as in https://example.org.")
    option("--drain", type=float, default=30.0, help="Seconds that running requests get after SIGTERM.")
    add_loading(made)
    group(made, "address", ("host", "port", "cors", "drain"))
    return made


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    return serve(parse(make_parser(), argv))


def serve(options: Mapping[str, Any]) -> int:
    """Load the model and serve it until a signal."""
    limits = EngineOptions(**{name: options[name] for name in EngineOptions.__dataclass_fields__})
    own = {name: options[name] for name in ServerOptions.__dataclass_fields__}
    settings = ServerOptions(**{**own, **key_and_name(own, options["run"])})
    try:
        from ..serving.server import serve_app
    except ImportError as error:
        raise ValueError("esolm serve needs more packages: pip install 'esolm[serve]'") from error
    if settings.api_key is None and not _is_loopback(options["host"]):
        print("no --api_key: everyone who reaches this port can use the server", file=sys.stderr, flush=True)
    announce(f"loading {options['run']} …")
    import torch

    from ..model import load
    from ..runtime.machine import keep_memory
    from ..serving.engine import Engine

    keep_memory()
    if options["threads"] is not None:
        torch.set_num_threads(max(options["threads"], 1))
    device = options["device"]
    lm = load(options["run"], options["weights"], options["which"], device, options["precision"], options["engine"])
    engine = Engine(lm, limits)
    return serve_app(engine, settings, options["host"], options["port"], options["drain"], options["cors"])


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
