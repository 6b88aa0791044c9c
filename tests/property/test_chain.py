"""Chain samplers against enumerated transition matrices, and what every sample owes its neighbours.

A right sampler fails a chi-square here with probability 1e-6 (`ALARM`); seeds are fixed.

Shapes: B batch, L length, N states.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from esolm import systems
from esolm.core.order import Chain, chain
from esolm.core.randomness import Randomness
from esolm.core.visibility import full
from esolm.sampling.request import Request
from support import toy
from support.chance import ALARM, chance

N, L, MASK = 3, 2, 3
DRAWS = 6000
STATES = list(itertools.product(range(N), repeat=L))
NET = toy.network(N + 1, L, seed=4)


def ask(batch: int, given: dict[int, int] | None = None, length: int = L, **options: Any) -> Request:
    x, known = torch.zeros(batch, length, dtype=torch.long), torch.zeros(batch, length, dtype=torch.bool)
    for at, token in (given or {}).items():
        x[:, at], known[:, at] = token, True
    return toy.request(x, known, torch.ones_like(known), **options)


@torch.inference_mode()
def run(system: Any, net: Any, asked: Request, seed: int = 1, first: int = 0) -> list[Tensor]:
    """The tokens after each step, [B, L]."""
    rng = Randomness(seed, first, first + len(asked.x))
    tokens, found = torch.where(asked.given, asked.x, MASK), []
    for step in system.sample(net, asked, system.plan(asked, rng), rng):
        row, column = step.drawn.nonzero(as_tuple=True)
        tokens[row, step.position[row, column]] = step.token[row, column]
        found.append(tokens.clone())
    return found


def prediction(z: tuple[int, ...], sigma: float, temperature: float) -> Tensor:
    """x_theta, [L, N]."""
    tokens, time = torch.tensor([z]), torch.tensor([sigma], dtype=torch.float64)
    with torch.inference_mode():
        logits = NET(tokens, torch.arange(L)[None], full(L), time)[0, :, :N]
    return (logits / temperature).softmax(-1)


def transition(t: float, s: float, given: dict[int, int], temperature: float, greedy: bool = False) -> Tensor:
    """The matrix of one step by the formulas of the papers, [N^L, N^L], without the code that is tested."""
    alpha_t, alpha_s = 1 - 0.999 * t, 1 - 0.999 * s
    rows = []
    for z in STATES:
        p = prediction(z, -math.log(alpha_t), temperature)
        each = []
        for at in range(L):
            law = torch.zeros(N, dtype=torch.float64)
            for to in range(N):
                stay = alpha_t / alpha_s * (to == z[at]) + (1 - alpha_t / alpha_s) / N
                law[to] = stay * (alpha_s * p[at, to] + (1 - alpha_s) / N)
            law = law / (alpha_t * p[at, z[at]] + (1 - alpha_t) / N)
            torch.testing.assert_close(law.sum(), torch.ones((), dtype=torch.float64))
            if greedy:
                law = torch.nn.functional.one_hot(p[at].argmax(), N).double()
            each.append(torch.nn.functional.one_hot(torch.tensor(given[at]), N).double() if at in given else law)
        rows.append(torch.stack([each[0][a] * each[1][b] for a, b in STATES]))
    return torch.stack(rows)


CASES: list[tuple[str, str, list[float], dict[int, int], float]] = [
    ("udlm", "ancestral", [1, 2 / 3, 1 / 3, 0], {}, 1.0),
    ("udlm", "ancestral", [1, 2 / 3, 1 / 3, 0], {0: 2}, 1.0),
    ("udlm", "ancestral", [1, 0], {}, 1.0),
    ("duo", "ancestral", [1, 0.5, 0], {}, 0.6),
    ("duo", "greedy_tail", [1, 0.500005, 1e-5, 0], {1: 1}, 1.0),
]


@pytest.mark.parametrize(("name", "sampler", "times", "given", "temperature"), CASES)
def test_samples_follow_the_transition_matrices(
    name: str, sampler: str, times: list[float], given: dict[int, int], temperature: float
) -> None:
    """The pair of states after the first and after the last step: a chain whose steps share their draws would give each
    state the right frequency and the pairs wrong ones."""
    steps = len(times) - 1
    asked = ask(DRAWS, given, sampler=sampler, num_steps=steps, temperature=temperature)
    found = run(toy.make(name, MASK), NET, asked)
    assert len(found) == steps
    start = torch.tensor([all(z[at] == token for at, token in given.items()) for z in STATES]).double()
    start, rest = start / start.sum(), torch.eye(len(STATES), dtype=torch.float64)
    pairs = list(itertools.pairwise(times))
    for k, (t, s) in enumerate(pairs[1:], 2):
        rest = rest @ transition(t, s, given, temperature, greedy=sampler == "greedy_tail" and k == steps)
    joint = (start @ transition(*pairs[0], given, temperature))[:, None] * rest
    law = {(a, b): joint[i, j].item() for i, a in enumerate(STATES) for j, b in enumerate(STATES)}
    drawn = zip(map(tuple, found[0].tolist()), map(tuple, found[-1].tolist()))
    assert chance(drawn, law) > ALARM


def test_another_law_is_noticed() -> None:
    """The chi-square has power: the final states at another temperature fail it."""
    found = run(toy.make("udlm", MASK), NET, ask(DRAWS, num_steps=2, temperature=0.6))[-1]
    law = torch.full((9,), 1 / 9, dtype=torch.float64)
    for t, s in ((1, 0.5), (0.5, 0)):
        law = law @ transition(t, s, {}, 1.0)
    assert chance(map(tuple, found.tolist()), dict(zip(STATES, law.tolist()))) < ALARM


def chains() -> list[tuple[str, str, str]]:
    """(label, name, sampler) of every system of the package that samples by a chain."""
    found = []
    for label, name, options in toy.variants():
        system = toy.make(name, 5, **options)
        for sampler, taken in system.samplers.items():
            if taken == ("num_steps",) and isinstance(_plan(system, sampler), Chain):
                found.append((label, name, sampler))
    return found


def _plan(system: Any, sampler: str) -> Any:
    return system.plan(ask(1, length=8, sampler=sampler, num_steps=8), Randomness(0))


OPTIONS = {label: options for label, _, options in toy.variants()}


def _is_refused(label: str, name: str, **options: Any) -> bool:
    try:
        toy.make(name, 5, **OPTIONS[label]).plan(ask(1, length=8, **options), Randomness(0))
    except ValueError:
        return True
    return False


SHAPELESS = {label for label, name, _ in chains() if _is_refused(label, name, top_p=0.9)}
"""Systems that have no probabilities of tokens to shape, and say so."""


def test_there_are_chains() -> None:
    assert {("udlm", "ancestral"), ("duo", "greedy_tail")} <= {(name, sampler) for _, name, sampler in chains()}
    assert not {name for _, name, _ in chains()} & {"ar", "mdlm", "bd3lm", "esolm"}
    assert "sedd-uniform" in SHAPELESS
    assert not SHAPELESS & {"udlm", "duo", "d3pm-absorb", "d3pm-uniform", "sedd-absorb", "diffusionbert"}


@pytest.mark.parametrize(("label", "name", "sampler"), chains())
def test_a_row_does_not_depend_on_its_batch_or_its_padding(label: str, name: str, sampler: str) -> None:
    """In float64, exactly; given tokens stay, and every free position ends as a token."""
    vocabulary, length = 6, 8
    system = toy.make(name, vocabulary - 1, **OPTIONS[label])
    net = toy.fitting(system, vocabulary, length)
    x, lengths = toy.text(4, length, vocabulary), [8, 7, 5, 3]
    valid = torch.arange(length) < torch.tensor(lengths)[:, None]
    given = (torch.rand(4, length, generator=torch.Generator().manual_seed(2)) < 0.4) & valid
    given[3] = valid[3]  # all of it
    options: dict[str, Any] = {"sampler": sampler, "num_steps": 5}
    if label not in SHAPELESS:
        options["top_p"] = 0.9
    seen = run(system, net, toy.request(x, given, valid, **options))
    whole = seen[-1]
    assert torch.equal(whole[given], x[given])
    assert (whole[valid] != vocabulary - 1).all()
    for row, own in enumerate(lengths[:3]):
        alone = toy.request(x[row : row + 1, :own], given[row : row + 1, :own], valid[row : row + 1, :own], **options)
        assert torch.equal(run(system, net, alone, first=row)[-1][0], whole[row, :own])
    other = run(system, net, toy.request(x, given, valid, **options), seed=2)
    assert not all(torch.equal(one, two) for one, two in zip(other, seen, strict=True))


def test_a_chain_is_a_schedule() -> None:
    given = torch.tensor([[False, True, False, False], [True, True, False, False]])
    valid = torch.tensor([[True] * 4, [True, True, False, False]])
    found = chain(given, valid, 3)
    assert found.nfe.tolist() == [3, 0]
    assert found.lengths.tolist() == [4, 2]
    assert found.steps(0) == [[0, 2, 3]] * 3
    assert (found.steps(1), found.free(1)) == ([], [])
    assert found.step_of().tolist() == [[2, -1, 2, 2], [-1] * 4]
    assert found.rewrites
    assert not chain(given, valid, 1).rewrites
    assert not chain(given, valid, 3, redraws=False).rewrites


def test_options_that_a_chain_lacks_are_named() -> None:
    system = systems.find("udlm")(mask_id=3, vocab_size=4)
    for options, word in (({"given_order": "random"}, "given_order"), ({"alpha_0": 0.5}, "alpha_0"),
                          ({"sampler": "greedy_tail"}, "greedy_tail")):  # fmt: skip
        with pytest.raises(ValueError, match=word):
            system.plan(ask(1, **options), Randomness(0))
