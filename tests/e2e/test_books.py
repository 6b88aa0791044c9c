"""The model that comes with the package: small, whole, and worth the disk it takes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from safetensors.torch import load_file

import esolm
from esolm.cli import main
from esolm.storage import folder
from esolm.storage.folder import PACKAGED

SENTENCES = (
    "He took his hat from the table, and went out of the room without a word.",
    "She looked at him for a moment, and then she began to laugh.",
    "The old man sat down by the fire and told them the story of his life.",
    "It was late in the evening when we came to the house at the end of the road.",
)
"""Plain English of the tests' own."""


@pytest.fixture(scope="module")
def lm() -> esolm.LanguageModel:
    return esolm.load("books")


def test_it_is_small_and_has_a_card() -> None:
    files = [path for path in (PACKAGED / "books").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 10_000_000
    assert {path.parent for path in files} == {PACKAGED / "books"}, (
        "package-data in pyproject.toml has no deeper folder"
    )
    card = (PACKAGED / "books" / "README.md").read_text("utf-8")
    for heading in ("## Intended use", "## Training text", "## Reproduction"):
        assert heading in card
    about = json.loads((PACKAGED / "books" / "config.json").read_text("utf-8"))["about"]
    assert f"| steps | {about['steps']:,} |" in card


@pytest.mark.parametrize("text", SENTENCES)
def test_words_in_order_are_likelier_than_shuffled(lm: esolm.LanguageModel, text: str) -> None:
    words = text.split()
    random.Random(0).shuffle(words)
    given, shuffled = lm.log_prob([text, " ".join(words)], num_orders=4, seed=0).total
    assert given > shuffled + 10


def test_samples_are_english_words(lm: esolm.LanguageModel) -> None:
    """A sixth of the words are among the commonest, left to right and by diffusion in 16 steps."""
    common = {"the", "of", "and", "to", "a", "in", "he", "it", "was", "that", "his", "i", "with", "as", "had", "you"}
    for options in ({"sampler": "left_to_right"}, {"alpha_0": 1.0, "num_steps": 16}):
        text = lm.sample(num_samples=1, top_p=0.9, seed=0, **options).texts[0]
        words = [word.strip(".,;!?\"'").lower() for word in text.split()]
        assert len(words) > 30
        assert sum(word in common for word in words) / len(words) > 1 / 6


@pytest.mark.parametrize("options", [{"weights": "model"}, {"which": "last"}])
def test_there_is_nothing_to_choose(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="has one set of weights: leave it out"):
        esolm.load("books", **options)


def test_it_can_be_exported_by_its_name(tmp_path: Path) -> None:
    """The copy says of its making what the model says, and has its weights."""
    out = tmp_path / "mine"
    assert main(["export", "books", str(out), "--dtype=bfloat16"]) == 0
    one, other = (json.loads((home / "config.json").read_text("utf-8")) for home in (PACKAGED / "books", out))
    assert one["about"] == other["about"]
    name = "model.safetensors"
    assert folder.fingerprint(load_file(out / name)) == folder.fingerprint(load_file(PACKAGED / "books" / name))


def test_by_its_name_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["infill", "books", "The old man ____ the door.", "--tokens_per_blank", "2", "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["texts"][0]
    assert text.startswith("The old man")
    assert text.endswith("the door.")
    assert main(["info", "books"]) == 0
    assert "esolm" in capsys.readouterr().out
