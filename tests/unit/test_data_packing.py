"""Packing: every packing equals a naive implementation, for any division of the documents into chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esolm.data.packing import Chunk, PackedRows, PackingTotals, packing

EOS, BOS = 90, 91
Doc = tuple[list[int], list[int]]  # prompt, text
ids = st.lists(st.integers(0, 50), max_size=12)
documents = st.lists(st.tuples(ids, ids.filter(bool)), max_size=12)


def chunk(docs: list[Doc]) -> Chunk:
    flat = [i for prompt, text in docs for i in prompt + text]
    lengths = [[len(part) for part in parts] for parts in zip(*docs)] or [[], []]
    sizes = [3 * n for n in lengths[1]]
    return Chunk(np.array(flat, np.uint32), *(np.array(n, int) for n in (lengths[1], lengths[0], sizes)))


def run(name: str, docs: list[Doc], cut: int, length: int, target_length: int = 2) -> tuple[list, list, PackingTotals]:
    """Pack documents in two chunks; return rows, counts and totals."""
    totals = PackingTotals()
    chunks = [chunk(part) for part in (docs[:cut], docs[cut:]) if part]
    blocks: list[PackedRows] = list(packing(name, length, EOS, BOS, target_length)(iter(chunks), totals))
    rows = [row for block in blocks for row in block.tokens.tolist()]
    counts = [n for block in blocks if block.counts is not None for n in block.counts.tolist()]
    return rows, counts, totals


def plain(docs: list[Doc]) -> list[Doc]:
    return [([], text) for _, text in docs]


@given(docs=documents, cut=st.integers(0, 12), length=st.integers(4, 9))
def test_wrap_is_one_stream_with_eos_after_each_document(docs: list[Doc], cut: int, length: int) -> None:
    rows, counts, totals = run("wrap", plain(docs), cut, length)
    stream = [i for _, text in docs for i in [*text, EOS]]
    n = len(stream) // length
    assert rows == [stream[i * length : (i + 1) * length] for i in range(n)]
    assert counts == []
    assert (totals.documents, totals.tokens, totals.dropped) == (len(docs), n * length, len(stream) - n * length)
    assert totals.bytes == pytest.approx(3 * sum(len(t) for _, t in docs) * n * length / max(len(stream), 1))


@given(docs=documents, cut=st.integers(0, 12), length=st.integers(4, 9))
def test_cls_separates_documents_and_encloses_rows(docs: list[Doc], cut: int, length: int) -> None:
    rows, _, totals = run("cls", plain(docs), cut, length)
    stream = [i for _, text in docs for i in [*text, BOS]]
    inner = length - 2
    expected = [[BOS, *stream[i : i + inner], BOS] for i in range(0, len(stream) - inner + 1, inner)]
    assert rows == expected
    assert totals.tokens == len(rows) * length


@given(docs=documents, cut=st.integers(0, 12), length=st.integers(4, 9))
def test_pad_has_one_document_per_row(docs: list[Doc], cut: int, length: int) -> None:
    rows, counts, totals = run("pad", plain(docs), cut, length)
    ended = [[*text, EOS][:length] for _, text in docs]
    assert rows == [row + [EOS] * (length - len(row)) for row in ended]
    assert counts == [len(row) for row in ended]
    assert totals.tokens == sum(counts)
    assert totals.dropped == sum(len(text) + 1 for _, text in docs) - sum(counts)


@given(docs=documents, cut=st.integers(0, 12), length=st.integers(4, 9))
def test_single_has_one_whole_document_per_row(docs: list[Doc], cut: int, length: int) -> None:
    rows, counts, totals = run("single", plain(docs), cut, length)
    fitting = [text for _, text in docs if len(text) < length]
    assert rows == [text + [EOS] * (length - len(text)) for text in fitting]
    assert counts == [], "all tokens are scored"
    assert (totals.documents, totals.skipped, totals.dropped) == (len(docs), len(docs) - len(fitting), 0)
    assert (totals.tokens, totals.bytes) == (len(fitting) * length, 3 * sum(map(len, fitting)))


@given(docs=documents, cut=st.integers(0, 12), length=st.integers(4, 12), room=st.integers(2, 4))
def test_conditional_keeps_the_end_of_the_prompt_and_ends_with_eos(
    docs: list[Doc], cut: int, length: int, room: int
) -> None:
    rows, counts, totals = run("conditional", docs, cut, length, room)
    expected, given_, skipped = [], [], 0
    for prompt, text in docs:
        kept = prompt[-(length - room) :] if length > room else []
        if len(kept) + len(text) + 1 > length:
            skipped += 1
            continue
        row = [*kept, *text, EOS]
        expected.append(row + [EOS] * (length - len(row)))
        given_.append(len(kept))
    assert rows == expected
    assert counts == given_
    assert all(row[-1] == EOS for row in rows), "a target without EOS"
    assert (totals.documents, totals.skipped) == (len(docs), skipped)
    assert totals.tokens == sum(length - g for g in given_)


def test_the_kept_prompt_does_not_depend_on_its_target() -> None:
    prompt = list(range(20))
    _, counts, _ = run("conditional", [(prompt, [50] * n) for n in (1, 2, 3)], 0, 12, 4)
    assert counts == [8, 8, 8]


@pytest.mark.parametrize(
    ("name", "length", "eos", "room", "message"),
    [
        ("wrapped", 8, EOS, 2, "'wrapped'.*wrap, cls, pad, single, conditional"),
        ("wrap", 3, EOS, 2, "length is 3"),
        ("conditional", 8, EOS, 9, "target_length is 9"),
        ("wrap", 8, None, 2, "'wrap'.*EOS"),
    ],
)
def test_bad_options(name: str, length: int, eos: int | None, room: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packing(name, length, eos, BOS, room)
