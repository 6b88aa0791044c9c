"""The loops do the work that the schedule asks for and no more: tokens fed, rows of the head, cache writes, memory.

Shapes: B batch, L length, N slots of a pass.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from esolm.core.draw import Draw
from esolm.core.randomness import Randomness
from esolm.net.cache import KVCache
from esolm.net.fold import fold
from esolm.sampling.loops import capacity
from support import toy
from support.counting import VOCABULARY as V
from support.counting import Counting, ask, count
from support.naive import plan_of

MASK = V - 1


EVEN = [
    {"sampler": "left_to_right"},
    {"sampler": "order", "order": toy.permutations(1, 12)},
    {"sampler": "block", "parallelism": 4},
    {"sampler": "block", "parallelism": 12},
]
RAGGED = [
    {"sampler": "ancestral", "alpha_0": 0.5, "num_steps": 4},
    {"sampler": "ancestral", "alpha_0": 1.0, "num_steps": 3},
    {"sampler": "first_hitting", "alpha_0": 1.0},
    {"sampler": "block", "parallelism": 3},
]


def name(options: dict[str, Any]) -> str:
    return "-".join(str(v) for k, v in options.items() if k != "order")


@pytest.mark.parametrize("loss", ["two_term", "any_order"])
@pytest.mark.parametrize("prompt", [0, 4])
@pytest.mark.parametrize("options", EVEN, ids=name)
def test_esolm_feeds_what_became_clean_and_what_is_drawn(options: dict[str, Any], prompt: int, loss: str) -> None:
    request = ask([[1] * prompt + [0] * (12 - prompt)] * 3, **options)
    net, schedule, tokens = count(toy.make("esolm", MASK, loss=loss), request)
    sizes = schedule.sizes[0].tolist()
    before = [prompt, *sizes[:-1]]  # what became clean at the step before
    assert len(net.calls) == len(sizes)
    for call, clean, masks in zip(net.calls, before, sizes):
        assert call.tokens.shape == (3, clean + masks)
        assert call.head == call.mlp == 3 * masks
        assert call.writes == [clean + masks] * 2
        assert call.kept == [clean] * 3
        assert (call.tokens[:, clean:] == MASK).all()
        fed = tokens.gather(1, call.position[:, :clean])
        assert torch.equal(call.tokens[:, :clean], fed)
    for b in range(3):
        plan = plan_of(schedule, b)
        assert net.committed(b) == list(plan.given) + [i for step in plan.steps[:-1] for i in step]
    assert len(net.buffers_seen) == 1  # the same memory from the first pass to the last


@pytest.mark.parametrize("loss", ["two_term", "any_order"])
@pytest.mark.parametrize("options", RAGGED, ids=name)
def test_esolm_with_rows_of_their_own(options: dict[str, Any], loss: str) -> None:
    """As wide as the widest row; every row commits its own clean tokens, each once, in the order of sigma."""
    rows = [[0] * 12, [1, 0] * 5, [0] * 3, [1] * 4, [0, 0, 0, 1, 1, 1, 1]]
    net, schedule, _ = count(toy.make("esolm", MASK, loss=loss), ask(rows, **options))
    most, before = schedule.sizes.amax(0).tolist(), schedule.given
    assert len(net.calls) == int(schedule.nfe.max())
    for k, call in enumerate(net.calls):
        clean = int(before.max())
        assert call.tokens.shape == (5, clean + most[k])
        assert call.head == call.mlp == 5 * most[k]
        assert call.writes == [clean + most[k]] * 2
        assert call.kept == before.tolist()
        before = schedule.sizes[:, k]
    passes = len(net.calls)
    for b in range(5):
        plan = plan_of(schedule, b)
        clean_steps = plan.steps[: min(len(plan.steps), passes - 1)]
        assert net.committed(b) == list(plan.given) + [i for step in clean_steps for i in step]
    assert len(net.buffers_seen) == 1


def test_the_work_of_a_step_does_not_depend_on_the_length() -> None:
    """The twentieth token of 32 and of 512: the same tokens fed, rows and writes."""
    found = []
    for length in (32, 512):
        system = toy.make("esolm", MASK)
        request = ask([[0] * length] * 2, sampler="left_to_right")
        net = Counting(toy.network(V, length))
        steps = system.sample(net, request, system.plan(request, Randomness(0)), Randomness(0))
        with torch.inference_mode():
            for _ in range(20):
                next(steps)
        call = net.calls[-1]
        found.append((call.tokens.shape, call.head, call.mlp, call.writes, call.kept))
    assert found[0] == found[1] == ((2, 2), 2, 2, [2, 2], [1, 1])


def test_esolm_a_has_a_cache_only_in_the_sequential_phase() -> None:
    request = ask([[0] * 12, [1] * 3 + [0] * 9, [0] * 8], alpha_0=0.5, num_steps=3)
    net, schedule, _ = count(toy.make("esolm", MASK, variant="A"), request)
    diffusion = int(schedule.diffusion.max())
    sequential = schedule.nfe - schedule.diffusion
    assert [call.cached for call in net.calls] == [False] * diffusion + [True] * int(sequential.max())
    starts, steps = schedule.starts, torch.arange(schedule.sizes.shape[1])
    for k, call in enumerate(net.calls[:diffusion]):
        active = steps[k] < schedule.diffusion
        size = torch.where(active, schedule.sizes[:, k], 0)
        clean = torch.where(active, starts[:, k], 0)
        assert call.tokens.shape[1] == clean.max() + size.max()
        assert call.head == call.mlp == 3 * size.max()
    first, *rest = net.calls[diffusion:]
    by_diffusion = schedule.given + torch.where(steps < schedule.diffusion[:, None], schedule.sizes, 0).sum(1)
    assert first.tokens.shape[1] == by_diffusion.max() + 1
    assert first.kept == by_diffusion.tolist()
    for call in rest:
        assert call.tokens.shape[1] == 2
        assert call.head == 3
        assert max(call.kept) == 1
    for b in range(3):
        committed = net.committed(b)
        assert len(set(committed)) == len(committed)


@pytest.mark.parametrize(("rows", "even"), [([[1] * 3 + [0] * 5] * 2, True), ([[0] * 8, [1, 1, 0, 0], [1] * 8], False)])
def test_ar_feeds_one_token_a_pass(rows: list[list[int]], even: bool) -> None:
    net, schedule, _ = count(toy.make("ar", MASK), ask(rows))
    assert len(net.calls) == int(schedule.nfe.max())
    prompt = max(sum(row) + 1 for row in rows if 0 in row)
    for k, call in enumerate(net.calls):
        assert call.tokens.shape == (len(rows), prompt if k == 0 else 1)
        assert call.head == call.mlp == len(rows)
        assert call.writes == [call.tokens.shape[1]] * 2
    for b, row in enumerate(rows):  # every token but the last, and the one before the first, once
        assert net.committed(b) == (list(range(len(row))) if 0 in row else [])
    assert len(net.buffers_seen) == 1


@pytest.mark.parametrize("num_steps", [None, 6, 24])
def test_bd3lm_feeds_a_block_and_once_the_block_before_it(num_steps: int | None) -> None:
    rows = [[0] * 12, [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0], [0] * 4 + [1] * 4 + [0] * 4]
    net, schedule, _ = count(toy.make("bd3lm", MASK, block_size=4), ask(rows, num_steps=num_steps))
    drawn = Counter(int(i) // 4 for row in schedule.step_of() for i in (row >= 0).nonzero()[:, 0])
    head: Counter[int] = Counter()
    first_pass = set()
    for call in net.calls:
        block = int(call.position[0, -1]) // 4
        again = block in first_pass or block == 0
        assert call.tokens.shape == (3, 4 if again else 8)
        assert call.position[0].tolist() == list(range(4 * block + 4 - call.tokens.shape[1], 4 * block + 4))
        assert call.head == call.mlp
        assert call.kept == (None if again else [4] * 3)
        head[block] += call.head
        first_pass.add(block)
    assert head == drawn  # exactly the tokens that are drawn get logits
    for b in range(3):
        assert net.committed(b) == list(range(8))
    assert len(net.buffers_seen) == 1


@pytest.mark.parametrize(("num_steps", "expected"), [(3, [1, 1, 1]), (7, [2, 2, 3]), (8, [2, 3, 3]), (1000, [4] * 3)])
def test_bd3lm_spreads_steps_over_its_blocks(num_steps: int, expected: list[int]) -> None:
    """No step is lost if the blocks do not divide them; of 64 rows some take all steps of a block, and none takes more.

    A row of two blocks spreads the steps over its two.
    """
    bd3lm = toy.make("bd3lm", MASK, block_size=4)
    schedule = bd3lm.plan(ask([[0] * 12] * 64 + [[0] * 8] * 64, num_steps=num_steps), Randomness(0))
    for rows, blocks in ((range(64), 3), (range(64, 128), 2)):
        most = [0] * blocks
        for row in rows:
            found = Counter(step[0] // 4 for step in schedule.steps(row))
            most = [max(m, found[b]) for b, m in enumerate(most)]
        wanted = expected if blocks == 3 else [min(4, num_steps // 2), min(4, num_steps - num_steps // 2)]
        assert most == wanted


def test_bd3lm_feeds_given_blocks_together() -> None:
    """Two given blocks before the first that is drawn: all in its first pass."""
    net, _, _ = count(toy.make("bd3lm", MASK, block_size=2), ask([[1] * 4 + [0] * 4] * 2))
    assert [call.tokens.shape[1] for call in net.calls] == [6, 2, 4, 2]


@pytest.mark.parametrize("num_steps", [None, 3, 1000])
def test_mdlm_gives_logits_to_what_is_drawn_and_runs_no_idle_step(num_steps: int | None) -> None:
    rows = [[0] * 12, [1, 0] * 6, [0] * 7]
    net, schedule, _ = count(toy.make("mdlm", MASK), ask(rows, num_steps=num_steps))
    assert len(net.calls) == schedule.nfe.max() <= min(12, num_steps or 12)
    for k, call in enumerate(net.calls):
        assert call.tokens.shape == (3, 12)
        assert not call.cached
        assert call.head == call.mlp == schedule.sizes[:, k].sum()


class Memory(TorchDispatchMode):
    """The shapes of all tensors that own new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        old = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves((args, kwargs))
            if isinstance(t, Tensor) and not t.is_mkldnn
        }
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in old:
                self.new.append((str(func), tuple(t.shape)))
        return out


EARLY, LATE, LONG = 12, 52, 64


def memory(system: Any, rows: list[list[int]], net: Any) -> tuple[Counter[Any], Counter[Any]]:
    """New tensors of step EARLY and of step LATE, left to right."""
    request = ask(rows, sampler="left_to_right")
    steps = system.sample(net, request, system.plan(request, Randomness(0)), Randomness(0))
    found = []
    with torch.no_grad():
        for k in range(LATE + 1):
            if k in (EARLY, LATE):
                with Memory() as mode:
                    next(steps)
                found.append(Counter(mode.new))
            else:
                next(steps)
    return found[0], found[1]


def size(new: Counter[Any]) -> int:
    return sum(torch.Size(shape).numel() * n for (_, shape), n in new.items())


@pytest.mark.parametrize("prepare", [lambda net: net, fold], ids=["as trained", "folded"])
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("kind", ["two_term", "any_order", "ar"])
def test_nothing_but_the_mask_grows_with_the_context(kind: str, even: bool, prepare: Any) -> None:
    """Between two steps: all new tensors are the same but those of who sees whom, which are of the size of the context
    times the slots of the pass, and do not depend on the width of the network: no copy of a cache."""
    system = toy.make("ar", MASK) if kind == "ar" else toy.make("esolm", MASK, loss=kind)
    rows = [[0] * LONG] * 2 if even else [[0] * LONG, [1] * 5 + [0] * (LONG - 5)]
    growth = []
    for width in (16, 64):
        early, late = memory(system, rows, prepare(toy.network(V, LONG, dtype=torch.float32, width=width)))
        slots = 1 if kind == "ar" else 2
        grown, fewer = late - early, early - late
        for operation, shape in grown:
            assert torch.Size(shape).numel() <= 2 * slots * (LONG + 2), (operation, shape)
        assert [(op, len(shape)) for op, shape in grown] == [(op, len(shape)) for op, shape in fewer]
        assert max(torch.Size(shape).numel() for _, shape in late) < 2 * width * LATE  # one layer's keys
        growth.append(size(late) - size(early))
    assert growth[0] == growth[1] > 0


def test_a_copy_of_the_cache_would_be_noticed() -> None:
    """The same measurement on a network that copies its cache: growth that depends on the width."""
    growth = []
    for width in (16, 64):
        net = toy.network(V, LONG, dtype=torch.float32, width=width)
        real = net.new_cache

        def copying(batch: int, slots: int, real: Any = real) -> KVCache:
            cache = real(batch, slots)
            extend = cache.extend
            cache.extend = lambda *a: tuple(t.clone() for t in extend(*a))  # type: ignore[method-assign]
            return cache

        net.new_cache = copying
        early, late = memory(toy.make("esolm", MASK), [[0] * LONG] * 2, net)
        growth.append(size(late) - size(early))
    assert growth[1] > 3 * growth[0]


def test_the_capacity_is_enough_and_not_much_more() -> None:
    """All places, and what one pass writes behind them."""
    for rows in ([[0] * 12] * 2, [[1] * 11 + [0]] * 2, [[0] * 12, [1] * 6]):
        for options in RAGGED:
            request = ask(rows, **options)
            schedule = toy.make("esolm", MASK).plan(request, Randomness(0))
            most = int(schedule.sizes.max())
            assert 12 <= capacity(schedule) <= 12 + most + max(most, int(schedule.given.max()))
            count(toy.make("esolm", MASK), request)  # raises if it is not


REQUEST = ask([[0] * 8, [1, 1, 0, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("system", "options", "message"),
    [
        ("esolm", {"sampler": "semi"}, "esolm has no sampler 'semi'"),
        ("mdlm", {"sampler": "left_to_right"}, "mdlm has no sampler 'left_to_right'"),
        ("ar", {"sampler": "ancestral"}, "ar has no sampler 'ancestral'"),
        ("bd3lm", {"sampler": "block"}, "bd3lm has no sampler 'block'"),
        ("ar", {"num_steps": 4}, "sampler left_to_right of ar does not use num_steps"),
        ("ar", {"alpha_0": 0.5}, "sampler left_to_right of ar does not use alpha_0"),
        ("mdlm", {"alpha_0": 0.5}, "sampler first_hitting of mdlm does not use alpha_0"),
        ("mdlm", {"alpha_0": 0.5, "num_steps": 4}, "ancestral of mdlm does not use alpha_0"),
        ("bd3lm", {"parallelism": 2}, "sampler first_hitting of bd3lm does not use parallelism"),
        ("esolm", {"sampler": "block", "parallelism": 2, "alpha_0": 0.5}, "block of esolm does not use alpha_0"),
        ("esolm", {"sampler": "first_hitting", "num_steps": 2}, "first_hitting of esolm does not use num_steps"),
        ("esolm", {"parallelism": 2}, "does not use parallelism"),
        ("esolm", {"sampler": "block"}, "sampler block needs parallelism"),
        ("esolm", {"sampler": "order"}, "sampler order needs order"),
        ("esolm", {"sampler": "order", "order": torch.arange(7)[None]}, r"permutation of 0 \.\. 7"),
        ("esolm", {"given_order": "backwards"}, "given_order is 'backwards'; it must be one of random, ascending"),
        ("bd3lm", {"num_steps": 1}, "num_steps is 1; 2 blocks need at least 2"),
    ],
)  # fmt: skip
def test_wrong_requests_say_what_is_allowed(system: str, options: dict[str, Any], message: str) -> None:
    made = toy.make(system, MASK, **({"block_size": 4} if system == "bd3lm" else {}))
    with pytest.raises(ValueError, match=message):
        made.plan(toy.changed(REQUEST, **options), Randomness(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha_0": 1.5}, r"alpha_0 is 1\.5; it must be between 0 and 1"),
        ({"alpha_0": -0.1}, r"alpha_0 is -0\.1"),
        ({"alpha_0": float("nan")}, "alpha_0 is nan"),
        ({"num_steps": 0}, "num_steps is 0; it must be at least 1"),
        ({"parallelism": 0}, "parallelism is 0; it must be at least 1"),
    ],
)
def test_impossible_values_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy.changed(REQUEST, **options)


def test_ar_wants_its_given_tokens_first() -> None:
    with pytest.raises(ValueError, match=r"given tokens must come first"):
        toy.make("ar", MASK).plan(ask([[1, 1, 0, 0], [1, 0, 1, 0]]), Randomness(0))


def test_bd3lm_wants_whole_blocks() -> None:
    with pytest.raises(ValueError, match="length 7 is not a multiple of block_size 4"):
        toy.make("bd3lm", MASK, block_size=4).plan(ask([[0] * 7]), Randomness(0))


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [1] * 8),  # one at a time
        ({"num_steps": 1, "alpha_0": 1.0}, [8]),
        ({"sampler": "block", "parallelism": 4}, [4, 4]),
        ({"sampler": "left_to_right"}, [1] * 8),
    ],
)
def test_defaults(options: dict[str, Any], sizes: list[int]) -> None:
    schedule = toy.make("esolm", MASK).plan(toy.changed(ask([[0] * 8]), **options), Randomness(0))
    assert schedule.sizes[0].tolist() == sizes


def test_the_share_of_training_unless_asked_otherwise() -> None:
    """alpha_0 of the request goes before alpha_0 of the system."""
    request = ask([[0] * 400])
    for trained, asked, expected in [(0.25, None, 0.25), (0.25, 0.75, 0.75), (1.0, 0.0, 0.0), (0.0, 1.0, 1.0)]:
        system = toy.make("esolm", MASK, alpha_0=trained)
        schedule = system.plan(toy.changed(request, alpha_0=asked), Randomness(0))
        assert schedule.diffusion[0] / 400 == pytest.approx(expected, abs=0.12)  # 5 standard errors


def test_greedy_and_a_certain_nucleus_agree() -> None:
    """The likeliest token at every step, whichever way it is asked for."""
    for name in ("esolm", "mdlm", "ar"):
        system, found = toy.make(name, MASK), []
        for draw in (Draw(temperature=0), Draw(top_k=1), Draw(top_p=1e-9), Draw(temperature=1e-9)):
            found.append(count(system, toy.changed(ask([[0] * 8] * 4), draw=draw))[2])
        for other in found[1:]:
            assert torch.equal(found[0], other)
