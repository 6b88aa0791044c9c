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


@pytest.mark.parametrize(
    ("name", "options"),
    [("ar", {}), ("esolm", {"loss": "any_order"}), ("esolm", {"loss": "any_order", "query": "shift"})],
    ids=["ar", "esolm", "shift"],
)
@pytest.mark.parametrize("shape", toy.FAMILIES)
def test_rows_of_different_lengths_are_packed(shape: str, name: str, options: dict[str, Any]) -> None:
    """One pass over the tokens without padding gives the nats and gradients of each row alone."""
    net, system = toy.network(V, L + 1, **toy.FAMILIES[shape]), toy.make(name, MASK, **options)
    lengths = [L, 5, 9, L, 5, 3]
    place = torch.arange(L)
    valid = place < torch.tensor(lengths)[:, None]
    given = place < torch.tensor([0, 2, 9, 3, 4, 0])[:, None]  # of the third row nothing is scored
    x = toy.text(B, L, V - 1)
    fed: list[int] = []
    net.register_forward_pre_hook(lambda _, arguments: fed.append(arguments[0].numel()))
    (whole,) = system.terms(net, Batch(x, valid, given), Randomness(3, 0, B), True)
    streams, start = (1, 0) if name == "ar" else (2, int(system.shift))
    most = sum(streams * (n + start) for n in lengths)
    assert sum(fed) <= most
    assert len(fed) == 1
    alone = []
    for i, n in enumerate(lengths):
        own = Batch(x[i : i + 1, :n], None, given[i : i + 1, :n])
        (term,) = system.terms(net, own, Randomness(3, i, B), True)
        alone.append(torch.nn.functional.pad(term.nats, (0, L - n)))
    torch.testing.assert_close(whole.nats, torch.cat(alone), rtol=1e-10, atol=1e-10)
    assert (whole.nats != 0).equal(whole.valid)
    weight = torch.linspace(0.5, 1.5, B * L, dtype=whole.nats.dtype).view(B, L)
    parameters = list(net.parameters())
    ours, slow = (torch.autograd.grad((n * weight).sum(), parameters) for n in (whole.nats, torch.cat(alone)))
    for one, other in zip(ours, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_rows_padded_on_the_left_and_compiled_networks_keep_their_padding() -> None:
    valid = torch.arange(L) >= torch.tensor([0, 4])[:, None]
    x = toy.text(2, L, V - 1)
    ((rows, same),) = Batch(x, valid).by_length()
    assert rows.tolist() == [0, 1]
    assert same.valid is valid
    net = toy.network(V, L)
    fed: list[torch.Size] = []
    net.register_forward_pre_hook(lambda _, arguments: fed.append(arguments[0].shape))
    system = toy.make("ar", MASK)
    padded = Batch(x, valid.flip(1))
    (plain,) = system.terms(net, padded, Randomness(3, 0, 2), True)
    net.compile(backend="eager")
    (compiled,) = system.terms(net, padded, Randomness(3, 0, 2), True)
    assert fed == [(1, 2 * L - 4), (2, L)]
    torch.testing.assert_close(plain.nats, compiled.nats, rtol=1e-10, atol=1e-10)


def test_rows_without_a_token_have_no_nats() -> None:
    net, system = toy.network(V, L), toy.make("ar", MASK)
    (term,) = system.terms(net, Batch(toy.text(2, L, V - 1), torch.zeros(2, L, dtype=torch.bool)), Randomness(0), True)
    assert not term.nats.any()
