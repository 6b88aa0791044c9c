"""The seven sets of the zero-shot table, read as the paper's authors read them, on fixtures of a few records.

Every set is compared with a plain version of the authors' grouping: all detokenised records in one stream, with or
without EOS after each, cut into sequences between BOS and EOS, the rest dropped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from esolm import cli
from esolm.data.detokenize import detokenize
from esolm.data.tokenizer import tokenizer
from esolm.likelihood.texts import read
from support.runs import make_run

BYTES = tokenizer("bytes")
LENGTH = 16
SETS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    # file name and content, options, and the texts that are scored
    "ptb": (
        "ptb.txt\nthe <unk> 's N N billion\nit did n't\n",
        {"lines": True, "detokenizer": "ptb"},
        ["the ?'s 1 1 billion", "it didn't"],
    ),
    "wikitext": (
        "wiki.raw\n \n = Title = \n \n In 1 @,@ 000 years ( sic ) , well @-@ known . \n",
        {"lines": True, "newlines": True, "detokenizer": "wikitext"},
        [" = Title =\n", " In 1,000 years (sic), well-known.\n"],
    ),
    "lm1b": (
        "lm1b.txt\nHe left .\n\" Why ? \" she asked .\n",
        {"lines": True, "detokenizer": "lm1b"},
        ["He left.", '"Why?" she asked.'],
    ),
    "lambada": (
        'lambada.jsonl\n{"text": " he said “yes”, and went "}\n{"text": "she said no"}\n',
        {"detokenizer": "lambada"},
        ['\nhe said "yes", and went', "\nshe said no"],
    ),
    "ag_news": (
        'ag.jsonl\n{"text": "Wall St. Bears , Back", "label": 2}\n{"text": "Oil prices soar"}\n',
        {},
        ["Wall St. Bears , Back", "Oil prices soar"],
    ),
    "pubmed": (
        'pubmed.jsonl\n{"article": "the tails ( n @-@ 3 ) , were long . \\n we saw it ?"}\n',
        {"field": "article", "detokenizer": "scientific_papers"},
        ["the tails (n-3), were long.\nwe saw it?"],
    ),
    "arxiv": (
        'arxiv.jsonl\n{"article": "we show @xmath0 , i.e. $ 5 / 6 of them ."}\n',
        {"field": "article", "detokenizer": "wikitext,lm1b"},
        ["we show @xmath0, i.e. $5/6 of them."],
    ),
}  # fmt: skip


def write(folder: Path, name: str) -> str:
    file, _, content = SETS[name][0].partition("\n")
    (folder / file).write_text(content, encoding="utf-8")
    return str(folder / file)


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("name", SETS)
def test_every_set_is_grouped_as_the_authors_do(tmp_path: Path, name: str, eos: bool) -> None:
    _, options, texts = SETS[name]
    stream = [id for text in texts for id in [*text.encode(), *([BYTES.eos_id] if eos else [])]]
    found = read(write(tmp_path, name), BYTES, LENGTH, eos=eos, frame=True, **options)
    inner = LENGTH - 2
    groups = [stream[i : i + inner] for i in range(0, len(stream) // inner * inner, inner)]
    assert found.batch.x.tolist() == [[BYTES.bos_id, *group, BYTES.eos_id] for group in groups]
    assert found.batch.valid is None
    assert found.bytes == sum(id != BYTES.eos_id for group in groups for id in group)
    plain = read(write(tmp_path, name), BYTES, LENGTH, eos=eos, **options)
    assert plain.batch.x[plain.batch.scored].tolist() == stream
    assert plain.bytes == sum(len(text.encode()) for text in texts)


def test_delimited_texts_are_those_of_json_lines(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("one\n\ntwo\n<|end|>\nthree\n")
    (tmp_path / "d.jsonl").write_text('{"text": "one\\n\\ntwo"}\n{"text": "three"}\n')
    delimited = read(str(tmp_path / "d.txt"), BYTES, 32, delimiter="<|end|>")
    assert delimited.batch.x.equal(read(str(tmp_path / "d.jsonl"), BYTES, 32).batch.x)


def test_lines_are_texts_of_their_own(tmp_path: Path) -> None:
    """Passages of LAMBADA begin with a line break each; without --lines the file is one text."""
    (file := tmp_path / "lambada.txt").write_text("one passage \nanother \n")
    options: dict[str, Any] = {"detokenizer": "lambada", "length": 64}
    for lines, expected in ((True, ["\none passage", "\nanother"]), (False, ["\none passage \nanother"])):
        found = read(str(file), BYTES, LENGTH, lines=lines, **options)
        ids = [id for text in expected for id in [*text.encode(), BYTES.eos_id]]
        assert found.batch.x[found.batch.scored].tolist() == ids


def test_a_limit_without_eos_and_with_frames(tmp_path: Path) -> None:
    (file := tmp_path / "a.txt").write_text("abcdefgh\nijklmnop\n")
    found = read(str(file), BYTES, 8, lines=True, eos=False, frame=True, num_sequences=2)
    assert [bytes(row[1:-1]) for row in found.batch.x.tolist()] == [b"abcdef", b"ghijkl"]
    assert found.bytes == 12
    cut = read(str(file), BYTES, 5, lines=True, eos=False, num_sequences=2)
    assert (bytes(cut.batch.x.flatten().tolist()), cut.bytes) == (b"abcdefghij", 10)


def test_rules_are_chained() -> None:
    text = "the dogs ' tails @-@ x , http : / / a.b ( c ) $ 5 ?"
    assert detokenize(text, "scientific_papers") == detokenize(detokenize(text, "wikitext"), "lm1b")
    assert detokenize(text, "scientific_papers") == detokenize(text, "wikitext,lm1b")
    assert detokenize(text, "lm1b,wikitext") != detokenize(text, "wikitext,lm1b")
    assert detokenize("a /' 5/ b", "wikitext") == "a /'[0-9]/ b"  # the authors' rule, which was meant otherwise


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"detokenizer": "wikitext,x"}, "no detokenizer 'x'"),
        ({"detokenizer": ""}, "no detokenizer ''"),
        ({"newlines": True}, "--lines"),
        ({"frame": True, "length": 2}, "at least 3"),
        ({"frame": True, "length": 99}, "--length"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    (file := tmp_path / "a.txt").write_text("abc")
    with pytest.raises(ValueError, match=words):
        read(str(file), BYTES, LENGTH, **options)


def test_the_command_scores_all_seven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(make_run(tmp_path / "run", length=LENGTH))
    for name, (_, options, texts) in SETS.items():
        words = [f"--{key}={str(value).lower()}" for key, value in options.items()]
        more = ["--eos=false", "--frame=true", "--batch_size=4", "--json"]
        assert cli.main(["score", run, write(tmp_path, name), *words, *more]) == 0
        (record,) = json.loads(capsys.readouterr().out)
        sequences = sum(len(text.encode()) for text in texts) // (LENGTH - 2)
        assert (record["sequences"], record["tokens"]) == (sequences, sequences * LENGTH)
    (tmp_path / "many.txt").write_text("\n".join(f"{i} ( so ) , yes" for i in range(99)))
    data = ["prepare", str(tmp_path / "many.txt"), str(tmp_path / "data"), "--lines=true", "--tokenizer=bytes"]
    assert cli.main([*data, "--detokenizer=wikitext,lm1b", "--length=8"]) == 0
    assert cli.main(["score", run, str(tmp_path / "data"), "--frame=true"]) == 2
    assert cli.main([*data, "--detokenizer=other", "--length=8"]) == 2
