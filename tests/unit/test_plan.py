"""`esolm plan`: its figures agree with measurements of small runs."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from esolm import cli
from esolm.cli.plan import size
from esolm.core.batch import Batch
from esolm.core.randomness import Randomness, fold
from esolm.core.terms import total
from esolm.data import tokenizer
from esolm.net.denoiser import Denoiser, DenoiserConfig
from esolm.runtime.machine import autocast
from esolm.storage import folder
from esolm.systems import FROM_DATA, find
from esolm.training import cost as counting
from esolm.training.config import RunConfig, preset_names
from esolm.training.cost import count
from esolm.training.learner import Learner
from esolm.training.options import Compute, Optim
from esolm.training.plan import Cluster, plan
from support import toy

V = 64
SYSTEMS = {
    "esolm": {"alpha_0": 0.5}, "mdlm": {}, "bd3lm": {"block_size": 16}, "ar": {}, "duo": {"curriculum_end": 1},
    "udlm": {}, "diffusion_lm": {"latent_width": 24},
}  # fmt: skip


def sizes(**more: Any) -> DenoiserConfig:
    return DenoiserConfig(**({"vocab_size": V, "length": 64, "layers": 4, "width": 64, "heads": 2} | more))


def made(name: str, **options: Any) -> Any:
    cls = find(name)
    known = {"vocab_size": V, "token_counts": ""}
    ids = {f.name: known.get(f.name, V - 1) for f in dataclasses.fields(cls) if f.name in FROM_DATA}
    return cls(**{**SYSTEMS[name], **options, **ids})


def kept(net: Denoiser, system: Any, x: Tensor, precision: str) -> int:
    """Bytes of all tensors saved for the backward pass, without the parameters."""
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    storages: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), autocast(x.device, precision):
        system.terms(net, Batch(x), Randomness(fold(1, 0), 0, len(x)), True)
    return sum(t.untyped_storage().nbytes() for t in storages.values())


LLAMA = {
    "adaln": False, "heads": 4, "kv_heads": 2, "head_width": 24, "mlp_width": 150, "mlp": "swiglu", "norm": "rms",
    "mlp_bias": False, "head_bias": False, "tied": True,
}  # fmt: skip
GPT2 = {**toy.SHAPES["gpt2"], "heads": 4}


@pytest.mark.parametrize("shape", [LLAMA, {**LLAMA, "qk_norm": True}, GPT2], ids=["llama", "qwen", "gpt2"])
def test_other_families(shape: dict[str, Any]) -> None:
    """Parameters and operations are counted in the network itself, and activations in a pass."""
    net = Denoiser(config := sizes(dropout=0.0, **shape))
    matrices = [p for name, p in net.named_parameters() if p.dim() == 2 and name.startswith("blocks.0.")]
    assert config.block_weights == sum(p.numel() for p in matrices)
    assert counting.parameters(config)[0] == sum(p.numel() for p in net.parameters())
    system, x = made("mdlm"), torch.randint(0, V - 1, (8, 64))
    work, compute = count(system, x, 1), Compute(precision="float32")
    found = kept(net, system, x, "float32")
    planned = counting.activations(config, work, compute) + 2 / 3 * counting.head_bytes(config, work, compute)
    assert planned == pytest.approx(found, rel=0.2)  # on the CPU, RMSNorm keeps more than on a GPU
    with FlopCounterMode(display=False) as counter:
        system.terms(net, Batch(x), Randomness(fold(1, 0), 0, len(x)), True)
    attention = 4 * config.sizes.queries * ((config.layers - 1) * work.pairs + work.last_pairs)
    assert work.flops(config) - attention == counter.get_total_flops()  # it does not count the CPU's attention


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", SYSTEMS)
def test_activations_are_what_a_pass_keeps(name: str, dropout: float) -> None:
    system = made(name)
    config = sizes(dropout=dropout, latent_width=system.latent_width)
    found = kept(Denoiser(config), system, x := torch.randint(0, V - 1, (8, 64)), "float32")
    work = count(system, x, 1)
    work = dataclasses.replace(work, soft_rows=work.rows * system.soft_inputs)
    compute = Compute(precision="float32")
    planned = counting.activations(config, work, compute) + 2 / 3 * counting.head_bytes(config, work, compute)
    assert planned == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("name", ["udlm", "duo", "diffusion_lm"])
def test_operations_of_systems_with_times(name: str) -> None:
    """Those of soft inputs, of the MLPs around embeddings and of the conditions of rows; without the small ones of
    examples, which each have one time."""
    system, x = made(name), torch.randint(0, V - 1, (8, 64))
    net, work = Denoiser(config := sizes(dropout=0.0, latent_width=system.latent_width)), count(system, x, 1)
    work = dataclasses.replace(work, soft_rows=work.rows * system.soft_inputs)
    with FlopCounterMode(display=False) as counter:
        system.terms(net, Batch(x), Randomness(fold(1, 0), 0, len(x)), True)
    examples = 2 * 8 * (256 * 128 + 128 * 128 + config.layers * 6 * 64 * 128)
    attention = 4 * config.sizes.queries * ((config.layers - 1) * work.pairs + work.last_pairs)
    assert work.flops(config) - attention + examples == counter.get_total_flops()


def test_soft_inputs_count_while_they_last() -> None:
    """Memory of one step with them, and operations in proportion to the steps that have them."""
    vocabulary, kinds = 4097, {}
    for end in (0, 400, 800):
        config = RunConfig.preset("laptop-duo", **{"system.curriculum_end": end})
        kinds[end] = plan(config, Cluster(1), vocabulary)
    more = {end: kinds[end]["memory"]["activations"] - kinds[0]["memory"]["activations"] for end in (400, 800)}
    assert more[400] == more[800] == pytest.approx(32 * 128 * vocabulary * 6, rel=1e-6)
    work = [kinds[end]["flops_per_token"] for end in (0, 400, 800)]
    assert work[2] - work[0] == pytest.approx(3 * 2 * 256 * vocabulary, rel=1e-3)
    assert work[1] - work[0] == pytest.approx((work[2] - work[0]) / 2, rel=1e-3)


@pytest.mark.parametrize("name", [name for name in preset_names() if name.startswith("laptop")])
def test_every_system_has_a_plan(name: str) -> None:
    small = {"batch.size": 4, "net.layers": 1, "net.width": 32, "net.heads": 2}
    assert plan(RunConfig.preset(name, **small), Cluster(1), vocab_size=50)["fits"]


def test_activations_in_bf16(bf16: None) -> None:
    config = sizes(width=128)
    found = kept(Denoiser(config), system := made("esolm"), x := torch.randint(0, V - 1, (8, 64)), "bf16")
    work, compute = count(system, x, 1), Compute(precision="bf16")
    cast = 2 * counting.parameters(config)[0]  # weights in bf16 are kept too
    planned = counting.activations(config, work, compute) + counting.head_bytes(config, work, compute) * 2 / 3 + cast
    assert planned == pytest.approx(found, rel=0.1)


def test_states_are_what_a_learner_holds() -> None:
    config = sizes()
    net = Denoiser(config)
    learner, system = Learner(net, Optim()), made("esolm")
    x = torch.randint(0, V - 1, (8, 64))
    rng = Randomness(1, 0, 8)
    total(system.terms(net, Batch(x), rng, True), system.counts(torch.ones_like(x) > 0, rng)).backward()
    gradients = sum(p.grad.nbytes for p in net.parameters() if p.grad is not None)
    learner.update(1e-3, 1)
    moments = sum(t.nbytes for state in learner.optimizer.state.values() for t in state.values() if t.dim())
    weights = sum(p.nbytes for p in net.parameters())
    average = sum(t.nbytes for t in learner.ema.state(net).values())
    found = counting.memory(config, count(system, x, 1), Compute(precision="float32"), 1)
    assert (found.weights, found.gradients, found.moments, found.average) == (weights, gradients, moments, average)
    assert found.gathered == 0
    assert counting.parameters(config)[0] * 4 == weights


def test_sharding_divides_what_it_shards() -> None:
    config, work = sizes(), count(made("mdlm"), torch.zeros(4, 64, dtype=torch.long), 1)
    whole, parts = (
        counting.memory(config, work, Compute(precision="float32", parallel=kind), 8) for kind in ("ddp", "fsdp")
    )
    assert parts.moments == pytest.approx(whole.moments / 8)
    assert parts.activations == whole.activations
    assert whole.gathered == whole.gradients
    offloaded = counting.memory(config, work, Compute(precision="float32", parallel="fsdp", offload=True), 8)
    assert offloaded.moments == offloaded.weights == 0
    ddp, fsdp = (counting.traffic(config, Compute(parallel=kind), 8, 2) for kind in ("ddp", "fsdp"))
    every = counting.parameters(config)[0]
    assert ddp == pytest.approx(2 * 7 / 8 * 4 * every)  # a ring sends each gradient twice, whatever the passes
    assert fsdp == pytest.approx(2 * 7 / 8 * 12 * every)  # weights twice and gradients once, in every pass


def test_recomputing_keeps_one_block() -> None:
    config, work = sizes(layers=8), count(made("mdlm"), torch.zeros(4, 64, dtype=torch.long), 1)
    kept, recomputed = (counting.activations(config, work, Compute(checkpoint_blocks=c)) for c in (False, True))
    assert recomputed < kept / 3


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "owt-esolm", "--gpus", "64", "--gpu_memory", "80GB", "--net.layers=2", "--net.width=64"]
    argv += ["--net.heads=1", "--net.length=128", "--batch.size=512", "--vocab_size=100", "--json"]
    assert cli.main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passes_per_step"] * found["examples_per_pass"] * 64 == 512
    assert found["tokens_per_step"] == 512 * 128
    assert found["memory"]["total"] == pytest.approx(sum(v for k, v in found["memory"].items() if k != "total"), abs=9)
    assert found["fits"]
    assert found["tokens_per_second"] == pytest.approx(64 * 400e12 * 0.4 / found["flops_per_token"], rel=1e-6)
    assert (found["tflops"], found["efficiency"], found["steps"]) == (400, 0.4, 250_000)
    assert found["hours"] == pytest.approx(250_000 * found["seconds_per_step"] / 3600)
    assert cli.main([*argv[:4], "--preset", "nothing"]) == 2
    assert cli.main(["plan", "--preset", "owt-mdlm", *argv[2:-1]]) == 0
    printed = capsys.readouterr().out
    for word in ("fits", "40% of 400 TFLOP/s", "hours"):
        assert word in printed


@pytest.mark.parametrize(("text", "value"), [("80GB", 80e9), ("24g", 24e9), ("1.5TB", 1.5e12), ("8e9", 8e9)])
def test_sizes(text: str, value: float) -> None:
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "80 apples", "0"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="gpu_memory"):
        size(text)


def test_batches_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"batch\.size 10"):
        plan(RunConfig.preset("demo", batch={"size": 10}), Cluster(gpus=4), V)


PUBLISHED = {"adapt-smollm2-135m": 134_515_584, "adapt-qwen3-0.6b": 596_049_920, "adapt-llama-1b": 1_235_814_400}
"""Parameters of the checkpoints, with a row for the mask where one is appended."""


@pytest.mark.matrix(2)
@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_of_published_models(preset: str, gpus: int) -> None:
    """They have the checkpoint's parameters, some hundred thousand tokens in a step, and fit."""
    found = plan(RunConfig.preset(preset), Cluster(gpus=gpus))
    assert found["parameters"] == PUBLISHED[preset]
    assert found["tokens_per_step"] >= 200_000
    assert found["fits"]


def test_sizes_of_init(tmp_path: Path) -> None:
    """A model folder says what its network is, whatever the preset says; one that is not there yet does not matter."""
    net = toy.network(V, 16, torch.float32, adaln=False)
    folder.write(tmp_path, net, find("ar")(mask_id=V - 1), tokenizer("bytes"), {})
    there, absent = (RunConfig.preset("adapt-llama-1b", init=str(path)) for path in (tmp_path, tmp_path / "no"))
    assert plan(there, Cluster())["parameters"] == counting.parameters(net.config)[0]
    assert plan(absent, Cluster())["parameters"] == PUBLISHED["adapt-llama-1b"]


def test_sizes_of_the_data_and_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text("some words\n" * 400)
    data = tmp_path / "data"
    assert cli.main(["prepare", str(tmp_path / "in.txt"), str(data), "--tokenizer", "bytes", "--length", "48"]) == 0
    small = ["--net.layers=1", "--net.width=32", "--net.heads=2", "--gpus=1"]

    def figures(*words: str, sizes: list[str] = small) -> dict[str, Any]:
        capsys.readouterr()
        assert cli.main(["plan", "laptop-esolm", *sizes, "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    found = figures("--data", str(data))
    assert found["network"] == {"layers": 1, "width": 32, "length": 48, "vocab_size": 258}
    assert found["notes"] == []
    (note,) = figures("--data=nowhere", "--vocab_size=99")["notes"]
    assert "length 128" in note
    assert "nowhere" in note
    assert figures("--data=nowhere", "--vocab_size=99", "--net.length=32")["notes"] == []
    (_, note) = figures("--init=no/model", sizes=[])["notes"]
    assert "no/model" in note
    assert figures("--data", str(data), "--vocab_size=99")["network"]["vocab_size"] == 99
    assert cli.main(["plan", "adapt", "--data", str(data), *small]) == 0
    assert "--init MODEL" in (printed := capsys.readouterr().out)
    assert re.search(r"parameters +│ \d+ k ", printed)
    assert re.search(r"weights, per GPU +│ 0\.\d+ MB ", printed)
    assert cli.main(["plan", "adapt", "--init=stories", "--data", str(data), "--json"]) == 0
    net = json.loads((folder.packaged()["stories"] / "config.json").read_text())["net"]
    assert json.loads(capsys.readouterr().out)["network"]["width"] == net["width"]


def test_pairs_do_not_depend_on_the_batch() -> None:
    """Labels that differ between rows are counted once each, also with a rank that they share."""
    options = {"loss": "any_order", "query": "shift", "alpha_0": 1.0}
    one, many = (count(made("esolm", **options), torch.zeros(n, 64, dtype=torch.long), 8) for n in (1, 16))
    assert many.pairs / 16 == pytest.approx(one.pairs, rel=0.1)
