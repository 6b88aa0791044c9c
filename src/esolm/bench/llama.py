"""llama.cpp on a left-to-right network of the same size with random weights, through `llama_cpp` and `gguf`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

TYPES = {"float32": "F32", "bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""The type of llama.cpp's weights for each precision; Q4_0 has a scale for each 32 weights, as int4 has."""
NAME = "AR, llama.cpp "


def installed() -> bool:
    """Whether llama.cpp can be measured here."""
    try:
        import gguf  # noqa: F401
        import llama_cpp  # noqa: F401
    except (ImportError, OSError, RuntimeError):  # llama_cpp raises the latter two for a library that does not load
        return False
    return True


def write(path: Path, layers: int, width: int, vocab_size: int, length: int, precision: str) -> None:
    """Write a GPT-2 of these sizes with random weights as a GGUF file without a tokenizer."""
    import gguf

    kind = gguf.GGMLQuantizationType[TYPES[precision]]
    random = numpy.random.default_rng(0)
    file = gguf.GGUFWriter(path, "gpt2")
    file.add_context_length(length)
    file.add_embedding_length(width)
    file.add_block_count(layers)
    file.add_feed_forward_length(4 * width)
    file.add_head_count(width // 64)
    file.add_layer_norm_eps(1e-5)
    file.add_vocab_size(vocab_size)
    file.add_tokenizer_model("no_vocab")

    def matrix(name: str, *shape: int) -> None:
        values = random.standard_normal(shape, dtype=numpy.float32) * numpy.float32(0.02)
        plain = kind == gguf.GGMLQuantizationType.F32
        file.add_tensor(name + ".weight", values if plain else gguf.quants.quantize(values, kind), raw_dtype=kind)

    def vector(name: str, size: int, value: float) -> None:
        file.add_tensor(name, numpy.full(size, value, dtype=numpy.float32))

    matrix("token_embd", vocab_size, width)
    file.add_tensor("position_embd.weight", numpy.zeros((length, width), dtype=numpy.float32))
    matrix("output", vocab_size, width)
    norms = ["output_norm", *(f"blk.{i}.{name}" for i in range(layers) for name in ("attn_norm", "ffn_norm"))]
    for name in norms:
        vector(name + ".weight", width, 1.0)
        vector(name + ".bias", width, 0.0)
    for i in range(layers):
        sizes = {"attn_qkv": (3, 1), "attn_output": (1, 1), "ffn_up": (4, 1), "ffn_down": (1, 4)}
        for name, (out, into) in sizes.items():
            matrix(f"blk.{i}.{name}", out * width, into * width)
            vector(f"blk.{i}.{name}.bias", out * width, 0.0)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


class LlamaCpp:
    """One model in memory; `step` makes calls over caches of a length. The caches of the last one are freed."""

    def __init__(self, layers: int, width: int, vocab_size: int, length: int, precision: str) -> None:
        import llama_cpp

        self.api, self.length = llama_cpp, length
        self.session: Any = None
        self.silence = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.silence, None)
        options = llama_cpp.llama_model_default_params()
        with tempfile.TemporaryDirectory() as home:
            path = Path(home, "model.gguf")
            write(path, layers, width, vocab_size, length, precision)
            options.use_mmap = False
            self.model: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        if not self.model:
            raise ValueError("llama.cpp did not load the GGUF file that this benchmark wrote: try another version")

    def step(self, context: int, batch: int = 1) -> Callable[[int], object]:
        """Return a call that feeds one token to each of `batch` sequences of `context` tokens, and gives logits."""
        api = self.api
        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_seq_max = batch * (context + 8), 512, batch
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        if self.session is not None:
            api.llama_free(self.session)
        self.session = session = api.llama_init_from_model(self.model, options)
        memory = api.llama_get_memory(session)
        for first in range(0, context, 512):
            self._decode(session, [(first + i, 0, False) for i in range(min(512, context - first))])
        for row in range(1, batch):
            api.llama_memory_seq_cp(memory, 0, row, 0, -1)
        rows = [(context, row, True) for row in range(batch)]

        def call(i: int) -> None:
            self._decode(session, rows)
            for row in range(batch):
                api.llama_memory_seq_rm(memory, row, context, -1)

        return call

    def _decode(self, session: Any, rows: list[tuple[int, int, bool]]) -> None:
        """Feed a token at each (position, sequence), with logits where they are wanted."""
        batch = self.api.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = i % 50, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        status = self.api.llama_decode(session, batch)
        self.api.llama_batch_free(batch)
        if status != 0:
            raise ValueError(f"llama.cpp could not decode {len(rows)} tokens: status {status}")
