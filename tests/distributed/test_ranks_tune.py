"""Two ranks of `esolm tune` end where one rank does, and draw the same samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from esolm import cli
from support import crew
from support.ranks import assert_close
from support.runs import make_run

COMMON = (
    "--steps=4", "--batch.size=8", "--batch.micro=2", "--optim.lr=0.003", "--optim.warmup=1", "--validation.every=2",
    "--validation.batch_size=4", "--validation.batches=2", "--compute.threads=1", "--compute.precision=float32",
    "--compute.device=cpu",
)  # fmt: skip
GRPO = (
    "--reward=support.flawed:even", "--reward.workers=1", "--rollout.num_steps=3", "--rollout.batch_size=2",
    "--rollout.keep=1", "--grpo.group=4", "--grpo.updates=2",
)  # fmt: skip
LORA = ("--tuning.parts=lora", "--tuning.rank=3", "--tuning.alpha=6")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("base")
    make_run(home / "model", length=10, alpha_0=0.5)
    pairs = [{"prompt": "q", "chosen": "aaaa", "rejected": "bbb"}, {"chosen": "aab", "rejected": "bcbcb"}] * 5
    (home / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return home


@pytest.mark.parametrize(
    "kind",
    ["grpo", "grpo, fsdp", "dpo", *(pytest.param(f"{n}, lora, fsdp", marks=pytest.mark.slow) for n in ("grpo", "dpo"))],
)
def test_two_ranks_equal_one(base: Path, two: crew.Crew, tmp_path: Path, kind: str) -> None:
    name, *more = kind.split(", ")
    own = GRPO if name == "grpo" else (f"--data={base / 'pairs.jsonl'}",)
    options = (*COMMON, *own, *(LORA if "lora" in more else ()))

    def words(run: Path, *extra: str) -> list[str]:
        return ["tune", name, str(base / "model" / "checkpoints" / "step-00000001"), str(run), *options, *extra]

    assert cli.main(words(tmp_path / "one")) == 0
    sharded = ["--compute.parallel=fsdp"] if "fsdp" in more else []
    codes = two(crew.command_with_children, words(tmp_path / "two", *sharded))
    assert codes[0][0] == 0, codes
    assert_close(tmp_path / "two", tmp_path / "one")
    for file in sorted((tmp_path / "one" / "samples").glob("*.jsonl")):
        assert file.read_text() == (tmp_path / "two" / "samples" / file.name).read_text()
