"""Processes connected over gloo that run one function after another. As a script: a rank of torchrun that fails."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from esolm import cli
from esolm.net import head
from esolm.runtime import distributed
from esolm.storage import checkpoint


def work(rank: int, world: int, store: str, inbox: Any, outbox: Any) -> None:
    """Run the functions that arrive in the inbox."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    while True:
        function, arguments = inbox.get()
        try:
            outbox.put((rank, True, function(*arguments)))
        except BaseException:
            outbox.put((rank, False, traceback.format_exc()))


class Crew:
    """`world` processes; a call runs a function in all of them and returns their results by rank."""

    def __init__(self, world: int, folder: Path) -> None:
        context = mp.get_context("spawn")
        self.outbox = context.Queue()
        self.inboxes = [context.Queue() for _ in range(world)]
        store = str(folder / "store")
        self.processes = [
            context.Process(target=work, args=(rank, world, store, inbox, self.outbox), daemon=True)
            for rank, inbox in enumerate(self.inboxes)
        ]
        for process in self.processes:
            process.start()

    def __call__(self, function: Any, *arguments: Any) -> list[Any]:
        for inbox in self.inboxes:
            inbox.put((function, arguments))
        results = sorted(self.outbox.get(timeout=300) for _ in self.inboxes)
        for rank, fine, result in results:
            assert fine, f"rank {rank}: {result}"
        return [result for _, _, result in results]

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(30)


def command(argv: list[str], flaw: str = "") -> tuple[int, str, str]:
    """Exit code, output and errors of an `esolm` command in this process. flaw: on rank 1 only, except `chunked`."""
    out, err = io.StringIO(), io.StringIO()
    code, whole, describe = distributed.code, head.WHOLE, checkpoint._describe
    if flaw == "chunked":
        head.WHOLE = 0
    elif flaw and dist.get_rank() == 1:
        if flaw == "code":
            distributed.code = lambda: "another"
        elif flaw == "full":
            checkpoint._describe = full
        else:
            argv = [*argv, flaw]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = cli.main(argv)
            except SystemExit as end:
                status = end.code
    finally:
        distributed.code, head.WHOLE, checkpoint._describe = code, whole, describe
    return status, out.getvalue(), err.getvalue()


def command_with_children(argv: list[str]) -> tuple[int, str, str]:
    """The same for a command that starts processes, which Python forbids to the daemons of a crew."""
    mp.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    return command(argv)


def full(path: Path) -> None:
    """Fail as on a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")


def deadly(function: str, call: int, sleep: float) -> None:
    """Kill this process, or let it sleep, at the n-th call of the named function of checkpoint.py."""
    original, calls = getattr(checkpoint, function), [0]

    def flawed(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and sleep:
            time.sleep(sleep)
        elif calls[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(checkpoint, function, flawed)


if __name__ == "__main__":
    rank, function, call, sleep = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    if rank == int(os.environ["RANK"]) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        deadly(function, call, sleep)
    sys.exit(cli.main(sys.argv[5:]))
