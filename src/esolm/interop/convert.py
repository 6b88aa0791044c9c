"""Convert published checkpoints into model folders: read as data, and checked name by name.

Sources are Lightning .ckpt files of the Eso-LMs, MDLM, BD3-LMs and Duo repositories, their Hugging Face folders, and
left-to-right models of the Llama family and GPT-2, as folders of transformers or GGUF files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..core.batch import Batch
from ..core.randomness import Randomness
from ..data import Tokenizer, corpora
from ..data import tokenizer as make_tokenizer
from ..data.documents import Reading
from ..data.tokenizer import from_json, trained
from ..likelihood import scoring, texts
from ..model import LanguageModel, load
from ..net.denoiser import Denoiser, DenoiserConfig
from ..net.protocol import trainable
from ..runtime.dotted import flat
from ..runtime.files import unreadable
from ..storage import folder
from ..systems import with_ids
from . import vocabulary
from .ckpt import Checkpoint, Inert, Stored, plain
from .families import FAMILIES, CausalCheckpoint, family_of, make_causal
from .gguf_file import read_gguf
from .released import BUFFERS, ROTARY, ReleasedCheckpoint, make_net, make_system


def convert(
    source: str,
    out: str | Path,
    system: Literal["ar", "mdlm", "bd3lm", "esolm", "udlm", "duo", "sedd"] | None = None,
    alpha_0: float | None = None,
    variant: Literal["A", "B"] | None = None,
    block_size: int | None = None,
    weights: Literal["ema", "raw"] = "ema",
    tokenizer: str | None = None,
    length: int | None = None,
    cut: str | None = None,
    cut_count: int = 1,
    delimiter: str | None = None,
    text: str | None = None,
    force: bool = False,
) -> LanguageModel:
    """Convert a published checkpoint into a model folder, without executing anything from it.

    Args:
        source: A Lightning .ckpt file, a GGUF file, a Hugging Face folder with safetensors files, or a name on the hub:
            OWNER/NAME, or OWNER/NAME/FILE.gguf.
        out: The folder to write.
        system: ar, mdlm, bd3lm, esolm, udlm, duo or sedd, if the source does not name it.
        alpha_0: The alpha_0 that an Eso-LM was trained with, if the source does not name it.
        variant: A or B of an Eso-LM, if the source does not name it.
        block_size: Tokens in a block of a BD3-LM, if the source does not name it.
        weights: The averaged (EMA) weights of a .ckpt, or the raw ones.
        tokenizer: The tokenizer that the source was trained with (a folder, gpt2, …), if it has none.
        length: The length of a Llama, Mistral, Qwen or GPT-2 in tokens, by default all that it has positions for.
        cut: A corpus as in `esolm prepare`; ids that it does not use are dropped, which makes the model smaller.
        cut_count: With `cut`, keep only ids that occur at least this often; rarer words are spelled by smaller pieces.
        delimiter: The line that separates the documents of `cut`, as in `esolm prepare`.
        text: A text file; its perplexity is measured to check the result.
        force: Replace `out` if it is a model folder of esolm.

    Raises:
        ValueError: If the source cannot be read, is incomplete, or its system is unknown. `out` is then not written.
    """
    path, out = Path(source), Path(out)
    with folder.new(out, force) as partial:
        if text is not None and not Path(text).is_file():
            raise ValueError(f"no file {text}: --text must be a text file")
        if cut is None and (delimiter is not None or cut_count != 1):
            raise ValueError("delimiter and cut_count belong to --cut, which is missing: add it, or leave them out")
        found = opened(source, weights)
        words = _words(found, tokenizer)
        made = make_system(found, {"name": system, "alpha_0": alpha_0, "variant": variant, "block_size": block_size})
        about = {"source": path.name, "weights": weights, **found.about}
        net, words = _network(found, words, length)
        if cut is not None:
            used = corpora.corpus(cut, Reading(delimiter=delimiter))
            new_mask = isinstance(found, CausalCheckpoint) and words.vocab_size > found.number("vocab_size")
            net, words = vocabulary.cut(net, words, (document.text for document in used.train()), cut_count, new_mask)
            about["cut"] = {"corpus": Path(cut).name, "ids": words.vocab_size}
        made = with_ids(made, words)
        folder.write(partial, net, made, words, about)
        lm = load(partial)
        folder.write_config(partial, net.config, made, {**about, "check": check(lm, text)})
    return lm


def _words(found: ReleasedCheckpoint | CausalCheckpoint, spec: str | None) -> Tokenizer:
    """The tokenizer that is given, or that of the checkpoint."""
    if spec is None and found.tokenizer is not None:
        return found.tokenizer
    if spec is not None and not trained(spec):
        return make_tokenizer(spec)
    here = "copy its tokenizer.json into the folder, or give --tokenizer FOLDER"
    advice = here if found.path.is_dir() else "give --tokenizer, a folder with its tokenizer.json, or gpt2"
    wrong = "has no tokenizer" if spec is None else f"was not trained with {spec}, which is made from new text"
    raise ValueError(f"{found.path} {wrong}: {advice}")


def _network(
    found: ReleasedCheckpoint | CausalCheckpoint, words: Tokenizer, length: int | None
) -> tuple[Denoiser, Tokenizer]:
    if isinstance(found, CausalCheckpoint):
        return make_causal(found, words, length)
    if length is not None:
        raise ValueError(f"length is {length}, but that of {found.path} cannot be chosen: leave it out")
    net = make_net(found)
    check_tokenizer(found, net.config, words)
    return net, words


def check(lm: LanguageModel, text: str | None) -> dict[str, float]:
    """Score random tokens and, if a text is given, measure its perplexity (nelbo)."""
    length = min(lm.net.config.length, max(64 // lm.system.block_size, 1) * lm.system.block_size)
    tokens = torch.randint(lm.net.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    tokens = torch.where(tokens == lm.system.mask_id, (tokens + 1) % lm.net.config.vocab_size, tokens)
    with torch.no_grad():
        terms = lm.system.terms(lm.net, Batch(tokens), Randomness(0), train=False)
    if not all(term.nats.isfinite().all() for term in terms):
        raise ValueError("the bound of the converted network is not finite: the weights are damaged")
    if text is None:
        return {}
    found = scoring.score(lm, texts.read(text, lm.tokenizer, lm.net.config.length)).record()
    return {"perplexity": found["perplexity"], "tokens": found["tokens"]}


def opened(source: str, weights: str) -> ReleasedCheckpoint | CausalCheckpoint:
    """Read a file, a folder or a download from the hub; raises ValueError."""
    path = Path(source)
    if folder.is_model(path):
        raise ValueError(f"{path} is already a model of esolm: use it as it is, or copy it with `esolm export`")
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+/[\w.-]+\.gguf", source):
        path = download(source, source.rpartition("/")[2])
    if path.is_file() and path.suffix in (".bin", ".safetensors"):
        if path.suffix == ".bin" and not list(path.parent.glob("*.safetensors")):
            raise _pickled(path)
        raise ValueError(f"{path} is one file of a model: give its folder, {path.parent}, which has config.json too")
    if path.is_file() and path.suffix != ".gguf":
        return read_ckpt(path, weights)
    if weights != "ema":
        raise ValueError(f"weights is {weights!r}; {path} has one set of weights: leave it out")
    return read_gguf(path) if path.is_file() else read_hf(local(source))


def read_ckpt(path: Path, weights: str) -> ReleasedCheckpoint:
    """Read a Lightning checkpoint. Its averaged weights have no names; they are matched by order."""
    file = Checkpoint(path)
    stored = file.tree.get("state_dict")
    if not isinstance(stored, Mapping) or not all(isinstance(t, Stored) for t in stored.values()):
        raise ValueError(f"{path} has no state_dict of tensors: it is not a Lightning checkpoint")
    stored = {name.replace("_orig_mod.", ""): t for name, t in stored.items()}  # a prefix of torch.compile
    about: dict[str, Any] = {}
    if isinstance(step := file.tree.get("global_step"), int):
        about["steps"] = step
    names = [name for name in stored if not name.endswith(BUFFERS)]
    tensors = [stored[name] for name in names]
    if weights == "ema":
        tensors = _averaged(path, file.tree.get("ema"), {name: stored[name].shape for name in names})
    state = {name: file.load(t) for name, t in zip(names, tensors, strict=True)}
    state |= {name: file.load(t) for name, t in stored.items() if name.endswith(ROTARY)}
    kept = file.tree.get("hyper_parameters")
    kept = kept if isinstance(kept, Mapping) else kept.items if isinstance(kept, Inert) else {}
    config = plain(kept.get("config"))
    keys = flat(config) if isinstance(config, dict) else {}
    if isinstance(size := kept.get("vocab_size"), int):
        keys["vocab_size"] = size
    return ReleasedCheckpoint(path, _unprefixed(state), keys, stored_tokenizer(kept.get("tokenizer")), about)


def _averaged(path: Path, ema: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[Stored]:
    """The list of averaged weights, with shapes checked against the parameters in order."""
    shadow = ema.get("shadow_params") if isinstance(ema, Mapping) else None
    if not isinstance(shadow, list) or not all(isinstance(t, Stored) for t in shadow):
        raise ValueError(
            f"{path} has no averaged weights (ema.shadow_params): add --weights raw to convert the raw ones"
        )
    if len(shadow) != len(shapes):
        raise ValueError(f"{path} has {len(shadow)} averaged weights for {len(shapes)} parameters: use --weights raw")
    for tensor, (name, shape) in zip(shadow, shapes.items(), strict=True):
        if tensor.shape != shape:
            raise ValueError(f"{path}: the averaged weight of {name} has shape {tensor.shape} instead of {shape}")
    return shadow


def read_hf(path: Path) -> ReleasedCheckpoint | CausalCheckpoint:
    """Read a Hugging Face folder: only its JSON and safetensors files."""
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} is no .ckpt or .gguf file and no folder with config.json and model.safetensors")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path / "config.json", error) from error
    except ValueError as error:
        raise ValueError(f"{path / 'config.json'} is damaged ({error}): download it again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path / 'config.json'} must hold keys and values, not {type(config).__name__}")
    family, name = family_of(config), str((config.get("architectures") or [None])[0])
    if family is None and name.endswith(("ForCausalLM", "LMHeadModel")):
        raise ValueError(f"{path} is a {name}, which cannot be converted: only {', '.join(FAMILIES)} and released "
                         "models of the paper's repositories")  # fmt: skip
    state = read_tensors(path)
    has_own = any((path / name).is_file() for name in ("tokenizer.json", "vocab.json", "vocab.txt"))
    words = make_tokenizer(str(path)) if has_own else None
    if family is not None:
        return CausalCheckpoint(path, family, config, state, words)
    return ReleasedCheckpoint(path, _unprefixed(state), flat(config), words)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a folder: in model.safetensors, or in the files that model.safetensors.index.json names."""
    index, files = path / "model.safetensors.index.json", ["model.safetensors"]
    if not (path / files[0]).is_file() and index.is_file():
        files = _shards(index)
    elif not (path / files[0]).is_file() and any(path.glob("*.bin")):
        raise _pickled(path)
    state: dict[str, Tensor] = {}
    for file in (path / name for name in files):
        if not file.is_file():
            raise ValueError(f"{file} is missing: download it")
        try:
            with safe_open(file, "pt") as opened:
                state |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged ({error}): download it again") from error
        except OSError as error:
            raise unreadable(file, error) from error
    return state


def _shards(index: Path) -> list[str]:
    """The names of the files in an index."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if wrong := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{wrong[0]!r} is not the name of a file beside it")
    except OSError as error:
        raise unreadable(index, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged ({error!s}): download it again") from error
    return names


def _pickled(path: Path) -> ValueError:
    """The error for a model that is only there as a pickle, which could run code."""
    return ValueError(
        f"{path} has only pickled weights (.bin), which are not read: load it in transformers and save it again with "
        'save_pretrained("NEW"), which writes safetensors'
    )


def local(source: str) -> Path:
    """The folder of a model: a path, or a download from the hub without code."""
    if Path(source).exists():
        return Path(source)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise ValueError(f"no file or folder {source}, and it is not a name on the hub, OWNER/NAME")
    return download(source)


def download(source: str, file: str | None = None) -> Path:
    """The folder of a repository on the hub with its JSON, safetensors and text files, or one file of it."""
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError as error:
        raise ValueError(f"no file or folder {source}; names on the hub need `pip install 'esolm[hf]'`") from error
    try:
        if file is not None:
            return Path(hf_hub_download(source.removesuffix(f"/{file}"), file))
        return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    except Exception as error:  # no network, no such repository
        why = (str(error).strip().splitlines() or [repr(error)])[0].removeprefix("Got: ").rstrip(".: ")
        raise ValueError(
            f"no file or folder {source}, and it could not be downloaded from the hub ({why}): check the name, the "
            "network and HF_ENDPOINT, or download the folder and give its path"
        ) from error


def _unprefixed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("backbone."): tensor for name, tensor in state.items()}


def stored_tokenizer(pickled: Any) -> Tokenizer | None:
    """The tokenizer in a checkpoint, from its JSON text, or None."""
    state = pickled.state if isinstance(pickled, Inert) else None
    core = state.get("_tokenizer") if isinstance(state, Mapping) else None
    text = core.state if isinstance(core, Inert) else None
    if not isinstance(text, bytes) or not isinstance(state, Mapping):
        return None
    tokens = {**(plain(state.get("init_kwargs")) or {}), **(plain(state.get("_special_tokens_map")) or {})}
    tokens |= {
        role: token for role in ("mask_token", "eos_token", "bos_token") if (token := plain(state.get(f"_{role}")))
    }
    declared = {role: token for role, token in tokens.items() if role.endswith("_token") and isinstance(token, str)}
    return from_json(text.decode(), "stored", declared)


def check_tokenizer(found: ReleasedCheckpoint, config: DenoiserConfig, words: Tokenizer) -> None:
    """Raise ValueError unless the tokenizer has the network's vocabulary and mask."""
    if words.vocab_size != config.vocab_size:
        raise ValueError(
            f"{found.path} has a vocabulary of {config.vocab_size} with the mask, and tokenizer {words.name} one of "
            f"{words.vocab_size}: give the --tokenizer it was trained with"
        )
    stated_id = found.config.get("mask_index", words.mask_id)
    if stated_id != words.mask_id:
        raise ValueError(
            f"the mask id in {found.path} is {stated_id}, and in tokenizer {words.name} {words.mask_id}: give the "
            "--tokenizer it was trained with"
        )


def report(lm: LanguageModel, out: str | Path) -> str:
    """A summary of the converted model, in two or three lines."""
    config = json.loads((Path(out) / "config.json").read_text(encoding="utf-8"))
    system = ", ".join(f"{key} {value}" for key, value in config["system"].items() if key != "name")
    net, about = lm.net.config, config["about"]
    number = sum(math.prod(p.shape) for p in trainable(lm.net).parameters())
    lines = [
        f"{out}: {config['system']['name']} ({system})",
        f"{number:,} parameters: {net.layers} layers, width {net.width}, {net.heads} heads, length {net.length}, "
        f"{net.vocab_size:,} ids; {about['weights']} weights of {about['source']}",
    ]
    if "perplexity" in about["check"]:
        lines.append("perplexity {perplexity:.2f} over {tokens:,} tokens (nelbo)".format(**about["check"]))
    return "\n".join(lines)
