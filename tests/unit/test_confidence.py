"""Samplers that choose positions by confidence: their parts, their plans, and what the commands report."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from esolm import cli, load
from esolm.bench import caches
from esolm.core.randomness import Randomness
from esolm.sampling.confidence import TIE, Rule, block_of, confidence, steps_of
from esolm.sampling.options import SamplingOptions
from support import toy
from support.counting import ask
from support.naive import run
from support.runs import make_run

V = 7
MASK = V - 1
NET = toy.network(V, 12)
MDLM = toy.make("mdlm", MASK)
ESO = toy.make("esolm", MASK, alpha_0=0.5)


def test_measures() -> None:
    """Without the mask, whatever its logit is, and in the model's own distribution."""
    p = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25], [1.0, 0, 0, 0]], dtype=torch.float64)
    logits = torch.cat([p.log(), torch.full((3, 1), 50.0, dtype=torch.float64)], 1)
    token = torch.tensor([1, 2, 0])
    for measure, wanted in (
        ("probability", [0.25, 0.25, 1.0]),
        ("entropy", [2**-1.75, 0.25, 1.0]),
        ("margin", [0.25, 0.0, 1.0]),
    ):
        assert confidence(logits, token, 4, measure).tolist() == pytest.approx(wanted)
    assert confidence(logits.float(), token, 4, "probability").dtype == torch.float64


@pytest.mark.parametrize(
    ("rule", "size", "wanted"),
    [
        (Rule(), [2, 1, 0], [[2, 0], [0], []]),
        (Rule(), [3, 3, 0], [[2, 0, 1], [0, 1], []]),
        (Rule(tau=0.7), [0, 0, 0], [[2, 0], [0], []]),
        (Rule(tau=0.95), [0, 0, 0], [[2], [0], []]),
        (Rule(tau=0.0), [0, 0, 0], [[2, 0, 1], [0, 1], []]),
    ],
)
def test_the_surest_are_kept(rule: Rule, size: list[int], wanted: list[list[int]]) -> None:
    """Three candidates, two that are equal but for rounding, and none."""
    sure = torch.tensor([[0.8, 0.1, 0.9], [0.3, 0.3 + TIE / 9, -math.inf], [-math.inf] * 3], dtype=torch.float64)
    column, kept = rule.pick(sure, torch.tensor(size))
    assert [c[k].tolist() for c, k in zip(column, kept)] == wanted


def test_equal_candidates_are_kept_together() -> None:
    """A chain of small steps is one group, of which the surest decides, and the first is preferred."""
    sure = torch.tensor([[0.9 - 1.5 * TIE, 0.9 - 0.75 * TIE, 0.9, 0.9 - 4 * TIE]], dtype=torch.float64)
    column, kept = Rule(tau=0.9).pick(sure, torch.zeros(1))
    assert (column.tolist(), kept.tolist()) == ([[0, 1, 2]], [[True] * 3])
    assert Rule().pick(sure, torch.tensor([2]))[0].tolist() == [[0, 1]]


def test_blocks_begin_at_the_first_position_to_be_drawn() -> None:
    free = torch.tensor([[0, 0, 1, 1, 0, 1, 1], [1] * 7]).bool()
    assert block_of(free, 2).tolist() == [[-1, -1, 0, 0, 1, 1, 2], [0, 0, 1, 1, 2, 2, 3]]
    assert block_of(free, None).tolist() == [[-1, -1, 0, 0, 0, 0, 0], [0] * 7]


@pytest.mark.parametrize(
    ("num_steps", "block_length", "sizes"),
    [
        (None, None, [1] * 7),
        (None, 3, [1] * 7),
        (3, None, [3, 2, 2]),
        (7, None, [1] * 7),
        (20, None, [1] * 7),
        (1, None, [7]),
        (3, 3, [3, 3, 1]),
        (5, 3, [2, 1, 2, 1, 1]),
        (4, 4, [2, 2, 2, 1]),
        (20, 2, [1] * 7),
    ],
)
def test_steps_are_divided_among_blocks(num_steps: int | None, block_length: int | None, sizes: list[int]) -> None:
    """Seven tokens; the first blocks and the first steps take one more, and no step is empty."""
    options = {"sampler": "confidence", "num_steps": num_steps, "block_length": block_length}
    schedule = MDLM.plan(ask([[1, 1, *[0] * 7], [0] * 7], **options), Randomness(0))
    for row in range(2):
        assert [n for n in schedule.sizes[row].tolist() if n] == sizes
    assert schedule.diffusion.tolist() == [len(sizes)] * 2


def test_blocks_without_anything_to_draw_take_no_steps() -> None:
    """Blocks of three: two tokens, none, one, three."""
    free = torch.tensor([[1, 0, 1, 0, 0, 0, 0, 1, 0, 1, 1, 1]]).bool()
    assert steps_of(free, 4, 3)[free].tolist() == [0, 1, 2, 3, 3, 3]


def test_every_pass_keeps_what_was_planned_in_the_block() -> None:
    request = ask([[1, 1, *[0] * 10], [0] * 12], sampler="confidence", num_steps=6, block_length=4)
    _, schedule, steps = run(MDLM, NET, request, Randomness(1))
    assert torch.equal(torch.stack([step.drawn.sum(1) for step in steps], 1), schedule.sizes)
    for row in range(2):
        seen = [step.position[row][step.drawn[row]].tolist() for step in steps]
        blocks = [{(i - (2, 0)[row]) // 4 for i in positions} for positions in seen]
        assert all(len(block) == 1 for block in blocks)
        assert sorted(blocks, key=min) == blocks


@pytest.mark.parametrize("system", [MDLM, ESO], ids=["mdlm", "esolm"])
def test_the_ends_of_tau(system: Any) -> None:
    """0 keeps everything at once; 1 keeps one token a pass."""
    for tau, passes in ((0.0, 1), (1.0, 12)):
        assert len(run(system, NET, ask([[0] * 12], sampler="threshold", tau=tau), Randomness(1))[2]) == passes


def test_a_token_that_is_not_kept_is_drawn_anew() -> None:
    """A network that ignores its input: with the same random number a position would have the same token for ever."""
    net = toy.network(V, 12)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    tokens = set()
    request = ask([[0] * 12], sampler="confidence")
    for step in run(MDLM, net, request, Randomness(1))[2]:
        assert step.candidates is not None
        tokens.add(tuple(step.position[0].tolist()))
    assert tokens == {(i,) for i in range(12)}  # all are equally sure: from left to right
    draws = [run(MDLM, net, ask([[0] * 12], sampler="threshold", tau=tau), Randomness(1))[0] for tau in (0.0, 1.0)]
    assert draws[0][0, 0] == draws[1][0, 0]
    assert not torch.equal(draws[0], draws[1])


@pytest.mark.parametrize(
    ("system", "options", "message"),
    [
        (MDLM, {"sampler": "confidence", "tau": 0.5}, "confidence of mdlm does not use tau"),
        (MDLM, {"sampler": "threshold", "num_steps": 5}, "threshold of mdlm does not use num_steps"),
        (MDLM, {"sampler": "threshold", "window": 5}, "threshold of mdlm does not use window"),
        (MDLM, {"sampler": "first_hitting", "cache": "dual"}, "first_hitting of mdlm does not use cache"),
        (MDLM, {"sampler": "confidence", "num_steps": 2, "block_length": 4}, "3 blocks need at least 3"),
        (MDLM, {"sampler": "threshold", "refresh": 2}, "refresh belongs to a cache"),
        (MDLM, {"sampler": "threshold", "cache": "none", "refresh": 2}, "refresh belongs to a cache"),
        (MDLM, {"sampler": "threshold", "cache": "dual", "freeze": "last_pass"}, "freeze belongs to cache frozen"),
        (ESO, {"sampler": "threshold", "cache": "dual"}, "threshold of esolm does not use cache"),
        (ESO, {"sampler": "threshold", "block_length": 3}, "threshold of esolm does not use block_length"),
        (ESO, {"sampler": "confidence", "num_steps": 2, "window": 5}, "window is 5; a step draws 6 tokens"),
        (toy.make("esolm", MASK, variant="A"), {"sampler": "threshold"}, "sampler threshold needs variant B"),
        (toy.make("ar", MASK), {"sampler": "threshold"}, "ar has no sampler 'threshold'"),
    ],
)  # fmt: skip
def test_wrong_requests_say_what_is_allowed(system: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        system.plan(ask([[0] * 12], **options), Randomness(0))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mdlm", ["--sampler=threshold", "--tau=0.02", "--block_length=8", "--cache=dual"]),
        ("mdlm", ["--sampler=confidence", "--num_steps=6", "--cache=frozen", "--freeze=last_pass"]),
        ("esolm", ["--sampler=threshold", "--tau=0.02", "--window=6"]),
    ],
)  # fmt: skip
def test_the_model_and_the_command_line_report_it(name: str, words: list[str], tmp_path: Any, capsys: Any) -> None:
    folder = make_run(tmp_path / "run", name, length=24)
    pairs = (word.removeprefix("--").split("=") for word in words)
    options: dict[str, Any] = {key: float(v) if "." in v else int(v) if v.isdigit() else v for key, v in pairs}
    lm = load(folder)
    made = lm.sample("ab", 5, batch_size=2, seed=3, **options)
    assert made.tokens == lm.sample("ab", 5, seed=3, **options).tokens
    assert made.fed is not None
    for steps, fed, nfe in zip(made.steps, made.fed, made.nfe, strict=True):
        assert len(steps) == len(fed) == nfe
        assert sorted(i for step in steps for i in step) == list(range(2, 24))
        assert fed[0] == (2 + 6 if name == "esolm" else 24)
    said = [*words, "--num_samples=5", "--prompt=ab", "--seed=3", "--precision=float32", "--engine=torch"]
    shown = [f"--svg={tmp_path / 'a.svg'}", "--json", "--show"]
    assert cli.main(["sample", str(folder), *said, *shown]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["schedule"], found["fed"]) == (made.tokens, made.steps, made.fed)
    assert cli.main(["infill", str(folder), "ab____cd____e", "--json", *words]) == 0
    filled = json.loads(capsys.readouterr().out)
    assert filled["texts"][0].startswith("ab")
    assert lm.sample("ab", 1).fed is None


def test_the_benchmark_runs(tmp_path: Any, capsys: Any) -> None:
    mdlm = make_run(tmp_path / "mdlm", "mdlm", length=16)
    eso = make_run(tmp_path / "eso", "esolm", length=16, alpha_0=1.0)
    words = [f"--run={mdlm}", f"--eso={eso}", "--rounds=1", "--batch=2", "--seeds=1", "--block_length=4"]
    out = tmp_path / "found.json"
    assert cli.main(["bench", "caches", *words, "--sampler=confidence", "--num_steps=8", f"--out={out}"]) == 0
    found = json.loads(out.read_text())["caches"]
    assert list(found) == [
        "none", "prefix", "dual", "delayed", "frozen", "frozen, last_pass", "esolm, one token", "esolm, confidence",
    ]  # fmt: skip
    assert "confidence, 16 tokens in blocks of 4" in capsys.readouterr().out
    exact = found["none"]
    assert (exact["same_tokens"], exact["passes"], exact["fed_per_pass"]) == (1, 8, 16)
    assert found["prefix"]["fed_per_pass"] == (4 * 16 + 16 + 12 + 8 + 4) / 8
    assert found["dual"]["fed_per_pass"] == (4 * 16 + 4 * 4) / 8
    assert found["delayed"]["fed_per_pass"] == 16  # two passes a block, both full
    assert found["frozen, last_pass"]["fed_per_pass"] == 2 * (16 + 12 + 8 + 4) / 8
    assert found["frozen"]["fed_per_pass"] == (16 + 16 + 16 + 12 + 12 + 8 + 8 + 4) / 8
    for name, record in found.items():  # in one layer, keys and values depend on the token alone
        if "esolm" not in name:
            assert (record["kl"] < 1e-9) == (record["kl_kept"] < 1e-9) == (name != "frozen, last_pass")
            assert record["same_tokens_stderr"] >= 0
            assert (record["kl_stderr"] < 1e-9) == (name != "frozen, last_pass")
    assert found["esolm, one token"]["fed_per_token"] == 31 / 16
    assert found["esolm, confidence"]["fed_per_pass"] == (7 * 4 + 2 + 7 * 2) / 8  # masks, and tokens of the pass before
    with pytest.raises(ValueError, match="model of esolm"):
        caches.run(str(eso))
    with pytest.raises(ValueError, match="no cache 'all'"):
        caches.run(str(mdlm), caches=["all"])
    with pytest.raises(ValueError, match="temperature is 0"):
        caches.run(str(mdlm), temperature=0)


def test_agreement_is_a_mean_over_texts_with_its_error() -> None:
    plain, found = [[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert caches.agreement(plain, found) == {"same_tokens": 0.75, "same_tokens_stderr": 0.25, "same_samples": 0.5}
    assert caches.agreement(plain[:1], found[:1])["same_tokens_stderr"] is None
    values, owner = [torch.tensor([1.0, 3.0]), torch.tensor([5.0])], [torch.tensor([0, 1]), torch.tensor([1])]
    assert caches.by_row(values, owner, 2) == [1, 4]


def test_divergence_is_that_of_the_distributions() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.75, 0.0]])
    logits = [torch.cat([t.log(), torch.full((1, 1), 3.0)], 1) for t in (p, q)]
    wanted = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert caches.divergence(*logits, 3).tolist() == pytest.approx([wanted])


def test_only_samplers_that_choose_are_compared(tmp_path: Any) -> None:
    lm = load(make_run(tmp_path / "run", "mdlm", length=8))
    with pytest.raises(ValueError, match="first_hitting does not choose"):
        caches.divergences(lm, [[None] * 8], SamplingOptions(sampler="first_hitting"))
