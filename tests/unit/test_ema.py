"""The averaged weights follow their recurrence, and `applied` restores the network."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from esolm.training.ema import Ema


def test_equals_the_recurrence_with_warm_up():
    net = nn.Linear(3, 2)
    ema = Ema(net, 0.9)
    expected = net.weight.detach().double().clone()
    for step in range(1, 200):
        with torch.no_grad():
            net.weight.normal_()
        ema.update(net, step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * net.weight.detach().double()
    torch.testing.assert_close(ema.shadow["weight"].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_applied_uses_the_averaged_weights_inside_the_block(dtype):
    net = nn.Linear(3, 2).to(dtype)
    ema = Ema(net, 0.99)
    with torch.no_grad():
        net.weight.add_(1)
    own, averaged = net.weight.detach().clone(), ema.shadow["weight"]
    assert averaged.dtype == torch.float32
    with contextlib.suppress(KeyboardInterrupt), ema.applied(net):
        assert torch.equal(net.weight, averaged.to(dtype))
        raise KeyboardInterrupt
    assert torch.equal(net.weight, own)


def test_state_and_load_round_trip():
    net = nn.Linear(3, 2)
    ema, other = Ema(net, 0.99), Ema(nn.Linear(3, 2), 0.99)
    other.load(ema.state(net))
    assert all(torch.equal(other.shadow[name], ema.shadow[name]) for name in ema.shadow)


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_decay_outside_the_range_is_named(decay):
    with pytest.raises(ValueError, match=str(decay)):
        Ema(nn.Linear(1, 1), decay)
