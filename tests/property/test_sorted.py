"""Natural order with the dense mask equals tokens sorted by sigma with the shortcut: sorting is not semantics.

Forward and backward, every parameter, in float64 to 1e-10.

Shapes: B batch, L length, M slots of the z half.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from esolm.core import order
from esolm.core.visibility import Visibility, block, by_order, causal, prefix, sorted_two_stream, two_stream
from esolm.net.denoiser import Denoiser, Rows
from support import toy

B, L = 3, 7
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
PROBE = torch.randn(B, 2 * L, toy.network().config.vocab_size, dtype=torch.float64)


def labels_only(visibility: Visibility) -> Visibility:
    return dataclasses.replace(visibility, kind="labels")


def run(
    net: Denoiser, tokens: Tensor, position: Tensor, visibility: Visibility, weight: Tensor, out: Rows | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the rows with a weight, and the gradients of a weighted sum of all: weight [B, N, V]."""
    net.zero_grad()
    logits = net(tokens, position, visibility, out=out)
    (logits * weight).sum().backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters()}
    assert all(g.abs().max() > 0 for g in gradients.values())
    return logits.detach() * (weight != 0), gradients


def agree(one: tuple[Tensor, dict[str, Tensor]], two: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(one[0], two[0], **CLOSE)
    assert one[0].abs().max() > 0.1
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, two[1][name], **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


def back(t: Tensor, sigma: Tensor) -> Tensor:
    """Slot order to natural order."""
    return t.gather(1, order.inverse(sigma)[..., None].expand_as(t))


@pytest.fixture(scope="module", params=toy.FAMILIES)
def net(request: pytest.FixtureRequest) -> Denoiser:
    return toy.network(length=L, **toy.FAMILIES[request.param])


@pytest.fixture(params=range(3))
def sigma(request: pytest.FixtureRequest) -> Tensor:
    return toy.permutations(B, L, seed=request.param)


NATURAL = torch.arange(L)[None]


def test_causal(net: Denoiser, sigma: Tensor) -> None:
    """Eso-LM (B), diffusion phase."""
    x, weight = toy.text(B, L), PROBE[:, :L]
    natural = run(net, x, NATURAL, by_order(order.inverse(sigma)), weight)
    sort = sigma[..., None].expand_as(weight)
    logits, gradients = run(net, x.gather(1, sigma), sigma, causal(L), weight.gather(1, sort))
    agree(natural, (back(logits, sigma), gradients))


@pytest.mark.parametrize("num_clean", [(0, 3, 7), (1, 6, 2)])
def test_prefix(net: Denoiser, sigma: Tensor, num_clean: tuple[int, ...]) -> None:
    """Eso-LM (A), diffusion phase."""
    x, weight, clean = toy.text(B, L), PROBE[:, :L], torch.tensor(num_clean)
    natural = run(net, x, NATURAL, prefix(order.inverse(sigma), clean), weight)
    sort = sigma[..., None].expand_as(weight)
    logits, gradients = run(net, x.gather(1, sigma), sigma, prefix(NATURAL, clean), weight.gather(1, sort))
    agree(natural, (back(logits, sigma), gradients))


@pytest.mark.parametrize("num_clean", [None, (0, 3, 6), (2, 2, 2)])
@pytest.mark.parametrize("num_z", [1, 2, 4, L])
def test_two_streams(net: Denoiser, sigma: Tensor, num_z: int, num_clean: tuple[int, ...] | None) -> None:
    """Sequential phase of (B), and of (A) with num_clean; scored are the masks, the last places of sigma."""
    x, step, mask = toy.text(B, L), order.inverse(sigma), 6
    clean = None if num_clean is None else torch.tensor(num_clean)
    scored = step >= L - num_z  # by position
    if clean is not None:
        scored &= step >= clean[:, None]
    weight = PROBE[:, :L] * scored[..., None]
    x_rank = step if clean is None else prefix(step, clean).rank
    z = torch.where(scored, mask, x)
    both = torch.cat([weight, torch.zeros_like(weight)], 1)
    natural = run(net, torch.cat([z, x], 1), NATURAL.repeat(1, 2), two_stream(x_rank, step, step), both)
    tail = sigma[:, L - num_z :]
    tokens = torch.cat([torch.full_like(tail, mask), x.gather(1, sigma)], 1)
    position, visibility = torch.cat([tail, sigma], 1), sorted_two_stream(L, num_z, clean)
    sorted_weight = weight.gather(1, tail[..., None].expand(-1, -1, weight.shape[2]))
    logits, gradients = run(net, tokens, position, visibility, sorted_weight, Rows(slice(0, num_z)))
    placed = torch.zeros_like(weight).scatter(1, tail[..., None].expand_as(logits), logits)
    agree((natural[0][:, :L], natural[1]), (placed, gradients))
    # and with only the scored rows past the last block's keys and values
    rows = scored.gather(1, tail)
    index = rows.flatten().nonzero()[:, 0]
    flat, gradients = run(net, tokens, position, visibility, sorted_weight[rows], Rows(slice(0, num_z), index))
    torch.testing.assert_close(flat, logits[rows], **CLOSE)
    agree((natural[0][:, :L], natural[1]), (placed, gradients))


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_blocks(net: Denoiser, size: int) -> None:
    """BD3-LM: the same labels with and without its kernel."""
    tokens, position = toy.text(B, 12), torch.arange(6).repeat(2)[None]
    visibility, weight = block(6, size), PROBE[:, :12]
    agree(run(net, tokens, position, visibility, weight), run(net, tokens, position, labels_only(visibility), weight))
    half = Rows(slice(0, 6))
    agree(
        run(net, tokens, position, visibility, weight[:, :6], half),
        run(net, tokens, position, labels_only(visibility), weight[:, :6], half),
    )


@pytest.mark.parametrize("visibility", [causal(L), sorted_two_stream(L, 3), sorted_two_stream(L, L)])
def test_a_kind_is_a_shortcut_and_never_semantics(net: Denoiser, visibility: Visibility) -> None:
    slots = visibility.rank.shape[1]
    tokens, position = toy.text(B, slots), torch.arange(slots)[None] % L
    weight = PROBE[:, :slots]
    agree(run(net, tokens, position, visibility, weight), run(net, tokens, position, labels_only(visibility), weight))
