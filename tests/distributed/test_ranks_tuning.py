"""Two ranks that train a part of the weights, or distil, end where one rank does, with DDP and with FSDP."""

from __future__ import annotations

from pathlib import Path

import pytest

from esolm import cli
from support import crew
from support.ranks import assert_close, command

NET = ("--net.layers", "--net.width", "--net.heads", "--net.cond_width", "--net.init")
PARTS = {
    "qkv": ("--tuning.parts=qkv", "--tuning.embeddings=true"),
    "lora": ("--tuning.parts=lora", "--tuning.rank=3", "--tuning.alpha=6"),
}


@pytest.fixture(scope="module")
def base(data, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("base") / "run"
    assert cli.main(command(data, run, "any_order")) == 0
    return run


@pytest.mark.parametrize(
    ("parts", "parallel"),
    [("lora", "fsdp"), *(pytest.param(*other, marks=pytest.mark.slow) for other in (("lora", "ddp"), ("qkv", "fsdp")))],
)
def test_two_ranks_equal_one(base, two, data, tmp_path, parts, parallel):
    def words(run: Path, *more: str) -> list[str]:
        found = command(data, run, "any_order", f"--init={base}", "--net.dropout=0", *PARTS[parts], *more)
        return [word for word in found if word.partition("=")[0] not in NET]

    assert cli.main(words(tmp_path / "one")) == 0
    codes = two(crew.command, words(tmp_path / "two", f"--compute.parallel={parallel}", "--saving.every=3"))
    assert codes[0][0] == 0, codes
    assert_close(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_ranks_distil_as_one(two, data, tmp_path, parallel):
    base = tmp_path / "base"
    assert cli.main(command(data, base, "ar")) == 0
    options = (f"--init={base}", "--net.dropout=0", "--system.query=shift", "--distill.weight=2")

    def words(run: Path, *more: str) -> list[str]:
        found = command(data, run, "any_order", *options, *more)
        return [word for word in found if word.partition("=")[0] not in NET]

    assert cli.main(words(tmp_path / "one")) == 0
    codes = two(crew.command, words(tmp_path / "two", f"--compute.parallel={parallel}", "--saving.every=3"))
    assert codes[0][0] == 0, codes
    assert_close(tmp_path / "two", tmp_path / "one")
