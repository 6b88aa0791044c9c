"""Load outside models with transformers, and batch texts for them. No code from a model folder is run.

Shapes: B batch, L length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.machine import keep_memory
from ..runtime.progress import track

CAUSAL = ("ForCausalLM", "LMHeadModel")
"""Endings of the architectures that read from left to right."""
UNLIMITED = 1 << 30


class OutsideModel(NamedTuple):
    """A transformers model in float32 and its tokenizer."""

    model: Any
    tokenizer: Any

    @property
    def positions(self) -> int:
        """The longest input that the model takes, in tokens."""
        return getattr(self.model.config, "max_position_embeddings", None) or UNLIMITED


def load_causal(name: str, device: str = "cpu") -> OutsideModel:
    """A causal language model: a folder, a .gguf file, or a name on the hub."""
    return _load("AutoModelForCausalLM", name, device, local=False)


def load_encoder(folder: str, device: str = "cpu") -> OutsideModel:
    """An encoder without its head, from a folder. A pooling layer may be missing, because none is used."""
    return _load("AutoModel", folder, device, local=True)


def is_causal(folder: str) -> bool:
    """Whether the model in a folder, or in a .gguf file, reads from left to right."""
    if Path(folder).suffix == ".gguf":
        return True
    config = _from_pretrained("AutoConfig", folder, {"local_files_only": True})
    if config.is_encoder_decoder:
        raise ValueError(f"{folder} holds an encoder-decoder model: give an encoder or a causal language model")
    return any(name.endswith(CAUSAL) for name in config.architectures or [])


def _load(auto: str, name: str, device: str, local: bool) -> OutsideModel:
    if local and not Path(name).is_dir():
        raise ValueError(f"no folder {name}: give a folder with a transformers model and its tokenizer")
    keep_memory()
    options: dict[str, Any] = {"local_files_only": True} if local else {}
    source = name
    if (path := Path(name)).suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"no file {name}: give a .gguf file, a model folder or a name on the hub")
        source, options = str(path.parent), {"gguf_file": path.name}
    tokenizer = _from_pretrained("AutoTokenizer", source, options)
    more = {"dtype": torch.float32, "output_loading_info": True}
    model, found = _from_pretrained(auto, source, {**options, **more})
    if len(tokenizer) < model.config.vocab_size // 2:  # without its files transformers makes an empty tokenizer
        raise ValueError(
            f"the tokenizer in {name} has {len(tokenizer)} entries and the model {model.config.vocab_size}: add the "
            "tokenizer's files"
        )
    if missing := sorted(key for key in found["missing_keys"] if "pooler" not in key):
        raise ValueError(f"{name} lacks {len(missing)} weights of its model, such as {missing[0]}: download it again")
    model.config.use_cache = False  # every text is read once
    return OutsideModel(model.to(device).eval(), tokenizer)


def _from_pretrained(auto: str, source: str, options: dict[str, Any]) -> Any:
    """What an Auto class of transformers loads; raises ValueError with the first line of its error."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError("outside models need transformers: pip install 'esolm[hf]'") from error
    try:
        return getattr(transformers, auto).from_pretrained(source, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"no model could be loaded from {source!r}: {reason}") from error


def batches(
    rows: Sequence[Sequence[int]], size: int, pad: int, device: torch.device, task: str
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Batches of rows of similar length, the longest first, so that running out of memory shows at once.

    Yields the indices of the rows, the rows padded on the right, int [B, L], and which tokens are real, bool [B, L];
    L is at least 2. task: the label of the progress bar.
    """
    if size < 1:
        raise ValueError(f"batch_size is {size}; it must be at least 1")
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    for some in track([order[first : first + size] for first in range(0, len(order), size)], task):
        longest = max(2, len(rows[some[0]]))
        x = torch.tensor([[*rows[i], *[pad] * (longest - len(rows[i]))] for i in some], device=device)
        lengths = torch.tensor([[len(rows[i])] for i in some], device=device)
        yield some, x, torch.arange(longest, device=device) < lengths
