"""Shifted queries in left-to-right order are the left-to-right model on the same weights, wherever it is asked.

test_exact.py, test_sampling_exact.py and others compare every other order with a naive twin.

Shapes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from esolm.core import order
from esolm.core.batch import Batch
from esolm.core.query import prepend
from esolm.core.randomness import Randomness
from esolm.core.visibility import hide_copies, sorted_two_stream
from esolm.model import LanguageModel
from esolm.net.attention import attend
from esolm.net.fold import fold
from support import paper, toy
from support.naive import Recording, run

B, L, V = 5, 8, 6
MASK = V - 1
NETS = {"AdaLN": toy.network(V, L), "plain": toy.network(V, L, adaln=False, seed=1)}
FIRST: dict[str, dict[str, Any]] = {"mask": {}, "bos": {"first": "bos", "bos_id": 2}}
CLOSE = {"rtol": 0, "atol": 1e-10}
X = toy.text(B, L, V)
RNG = Randomness(5, 0, B)
LEFT_TO_RIGHT = torch.arange(L).expand(B, -1)


@pytest.fixture(params=NETS)
def net(request: pytest.FixtureRequest) -> Any:
    return NETS[request.param]


@pytest.fixture(params=FIRST)
def first(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FIRST[request.param]


def shifted(first: dict[str, Any], **options: Any) -> Any:
    return toy.make("esolm", MASK, **{"alpha_0": 0.0, "query": "shift", **first, **options})


def padding(side: str) -> Tensor | None:
    ends = torch.tensor([8, 5, 1, 7, 3])[:, None]
    place = torch.arange(L)
    return {"none": None, "right": place < ends, "left": place >= L - ends}[side]


@pytest.mark.parametrize("options", [{}, {"loss": "any_order"}, {"variant": "A"}], ids=["B", "any", "A"])
@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("prompt", [0, 2])
@pytest.mark.parametrize("train", [True, False])
def test_the_loss_is_that_of_ar(
    net: Any, first: dict[str, Any], options: dict[str, Any], side: str, prompt: int, train: bool
) -> None:
    """Token by token, with prompts, and with padding on either side. The prompts of (A) see each other."""
    if prompt and options.get("variant") == "A":
        pytest.skip("ar has no such prompts")
    valid = padding(side)
    given = None
    if prompt:
        given = (torch.ones_like(X) if valid is None else valid.long()).cumsum(1) <= prompt
        given = given if valid is None else given & valid
    batch = Batch(X, valid, given)
    (expected,) = toy.make("ar", MASK, **first).terms(net, batch, RNG, train)
    (found,) = shifted(first, **options).terms(net, batch, RNG, train)
    torch.testing.assert_close(found.nats, expected.nats, **CLOSE)
    assert torch.equal(found.valid, expected.valid)
    assert found.nats.any()


def test_so_are_its_gradients(first: dict[str, Any]) -> None:
    one, two = toy.network(V, L), toy.network(V, L)
    toy.make("ar", MASK, **first).terms(one, Batch(X), RNG, True)[0].nats.sum().backward()
    shifted(first, loss="any_order").terms(two, Batch(X), RNG, True)[0].nats.sum().backward()
    for (name, p), (_, q) in zip(one.named_parameters(), two.named_parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_the_likelihood_of_the_ascending_order_is_that_of_ar(net: Any, first: dict[str, Any]) -> None:
    """Whatever alpha_0 says; another order, and mask queries, give other values."""
    expected = toy.make("ar", MASK, **first).order_nats(net, Batch(X), LEFT_TO_RIGHT)
    system = shifted(first, alpha_0=0.5)
    torch.testing.assert_close(system.order_nats(net, Batch(X), LEFT_TO_RIGHT), expected, **CLOSE)
    for other in (system.order_nats(net, Batch(X), toy.permutations(B, L)),
                  toy.make("esolm", MASK).order_nats(net, Batch(X), LEFT_TO_RIGHT)):  # fmt: skip
        assert (other - expected).abs().max() > 0.1


@pytest.mark.parametrize("sampler", ["left_to_right", "first_hitting", "speculative"])
@pytest.mark.parametrize("rows", [[8] * 5, [8, 5, 1, 7, 3]], ids=["even", "ragged"])
@pytest.mark.parametrize("prompt", [0, 1])
def test_samples_are_those_of_ar(net: Any, first: dict[str, Any], sampler: str, rows: list[int], prompt: int) -> None:
    """The same logits and, from the same uniforms, the same tokens. Speculation draws by other uniforms."""
    valid = torch.arange(L) < torch.tensor(rows)[:, None]
    given = (torch.arange(L) < prompt).expand_as(valid)
    mine, theirs = Recording(), Recording()
    request = toy.request(X, given, valid, sampler=sampler, draw=mine)
    tokens, _, steps = run(shifted(first), net, request, RNG)
    for step in steps:
        assert (step.position >= 0).all()
    ar = toy.request(X, given, valid, draw=theirs)
    if sampler == "speculative":
        greedy = [toy.changed(r, draw=None, temperature=0.0) for r in (request, ar)]
        tokens = run(shifted(first), net, greedy[0], RNG)[0]
        ar = greedy[1]
    assert torch.equal(tokens, run(toy.make("ar", MASK, **first), net, ar, RNG)[0])
    if sampler == "left_to_right" and len(set(rows)) == 1:
        for one, two in zip(mine.seen, theirs.seen, strict=True):
            torch.testing.assert_close(one, two, **CLOSE)


@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_the_logits_of_known_texts_are_those_of_ar(net: Any, first: dict[str, Any], side: str) -> None:
    valid = padding(side)
    expected = toy.make("ar", MASK, **first).logits(net, Batch(X, valid))
    for options in ({}, {"loss": "any_order"}):
        found = shifted(first, alpha_0=0.5, **options).logits(net, Batch(X, valid))
        every = slice(None) if valid is None else valid
        torch.testing.assert_close(found[every], expected[every], **CLOSE)


@pytest.mark.parametrize("kind", ["B", "any", "A"])
@pytest.mark.parametrize("natural", [True, False])
def test_the_logits_of_masked_texts_are_those_of_sampling(net: Any, kind: str, natural: bool) -> None:
    """All masks asked for in one step, by the naive queries; known tokens by those before them."""
    options = {"B": {}, "any": {"loss": "any_order"}, "A": {"variant": "A"}}[kind]
    masked = torch.rand(B, L, generator=torch.Generator().manual_seed(1)) < 0.5
    z = torch.where(masked, MASK, X)
    sigma = None if natural else order.sort(masked.long(), torch.rand(B, L))
    found = shifted({}, alpha_0=0.5, **options).logits(net, Batch(z), sigma)
    for b in range(B):
        sorted_ = sigma[b].tolist() if sigma is not None else sorted(range(L), key=lambda i: (bool(masked[b, i]), i))
        count = int((~masked[b]).sum())
        clean, asked = sorted_[:count], sorted_[count:]
        together = count if kind == "A" else 0
        out = paper.shifted_logits(net, X[b], clean, asked, MASK, MASK, kind != "any", together)
        torch.testing.assert_close(found[b, asked], out, **CLOSE)
        if kind != "A":
            for k, i in enumerate(clean):
                out = paper.shifted_logits(net, X[b], clean[:k], [i], MASK, MASK)
                torch.testing.assert_close(found[b, [i]], out, **CLOSE)


def test_a_model_scores_and_samples_as_ar_does(first: dict[str, Any]) -> None:
    net = fold(toy.network(V, L, dtype=torch.float32), "float32")
    words: Any = SimpleNamespace(decode=str, eos_id=None)
    one = LanguageModel(net, shifted(first), words)
    two = LanguageModel(net, toy.make("ar", MASK, **first), words)
    texts = [[0, 1, 2], [1], [2, 2, 0, 1, 3, 4]]
    found = [lm.log_prob(texts) for lm in (one, two)]
    assert {f.kind for f in found} == {"exact"}
    torch.testing.assert_close(found[0].total, found[1].total, rtol=0, atol=1e-4)
    made = [lm.sample(tokens=[[1, None, None, None], [None] * 6], seed=3).tokens for lm in (one, two)]
    assert made[0] == made[1]


@pytest.mark.parametrize("length", [9, 800])
@pytest.mark.parametrize("num_clean", [None, 3])
def test_the_tiled_kernel_hides_copies_as_the_dense_one(length: int, num_clean: int | None) -> None:
    """Forward and backward, of all rows and of the queries alone; with row blocks and without."""
    rows, num_z = 2, length - 2
    clean = None if num_clean is None else torch.full((rows,), num_clean)
    plain = sorted_two_stream(length, num_z, clean)
    copies = torch.rand(rows, num_z, generator=torch.Generator().manual_seed(0)) < 0.5
    seen = hide_copies(plain, copies)
    assert seen.kind == plain.kind
    assert seen.dense()[:, 0, :num_z, :num_z].diagonal(dim1=1, dim2=2).equal(~copies)
    slots = length + num_z
    q, k, v = (torch.randn(rows, 2, slots, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for span in (slice(0, slots), slice(0, num_z)):
        # the z slots of (A) at clean positions are padding, which no kernel need compute
        weight = torch.randn(rows, 2, span.stop, 8, dtype=torch.float64)
        weight[:, :, : max(0, (num_clean or 0) - 2)] = 0
        results = []
        for pattern in (seen, dataclasses.replace(seen, kind="labels")):
            out = attend(q[:, :, span], k, v, pattern, span) * (weight != 0)
            results.append((out, *torch.autograd.grad((out * weight).sum(), (q, k, v))))
        for one, two in zip(*results):
            torch.testing.assert_close(one, two, **CLOSE)


def test_the_start_token_stands_before_the_first_valid_one() -> None:
    x, valid = torch.tensor([[4, 5, 6], [4, 5, 6]]), torch.tensor([[True, True, False], [False, True, True]])
    sigma = torch.tensor([[1, 0, 2], [2, 1, 0]])
    (wide, real, given), longer = prepend(Batch(x, valid), sigma, 9)
    assert wide.tolist() == [[9, 4, 5, 6], [0, 9, 5, 6]]
    assert real.long().tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
    assert given.long().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
    assert longer.tolist() == [[0, 2, 1, 3], [1, 3, 2, 0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query": "other"}, "query is 'other'"),
        ({"first": "bos"}, "first is 'bos'"),
        ({"query": "shift", "first": "eos"}, "first is 'eos'"),
        ({"mixture": (0.0, 1.0)}, "mixture needs loss any_order"),
        ({"mixture": (0.0, 1.5), "loss": "any_order"}, "mixture is"),
        ({"mixture": (), "loss": "any_order"}, "mixture is"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy.make("esolm", MASK, **options)


def test_a_tokenizer_without_bos_is_named() -> None:
    with pytest.raises(ValueError, match="beginning-of-sequence"):
        toy.make("esolm", MASK, query="shift", first="bos").terms(NETS["plain"], Batch(X), RNG, False)


def test_a_mixture_from_json_is_a_tuple() -> None:
    assert toy.make("esolm", MASK, mixture=[0, 0.5], loss="any_order").mixture == (0, 0.5)
