"""Drawing tokens: the inverse of a naive cumulative sum, right in the tail, by the definition in the docstring.

Statistics are of fixed seeds; a right draw would be called wrong with chance 1e-6 per test.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esolm.core.draw import ATTEMPTS, BLOCK, BadLogits, Draw, inverse_cdf
from esolm.core.randomness import Randomness, fold, uniform
from esolm.sampling.chooser import Chooser
from support.chance import ALARM, chance

SIZES = [2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 600, 4 * BLOCK]


def double(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def search(weights: list[float], u: float) -> int:
    """The naive search: the first index whose cumulative weight is above u times the sum; exact."""
    total = list(itertools.accumulate(map(Fraction, weights)))
    return min(bisect.bisect_right(total, Fraction(u) * total[-1]), len(weights) - 1)


def some_weights(rows: int, size: int, zeros: float, seed: int = 0) -> Tensor:
    """Over twelve orders of magnitude, some of them zero, never all."""
    generator = torch.Generator().manual_seed(seed)
    weights = 10.0 ** (-12 * torch.rand(rows, size, generator=generator, dtype=torch.float64))
    weights[torch.rand(rows, size, generator=generator) < zeros] = 0
    weights[torch.arange(rows), torch.randint(size, (rows,), generator=generator)] = 1
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.97])
@pytest.mark.parametrize("size", SIZES)
def test_equals_a_naive_search(size: int, zeros: float, dtype: torch.dtype) -> None:
    """Exactly, unless u falls within rounding of a boundary, which these do not."""
    weights = some_weights(40, size, zeros).to(dtype)
    u = Randomness(size).uniform(torch.arange(40), 1)[:, 0]
    found = inverse_cdf(weights, u)
    for r in range(40):
        assert found[r] == search(weights[r].tolist(), u[r].item())


@given(
    st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=9).filter(any),
    st.integers(0, 2**12 - 1),
    st.sampled_from([0, 250, 256, 520]),
)
def test_boundaries_belong_to_the_token_behind(weights: list[float], u: int, shift: int) -> None:
    """Dyadic numbers, so that nothing is rounded and u often lies on a boundary; anywhere in the vocabulary."""
    weights = [0.0] * shift + weights
    scaled = double([[w * 2**20 for w in weights]])
    assert inverse_cdf(scaled, double([u / 2**12])).item() == search(weights, u / 2**12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_a_token_of_weight_1e_12_is_where_it_should_be(size: int, dtype: torch.dtype) -> None:
    """u placed in its stretch of the unit interval draws it; u just outside draws its neighbour."""
    tiny = 1e-12
    for place in {0, 1, size // 2, size - 2, size - 1}:
        weights = torch.ones(1, size, dtype=dtype)
        weights[0, place] = tiny
        begin, total = place, size - 1 + weights[0, place].double().item()
        for share, expected in [(0.1, place), (0.5, place), (0.9, place), (-2.0, place - 1), (3.0, place + 1)]:
            if 0 <= expected < size:
                u = double([(begin + share * tiny) / total])
                assert inverse_cdf(weights, u).item() == expected, (place, share)


def test_the_tail_has_the_right_frequency() -> None:
    """Half of the mass on one token and the rest on 1000 tokens of 1e-12 each, with u confined to those: uniform."""
    weights = torch.full((1, 1001), 1e-12, dtype=torch.float64)
    weights[0, 0] = 1
    u = 1 - Randomness(1).uniform(torch.arange(20000), 1)[:, 0] * 1e-9 * (1 - 1e-9)
    found = inverse_cdf(weights.expand(20000, -1), u)
    assert found.min() > 0
    # 1 - u has a resolution of 1.1e-16 against the 1e-12 of a token: 1e-4
    assert chance(((found - 1) // 10).tolist(), dict.fromkeys(range(100), 0.01)) > ALARM


def test_float32_weights_keep_a_tail_that_a_float32_sum_would_lose() -> None:
    weights = torch.full((1, 2000), 1e-8)
    weights[0, 0] = 1
    total = weights.double().sum().item()
    for token in (1, 2, 700, 1999):
        u = (1 + (token - 0.5) * weights[0, 1].double().item()) / total
        assert inverse_cdf(weights, double([u])).item() == token


EDGES = [1.0, 1 - 2**-53, 1 - 2**-52, 1 - 2**-40]


@pytest.mark.parametrize("u", EDGES)
@pytest.mark.parametrize("size", [3, 256, 257, 300, 512, 513, 50258])
@pytest.mark.parametrize("last", ["everywhere", "first", "middle", "not the last"])
def test_at_the_upper_end_the_last_token_with_weight_is_drawn(size: int, last: str, u: float) -> None:
    """1 - 2^-54 is 1 in float64, and u times the sum may round up to the sum: never behind it, never a zero."""
    for w in (1.0, 0.3, 1 / 3, 1e-30):
        weights = torch.zeros(1, size, dtype=torch.float64)
        ends = {"everywhere": size, "first": 1, "middle": size // 2, "not the last": size - 1}
        weights[0, : ends[last]] = w
        for dtype in (torch.float32, torch.float64):
            found = inverse_cdf(weights.to(dtype), double([u])).item()
            assert found < size
            assert found == ends[last] - 1 or (u < 1 - 2**-50 and ends[last] - 1 - found <= 1)


def test_uniforms_of_the_library_never_reach_beyond() -> None:
    """The largest number that `uniform` can give is 1 at most."""
    word = torch.tensor([(1 << 53) - 1])
    assert (word.double() + 0.5) * 2.0**-53 <= 1


@pytest.mark.parametrize("u", [2**-54, 1e-300, 0.0])
def test_at_the_lower_end_the_first_token_with_weight_is_drawn(u: float) -> None:
    for first in (0, 1, 255, 256, 299):
        weights = torch.zeros(1, 300)
        weights[0, first:] = 1
        assert inverse_cdf(weights, double([u])).item() == first


def attempts(rows: int, seed: int = 0) -> Any:
    """uniform(attempt) for a Draw."""
    return lambda attempt: uniform(fold(seed, attempt), torch.arange(rows), torch.tensor(0))


MASK = 5
LOGITS = double([1.0, -0.5, 2.0, 0.3, -20.0, 9.0, 0.3, -math.inf, 1.4])
"""The mask at 5 would be the likeliest; 3 and 6 are tied; 7 is impossible and 4 nearly so."""


def define(logits: list[float], temperature: float, top_p: float, top_k: int | None, mask_id: int) -> list[float]:
    """The docstring of Draw in plain Python: softmax(logits / temperature) cut to the top_k and to the nucleus top_p.

    A token is in the nucleus iff the mass of the tokens strictly likelier than it is below top_p; ties are kept, in
    top_k too. Temperature 0 is greedy.
    """
    real = [i for i in range(len(logits)) if i != mask_id]
    best = max(logits[i] for i in real)
    if temperature == 0:
        winner = min(i for i in real if logits[i] == best)
        return [float(i == winner) for i in range(len(logits))]
    p = [math.exp((v - best) / temperature) if i in real else 0.0 for i, v in enumerate(logits)]
    if top_k is not None:
        kept = [i for i in real if sum(logits[j] > logits[i] for j in real) < top_k]
        p = [w if i in kept else 0.0 for i, w in enumerate(p)]
    p = [w / sum(p) for w in p]
    p = [w if sum(v for v in p if v > w) < top_p else 0.0 for w in p]
    return [w / sum(p) for w in p]


SETTINGS = [
    (1.0, 1.0, None), (0.5, 1.0, None), (2.0, 1.0, None), (1.0, 0.9, None), (1.0, 0.6, None), (1.0, 1e-9, None),
    (1.0, 1.0, 1), (1.0, 1.0, 4), (1.0, 1.0, 5), (1.0, 1.0, 9), (1.0, 1.0, 99), (0.7, 0.8, 4), (1.5, 0.99, 6),
    (0.0, 1.0, None), (0.0, 0.5, 3),
]  # fmt: skip
"""temperature, top_p, top_k"""


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), SETTINGS)
def test_draws_follow_the_definition(temperature: float, top_p: float, top_k: int | None) -> None:
    draw = Draw(temperature, top_p, top_k)
    expected = define(LOGITS.tolist(), temperature, top_p, top_k, MASK)
    torch.testing.assert_close(draw.probabilities(LOGITS[None], MASK)[0], double(expected), rtol=1e-12, atol=1e-15)
    rows = 20000
    found = draw(LOGITS.expand(rows, -1), attempts(rows), MASK)
    possible = {i for i, p in enumerate(expected) if p > 0}
    assert set(found.tolist()) <= possible
    if len(possible) > 1:
        assert chance(found.tolist(), dict(enumerate(expected))) > ALARM
        wrong = define(LOGITS.tolist(), temperature * 1.5, top_p, top_k, MASK)
        assert chance(found.tolist(), dict(enumerate(wrong))) < ALARM


def test_ties_are_kept() -> None:
    """3 and 6 are fourth and fifth: top_k 4 keeps both; so does a nucleus that ends between them."""
    for draw in (Draw(top_k=4), Draw(top_k=5), Draw(top_p=0.85), Draw(top_p=0.9)):
        assert (draw.probabilities(LOGITS[None], MASK)[0] > 0).nonzero()[:, 0].tolist() == [0, 2, 3, 6, 8]
    flat = torch.zeros(1, 6)
    for draw in (Draw(top_k=1), Draw(top_p=1e-6)):
        torch.testing.assert_close(draw.probabilities(flat, 0)[0], torch.tensor([0, 0.2, 0.2, 0.2, 0.2, 0.2]))


def test_the_nucleus_ends_where_its_mass_is_reached() -> None:
    """Two tokens of mass top_p together, to the last bit: the others are outside, however they are drawn."""
    tried = 0
    for k in range(1, 60):
        logits = double([[0.0, -k / 10, 0.0, -k / 10, 50.0]])
        weights = Draw().weights(logits, 4)[0]
        both = (weights[0] + weights[2]).item()
        top_p = both / weights.sum().item()
        draw = Draw(top_p=top_p)
        if top_p * weights.sum().item() == both and weights.sort().values.flip(0).cumsum(0)[-1] == weights.sum():
            tried += 1
            assert draw.probabilities(logits, 4)[0].tolist() == [0.5, 0, 0.5, 0, 0]
            found = draw(logits.expand(300, -1), attempts(300), 4)
            assert set(found.tolist()) == {0, 2}
    assert tried > 10


@given(st.data())
def test_probabilities_equal_the_definition(data: st.DataObject) -> None:
    """On few levels, so that there are many ties."""
    logits = data.draw(st.lists(st.sampled_from([-3.0, -1.0, -0.5, 0.0, 1.0, 2.0]), min_size=2, max_size=8))
    mask_id = data.draw(st.integers(0, len(logits) - 1))
    temperature = data.draw(st.sampled_from([0.0, 0.3, 1.0, 3.0]))
    top_p = data.draw(st.floats(0.01, 1.0))
    top_k = data.draw(st.none() | st.integers(1, 9))
    found = Draw(temperature, top_p, top_k).probabilities(double([logits]), mask_id)[0]
    expected = define(logits, temperature, top_p, top_k, mask_id)
    torch.testing.assert_close(found, double(expected), rtol=1e-9, atol=1e-12)
    for u in (0.0, 0.3, 0.9999):  # what is drawn is in the nucleus, whatever the uniforms are
        drawn = Draw(temperature, top_p, top_k)(double([logits]), lambda _, u=u: double([u]), mask_id)
        assert expected[drawn.item()] > 0


@pytest.mark.parametrize("seed", range(3))
def test_a_nucleus_that_is_seldom_hit_is_drawn_by_sorting(seed: int) -> None:
    """One or two tokens of 2000: after every rejection the rest of the rows is drawn from the nucleus itself."""
    rows, size = 400, 2000
    logits = 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    draw = Draw(top_p=7e-4)
    used = set()

    def spy(attempt: int) -> Tensor:
        used.add(attempt)
        return attempts(rows, seed)(attempt)

    found = draw(logits.expand(rows, -1), spy, mask_id=0)
    assert used == set(range(ATTEMPTS + 2))
    expected = define(logits.tolist(), 1.0, 7e-4, None, 0)
    kept = {i: p for i, p in enumerate(expected) if p > 0}
    assert 1 < len(kept) < 4
    assert chance(found.tolist(), kept) > ALARM


@pytest.mark.parametrize("draw", [Draw(), Draw(0.5), Draw(top_p=0.9), Draw(top_k=3), Draw(0.0)])
@pytest.mark.parametrize("mask_id", [0, 100, 255, 256, 299])
def test_the_mask_is_never_drawn(draw: Draw, mask_id: int) -> None:
    """However likely, and at every edge of the unit interval."""
    logits = torch.zeros(len(EDGES) + 1000, 300)
    logits[:, mask_id] = 50
    for dtype in (torch.float32, torch.float64):
        edges = double([0.0, *EDGES[1:]])
        u = torch.cat([edges, attempts(1000)(0)])
        found = draw(logits.to(dtype), lambda attempt, u=u: u if attempt == 0 else u.roll(attempt), mask_id)
        assert not (found == mask_id).any()
        assert ((found >= 0) & (found < 300)).all()
        assert draw.probabilities(logits.to(dtype)[:1], mask_id)[0, mask_id] == 0


def test_greedy_takes_the_likeliest_whatever_the_number() -> None:
    logits = torch.randn(500, 700, generator=torch.Generator().manual_seed(0))
    logits[:, 699] = 100
    for u in (0.0, 0.5, 1.0):
        found = Draw(temperature=0)(logits, lambda _, u=u: torch.full((500,), u, dtype=torch.float64), 699)
        assert torch.equal(found, logits[:, :699].argmax(-1))


def test_a_temperature_near_zero_is_greedy() -> None:
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    for temperature in (1e-6, 1e-30, 1e-44):
        found = Draw(temperature)(logits, attempts(50), 29)
        assert torch.equal(found, logits[:, :29].argmax(-1)), temperature


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-20, 1e-40, 1e-46, 1e-320])
def test_the_limit_of_small_temperatures_is_greedy(temperature: float, dtype: torch.dtype, rows: int) -> None:
    logits = torch.randn(rows, 300, dtype=dtype)
    assert torch.equal(Draw(temperature)(logits, attempts(rows), 0), Draw(0.0)(logits, attempts(rows), 0))
    assert Draw(temperature).probabilities(logits, 0).amax(-1).eq(1).all()


@pytest.mark.parametrize("rows", [2, 5])
@pytest.mark.parametrize("draw", [Draw(), Draw(0.5), Draw(0.0), Draw(top_p=0.9), Draw(top_k=3)], ids=str)
@pytest.mark.parametrize("bad", ["nan", "one nan", "inf", "-inf", "mask only"])
def test_logits_without_a_distribution_are_refused(bad: str, draw: Draw, rows: int) -> None:
    logits = torch.randn(rows, 300)
    if bad == "one nan":
        logits[1, 7] = math.nan
    elif bad == "inf":
        logits[1, 7] = math.inf
    else:
        logits[1] = math.nan if bad == "nan" else -math.inf
    if bad == "mask only":
        logits[1, 3] = 0.0
    for function in (lambda: draw(logits, attempts(rows), 3), lambda: draw.probabilities(logits, 3)):
        with pytest.raises(BadLogits, match="row 1") as error:
            function()
        assert error.value.row == 1
    logits[:, 3] = math.nan  # which is never drawn
    assert draw(logits[:1], attempts(1), 3) != 3


def test_bfloat16_logits() -> None:
    """Weights of bf16 logits are computed in float32: as good as the same numbers in float64."""
    rows = 20000
    logits = LOGITS.bfloat16()
    expected = define(logits.double().tolist(), 1.0, 1.0, None, MASK)
    probabilities = Draw().probabilities(logits[None], MASK)[0]
    assert probabilities.dtype == torch.float32
    torch.testing.assert_close(probabilities.double(), double(expected), rtol=1e-6, atol=1e-9)
    found = Draw()(logits.expand(rows, -1), attempts(rows), MASK)
    assert chance(found.tolist(), dict(enumerate(expected))) > ALARM
    wide = Draw()(logits.double().expand(rows, -1), attempts(rows), MASK)
    assert (found != wide).sum() <= 2  # a flip needs u within 1e-7 of one of 7 boundaries: 0.01 expected


def test_a_row_is_drawn_alike_alone_and_in_a_batch() -> None:
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for draw in (Draw(), Draw(0.8, 0.3), Draw(top_k=20, top_p=0.5)):
        together = draw(logits, attempts(64), 299)
        for r in range(64):
            alone = draw(logits[r : r + 1], lambda attempt, r=r: attempts(64)(attempt)[r : r + 1], 299)
            assert alone.item() == together[r]


def test_the_number_is_of_seed_row_and_position_alone() -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    row, position = torch.arange(40) % 5, torch.arange(40) // 5
    for draw in (Draw(), Draw(top_p=0.4)):
        chooser = Chooser(draw, Randomness(3, first=10), 299)
        found = chooser(logits.expand(40, -1), row, position)
        for r in (0, 17, 39):
            own = Chooser(draw, Randomness(3, first=10 + int(row[r])), 299)
            assert own(logits[None], torch.tensor([0]), position[r : r + 1]).item() == found[r]
        other = Chooser(draw, Randomness(4, first=10), 299)(logits.expand(40, -1), row, position)
        assert Counter((found == other).tolist())[False] > 20
        assert len(set(found.tolist())) > 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature is -0\.1; it must be 0 \(greedy\) or more"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 0.0}, r"top_p is 0\.0; it must be above 0 and at most 1"),
        ({"top_p": 1.1}, r"top_p is 1\.1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"top_k": 0}, "top_k is 0; it must be at least 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Draw(**options)
