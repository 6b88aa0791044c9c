"""The chunked output layer equals the logits at once and autograd through them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from esolm.net import head as module
from esolm.net.fold import fold
from esolm.net.head import RowLoss, Score, score_rows
from support import toy

R, W, V, MASK = 23, 8, 11, 10


@pytest.fixture
def case() -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(W, V, dtype=torch.float64)
    h = torch.randn(R, W, dtype=torch.float64, requires_grad=True)
    return head, h, torch.randint(0, MASK, (R,)), torch.rand(R, dtype=torch.float64) + 0.5


def both(case, monkeypatch, weighted: bool, loss, function=None) -> list[tuple[Tensor, ...]]:
    head, h, target, weight = case
    score = Score(target, MASK, weight if weighted else None)
    if function is not None:
        score = RowLoss(function, (target, weight))
    found = []
    for whole in (1 << 24, 0):
        monkeypatch.setattr(module, "WHOLE", whole)
        monkeypatch.setattr(module, "CHUNK", 5)
        nats = score_rows(head, h, score)
        found.append((nats, *torch.autograd.grad(loss(nats), [h, head.weight, head.bias])))
    return found


LOSSES = {
    "sum": lambda nats: nats.sum() / 7,
    "first rows": lambda nats: nats[:9].sum(),
    "squares": lambda nats: (nats**2).sum(),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_chunks_equal_the_whole(case, monkeypatch, weighted: bool, loss: str) -> None:
    whole, chunks = both(case, monkeypatch, weighted, LOSSES[loss])
    for one, two in zip(whole, chunks, strict=True):
        assert one.any()
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_any_function_of_a_row_in_chunks(case, monkeypatch, loss: str) -> None:
    def spread(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        p = logits.softmax(-1)
        return weight * torch.log1p(3 * p).sum(1) - p.gather(1, target[:, None])[:, 0].log()

    whole, chunks = both(case, monkeypatch, True, LOSSES[loss], spread)
    for one, two in zip(whole, chunks, strict=True):
        assert one.any()
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    head, h, target, weight = case
    with torch.no_grad():
        torch.testing.assert_close(score_rows(head, h, RowLoss(spread, (target, weight))), whole[0])
    folded = fold(toy.network(V, 8))
    score = RowLoss(spread, (target, weight))
    hidden = torch.randn(R, 16, dtype=torch.float64)
    torch.testing.assert_close(folded.nats(hidden, score), score.nats(folded.head(hidden), slice(None)))


def test_the_excluded_id_gets_no_probability_and_no_gradient(case, monkeypatch) -> None:
    for _, _, d_matrix, d_bias in both(case, monkeypatch, True, LOSSES["sum"]):
        assert not d_matrix[MASK].any()
        assert not d_bias[MASK].any()
        assert d_matrix[:MASK].any()


def test_a_loss_sweeps_once_and_evaluation_keeps_nothing(case, monkeypatch) -> None:
    head, h, target, _ = case
    monkeypatch.setattr(module, "WHOLE", 0)
    asked = []
    sweep = module._sweep
    monkeypatch.setattr(module, "_sweep", lambda *a: asked.append(a[-1]) or sweep(*a))
    score_rows(head, h, Score(target, MASK)).mean().backward()
    assert asked == [True]
    with torch.no_grad():
        score_rows(head, h, Score(target, MASK))
    assert asked == [True, False]


@pytest.mark.usefixtures("bf16")
def test_autocast_keeps_the_output_layers_gradient_in_float32(monkeypatch) -> None:
    """bfloat16 has 8 bits: gradients within 3 % of their largest entry."""
    torch.manual_seed(0)
    head, h = nn.Linear(W, V), torch.randn(R, W, requires_grad=True)
    monkeypatch.setattr(module, "CHUNK", 5)
    found = []
    for whole, autocast in ((1 << 24, False), (0, True)):
        monkeypatch.setattr(module, "WHOLE", whole)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            nats = score_rows(head, h, Score(torch.arange(R) % MASK, MASK))
        assert nats.dtype == torch.float32
        found.append(torch.autograd.grad(nats.mean(), [h, head.weight, head.bias]))
    for one, two in zip(*found, strict=True):
        assert two.dtype == torch.float32
        assert (one - two).abs().max() < 0.03 * one.abs().max()
