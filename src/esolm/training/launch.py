"""From the configuration of a run to a training loop on its data, in a new run folder or in one that is there."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from ..core.randomness import fold
from ..data import Loader, Manifest
from ..net.denoiser import Denoiser, DenoiserConfig
from ..net.protocol import trainable
from ..runtime import distributed, machine
from ..runtime.distributed import ALONE, Ranks
from ..storage import checkpoint
from ..storage.folder import fingerprint
from ..storage.models import find_folder, read_model
from ..systems import System, find, options_of, with_ids
from . import parallel, runs
from . import report as progress
from .config import SIZES
from .learner import Learner
from .loop import Outcome, train
from .options import Batching, Compute, Corpus, Optim, Saving, Validation

DESCRIPTION = ("manifest.json", "tokenizer.json", "tokenizer_ids.json")


def launch(config: dict[str, Any]) -> int:
    """Train as configured, resuming if the run folder is there; the exit code: 0, or 128 + the signal that stopped it.

    Under torchrun every process calls this, and the first speaks and writes for all.
    Raises ValueError, and changes nothing, if the run there has another configuration, network or corpus.
    """
    asked = Compute(**config["compute"])
    with distributed.join(asked.device, asked.timeout) as ranks:
        console = Console(highlight=False, markup=False, soft_wrap=True, quiet=ranks.rank > 0)
        outcome = run_all(config, ranks, console)
    if outcome is None:
        return 0
    if outcome.folder is not None and outcome.signal is None and ranks.rank == 0:
        checkpoint.consolidate(outcome.folder)
    return conclude(outcome, config["steps"], console)


def run_all(config: dict[str, Any], ranks: Ranks, console: Console) -> Outcome | None:
    """The part of one process; None if there was nothing left to do."""
    run, data = Path(config["run"]), Path(config["data"])
    manifest = ranks.everywhere(lambda: open_data(data, Corpus(**config["corpus"])))
    told = {key: value for key, value in config.items() if key != "data"}  # its path may differ, its content not
    ranks.agree({"config": told, "corpus": manifest.fingerprint, "code": distributed.code() if ranks.world > 1 else ""})
    if ranks.once(lambda: runs.is_run(run)) and config["compute"]["precision"] == "auto":
        config["compute"]["precision"] = ranks.once(lambda: runs.read_config(run)["compute"]["precision"])
    compute = resolve(Compute(**config["compute"]), ranks)
    place = compute.device if ranks.world == 1 else ranks.device.type  # every process has a GPU of its own
    config["compute"] = {**dataclasses.asdict(compute), "device": place}
    start = ranks.everywhere(lambda: find_start(run, config, manifest))
    made = ranks.everywhere(lambda: make(config, manifest, ranks))
    net_config, system, batching, optim, validation, saving, source, held_out = made
    steps, seed = config["steps"], config["seed"]
    loggers = ranks.everywhere(lambda: progress.loggers(config["log"] if ranks.rank == 0 else ()))
    notes = ranks.once(lambda: enter(run, config, data, manifest))

    net = build(net_config, seed, compute)
    if start.state is not None:
        net.load_state_dict(start.state)
    parallel.shard(net, compute, ranks)
    learner = Learner(net, optim)
    identity = identify(net_config, config["system"]["name"], system, manifest)
    if start.sha256 is not None:
        identity["init"] = start.sha256
    path = run / "metrics.jsonl"
    with ranks.everywhere(lambda: runs.Silent() if ranks.rank else runs.Metrics(path)) as metrics:
        folder = ranks.once(lambda: checkpoint.latest(run / "checkpoints"))
        if folder is not None:
            threads = learner.restore(folder, identity, ranks)["threads"]
            if (now := torch.get_num_threads()) != threads and compute.device == "cpu":
                notes.append(f"it had {threads} threads and now has {now}, so sums may round differently")
            console.print(f"going on from {folder}{''.join(f'; {note}' for note in notes)}")
        if learner.step >= steps:
            console.print(f"{run} is finished: {learner.step} of {steps} steps. To train longer: --steps N")
            return None
        ranks.once(lambda: metrics.cut(learner.metrics_bytes))
        ranks.once(lambda: runs.update_config(run, config))
        sinks = [logger(run) for logger in loggers]
        with progress.Live(learner.step, steps, sinks, console) as report:
            return train(
                run / "checkpoints", learner, metrics, system, source, held_out, identity, report,
                steps=steps, seed=seed, log_every=config["log_every"], batching=batching, optim=optim,
                compute=compute, validation=validation, saving=saving, ranks=ranks,
            )  # fmt: skip


class Made(NamedTuple):
    """What a configuration says, checked."""

    net: DenoiserConfig
    system: System
    batching: Batching
    optim: Optim
    validation: Validation
    saving: Saving
    source: Loader
    held_out: Loader


def make(config: dict[str, Any], manifest: Manifest, ranks: Ranks) -> Made:
    """The parts of a run; the length of the network is filled in."""
    config["net"]["length"] = net_length(config["net"]["length"], manifest.length)
    if config["log_every"] < 1:
        raise ValueError(f"log_every is {config['log_every']}, must be at least 1")
    batching, validation, seed = Batching(**config["batch"]), Validation(**config["validation"]), config["seed"]
    batching.passes(ranks.rank, ranks.world)
    return Made(
        DenoiserConfig(vocab_size=manifest.vocab_size, **config["net"]),
        make_system(config["system"], manifest),
        batching,
        Optim(**config["optim"]),
        validation,
        Saving(**config["saving"]),
        Loader(manifest.folder, "train", batching.size, seed),
        Loader(manifest.folder, "valid", validation.batch_size, seed, shuffle=False),
    )


def open_data(data: Path, corpus: Corpus) -> Manifest:
    """The manifest of a data folder; when it is not there, the error says how to prepare it."""
    if not (data / "manifest.json").is_file():
        source = corpus.source or "CORPUS"
        command = f"esolm prepare {source} {data} --tokenizer {corpus.tokenizer} --length {corpus.length}"
        raise ValueError(f"no data in {data}: prepare it with `{command}`, or give --data FOLDER")
    return Manifest.load(data)


class Start(NamedTuple):
    """Weights to start from, and their hash, which is part of a run's identity."""

    state: dict[str, Tensor] | None = None
    sha256: str | None = None


def find_start(run: Path, config: dict[str, Any], manifest: Manifest) -> Start:
    """The weights that `init` names, if it does; the network of the configuration takes their sizes.

    A run that has a checkpoint goes on without them where they are gone. Raises ValueError for another tokenizer.
    """
    if (init := config["init"]) is None:
        return Start()
    last = checkpoint.latest(run / "checkpoints")
    if last is not None and not Path(init).exists():
        identity = checkpoint.read(last)["identity"]
        config["net"] |= {name: identity["net"][name] for name in SIZES}
        return Start(None, identity.get("init"))
    lm = read_model(init)
    if lm.tokenizer.sha256 != manifest.tokenizer_sha256 or lm.system.mask_id != manifest.mask_id:
        raise ValueError(
            f"{init} has tokenizer {lm.tokenizer.name} with {lm.tokenizer.vocab_size} ids, {manifest.folder} was "
            f"prepared with {manifest.tokenizer} with {manifest.vocab_size}: prepare it with "
            f"--tokenizer {find_folder(init)}"
        )
    config["net"] |= {name: getattr(lm.net.config, name) for name in SIZES}
    state = trainable(lm.net).state_dict()
    return Start(state, fingerprint(state))


def resolve(compute: Compute, ranks: Ranks = ALONE) -> Compute:
    """The same with the device and the precision that `auto` stands for; sets the number of threads."""
    machine.keep_memory()
    if compute.threads is not None:
        if compute.threads < 1:
            raise ValueError(f"compute.threads is {compute.threads}, must be at least 1, or null for PyTorch's choice")
        torch.set_num_threads(compute.threads)
    device = machine.pick_device(compute.device) if ranks.world == 1 else ranks.device
    own = ranks.everywhere(lambda: machine.pick_precision(compute.precision, device))
    precision: Any = ranks.once(lambda: own)
    return dataclasses.replace(compute, device=str(device), precision=precision)


def net_length(asked: int | None, length: int) -> int:
    """The length of the network, by default that of the data."""
    if asked is not None and asked < length:
        raise ValueError(f"net.length {asked} is below the {length} tokens of an example: leave it out")
    return length if asked is None else asked


def make_system(options: Mapping[str, Any], manifest: Manifest) -> System:
    """The system with its options and the special ids of the data."""
    fields = {key: value for key, value in options.items() if key != "name"}
    return with_ids(find(options["name"])(**fields), manifest)


def build(config: DenoiserConfig, seed: int, compute: Compute) -> Denoiser:
    """The network with the weights that the seed decides."""
    torch.manual_seed(fold(seed, "init") >> 1)
    net = Denoiser(config)
    net.checkpoint_blocks = compute.checkpoint_blocks
    return net


def identify(net: DenoiserConfig, name: str, system: System, manifest: Manifest) -> dict[str, Any]:
    """What a checkpoint must agree with to be loaded: network, system and data."""
    system_options = {**options_of(system), "name": name}
    identity = {"net": dataclasses.asdict(net), "system": system_options, "data": manifest.fingerprint}
    return json.loads(json.dumps(identity))


def enter(run: Path, config: dict[str, Any], data: Path, manifest: Manifest) -> list[str]:
    """Create the run folder, or check that the one there is of this configuration and corpus; what is new in it."""
    if not runs.is_run(run):
        runs.create(run, config, [data / name for name in DESCRIPTION if (data / name).is_file()])
        return []
    notes = runs.check_config(run, config)
    if (old := json.loads((run / "manifest.json").read_text())["fingerprint"]) != manifest.fingerprint:
        raise ValueError(
            f"the corpus in {data} has changed since {run} was started: its fingerprint was {old} and is now "
            f"{manifest.fingerprint}. Nothing was changed. Prepare the old corpus again, or give another --run"
        )
    return notes


def conclude(outcome: Outcome, steps: int, console: Console) -> int:
    """Say how training ended; the exit code."""
    if outcome.signal is None:
        console.print(f"finished: {outcome.step} steps, checkpoint {outcome.folder}")
        return 0
    name = signal.Signals(outcome.signal).name
    console.print(
        f"stopped by {name} after step {outcome.step} of {steps}; saved {outcome.folder}. "
        "Run the same command again to go on"
    )
    return 128 + outcome.signal
