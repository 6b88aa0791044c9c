"""Recorded steps draw what the folded network draws. A tape stands for a GPU's graph: the same operations again, on the
same memory, whatever Python has come to think in the meantime.

Shapes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from esolm.core.randomness import Randomness
from esolm.core.visibility import by_order
from esolm.net import cuda_graphs as graph
from esolm.net.cuda_graphs import Graphed, replayed
from esolm.net.denoiser import Rows
from esolm.net.fold import fold
from esolm.sampling.request import Request
from support import toy

B, L, V = 3, 8, 7
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


class Tape(TorchDispatchMode):
    """Every operation with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recorder:
    """Counts what it records; a recording leaves nonsense where its result will be."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        with Tape() as tape:
            found = step()
        found.fill_(float("nan"))
        self.tapes.append(tape)
        return tape.replay, found


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "BUCKET", 4)


def made(**sizes: Any) -> tuple[Any, Any, Recorder]:
    """A folded network, the same with graphs, and what they are recorded by."""
    net, recorder = fold(toy.network(**sizes)), Recorder()
    return net, Graphed(net, recorder), recorder


def request(prompts: list[int], **options: Any) -> Request:
    given = torch.arange(L) < torch.tensor(prompts)[:, None]
    return toy.request(toy.text(len(prompts)), given, torch.ones_like(given), **options)


def draw(net: Any, system: Any, asked: Request, seed: int = 3) -> list[Tensor]:
    rng = Randomness(seed, 0, len(asked.x))
    with torch.inference_mode():
        return [step.token for step in system.sample(net, asked, system.plan(asked, rng), rng)]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) > 0 and all(map(torch.equal, one, two))


@pytest.mark.matrix(5)
@pytest.mark.parametrize("prompts", [[0, 0, 0], [2, 2, 2], [1, 4, 0]], ids=["empty", "even", "ragged"])
@pytest.mark.parametrize(("label", "name", "options"), toy.untimed(), ids=lambda v: v if isinstance(v, str) else "")
def test_samples_are_those_of_the_folded_network(label: str, name: str, options: dict, prompts: list[int]) -> None:
    """The first with few recordings, and further ones with other numbers on the same memory."""
    system = toy.make(name, V - 1, **options)
    if name == "ar" and prompts == [1, 4, 0]:
        prompts = [1, 3, 2]
    net, graphs, recorder = made()
    caches: list[object] = []
    new_cache = net.new_cache
    net.new_cache = lambda *sizes: caches.append(sizes) or new_cache(*sizes)  # type: ignore[method-assign]
    for seed in (3, 4, 5):
        asked = request(prompts)
        assert same(draw(graphs, system, asked, seed), draw(net, system, asked, seed))
    cached = bool(caches)
    assert cached or label in ("mdlm", "esolm-A-1") or name not in ("ar", "bd3lm", "esolm")
    assert bool(recorder.tapes) == cached
    assert len(graphs.rooms) == cached


@pytest.mark.parametrize("shape", toy.FAMILIES)
@pytest.mark.parametrize(
    "sampler",
    [
        {"sampler": "speculative"},
        {"sampler": "block", "parallelism": 2},
        {"sampler": "left_to_right"},
        {"sampler": "threshold", "tau": 0.5, "window": 3},
    ],
    ids=str,
)
def test_other_samplers(sampler: dict[str, Any], shape: str) -> None:
    system = toy.make("esolm", V - 1, alpha_0=1.0)
    net, graphs, _ = made(**toy.FAMILIES[shape])
    for seed in range(4):
        asked = request([1, 1, 1], **sampler)
        assert same(draw(graphs, system, asked, seed), draw(net, system, asked, seed))


@pytest.mark.parametrize("cache", ["prefix", "dual", "delayed", "frozen"])
def test_approximate_caches(cache: str) -> None:
    """Their slots are moved after a replayed pass too."""
    system = toy.make("mdlm", V - 1)
    net, graphs, recorder = made()
    for seed in range(3):
        asked = request([1, 4, 0], sampler="threshold", tau=0.5, block_length=3, cache=cache)
        assert same(draw(graphs, system, asked, seed), draw(net, system, asked, seed))
    assert recorder.tapes


def test_one_recording_for_each_shape_that_comes_twice() -> None:
    """Eight steps of one token: a mask alone, then a token and a mask, three over 4 keys and four over 8."""
    system = toy.make("esolm", V - 1, alpha_0=1.0)
    _, graphs, recorder = made()
    draw(graphs, system, request([0]))
    (room,) = graphs.rooms
    assert [(shape[1], shape[3]) for shape in room.graphs] == [(1, 4), (2, 4), (2, 8)]
    assert len(recorder.tapes) == sum(g is not None for g in room.graphs.values()) == 2
    draw(graphs, system, request([0]), seed=4)  # the first step has come twice now
    assert len(recorder.tapes) == 3
    draw(graphs, system, request([0]), seed=5)
    assert len(recorder.tapes) == 3
    assert graphs.rooms[0] is room


def test_samples_that_take_turns_do_not_meet() -> None:
    system = toy.make("esolm", V - 1, alpha_0=1.0)
    net, graphs, _ = made()
    asked, streams = request([0, 0]), []
    for seed in (3, 4):
        rng = Randomness(seed, 0, 2)
        streams.append(system.sample(graphs, asked, system.plan(asked, rng), rng))
    with torch.inference_mode():
        steps = list(zip(*streams, strict=True))
    assert len(graphs.rooms) == 2
    for i, seed in enumerate((3, 4)):
        assert same([pair[i].token for pair in steps], draw(net, system, asked, seed))


def test_memory_goes_back_when_another_size_is_asked_for() -> None:
    _, graphs, _ = made()
    first = graphs.new_cache(2, 5)
    assert first.ranks.shape == (2, 8)
    pointers = [t.data_ptr() for t in first.keys]
    first.keys[0].fill_(float("nan"))
    assert graphs.new_cache(2, 6).keys[0].data_ptr() != pointers[0]  # the first is still held
    del first
    again = graphs.new_cache(2, 7)
    assert [t.data_ptr() for t in again.keys] == pointers
    assert not again.keys[0].any()
    assert again.extent == 0
    assert (again.lengths == 0).all()
    del again
    graphs.new_cache(1, 4)
    assert [tuple(room.memory.ranks.shape) for room in graphs.rooms] == [(1, 4)]


def test_logits_are_kept_from_the_next_step() -> None:
    """In and outside of inference mode, step by step on one cache each; both commit one of two slots."""
    net, graphs, recorder = made()
    caches = [each.new_cache(B, 3 * L) for each in (net, graphs)]
    tokens, found, expected = toy.text(B), [], []
    for i in range(L - 1):
        call = tokens[:, i : i + 2], torch.arange(i, i + 2).expand(B, -1), by_order(torch.arange(i, i + 2)[None])
        with torch.inference_mode(i % 2 == 0):
            for each, cache, into in zip((net, graphs), caches, (expected, found), strict=True):
                into.append(each(*call, cache=cache, out=Rows(slice(1, 2))))
                cache.commit(1)
    assert recorder.tapes
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), **CLOSE)


def test_many_shapes_are_not_all_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MOST", 1)
    system = toy.make("esolm", V - 1, alpha_0=1.0)
    net, graphs, recorder = made()
    assert same(draw(graphs, system, request([0])), draw(net, system, request([0])))
    assert len(recorder.tapes) == 1


def test_what_has_no_cache_goes_straight_to_the_network() -> None:
    net, graphs, recorder = made()
    call = toy.text(B), torch.arange(L)[None], by_order(torch.arange(L)[None])
    for _ in range(3):
        assert torch.equal(graphs(*call), net(*call))
        assert torch.equal(graphs(*call, cache=net.new_cache(B, L)), net(*call, cache=net.new_cache(B, L)))
    assert not recorder.tapes
    with pytest.raises(ValueError, match="time"):
        graphs(*call, time=torch.zeros(1))
    with pytest.raises(ValueError, match="capacity"):
        graphs(*call, cache=graphs.new_cache(B, 3))


def test_a_cpu_has_no_graphs_and_a_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU's functions that only say that they were called: once aside, and once more in a recording."""
    net = fold(toy.network())
    assert replayed(net) is net
    said: list[str] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            said.append(f"into {self.name}")

        def __exit__(self, *error: object) -> None:
            said.append(f"out of {self.name}")

        def wait_stream(self, other: Fake) -> None:
            said.append(f"{self.name} waits for {other.name}")

        def replay(self) -> None:
            said.append("replay")

    for name, fake in {
        "graph_pool_handle": lambda: "pool",
        "device": lambda device: Fake(str(device)),
        "Stream": lambda: Fake("side"),
        "current_stream": lambda: Fake("main"),
        "stream": lambda stream: stream,
        "CUDAGraph": lambda: Fake("graph"),
        "graph": lambda graph, pool: Fake(f"recording in {pool}"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(net, "device", torch.device("cuda", 1))
    graphs: Any = replayed(net)
    assert isinstance(graphs, Graphed)
    replay, found = graphs.capture(lambda: (said.append("step"), torch.ones(1))[1])
    assert said == [
        "into cuda:1", "side waits for main", "into side", "step", "out of side", "main waits for side",
        "into recording in pool", "step", "out of recording in pool", "out of cuda:1",
    ]  # fmt: skip
    assert found.item() == 1
    replay()
    assert said[-1] == "replay"
