"""Several inputs in one pass: the nats and gradients of each alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from esolm.core.batch import Batch
from esolm.core.randomness import Randomness
from esolm.net.denoiser import Denoiser
from esolm.net.packed import together
from esolm.systems import esolm as module
from support import toy

B, L, V = 6, 12, 9
MASK = V - 1


def nats_and_gradients(net: Denoiser, options: dict[str, Any], marks: dict[str, Tensor], train: bool) -> list[Tensor]:
    system = toy.make("esolm", MASK, **options)
    x = toy.text(B, L, V - 1)
    terms = system.terms(net, Batch(x, marks.get("valid"), marks.get("given")), Randomness(3, 0, B), train)
    assert [term.name for term in terms] == ["diffusion", "sequential"]
    loss = sum(term.nats.sum() / (i + 2) for i, term in enumerate(terms))
    assert isinstance(loss, Tensor)
    return [*(term.nats for term in terms), *torch.autograd.grad(loss, list(net.parameters()))]


@pytest.mark.parametrize("marks", ["all", "padded", "given"])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("options", [{"alpha_0": 0.5}, {"alpha_0": 0.25, "variant": "A"}], ids=["B", "A"])
@pytest.mark.parametrize("shape", toy.FAMILIES)
def test_one_pass_equals_a_pass_for_each(
    shape: str, options: dict[str, Any], train: bool, marks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = toy.network(V, L, **toy.FAMILIES[shape])
    place = torch.arange(L)
    seen = {
        "all": {},
        "padded": {"valid": place < torch.tensor([L, 5, 9, L, 7, 3])[:, None]},
        "given": {"given": place < torch.tensor([0, 5, 9, 2, 7, 3])[:, None]},
    }[marks]
    passes: list[int] = []
    net.register_forward_pre_hook(lambda *_: passes.append(1))
    one = nats_and_gradients(net, options, seen, train)
    assert len(passes) == 1
    monkeypatch.setattr(module, "together", lambda net, calls: [together(net, [call])[0] for call in calls])
    each = nats_and_gradients(net, options, seen, train)
    assert len(passes) == 3
    for ours, slow in zip(one, each, strict=True):
        torch.testing.assert_close(ours, slow, rtol=1e-10, atol=1e-10)
    assert one[0].any()
    assert one[1].any()
