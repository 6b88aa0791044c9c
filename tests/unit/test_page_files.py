"""The files of the page, without a browser; tests/e2e/test_page.py runs them in one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import esolm

PAGE = Path(esolm.__file__).parent / "serving" / "page"
FILES = {path.name: path.read_text(encoding="utf-8") for path in sorted(PAGE.iterdir())}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
LIGHT, DARK = (
    dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", part))
    for part in FILES["style.css"].split("\n* {")[0].split("@media (prefers-color-scheme: dark)")
)
ON_CARD = ["ink", "quiet", "accent", "diffusion", "sequential", "lock", "bad"]
TEXT = [
    *[(colour, "card") for colour in ON_CARD],
    *[(colour, "page") for colour in ("ink", "quiet", "accent")],
    *[("ink", colour) for colour in ("select", "accent-soft", "p1", "p2", "p3", "p4")],
    ("accent-ink", "accent"),
    ("bad", "bad-page"),
    ("lock", "lock-page"),
]
EDGES = [(colour, behind) for colour in ("edge", "accent") for behind in ("card", "page")]


def luminance(colour: str) -> float:
    """As the Web Content Accessibility Guidelines define it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_as_the_guidelines_do():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_have_the_contrast_of_level_aa(colours: dict[str, str]):
    """4.5 for text, 3 for the edges of controls and the outline of the focus."""
    assert {pair for pair in TEXT if contrast(*(colours[name] for name in pair)) < 4.5} == set()
    assert {pair for pair in EDGES if contrast(*(colours[name] for name in pair)) < 3} == set()


def test_both_schemes_define_every_colour():
    assert LIGHT.keys() == DARK.keys()
    used = set(re.findall(r"var\(--([\w-]+)\)", FILES["style.css"])) - {"share", "shadow"}
    assert used == LIGHT.keys()


def test_nothing_comes_from_elsewhere():
    """No build step, no other host, and only paths that work behind a prefix."""
    for name, text in FILES.items():
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|(src|href)=\"/|fetch\(\"|from \"[^.]", text), name


def test_parts_fit_together():
    html = FILES["index.html"]
    ids = re.findall(r'\bid="([\w-]+)"', html)
    assert len(ids) == len(set(ids))
    used = {found for text in SCRIPTS.values() for found in re.findall(r"(?:\$|getElementById)\(\"([\w-]+)\"\)", text)}
    assert used - set(ids) == set()
    for name, text in SCRIPTS.items():
        for names, source in re.findall(r"import \{ (.*?) \} from \"\./(.*?)\"", text):
            exported = set(re.findall(r"^export (?:async )?(?:function|const)\*? (\w+)", SCRIPTS[source], re.MULTILINE))
            assert set(names.split(", ")) <= exported, name
            body = text.split('"./' + source)[1]
            assert {each for each in names.split(", ") if not re.search(rf"\b{each}\b", body)} == set(), name


def test_files_are_short():
    assert {name for name, text in FILES.items() if len(text.splitlines()) > 350} == set()
    assert {name for name, text in FILES.items() if max(map(len, text.splitlines())) > 120} == set()
