"""Training a part of the weights: which get gradients, LoRA adapters everywhere that weights are read, and on disk."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esolm
from esolm import cli
from esolm.core.batch import Batch
from esolm.core.randomness import Randomness
from esolm.core.terms import total
from esolm.core.visibility import causal
from esolm.net import head
from esolm.net.adapters import some_outputs, without_adapters
from esolm.net.denoiser import Denoiser, Rows
from esolm.net.fold import fold
from esolm.storage import adapters, checkpoint
from esolm.storage.adapters import DOWN, UP
from esolm.storage.models import read_model
from esolm.training.config import RunConfig
from esolm.training.cost import tuned_parameters
from esolm.training.options import Tuning
from esolm.training.tuning import LAYERS, count, prepare, trained
from support import tiny, toy

LORA = Tuning("lora", rank=3, alpha=6.0)
NET = ("--net.layers", "--net.width", "--net.heads", "--net.cond_width")
SMALL = ("--tuning.rank=3", "--tuning.alpha=6")


def adapted(seed: int = 0, tuning: Tuning = LORA, **sizes: Any) -> tuple[Denoiser, Denoiser]:
    """A network with adapters of visible size, and the same one with these merged."""
    net = toy.network(**sizes)
    merged = copy.deepcopy(net)
    prepare(net, tuning, 0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in trained(net).items():
            if name.endswith(UP):
                p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    merged.load_state_dict(adapters.merge(net.state_dict(), tuning.alpha / tuning.rank))
    return net, merged


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", toy.SHAPES)
def test_at_first_a_network_with_adapters_is_the_network(shape: str) -> None:
    net, x, system = toy.network(**toy.SHAPES[shape]), toy.text(3), toy.make("esolm", 6, alpha_0=0.5)
    before = system.logits(net, Batch(x))
    prepare(net, LORA, 0)
    assert torch.equal(system.logits(net, Batch(x)), before)


def test_initial_adapters_depend_on_the_seed_alone() -> None:
    one, two, other = (toy.network() for _ in range(3))
    prepare(one, LORA, 1)
    torch.rand(5)
    prepare(two, LORA, 1)
    prepare(other, LORA, 2)
    states = [{name: t for name, t in net.state_dict().items() if name.endswith(DOWN)} for net in (one, two, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not any(torch.equal(states[0][name], states[2][name]) for name in states[0])


def gradients(net: Denoiser) -> set[str]:
    rng, x = Randomness(0, 0, 4), toy.text(4)
    system = toy.make("esolm", 6, alpha_0=0.5, loss="any_order")
    terms = system.terms(net, Batch(x), rng, True)
    total(terms, system.counts(torch.ones_like(x, dtype=torch.bool), rng)).backward()
    return {name for name, p in net.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}


@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("shape", ["paper", "qwen", "llama"])
@pytest.mark.parametrize("chunked", [False, True])
def test_gradients_are_where_they_should_be(
    shape: str, embeddings: bool, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "WHOLE", 0 if chunked else head.WHOLE)
    also = {"embed.weight"} if embeddings else set()
    net = toy.network(**toy.SHAPES[shape])
    every = {name for name, _ in net.named_parameters()}
    prepare(net, Tuning("qkv", embeddings=embeddings), 0)
    assert gradients(net) == {name for name in every if ".attn_qkv." in name} | also
    net = toy.network(**toy.SHAPES[shape])
    prepare(net, Tuning("lora", embeddings=embeddings), 0)
    layers = {f"blocks.{i}.{layer}" for i in range(2) for layer in LAYERS}
    assert gradients(net) == {layer + UP for layer in layers} | also  # B is zero, and so is the gradient of A
    assert set(trained(net)) == {layer + part for layer in layers for part in (UP, DOWN)} | also


@pytest.mark.parametrize("tuning", [Tuning(), Tuning("qkv"), LORA, Tuning("lora", embeddings=True)])
def test_counts_for_plan(tuning: Tuning) -> None:
    net = toy.network(**toy.SHAPES["qwen"])
    numbers, found = tuned_parameters(net.config, tuning), count(net, tuning)
    prepare(net, tuning, 0)
    assert found[0] == numbers.trained == sum(p.numel() for p in trained(net).values())
    assert numbers.every == sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("shape", toy.SHAPES)
def test_merged_equals_unmerged(shape: str) -> None:
    """All logits, the selected rows of the last block, and the losses of packed passes."""
    net, merged = adapted(**toy.SHAPES[shape])
    x, position = toy.text(3), torch.arange(toy.LENGTH)[None]
    seen = causal(toy.LENGTH)
    close(net(x, position, seen), merged(x, position, seen))
    for rows in (Rows(slice(2, 5)), Rows(slice(1, 7), torch.tensor([0, 3, 4, 11, 17]))):
        close(net(x, position, seen, out=rows), merged(x, position, seen, out=rows))
    plain = copy.deepcopy(merged)
    assert not torch.allclose(net(x, position, seen), toy.network(**toy.SHAPES[shape])(x, position, seen))
    for loss in ("two_term", "any_order"):
        system = toy.make("esolm", 6, alpha_0=0.5, loss=loss)
        both = [toy.values(system, each, toy.text(4), Randomness(0, 0, 4), True) for each in (net, plain)]
        for name in both[0]:
            close(both[0][name], both[1][name])


@pytest.mark.parametrize("shape", ["paper", "qwen"])
def test_folding_merges(shape: str) -> None:
    net, merged = adapted(**toy.SHAPES[shape])
    x, position, seen = toy.text(3), torch.arange(toy.LENGTH)[None], causal(toy.LENGTH)
    with torch.no_grad():
        close(fold(net)(x, position, seen), merged(x, position, seen))
    assert any(name.endswith(DOWN) for name in net.state_dict())  # the network itself keeps its adapters


def test_cached_samples_are_those_of_the_merged_network() -> None:
    net, merged = adapted(dtype=torch.float64, **toy.SHAPES["llama"])
    system = toy.make("esolm", 6, alpha_0=0.5)
    drawn = []
    for each in (net, merged):
        x, given = torch.zeros(3, toy.LENGTH, dtype=torch.long), torch.zeros(3, toy.LENGTH, dtype=torch.bool)
        request, rng = toy.request(x, given, ~given), Randomness(5, 0, 3)
        with torch.inference_mode():
            steps = list(system.sample(each, request, system.plan(request, rng), rng))
        drawn.append([(step.position.tolist(), step.token.tolist()) for step in steps])
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) > 1


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}, {"lora_bias": True}])
def test_a_part_of_the_outputs_of_any_lora_layer(options: dict[str, Any]) -> None:
    """Also of kinds of adapters that others add with peft, merged and disabled ones."""
    from peft import LoraConfig, inject_adapter_in_model

    net = nn.Sequential(nn.Linear(6, 10)).double()
    config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False, **options)
    inject_adapter_in_model(config, net)
    layer: Any = net[0]
    x, rows = torch.randn(4, 6, dtype=torch.float64), slice(3, 8)
    close(some_outputs(layer, x, rows), layer(x)[..., rows])
    close(without_adapters(layer)(x), layer(x))
    if not options:
        layer.enable_adapters(False)
        close(some_outputs(layer, x, rows), layer.base_layer(x)[..., rows])
        close(without_adapters(layer)(x), layer(x))
        layer.enable_adapters(True)
    expected = layer(x)
    layer.merge()
    close(some_outputs(layer, x, rows), expected[..., rows])
    close(without_adapters(layer)(x), expected)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a model to tune, and a LoRA run of it."""
    home = tmp_path_factory.mktemp("tuning")
    data = tiny.make_data(home / "data")
    assert cli.main(tiny.command(data, home / "first", "--steps=4", "--net.init=gpt2", "--net.tied=true")) == 0
    assert cli.main(["export", str(home / "first"), str(home / "base")]) == 0
    assert cli.main(command(home, home / "lora", "lora", *SMALL)) == 0
    return home


def command(home: Path, run: Path, parts: str, *more: str, init: str = "base") -> list[str]:
    words = tiny.command(home / "data", run, f"--init={home / init}", f"--tuning.parts={parts}", *more)
    return [word for word in words if word.partition("=")[0] not in NET]


@pytest.mark.parametrize("options", [("qkv",), ("lora", "--tuning.dropout=0.1", "--tuning.embeddings=true", *SMALL)])
def test_resuming_is_exact(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple) -> None:
    assert cli.main(command(home, tmp_path / "whole", *options)) == 0
    with monkeypatch.context() as patch:
        tiny.interrupt_after(patch, 6)
        assert cli.main(command(home, tmp_path / "run", *options)) == 130
    assert cli.main(command(home, tmp_path / "run", *options)) == 0
    tiny.assert_same(tmp_path / "run", tmp_path / "whole")
    base, after = read_model(home / "base").net.state_dict(), tiny.outcome(tmp_path / "run")[0]
    plain = {name.replace(".base_layer.", "."): tensor for name, tensor in after.items()}
    moved = "embed." if options[0] == "lora" else "attn_qkv."
    for name, tensor in base.items():
        same = [torch.equal(tensor, plain[f"{stem}/{name}"]) for stem in ("model", "ema")]
        assert same == [moved not in name] * 2, name
    moments = {name.partition("/")[2].rpartition("/")[0] for name in after if name.startswith("optimizer/")}
    assert all("lora_" in n or n == "embed.weight" or (options[0] == "qkv" and "attn_qkv" in n) for n in moments)


def test_it_resumes_when_the_model_is_gone(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["export", str(home / "first"), str(tmp_path / "base")]) == 0
    with monkeypatch.context() as patch:
        tiny.interrupt_after(patch, 6)
        assert cli.main(command(home, tmp_path / "run", "lora", *SMALL, f"--init={tmp_path / 'base'}")) == 130
    (tmp_path / "base").rename(tmp_path / "away")
    assert cli.main(command(home, tmp_path / "run", "lora", *SMALL, f"--init={tmp_path / 'base'}")) == 0
    tiny.assert_same(tmp_path / "run", home / "lora")


def test_other_options_are_another_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tiny.contents(home / "lora")
    for options in (("qkv",), ("lora", "--tuning.rank=4", "--tuning.alpha=6")):
        assert cli.main(command(home, home / "lora", *options)) == 2
        assert "tuning." in capsys.readouterr().err
    assert tiny.contents(home / "lora") == before


def test_a_run_from_before_an_option_existed_resumes(home: Path, tmp_path: Path) -> None:
    import yaml

    words = tiny.command(home / "data", tmp_path / "run", "--steps=4")
    assert cli.main(words) == 0
    path = tmp_path / "run" / "config.yaml"
    config = yaml.safe_load(path.read_text())
    del config["tuning"], config["adapter"], config["validation"]["alpha_0"]
    path.write_text(yaml.safe_dump(config))
    assert cli.main([*words, "--steps=6"]) == 0


def test_a_lora_run_loads_merged_and_exports(home: Path, tmp_path: Path) -> None:
    """The merged model equals the network with adapters, sampled or exported, and training goes on from either."""
    last = checkpoint.latest(home / "lora" / "checkpoints")
    assert last is not None
    net = Denoiser(read_model(home / "base").net.config)
    prepare(net, LORA, 0)
    net.load_state_dict(checkpoint.load(last, "ema"))
    lm = esolm.load(home / "lora", which="last")
    x = torch.randint(97, 105, (3, tiny.LENGTH))
    with torch.no_grad():
        found, expected = (lm.system.logits(each, Batch(x)) for each in (lm.net, net.eval()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found, lm.system.logits(read_model(home / "base").net, Batch(x)))
    assert cli.main(["export", str(home / "lora"), str(tmp_path / "out"), "--which", "last"]) == 0
    assert esolm.load(tmp_path / "out").sample(seed=1).tokens == lm.sample(seed=1).tokens
    assert cli.main(command(home, tmp_path / "more", "qkv", "--steps=1", init="lora")) == 0


@pytest.mark.parametrize("embeddings", [False, True])
def test_adapter_folders(home: Path, tmp_path: Path, embeddings: bool) -> None:
    """An adapter is written, merged by esolm and by peft, and trained on."""
    import peft
    from transformers import AutoModelForMaskedLM

    import esolm.interop.hf

    run, folder, more = home / "lora", tmp_path / "adapter", SMALL
    if embeddings:
        run, more = tmp_path / "run", (*SMALL, "--tuning.embeddings=true")
        assert cli.main(command(home, run, "lora", *more)) == 0
    assert cli.main(["export", str(run), str(folder), "--only_adapter", "true", "--which", "last"]) == 0
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(home / "base")
    lm = esolm.load(run, which="last")
    assert cli.main(["export", str(home / "base"), str(tmp_path / "merged"), "--adapter", str(folder)]) == 0
    merged, expected = (each.net.state_dict() for each in (esolm.load(tmp_path / "merged"), lm))
    assert all(torch.equal(merged[name], expected[name]) for name in expected)

    wrapped = peft.PeftModel.from_pretrained(AutoModelForMaskedLM.from_pretrained(home / "base"), folder).eval()
    x = torch.randint(97, 105, (2, tiny.LENGTH))
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x).logits, lm.system.logits(lm.net, Batch(x)), rtol=1e-5, atol=1e-5)

    still = ("--optim.lr=0", "--steps=1", f"--adapter={folder}")
    for name, options in {"lora": ("lora", *more), "all": ("all",)}.items():
        assert cli.main(command(home, tmp_path / name, *options, *still)) == 0
        same = esolm.load(tmp_path / name, which="last").net.state_dict()
        assert all(torch.equal(same[each], expected[each]) for each in expected)


def test_an_adapter_that_peft_trained(home: Path, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForMaskedLM

    import esolm.interop.hf

    base = AutoModelForMaskedLM.from_pretrained(home / "base")
    config = peft.LoraConfig(r=2, use_rslora=True, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(base, config).eval()
    x = torch.randint(97, 105, (2, tiny.LENGTH))
    loss = model(input_ids=x, labels=x).loss
    loss.backward()
    with torch.no_grad():
        expected = model(x).logits
    model.save_pretrained(tmp_path / "adapter")
    lm = esolm.load(home / "base")
    net = lm.net
    assert isinstance(net, Denoiser)
    adapters.apply(net, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(lm.system.logits(net, Batch(x)), expected, rtol=1e-4, atol=1e-4)


def test_what_is_refused(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(argv: list[str], *words: str) -> None:
        capsys.readouterr()
        assert cli.main(argv) == 2
        said = capsys.readouterr().err
        assert all(word in said for word in words), said

    run, adapter = tmp_path / "run", tmp_path / "adapter"
    fails(tiny.command(home / "data", run, "--tuning.parts=lora"), "--init")
    fails(tiny.command(home / "data", run, f"--adapter={adapter}"), "--init")
    fails(command(home, run, "lora", f"--adapter={adapter}"), "adapter_config.json")
    fails(["export", str(home / "first"), str(adapter), "--only_adapter", "true"], "tuning.parts lora")
    fails(["export", str(home / "base"), str(adapter), "--only_adapter", "true"], "tuning.parts lora")
    assert not adapter.exists()
    assert cli.main(["export", str(home / "lora"), str(adapter), "--only_adapter", "true"]) == 0
    fails(["export", str(home / "lora"), str(adapter), "--only_adapter", "true"], "exists")
    assert cli.main(["export", str(home / "lora"), str(adapter), "--only_adapter", "true", "--force"]) == 0
    fails(command(home, run, "lora", f"--adapter={adapter}"), "--tuning.rank 3", "--tuning.alpha 6")
    fails(["export", "stories", str(tmp_path / "out"), "--adapter", str(adapter)], "another network")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    fails(["export", str(home / "base"), str(tmp_path / "out"), "--adapter", str(adapter)], "use_dora")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "peft" else find(name, *more))
    fails(command(home, run, "lora"), "esolm[lora]")
    assert not run.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [
    {"parts": "some"}, {"parts": "lora", "rank": 0}, {"parts": "lora", "alpha": 0.0}, {"parts": "lora", "dropout": 1.0},
    {"rank": 8}, {"parts": "qkv", "alpha": 8.0}, {"embeddings": True},
])  # fmt: skip
def test_wrong_options_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tuning"):
        Tuning(**wrong)
    with pytest.raises(ValueError, match="tuning"):
        RunConfig.preset("adapt", tuning=wrong)


def test_lora_learns() -> None:
    net, x = toy.network(**toy.SHAPES["llama"]), toy.text(4)
    prepare(net, Tuning("lora", rank=4, alpha=8.0), 0)
    optimizer = torch.optim.AdamW(trained(net).values(), lr=0.02)
    losses = []
    for _ in range(60):
        rng, system = Randomness(0, 0, 4), toy.make("esolm", 6, alpha_0=0.5, loss="any_order")
        loss = total(system.terms(net, Batch(x), rng, True), system.counts(torch.ones_like(x, dtype=torch.bool), rng))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
