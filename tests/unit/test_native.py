"""The native step gives the logits, keys and values of the folded network in PyTorch, for every kind of cached call.

Shapes: B batch, N new slots, C capacity, L length, V vocabulary.
"""

from __future__ import annotations

import copy
import os
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esolm.core.batch import Batch
from esolm.core.randomness import Randomness
from esolm.core.terms import token_nats
from esolm.core.visibility import HIDDEN, Visibility, by_order, causal
from esolm.model import load
from esolm.net.cache import KVCache
from esolm.net.denoiser import Rows
from esolm.net.fold import Folded, Int8Linear, fold
from esolm.net.head import Score
from esolm.net.native import engine, library
from esolm.net.native.engine import KINDS, Native, native_fold
from esolm.sampling.request import Request
from support import toy
from support.naive import Recording

try:
    library.library()
except library.Unavailable as error:
    pytest.skip(str(error), allow_module_level=True)

B, L, V = 3, 8, 7
BOUNDS = {"float32": 1e-5, "bf16": 0.03, "int8": 0.03, "int4": 0.03}
"""Norm of the difference from PyTorch's folded network over the norm of its logits: both have the same rounded weights,
and differ in that PyTorch rounds activations to bf16. The toy network's attention is strong, which magnifies this."""


@pytest.fixture(params=[1, 2], ids=["avx2", "avx512"], autouse=True)
def instructions(request: pytest.FixtureRequest) -> Any:
    """Both instruction sets, if the CPU has them."""
    if library.use(request.param) != request.param:
        pytest.skip("the CPU has no AVX-512 with VNNI")
    yield request.param
    library.use(2)


class Both:
    """A network that runs every call on both engines, on equal caches, and compares what they return and write."""

    def __init__(self, native: Native, torch_net: Folded, bound: float) -> None:
        self.native, self.torch_net, self.bound = native, torch_net, bound
        self.config, self.device, self.dtype = native.config, native.device, native.dtype
        self.new_cache = native.new_cache
        self.calls = 0

    def __call__(self, *call: Any, cache: KVCache | None = None, **rest: Any) -> Tensor:
        twin = copy.deepcopy(cache)
        found, expected = self.native(*call, cache=cache, **rest), self.torch_net(*call, cache=twin, **rest)
        close(found, expected, self.bound)
        for one, two in zip((*cache.keys, *cache.values), (*twin.keys, *twin.values)) if cache and twin else ():
            close(one, two, self.bound)
        self.calls += cache is not None
        return found


def close(found: Tensor, expected: Tensor, bound: float) -> None:
    assert found.shape == expected.shape
    difference = (found.float() - expected.float()).norm()
    size = max(
        expected.float().norm().item(), 0.1 * expected.numel() ** 0.5
    )  # sums that cancel keep the error of their terms
    assert difference <= bound * size, f"{difference / size:.1e}"


def both(precision: str = "float32", threads: int | None = None, **sizes: Any) -> Both:
    net = toy.network(**{"dtype": torch.float32, **sizes})
    return Both(native_fold(net, precision, threads), fold(net, precision), BOUNDS[precision])


def request(prompts: list[int], **options: Any) -> Request:
    given = torch.arange(L) < torch.tensor(prompts)[:, None]
    return toy.request(toy.text(len(prompts)), given, torch.ones_like(given), **options)


def sample(net: Any, system: Any, asked: Request, seed: int = 3) -> list[Tensor]:
    rng = Randomness(seed, 0, len(asked.x))
    with torch.inference_mode():
        return [step.token for step in system.sample(net, asked, system.plan(asked, rng), rng)]


@pytest.mark.parametrize("shape", [name for name, shape in toy.SHAPES.items() if shape])
@pytest.mark.parametrize("precision", list(KINDS))
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ar", {}),
        ("esolm", {"alpha_0": 0.5}),
        ("esolm", {"alpha_0": 0.5, "loss": "any_order", "query": "shift"}),
        ("bd3lm", {"block_size": 4}),
    ],
    ids=["ar", "esolm", "esolm-any-shift", "bd3lm"],
)
def test_every_pass_of_every_family(name: str, options: dict, precision: str, shape: str) -> None:
    sizes = {"width": 32, "mlp_ratio": 2, "head_width": 32, "mlp_width": 64}  # norms of a few numbers magnify rounding
    sizes["length"] = L + 1  # shifted queries have a start token
    net = both(precision, **{**toy.SHAPES[shape], **sizes})
    sample(net, toy.make(name, V - 1, **options), request([1, 3, 2]))
    assert net.calls > 0


@pytest.mark.parametrize(
    ("prompts", "precision"),
    [([0, 0, 0], "float32"), ([2, 2, 2], "bf16"), ([1, 3, 2], "float32"), ([1, 3, 2], "int8"), ([1, 3, 2], "int4")],
    ids=str,
)
@pytest.mark.parametrize(("label", "name", "options"), toy.untimed(), ids=lambda v: v if isinstance(v, str) else "")
def test_every_pass_of_every_system(label: str, name: str, options: dict, prompts: list[int], precision: str) -> None:
    net = both(precision)
    sample(net, toy.make(name, V - 1, **options), request(prompts))
    assert (net.calls > 0) == (name not in ("mdlm", "diffusionbert") and label != "esolm-A-1")


@pytest.mark.parametrize(
    ("prompts", "precision"),
    [([1, 1], "float32"), ([0, 5], "float32"), ([7, 2], "bf16"), ([1, 4], "int8"), ([0, 5], "int4")],
    ids=str,
)
@pytest.mark.parametrize(
    "sampler",
    [
        {"sampler": "speculative"},
        {"sampler": "speculative", "window": 3},
        {"sampler": "block", "parallelism": 3},
        {"sampler": "ancestral", "num_steps": 3},
        {"sampler": "order", "order": [3, 1, 0, 2, 7, 6, 5, 4]},
        {"sampler": "left_to_right", "given_order": "random"},
    ],
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_every_sampler(sampler: dict[str, Any], prompts: list[int], precision: str) -> None:
    options = dict(sampler)
    order = options.pop("order", None)
    asked = request(prompts, order=None if order is None else torch.tensor([order]), **options)
    net = both(precision)
    sample(net, toy.make("esolm", V - 1, alpha_0=1.0), asked)
    assert net.calls > 0


def test_padded_rows_and_hidden_masks() -> None:
    """Sequences of different lengths in every system, and masks that do not see each other."""
    valid = toy.padding(B, L)
    asked = toy.request(toy.text(B), torch.zeros_like(valid), valid)
    for name, options in (("bd3lm", {"block_size": 4}), ("esolm", {"loss": "any_order"}), ("ar", {})):
        net = both()
        sample(net, toy.make(name, V - 1, **options), asked)
        assert net.calls > 0


@st.composite
def calls(draw: Any, head_widths: tuple[int, ...]) -> tuple[dict[str, int], int, list[list[int]], int]:
    """Sizes of a network, a batch, and how many slots each example commits in each pass."""
    heads = draw(st.integers(1, 3))
    sizes = {
        "layers": draw(st.integers(1, 2)),
        "heads": heads,
        "width": heads * draw(st.sampled_from(head_widths)),
        "mlp_ratio": draw(st.integers(1, 3)),
        "vocab_size": draw(st.integers(2, 70)),
        "seed": draw(st.integers(0, 99)),
    }
    batch = draw(st.integers(1, 4))
    passes = st.lists(st.integers(0, 3), min_size=batch, max_size=batch)
    return sizes, batch, draw(st.lists(passes, min_size=1, max_size=4)), draw(st.integers(0, 2**31))


@settings(max_examples=40)
@given(case=calls((2, 4, 6, 18, 32, 64, 128)))
def test_random_sizes_labels_and_rows(case: tuple[dict[str, int], int, list[list[int]], int]) -> None:
    random_passes("float32", *case)


@pytest.mark.parametrize("precision", [p for p in KINDS if p != "float32"])
@settings(max_examples=15)
@given(case=calls((32, 50, 64)))  # norms of a few numbers magnify every rounding
def test_random_sizes_in_low_precision(precision: str, case: tuple[dict[str, int], int, list[list[int]], int]) -> None:
    random_passes(precision, *case)


def random_passes(precision: str, sizes: dict[str, int], batch: int, passes: list[list[int]], seed: int) -> None:
    net = both(precision, threads=1 + seed % 3, **sizes)
    random = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random)

    cache, longest = net.new_cache(batch, 80), torch.zeros(batch, dtype=torch.long)
    for counts in passes:
        slots = int(numbers(max(counts) or 1, 16, 1))
        one, other = (1 if int(numbers(0, 2, 1)) else batch for _ in range(2))
        hidden = torch.where(numbers(0, 4, one, slots) == 0, HIDDEN, numbers(0, 20, one, slots))
        # A slot always sees itself: what a row that sees nothing gets is not defined.
        own = (torch.arange(slots) + 3 * numbers(0, 2, one, slots)) % slots
        seen = Visibility(hidden, numbers(-1, 20, one, slots), own)
        start = int(numbers(0, slots, 1))
        span = slice(start, int(numbers(start + 1, slots + 1, 1)))
        rows = batch * (span.stop - span.start)
        index = numbers(0, rows, int(numbers(1, 2 * rows + 1, 1))) if int(numbers(0, 2, 1)) else None
        tokens = numbers(0, sizes["vocab_size"], batch, slots)
        net(tokens, numbers(0, 90, other, slots), seen, cache=cache, out=Rows(span, index))
        kept = torch.tensor(counts)
        longest = longest + kept
        even = len(set(counts)) == 1
        cache.commit(counts[0]) if even else cache.commit(kept, max(counts), int(longest.max()))


def fixed_call(batch: int = B, slots: int = 3) -> tuple[Tensor, Tensor, Visibility]:
    return toy.text(batch, slots), torch.arange(slots).expand(batch, -1), causal(slots)


@pytest.mark.parametrize("precision", KINDS)
def test_a_prompt_of_many_rows(precision: str) -> None:
    net = both(precision, threads=2, length=64, width=64)
    net.native.many = 128
    for slots in (9, 40, 64):
        cache = net.new_cache(2, 64)
        call = toy.text(2, slots), torch.arange(slots)[None], causal(slots)
        assert net(*call, cache=cache, out=Rows(slice(slots - 1, slots))).shape == (2, 1, V)


@pytest.mark.parametrize("precision", KINDS)
def test_probabilities_in_place_of_tokens(precision: str) -> None:
    net = both(precision)
    tokens, position, seen = fixed_call()
    soft = torch.randn(*tokens.shape, V).softmax(-1)
    net(soft, position, seen, cache=net.new_cache(B, 4))
    hard = torch.nn.functional.one_hot(tokens, V).float()
    found = net.native(hard, position, seen, cache=net.new_cache(B, 4))
    assert torch.equal(found, net.native(tokens, position, seen, cache=net.new_cache(B, 4)))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("number", [0, 3, 65536, 300_001])
def test_reading_leaves_nothing_out(number: int, threads: int) -> None:
    words = torch.randint(-(2**31), 2**31, (number,), dtype=torch.int32)
    found = library.library().esolm_read(words.data_ptr(), 4 * number, threads)
    assert found == int(words.long().sum()) % 2**32


@pytest.mark.parametrize("precision", KINDS)
def test_no_rows_get_logits(precision: str) -> None:
    """Keys and values are written all the same."""
    net = both(precision)
    none = Rows(slice(0, 3), torch.zeros(0, dtype=torch.long))
    assert net(*fixed_call(), cache=net.new_cache(B, 4), out=none).shape == (0, V)
    assert net(*fixed_call(), cache=net.new_cache(B, 4), out=Rows(slice(2, 2))).shape == (B, 0, V)


@pytest.mark.parametrize("precision", KINDS)
def test_an_example_does_not_depend_on_its_batch_or_the_threads(precision: str) -> None:
    """Bit for bit, which PyTorch's products do not promise."""
    net = toy.network(50, dtype=torch.float32, width=128, heads=2)
    tokens, position, seen = toy.text(13, 3, 50), torch.arange(3).expand(13, -1), causal(3)
    results = []
    for threads in (1, 2, 3):
        for some in (slice(0, 1), slice(0, 2), slice(0, 5), slice(0, 13)):
            native = native_fold(net, precision, threads)
            cache = native.new_cache(len(tokens[some]), 8)
            results.append(native(tokens[some], position[some], seen, cache=cache)[0])
    assert all(torch.equal(results[0], other) for other in results)


def test_other_calls_run_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache, with a score, and with many rows; on the same weights."""
    net = toy.network(dtype=torch.float32)
    native, folded = native_fold(net, "float32"), fold(net, "float32")
    monkeypatch.setattr(native, "_step", None)
    call = toy.text(B), torch.arange(L)[None], causal(L)
    for more in ({}, {"score": Score(call[0].flatten(), V - 1)}):
        close(native(*call, **more), folded(*call, **more), 1e-5)
    monkeypatch.setattr(native, "many", 4)
    monkeypatch.setattr(KINDS["float32"], "many", 4)
    close(native(*call, cache=native.new_cache(B, L)), folded(*call), 1e-5)
    with pytest.raises(ValueError, match="time zero"):
        native(*call, time=torch.zeros(1), cache=native.new_cache(B, L))


@pytest.mark.parametrize("precision", KINDS)
@pytest.mark.parametrize("sizes", [(33, 40), (5, 7), (64, 96), (1, 1)], ids=str)
def test_linear(precision: str, sizes: tuple[int, int]) -> None:
    """The packed weights come back as they were rounded, and the product is that of these weights."""
    weight, bias, x = torch.randn(sizes), torch.randn(sizes[0]), torch.randn(30, sizes[1])
    weight[0] = 0
    for gelu in (False, True):
        layer = KINDS[precision](weight, bias, gelu)
        steps = {"float32": 0.0, "bf16": 2**-8, "int8": 0.51 / 127, "int4": 1.01 / 8}  # 8 becomes 7
        assert ((layer.weight() - weight).abs() <= steps[precision] * weight.abs().amax(1, keepdim=True) + 1e-30).all()
        expected = torch.nn.functional.linear(x, layer.weight(), bias)
        expected = torch.nn.functional.gelu(expected, approximate="tanh") if gelu else expected
        for rows in (1, 2, 3, 8, 9, 25, 30):
            close(layer(x[:rows]), expected[:rows], 2e-4)
        twin = layer.twin
        again = KINDS[precision](layer.weight(), bias, gelu)
        assert torch.equal(again.weight(), layer.weight())  # rounding what was rounded changes nothing
        low = x if precision == "float32" else x.bfloat16()
        close(twin(low), expected, 1e-5 if precision == "float32" else 0.02)


def test_int8_weights_are_those_of_pytorch() -> None:
    weight = torch.randn(10, 32)
    other = Int8Linear(weight, None, False)
    assert torch.equal(KINDS["int8"](weight, None, False).weight(), other.weight.float() * other.scale.float()[:, None])


@pytest.mark.parametrize("precision", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(precision: str, bad: float) -> None:
    """So that sampling stops with an error in place of drawing from garbage."""
    net = toy.network(dtype=torch.float32)
    with torch.no_grad():
        net.blocks[0].attn_out.weight[1, 1] = bad
    native = native_fold(net, precision)
    assert not native(*fixed_call(), cache=native.new_cache(B, 4)).isfinite().any()


def hostile() -> dict[str, Any]:
    tokens, position, seen = fixed_call()
    one = torch.ones_like(tokens)
    return {
        "a token behind the vocabulary": ((tokens + V, position, seen), {}),
        "a negative token": ((tokens - V, position, seen), {}),
        "tokens of three dimensions": ((one[..., None], position, seen), {}),
        "probabilities of another vocabulary": ((one[..., None].float(), position, seen), {}),
        "a negative position": ((tokens, position - 1, seen), {}),
        "a position behind all tables": ((tokens, position + 2**40, seen), {}),
        "positions of another shape": ((tokens, position[:, :2], seen), {}),
        "ranks of another shape": ((tokens, position, Visibility(one[:, :2], one, one)), {}),
        "horizons of another batch": ((tokens, position, Visibility(one, one[:2], one)), {}),
        "a span behind the rows": ((tokens, position, seen), {"out": Rows(slice(2, 9))}),
        "a negative span": ((tokens, position, seen), {"out": Rows(slice(-2, 2))}),
        "an index behind the rows": ((tokens, position, seen), {"out": Rows(slice(0, 3), torch.tensor([3 * B]))}),
        "a negative index": ((tokens, position, seen), {"out": Rows(slice(0, 3), torch.tensor([-1]))}),
        "an index of two dimensions": ((tokens, position, seen), {"out": Rows(slice(0, 3), one)}),
        "an index of fractions": ((tokens, position, seen), {"out": Rows(slice(0, 3), torch.ones(2))}),
        "a full cache": ((tokens, position, seen), {"capacity": 2}),
        "a cache for another batch": ((tokens, position, seen), {"batch": 2}),
    }


@pytest.mark.parametrize("name", hostile())
def test_hostile_arguments_raise(name: str) -> None:
    native = native_fold(toy.network(dtype=torch.float32), "float32")
    call, rest = hostile()[name]
    cache = native.new_cache(rest.pop("batch", B), rest.pop("capacity", 8))
    with pytest.raises(ValueError):
        native(*call, cache=cache, **rest)
    assert not any(t.any() for t in (*cache.keys, *cache.values))


def test_caches_of_other_networks_raise() -> None:
    native = native_fold(toy.network(dtype=torch.float32), "float32")
    for other in ({"layers": 3}, {"heads": 1}, {"dtype": torch.float64}, {"width": 32}):
        cache = toy.network(**{"dtype": torch.float32, **other}).new_cache(B, 8)
        with pytest.raises(ValueError):
            native(*fixed_call(), cache=cache)


def test_lengths_that_lie_raise() -> None:
    native = native_fold(toy.network(dtype=torch.float32), "float32")
    cache = native.new_cache(B, 8)
    cache.even, cache.lengths = False, torch.tensor([0, 2**40, 0])
    with pytest.raises(ValueError):
        native(*fixed_call(), cache=cache)


def test_positions_extend_the_table() -> None:
    net = both()
    for position in (2 * L - 1, 2 * L, 5000, 3):
        net(toy.text(1, 1), torch.tensor([[position]]), by_order(torch.zeros(1, 1).long()), cache=net.new_cache(1, 2))


@pytest.fixture(params=[True, False], ids=["openmp", "own threads"])
def threads_of(request: pytest.FixtureRequest) -> Any:
    """PyTorch's threads, and the library's own."""
    if not request.param:
        library.library().esolm_openmp(None, None)
    yield
    library.borrow_threads(library.library())


@pytest.mark.usefixtures("threads_of")
def test_two_models_in_several_threads() -> None:
    nets = [both(precision, threads=2, width=64) for precision in ("float32", "int8")]
    expected = [net(*fixed_call(), cache=net.new_cache(B, 4)) for net in nets]
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            native = nets[number % 2].native
            for _ in range(50):
                assert torch.equal(native(*fixed_call(), cache=native.new_cache(B, 4)), expected[number % 2])
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failed


@pytest.mark.usefixtures("threads_of")
def test_fork_after_use() -> None:
    native = native_fold(toy.network(dtype=torch.float32, width=64), "float32", threads=2)
    expected = native(*fixed_call(), cache=native.new_cache(B, 4))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = int(not torch.equal(native(*fixed_call(), cache=native.new_cache(B, 4)), expected))
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(native(*fixed_call(), cache=native.new_cache(B, 4)), expected)


@pytest.mark.usefixtures("threads_of")
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_threads_share_the_work(precision: str) -> None:
    net = both(precision, threads=4, vocab_size=300, width=64, length=64)
    for slots in (1, 2, 9, 50):
        net(toy.text(2, slots, 300), torch.arange(slots)[None], causal(slots), cache=net.new_cache(2, 64))


def test_it_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    net = toy.network(dtype=torch.float32)
    with pytest.raises(ValueError, match="int3"):
        native_fold(net, "int3")
    library.library.cache_clear()
    try:
        for content in (None, b"not a library"):
            path = tmp_path / "libesolm_native.so.1"
            if content is not None:
                path.write_bytes(content)
            monkeypatch.setattr(library, "PATH", path)
            kind = library.Unavailable if content is None else library.Broken
            with pytest.raises(kind, match="libesolm_native"):
                native_fold(net, "float32")
            assert "libesolm_native.so.1" in library.status()
        monkeypatch.undo()
        monkeypatch.setattr(library, "VERSION", 2**20)
        with pytest.raises(library.Broken, match=str(2**20)):
            native_fold(net, "float32")
    finally:
        monkeypatch.undo()
        library.library.cache_clear()
    assert "AVX" in library.status()


@pytest.mark.parametrize("options", [{}, {"sampler": "speculative"}], ids=["ordinary", "speculative"])
def test_a_loaded_model_draws_the_same_on_both_engines(options: dict[str, Any]) -> None:
    """In float32 a draw differs only if the uniform number falls between two nearly equal sums."""
    found = []
    for name, kind in (("native", Native), ("torch", Folded), ("auto", Native)):
        lm = load("stories", precision="float32", engine=name)
        assert type(lm.net) is kind
        found.append(lm.sample("The", num_samples=2, length=24, seed=5, **options).tokens)
    assert found[0] == found[1] == found[2]


def test_the_likelihood_of_a_native_sample_is_that_of_its_draws() -> None:
    """The probabilities that a sample was drawn with, multiplied, are the one-pass likelihood in PyTorch."""
    net = toy.network(dtype=torch.float32)
    system, recording = toy.make("esolm", V - 1, alpha_0=1.0), Recording()
    order = toy.permutations(B, L)
    asked = replace(request([0] * B, sampler="order", order=order), draw=recording)
    steps = sample(native_fold(net, "float32"), system, asked)
    x = torch.empty(B, L, dtype=torch.long).scatter_(1, order, torch.cat(steps, 1))
    drawn = [token_nats(logits.clone(), token[:, 0], V - 1) for logits, token in zip(recording.seen, steps)]
    with torch.no_grad():
        expected = system.order_nats(fold(net, "float32"), Batch(x), order).sum(1)
    torch.testing.assert_close(torch.stack(drawn).sum(0), expected, rtol=1e-5, atol=1e-5)


def test_engines_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="'fast'"):
        load("stories", precision="float32", engine="fast")
    with pytest.raises(ValueError, match="native"):
        load("stories", engine="native")

    def missing() -> None:
        raise library.Unavailable("not built")

    monkeypatch.setattr(engine, "library", missing)
    assert type(load("stories", precision="float32").net) is Folded
    assert not caplog.records  # nothing was built: nothing is wrong
    with pytest.raises(ValueError, match="not built"):
        load("stories", precision="float32", engine="native")

    def broken() -> None:
        raise library.Broken("wrong version")

    monkeypatch.setattr(engine, "library", broken)
    assert type(load("stories", precision="float32").net) is Folded
    assert [record.levelname for record in caplog.records] == ["WARNING"]
