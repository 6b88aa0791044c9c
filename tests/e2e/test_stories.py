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

HOME = PACKAGED / "stories"
SENTENCES = (
    "Tom had a red ball. He liked to play with it in the park.",
    "The little dog was sad because it could not find its mom.",
    "Lily and her brother went to the sea. They saw a big fish.",
    "One day, a bird sat in a tall tree and sang a happy song.",
)
"""Simple English of the tests' own."""
COMMON = {"the", "a", "and", "to", "was", "he", "she", "it", "in", "her", "his", "they", "with", "said", "of", "had"}


@pytest.fixture(scope="module")
def lm() -> esolm.LanguageModel:
    return esolm.load("stories")


def test_it_is_small_and_has_a_card() -> None:
    files = [path for path in HOME.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16_000_000
    assert {path.parent for path in files} == {HOME}, "package-data in pyproject.toml has no deeper folder"
    card = (HOME / "README.md").read_text("utf-8")
    for heading in ("## Intended use", "## Training", "## Likelihood", "## Samples", "## Reproduction"):
        assert heading in card
    about = json.loads((HOME / "config.json").read_text("utf-8"))["about"]
    assert f"| steps | {about['steps']:,} |" in card
    assert "MIT" in (HOME / "LICENSE").read_text("utf-8")


@pytest.mark.parametrize("text", SENTENCES)
def test_words_in_order_are_likelier_than_shuffled(lm: esolm.LanguageModel, text: str) -> None:
    words = text.split()
    random.Random(0).shuffle(words)
    given, shuffled = lm.log_prob([text, " ".join(words)], num_orders=4, seed=0).total
    assert given > shuffled + 10


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    "options", [{"sampler": "left_to_right"}, {"alpha_0": 0.25}, {"alpha_0": 1.0}, {"sampler": "speculative"}], ids=str
)
def test_samples_are_stories(lm: esolm.LanguageModel, options: dict) -> None:
    """In every mode a quarter of the words are among the commonest, and most texts are whole stories that end."""
    made = lm.sample(num_samples=4, top_p=0.9, seed=0, **options)
    words = [word.strip(".,;!?\"'").lower() for text in made.texts for word in text.split()]
    assert len(words) > 200
    assert sum(word in COMMON for word in words) / len(words) > 1 / 4
    assert sum(lm.tokenizer.eos_id in row for row in made.tokens) >= 3


@pytest.mark.parametrize("options", [{"weights": "model"}, {"which": "last"}])
def test_there_is_nothing_to_choose(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="has one set of weights: leave it out"):
        esolm.load("stories", **options)


def test_it_can_be_exported_by_its_name(tmp_path: Path) -> None:
    """The export has the description and the weights of the bundled model."""
    out = tmp_path / "mine"
    assert main(["export", "stories", str(out), "--dtype=bfloat16"]) == 0
    one, other = (json.loads((home / "config.json").read_text("utf-8")) for home in (HOME, out))
    assert one["about"] == other["about"]
    name = "model.safetensors"
    assert folder.fingerprint(load_file(out / name)) == folder.fingerprint(load_file(HOME / name))


def test_by_its_name_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["infill", "stories", "The old man ____ the door.", "--tokens_per_blank", "2", "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["texts"][0]
    assert text.startswith("The old man")
    assert text.endswith("the door.")
    assert main(["info", "stories"]) == 0
    short = capsys.readouterr().out
    assert "6 layers of width 288" in short
    assert "rotary_base" not in short
    assert main(["info", "stories", "--all"]) == 0
    assert "rotary_base" in capsys.readouterr().out
