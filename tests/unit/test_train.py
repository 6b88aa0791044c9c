"""Configurations, the training loop from Python, and the loss over micro-batches."""

from __future__ import annotations

import dataclasses
import io
import re
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

import esolm
from esolm import cli
from esolm.core.batch import Batch
from esolm.core.randomness import Randomness, fold
from esolm.net.denoiser import Denoiser, DenoiserConfig
from esolm.runtime.dotted import flat
from esolm.storage import checkpoint
from esolm.systems import find
from esolm.training import report
from esolm.training.learner import Learner, learning_rate
from esolm.training.loss import accumulate, validate, variance
from esolm.training.options import Batching, Compute, Optim, Saving
from support import tiny as runs

V, L = 11, 8
SMALL: dict[str, Any] = {
    "steps": 6,
    "log_every": 1,
    "net": {"layers": 1, "width": 16, "heads": 2, "cond_width": 8},
    "batch": {"size": 8},
    "validation": {"every": 3, "batch_size": 4},
    "saving": {"every": 2},
    "compute": {"device": "cpu", "precision": "float32", "threads": 1},
}
CPU = Compute(device="cpu", precision="float32")


class Tokens:
    """Random tokens, some of them padding and some given; the last batch of three is smaller."""

    def batch(self, step, first=0, count=None):
        x = torch.randint(0, V - 1, (8, L), generator=torch.Generator().manual_seed(step))
        size = torch.arange(8)[:, None]
        valid, given = torch.arange(L) < L - size % 3, torch.arange(L) < size % 2
        stop = None if count is None else first + count
        return Batch(*(t[first:stop][: 8 if step < 2 else 5] for t in (x, valid, given)))

    def __len__(self):
        return 3


def tiny(seed: int = 0) -> Denoiser:
    torch.manual_seed(seed)
    net = Denoiser(DenoiserConfig(V, L, layers=2, width=16, heads=2, cond_width=8, dropout=0.0))
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return net


def system(name: str):
    more = {"block_size": 4} if name == "bd3lm" else {}
    return find(name)(mask_id=V - 1, **more)


@pytest.mark.parametrize("name", ["ar", "mdlm", "bd3lm", "esolm"])
def test_four_micro_batches_give_the_gradient_of_one_batch(name):
    results = []
    for micro in (8, 2):
        net = tiny()
        nats, tokens = accumulate(net, system(name), Tokens(), 1, 5, Batching(8, micro), CPU)
        results.append((nats, tokens, {k: p.grad for k, p in net.named_parameters()}))
    (nats, tokens, grads), (split_nats, split_tokens, split_grads) = results
    assert tokens == split_tokens
    assert nats == pytest.approx(split_nats, rel=1e-6)
    assert any(grad.abs().max() > 1e-3 for grad in grads.values() if grad is not None)
    for key, grad in grads.items():
        torch.testing.assert_close(split_grads[key], grad, rtol=1e-4, atol=1e-6)


def test_validation_repeats_itself_and_weighs_every_token_the_same():
    net, esolm = tiny().eval(), system("esolm")
    first = validate(net, esolm, Tokens(), None, CPU)
    assert first == validate(net, esolm, Tokens(), None, CPU)
    assert set(first) == {"diffusion", "sequential"}
    ar = validate(net, system("ar"), Tokens(), None, CPU)["nll"]
    terms = [system("ar").terms(net, Tokens().batch(step), rng=None, train=False)[0] for step in range(3)]
    mean = sum(t.nats.double().sum() for t in terms) / sum(t.valid.sum() for t in terms)
    assert ar == pytest.approx(mean.item(), rel=1e-9)


def test_the_variance_is_that_between_blocks():
    """Means over the scored tokens of each block; the blocks of 3 batches of which the last is smaller."""
    net, bd3lm = tiny().eval(), system("bd3lm")
    found = []
    for step in range(3):
        batch = Tokens().batch(step)
        (term,) = bd3lm.terms(net, batch, Randomness(fold(0, "valid"), step * 8, 21), train=True)
        means = [
            (nats[b : b + 4].sum() / scored[b : b + 4].sum()).item()
            for nats, scored in zip(term.nats.double(), term.valid)
            for b in range(0, L, 4)
            if scored[b : b + 4].any()
        ]
        found.append(statistics.variance(means))
    assert variance(net, bd3lm, Tokens(), None, CPU) == pytest.approx(statistics.fmean(found), rel=1e-6)
    assert variance(net, bd3lm, Tokens(), 2, CPU) != pytest.approx(statistics.fmean(found), rel=1e-3)


def test_the_intervals_of_mask_rates_that_are_searched():
    """The authors' widths: 11, 9, 7, 5 and 3 intervals of them, and the whole range."""
    bd3lm = dataclasses.replace(system("bd3lm"), clip_widths=[0.5, 0.6, 0.7, 0.8, 0.9])
    rates = [(each.mask_rate_min, each.mask_rate_max) for each in bd3lm.alternatives()]
    assert len(set(rates)) == len(rates) == 1 + 11 + 9 + 7 + 5 + 3
    assert rates[0] == (1e-3, 1.0)
    assert {(1e-3, 0.5), (0.3, 0.8), (0.45, 0.95), (0.5, 1.0), (1e-3, 0.9), (0.1, 1.0)} <= set(rates)
    assert bd3lm.alternatives()[7].alternatives() == bd3lm.alternatives()
    single = dataclasses.replace(bd3lm, block_size=1).alternatives()
    assert [(each.mask_rate_min, each.mask_rate_max) for each in single] == [(1e-3, 1.0), (1.0, 1.0)]
    (term,) = single[1].terms(tiny(), Tokens().batch(0), Randomness(0, 0, 8), train=True)
    torch.testing.assert_close(
        term.nats, dataclasses.replace(system("bd3lm"), block_size=1).terms(
            tiny(), Tokens().batch(0), Randomness(0, 0, 8), train=False
        )[0].nats,
    )  # fmt: skip
    assert system("bd3lm").alternatives() == system("mdlm").alternatives() == []


def test_learning_rate_warms_up_and_then_stays_or_falls():
    constant, cosine = Optim(lr=1.0, warmup=4), Optim(lr=1.0, warmup=4, schedule="cosine")
    assert [learning_rate(step, 8, constant) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    falling = [learning_rate(step, 8, cosine) for step in range(8)]
    assert falling[:5] == [0.25, 0.5, 0.75, 1, 1]
    assert falling[6] == pytest.approx(0.5)
    assert learning_rate(0, 8, Optim(lr=1.0, warmup=0)) == 1
    ending = Optim(lr=1.0, warmup=4, decay=3)
    assert [learning_rate(step, 8, ending) for step in range(8)] == [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]


def test_clipping_bounds_the_gradient_and_zero_does_not():
    for clip, expected in ((0.5, 0.5), (0.0, 5.0)):
        learner = Learner(torch.nn.Linear(1, 2, bias=False), Optim(clip=clip))
        learner.net.weight.grad = torch.tensor([[3.0], [4.0]])
        assert learner.gradient_norm().item() == pytest.approx(5.0)
        assert learner.net.weight.grad.norm().item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (lambda: Batching(12, 5), r"batch\.micro 5 .*batch\.size 12.*\[3, 4, 6\]"),
        (lambda: Batching(0), r"batch\.size is 0"),
        (lambda: Optim(lr=-1.0), r"optim\.lr is -1\.0"),
        (lambda: Saving(keep=0), r"saving\.keep is 0"),
        (lambda: Compute(threads=0), r"compute\.threads is 0"),
        (lambda: Compute(offload=True), r"--compute\.parallel fsdp"),
    ],
)
def test_bad_options_are_named(options, word):
    with pytest.raises(ValueError, match=word):
        options()


def test_checkpointed_blocks_give_the_same_gradient():
    grads = []
    for flag in (False, True):
        net = tiny()
        net.checkpoint_blocks = flag
        accumulate(net, dataclasses.replace(system("esolm"), alpha_0=0.5), Tokens(), 1, 5, Batching(8), CPU)
        grads.append([p.grad for p in net.parameters()])
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(*grads))


def test_overrides_are_nested_or_dotted_and_checked(tmp_path: Path) -> None:
    nested = esolm.RunConfig.preset("demo", data=tmp_path, optim={"lr": 1e-3}, system={"alpha_0": 1})
    dotted = esolm.RunConfig.preset("demo", data=str(tmp_path), **{"optim.lr": 1e-3, "system.alpha_0": 1})
    assert nested == dotted
    assert (nested.optim.lr, nested.optim.warmup, nested.system["alpha_0"]) == (1e-3, 50, 1)
    assert esolm.RunConfig.from_tree(nested.tree()) == nested
    for wrong, word in (
        ({"optim": {"warm_up": 3}}, "optim.warmup"),
        ({"optim": {"lr": "fast"}}, r"^optim\.lr is 'fast'; it must be a number$"),
        ({"log_every": 0}, "log_every is 0"),
        ({"init": "runs/old", "net": {"layers": 3}}, r"net\.layers"),
    ):
        with pytest.raises(ValueError, match=word):
            esolm.RunConfig.preset("demo", **wrong)


def test_the_configuration_of_an_old_run_is_read_unchanged() -> None:
    tree = yaml.safe_load((Path(__file__).parents[1] / "golden/recorded/old_run/config.yaml").read_text())
    found = flat(esolm.RunConfig.from_tree(tree).tree())
    assert {key: found[key] for key in flat(tree)} == flat(tree)  # options that came later have their defaults


def test_help_shows_the_defaults_of_the_options_or_of_the_preset(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in (["train", "--help"], ["train", "demo", "--help"]):
        with pytest.raises(SystemExit):
            cli.main(words)
        shown.append("".join(capsys.readouterr().out.split()))
    assert "default:0.0003)" in shown[0]
    assert "default:0.008)" not in shown[0]
    assert "default:0.008)" in shown[1]


def test_training_from_python(tmp_path: Path) -> None:
    """Callbacks get the lines of metrics.jsonl, and leaving the iterator early saves a run that resumes exactly."""
    data = runs.make_data(tmp_path / "data")
    config = esolm.RunConfig.preset("laptop-esolm", data=data, run=tmp_path / "whole", **SMALL)
    records: list[dict[str, Any]] = []
    before = config.tree()
    outcome = esolm.Trainer(config, quiet=True).fit([records.append])
    assert config.tree() == before
    assert [record["step"] for record in records] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert (outcome.step, outcome.signal) == (6, None)
    assert outcome.checkpoint == checkpoint.latest(tmp_path / "whole" / "checkpoints")
    assert outcome.validation == records[-1]["validation"]
    assert esolm.Trainer(config, quiet=True).fit() == outcome  # nothing is left to do

    trainer = esolm.Trainer(dataclasses.replace(config, run=str(tmp_path / "run")), quiet=True)
    for record in trainer.records():
        if record["step"] == 3:
            break
    assert trainer.outcome is not None
    assert trainer.outcome.step == 3
    assert trainer.fit().step == 6
    runs.assert_same(tmp_path / "run", tmp_path / "whole")


def test_a_failing_callback_ends_training_with_a_checkpoint(tmp_path: Path) -> None:
    data = runs.make_data(tmp_path / "data")
    config = esolm.RunConfig.preset("laptop-mdlm", data=data, run=tmp_path / "run", **SMALL)

    def fail(record: dict[str, Any]) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        esolm.Trainer(config, quiet=True).fit([fail])
    assert checkpoint.list_steps(tmp_path / "run" / "checkpoints") == [1]


def test_a_system_in_the_working_directory_is_found(tmp_path: Path) -> None:
    """Though the working directory is not on the path, as for the installed command."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "systems.py").write_text(
        "from dataclasses import dataclass\n"
        "from esolm.systems import System\n"
        "@dataclass(frozen=True)\n"
        "class Mine(System):\n"
        "    at: int = 6\n"
        "    mask_id: int = -1\n"
    )
    code = (
        "import os, sys; sys.path = [p for p in sys.path if p and os.path.abspath(p) != os.getcwd()];"
        "from esolm.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["train", "demo", "--print_config", "--system.name=mine.systems.Mine", "--system.at=9"]
    found = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert yaml.safe_load(found.stdout)["system"] == {"name": "mine.systems.Mine", "at": 9}
    with pytest.raises(ValueError, match=r"nowhere\.Mine"):
        find("nowhere.Mine")


@pytest.mark.parametrize(
    ("seconds", "wanted"), [(0.25, [1, 22, 43]), (2.0, [1, 4, 7, 10, *range(13, 50, 3)]), (30.0, list(range(1, 51)))]
)
@pytest.mark.parametrize("terminal", [False, True])
def test_lines_come_every_few_seconds_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, seconds: float, wanted: list[int], terminal: bool
) -> None:
    """By the clock, however long a step takes: the first step, and then whenever more than five seconds have passed. A
    terminal has a bar instead."""
    clock, out = [1000.0], io.StringIO()
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    console = Console(file=out, highlight=False, width=100, force_terminal=terminal)
    with report.Live(0, 50, console=console) as live:
        for step in range(1, 51):
            clock[0] += seconds
            timing = {"seconds": step * seconds, "tokens_per_second": 1234.5}
            live.step({"step": step, "terms": {"any_order": 2.0}, "time": timing})
    lines = [line for line in out.getvalue().splitlines() if re.search(r"step \d+/50: ", line)]
    assert lines == [
        f"step {step}/50: any_order 2.000 · 1,234 tok/s · {(50 - step) * seconds:.0f} s left"
        for step in ([] if terminal else wanted)
    ]
    assert not terminal or "step 50/50" in out.getvalue()


def test_too_little_text_is_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = runs.make_data(tmp_path / "data")
    quick = ("--batch.size=64", "--batch.micro=64", "--validation.every=0", "--saving.every=0")
    for steps, many in ((20, False), (21, True)):
        assert cli.main(runs.command(data, tmp_path / f"{steps}", *quick, f"--steps={steps}")) == 0
        said = capsys.readouterr().out
        assert ("has 64 sequences, so each is seen 21 times" in said) == many
    assert "--steps 20" in said
