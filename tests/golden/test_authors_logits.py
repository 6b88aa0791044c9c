"""Our network with the authors' weights gives the authors' logits (tests/golden/*.safetensors).

The files were computed once by the authors' public code in float32; the tolerance is 1e-4, absolute and relative.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from esolm.core import order
from esolm.core.visibility import by_order, causal, full, sorted_two_stream, two_stream
from esolm.net.denoiser import Denoiser, DenoiserConfig, Rows
from support import paper

HERE = Path(__file__).parent
MASK = 49
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
OURS = {
    "vocab_embed.embedding": "embed.weight",
    "sigma_map.mlp": "time",
    "output_layer.adaLN_modulation": "modulation",
    "output_layer.norm_final": "norm",
    "output_layer.linear": "head",
    "adaLN_modulation": "modulation",
}


def our_name(name: str) -> str:
    name = name.removeprefix("backbone.")
    for theirs, ours in OURS.items():
        name = name.replace(theirs, ours)
    return name


@pytest.fixture(scope="module")
def net() -> Denoiser:
    released = load_file(HERE / "state_dict.safetensors")
    weights = {our_name(name): t for name, t in released.items() if not name.endswith("inv_freq")}
    config = DenoiserConfig(vocab_size=50, length=16, layers=2, width=64, heads=4, cond_width=32, dropout=0.1)
    ours = Denoiser(config).eval()
    ours.load_state_dict(weights, strict=True)
    return ours


@pytest.fixture(params=["diffusion", "sequential"])
def phase(request: pytest.FixtureRequest) -> dict[str, Tensor]:
    return load_file(HERE / f"{request.param}.safetensors")


@pytest.fixture
def diffusion() -> dict[str, Tensor]:
    return load_file(HERE / "diffusion.safetensors")


@pytest.fixture
def sequential() -> dict[str, Tensor]:
    return load_file(HERE / "sequential.safetensors")


def unsorted(t: Tensor, sigma: Tensor) -> Tensor:
    """Rows in slot order, [B, L, V], back at their positions."""
    return torch.empty_like(t).scatter_(1, sigma[..., None].expand_as(t), t)


def test_the_weights_are_all_random() -> None:
    for name, t in load_file(HERE / "state_dict.safetensors").items():
        assert t.std() > 0, name


def test_the_files_are_what_we_take_them_for(phase: dict[str, Tensor]) -> None:
    sigma = phase["sort_idx"]
    assert torch.equal(phase["x0"].gather(1, sigma), phase["x0_sorted"])
    assert torch.equal(phase["xt"].gather(1, sigma), phase["zt_sorted"])
    assert torch.equal((phase["xt"] == MASK).sum(1), phase["num_masked"])


def test_bidirectional(net: Denoiser, diffusion: dict[str, Tensor]) -> None:
    sigma, expected = diffusion["sort_idx"], diffusion["logits_bidirectional"]
    torch.testing.assert_close(net(diffusion["zt_sorted"], sigma, full(16)), expected, **CLOSE)
    natural = net(diffusion["xt"], torch.arange(16)[None], full(16))
    torch.testing.assert_close(natural, unsorted(expected, sigma), **CLOSE)


def test_causal_in_the_order(net: Denoiser, diffusion: dict[str, Tensor]) -> None:
    sigma, expected = diffusion["sort_idx"], diffusion["logits_B_causal"]
    torch.testing.assert_close(net(diffusion["zt_sorted"], sigma, causal(16)), expected, **CLOSE)
    natural = net(diffusion["xt"], torch.arange(16)[None], by_order(order.inverse(sigma)))
    torch.testing.assert_close(natural, unsorted(expected, sigma), **CLOSE)
    assert (expected - diffusion["logits_bidirectional"]).abs().max() > 0.1  # the pattern matters


def test_two_streams_sorted(net: Denoiser, sequential: dict[str, Tensor]) -> None:
    sigma, expected = sequential["sort_idx"], sequential["logits_B_causal"]
    tokens = torch.cat([sequential["zt_sorted"], sequential["x0_sorted"]], 1)
    out = net(tokens, sigma.repeat(1, 2), sorted_two_stream(16, 16), out=Rows(slice(0, 16)))
    torch.testing.assert_close(out, expected, **CLOSE)


def test_two_streams_without_the_clean_part_of_z(net: Denoiser, sequential: dict[str, Tensor]) -> None:
    for b, num_masked in enumerate(sequential["num_masked"].tolist()):
        if not num_masked:
            continue
        tail = slice(16 - num_masked, None)
        z, x, sigma = (sequential[name][b : b + 1] for name in ("zt_sorted", "x0_sorted", "sort_idx"))
        tokens, position = torch.cat([z[:, tail], x], 1), torch.cat([sigma[:, tail], sigma], 1)
        out = net(tokens, position, sorted_two_stream(16, num_masked), out=Rows(slice(0, num_masked)))
        torch.testing.assert_close(out[0], sequential["logits_B_causal"][b, tail], **CLOSE)


def test_two_streams_in_natural_order(net: Denoiser, sequential: dict[str, Tensor]) -> None:
    sigma = sequential["sort_idx"]
    step, tokens = order.inverse(sigma), torch.cat([sequential["xt"], sequential["x0"]], 1)
    out = net(tokens, torch.arange(16).repeat(2)[None], two_stream(step, step, step))[:, :16]
    expected = unsorted(sequential["logits_B_causal"], sigma)
    masked = sequential["xt"] == MASK
    torch.testing.assert_close(out[masked], expected[masked], **CLOSE)


@pytest.mark.parametrize("row", [0, 2, 3])  # of 16, 5 and 11 masks
def test_the_naive_transformer_of_the_tests_is_theirs_too(
    net: Denoiser, sequential: dict[str, Tensor], row: int
) -> None:
    """So that what the other tests call naive is the paper's network and not ours written twice."""
    masked, sigma = sequential["xt"][row] == MASK, sequential["sort_idx"][row]
    tokens = torch.cat([sequential["xt"][row], sequential["x0"][row]]).tolist()
    seen = paper.sequential_b(sigma.tolist(), masked.tolist())
    seen[:16][~masked] |= torch.eye(32, dtype=torch.bool)[:16][~masked]  # a clean z may see anything
    out = paper.logits(net, tokens, [*range(16), *range(16)], seen)[:16][masked]
    expected = unsorted(sequential["logits_B_causal"], sequential["sort_idx"])[row]
    torch.testing.assert_close(out, expected[masked], **CLOSE)
