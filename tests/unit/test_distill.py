"""Distillation: the divergence from the initial model, its gradient, and what cannot be distilled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from esolm.core.batch import Batch
from esolm.core.randomness import Randomness
from esolm.core.terms import total
from esolm.core.visibility import causal
from esolm.net.denoiser import Denoiser
from esolm.systems import System
from esolm.training.distill import Distilled, Teacher
from support import toy

V, L, B, MASK = 7, 6, 4, 6
SHIFT: dict[str, Any] = {"query": "shift", "loss": "any_order", "alpha_0": 1.0}


def teacher(weight: float = 1.0, system: System | None = None, seed: int = 0) -> Teacher:
    return Teacher(toy.network(V, L, seed=seed), system or toy.make("ar", MASK), weight)


def naive_kl(net: Denoiser, original: Denoiser, row: Tensor) -> Tensor:
    """The sum of KL(original || net) over positions, without the mask, each from a pass over the tokens to its left."""
    kl = torch.zeros((), dtype=torch.float64)
    for place in range(len(row)):
        before = torch.cat([torch.tensor([MASK]), row[:place]])[None]
        position = torch.arange(place + 1)[None]
        p, q = (each(before, position, causal(place + 1))[0, -1, :MASK].softmax(-1) for each in (original, net))
        kl = kl + (p.detach() * (p.detach().log() - q.log())).sum()
    return kl


@pytest.mark.parametrize("student", [toy.make("ar", MASK), toy.make("esolm", MASK, **SHIFT)])
def test_the_initial_model_has_no_divergence(student: System) -> None:
    found = teacher()
    batch = Batch(toy.text(B, L, V), valid=toy.padding(B, L))
    term = found.term(found.net, student, batch)
    assert term.nats.abs().max() < 1e-12
    other = teacher(seed=1).term(found.net, student, batch)
    assert (other.nats[batch.scored] > 1e-3).all()
    assert not other.nats[~batch.scored].any()


def test_a_shifted_teacher_is_the_same_model() -> None:
    """The initial model may be an Eso-LM with shifted queries."""
    batch, net = Batch(toy.text(B, L, V)), toy.network(V, L, seed=2)
    student = toy.make("esolm", MASK, **SHIFT)
    one, two = (teacher(system=system).term(net, student, batch).nats for system in (None, student))
    torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_the_gradient_is_that_of_a_naive_computation() -> None:
    """Of the loss of the system and weight * KL, both per scored token."""
    weight, found = 0.7, teacher(0.7)
    net, student = toy.network(V, L, seed=1), toy.make("esolm", MASK, **SHIFT)
    batch, rng = Batch(toy.text(B, L, V), valid=toy.padding(B, L)), Randomness(3, 0, B)
    both = Distilled(student, found)
    counts = both.counts(batch.scored, rng)
    total(both.terms(net, batch, rng, True), counts).backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    loss = total(student.terms(net, batch, rng, True), student.counts(batch.scored, rng))
    ends = batch.scored.sum(1).tolist()
    kl = sum(naive_kl(net, found.net, row[:end]) for row, end in zip(batch.x, ends, strict=True))
    (loss + weight * kl / sum(ends)).backward()
    assert gradients.keys() == {name for name, p in net.named_parameters() if p.grad is not None}
    for name, p in net.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-9, atol=1e-10)
    assert all(p.grad is None for p in found.net.parameters())


def test_systems_without_left_to_right_predictions() -> None:
    batch = Batch(toy.text(B, L, V))
    for system in (toy.make("mdlm", MASK), toy.make("esolm", MASK)):
        assert not system.has_next_logits
        with pytest.raises(ValueError, match="left"):
            system.next_logits(toy.network(V, L), batch)
