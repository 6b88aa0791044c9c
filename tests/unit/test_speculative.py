"""Speculative sampling does what docs/speculative.md says: against a slow twin, and in its parts.

Shapes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from esolm import cli, load
from esolm.core.draw import Draw, inverse_cdf
from esolm.core.randomness import Randomness
from esolm.sampling import speculative
from esolm.sampling.chooser import Chooser
from esolm.sampling.request import Drafts, Request, Step
from esolm.sampling.speculative import accept, adapt, labels, residual
from support import paper, toy
from support.counting import ask, count
from support.naive import Plan, plan_of, run
from support.runs import make_run

V = 7
MASK = V - 1
NETS = {name: toy.network(V, 12, **toy.SHAPES[name]) for name in ("paper", "llama")}
NET = NETS["paper"]
BOS = 1
SYSTEM = toy.make("esolm", MASK, alpha_0=0.5)
SHIFTED = toy.make("esolm", MASK, alpha_0=0.5, query="shift", first="bos", bos_id=BOS)
ANY_ORDER = toy.make("esolm", MASK, loss="any_order", query="shift", first="bos", bos_id=BOS)
CPU = torch.device("cpu")
RAGGED = [[0] * 12, [1, 0] * 5, [0] * 3, [1] * 4, [0, 0, 0, 1, 1, 1, 1], [1] * 11 + [0]]
WINDOWS = [1, 2, 3, 5, 12, 40, None]


def wish(rows: list[list[int]] = RAGGED, **options: Any) -> Request:
    return ask(rows, sampler="speculative", **options)


class Twin:
    """One row, no cache, no batch: every conditional by a pass of its own over the tokens that it may see."""

    def __init__(self, net: Any, request: Request, plan: Plan, row: int, rng: Randomness, shift: bool) -> None:
        self.net, self.shift = net, shift
        self.choose = Chooser(request.draw, rng.at("token"), MASK)
        self.row, self.window = torch.tensor([row]), request.options.window
        self.order = [i for step in plan.steps for i in step]
        self.given = [(i, int(request.x[row, i])) for i in plan.given]

    def logits(self, known: list[tuple[int, int]], at: int) -> Tensor:
        if self.shift:
            return paper.shifted_logits(self.net, dict(known), [i for i, _ in known], [at], MASK, BOS)
        tokens, position = [t for _, t in known] + [MASK], [i for i, _ in known] + [at]
        return paper.logits(self.net, tokens, position, paper.left_to_right(len(tokens)))[-1:]

    def number(self, name: str, at: int) -> Tensor:
        return self.choose.uniform(name, self.row, torch.tensor([at]), CPU)

    def passes(self) -> list[tuple[list[tuple[int, int]], list[tuple[int, int]], int]]:
        """Of each pass: what it decided, what it drafted, and how many drafts it kept."""
        known, left, found = list(self.given), list(self.order), []
        proposals: dict[int, Tensor] = {}
        hits, misses = speculative.PRIOR
        while left:
            width = self.window or min(round(2 + 0.6 * hits / misses), speculative.MOST)
            able = [i for i in left[:width] if i in proposals]
            drafts = [(i, int(self.choose(proposals[i], self.row, torch.tensor([i])))) for i in able]
            ahead = left[len(drafts) : len(drafts) + width]
            fresh = {i: self.logits(known + drafts[:j], i) for j, i in enumerate(able)}
            fresh |= {i: self.logits(known + drafts, i) for i in ahead}
            decided: list[tuple[int, int]] = []
            for i, token in drafts:
                p, q = (self.choose.draw.probabilities(t[i], MASK)[0] for t in (fresh, proposals))
                if self.number("accept", i) < min(1, p[token] / q[token]):
                    decided.append((i, token))
                    continue
                rest = (p - q).clamp_min(0)
                decided.append((i, int(inverse_cdf(rest[None], self.number("residual", i)))))
                break
            kept = sum(a == b for a, b in zip(decided, drafts))
            if decided == drafts and ahead:
                decided.append((ahead[0], int(self.choose(fresh[ahead[0]], self.row, torch.tensor([ahead[0]])))))
            found.append((decided, drafts, kept))
            hits, misses = (speculative.MEMORY * n + m for n, m in ((hits, kept), (misses, kept < len(drafts))))
            known, left, proposals = known + decided, left[len(decided) :], fresh
        return found


def of_row(step: Step, row: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int]:
    """The same of one row of a step."""
    drafts = step.drafts
    assert isinstance(drafts, Drafts)
    decided = list(zip(step.position[row][step.drawn[row]].tolist(), step.token[row][step.drawn[row]].tolist()))
    tried = list(zip(drafts.position[row][drafts.drawn[row]].tolist(), drafts.token[row][drafts.drawn[row]].tolist()))
    return decided, tried, int(drafts.accepted[row])


@pytest.mark.matrix(5)
@pytest.mark.parametrize("system", [SYSTEM, SHIFTED, ANY_ORDER], ids=["mask", "shift", "any-order shift"])
@pytest.mark.parametrize("how", [Draw(), Draw(0.7, 0.9), Draw(top_k=3)], ids=["plain", "top_p", "top_k"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("net", NETS)
def test_cached_and_batched_equals_the_slow_twin(net: str, window: int | None, how: Draw, system: Any) -> None:
    """Decided, drafted and kept in every pass of every row; ragged rows with prompts and infills."""
    request, rng = wish(window=window, draw=how, alpha_0=0.5), Randomness(4)
    tokens, schedule, steps = run(system, NETS[net], request, rng)
    for row in range(len(tokens)):
        passes = Twin(NETS[net], request, plan_of(schedule, row), row, rng, system.shift).passes()
        mine = [of_row(step, row) for step in steps]
        assert mine[: len(passes)] == passes
        assert all(decided == drafted == [] for decided, drafted, _ in mine[len(passes) :])
    rejected = sum(int((s.drafts.accepted < s.drafts.drawn.sum(1)).sum()) for s in steps if s.drafts)
    assert (rejected > 0) == (window != 1)  # the cases are worth testing


@pytest.mark.parametrize("loss", ["two_term", "any_order"])
@pytest.mark.parametrize("rows", [[[0] * 12] * 3, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("reference", [{"alpha_0": 0.5}, {"alpha_0": 0.0}, {"order": toy.permutations(1, 12)}])
def test_a_window_of_one_is_the_ordinary_sampler(reference: dict[str, Any], rows: list[list[int]], loss: str) -> None:
    """Token by token, pass by pass: what is fed, the rows of the head, and what the cache keeps."""
    sampler = "order" if "order" in reference else "first_hitting"
    system = toy.make("esolm", MASK, loss=loss)
    found = [
        count(system, toy.changed(ask(rows), sampler=name, **reference, **window))
        for name, window in ((sampler, {}), ("speculative", {"window": 1}))
    ]
    (one, schedule, tokens), (two, other, again) = found
    assert torch.equal(tokens, again)
    assert torch.equal(schedule.sigma, other.sigma)
    assert len(one.calls) == len(two.calls)
    real = schedule.sizes > 0
    for k, (a, b) in enumerate(zip(one.calls, two.calls)):
        assert a.tokens.shape == b.tokens.shape
        assert torch.equal(torch.tensor(a.kept) * real[:, k], torch.tensor(b.kept))  # rows that ended feed nothing
        assert b.head == b.mlp == int(real[:, k].sum()) <= a.head  # and get no logits
        assert a.writes == b.writes


@pytest.mark.parametrize("window", WINDOWS)
def test_the_cache_keeps_each_token_once_in_order(window: int | None) -> None:
    net, schedule, tokens = count(SYSTEM, wish(window=window))
    assert len(net.buffers_seen) == 1
    for row in range(len(RAGGED)):
        committed = net.committed(row)
        plan = plan_of(schedule, row)
        assert committed == list(plan.sigma[: len(committed)])
        if plan.steps:
            assert len(committed) >= len(plan.sigma) - max(window or 16, 1)
    for call in net.calls:
        for row, kept in enumerate(call.kept or []):
            at = call.position[row, :kept]
            assert torch.equal(call.tokens[row, :kept], tokens[row, at])


@pytest.mark.parametrize("window", [1, 2, 4, None])
def test_passes_gain_and_rows_are_as_documented(window: int | None) -> None:
    """Each pass decides at least one token and at most W + 1; it feeds at most 3 W + 1 rows behind the prompt."""
    request = wish([[0] * 12] * 20, window=window)
    _, _, steps = run(SYSTEM, NET, request, Randomness(4))
    widest = window or speculative.MOST
    for k, step in enumerate(steps):
        assert step.drafts is not None
        gained, drafted = step.drawn.sum(1), step.drafts.drawn.sum(1)
        busy = gained > 0
        assert (gained <= widest + 1).all()
        assert (drafted <= widest).all()
        assert (gained - step.drafts.accepted <= 1).all()
        assert (step.drafts.accepted <= drafted).all()
        assert (step.drafts.fed[busy] <= (widest if k == 0 else 3 * widest + 1)).all()
        assert (step.drafts.fed[~busy] == 0).all()
    every = torch.stack([step.drawn.any(1) for step in steps])
    assert torch.equal(every.long().cumprod(0).sum(0), every.sum(0))  # without a pause, to each row's own end
    assert (every.sum(0) <= 12).all()
    assert window == 1 or every.sum(0).double().mean() < 11


@pytest.mark.parametrize("window", [3, None])
def test_a_sample_does_not_depend_on_its_batch(window: int | None) -> None:
    request = wish(window=window, draw=Draw(top_p=0.9))
    together, _, steps = run(SYSTEM, NET, request, Randomness(9))
    again, _, _ = run(SYSTEM, NET, request, Randomness(9))
    assert torch.equal(together, again)
    assert not torch.equal(together, run(SYSTEM, NET, request, Randomness(10))[0])
    for row in range(len(RAGGED)):
        alone = toy.changed(
            request, **{name: getattr(request, name)[row : row + 1] for name in ("x", "given", "valid")}
        )
        tokens, _, own = run(SYSTEM, NET, alone, Randomness(9, row))
        assert torch.equal(tokens[0], together[row])
        assert [of_row(step, 0) for step in own] == [of_row(step, row) for step in steps[: len(own)]]


@pytest.mark.parametrize("window", [2, 6, None])
def test_greedy_is_greedy(window: int | None) -> None:
    """One sequence has all the mass: the same as one token at a time gives."""
    request = ask(RAGGED, draw=Draw(temperature=0))
    slow, _, one = run(SYSTEM, NET, request, Randomness(4))
    fast, _, many = run(SYSTEM, NET, toy.changed(request, sampler="speculative", window=window), Randomness(4))
    assert torch.equal(slow, fast)
    assert len(many) < len(one)


def test_accept_and_residual_give_p_back() -> None:
    """q(x) min(1, p(x)/q(x)) + P(rejected) residual(x) = p(x), for laws with zeros in either or both."""
    torch.manual_seed(0)
    p, q = (torch.rand(50, 9, dtype=torch.float64) * (torch.rand(50, 9) > 0.4) for _ in range(2))
    p, q = (t / t.sum(-1, keepdim=True) for t in (p, q))
    ratio = torch.where(q > 0, p / q, 0).clamp_max(1)
    rest = residual(p, q)
    replaced = (1 - (q * ratio).sum(-1, keepdim=True)) * rest / rest.sum(-1, keepdim=True)
    torch.testing.assert_close(q * ratio + replaced, p)
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    for token in (q[0] > 0).nonzero()[:, 0].tolist():
        one = [t[:1].expand(1000, -1) for t in (p, q)]
        share = accept(*one, torch.full((1000,), token), u).double().mean()
        assert share == pytest.approx(ratio[0, token].item(), abs=1e-3)


def test_rounding_leaves_no_empty_residual() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    q = torch.tensor([[0.5 + 1e-7, 0.5, 0.0], [0.2, 0.3, 0.5]])
    rest = residual(p, q)
    assert torch.equal(rest, p)
    assert (inverse_cdf(rest, torch.full((2,), 0.99, dtype=torch.float64)) == torch.tensor([1, 2])).all()
    same, u = torch.tensor([0, 1]), torch.full((2,), 1 - 2.0**-53, dtype=torch.float64)
    assert accept(p, p, same, u).all()  # equal laws are never rejected
    assert not accept(p, q, torch.tensor([2, 2]), u)[0]  # what neither would draw


def test_the_window_follows_what_was_kept() -> None:
    accepted, rejected = torch.tensor([[0, 2, 30, 1e9, 5], [3, 2, 3, 1e-9, 1]], dtype=torch.float64)
    assert adapt(accepted, rejected).tolist() == [2, 3, 8, speculative.MOST, 5]


def test_the_pattern_of_a_pass() -> None:
    """Places 3 to 5 are clean, of which 4 and 5 are drafts; masks at 4, 5 and, ahead, at 6 and 7. Cached: 0 to 2."""
    clean, masks = torch.tensor([[3, 4, 5]]), torch.tensor([[4, 5, 6, 7]])
    seen = labels(clean, masks, torch.tensor([6]), 9)
    cache = NET.new_cache(1, 10)
    cache.place(labels(torch.tensor([[0, 1, 2]]), masks[:, :0], torch.tensor([3]), 9))
    cache.commit(3)
    assert cache.place(seen)[0, 0].long().tolist() == [
        [1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 0, 1, 0],
        [1, 1, 1, 1, 1, 1, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize(
    ("options", "system", "message"),
    [
        ({}, {"variant": "A"}, "sampler speculative needs variant B"),
        ({"num_steps": 4}, {}, "speculative of esolm does not use num_steps"),
        (
            {"alpha_0": 0.5, "order": torch.arange(12)[None]},
            {},
            "takes either alpha_0, which draws the order, or order",
        ),
        ({"sampler": "first_hitting", "window": 4}, {}, "first_hitting of esolm does not use window"),
        ({"order": torch.arange(5)[None]}, {}, r"permutation of 0 \.\. 11"),
    ],
)
def test_wrong_requests_say_what_is_allowed(options: dict[str, Any], system: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy.make("esolm", MASK, **system).plan(toy.changed(wish(), **options), Randomness(0))


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="window is 0; it must be at least 1"):
        wish(window=0)
    with pytest.raises(ValueError, match="mdlm has no sampler 'speculative'"):
        toy.make("mdlm", MASK).plan(wish(), Randomness(0))


def test_the_model_and_the_command_line_report_it(tmp_path: Any, capsys: Any) -> None:
    folder = make_run(tmp_path / "run", "esolm", length=24, alpha_0=0.5)
    lm = load(folder)
    options = {"prompt": "ab", "sampler": "speculative", "window": 4, "seed": 3}
    made = lm.sample(num_samples=5, batch_size=2, **options)
    tried = made.speculation
    assert tried is not None
    for nfe, fed, drafted, accepted, rejected in zip(
        made.nfe, tried.fed, tried.drafted, tried.accepted, tried.rejected
    ):
        assert 0 < accepted <= accepted + rejected <= drafted
        assert nfe < 22  # tokens
        assert fed >= 2 + accepted + nfe
    assert made.tokens == lm.sample(num_samples=5, **options).tokens
    assert made.passes >= max(made.nfe)
    assert lm.sample(num_samples=1).speculation is None
    words = ["--num_samples=5", "--prompt=ab", "--sampler=speculative", "--window=4", "--seed=3", "--json", "--show"]
    words += ["--precision=float32"]  # by default the fastest of this machine
    assert cli.main(["sample", str(folder), *words]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["tokens"], said["nfe"]) == (made.tokens, made.nfe)
    assert said["speculation"] == vars(tried)
    filled = lm.infill("ab____cd____", sampler="speculative")
    assert filled.texts[0].startswith("ab")
    assert filled.speculation is not None
    steps = [event.committed for event in lm.stream(num_samples=2, **options)]
    assert all(step.drafts is not None for step in steps)


def test_the_benchmark_runs(tmp_path: Any, capsys: Any) -> None:
    folder = make_run(tmp_path / "run", "esolm", length=24, alpha_0=0.5)
    words = ["--run", str(folder), "--windows=[1,3]", "--alpha_0=[1,0]", "--rounds=2", "--lengths=[8]", "--batch=2"]
    assert cli.main(["bench", "speculative", *words, f"--out={tmp_path / 'found.json'}"]) == 0
    assert "alpha_0 = 0, 8 tokens" in capsys.readouterr().out
    first, _ = json.loads((tmp_path / "found.json").read_text())["cases"]
    found = first["windows"]
    assert list(found) == ["one token", "1", "3", "adaptive"]
    assert found["one token"]["passes"] == found["1"]["passes"] == 8
    assert (found["1"]["drafted"], found["1"]["acceptance_by_distance"]) == (0, [])
    rows = pytest.approx((1 + 7 * 2) / 8, abs=0.01)
    assert found["one token"]["rows_per_pass"] == found["1"]["rows_per_pass"] == rows
    for name in ("3", "adaptive"):
        judged = found[name]["accepted"] + found[name]["rejected"]
        assert judged == sum(at["judged"] for at in found[name]["acceptance_by_distance"])
        assert judged == sum(at["judged"] for at in found[name]["acceptance_by_quarter"])
        assert found[name]["passes"] <= 8
