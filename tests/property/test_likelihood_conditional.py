"""log p(target | context) for every split, by enumeration; rolling windows that score every token once.

Shapes: L length, K orders.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given as examples
from hypothesis import strategies as st

from esolm.core.batch import Batch
from esolm.likelihood.orders import windows
from esolm.model import LanguageModel
from support import paper, toy

V, L, MASK = 4, 4, 3
X = [2, 0, 1, 1]
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ar": ("ar", {}),
    "mdlm": ("mdlm", {}),
    "esolm-1": ("esolm", {"alpha_0": 1.0}),
    "esolm-0.5": ("esolm", {"alpha_0": 0.5}),
    "esolm-0": ("esolm", {"alpha_0": 0.0}),
    "esolm-shift": ("esolm", {"alpha_0": 0.5, "query": "shift", "first": "bos", "bos_id": 1}),
}


def model(name: str, length: int = L) -> LanguageModel:
    found, options = SYSTEMS[name]
    return LanguageModel(toy.network(V, length), toy.make(found, MASK, **options), None)  # type: ignore[arg-type]


def splits(name: str) -> list[list[int]]:
    """Every set of given positions, the empty and the full one apart; left to right, only beginnings."""
    sets = [list(s) for n in range(1, L) for s in itertools.combinations(range(L), n)]
    return [s for s in sets if name != "ar" or s == list(range(len(s)))]


def orders(context: list[int], alpha_0: float) -> dict[tuple[int, ...], float]:
    """Every order that begins with the context, in every order of it, and its chance."""
    target = [i for i in range(L) if i not in context]
    found: dict[tuple[int, ...], float] = {}
    for masked in paper.all_masks(len(target)):
        clean = masked.count(False)
        tails = paper.orders(masked, ascending=True)
        heads = list(itertools.permutations(context))
        for head, tail in itertools.product(heads, tails):
            sigma = (*head, *(target[i] for i in tail))
            share = alpha_0**clean * (1 - alpha_0) ** (len(target) - clean) / len(tails) / len(heads)
            found[sigma] = found.get(sigma, 0.0) + share
    return found


@pytest.mark.parametrize("name", ["mdlm", "esolm-1", "esolm-shift"])
def test_conditional_is_joint_minus_context_under_each_order(name: str) -> None:
    """For each order that begins with the context: p(target | context) p(context) = p(x), where p(context) is the sum
    of p over all targets."""
    lm = model(name)
    for context in splits(name):
        target = [i for i in range(L) if i not in context]
        rows = torch.tensor([X] * (V - 1) ** len(target))
        rows[:, target] = torch.tensor(list(itertools.product(range(V - 1), repeat=len(target))))
        scored = torch.zeros_like(rows, dtype=torch.bool)
        scored[:, target] = True
        for sigma in list(orders(context, 1.0))[:3]:
            at = torch.tensor(sigma).expand_as(rows)
            with torch.no_grad():
                joint = -lm.system.order_nats(lm.net, Batch(rows), at).sum(1)
                found = -lm.system.order_nats(lm.net, Batch(rows, given=~scored), at).sum(1)
            torch.testing.assert_close(found, joint - joint.logsumexp(0), **CLOSE)


@pytest.mark.parametrize("name", SYSTEMS)
def test_conditionals_of_all_targets_sum_to_one(name: str) -> None:
    """With the same orders for each target, whatever their number, and any split."""
    lm = model(name)
    for context in splits(name):
        target = [i for i in range(L) if i not in context]
        total = 0.0
        for tokens in itertools.product(range(V - 1), repeat=len(target)):
            row = list(X)
            for i, token in zip(target, tokens):
                row[i] = token
            total += lm.log_prob(row, given=context, num_orders=3, seed=5).total.exp().item()
        assert total == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", ["esolm-1", "esolm-0.5", "esolm-0"])
def test_conditional_over_all_given_first_orders(name: str) -> None:
    """Every drawn log-weight is that of an enumerated order, and their mean weight is the enumerated one at 5 standard
    errors (a right one fails with p < 6e-7 per split, and the draws are fixed)."""
    lm, draws = model(name), 500 * 4
    alpha_0 = lm.system.order_alpha_0
    for context in ([1], [0, 2], [3, 1], [1, 2, 3]):
        chance = orders(context, alpha_0)
        sigma, rows = torch.tensor(list(chance)), torch.tensor([X] * len(chance))
        scored = torch.tensor([[i not in context for i in range(L)]] * len(chance))
        with torch.no_grad():
            values = -lm.system.order_nats(lm.net, Batch(rows, given=~scored), sigma).sum(1)
        exact = (torch.tensor(list(chance.values())).log() + values).logsumexp(0)
        found = lm.log_prob([X] * 500, given=context, num_orders=4, given_order="random", batch_size=500)
        assert found.kind == "bound"
        weights = found.log_weights.exp().flatten()
        assert (weights[:, None] - values.exp()).abs().amin(1).max() < 1e-12
        error = weights.std().item() / math.sqrt(draws)
        assert abs(weights.mean().item() - exact.exp().item()) < 5 * error + 1e-12
        torch.testing.assert_close(found.total, weights.view(500, 4).mean(1).log(), **CLOSE)


def test_the_order_of_the_context() -> None:
    """It is part of the request: ascending is one order, which makes alpha_0 = 0 exact; random is a mixture."""
    lm = model("esolm-0")
    one = lm.log_prob(X, given=[0, 2], num_orders=9)
    assert (one.kind, one.log_weights.shape) == ("exact", (1, 1))
    mixed = lm.log_prob(X, given=[0, 2], given_order="random", num_orders=9)
    assert (mixed.kind, mixed.log_weights.shape) == ("bound", (1, 9))
    assert len(mixed.log_weights.unique()) == 2
    assert (mixed.log_weights - one.total).abs().min() < 1e-10
    assert model("ar").log_prob(X, given=[0, 1]).kind == "exact"
    assert lm.log_prob(X).kind == "exact"
    with pytest.raises(ValueError, match="given_order is 'sorted'"):
        lm.log_prob(X, given=[0], given_order="sorted")


@pytest.mark.parametrize("name", SYSTEMS)
def test_context_before_the_text_is_a_given_beginning(name: str) -> None:
    lm = model(name)
    whole = lm.log_prob(X, given=[0, 1], num_orders=4)
    parts = lm.log_prob(X[2:], context=X[:2], num_orders=4)
    torch.testing.assert_close(parts.total, whole.total, **CLOSE)
    assert parts.tokens[0][:2] == [0, 0]
    assert sum(parts.tokens[0]) == pytest.approx(whole.log_weights.mean().item(), abs=1e-10)


def test_left_to_right_takes_no_context_behind() -> None:
    with pytest.raises(ValueError, match="context must come before"):
        model("ar").log_prob(X, given=[2])


def test_what_is_refused() -> None:
    lm = model("esolm-1")
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("not all among", {"given": [4]}),
        ("no text", {"text": []}),
        ("token 3", {"text": [0, MASK]}),
        ("token 9", {"text": [0, 9]}),
        ("trained on 4", {"context": [1]}),
        ("estimator is 'nelbo'", {"estimator": "nelbo"}),
        ("num_orders is 0", {"num_orders": 0}),
        ("num_orders is 3", {"num_orders": 3, "antithetic": True}),
        ("one, or one for each", {"context": [[0], [1]], "text": [[0], [1], [2]]}),
    ]
    for words, options in wrong:
        with pytest.raises(ValueError, match=words):
            lm.log_prob(**{"text": X, **options})
    with pytest.raises(ValueError, match="mdlm has no alpha_0"):
        model("mdlm").log_prob(X, alpha_0=0.5)
    block = LanguageModel(lm.net, toy.make("bd3lm", MASK, block_size=2), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bd3lm has no likelihood"):
        block.log_prob(X)


@pytest.mark.parametrize("name", SYSTEMS)
def test_several_texts_of_different_length_in_any_batch(name: str) -> None:
    """Each equals itself in other batches, and (from its own row of the seed) every text has orders of its own."""
    lm = model(name)
    texts, contexts = [[0, 1, 2], [1], [2, 2], [0, 0, 1]], [[1], [0, 1], [], [2]]
    found = [lm.log_prob(texts, contexts, num_orders=6, batch_size=size) for size in (1, 3, 64)]
    for other in found[1:]:
        torch.testing.assert_close(other.total, found[0].total, **CLOSE)
        torch.testing.assert_close(other.log_weights, found[0].log_weights, **CLOSE)
    assert [len(tokens) for tokens in found[0].tokens] == [4, 3, 2, 4]
    torch.testing.assert_close(lm.log_prob(texts[0], contexts[0], num_orders=6).total, found[0].total[:1], **CLOSE)


def test_estimators_of_one_text() -> None:
    lm = model("esolm-1")
    plain = lm.log_prob(X, num_orders=8)
    better = lm.log_prob(X, num_orders=8, estimator="jackknife")
    assert (plain.kind, better.kind) == ("bound", "estimate")
    assert better.total.item() > plain.total.item()
    paired = lm.log_prob(X, num_orders=8, antithetic=True)
    assert not torch.equal(paired.log_weights, plain.log_weights)
    assert lm.log_prob(X, alpha_0=0.0).kind == "exact"


@examples(st.integers(1, 200), st.integers(1, 40), st.data())
def test_windows_score_every_token_once(tokens: int, length: int, data: Any) -> None:
    stride = data.draw(st.integers(1, length))
    found = windows(tokens, length, stride)
    assert [i for _, first, end in found for i in range(first, end)] == list(range(tokens))
    assert found[0][0] == 0
    for start, first, end in found:
        assert 0 <= start <= first < end <= start + length
    for start, first, _ in found[1:]:
        assert first - start >= length - stride


def test_windows_refuse_a_stride_beyond_the_length() -> None:
    for stride in (0, 5):
        with pytest.raises(ValueError, match=f"stride is {stride}"):
            windows(10, 4, stride)


@pytest.mark.parametrize("name", SYSTEMS)
def test_rolling(name: str) -> None:
    """Every token once; the same as the conditionals of its windows; a short text is one window."""
    lm, text = model(name), [2, 0, 1, 1, 0, 2, 2, 1, 0, 1, 1]
    options: dict[str, Any] = {"num_orders": 3, "given_order": "ascending"}
    found = lm.rolling_log_prob(text, stride=3, **options)
    assert len(found.tokens[0]) == len(text)
    assert all(value < 0 for value in found.tokens[0])
    parts = [(0, 0, 4), (3, 4, 7), (6, 7, 10), (7, 10, 11)]
    assert windows(len(text), L, 3) == parts
    rows = [text[a:c] for a, _, c in parts]
    kept = [list(range(b - a)) for a, b, _ in parts]
    alone = lm.log_prob(rows, given=kept, **options)
    torch.testing.assert_close(found.total, alone.total.sum(0, keepdim=True), **CLOSE)
    torch.testing.assert_close(found.log_weights, alone.log_weights, **CLOSE)
    short = lm.rolling_log_prob(text[:3], **options)
    torch.testing.assert_close(short.total, lm.log_prob(text[:3], **options).total, **CLOSE)
    if name == "ar":
        naive = [lm.log_prob(text[c - 4 : c], given=[0, 1, 2]).total for c in range(5, len(text) + 1)]
        every = lm.rolling_log_prob(text, stride=1)
        expected = lm.log_prob(text[:4]).total + torch.cat(naive).sum()
        torch.testing.assert_close(every.total, expected, **CLOSE)
