"""A model in one folder, as written by `esolm export`, `esolm convert` and transformers.

    config.json model.safetensors tokenizer.json tokenizer_ids.json tokenizer_config.json [chat_template.jinja]

Weights have the names of the network with the prefix `net.`; `config.json` describes the network and the system.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from .. import __version__
from ..data import Tokenizer
from ..data import tokenizer as make_tokenizer
from ..data.tokenizer import PACKAGED
from ..net.denoiser import Denoiser, DenoiserConfig
from ..runtime import files, machine
from ..systems import System, find, names, options_of
from .adapters import is_adapter

TYPE, PREFIX = "esolm", "net."


def is_model(path: Path) -> bool:
    """Whether the folder holds such a model."""
    try:
        return json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"] == TYPE
    except PermissionError as error:
        raise files.unreadable(path / "config.json", error) from error
    except (OSError, ValueError, KeyError, TypeError):
        return False


def not_a_model(path: Path) -> ValueError:
    """What is wrong with a folder that has a `config.json` and is no such model."""
    config = path / "config.json"
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        return files.unreadable(config, error)
    except ValueError as error:
        return ValueError(f"{config} is damaged ({error}): write the folder again")
    return ValueError(f"{path} is not a model of esolm: convert it with `esolm convert {path} OUT`, and give OUT")


def count_parameters(path: Path) -> int:
    """The number of weights of a model, from the header of its file."""
    file = path / "model.safetensors"
    try:
        with safe_open(file, "pt") as opened:
            return sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing: write the folder again") from error
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}): write the folder again") from error


def packaged() -> dict[str, Path]:
    """The bundled models by name."""
    folders = sorted(PACKAGED.iterdir()) if PACKAGED.is_dir() else []
    return {folder.name: folder for folder in folders if is_model(folder)}


def describe(net: DenoiserConfig, system: System) -> dict[str, Any]:
    """Network and system, as in `config.json`."""
    return json.loads(json.dumps({"net": dataclasses.asdict(net), "system": options_of(system)}))


def write(
    folder: Path,
    net: Denoiser,
    system: System,
    tokenizer: Tokenizer,
    about: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model into an existing folder; about: where it comes from; dtype: of the stored weights."""
    write_config(folder, net.config, system, about or {})
    state = {f"{PREFIX}{name}": t.to("cpu", dtype) for name, t in net.state_dict().items()}
    files.save_tensors(folder / "model.safetensors", state, {"format": "pt"})
    write_tokenizer(folder, tokenizer, net.config.length)


def write_config(folder: Path, net: DenoiserConfig, system: System, about: Mapping[str, Any]) -> None:
    """Write `config.json`, which AutoConfig of transformers also reads."""
    config = {
        "model_type": TYPE,
        "architectures": ["EsoLMForMaskedLM"],
        "vocab_size": net.vocab_size,
        **describe(net, system),
        "about": dict(about),
        "esolm_version": __version__,
    }
    files.write_json(folder / "config.json", config, indent=2, sort_keys=True)


def write_tokenizer(folder: Path, tokenizer: Tokenizer, length: int) -> None:
    """Write the files that `Tokenizer.load` and AutoTokenizer of transformers read."""
    tokenizer.save(folder)
    special = {"mask_token": tokenizer.mask_id, "eos_token": tokenizer.eos_id, "bos_token": tokenizer.bos_id}
    # Collators label every pad id as given, so it must be an id that no text contains: EOS would never be learned.
    special["pad_token"] = tokenizer.mask_id
    tokens = {role: tokenizer.core.id_to_token(i) for role, i in special.items() if i is not None}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, **tokens}
    config |= {"clean_up_tokenization_spaces": False, "model_input_names": ["input_ids", "attention_mask"]}
    files.write_json(folder / "tokenizer_config.json", config, indent=2, sort_keys=True)


def read(folder: Path, device: str = "cpu") -> tuple[Denoiser, System, Tokenizer]:
    """Read what `write` wrote; raises ValueError, naming the file, if one is missing, damaged or of another network."""
    device = str(machine.pick_device(device))
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        net_config, system = built(path, config["net"], config["system"])
    except OSError as error:
        raise files.unreadable(path, error) from error
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not that of an esolm model: {error!r}") from error
    net, path = Denoiser(net_config), folder / "model.safetensors"
    try:
        with path.open("rb"):  # safetensors does not say why it cannot open a file
            stored = load_file(path, device=device)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: write the folder again") from error
    except OSError as error:
        raise files.unreadable(path, error) from error
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): write the folder again") from error
    take(net, {name.removeprefix(PREFIX): t for name, t in stored.items()}, path)
    return net.to(device).eval(), system, read_tokenizer(folder, net.config, system)


def built(
    path: Path, net: Mapping[str, Any], system: Mapping[str, Any], where: str = ""
) -> tuple[DenoiserConfig, System]:
    """What `describe` described, in the file at `path` under the keys that begin with `where`."""
    options = dict(system)
    cls = trusted(options.pop("name"))
    files.check_keys(path, net, DenoiserConfig, f"{where}net.")
    files.check_keys(path, options, cls, f"{where}system.")
    try:
        return DenoiserConfig(**net), cls(**options)
    except ValueError as error:
        raise ValueError(f"{path} is not that of a model of this esolm: {error}") from error


def read_tokenizer(folder: Path, config: DenoiserConfig, system: System) -> Tokenizer:
    """The tokenizer, as saved by esolm or transformers; raises ValueError if it does not match the network."""
    ours = (folder / "tokenizer_ids.json").is_file()
    found = Tokenizer.load(folder) if ours else make_tokenizer(str(folder))
    if (found.vocab_size, found.mask_id) != (config.vocab_size, system.mask_id):
        raise ValueError(
            f"the tokenizer in {folder} has {found.vocab_size} ids and mask {found.mask_id}, the model "
            f"{config.vocab_size} and {system.mask_id}: put the model's own tokenizer there"
        )
    return found


def trusted(name: str) -> type[Any]:
    """The class of a system that a file names: one of esolm, or of a module that the user has already imported."""
    if name not in names() and name.rpartition(".")[0] not in sys.modules:
        module = name.rpartition(".")[0]
        raise ValueError(
            f"the model uses system {name!r}, which is not part of esolm. If you trust it, add `--import {module}` to "
            f"the command, or `import {module}` before loading"
        )
    return find(name)


def take(net: Denoiser, state: Mapping[str, Tensor], path: Path) -> None:
    """Load a state into the network; raises ValueError, with the names, unless names and shapes match exactly."""
    expected = net.state_dict()
    wrong = [f"{name} is missing" for name in expected if name not in state]
    wrong += [f"{name} is unknown" for name in state if name not in expected]
    wrong += [
        f"{name} has shape {tuple(state[name].shape)} instead of {tuple(t.shape)}"
        for name, t in expected.items()
        if name in state and state[name].shape != t.shape
    ]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"{path} does not match this network: {'; '.join(wrong[:5])}{more}")
    net.load_state_dict(dict(state))


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """A hash of all weights with their names and types."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def new(out: Path, force: bool = False) -> Iterator[Path]:
    """A hidden folder that becomes `out` when the block ends, and is removed on an error.

    Raises ValueError if `out` exists; with force, only if it is neither a model nor an adapter.
    """
    ours = is_model(out) or is_adapter(out) or (out.is_dir() and not any(out.iterdir()))
    if out.exists() and not (force and ours):
        advice = "choose another name" if force else "choose another name, or add --force if it is an esolm model"
        raise ValueError(f"{out} exists and was not changed: {advice}")
    with files.new_folder(out) as partial:
        yield partial
