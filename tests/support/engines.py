"""Networks on the native engine, for tests that also run on PyTorch."""

from __future__ import annotations

import pytest

from esolm.net.denoiser import Denoiser
from esolm.net.fold import fold
from esolm.net.native.engine import Native, native_fold
from esolm.net.native.library import Unavailable
from esolm.net.protocol import Network

ENGINES = ("torch", "native")


def native(net: Denoiser, precision: str = "float32") -> Native:
    """The network in the native library, which takes every cached pass, however many rows it has."""
    try:
        made = native_fold(net, precision)
    except Unavailable as error:
        pytest.skip(str(error))
    made.many = 2**31
    return made


def on(engine: str, net: Denoiser, precision: str = "float32") -> Network:
    """The folded network on one of ENGINES."""
    return native(net, precision) if engine == "native" else fold(net, precision)
