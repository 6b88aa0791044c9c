"""Runs the application under uvicorn: a socket, signals, and an orderly end."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
from typing import Any

try:
    import uvicorn
except ImportError as error:
    raise ImportError("esolm.serving.server needs uvicorn: pip install 'esolm[serve]'") from error

from .engine import Engine
from .options import ServerOptions
from .routes import make_app


class DrainingServer(uvicorn.Server):
    """Answers new requests with 503 from the signal on and finishes accepted ones; then the port closes.

    So a load balancer sees that /ready fails while the port is still open. A second signal closes the port at once.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine, drain: float) -> None:
        super().__init__(config)
        self.engine, self.drain = engine, drain

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Called by the signal."""
        if self.engine.scheduler.closed:
            super().handle_exit(sig, frame)
            return
        os.write(2, f"stopping: {len(self.engine.scheduler.live)} samples are running\n".encode())
        self.engine.scheduler.closed = True  # the condition's lock may be held by the thread that the signal hit

        def finish() -> None:
            self.engine.stop(self.drain)  # what is left then is answered by 503
            super(DrainingServer, self).handle_exit(sig, frame)

        threading.Thread(target=finish, name="esolm-stop", daemon=True).start()


def allow_origin(app: Any, origin: str) -> None:
    """Let pages of an origin call the API (CORS)."""
    from fastapi.middleware.cors import CORSMiddleware

    app.add_middleware(CORSMiddleware, allow_origins=[origin], allow_methods=["*"], allow_headers=["*"])


def serve_app(
    engine: Engine,
    options: ServerOptions,
    host: str = "127.0.0.1",
    port: int = 8000,
    drain: float = 30.0,
    cors: str | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises OSError if the address cannot be used."""
    app = make_app(engine, options)
    if cors is not None:
        allow_origin(app, cors)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ValueError(f"cannot listen on {host} port {port}: {error}") from error
        shown = f"[{host}]" if ":" in host else host
        name, bound = app.state.server.options.name, listener.getsockname()[1]
        print(f"serving {name} on http://{shown}:{bound} (Ctrl-C stops it)", file=sys.stderr, flush=True)
        longest = math.ceil(drain) + 5  # then connections are closed, whatever they wait for
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=longest, server_header=False)
        for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn handles them, and raises them again at its end
            signal.signal(number, signal.SIG_IGN)
        DrainingServer(config, engine, drain).run(sockets=[listener])
    return 0
