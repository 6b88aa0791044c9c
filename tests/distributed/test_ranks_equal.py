"""Any number of processes gives the losses, gradients, averages and bounds of one process.

Times, masks and orders belong to examples and dropout to micro-batches, so with equal micro-batches the runs differ
only by the order of sums. The tolerance is that of float32 sums after the stated number of AdamW steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from esolm import cli
from support import crew, tiny
from support.ranks import SYSTEMS, TOLERANCE, assert_close, command, flat


def check(processes: crew.Crew, data: Path, folder: Path, system: str, *more: str, flaw: str = "") -> None:
    assert cli.main(command(data, folder / "one", system, *(m for m in more if "compute" not in m))) == 0
    results = processes(crew.command, command(data, folder / "all", system, *more), flaw)
    assert [code for code, _, _ in results] == [0] * len(results)
    assert "finished" in results[0][1]
    assert all(said == errors == "" for _, said, errors in results[1:])
    assert_close(folder / "all", folder / "one")


QUICK = {("ddp", "esolm"), ("fsdp", "esolm"), ("fsdp", "mdlm")}
PAIRS = [
    pytest.param(parallel, system, marks=() if (parallel, system) in QUICK else pytest.mark.slow)
    for parallel in ("ddp", "fsdp")
    for system in SYSTEMS
]


@pytest.mark.parametrize(("parallel", "system"), PAIRS)
def test_two_processes_train_as_one(two, data, tmp_path, parallel, system):
    check(two, data, tmp_path, system, f"--compute.parallel={parallel}")


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_four_processes_train_as_one(four, data, tmp_path, system, parallel):
    check(four, data, tmp_path, system, f"--compute.parallel={parallel}")


@pytest.mark.slow
def test_four_processes_with_uneven_shards(four, data, tmp_path):
    """259 ids and a width of 18 do not divide by four."""
    check(four, data, tmp_path, "esolm", "--compute.parallel=fsdp", "--net.width=18", "--net.heads=1")


@pytest.mark.parametrize("parallel", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_llama_trains_as_on_one(two, data, tmp_path, parallel):
    """Its embedding is also the output layer."""
    net = {"heads": 4, "kv_heads": 2, "head_width": 6, "mlp": "swiglu", "norm": "rms", "tied": True, "adaln": False}
    check(two, data, tmp_path, "ar", f"--compute.parallel={parallel}", *(f"--net.{k}={v}" for k, v in net.items()))


@pytest.mark.parametrize(
    ("parallel", "kappa"),
    [("fsdp", 0.25), *(pytest.param(*p, marks=pytest.mark.slow) for p in (("ddp", 0.25), ("fsdp", 0.7)))],
)
def test_a_pass_without_an_example_of_one_term_keeps_step(two, data, tmp_path, parallel, kappa):
    """With these shares some micro-batches have rows of one term and some of both."""
    check(two, data, tmp_path, "esolm", f"--compute.parallel={parallel}", f"--system.kappa={kappa}")


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 4])
def test_any_pass_size_gives_the_same_without_dropout(two, data, tmp_path, micro):
    more = ("--compute.parallel=fsdp", "--net.dropout=0")
    check(two, data, tmp_path / "a", "esolm", *more, f"--batch.micro={micro}")
    assert cli.main(command(data, tmp_path / "whole", "esolm", "--net.dropout=0", "--batch.micro=8")) == 0
    results = two(crew.command, command(data, tmp_path / "b", "esolm", *more, f"--batch.micro={micro}"))
    assert results[0][0] == 0
    (_, records), (_, expected) = tiny.outcome(tmp_path / "b"), tiny.outcome(tmp_path / "whole")
    for record, wanted in zip(records, expected, strict=True):
        assert flat(record) == pytest.approx(flat(wanted), rel=TOLERANCE, abs=1e-6)


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_the_head_in_chunks(two, data, tmp_path, parallel):
    check(two, data, tmp_path, "esolm", f"--compute.parallel={parallel}", flaw="chunked")


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--compute.checkpoint_blocks=true", "--compute.offload=true"])
def test_recomputed_and_offloaded_blocks(two, data, tmp_path, option):
    check(two, data, tmp_path, "esolm", "--compute.parallel=fsdp", option)


@pytest.mark.slow
def test_weights_gathered_in_bf16_are_near(two, data, tmp_path, bf16):
    assert cli.main(command(data, tmp_path / "one", "esolm")) == 0
    more = ("--compute.parallel=fsdp", "--compute.gather=bf16")
    assert two(crew.command, command(data, tmp_path / "all", "esolm", *more))[0][0] == 0
    (tensors, records), (_, expected) = tiny.outcome(tmp_path / "all"), tiny.outcome(tmp_path / "one")
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    for record, wanted in zip(records, expected, strict=True):
        if "loss" in record:
            assert record["loss"] == pytest.approx(wanted["loss"], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_compiled_blocks(two, data, tmp_path, parallel):
    check(two, data, tmp_path, "esolm", f"--compute.parallel={parallel}", "--compute.compile=true", "--net.dropout=0")
