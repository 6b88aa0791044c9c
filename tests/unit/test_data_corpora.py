"""Corpora: reading, splitting, and the errors for corpora that cannot be read."""

from __future__ import annotations

import gzip
import json
import sys
import tracemalloc
from itertools import islice
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from esolm.data import Document, corpus, pydocs
from esolm.data.corpora import Corpus, digest, split, split_tail
from esolm.data.detokenize import detokenize
from esolm.data.documents import Reading


def texts(found: Corpus) -> list[str]:
    return [document.text for document in found.train()]


def write_jsonl(path: Path, records: list[dict], mark: bytes = b"") -> Path:
    data = mark + "".join(json.dumps(record) + "\n" for record in records).encode()
    packed = {".gz": gzip.compress, ".zst": lambda d: zstandard.ZstdCompressor().compress(d)}
    path.write_bytes(packed.get(path.suffix, bytes)(data))
    return path


def of(documents: list[str], name: str = "made") -> Corpus:
    return Corpus(name, ((name, ""),), lambda: (Document(d) for d in documents))


@pytest.mark.slow
def test_pydocs_is_large_and_fixed_and_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise AssertionError("pydocs went to the network")

    monkeypatch.setattr("socket.socket", offline)
    before = set(sys.modules)
    found = texts(corpus("pydocs"))
    assert set(sys.modules) == before
    assert sum(len(text.encode()) for text in found) > 1_000_000
    assert corpus("pydocs").name == f"pydocs-{sys.version.split()[0].rstrip('+')}"
    assert any("json.dumps(obj, " in text and "JSON formatted" in text for text in found)
    assert any(text.startswith('The "assert" statement') for text in found)
    assert len(found) > 100


def test_pydocs_does_without_the_topics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "test").mkdir()
    long = "A sentence that says what this is and why. " * 3
    (tmp_path / "pack/__init__.py").write_text(f'"""{long}"""\nraise RuntimeError("imported")')
    (tmp_path / "b.py").write_text(f'class C:\n    def f(self, x=1):\n        """{long}"""\n\ndef g(): "short"\n')
    (tmp_path / "test/b.py").write_text(f'"""{long}"""')
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    for function in (pydocs.files, pydocs.documents, pydocs.sha256):
        function.cache_clear()
    try:
        assert [d.splitlines()[0] for d in pydocs.documents()] == ["b.C.f(self, x=1)", "pack"]
    finally:
        for function in (pydocs.files, pydocs.documents, pydocs.sha256):
            function.cache_clear()


def test_folders_globs_and_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/x.md", "a/y.txt", "c/x.md", "skip.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}\n")
    assert texts(corpus(f"text:{tmp_path}")) == [f"text of {n}\n" for n in ("a/x.md", "a/y.txt", "b.txt", "c/x.md")]
    assert texts(corpus(f"text:{tmp_path}/*/x.md")) == ["text of a/x.md\n", "text of c/x.md\n"]
    both = corpus(f"text:{tmp_path}/b.txt,{tmp_path}/a")
    assert texts(both) == [f"text of {n}\n" for n in ("b.txt", "a/x.md", "a/y.txt")]
    assert [name for name, _ in both.sources] == ["b.txt", "x.md", "y.txt"]
    assert both.name == "text:b.txt,a"


def test_sources_are_hashed_by_content(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("one")
    before = corpus(f"text:{tmp_path}/one.txt").sources
    (tmp_path / "one.txt").write_text("two")
    assert corpus(f"text:{tmp_path}/one.txt").sources != before


def test_a_long_file_is_cut_at_paragraphs_and_loses_nothing(tmp_path: Path) -> None:
    paragraphs = [f"{i} " + "word " * 50 + "\n\n" for i in range(2000)]
    (tmp_path / "long.txt").write_text("".join(paragraphs))
    found = texts(corpus(f"text:{tmp_path}/long.txt"))
    assert "".join(found) == "".join(paragraphs)
    assert all(text.endswith("\n\n") for text in found)
    assert all(16_384 <= len(text) < 17_000 for text in found[:-1])


def test_one_endless_line_is_read_in_bounded_memory(tmp_path: Path) -> None:
    (tmp_path / "line.txt").write_text("x" * 4_000_000)
    stream = corpus(f"text:{tmp_path}/line.txt").train()
    tracemalloc.start()
    first = list(islice(stream, 3))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(len(d.text) < 70_000 for d in first)
    assert peak < 1_000_000
    assert sum(len(d.text) for d in stream) + sum(len(d.text) for d in first) == 4_000_000


def test_lines(tmp_path: Path) -> None:
    (tmp_path / "m.smi").write_text("CCO\n\nc1ccccc1\n")
    (tmp_path / "m.txt").write_text("CCO\n\nc1ccccc1\n")
    assert texts(corpus(f"text:{tmp_path}/m.smi")) == ["CCO", "c1ccccc1"]
    assert texts(corpus(f"text:{tmp_path}/m.txt", Reading(lines=True))) == ["CCO", "c1ccccc1"]
    assert texts(corpus(f"text:{tmp_path}/m.txt")) == ["CCO\n\nc1ccccc1\n"]


@pytest.mark.parametrize("last", ["", "<|endoftext|>\n", "<|endoftext|>"])
def test_a_line_separates_documents(tmp_path: Path, last: str) -> None:
    stories = ["One.\n\n Still one.", "Two has <|endoftext|> in a line.", "Three."]
    (tmp_path / "s.txt").write_text("\n <|endoftext|> \n".join(f"\n{story} \n" for story in stories) + last)
    assert texts(corpus(f"text:{tmp_path}/s.txt", Reading(delimiter="<|endoftext|>"))) == stories


def test_blank_lines_may_separate_documents(tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_text("One.\nStill one.\n\n\nTwo.\n")
    assert texts(corpus(f"text:{tmp_path}/s.txt", Reading(delimiter=""))) == ["One.\nStill one.", "Two."]


def test_a_delimiter_without_effect_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_text("One.\nTwo.\n")
    with pytest.raises(ValueError, match=r"s\.txt has no line '---'"):
        texts(corpus(f"text:{tmp_path}/s.txt", Reading(delimiter="---")))
    for spec in ("pydocs", "hf:some/thing", "lm1b", "openwebtext"):
        with pytest.raises(ValueError, match="delimiter"):
            corpus(spec, Reading(delimiter="---"))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_jsonl(tmp_path: Path, suffix: str) -> None:
    records = [{"text": "é one", "body": ["a b.", "c."]}, {"text": " ", "body": ["d"]}, {"text": "two", "body": "e"}]
    path = write_jsonl(tmp_path / f"d.jsonl{suffix}", records)
    assert texts(corpus(f"text:{path}")) == ["é one", "two"]
    assert texts(corpus(f"text:{tmp_path}", Reading(field="body"))) == ["a b. c.", "d", "e"]


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl.gz", [{"text": f"number {i}"} for i in range(99)])
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"d\.jsonl\.gz is damaged"):
        texts(corpus(f"text:{path}"))


def test_a_prompt_has_a_document_for_each_target(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"s": ["One.", "Two."], "t": ["x", "y"]}, {"s": "Three.", "t": "z"}])
    found = corpus(f"text:{path}", Reading(prompt_field="s", target_field="t"))
    assert list(found.train()) == [Document("x", "One. Two."), Document("y", "One. Two."), Document("z", "Three.")]


def test_lines_have_an_empty_prompt_and_are_split_by_their_text(tmp_path: Path) -> None:
    (tmp_path / "m.smi").write_text("CCO\nCC\n")
    found = list(corpus(f"text:{tmp_path}/m.smi", Reading(prompt_field="prompt")).train())
    assert found == [Document("CCO", ""), Document("CC", "")]
    assert digest(found[0]) != digest(found[1])


def test_errors_name_the_file_and_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'nope'.*pydocs"):
        corpus("nope")
    with pytest.raises(ValueError, match=r"missing\.txt"):
        corpus(f"text:{tmp_path}/missing.txt")
    with pytest.raises(ValueError, match=r"\.txt, .*\.jsonl"):
        corpus(f"text:{tmp_path}")
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "a"}, {"title": "b"}])
    with pytest.raises(ValueError, match=r"d\.jsonl, line 2: .*'text'.*'title'"):
        texts(corpus(f"text:{path}"))
    path.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"d\.jsonl, line 2 .*JSON"):
        texts(corpus(f"text:{path}"))
    path.write_text('{"text": "\\ud800"}\n')
    with pytest.raises(ValueError, match=r"d\.jsonl, line 1 .*UTF-8"):
        texts(corpus(f"text:{path}"))
    packed = write_jsonl(tmp_path / "p.jsonl.zst", [{"text": "a"}])
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ValueError, match=r"pip install 'esolm\[zstd\]'"):
        texts(corpus(f"text:{packed}"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'esolm\[datasets\]'"):
        corpus("hf:name")


@pytest.mark.parametrize("name", ["my.txt", "a,b.txt", "data,1"])
def test_a_bare_path_is_the_same_as_text(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    if not path.suffix:
        path.mkdir()
        path /= "one.txt"
    path.write_text("some text\n")
    bare, spec = corpus(name), corpus(f"text:{name}")
    assert texts(bare) == texts(spec) == ["some text\n"]
    assert (bare.name, bare.sources) == (spec.name, spec.sources)
    assert bare.name == f"text:{name}"


def test_bare_paths_can_be_lists_and_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x,y").mkdir()
    for name in ("a.txt", "b.txt", "x,y/c.txt"):
        (tmp_path / name).write_text(name)
    assert texts(corpus("b.txt,a.txt")) == ["b.txt", "a.txt"]
    assert texts(corpus("*.txt")) == ["a.txt", "b.txt"]
    assert texts(corpus("x,y/*.txt")) == ["x,y/c.txt"]
    with pytest.raises(ValueError, match=r"'none\.txt'"):
        corpus("a.txt,none.txt")


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_byte_order_mark_is_stripped(tmp_path: Path, suffix: str) -> None:
    path = write_jsonl(tmp_path / f"d.jsonl{suffix}", [{"text": "one"}], mark=b"\xef\xbb\xbf")
    assert texts(corpus(str(path))) == ["one"]
    (tmp_path / "t.txt").write_bytes(b"\xef\xbb\xbfone")
    assert texts(corpus(f"{tmp_path}/t.txt")) == ["one"]


@pytest.mark.parametrize(
    ("data", "encoding"), [(b"caf\xe9 ol\xe9", "WINDOWS-1252"), ("text".encode("utf-16"), "UTF-16")]
)
def test_a_wrong_encoding_names_the_file_and_the_remedy(tmp_path: Path, data: bytes, encoding: str) -> None:
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt").write_bytes(data)
    with pytest.raises(ValueError, match=rf"^b\.txt is not UTF-8.*iconv -f {encoding}") as raised:
        texts(corpus(str(tmp_path)))
    assert not isinstance(raised.value, UnicodeError)


def test_a_file_that_is_no_text_is_not_to_be_converted(tmp_path: Path) -> None:
    for data in (b"%PDF-1.7 \xe2\xe3", b"PK\3\4\0\0\xff"):
        (tmp_path / "a.pdf.txt").write_bytes(data)
        with pytest.raises(ValueError, match="not a text file: extract its text"):
            texts(corpus(str(tmp_path / "a.pdf.txt")))


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "none.txt").touch()
    with pytest.raises(ValueError, match=r"none\.txt is empty"):
        corpus(str(tmp_path / "none.txt"))
    (tmp_path / "some.txt").write_text("text")
    assert texts(corpus(str(tmp_path))) == ["text"]
    (tmp_path / "blank.txt").write_text(" \n\n")
    with pytest.raises(ValueError, match=r"blank\.txt is empty"):
        split_tail(corpus(str(tmp_path / "blank.txt")), 0.05, cut=True)


@given(documents=st.lists(st.text(min_size=1, max_size=3), max_size=60), seed=st.integers(-3, 3), order=st.randoms())
def test_the_split_depends_on_content_alone(documents: list[str], seed: int, order: Random) -> None:
    sides = {d.text: name for name, d in split(of(documents), None, 0.3, seed)()}
    both = list(split(of(documents), None, 0.3, seed)())
    assert [d.text for _, d in both] == documents
    assert all(sides[d.text] == name for name, d in both), "a document on both sides"
    shuffled = documents * 2
    order.shuffle(shuffled)
    assert all(sides[d.text] == name for name, d in split(of(shuffled), None, 0.3, seed)())


def test_the_split_has_the_given_fraction_and_depends_on_the_seed() -> None:
    documents = [f"document {i}" for i in range(4000)]
    held = [{d.text for name, d in split(of(documents), None, 0.1, s)() if name == "valid"} for s in (0, 1)]
    assert all(400 - 95 < len(h) < 400 + 95 for h in held)  # 5 standard deviations
    assert len(held[0] & held[1]) < 100
    with pytest.raises(ValueError, match=r"valid_fraction is 1\.5"):
        split(of(documents), None, 1.5)


def test_targets_of_one_prompt_stay_together() -> None:
    found = Corpus("c", (), lambda: (Document(f"t{i}", f"p{i // 5}") for i in range(500)))
    sides: dict[str | None, set[str]] = {}
    for name, d in split(found, None, 0.3)():
        sides.setdefault(d.prompt, set()).add(name)
    assert all(len(s) == 1 for s in sides.values())
    assert {"train"} in sides.values()
    assert {"valid"} in sides.values()


def test_a_separate_valid_corpus_is_removed_from_train() -> None:
    found = list(split(of(["a", "b", "c", "b"]), of(["x", "b"]), 0.5)())
    assert [(n, d.text) for n, d in found] == [("train", "a"), ("train", "c"), ("valid", "x"), ("valid", "b")]


def test_openwebtext_holds_out_its_last_documents(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": t} for t in "abcdefd"])
    found = corpus(f"openwebtext:{path}")
    assert found.holdout == 100_000
    with pytest.raises(ValueError, match=r"7 .*holdout.* 100000"):
        split(found, None, 0.5)
    three = Corpus(**{**vars(found), "holdout": 3})
    assert ["".join((n, d.text)) for n, d in split(three, None, 0.5)()] == [
        *("traina", "trainb", "trainc"),  # d is held out further on
        *("valide", "validf", "validd"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("aaa.\n" * 4 + "\n" + "bbb.\n" * 6, "bbb.\n" * 3),  # at a line break
        ("a" * 60 + "\n\nb\nb " + "c" * 30, "b\nb " + "c" * 30),  # a paragraph break before a later line break
        ("a" * 89 + " " + "b" * 30, "b" * 30),  # a space, without lines
        ("a" * 100, "a" * 25),  # anywhere
        ("\n\n" + "a" * 98, "a" * 25),  # a break too far before the border is not used
    ],
)
def test_the_tail_of_one_document_is_cut_at_a_break(text: str, expected: str) -> None:
    found = list(split_tail(of([text]), 0.25, cut=True)())
    assert [name for name, _ in found] == ["train", "valid"]
    assert "".join(d.text for _, d in found) == text
    assert found[1][1].text == expected


def test_the_tail_of_several_documents() -> None:
    documents = ["a" * 10, "b" * 10, "c c c c c ", "d" * 10]
    cut = [(name, d.text) for name, d in split_tail(of(documents), 0.4, cut=True)()]
    assert cut == [
        ("train", "a" * 10),
        ("train", "b" * 10),
        ("train", "c c "),
        ("valid", "c c c "),
        ("valid", "d" * 10),
    ]
    whole = [(name, d.text) for name, d in split_tail(of(documents), 0.4, cut=False)()]
    assert whole == [("train", "a" * 10), ("train", "b" * 10), ("valid", "c c c c c "), ("valid", "d" * 10)]
    equal = [(name, d.text) for name, d in split_tail(of(["a", "b", "c", "b"]), 0.25, cut=True)()]
    assert equal == [("train", "a"), ("train", "c"), ("valid", "b")]


def test_lm1b_reads_its_own_folder(tmp_path: Path) -> None:
    for folder, name in (
        ("training-monolingual.x", "news.en-00001"),
        ("heldout-monolingual.x", "news.en.heldout-00000"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(f"{folder} one .\n{folder} two .\n")
    found = corpus(f"lm1b:{tmp_path}")
    assert (found.packing, found.detokenizer, found.name) == ("cls", "lm1b", "lm1b")
    assert texts(found) == ["training-monolingual.x one .", "training-monolingual.x two ."]
    assert found.valid is not None
    assert [d.text for d in found.valid()] == ["heldout-monolingual.x one .", "heldout-monolingual.x two ."]
    lines = corpus(f"lm1b:{tmp_path}/training*/*")
    assert (len(texts(lines)), lines.valid, lines.detokenizer) == (2, None, "lm1b")


class HubRows(list):
    _fingerprint = "f00d"


def test_hub_datasets_use_their_own_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"train": HubRows([{"text": "a"}, {"text": ""}]), "test": HubRows([{"text": "b"}])}
    calls: list = []
    fake = ModuleType("datasets")
    fake.load_dataset = lambda *args: calls.append(args) or parts  # type: ignore[attr-defined]
    fake.load_from_disk = lambda path: calls.append(path) or parts["train"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    found = corpus("hf:some/name,config")
    assert texts(found) == ["a"]
    assert found.valid is not None
    assert [d.text for d in found.valid()] == ["b"]
    assert found.sources == (("some/name,config/train", "f00d"), ("some/name,config/test", "f00d"))
    assert corpus("lm1b").packing == "cls"
    assert corpus("openwebtext").holdout == 100_000
    (tmp_path / "state.json").touch()
    assert corpus(f"hf:{tmp_path}").valid is None
    assert calls == [("some/name", "config"), ("dvruette/lm1b", None), ("Skylion007/openwebtext", None), str(tmp_path)]
    with pytest.raises(ValueError, match=r"row 0: .*'body'"):
        texts(corpus("hf:x", Reading(field="body")))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("lm1b", 'He said : " it \'s 5 / 6 ( or so ) " .', 'He said: "it\'s 5/6 (or so)" .'),
        ("lm1b", "See http : / / a.b , now ! Why ? Because he left .", "See http://a.b, now! Why? Because he left."),
        ("lm1b", "It cost $ 5 or £ 4 ; [ sic ] ' yes ' !", "It cost $5 or £4; [sic] 'yes'!"),
        (
            "wikitext",
            " = = Title = = \n In 1 @,@ 000 years ( sic ) , well @-@ known .",
            " == Title ==\nIn 1,000 years (sic), well-known .",
        ),
        ("wikitext", 'He said " yes " ; the dogs \' tails 5 @.@ 2 .', 'He said "yes"; the dogs\' tails 5.2 .'),
        ("ptb", "the <unk> 's $ N N N billion did n't", "the ?'s $1 1 1 billion didn't"),
        ("lambada", "  he said “ yes ”\n", '\nhe said " yes "'),
        (None, " a , b ", " a , b "),
    ],
)
def test_detokenizers(name: str | None, text: str, expected: str) -> None:
    assert detokenize(text, name) == expected


def test_documents_are_read_lazily(tmp_path: Path) -> None:
    """Taking two documents does not read the third, which is malformed."""
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "a"}, {"text": "b"}])
    with path.open("a") as file:
        file.write("not json\n")
    assert [d.text for d in islice(corpus(f"text:{path}").train(), 2)] == ["a", "b"]
