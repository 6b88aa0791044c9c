"""One cached step: the input is a clean token and a mask, the output the logits of the mask.

The predicted time is that of reading every weight and every cached key and value once or, with many rows, that of the
matrix products if they take longer. Both limits are measured in the same rounds as the steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.visibility import by_order
from ..net.denoiser import Denoiser, DenoiserConfig, Rows
from ..net.fold import PRECISIONS, fold
from ..net.native.engine import native_fold
from ..net.native.library import Unavailable, library
from ..net.native.linear import aligned
from . import llama
from .machine import gemm
from .naive import Naive
from .report import named, table
from .timing import interleaved, ratio, summary

NAIVE, TRAINED, READ = "authors' implementation, float32", "not folded, float32", "read"
READ_BYTES = 2**29
"""Larger than any CPU cache."""
BYTES = {"float32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5625}
"""Of a weight; int4 has a bf16 scale for each 32 weights."""
CACHE_BYTES = {"float32": 4, "bf16": 2, "int8": 2, "int4": 2}
NATIVE = "native "
"""Before the precision, in the names of networks that run in the native library."""
Step = Callable[[int], object]


def network(layers: int, width: int, vocab_size: int, length: int = 1024) -> Denoiser:
    """Return a network with random weights."""
    torch.manual_seed(0)
    net = Denoiser(DenoiserConfig(vocab_size, length, layers, width, width // 64, dropout=0.0)).eval()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return net


def cached_step(net: Any, context: int, clean: int, masks: int, batch: int = 1) -> Step:
    """Return a pass over a fixed cache of random keys and values that gives the logits of the last `masks` slots."""
    cache = net.new_cache(batch, context + clean + masks)
    for t in (*cache.keys, *cache.values):
        t.normal_()
    cache.place(by_order(torch.arange(context)[None]))
    cache.commit(context)
    rank = torch.arange(context, context + clean + masks)[None]
    tokens = torch.arange(clean + masks).expand(batch, -1) % net.config.vocab_size
    call = tokens, rank.expand(batch, -1), by_order(rank)
    out = Rows(slice(clean, clean + masks))
    return lambda i: net(*call, cache=cache, out=out)


def frozen_step(net: Denoiser, context: int, clean: int, dtype: torch.dtype) -> Step:
    """Return the step of the unfolded network through torch.compile with frozen weights.

    The compiler then folds AdaLN, packs weights and fuses operations by itself. Raises ValueError if compilation fails,
    for example without a C++ compiler.
    """
    low = copy.deepcopy(net).to(dtype)
    step = cached_step(
        torch.compile(low, dynamic=False, options={"freezing": True, "max_autotune": True}), context, clean, 1
    )
    try:
        step(0)
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"the step could not be compiled: {reason}. Omit --compiled") from error
    return step


def gpt2_step(layers: int, width: int, vocab_size: int, context: int, dtype: torch.dtype) -> Step | None:
    """Return a cached one-token step of transformers' GPT-2 of the same size, or None without transformers."""
    try:
        from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel
    except ImportError:
        return None
    config = GPT2Config(
        vocab_size=vocab_size, n_positions=context + 8, n_embd=width, n_layer=layers, n_head=width // 64,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    net: Any = GPT2LMHeadModel(config).eval()
    net.to(dtype)
    token, shape = torch.zeros(1, 1, dtype=torch.long), (1, width // 64, context, 64)
    cache = DynamicCache(config=config)
    for layer in range(layers):
        cache.update(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), layer)

    def step(i: int) -> Tensor:
        logits = net(token, past_key_values=cache, use_cache=True).logits
        cache.crop(-1)
        return logits

    return step


def read_step() -> Step:
    """Return a function that reads READ_BYTES from memory by the native library, or more slowly by a sum in PyTorch."""
    try:
        lib = library()
    except Unavailable:
        buffer = torch.ones(READ_BYTES // 4)
        return lambda i: buffer.sum()
    memory = aligned(READ_BYTES).fill_(1)
    return lambda i: lib.esolm_read(memory.data_ptr(), READ_BYTES, torch.get_num_threads())


def networks(net: Denoiser, precisions: list[str], native: bool) -> dict[str, Any]:
    """Return the folded networks by name: in PyTorch, except int4, and in the native library if it was built."""
    found: dict[str, Any] = {p: fold(net, p) for p in precisions if p != "int4"}
    try:
        return found | {NATIVE + p: native_fold(net, p) for p in precisions if native}
    except Unavailable:
        return found


def bytes_read(config: DenoiserConfig, name: str, context: int, batch: int = 1) -> tuple[int, int]:
    """Return the bytes that every step reads: linear weights, and cached keys and values."""
    precision = name.removeprefix(NATIVE)
    weights = config.layers * config.block_weights + config.vocab_size * config.width
    cached = 2 * config.layers * config.sizes.keys * context * batch
    return int(weights * BYTES[precision]), cached * CACHE_BYTES[precision]


def predicted(
    config: DenoiserConfig, name: str, context: int, rows: int, masks: int, speed: float, gflops: dict[str, float]
) -> float:
    """Predict the seconds: the longer of reading the weights and multiplying by them, plus reading the cache."""
    weights, cached = bytes_read(config, name, context)
    blocks = config.layers * config.block_weights
    flops = 2 * (rows * blocks + masks * config.vocab_size * config.width)
    peak = gflops["float32" if name.endswith("float32") else "bf16"]
    return max(weights / speed, flops / peak / 1e9) + cached / speed


def run(
    contexts: list[int] | None = None,
    parallelism: list[int] | None = None,
    precisions: list[str] | None = None,
    layers: int = 12,
    width: int = 768,
    vocab_size: int = 50258,
    context: int = 512,
    rounds: int = 15,
    compiled: bool = False,
    native: bool = True,
    llama_cpp: bool = True,
    plot: str | None = None,
) -> dict[str, Any]:
    """Time one cached step against slower implementations and against the memory bandwidth.

    Args:
        contexts: cache lengths of the first curve; 512, 1024, 2048, 4096 and 8192 by default.
        parallelism: masks per step, with as many clean tokens, of the second curve; 1, 2, 4 … 64 by default.
        precisions: weight precisions; float32, bf16, int8 and int4 (in the native library only) by default.
        layers: number of blocks.
        width: width of the network, a multiple of 64.
        vocab_size: vocabulary size, including the mask token.
        context: cache length of the table and of the second curve.
        rounds: number of timed rounds.
        compiled: also time the step through torch.compile with frozen weights (minutes to compile).
        native: also time the native library, if it was built.
        llama_cpp: also time llama.cpp, if `llama_cpp` and `gguf` are installed, on a GPT-2 of the same size.
        plot: file for a plot of the two curves (needs esolm[plot]).
    """
    precisions = precisions or ["float32", "bf16", "int8", "int4"]
    with torch.inference_mode():
        net = network(layers, width, vocab_size)
        nets = networks(net, precisions, native)
        gflops = {"float32": gemm(torch.float32), "bf16": gemm(torch.bfloat16)}
        read = read_step()
        steps = single(net, nets, context, rounds, read, compiled, llama_cpp and llama.installed())
        lengths = contexts or [512, 1024, 2048, 4096, 8192]
        masks = parallelism or [1, 2, 4, 8, 16, 32, 64]
        along = curve(nets, [(c, 1) for c in lengths], rounds, gflops, read)
        wide = curve(nets, [(context, m) for m in masks], rounds, gflops, read)
    result = {
        "gemm_gflops": {name: round(value, 1) for name, value in gflops.items()},
        "context": context,
        "steps": steps,
        "by_context": along,
        "by_parallelism": wide,
    }
    show(result)
    if plot:
        figure(plot, result)
    return result


def single(
    net: Denoiser, nets: dict[str, Any], context: int, rounds: int, read: Step, compiled: bool, llama_cpp: bool
) -> dict[str, Any]:
    """Time each precision for Eso-LM and AR, the slower implementations, GPT-2 and llama.cpp."""
    c = net.config
    cases: dict[str, Step] = {READ: read, NAIVE: cached_step(Naive(net), context, 1, 1)}
    cases[TRAINED] = cached_step(net, context, 1, 1)
    for name, each in nets.items():
        cases[f"Eso-LM, {name}"] = cached_step(each, context, 1, 1)
        cases[f"AR, {name}"] = cached_step(each, context, 0, 1)
        if compiled and name in ("float32", "bf16"):
            cases[f"Eso-LM compiled, {name}"] = frozen_step(net, context, 1, PRECISIONS[name])
    for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        if (step := gpt2_step(c.layers, c.width, c.vocab_size, context, dtype)) is not None:
            cases[f"transformers GPT-2, {name}"] = step
    for name in dict.fromkeys(name.removeprefix(NATIVE) for name in nets) if llama_cpp else ():
        sizes = c.layers, c.width, c.vocab_size, max(c.length, context + 8)
        cases[llama.NAME + name] = llama.LlamaCpp(*sizes, name).step(context)
    seconds = interleaved(cases, rounds, warmup=3)
    found = {}
    for name in cases:
        if name == READ:
            continue
        precision = name.rpartition(", ")[2].removeprefix("llama.cpp ")
        amount = sum(bytes_read(c, precision, context))
        share = ratio([s * amount / READ_BYTES for s in seconds[READ]], seconds[name])
        found[name] = {
            **ratio(seconds[NAIVE], seconds[name]).record("faster_than_authors", 3),
            "milliseconds": round(1e3 * summary(seconds[name]).median, 2),
            "megabytes": round(amount / 1e6, 1),
            "share_of_bandwidth": round(share.median, 3),
        }
        if name.startswith("Eso-LM,"):
            found[name]["over_ar"] = round(ratio(seconds[name], seconds[f"AR, {precision}"]).median, 3)
        plain = precision.removeprefix(NATIVE)
        if name == f"AR, {precision}" and (other := seconds.get(llama.NAME + plain)) is not None:
            found[name]["faster_than_llama_cpp"] = round(ratio(other, seconds[name]).median, 3)
    return {"read_gb_per_s": round(READ_BYTES / summary(seconds[READ]).median / 1e9, 1), "cases": found}


def curve(
    nets: dict[str, Any], points: list[tuple[int, int]], rounds: int, gflops: dict[str, float], read: Step
) -> list[dict[str, Any]]:
    """Time each precision at each (context, masks), with the prediction from the same rounds."""
    found = []
    for context, masks in points:
        cases = {name: cached_step(net, context, masks, masks) for name, net in nets.items()}
        seconds = interleaved({READ: read, **cases}, rounds, warmup=2)
        speed = READ_BYTES / summary(seconds[READ]).median
        for name, net in nets.items():
            time = summary(seconds[name])
            expected = predicted(net.config, name, context, 2 * masks, masks, speed, gflops)
            found.append(
                {
                    "precision": name,
                    "context": context,
                    "masks": masks,
                    "milliseconds": round(1e3 * time.median, 2),
                    "quartiles": [round(1e3 * time.low, 2), round(1e3 * time.high, 2)],
                    "milliseconds_per_token": round(1e3 * time.median / masks, 3),
                    "predicted_milliseconds": round(1e3 * expected, 2),
                    "over_prediction": round(time.median / expected, 2),
                }
            )
    return found


def show(result: dict[str, Any]) -> None:
    """Print the three tables."""
    steps = result["steps"]
    title = f"one cached step, context {result['context']}; {steps['read_gb_per_s']:g} GB/s read in the same rounds"
    columns = {
        "case": "name", "× authors'": "faster_than_authors", "quartiles": "quartiles", "ms": "milliseconds",
        "MB": "megabytes", "of bandwidth": "share_of_bandwidth:.0%", "over AR": "over_ar",
        "× llama.cpp": "faster_than_llama_cpp",
    }  # fmt: skip
    table(title, columns, named(steps["cases"]))
    for key, column in (("by_context", "context"), ("by_parallelism", "masks")):
        columns = {
            "precision": "precision", column: f"{column}:d", "ms": "milliseconds",
            "ms/token": "milliseconds_per_token", "predicted ms": "predicted_milliseconds", "over": "over_prediction",
        }  # fmt: skip
        table(key.replace("_", " "), columns, result[key])


def figure(path: str, result: dict[str, Any]) -> None:
    """Plot both curves, measured and predicted."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'esolm[plot]'") from error
    drawing, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    labels = {"context": "tokens in the cache", "masks": "tokens drawn in a step"}
    for axis, key, x in ((axes[0], "by_context", "context"), (axes[1], "by_parallelism", "masks")):
        for color, precision in enumerate(dict.fromkeys(r["precision"] for r in result[key])):
            points = [r for r in result[key] if r["precision"] == precision]
            at = [r[x] for r in points]
            axis.plot(at, [r["milliseconds"] / r["masks"] for r in points], f"C{color}o-", label=precision)
            axis.plot(at, [r["predicted_milliseconds"] / r["masks"] for r in points], f"C{color}:")
        axis.set(xscale="log", yscale="log", xlabel=labels[x])
        axis.set_xticks(at, [str(a) for a in at])
        axis.set_yticks(ticks := [2, 5, 10, 20, 50], [str(t) for t in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms per token")
    axes[1].legend(title="dotted: predicted", frameon=False)
    drawing.savefig(path)
    pyplot.close(drawing)
