"""Find a model by its folder or name, and read it: a run, one checkpoint of it, a model folder, or a bundled model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..data import Tokenizer
from ..net.denoiser import Denoiser
from ..systems import System
from . import adapters, checkpoint, folder


class StoredModel(NamedTuple):
    """A network, the system it was trained as, and its tokenizer."""

    net: Denoiser
    system: System
    tokenizer: Tokenizer


def read_model(path: str | Path, weights: str = "ema", which: str = "best", device: str = "cpu") -> StoredModel:
    """Read the model at `path`, on a device.

    weights: `ema`, or `model` for the raw ones. which: the `best` (lowest validation loss) or `last` checkpoint.
    """
    path = find_folder(path)
    if folder.is_model(path):
        for name, value, only in (("weights", weights, "ema"), ("which", which, "best")):
            if value != only:
                raise ValueError(f"{name} is {value!r}, but {path} has one set of weights: leave it out")
        return StoredModel(*folder.read(path, device))
    saved, home = locate(path, which)
    if weights not in ("ema", "model"):
        raise ValueError(f"weights is {weights!r}; it must be 'ema' or 'model'")
    identity = checkpoint.read_state(saved)["identity"]
    config, system = folder.built(saved / "state.json", identity["net"], identity["system"], "identity.")
    net = Denoiser(config)
    state = checkpoint.load(saved, weights, device)
    if (tuning := identity.get("tuning", {})).get("parts") == "lora":
        state = adapters.merge(state, tuning["alpha"] / tuning["rank"])
    net.load_state_dict(state)
    return StoredModel(net.to(device).eval(), system, Tokenizer.load(home))


def find_folder(path: str | Path) -> Path:
    """The folder at `path`, or that of the bundled model of this name."""
    if (found := Path(path)).is_dir():
        return found
    known = folder.packaged()
    if str(path) in known:
        return known[str(path)]
    names = f", or the name of a bundled model ({', '.join(known)})" if known else ""
    raise ValueError(f"{path} is not a folder: give the folder of a run, a checkpoint or a model{names}")


def locate(path: Path, which: str = "best") -> tuple[Path, Path]:
    """The checkpoint that a run folder or a checkpoint folder stands for, and the run folder."""
    if which not in ("best", "last"):
        raise ValueError(f"which is {which!r}; it must be 'best' or 'last'")
    if (path / "state.json").is_file():
        return path, path.parent.parent
    root = path / "checkpoints"
    found = (checkpoint.best(root) if which == "best" else None) or checkpoint.latest(root)
    if found is None and (path / "config.json").is_file():
        raise folder.not_a_model(path)
    if found is None and not (path / "config.yaml").is_file():
        raise ValueError(
            f"{path} is neither a run (config.yaml), a checkpoint (state.json) nor a model (config.json): "
            "give one of these folders"
        )
    if found is None:
        raise ValueError(f"{path} has no checkpoint: train it first, or give a checkpoint folder")
    return found, path
