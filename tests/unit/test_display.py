"""What notebooks show of models, samples and likelihoods: well-formed, escaped, self-contained, and never an error."""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

import pytest
import tokenizers
import torch

import esolm
from esolm.data.tokenizer import Tokenizer, tokenizer
from esolm.generation.samples import Samples
from esolm.likelihood.orders import LogProb
from esolm.model import LanguageModel
from esolm.viz import html
from esolm.viz.frames import DIFFUSION, GIVEN, SEQUENTIAL, Film
from support import toy

BYTES = tokenizer("bytes")
HOSTILE = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>&amp;\x00\x1b[31m"
VOID = {"img", "br"}


class Page(HTMLParser):
    """Reads HTML: its tags, attributes and text. Fails where tags are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text, self.open = list[str](), list[tuple[str, str | None]](), "", list[str]()
        self.feed(text)
        self.close()
        assert self.open == []
        assert set(self.tags) <= {"div", "span", "b", "table", "tr", "th", "td", "code", "img"}
        assert {name for name, _ in self.attributes} <= {"style", "title", "alt", "src"}
        assert all(value.startswith("data:image/svg+xml;base64,") for name, value in self.attributes if name == "src")
        assert "http" not in text
        assert "url(" not in text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.open += [tag] if tag not in VOID else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def values(self, name: str) -> list[str]:
        return [str(value) for key, value in self.attributes if key == name]

    def picture(self) -> ET.Element:
        (source,) = self.values("src")
        return ET.fromstring(base64.b64decode(source.split(",", 1)[1]))


def shown(thing: Any) -> Page:
    return Page(thing._repr_html_())


def model(name: str = "esolm", **options: Any) -> LanguageModel:
    system = toy.make(name, BYTES.mask_id, **options)
    return LanguageModel(toy.fitting(system, BYTES.vocab_size, 16, torch.float32), system, BYTES)


def sampled(text: str, steps: list[list[int]], **more: Any) -> Samples:
    return Samples([text], [BYTES.encode(text)], [len(steps)], len(steps), [steps], 0.5, tokenizer=BYTES, **more)


# Samples


def test_the_first_sample_is_animated_and_the_others_are_text():
    found = model(alpha_0=0.5).sample("ab", num_samples=3, seed=1)
    page = shown(found)
    picture = page.picture()
    texts = [node.text for node in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"given", "diffusion", "left to right", "NFE", "a", "b"} <= set(texts)
    assert str(found.nfe[0]) in texts
    assert not list(picture.iter("{http://www.w3.org/2000/svg}script"))
    assert "3 samples" in page.text
    for text in found.texts[1:]:
        assert html.visible(text) in page.text


def test_phases_and_steps_of_a_replayed_sample_are_those_of_the_stream():
    lm = model(alpha_0=0.5)
    made, events = lm.sample("ab", num_steps=4, seed=3), list(lm.stream("ab", num_steps=4, seed=3))
    film = Film.start(events[0], 0)
    for event in events:
        film.add(event, 0)
    again = Film.replay(made.tokens[0], made.steps[0], made.diffusion[0] if made.diffusion else None)
    assert again is not None
    assert (again.ids, again.phase, again.when, again.needed) == (film.ids, film.phase, film.when, film.needed)
    assert set(film.phase) == {GIVEN, DIFFUSION, SEQUENTIAL}


def test_hostile_texts_are_escaped():
    positions = range(len(HOSTILE.encode()))
    steps, ids = [[p] for p in positions], BYTES.encode(HOSTILE)
    page = shown(Samples([HOSTILE] * 2, [ids] * 2, [len(ids)] * 2, len(ids), [steps] * 2, 0.5, tokenizer=BYTES))
    page.picture()  # parses
    assert "<script>alert('x')</script>" in page.text
    assert any("<script>" in alt for alt in page.values("alt"))


def test_samples_as_a_dict_are_json():
    found = model(alpha_0=0.5).sample("ab", num_samples=2)
    assert json.loads(json.dumps(dataclasses.asdict(found)))["texts"] == found.texts
    assert copy.deepcopy(found) == found


def test_samples_of_chains_are_text():
    """Nothing says when a token that is drawn in every step got its last value."""
    page = shown(model("udlm").sample(num_steps=3))
    assert "img" not in page.tags
    assert "1 sample " in page.text


@pytest.mark.parametrize("name", ["speculative", "confidence"])
def test_samplers_that_decide_as_they_go(name: str):
    found = model(alpha_0=1.0).sample(sampler=name, num_samples=2, seed=1)
    texts = [node.text for node in shown(found).picture().iter("{http://www.w3.org/2000/svg}text")]
    assert ("NFE" if found.nfe[0] == len(found.steps[0]) else "step") in texts
    assert "left to right" not in texts


@pytest.mark.parametrize(
    "samples",
    [
        Samples([], [], [], 0, [], 0.0),
        Samples([], [], [], 0, [], 0.0, tokenizer=BYTES),
        Samples(["a"], [[97]], [1], 1, [[[0]]], 0.1),  # made by hand, without a tokenizer
        Samples(["a"], [], [], 0, [], 0.1, tokenizer=BYTES),
        sampled("ab", []),
        sampled("ab", [[], []]),
        sampled("ab", [[7]]),  # a position that is not there
        sampled("", [[]]),
        sampled("ab", [[0], [1]], diffusion=[]),
        sampled("x" * 5000, [[p] for p in range(5000)]),
    ],
)
def test_partial_samples(samples: Samples):
    assert len(samples._repr_html_()) < 60_000
    assert all(html._short(text) in shown(samples).text for text in samples.texts if "img" not in shown(samples).tags)


def test_long_samples_stay_small():
    text = "lorem ipsum " * 40
    assert len(sampled(text, [[p] for p in range(len(text))])._repr_html_()) < 150_000
    many = Samples(["some text"] * 1000, [], [], 1, [], 0.1)
    assert "and 992 more" in shown(many).text


# LogProb


def titles(page: Page) -> list[str]:
    return page.values("title")


def test_tokens_have_their_number_as_title_and_their_shade():
    found = model(alpha_0=0.5).log_prob(["a <b>", "cd"], context="x", num_orders=2)
    page = shown(found)
    expected = [v for values in found.tokens for v in values]
    assert [title == "given" for title in titles(page)] == [v == 0 for v in expected]
    for title, value in zip(titles(page), expected, strict=True):
        if title != "given":
            number = float(re.search(r"log p = (-?[\d.]+)", title)[1])
            assert number == pytest.approx(value, abs=6e-4)
    assert "xa <b>" in page.text
    assert f"{found.total[0]:.2f} nats" in page.text


def test_hostile_tokens_are_escaped():
    """Tokens that are tags by themselves."""
    tags = ["<script>alert('x')</script>", '"><img src=x onerror=alert(1)>', "</span></div>", "&lt;b&gt;"]
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({tag: i for i, tag in enumerate([*tags, "_"])}, "_"))
    core.decoder = tokenizers.decoders.Fuse()
    words = Tokenizer(core, "<b>tags</b>", mask_id=len(tags))
    ids = [*range(len(tags))]
    page = shown(
        LogProb(torch.tensor([-3.0]), [[-1.0, -5.0, -9.0, 0.0]], torch.zeros(1, 1), "bound", [ids], None, words)
    )
    assert "".join(tags) in page.text
    assert page.tags.count("span") == len(ids) + len(html.SHADES)
    page = shown(Samples(["".join(tags)], [ids], [4], 4, [[[i] for i in ids]], 0.1, tokenizer=words))
    assert any(tags[0] in alt for alt in page.values("alt"))
    assert [node.text for node in page.picture().iter("{http://www.w3.org/2000/svg}text")][-len(ids) :] == tags
    assert "<b>tags</b>" in shown(dataclasses.replace(model(), tokenizer=words)).text


@pytest.mark.parametrize(
    "found",
    [
        LogProb(torch.zeros(0), [], torch.zeros(0, 1), "bound"),
        LogProb(torch.tensor([-1.0]), [[]], torch.zeros(1, 1), "bound", tokenizer=BYTES),
        LogProb(torch.tensor([-1.0]), [[-1.0]], torch.zeros(1, 1), "bound"),
        LogProb(torch.tensor([-1.0]), [[-1.0]], torch.zeros(1, 1), "bound", [[97, 98]], [[True]], BYTES),
        LogProb(torch.tensor([math.nan]), [[math.nan, -math.inf]], torch.zeros(1, 1), "bound", [[97] * 2], [], BYTES),
        LogProb(torch.full((99,), -1.0), [[-0.1] * 5000] * 99, torch.zeros(99, 1), "exact", [[97] * 5000] * 99),
    ],
)  # fmt: skip
def test_partial_likelihoods(found: LogProb):
    shown(found)


def test_a_rolling_likelihood_shows_every_token_once():
    text = "abcdefgh" * 5
    page = shown(model(alpha_0=0.5).rolling_log_prob(text, num_orders=2))
    assert text in page.text
    assert len(titles(page)) == len(text)


def luminance(rgb: tuple[float, ...]) -> float:
    parts = [c / 255 / 12.92 if c <= 10.31475 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


@pytest.mark.parametrize(("page", "text"), [(255, 33), (255, 0), (17, 224), (0, 255), (30, 204)])
def test_every_shade_is_readable_in_light_and_dark(page: int, text: int):
    """The contrast of text on its background is at least 4.5, as WCAG wants it; unlikelier is always stronger."""
    ink = [int(c) for c in html.INK.split(",")]
    opacities = [html.shade(math.log(p)) for p in (1.0, 0.3, 0.1, 0.02, 0.003, 1e-9)]
    assert opacities == sorted(set(opacities))
    for opacity in opacities:
        behind = luminance(tuple(opacity * c + (1 - opacity) * page for c in ink))
        light, dark = sorted([behind, luminance((text,) * 3)], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


# LanguageModel


@pytest.mark.parametrize("label", [label for label, _, _ in toy.variants()])
def test_the_card_of_every_system(label: str):
    name, options = next((name, options) for other, name, options in toy.variants() if other == label)
    lm = model(name, **options)
    page = shown(lm)
    assert name in page.text
    assert "lm.sample(" in page.text
    assert ("lm.log_prob(" in page.text) == lm.system.any_order
    try:
        lm.infill_stream("ab____cd", tokens_per_blank=12)  # plans, and does not run yet
    except ValueError:
        assert "lm.infill(" not in page.text
    else:
        assert "lm.infill(" in page.text
    assert len(repr(lm)) < 200


def test_the_card_counts_parameters():
    lm = model()
    number = sum(p.numel() for p in lm.net.parameters())  # type: ignore[attr-defined]
    assert f"{number / 1000:.3g} k parameters" in repr(lm)
    assert f"{number / 1000:.3g} k parameters" in shown(lm).text


def test_folded_and_partial_models_have_a_card():
    assert "7.5 M parameters" in shown(esolm.load("stories", precision="float32")).text
    empty = LanguageModel(None, None, None)  # type: ignore[arg-type]
    assert "LanguageModel" in shown(empty).text
    assert repr(empty) == "LanguageModel()"


def test_displays_run_no_network(monkeypatch: pytest.MonkeyPatch):
    lm = model()
    made, scored = lm.sample(num_samples=2), lm.log_prob("ab", num_orders=1)

    def forward(*args: Any, **named: Any) -> None:
        raise AssertionError("a display called the network")

    monkeypatch.setattr(type(lm.net), "forward", forward)
    for thing in (lm, made, scored):
        shown(thing)
        repr(thing)
