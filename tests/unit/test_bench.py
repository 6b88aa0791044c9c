"""The benchmarks: reference implementations give the same results, and the outputs are complete. Nothing is timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from esolm import cli
from esolm.bench import draw, latency, llama, points, precision, sample, serve, train
from esolm.bench.naive import Naive, multinomial, sorted_nucleus
from esolm.bench.plain import PlainDenoiser
from esolm.core.batch import Batch
from esolm.core.draw import Draw
from esolm.core.randomness import Randomness
from esolm.core.randomness import fold as fold_key
from esolm.core.visibility import by_order
from esolm.net.denoiser import Denoiser, DenoiserConfig, Rows
from esolm.net.fold import fold
from esolm.net.native.library import status
from esolm.systems import find
from esolm.training.cost import count
from support import toy
from support.runs import make_run

B, L, V = 2, 8, 7


def test_authors_implementation_gives_the_same_logits() -> None:
    net = toy.network()
    nets = Naive(net), fold(net)
    caches = [each.new_cache(B, L + 1) for each in nets]
    assert caches[0].keys[0].transpose(1, 2).is_contiguous()
    tokens, position = toy.text(B), toy.permutations(B, L)
    for i in range(L - 1):
        rank = torch.arange(i, i + 2)[None]
        call = tokens[:, i : i + 2], position[:, i : i + 2], by_order(rank)
        one, two = (each(*call, cache=c, out=Rows(slice(1, 2))) for each, c in zip(nets, caches, strict=True))
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)
        for cache in caches:
            cache.commit(1)


def test_reference_draws_have_the_same_distribution() -> None:
    """20,000 draws of five tokens: frequencies have a deviation below 0.0036, and 0.02 is more than five of them."""
    logits = torch.tensor([[2.0, 1.0, 0.0, 1.0, -1.0, 9.0]]).expand(20000, -1)
    for found, how in ((multinomial(logits, 5), Draw()), (sorted_nucleus(logits, 5, 0.5), Draw(top_p=0.5))):
        frequency = found.bincount(minlength=6) / len(found)
        torch.testing.assert_close(frequency, how.probabilities(logits[:1], 5)[0], rtol=0, atol=0.02)


@pytest.mark.usefixtures("bf16")
@pytest.mark.parametrize("low", ["float32", "bf16", "int8"])
@pytest.mark.parametrize("shape", ["paper", "llama"])
def test_bytes_read_per_step_are_those_of_weights_and_cache(low: str, shape: str) -> None:
    net = fold(latency.network(3, 64, 50) if shape == "paper" else toy.network(**toy.SHAPES[shape]), low)
    linears = [net.head]
    for block in net.blocks:
        linears += [*block.project, block.attn_out, block.mlp_up, block.mlp_down]
    cache = net.new_cache(B, 20)
    weights, cached = latency.bytes_read(net.config, low, 20, B)
    assert weights == sum(linear.weight.numel() * linear.weight.element_size() for linear in linears)
    assert cached == sum(t.numel() * t.element_size() for t in (*cache.keys, *cache.values))


def test_cached_step_can_be_repeated() -> None:
    net = fold(latency.network(2, 64, 50))
    step = latency.cached_step(net, 12, 1, 3, B)
    first = step(0)
    assert first.shape == (B, 3, 50)
    assert torch.equal(step(1), first)


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_step_has_the_same_logits(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler == "eager":
        compiled = torch.compile
        monkeypatch.setattr(torch, "compile", lambda net, dynamic, options: compiled(net, backend="eager"))
    found = []
    with torch.inference_mode():
        net = latency.network(1, 64, 50)
        for make in (latency.cached_step, latency.frozen_step):
            torch.manual_seed(0)  # the same keys and values
            step = make(net, 12, 1, 1) if make is latency.cached_step else make(net, 12, 1, torch.float32)
            found += [step(0), step(1)]
    for logits in found[1:]:
        torch.testing.assert_close(logits, found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compilation_failure_reports_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(torch.nn.Module):
        def __init__(self, net) -> None:
            super().__init__()
            self.config, self.new_cache = net.config, net.new_cache

        def forward(self, *given, **more):
            raise RuntimeError("no C++ compiler\nand a long trace")

    monkeypatch.setattr(torch, "compile", lambda net, **options: Broken(net))
    with pytest.raises(ValueError, match=r"no C\+\+ compiler\..* --compiled"):
        latency.run(precisions=["float32"], layers=1, width=64, vocab_size=50, context=8, compiled=True)


def test_gpt2_step_reads_the_same_context_every_time() -> None:
    pytest.importorskip("transformers")
    step = latency.gpt2_step(2, 64, 50, 12, torch.float32)
    with torch.inference_mode():
        first = step(0)
        for i in range(12):
            torch.testing.assert_close(step(i), first)


@pytest.mark.parametrize("name", sample.SYSTEMS)
def test_sample_continues_after_the_given_tokens(name: str) -> None:
    """Every timed step feeds the same rows as that step of a complete sample."""
    net, given, length = fold(latency.network(1, 64, 50)), 32, 128
    repeat = sample.SYSTEMS[name].repeat
    fed: list[tuple[int, int]] = []

    class Spy:
        config, device, dtype = net.config, net.device, net.dtype

        def __call__(self, tokens, position, visibility, cache=None, **rest):
            fed.append((0 if cache is None else cache.extent, tokens.shape[1]))
            return net(tokens, position, visibility, cache=cache, **rest)

    sampling = sample.Sampling(Spy(), net.new_cache(B, length), name, length, given, B)
    for i in range(3):
        sampling.ready(i)
        assert len(fed) == i * min(repeat, 2)  # skipped steps do not call the network
        for _ in range(min(repeat, 2)):
            sampling.step(i)
    if name == sample.MDLM:
        assert fed == [(0, length)] * 3
    elif name == "ar":
        assert fed == [(given + 1 + i, 1) for i in range(3)]
    elif name == sample.ESOLM:
        assert fed == [(given + i, 2) for i in range(3)]
    elif name == "esolm, 16 tokens a step":
        assert fed == [(given + 16 * i, 32) for i in range(3)]
    else:  # the first pass of a block also commits the block before it
        at = [given + i * repeat for i in range(4)]
        assert fed == [pair for i in range(3) for pair in ((at[i], 2 * repeat), (at[i + 1], repeat))]


def test_too_short_samples_are_refused() -> None:
    net = fold(latency.network(1, 64, 50))
    sampling = sample.Sampling(net, net.new_cache(1, 17), "ar", 16, 13, 1)
    sampling.ready(0)
    for i in range(2):
        sampling.step(i)
    with pytest.raises(AssertionError, match="ended"):
        sampling.step(2)
    with pytest.raises(ValueError, match="length 128 "):
        sample.run(lengths=[128])


def test_sample_time_is_the_weighted_mean_of_step_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake clock: 10 seconds for the first step of a block and 1 for any other, equal at all places."""
    monkeypatch.setattr(
        sample, "interleaved",
        lambda cases, rounds, before: {case: [10.0 if case.endswith("first") else 1.0] * rounds for case in cases},
    )  # fmt: skip
    nets = {"float32": fold(latency.network(1, 64, 50))}
    found = sample.cached(nets, {}, 256, 1, 2, 3)
    expected = {
        "esolm": 10.0,
        "esolm, 16 tokens a step": 10 / 16,
        "ar": 10.0,
        "bd3lm, block 4": 13 / 4,
        "bd3lm, block 16": 25 / 16,
    }
    assert found == {(name, "float32"): [256 * seconds] * 3 for name, seconds in expected.items()}


SMALL = ("--vocab_size=50", "--rounds=2")


@pytest.mark.usefixtures("bf16")
@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["draw", *SMALL, "--rows=[1,3]"], {"cases"}),
        (["latency", *SMALL, "--layers=1", "--width=64", "--context=8", "--contexts=[8]", "--parallelism=[1,2]"],
         {"steps", "by_context", "by_parallelism", "gemm_gflops", "context"}),
        (["sample", *SMALL, "--layers=1", "--width=64", "--lengths=[256]", "--batches=[1,2]", "--places=1",
          "--mdlm_tokens=256"], {"method", "cases"}),
    ],
    ids=lambda v: v[0] if isinstance(v, list) else "",
)  # fmt: skip
def test_benchmarks_write_their_results(
    words: list[str], keys: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(llama, "installed", lambda: False)
    target, picture = tmp_path / "found.json", tmp_path / "found.svg"
    if words[0] == "latency":
        pytest.importorskip("matplotlib")
        words = [*words, "--plot", str(picture)]
    assert cli.main(["bench", *words, "--out", str(target)]) == 0
    found = json.loads(target.read_text())
    assert found.keys() == {"bench", "options", "machine"} | keys
    assert picture.exists() == (words[0] == "latency")
    if words[0] == "sample":
        assert [set(case["systems"]) - {"mdlm"} for case in found["cases"]] == [sample.SYSTEMS.keys() - {"mdlm"}] * 2
        assert ["mdlm" in case["systems"] for case in found["cases"]] == [True, False]


@pytest.mark.parametrize("precision", [None, "float32"])
def test_points_are_timed_at_the_precision_of_the_option(
    precision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None leaves the models as they were trained; one model per run, whatever the number of points."""
    loaded = []
    load = points.load
    monkeypatch.setattr(points, "load", lambda *given, **options: loaded.append(options) or load(*given, **options))
    run, out = make_run(tmp_path / "run"), tmp_path / "found.json"
    cases = [f"{run} num_steps=2 top_p=0.9", f"{run} sampler=first_hitting"]
    words = ["--points", str(cases), "--rounds=2", "--batch=3", *([f"--precision={precision}"] if precision else [])]
    assert cli.main(["bench", "points", *words, "--out", str(out)]) == 0
    assert loaded == [{"which": "best", "precision": precision}]
    measured = json.loads(out.read_text())
    found = measured["points"]
    assert (measured["engine"] == status()) == (precision is not None)
    assert [record["point"] for record in found] == cases
    assert [record["passes"] for record in found][1] == 8
    for record in found:
        low, high = record["quartiles"]
        assert 0 < low <= record["seconds_per_sample"] <= high


@pytest.mark.parametrize("words", [["--json"], ["--json", "-"]])
def test_json_prints_json_only(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` is a flag as in the other commands; `--json -` is what committed commands say."""
    case = ["bench", "draw", *SMALL, "--rows=[1]"]
    assert cli.main([*case, *words, "--out", str(tmp_path / "found.json")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "found.json").read_text())
    assert "json" not in printed["options"]
    assert "out" not in printed["options"]


def test_json_with_a_file_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in earlier versions; the table is still printed."""
    target = tmp_path / "new" / "found.json"
    assert cli.main(["bench", "draw", *SMALL, "--rows=[1]", "--json", str(target)]) == 0
    assert json.loads(target.read_text())["bench"] == "draw"
    assert "top-p" in capsys.readouterr().out


def test_unwritable_output_is_refused_before_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draw, "run", lambda **options: pytest.fail("the benchmark ran"))
    assert cli.main(["bench", "draw", "--out", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_unknown_benchmark_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "speling"]) == 2
    message = capsys.readouterr().err
    assert "'speling'" in message
    assert "latency" in message


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="'half'"):
        draw.run(dtype="half")


def test_unexpected_arguments_print_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "precision", "runs/mine"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_kl_and_nats_of_low_precision() -> None:
    """Against sums by hand, and zero for the same network; a token of probability zero contributes nothing."""
    exact = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).double().log()
    low = torch.tensor([[0.25, 0.5, 0.25, 0.0]]).double().log()
    kl, nats = precision.compare(exact, low, torch.tensor([1]))
    torch.testing.assert_close(kl, torch.tensor([0.25]).double() * torch.tensor(2.0).double().log())
    torch.testing.assert_close(nats, torch.tensor([2.0]).double().log())
    net, x, sigma = toy.network(), toy.text(1), toy.permutations(1, L)
    for label, name, options in toy.variants():
        system = toy.make(name, V - 1, **options)
        if not system.any_order:
            continue
        found, target = precision.log_probabilities(net, system, x, sigma)
        low, _ = precision.log_probabilities(fold(net), system, x, sigma)
        kl, nats = precision.compare(found, low, target)
        assert kl.abs().max() < 1e-9, label
        expected = system.order_nats(net, Batch(x), sigma)[0]
        torch.testing.assert_close(nats.sort().values, expected.sort().values, rtol=1e-9, atol=1e-9, msg=label)


@pytest.mark.parametrize("name", train.SYSTEMS)
def test_plain_denoiser_has_the_same_loss_and_gradient(name: str) -> None:
    kind, options = train.SYSTEMS[name]
    config = DenoiserConfig(V, 32, 2, 16, 2, 4, dropout=0.0)
    net, twin = Denoiser(config).double(), PlainDenoiser(config).double()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    twin.load_state_dict(net.state_dict())
    system, x = find(kind)(mask_id=V - 1, **options), torch.randint(0, V - 1, (4, 32))
    found = []
    for each in (net, twin):
        terms = system.terms(each, Batch(x), Randomness(1, 0, 4), True)
        torch.stack([term.nats.sum() for term in terms]).sum().backward()
        found.append([*(term.nats for term in terms), *(p.grad for p in each.parameters() if p.grad is not None)])
    assert len(found[0]) > 10
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)


def test_padding_counts_rows_neither_attended_nor_scored() -> None:
    """By hand for Eso-LM: the z half has the length of its longest row, rounded up to 8, and only masks are scored."""
    x, system = torch.randint(0, V - 1, (8, 64)), find("esolm")(mask_id=V - 1, alpha_0=0.5)
    calls = []

    class Spy(torch.nn.Module):
        def forward(self, tokens, position, visibility, *, out, **rest):
            calls.append((tokens.numel(), visibility, out))
            return torch.zeros(len(out.index))

    system.terms(Spy(), Batch(x), Randomness(fold_key(1, 0), 0, 8), True)
    ((fed, packed, out),) = calls
    two = packed.parts[1]
    assert two.visibility.num_z % 8 == 0
    masks = int((out.index >= packed.parts[0].batch * 64).sum())
    work = count(system, x, 1)
    assert work.rows == fed
    assert work.padding == two.batch * two.visibility.num_z - masks > 0
    for name in ("mdlm", "bd3lm, block 16", "esolm, alpha_0 1", "esolm any_order, alpha_0 0.5"):
        kind, options = train.SYSTEMS[name]
        assert count(find(kind)(mask_id=V - 1, **options), x, 1).padding == 0


def test_serving_reports_every_method_and_the_overhead(tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    small = [
        "--layers",
        "1",
        "--width",
        "64",
        "--vocab_size",
        "50",
        "--requests",
        "3",
        "--prompt",
        "2",
        "--tokens",
        "4",
    ]
    words = ["bench", "serve", *small, "--batch", "2", "--rounds", "1", "--loads", "[0.5,50]", "--out", str(out)]
    assert cli.main(words) == 0
    found = json.loads(out.read_text())
    methods = [serve.ONE, serve.STATIC, serve.CONTINUOUS]
    assert [(r["name"], r["load"]) for r in found["loads"]] == [(name, load) for load in (0.5, 50) for name in methods]
    for record in found["loads"]:
        assert 0 < record["first_p50"] <= record["p50"] <= record["p99"]
        assert record["tokens_per_second"] > 0
    assert set(found["overhead"]) >= {serve.SAMPLE, serve.ENGINE}
    assert found["overhead"][serve.SAMPLE]["over_sample"] == 1
    assert found["gain_of_a_batched_step"]["times"] > 0


def test_throughput_at_equal_latency() -> None:
    def record(name: str, load: float, speed: float, p99: float) -> dict[str, object]:
        return {"name": name, "load": load, "tokens_per_second": speed, "p99": p99}

    ones = [record(serve.ONE, 0.5, 10, 2.0), record(serve.ONE, 0.8, 16, 4.0), record(serve.ONE, 2, 20, 50.0)]
    more = [
        record(serve.CONTINUOUS, 2, 40, 3.0),
        record(serve.CONTINUOUS, 4, 56, 3.9),
        record(serve.CONTINUOUS, 8, 60, 9.0),
    ]
    found = serve.at_equal_p99([*ones, *more])
    assert found == {"load_of_one": 0.8, "p99_of_one": 4.0, "load": 4, "p99": 3.9, "over": 3.5}
    assert serve.at_equal_p99(ones[2:]) is None
    assert serve.at_equal_p99([*ones, record(serve.CONTINUOUS, 1, 9, 7.0)]) is None


def test_requests_arrive_as_a_poisson_process_and_are_the_same_for_every_method() -> None:
    """The mean of 2000 gaps of mean 1/4 has a deviation of 0.0056, and 0.03 is more than five of them."""
    lm = serve.random_model(1, 64, 50, 24, "float32")
    found = serve.jobs(lm, 7, 2001, 4.0, 2, 8)
    assert found == serve.jobs(lm, 7, 2001, 4.0, 2, 8)
    assert abs(found[-1].arrival / 2000 - 0.25) < 0.03
    assert {job.new for job in found} == set(range(4, 13))
