"""Resolve a configuration: find its data, device, precision and initial weights, and check it against the run folder.

Every function returns new values; configurations are never changed.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.randomness import fold
from ..data import Loader, Manifest
from ..net.config import with_defaults
from ..net.denoiser import Denoiser, DenoiserConfig
from ..runtime import machine
from ..runtime.distributed import Ranks
from ..storage import checkpoint
from ..storage.adapters import Adapter
from ..storage.folder import fingerprint
from ..storage.models import find_folder, read_model
from ..systems import FROM_DATA, System, options_of
from . import runs, tuning
from .config import SIZES, RunConfig
from .options import Compute

DESCRIPTION = ("manifest.json", "tokenizer.json", "tokenizer_ids.json", "chat_template.jinja", "token_counts.json")
"""Files of the data folder that a run folder keeps a copy of."""


def open_data(config: RunConfig) -> Manifest:
    """The manifest of the data folder; if it is missing, the error shows how to prepare it."""
    data, corpus = Path(config.data), config.corpus
    if not (data / "manifest.json").is_file():
        source = corpus.source or "CORPUS"
        tokenizer = config.init or corpus.tokenizer  # weights belong to the ids of one tokenizer
        command = f"esolm prepare {source} {data} --tokenizer {tokenizer} --length {corpus.length}"
        command = f"{command} {corpus.options}".rstrip()
        raise ValueError(f"no data in {data}: prepare it with `{command}`, or give --data FOLDER")
    return Manifest.load(data)


class Start(NamedTuple):
    """The weights of `init`, the sizes of their network, and their hash, which is part of the run's identity; with
    tuning.parts lora also those of `adapter`."""

    sizes: dict[str, Any]
    weights: dict[str, Tensor] | None = None
    sha256: str | None = None
    adapter: Adapter | None = None


def initial_weights(config: RunConfig, manifest: Manifest) -> Start:
    """Read the weights that `init` names; raises ValueError if their tokenizer is not that of the data.

    A run that has a checkpoint resumes without them if they no longer exist where the run was started from.
    """
    tuning.check(config.tuning, config.init, config.adapter)
    if config.init is None:
        return Start({})
    last = checkpoint.latest(Path(str(config.run)) / "checkpoints")
    if last is not None and _gone(config) and not config.distill.weight:
        identity = checkpoint.read(last)["identity"]
        net = with_defaults(identity["net"])
        return Start({name: net[name] for name in SIZES}, None, identity.get("init"))
    stored = read_model(config.init)
    if stored.tokenizer.sha256 != manifest.tokenizer_sha256 or stored.system.mask_id != manifest.mask_id:
        raise ValueError(
            f"{config.init} has tokenizer {stored.tokenizer.name} with {stored.tokenizer.vocab_size} ids, but "
            f"{manifest.folder} was prepared with {manifest.tokenizer} with {manifest.vocab_size}: prepare it with "
            f"--tokenizer {find_folder(config.init)}"
        )
    if (own := stored.net.config.latent_width) != (wanted := config.make_system(manifest).latent_width):
        raise ValueError(f"the embeddings of {config.init} have latent_width {own}, and this system needs {wanted}")
    weights, adapter = stored.net.state_dict(), None
    if config.adapter is not None:
        adapter = tuning.read_adapter(config.adapter, weights, config.tuning)
        if config.tuning.parts != "lora":
            weights, adapter = adapter.merged(weights), None
    sizes = {name: getattr(stored.net.config, name) for name in SIZES}
    every = weights if adapter is None else {**weights, **adapter.replaced, **adapter.lora}
    return Start(sizes, weights, fingerprint(every), adapter)


def _gone(config: RunConfig) -> bool:
    """Whether `init` or `adapter` no longer exists; one that the run was not started from counts as an error."""
    started = runs.read_config(Path(str(config.run)))
    named = {"init": config.init, "adapter": config.adapter}
    missing = [key for key, path in named.items() if path and not Path(path).exists()]
    return bool(missing) and all(started.get(key) == named[key] for key in missing)


def resolve(config: RunConfig, manifest: Manifest, start: Start, compute: Compute) -> RunConfig:
    """The complete configuration, as config.yaml keeps it: with the length of the data and the sizes of `init`."""
    sized = dataclasses.replace(config, compute=compute, net={**config.net, **start.sizes})
    made = config.make_system(manifest)
    net = dataclasses.asdict(sized.net_config(manifest.vocab_size, manifest.length, made))
    net = {**net, **sized.net, "length": net.pop("length")}
    del net["vocab_size"], net["latent_width"]  # those of the data and of the system
    system = {key: value for key, value in options_of(made).items() if key not in FROM_DATA}
    return dataclasses.replace(sized, net=net, system={**system, **config.system})


def resolve_compute(config: RunConfig, ranks: Ranks) -> Compute:
    """The device and the precision that `auto` stands for; a run that exists keeps its precision."""
    run, compute = Path(str(config.run)), config.compute
    device = machine.pick_device(compute.device) if ranks.world == 1 else ranks.device
    wanted: str = compute.precision
    if wanted == "auto" and ranks.once(lambda: runs.is_run(run)):
        wanted = ranks.once(lambda: runs.read_config(run)["compute"]["precision"])
    own = ranks.everywhere(lambda: machine.pick_precision(wanted, device))
    precision: Any = ranks.once(lambda: own)
    return dataclasses.replace(compute, device=str(device), precision=precision)


def at_alphas(config: RunConfig, system: System) -> list[tuple[float, System]]:
    """The system at each alpha_0 that validation reports."""
    try:
        return [(alpha_0, system.with_alpha_0(alpha_0)) for alpha_0 in config.validation.alpha_0]
    except ValueError as error:
        raise ValueError(f"validation.alpha_0: {error} (--validation.alpha_0 '[]' leaves out all of them)") from error


def loaders(config: RunConfig, manifest: Manifest, ranks: Ranks) -> tuple[Loader, Loader]:
    """The loaders of the training and the validation split; raises ValueError if the batch does not divide."""
    config.batch.micro_batches(ranks.rank, ranks.world)
    return (
        Loader(manifest.folder, "train", config.batch.size, config.seed),
        Loader(manifest.folder, "valid", config.validation.batch_size, config.seed, shuffle=False),
    )


def build(config: DenoiserConfig, seed: int, compute: Compute) -> Denoiser:
    """The network with initial weights that depend only on the seed."""
    torch.manual_seed(fold(seed, "init") >> 1)
    net = Denoiser(config)
    net.checkpoint_blocks = compute.checkpoint_blocks
    return net


def identify(config: RunConfig, system: System, manifest: Manifest, start: Start) -> dict[str, Any]:
    """What a checkpoint must agree with to be loaded: network, system, data and initial weights."""
    net = config.net_config(manifest.vocab_size, manifest.length, system)
    options = {**options_of(system), "name": config.system["name"]}
    identity = {"net": dataclasses.asdict(net), "system": options, "data": manifest.fingerprint}
    if config.tuning.parts != "all":
        identity["tuning"] = dataclasses.asdict(config.tuning)
    if config.distill.weight:
        identity["distill"] = dataclasses.asdict(config.distill)
    if start.sha256 is not None:
        identity["init"] = start.sha256
    return json.loads(json.dumps(identity))


def enter(config: RunConfig, manifest: Manifest, data: Path) -> list[str]:
    """Create the run folder, or check that the existing one has this configuration and corpus.

    data: the folder with the files that describe the corpus. Returns the options that have changed, one sentence each.
    """
    run = Path(str(config.run))
    if not runs.is_run(run):
        runs.create(run, config.tree(), [data / name for name in DESCRIPTION if (data / name).is_file()])
        return []
    notes = runs.check_config(run, config.tree())
    if (old := json.loads((run / "manifest.json").read_text())["fingerprint"]) != manifest.fingerprint:
        raise ValueError(
            f"the corpus in {config.data} has changed since {run} was started: its fingerprint was {old} and is now "
            f"{manifest.fingerprint}. Nothing was changed. Prepare the old corpus again, or give another run folder"
        )
    return notes
