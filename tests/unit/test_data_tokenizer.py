"""Tokenizers: text to ids and back, special ids, files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers
from tokenizers.pre_tokenizers import ByteLevel

from esolm.data import Tokenizer, tokenizer
from esolm.data.tokenizer import PACKAGED, from_json

TEXTS = ["the cat sat on the mat. " * 20, "The dog, the rat — and the “bat”\n\n", "naïve 世界 🙂 \t\r\n"]
AWKWARD = ["", " ", "  two  spaces ", "<|endoftext|> and <|mask|> and [MASK]", "\x00\x7f\r\n", "e\u0301 世界 🙂"]


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    entries = [*sorted(ByteLevel.alphabet()), *("".join(m) for m in merges), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(entries)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    return folder


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert-base-uncased")
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "!", "[", "]", "mask"]
    (folder / "vocab.txt").write_text("\n".join(entries) + "\n")
    return folder


@pytest.fixture(scope="module")
def every(gpt2_folder: Path) -> list[Tokenizer]:
    return [tokenizer("bytes"), tokenizer("bpe:300", TEXTS), tokenizer(f"gpt2:{gpt2_folder}")]


@settings(max_examples=200)
@given(text=st.text() | st.sampled_from(AWKWARD))
def test_round_trips_are_exact_and_give_no_special_id(every: list[Tokenizer], text: str) -> None:
    for t in every:
        ids = t.encode(text)
        assert t.decode(ids) == text, t.name
        assert not {t.mask_id, t.eos_id} & set(ids), t.name
        assert all(0 <= i < t.vocab_size for i in ids)


def test_a_batch_equals_its_texts_one_by_one(every: list[Tokenizer]) -> None:
    for t in every:
        assert t.encode_batch(TEXTS + AWKWARD) == [t.encode(text) for text in TEXTS + AWKWARD]


def test_bytes_are_byte_values() -> None:
    t = tokenizer("bytes")
    assert t.encode("é\x00A") == list("é\x00A".encode())
    assert (t.eos_id, t.bos_id, t.mask_id, t.vocab_size) == (256, 256, 257, 258)
    assert t.decode([0xE4, 65]) == "\ufffdA"


def test_the_mask_is_decoded_as_the_given_text() -> None:
    t = tokenizer("bytes")
    assert t.decode([65, t.mask_id, 66]) == "A_B"
    assert t.decode([65, t.mask_id, 66], mask="▁▁") == "A▁▁B"


def test_bpe_has_its_size_and_the_mask_is_the_last_id() -> None:
    t = tokenizer("bpe:300", TEXTS)
    assert (t.vocab_size, t.mask_id, t.name) == (301, 300, "bpe:300")
    assert t.eos_id == t.bos_id != t.mask_id
    assert len(t.encode("the cat sat on the mat. ")) < len(b"the cat sat on the mat. ") / 2


def test_bpe_training_is_deterministic_and_reads_a_stream_once() -> None:
    again = tokenizer("bpe:300", iter(TEXTS))
    assert again.sha256 == tokenizer("bpe:300", TEXTS).sha256
    assert again.sha256 != tokenizer("bpe:300", [t.upper() for t in TEXTS]).sha256


@pytest.mark.parametrize("spec", ["bpe:256", "bpe:many", "bpe:-5", "bpe:"])
def test_a_bad_size_is_named(spec: str) -> None:
    with pytest.raises(ValueError, match=f"'{spec}'.*at least 257"):
        tokenizer(spec, TEXTS)


def test_a_size_too_large_for_the_text_names_the_largest() -> None:
    with pytest.raises(ValueError, match=r"bpe:2\d\d "):
        tokenizer("bpe:5000", ["tiny"])


def test_gpt2_from_vocabulary_and_merges(gpt2_folder: Path) -> None:
    t = tokenizer(str(gpt2_folder))
    assert t.core.id_to_token(t.encode(" the")[0]) == "Ġthe"
    assert (t.eos_id, t.bos_id, t.mask_id, t.vocab_size) == (259, 259, 260, 261)


def test_bert_has_its_own_mask_and_lower_cases(bert_folder: Path) -> None:
    t = tokenizer(f"bert-base-uncased:{bert_folder}")
    assert t.name == "bert-base-uncased"
    assert (t.mask_id, t.bos_id, t.eos_id, t.vocab_size) == (4, 2, 3, 12)
    assert t.encode("The CATS!") == [5, 6, 7, 8]
    assert t.encode("[MASK]") == [9, 11, 10]
    assert t.decode([5, 6, 7, 8]) == "the cats!"
    assert t.decode([5, 4, 8]) == "the _!"


def test_save_and_load_round_trip(every: list[Tokenizer], bert_folder: Path, tmp_path: Path) -> None:
    for i, t in enumerate([*every, tokenizer(str(bert_folder))]):
        folder = tmp_path / str(i)
        folder.mkdir()
        t.save(folder)
        for again in (Tokenizer.load(folder), tokenizer(str(folder))):
            assert again.encode_batch(AWKWARD) == t.encode_batch(AWKWARD)
            for name in ("name", "vocab_size", "mask_id", "eos_id", "bos_id", "sha256"):
                assert getattr(again, name) == getattr(t, name)


def test_a_foreign_tokenizer_json_keeps_its_ids_and_declared_tokens(tmp_path: Path) -> None:
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<stop>": 1, "<?>": 2}, unk_token="<?>"))
    core.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer(str(tmp_path)).eos_id is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        t = tokenizer(str(path))
        assert (t.eos_id, t.mask_id, t.vocab_size) == (1, 3, 4)


def test_a_bundled_model_has_a_tokenizer_of_its_name() -> None:
    assert tokenizer("stories").sha256 == tokenizer(str(PACKAGED / "stories")).sha256


def test_errors_name_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'gpt3'.*bpe:SIZE"):
        tokenizer("gpt3")
    with pytest.raises(ValueError, match="nowhere"):
        tokenizer(f"gpt2:{tmp_path / 'nowhere'}")
    with pytest.raises(ValueError, match=r"needs tokenizer\.json"):
        tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match=r"bpe:300.*`texts`"):
        tokenizer("bpe:300")
    with pytest.raises(ValueError, match=r"tokenizer_ids\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        tokenizer(str(tmp_path))

    class Offline:
        @staticmethod
        def from_pretrained(name: str) -> None:
            raise OSError("no network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tokenizers, "Tokenizer", Offline)
    with pytest.raises(ValueError, match=r"no network.*gpt2:PATH"):
        tokenizer("gpt2")


@pytest.mark.skipif("ESOLM_TEST_TOKENIZERS" not in os.environ, reason="ESOLM_TEST_TOKENIZERS is not set")
def test_the_real_vocabularies() -> None:
    folder = Path(os.environ["ESOLM_TEST_TOKENIZERS"])
    gpt2 = tokenizer(f"gpt2:{folder / 'gpt2'}")
    assert (gpt2.vocab_size, gpt2.mask_id, gpt2.eos_id) == (50258, 50257, 50256)
    assert gpt2.encode("Hello world") == [15496, 995]
    bert = tokenizer(f"bert-base-uncased:{folder / 'bert-base-uncased'}")
    assert (bert.vocab_size, bert.mask_id, bert.bos_id, bert.eos_id) == (30522, 103, 101, 102)
    assert bert.encode("Hello, world!") == [7592, 1010, 2088, 999]


def test_a_text_after_another_has_no_space_of_its_own() -> None:
    """Llama's tokenizers put a space before every text; inside a text that would be one too many."""
    core = tokenizers.Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "b": 2, "▁a": 3, "\n": 4}, merges=[("▁", "a")]))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found = from_json(core.to_str(), "spaces")
    assert found.encode("a b") == [3, 0, 2]
    assert found.encode_after(" a b") == [3, 0, 2]
    assert found.encode_after("b") == [2]
    assert found.encode_after("") == []
    for plain in (tokenizer("bytes"), tokenizer("bpe:262", ["one two three " * 50])):
        for text in (" two", "two", ".", "", "\n\nthree"):
            assert plain.encode_after(text) == plain.encode(text)
