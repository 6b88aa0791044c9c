"""Our `ar` baseline against transformers' GPT-2 with the same data, data order, size and number of tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
from jsonargparse import CLI
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from esolm.bench.report import facts
from esolm.core.batch import Batch
from esolm.core.randomness import Randomness
from esolm.data import Loader, Manifest
from esolm.net.denoiser import Denoiser, DenoiserConfig
from esolm.runtime.machine import settle
from esolm.systems import find

Loss = Callable[[Tensor], Tensor]


def ours(manifest: Manifest, layers: int, width: int) -> tuple[nn.Module, Loss]:
    """Return our AR transformer and its loss in nats per token."""
    torch.manual_seed(0)
    sizes = (manifest.vocab_size, manifest.length, layers, width, width // 64)
    net = Denoiser(DenoiserConfig(*sizes, adaln=False, dropout=0.0, init="gpt2"))
    system = find("ar")(mask_id=manifest.mask_id)
    return net, lambda x: system.terms(net, Batch(x), Randomness(0, 0, len(x)), True)[0].nats.mean()


def theirs(manifest: Manifest, layers: int, width: int) -> tuple[nn.Module, Loss]:
    """Return GPT-2 with the same layers, width and heads, untied embeddings, and the mask id as first input token."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=manifest.vocab_size, n_positions=manifest.length, n_embd=width, n_layer=layers,
        n_head=width // 64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    net = GPT2LMHeadModel(config)

    def loss(x: Tensor) -> Tensor:
        before = torch.cat([x.new_full((len(x), 1), manifest.mask_id), x[:, :-1]], 1)
        logits = net(before).logits
        logits[..., manifest.mask_id] = float("-inf")
        return F.cross_entropy(logits.flatten(0, 1), x.flatten())

    return net, loss


def main(
    data: str,
    steps: int = 600,
    batch_size: int = 16,
    layers: int = 4,
    width: int = 256,
    lr: float = 1e-3,
    seed: int = 0,
) -> dict[str, Any]:
    """Train our ar and a GPT-2 on the same batches and compare their validation perplexity.

    Args:
        data: folder written by `esolm prepare`.
        steps: number of training steps.
        batch_size: sequences per batch.
        layers: number of blocks of both networks.
        width: width of both networks, a multiple of 64.
        lr: peak learning rate: warm-up over a tenth of the steps, then a cosine to zero.
        seed: seed of the data order.
    """
    settle()
    manifest = Manifest.load(data)
    source = Loader(data, "train", batch_size, seed)
    held_out = Loader(data, "valid", batch_size, seed, shuffle=False)
    models = {"esolm ar": ours(manifest, layers, width), "transformers GPT-2": theirs(manifest, layers, width)}
    result = {}
    for name, (net, loss) in models.items():
        optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.0, fused=True)
        for step in track(range(steps), description=name, transient=True):
            rate = min(1, (step + 1) / (steps / 10)) * 0.5 * (1 + math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = lr * rate
            loss(source.batch(step).x).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        batches = [held_out.batch(i).x for i in range(len(held_out))]
        with torch.no_grad():
            nats = sum(loss(x).double().item() * x.numel() for x in batches) / sum(x.numel() for x in batches)
        result[name] = {"perplexity": math.exp(nats), "parameters": sum(p.numel() for p in net.parameters())}
    ratio = result["esolm ar"]["perplexity"] / result["transformers GPT-2"]["perplexity"]
    return {"machine": facts(), "models": result, "ratio": ratio}


if __name__ == "__main__":
    print(json.dumps(CLI(main), indent=1))
