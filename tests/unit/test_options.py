"""The sampling options are declared once: what editors see, what Python takes and what a request holds agree."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import typing

import pytest

from esolm.sampling.options import OF_SOME_SAMPLERS, SamplingKeywords, SamplingOptions
from esolm.systems import find, names


def test_keywords_are_the_fields() -> None:
    fields = typing.get_type_hints(SamplingOptions)
    assert typing.get_type_hints(SamplingKeywords) == fields
    assert list(fields) == [f.name for f in dataclasses.fields(SamplingOptions)]


def test_samplers_name_only_options_that_exist() -> None:
    fields = {f.name for f in dataclasses.fields(SamplingOptions)}
    assert set(OF_SOME_SAMPLERS) <= fields
    for name in names():
        for taken in find(name).samplers.values():
            assert set(taken) <= set(OF_SOME_SAMPLERS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha_0", 1.5), ("num_steps", 0), ("parallelism", 0), ("window", 0), ("batch_size", 0), ("tau", 1.1),
        ("tau", -0.1), ("tau", float("nan")), ("block_length", 0), ("refresh", 0), ("confidence", "sure"),
        ("cache", "yes"), ("freeze", "now"),
    ],
)  # fmt: skip
def test_impossible_values_are_refused(name: str, value: float | str) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingOptions(**{name: value})  # type: ignore[arg-type]


def test_the_options_need_no_torch() -> None:
    code = "import sys, esolm.sampling.options; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
