"""`esolm tune`: runs of GRPO and DPO from the command line, resumed, with LoRA, with failing rewards, and refused."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import esolm
from esolm import cli
from esolm.core.batch import Batch
from esolm.storage.models import read_model
from esolm.training.options import Tuning
from esolm.training.runs import read_metrics
from esolm.training.tuning import prepare
from esolm.tune.reference import Reference
from support import tiny
from support.runs import make_run

EVEN = "support.flawed:even"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and data."""
    home = tmp_path_factory.mktemp("tune")
    make_run(home / "base", length=10, alpha_0=0.5)
    rows = [{"prompt": "ab"}, {"prompt": ""}, {"text": "a__c_", "goal": 1}]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": "q", "chosen": "aaaa", "rejected": "bbb"}, {"chosen": "aab", "rejected": "bcbcb"}] * 4
    (home / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return home


def command(kind: str, home: Path, run: Path, **more: Any) -> list[str]:
    options: dict[str, Any] = {
        "steps": 4, "batch.size": 8, "batch.micro": 4, "optim.lr": 0.01, "optim.warmup": 1, "validation.every": 2,
        "validation.batch_size": 4, "validation.batches": 1, "saving.every": 2, "compute.threads": 1,
        "compute.precision": "float32", "compute.device": "cpu",
    }  # fmt: skip
    own: dict[str, Any] = {"data": home / "pairs.jsonl"}
    if kind == "grpo":
        own = {"reward": EVEN, "grpo.group": 4, "reward.workers": 1, "rollout.num_steps": 3, "rollout.keep": 1}
    words = [f"--{key}={value}" for key, value in {**options, **own, **more}.items()]
    return ["tune", kind, str(home / "base" / "checkpoints" / "step-00000001"), str(run), *words]


def dotted(**options: Any) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in options.items()}


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", dotted(grpo__updates=2, data="prompts.jsonl", rollout__blank="_", rollout__alpha_0=1.0)),
    "lora": ("grpo", dotted(tuning__parts="lora", tuning__rank=2, tuning__alpha=4, rollout__temperature=0.8)),
    "dpo": ("dpo", dotted(dpo__orders=2)),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes_exactly(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind, options = RUNS[name]
    if "data" in options:
        options = {**options, "data": home / options["data"]}
    assert cli.main(command(kind, home, tmp_path / "whole", **options)) == 0
    with monkeypatch.context() as patch:
        tiny.interrupt_after(patch, 3, signal.SIGINT)
        assert cli.main(command(kind, home, tmp_path / "run", **options)) == 130
    assert cli.main(command(kind, home, tmp_path / "run", **options)) == 0
    tiny.assert_same(tmp_path / "run", tmp_path / "whole")
    records = [record for record in read_metrics(tmp_path / "run") if "loss" in record]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert all(record["grad_norm"] > 0 for record in records)
    if kind == "dpo":
        assert set(records[0]["pairs"]) == {"accuracy", "margin", "chosen", "rejected"}
        assert records[0]["loss"] == pytest.approx(0.6931, abs=1e-4)  # the model is its own reference
        return
    one, other = (folder / "samples" / "step-00000004.jsonl" for folder in (tmp_path / "run", tmp_path / "whole"))
    assert one.read_text() == other.read_text()
    assert len(one.read_text().splitlines()) == 8
    assert set(records[0]["time"]["parts"]) == {"refresh", "sampling", "reward", "scoring", "learning"}
    assert min(records[0]["network_tokens"].values()) > 0
    assert esolm.load(tmp_path / "run", which="last").sample(num_steps=2).tokens


def test_the_curriculum_of_the_model_is_not_that_of_tuning(home: Path, tmp_path: Path, capsys: Any) -> None:
    make_run(tmp_path / "base", length=10, alpha_0=0.5, loss="any_order", curriculum=10)
    words = command("dpo", home, tmp_path / "run", steps=2)
    words[2] = str(tmp_path / "base" / "checkpoints" / "step-00000001")
    assert cli.main(words) == 0
    assert "system.curriculum" not in capsys.readouterr().out


def test_the_reward_rises_and_the_loss_falls(home: Path, tmp_path: Path) -> None:
    """Fixed seeds. The share of characters with an even number starts at about a half."""
    more = dotted(steps=40, validation__every=0, saving__every=0, batch__size=64, batch__micro=64, grpo__group=32)
    assert cli.main(command("grpo", home, tmp_path / "grpo", **more, **dotted(optim__lr=0.05, grpo__beta=0.0))) == 0
    rewards = [record["reward"]["mean"] for record in read_metrics(tmp_path / "grpo") if "loss" in record]
    assert rewards[0] < 0.6
    assert rewards[-1] > 0.8
    more = dotted(steps=10, validation__every=0, saving__every=0, batch__micro=8)
    assert cli.main(command("dpo", home, tmp_path / "dpo", **more)) == 0
    records = read_metrics(tmp_path / "dpo")
    assert records[-2]["loss"] < 0.5
    assert records[-1]["validation"]["accuracy"] == 1


def test_failing_rewards_are_reported_and_survived(home: Path, tmp_path: Path, capsys: Any) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {"data": tmp_path / "rows.jsonl", "reward": "support.flawed:half", "reward.chunk": 3, "steps": 2}
    assert cli.main(command("grpo", home, tmp_path / "run", **more)) == 0
    first = read_metrics(tmp_path / "run")[0]
    assert first["reward"]["failed"] == 4  # those of one of the two prompts
    assert sum(first["errors"].values()) == 4
    assert "4 rewards failed" in capsys.readouterr().out
    kept = [
        json.loads(line) for line in (tmp_path / "run" / "samples" / "step-00000001.jsonl").read_text().splitlines()
    ]
    assert sum("error" in record for record in kept) == 4
    more = {"reward": "regex", "reward.options": '{"pattern": "no"}', "steps": 2}
    assert cli.main(command("grpo", home, tmp_path / "equal", **more)) == 0
    assert capsys.readouterr().out.count("all rewards are 0, and nothing can be learned") == 1


def test_a_wrong_reward_leaves_no_run_behind(home: Path, tmp_path: Path, capsys: Any) -> None:
    """The corrected command would be refused, because the run was started with another reward."""
    for reward in ("", "nothing"):
        assert cli.main(command("grpo", home, tmp_path / "run", reward=reward)) == 2
        assert "reward" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_reference_of_lora_is_the_base() -> None:
    from support import toy

    system, x = toy.make("esolm", 6, alpha_0=0.5), toy.text(3)
    base, net = toy.network(), toy.network()
    prepare(net, Tuning("lora", rank=2, alpha=4.0), 0)
    for name, p in net.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p)
    reference = Reference(net, shared=True)
    with torch.no_grad():
        expected, tuned = (system.logits(each, Batch(x)) for each in (base, net))
        with reference.active() as found:
            assert torch.equal(system.logits(found, Batch(x)), expected)
        assert torch.equal(system.logits(net, Batch(x)), tuned)
    assert not torch.allclose(tuned, expected)


def test_a_run_resumes_without_its_model(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "base", length=10, alpha_0=0.5)
    words = command("grpo", tmp_path, tmp_path / "run", **dotted(grpo__beta=0.0))
    with monkeypatch.context() as patch:
        tiny.interrupt_after(patch, 3)
        assert cli.main(words) == 130
    (tmp_path / "base").rename(tmp_path / "away")
    assert cli.main(words) == 0


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "sampler": ("grpo", dotted(rollout__sampler="confidence"), "confidence"),
    "order": (
        "grpo",
        dotted(rollout__sampler="order", rollout__order="[2,0,1]", rollout__num_steps="null"),
        "permutation",
    ),
    "reward": ("grpo", {"reward": "nothing"}, "molecules"),
    "group": ("grpo", dotted(grpo__group=3), "grpo.group"),
    "dropout": ("grpo", dotted(net__dropout=0.1), "dropout"),
    "no prompts": ("grpo", {"data": "missing.jsonl"}, "missing.jsonl"),
    "no pairs": ("dpo", {"data": ""}, "--data"),
    "option": ("grpo", dotted(grpo__gruop=3), "--grpo.group"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(home: Path, tmp_path: Path, capsys: Any, name: str) -> None:
    kind, options, word = REFUSED[name]
    assert cli.main(command(kind, home, tmp_path / "run", **options)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert word in error
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_systems_without_the_likelihood_are_refused(tmp_path: Path, capsys: Any) -> None:
    for name, options in (("bd3lm", {"block_size": 2}), ("esolm", {"variant": "A"}), ("udlm", {})):
        (home := tmp_path / f"{name}").mkdir()
        make_run(home / "base", name, length=10, **options)
        assert cli.main(command("grpo", home, home / "run", **{"rollout.num_steps": 10})) == 2
        assert "likelihood" in capsys.readouterr().err


def test_prompts_and_texts(home: Path, tmp_path: Path) -> None:
    """A reward sees what follows a prompt, or a whole text whose blanks were filled in."""
    from esolm.tune.options import Rollout
    from esolm.tune.rollout import Prompts, draw

    lm = esolm.load(home / "base")
    prompts = Prompts.read(str(home / "prompts.jsonl"), lm, Rollout(blank="_"))
    assert [row.count(None) for row in prompts.rows] == [8, 10, 3]
    drawn = draw(lm, prompts.rows, 10, Rollout(num_steps=2, batch_size=2).sampling(1), 0, 3)
    again = draw(lm, prompts.rows[2:], 10, Rollout(num_steps=2).sampling(1), 2, 3)
    assert torch.equal(drawn.batch.x[2:], again.batch.x)
    assert drawn.batch.scored.sum(1).tolist() == [8, 10, 3]
    assert lm.tokenizer.decode(drawn.batch.x[0].tolist()).startswith("ab")
    assert not drawn.texts[0].startswith("ab")
    assert drawn.texts[2][0] == "a"
    bad = tmp_path / "bad.jsonl"
    for row in ({"question": 1}, {"prompt": "a" * 10}, {"text": "_" * 11}):
        bad.write_text(json.dumps(row) + "\n")
        with pytest.raises(ValueError, match="line 1"):
            Prompts.read(str(bad), lm, Rollout(blank="_"))


def test_rollouts_in_a_chosen_order(home: Path) -> None:
    from esolm.tune.options import Rollout
    from esolm.tune.rollout import draw

    order = (3, 9, 0, 8, 1, 7, 2, 6, 4, 5)
    for sampler in ("order", "speculative"):
        options = Rollout(sampler=sampler, order=order).sampling(1)
        drawn = draw(esolm.load(home / "base"), [[None] * 10] * 2, 10, options, 0, 2)
        assert drawn.schedule.sigma.tolist() == [list(order)] * 2


def test_reading_a_tuned_run(home: Path, tmp_path: Path, capsys: Any) -> None:
    assert cli.main(command("dpo", home, tmp_path / "run", steps=2)) == 0
    capsys.readouterr()
    assert cli.main(["info", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert read_model(tmp_path / "out").system.alpha_0 == 0.5  # type: ignore[attr-defined]
