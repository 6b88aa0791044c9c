"""torch.compile in training: the rows change in number with every step, and nothing is compiled again for that.

A backend that counts stands for the compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from esolm.core.batch import Batch
from esolm.core.randomness import Randomness, fold
from esolm.core.terms import total
from esolm.net import head
from esolm.net.denoiser import Denoiser, DenoiserConfig
from esolm.runtime.distributed import ALONE, Ranks
from esolm.systems import find
from esolm.training import parallel
from esolm.training.options import Compute

B, L, V, STEPS = 8, 160, 32, 20
WHOLE, BLOCKS = ALONE, Ranks(0, 2)  # what is compiled: the network, or with several processes each of its blocks


class Counting:
    """Graphs that were compiled, and calls of them."""

    def __init__(self) -> None:
        self.compiled = self.called = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Callable:
        self.compiled += 1

        def call(*given: Any) -> Any:
            self.called += 1
            return module.forward(*given)

        return call


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    torch._dynamo.reset()
    counting = Counting()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counting))
    yield counting
    torch._dynamo.reset()


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("name", "options", "ranks", "chunks"),
    [
        ("esolm", {"alpha_0": 0.5}, WHOLE, False),
        ("esolm", {"alpha_0": 0.5}, BLOCKS, True),
        ("mdlm", {}, WHOLE, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("esolm", {"alpha_0": 0.5}, WHOLE, True),
                ("esolm", {"alpha_0": 0.5, "variant": "A"}, WHOLE, False),
                ("esolm", {"alpha_0": 0.5, "loss": "any_order"}, WHOLE, True),
                ("bd3lm", {"block_size": 16}, WHOLE, True),
                ("mdlm", {}, BLOCKS, True),
            ]
        ),
    ],
)
def test_nothing_is_compiled_after_the_first_step(
    name: str, options: dict, ranks: Ranks, chunks: bool, backend: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every step runs as much compiled code as the first: none is left to Python for having too many shapes."""
    if chunks:
        monkeypatch.setattr(head, "WHOLE", 0)
    system, x = find(name)(mask_id=V - 1, **options), torch.randint(0, V - 1, (B, L))
    net, compute = Denoiser(DenoiserConfig(V, L, 2, 32, 2, 4)), Compute(device="cpu", compile=True)
    parallel.shard(net, compute, ranks)
    call = parallel.connect(net, compute, ranks) if ranks is WHOLE else net
    fed, asked = set(), set()

    def noted(tokens: Tensor, *given: Any, **more: Any) -> Tensor:
        fed.add(tokens.numel())
        asked.add(len(more["out"].index))
        return call(tokens, *given, **more)

    compiled, called = [], []
    for i in range(STEPS):
        rng, before = Randomness(fold(1, i), 0, B), backend.called
        total(system.terms(noted, Batch(x), rng, True), system.counts(torch.ones_like(x) > 0, rng)).backward()
        compiled.append(backend.compiled)
        called.append(backend.called - before)
    assert compiled == [compiled[0]] * STEPS
    assert called == [called[0]] * STEPS
    assert min(compiled[0], called[0]) > 0
    if options.get("loss") != "any_order":  # which scores every token
        assert len(asked) > 10
    if name == "esolm" and options == {"alpha_0": 0.5}:
        assert len(fed) > 2
