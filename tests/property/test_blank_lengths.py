"""Lengths of blanks follow the distribution that docs/constraints.md states, enumerated from the naive conditionals.

Pearson's chi-square with fixed seeds: right draws would be called wrong with chance 1e-6 per test, 3 of them.

Shapes: V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch

from esolm.generation import lengths
from esolm.generation.lengths import BlankLengths, Lengths, log_prior
from esolm.generation.rows import Blanked
from esolm.sampling.options import SamplingOptions
from support import served, toy
from support.chance import ALARM, chance
from support.naive import Naive, Plan

V, MASK, DRAWS = 6, 5, 4000
NET = toy.network(V, 16, seed=2)
TEXTS = {
    "inside": Blanked([[0, 1, 2], [3, 0]], [""]),
    "at the ends": Blanked([[], [1, 2, 0], []], ["", ""]),
    "two": Blanked([[0], [2, 1], [3]], ["", ""]),
}
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "B": ("esolm", {}),
    "any": ("esolm", {"loss": "any_order"}),
    "B-shift": ("esolm", {"query": "shift", "first": "bos", "bos_id": 1}),
    "mdlm": ("mdlm", {}),
}


def chooser(kind: str, text: Blanked, sizes: Any, prior: Any = None, **options: Any) -> Lengths:
    name, own = SYSTEMS[kind]
    system = toy.make(name, MASK, **own)
    settings = SamplingOptions(batch_size=5, seed=9, **options)
    return Lengths(NET, system, text, text.candidates(sizes), lambda sizes: [], prior, settings)


def naive_log_likelihood(kind: str, text: Blanked, sizes: tuple[int, ...]) -> float:
    """The given tokens one by one in ascending order, each given the ones before it and nothing of the blanks."""
    row = text.row(sizes)
    known = {i: token for i, token in enumerate(row) if token is not None}
    order = [*known, *(i for i, token in enumerate(row) if token is None)]
    plan, naive = (
        Plan((), tuple((i,) for i in order), len(order)),
        Naive(NET, kind, MASK, 1 if "shift" in kind else None),
    )
    return sum(math.log(naive.conditional(plan, k, known)[0, known[i]].item()) for k, i in enumerate(known))


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("kind", SYSTEMS)
def test_likelihoods_are_those_of_the_naive_conditionals(kind: str, name: str) -> None:
    found = chooser(kind, TEXTS[name], "1-3").compared
    assert found.sizes == [*itertools.product([1, 2, 3], repeat=len(TEXTS[name].leads))]
    expected = [naive_log_likelihood(kind, TEXTS[name], sizes) for sizes in found.sizes]
    assert found.log_likelihood.tolist() == pytest.approx(expected, abs=1e-9)
    assert found.probabilities.tolist() == pytest.approx(torch.tensor(expected).softmax(0).tolist(), abs=1e-6)
    spread = (found.log_likelihood.max() - found.log_likelihood.min()).item()
    # Rotary positions are relative: blanks around all given tokens matter only if their masks or a BOS are seen.
    assert (spread < 1e-9) == (name == "at the ends" and kind in ("B", "any"))


def law(found: BlankLengths) -> dict[tuple[int, ...], float]:
    return dict(zip(found.sizes, found.probabilities.tolist(), strict=True))


def test_drawn_lengths_follow_prior_times_likelihood() -> None:
    prior = {1: 3.0, 2: 0.5, 3: 0.0, 4: 1.0}
    made = chooser("B", TEXTS["inside"], "1-4", prior)
    expected = {(n,): prior[n] * math.exp(naive_log_likelihood("B", TEXTS["inside"], (n,))) for n in prior}
    total = sum(expected.values())
    expected = {sizes: p / total for sizes, p in expected.items()}
    assert law(made.compared) == pytest.approx(expected, abs=1e-9)
    assert chance([made.sizes("draw", 9, i) for i in range(DRAWS)], expected) > ALARM
    assert made.sizes("best", 9, 0) == max(expected, key=expected.__getitem__) == made.compared.best
    one = chooser("B", TEXTS["inside"], "1-4", [3.0, 0.5, 0.0, 1.0])
    assert law(one.compared) == pytest.approx(expected, abs=1e-9)


def test_two_blanks_are_drawn_together() -> None:
    made = chooser("any", TEXTS["two"], ["1-3", "2-4"])
    assert chance([made.sizes("draw", 9, i) for i in range(DRAWS)], law(made.compared)) > ALARM


def test_many_combinations_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more combinations than are compared, each blank is drawn given the others, twice: by enumeration."""
    whole = law(chooser("any", TEXTS["two"], "1-3").compared)
    monkeypatch.setattr(lengths, "MOST", 3)
    made = chooser("any", TEXTS["two"], "1-3")
    with pytest.raises(ValueError, match="combinations"):
        assert made.compared
    state: Counter[tuple[int, ...]] = Counter({(1, 1): 1.0})  # type: ignore[dict-item]
    for blank in (0, 1) * lengths.SWEEPS:
        after: Counter[tuple[int, ...]] = Counter()
        for sizes, p in state.items():
            line = {(*sizes[:blank], n, *sizes[blank + 1 :]): 0.0 for n in (1, 2, 3)}
            total = sum(whole[each] for each in line)
            for each in line:
                after[each] += p * whole[each] / total  # type: ignore[assignment]
        state = after
    assert chance([made.sizes("draw", 9, i) for i in range(1000)], state) > ALARM
    first, second = made.sizes("best", 9, 0)
    assert whole[first, second] == max(whole[first, n] for n in (1, 2, 3))


def test_lengths_that_cannot_match_have_no_weight() -> None:
    lm = served.model()
    found = lm.blank_lengths("a ____ b", "1-8", regex="x{3}|y{5}")
    assert [n for (n,), p in zip(found.sizes, found.probabilities.tolist()) if p > 0] == [3, 5]
    made = lm.infill("a ____ b", tokens_per_blank="1-8", regex="x{3}|y{5}", num_samples=12)
    assert set(made.texts) <= {"a xxx b", "a yyyyy b"}
    with pytest.raises(ValueError, match="3, 5"):
        lm.infill("a ____ b", tokens_per_blank="1-2", regex="x{3}|y{5}")


@pytest.mark.parametrize(
    ("regex", "match"),
    [
        ("x{3}|y{5}", None), (["x{3}|y{4}", None, "z{2}"], None), ("x{9}", None), (["x", "y{9}", "z"], None),
        ("a x{2}(b|y){3} b .* c (z{4}|z)", "text"), ("a ((x b y|xx b yyy) c zz|x b yy c z)", "text"),
        ("a x b y c zz d", "text"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("prior", [None, {2: 1.0, 3: 1.0, 4: 1.0, 5: 1.0}])
def test_the_first_possible_lengths_are_those_of_a_search(regex: Any, match: Any, prior: Any) -> None:
    lm = served.model()
    asked = ("a ____ b ____ c ____", "____", "1-5", SamplingOptions(regex=regex, match=match), prior)
    found = lengths.lengths_of(lm.net, lm.system, lm.tokenizer, *asked)
    some = [sizes for sizes in itertools.product(*found.candidates) if prior is None or 1 not in sizes]
    expected = next((sizes for sizes in some if found.possible(sizes)), None)
    if expected is None:
        with pytest.raises(ValueError, match="no text"):
            found.first()
    else:
        assert tuple(found.first()) == expected


def test_many_blanks_with_wide_ranges_end() -> None:
    """A search through 40 ** 4 combinations would not."""
    lm = served.model(length=300)
    asked: Any = {"tokens_per_blank": "1-40", "length_choice": "best"}
    made = lm.infill(" ".join(["____"] * 4), **asked, regex="x{38}", batch_size=64)
    assert made.texts == [" ".join(["x" * 38] * 4)]
    with pytest.raises(ValueError, match="41"):
        lm.infill(" ".join(["____"] * 4), **asked, regex="x{41}")


def test_a_prior_without_the_shortest_lengths_and_many_combinations() -> None:
    prior = {n: float(n > 2) for n in range(1, 9)}
    made = served.model().infill("____ b ____ c ____", tokens_per_blank="1-8", length_prior=prior, num_samples=2)
    assert all(len(row) >= len(" b  c ") + 9 for row in made.tokens)


def test_samples_have_lengths_of_their_own_that_do_not_depend_on_batches() -> None:
    lm = served.model()
    asked: Any = {"tokens_per_blank": ["1-6", 2], "num_samples": 9, "seed": 4}
    one, other = (lm.infill("ab ____ cd ____.", **asked, batch_size=size) for size in (2, 32))
    assert one.tokens == other.tokens
    assert len({len(row) for row in one.tokens}) > 1
    best = lm.infill("ab ____ cd ____.", **asked, length_choice="best")
    assert {len(row) for row in best.tokens} == {
        len("ab  cd .") + sum(lm.blank_lengths("ab ____ cd ____.", ["1-6", 2]).best)
    }


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"length_prior": [1, 2]}, "length_prior"), ({"length_prior": [0] * 6}, "length_prior"),
        ({"length_prior": [1, -1, 1, 1, 1, 1]}, "length_prior"), ({"length_choice": "x"}, "length_choice"),
        ({"tokens_per_blank": 3, "length_prior": [1]}, "length_prior"),
        ({"tokens_per_blank": "6-1"}, "tokens_per_blank"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(more: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        served.model().infill("a ____", **{"tokens_per_blank": "1-6", **more})


@pytest.mark.parametrize("name", ["bd3lm", "esolm-A", "ar"])
def test_systems_without_this_likelihood_refuse_a_range(name: str) -> None:
    with pytest.raises(ValueError, match=served.model(name).system.name):
        served.model(name).infill("abcd____ef", tokens_per_blank="2-6")


def test_priors() -> None:
    assert log_prior(None, [1, 2]) == {1: -math.log(2), 2: -math.log(2)}
    assert log_prior({2: 3.0, 5: 1.0}, [1, 2]) == {1: -math.inf, 2: 0.0}
