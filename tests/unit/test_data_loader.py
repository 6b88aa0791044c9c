"""The loader: batches are a pure function of the step, and every epoch contains every sequence once."""

from __future__ import annotations

import json
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esolm.data import Batch, Loader, Manifest, prepare, shards
from esolm.data.permutation import permute

LENGTH = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """103 train and 7 valid lines, packed with `pad` into several shards."""
    path = tmp_path_factory.mktemp("loader")
    for name, n in (("train", 103), ("valid", 7)):
        (path / f"{name}.txt").write_text("".join(f"{i:03d}{'x' * (i % 7)}\n" for i in range(n)))
    (path / "valid.txt").write_text("".join(f"v{i}\n" for i in range(7)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_SHARD", 1)
        patch.setattr(sys.modules["esolm.data.prepare"], "_CHUNK", 100)
        prepare(
            f"text:{path}/train.txt",
            path / "out",
            tokenizer="bytes",
            length=LENGTH,
            valid=f"text:{path}/valid.txt",
            packing="pad",
            lines=True,
        )
    return path / "out"


def names(batch: Batch) -> list[int]:
    return [int(bytes(row[:3].tolist())) for row in batch.x]


def same(a: Batch, b: Batch) -> bool:
    return all((p is None and q is None) or torch.equal(p, q) for p, q in zip(a, b))


def test_the_fixture_has_several_shards(folder: Path) -> None:
    assert len(Loader(folder).manifest.splits["train"].shards) > 2


@pytest.mark.parametrize("batch_size", [1, 8, 103, 250])
def test_every_epoch_contains_every_sequence_once(folder: Path, batch_size: int) -> None:
    loader = Loader(folder, batch_size=batch_size, seed=3)
    steps = -(-3 * 103 // batch_size)
    seen = [name for step in range(steps) for name in names(loader.batch(step))]
    epochs = [seen[103 * e : 103 * (e + 1)] for e in range(3)]
    assert all(sorted(epoch) == list(range(103)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_batch_depends_on_seed_and_step_alone(folder: Path) -> None:
    loader = Loader(folder, batch_size=16, seed=1)
    later = loader.batch(40)
    assert same(later, Loader(folder, batch_size=16, seed=1).batch(40))
    assert same(later, loader.batch(40))
    assert names(later) != names(Loader(folder, batch_size=16, seed=2).batch(40))
    assert names(later) != names(loader.batch(41))


@given(step=st.integers(0, 60), cuts=st.lists(st.integers(0, 20), max_size=4), shuffle=st.booleans())
def test_micro_batches_tile_the_global_batch(folder: Path, step: int, cuts: list[int], shuffle: bool) -> None:
    loader = Loader(folder, batch_size=20, seed=5, shuffle=shuffle)
    step = step if shuffle else step % len(loader)
    edges = sorted({0, 20, *cuts})
    parts = [loader.batch(step, a, b - a) for a, b in pairwise(edges)]
    whole = loader.batch(step)
    assert torch.equal(torch.cat([p.x for p in parts]), whole.x)
    assert whole.valid is not None
    assert torch.equal(torch.cat([p.valid for p in parts if p.valid is not None]), whole.valid)


def test_without_shuffling_the_order_is_kept_and_the_last_batch_is_short(folder: Path) -> None:
    loader = Loader(folder, batch_size=20, shuffle=False)
    assert len(loader) == 6
    batches = [loader.batch(i) for i in range(len(loader))]
    assert [n for b in batches for n in names(b)] == list(range(103))
    assert [len(b.x) for b in batches] == [20] * 5 + [3]
    assert loader.batch(5, first=10, count=5).x.shape == (0, LENGTH)
    with pytest.raises(ValueError, match="step 6"):
        loader.batch(6)
    assert len(Loader(folder, batch_size=20)) == 5
    assert len(Loader(folder, "valid", batch_size=20)) == 1


def test_padding_is_not_valid(folder: Path) -> None:
    batch = Loader(folder, batch_size=103, shuffle=False).batch(0)
    assert batch.x.dtype == torch.int64
    assert batch.given is None
    assert batch.valid is not None
    assert batch.valid.dtype == torch.bool
    assert batch.valid.sum(1).tolist() == [min(3 + i % 7 + 1, LENGTH) for i in range(103)]
    assert (batch.valid.int().diff(dim=1) <= 0).all(), "a gap before the end"


def test_errors_name_the_bad_argument(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"'test'.* train, valid"):
        Loader(folder, "test")
    with pytest.raises(ValueError, match="batch_size is 0"):
        Loader(folder, batch_size=0)
    with pytest.raises(ValueError, match=r"4 to 33 .*step 0"):
        Loader(folder).batch(0, 4, 29)
    with pytest.raises(ValueError, match="step -1"):
        Loader(folder).batch(-1)


def test_shards_are_memory_mapped(folder: Path) -> None:
    loader = Loader(folder)
    loader.batch(0)
    assert all(isinstance(tokens, np.memmap) for tokens, _ in loader._maps)
    assert json.loads((folder / "manifest.json").read_text())["fingerprint"] == loader.manifest.fingerprint


@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_one_to_one(n: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


def test_permute_of_a_large_range_uses_constant_memory() -> None:
    n = 10**12
    image = permute(np.arange(1000) * 10**9, n, 7)
    assert len(set(image.tolist())) == 1000
    assert 0 <= image.min() < image.max() < n


def test_permute_is_uniform_over_keys() -> None:
    """The images of 0 and 1 over 3,600 keys: each ordered pair within 5.5 standard deviations (false alarm < 2e-6)."""
    n, keys = 6, 3600
    pairs = np.array([permute(np.arange(2), n, key) for key in range(keys)])
    counts = np.bincount(pairs[:, 0] * n + pairs[:, 1], minlength=n * n).reshape(n, n)
    expected = keys / (n * (n - 1))
    off = counts[~np.eye(n, dtype=bool)]
    assert np.abs(off - expected).max() < 5.5 * np.sqrt(expected)
    assert np.trace(counts) == 0


def test_token_counts_are_those_of_the_scored_tokens_and_kept(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(folder, data)
    manifest = Manifest.load(data)
    batch = Loader(data, "train", 103, shuffle=False).batch(0)
    expected = torch.bincount(batch.x[batch.scored], minlength=manifest.vocab_size)
    assert manifest.token_counts == " ".join(str(n) for n in expected.tolist())
    assert sum(int(n) for n in manifest.token_counts.split()) == manifest.splits["train"].tokens
    kept = json.loads((data / "token_counts.json").read_text())
    kept["counts"] = "1 2 3"
    (data / "token_counts.json").write_text(json.dumps(kept))
    assert Manifest.load(data).token_counts == "1 2 3"  # not counted again
    kept["fingerprint"] = "of other data"
    (data / "token_counts.json").write_text(json.dumps(kept))
    assert Manifest.load(data).token_counts == " ".join(str(n) for n in expected.tolist())


def test_given_tokens_are_not_counted(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "ab", "target": "xyz"}), json.dumps({"prompt": "b", "target": "xx"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines * 8))
    prepare(f"text:{tmp_path}/a.jsonl", tmp_path / "out", tokenizer="bytes", length=LENGTH, packing="conditional")
    manifest = Manifest.load(tmp_path / "out")
    loader = Loader(tmp_path / "out", "train", 4, shuffle=False)
    batches = [loader.batch(i) for i in range(len(loader))]
    x, given = (torch.cat([batch[i] for batch in batches]) for i in (0, 2))
    found = torch.tensor([int(n) for n in manifest.token_counts.split()])
    assert torch.equal(found, torch.bincount(x[~given], minlength=manifest.vocab_size))
    assert found[ord("a")] == 0 < found[ord("x")]
