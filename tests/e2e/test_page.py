"""The page of `esolm serve` in a real browser, on a server with a tiny random model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from esolm.serving.engine import Engine
from support import browser, served
from support.browser import COUNT, PROMPT, Window

if why := browser.missing():
    pytest.skip(why, allow_module_level=True)
pytest.importorskip("fastapi", reason="needs fastapi: pip install 'esolm[serve]'")
httpx = pytest.importorskip("httpx", reason="needs httpx: pip install 'esolm[test]'")

from playwright.sync_api import Browser, Page, expect  # noqa: E402

PROBLEMS: list[str] = []
"""Errors of the page's scripts."""
OPTIONS: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9}
"""Those of the page before anything is changed."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser.chromium() as found:
        yield found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served.live(Engine(browser.writer())) as found:
        yield found


@pytest.fixture(scope="module")
def tab(chromium: Browser) -> Iterator[Page]:
    with chromium.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(browser.PATIENCE)
        page.on("pageerror", lambda error: PROBLEMS.append(str(error)))
        yield page


@pytest.fixture
def window(tab: Page, url: str) -> Iterator[Window]:
    tab.set_viewport_size({"width": 1200, "height": 900})
    yield Window(tab, url)
    tab.unroute_all(behavior="ignoreErrors")
    tab.emulate_media(color_scheme="light")
    assert [PROBLEMS.pop() for _ in range(len(PROBLEMS))] == []


def row_of(seed: int = 7, **options: Any) -> list[int]:
    """The tokens that the library draws for the prompt."""
    lm = browser.writer()
    row = [*lm.tokenizer.encode(PROMPT), *[None] * COUNT]
    return lm.sample(tokens=[row], seed=seed, **{**OPTIONS, **options}).tokens[0]


def rewritten(old: list[int], positions: Any, seed: int) -> str:
    """The text that the library draws at these positions, given the rest."""
    row = [None if i in positions else token for i, token in enumerate(old)]
    return browser.writer().sample(tokens=[row], seed=seed, **OPTIONS).texts[0]


def decoded(row: list[int]) -> str:
    return browser.writer().tokenizer.decode(row)


def test_a_sample_appears_at_its_places(window: Window):
    expect(window["#empty"]).to_be_visible()
    expect(window["#undo"]).to_be_disabled()
    window["#text"].evaluate(
        """box => { window.counts = [];
          new MutationObserver(() => counts.push(box.querySelectorAll(".todo").length))
            .observe(box, {childList: true, subtree: true}); }"""
    )
    assert window.generate() == decoded(row_of())
    counts = window.page.evaluate("() => window.counts")
    assert counts == sorted(counts, reverse=True)
    assert set(counts) == set(range(COUNT + 1))  # one token after the other
    assert {"diffusion", "sequential"} <= set(window["#text"].inner_html().replace('"', " ").split())
    assert re.fullmatch(rf"{COUNT} passes · \d+\.\d\d s · {COUNT} tokens · seed 7", window["#note"].inner_text())
    expect(window["#empty"]).to_be_hidden()


def test_an_example_is_a_click_away(window: Window):
    window[".example"].first.click()
    window.rest()
    example = window[".example"].first.get_attribute("data-source")
    assert window.text().startswith(example)
    assert len(window.text()) > len(example)


def test_a_click_rewrites_a_word_and_undo_brings_it_back(window: Window):
    before, old = window.generate(), row_of()
    positions = window.tokens(9)
    window.click(9)
    after = window.text()
    assert after == rewritten(old, positions, 8) != before
    assert after.startswith(decoded(old[: positions.start]))
    assert after.endswith(decoded(old[positions.stop :]))
    window["#undo"].click()
    assert window.text() == before
    window["#redo"].click()
    assert window.text() == after
    expect(window["#redo"]).to_be_disabled()


def test_dragging_rewrites_several_words(window: Window):
    before, old = window.generate(), row_of()
    positions = range(window.tokens(8).start, window.tokens(12).stop)
    window.drag(12, 8)
    assert window.text() == rewritten(old, positions, 8) != before


def test_a_locked_word_stays(window: Window):
    before, old = window.generate(), row_of()
    window.tool("lock")
    window.click(10)
    assert window.text() == before
    expect(window.word(10).locator(".token").first).to_have_class(re.compile("locked"))
    window.tool("rewrite")
    window.click(10)
    assert "locked" in window.error()
    assert window.text() == before
    positions = set(range(window.tokens(8).start, window.tokens(12).stop)) - set(window.tokens(10))
    window.drag(8, 12)
    assert window.text() == rewritten(old, positions, 8) != before
    expect(window["#error"]).to_be_hidden()
    window["#undo"].click()
    window["#undo"].click()  # the lock
    assert window["#text .locked"].count() == 0
    assert window.text() == before


def test_blanks_are_filled(window: Window):
    source = "The ____ ran to the ____ ball."
    want = browser.writer().infill(source, tokens_per_blank=2, seed=5, **OPTIONS).texts[0]
    assert window.generate(source, seed=5, per_blank=2) == want
    assert re.fullmatch(r"The.* ran to the.* ball\.", want)
    assert window.generate(source.replace("____", "___"), seed=5, per_blank=2) == want


def test_probabilities_on_hover_and_as_colours(window: Window):
    window.generate()
    body = {
        "tokens": [*browser.writer().tokenizer.encode(PROMPT), *[None] * COUNT],
        "seed": 7,
        "logprobs": 4,
        **OPTIONS,
    }
    choice = httpx.post(f"{window.url}/v1/infill", json=body).json()["choices"][0]
    position = window.tokens(9).start
    chances = [math.exp(value) for _, value in choice["top_logprobs"][position]]
    window.word(9).hover()
    expect(window["#peek"]).to_be_visible()
    panel = window["#peek"].inner_text()
    assert f"{100 * math.exp(choice['logprobs'][position]):.1f} %" in panel
    assert all(f"{100 * chance:.1f} %" in panel for chance in chances)
    assert choice["top_pieces"][position][0].strip() in panel
    window.word(1).hover()
    expect(window["#peek"]).to_contain_text("given")
    window.page.mouse.move(0, 0)
    expect(window["#peek"]).to_be_hidden()

    colour = "span => getComputedStyle(span).backgroundColor"
    token = window["#text .token:is(.p1, .p2, .p3, .p4)"].first
    plain = token.evaluate(colour)
    window["#tint"].check()
    assert token.evaluate(colour) != plain
    levels = {f"p{sum(math.exp(v) < bound for bound in (0.5, 0.2, 0.05, 0.01))}" for v in choice["logprobs"] if v}
    level = "[...each.classList].find(name => /^p[0-4]$/.test(name)), getComputedStyle(each).backgroundColor"
    shown = dict(window["#text .token:not(.given)"].evaluate_all(f"all => all.map(each => [{level}])"))
    assert shown.keys() == levels
    every = (
        "[0, 1, 2, 3, 4].map(n => { span.className = `token p${n}`; return getComputedStyle(span).backgroundColor; })"
    )
    assert len(set(token.evaluate(f"span => {every}"))) == 5


def test_two_samplers_side_by_side(window: Window):
    first = window.generate(sampler="first_hitting", other="block")
    assert first == decoded(row_of(sampler="first_hitting"))
    second = window.text("#text2")
    assert second == decoded(row_of(sampler="block", parallelism=4)) != first
    assert window["#name"].inner_text() == "first hitting"
    assert window["#name2"].inner_text() == "block"
    notes = [window[name].inner_text() for name in ("#note", "#note2")]
    passes = [int(re.match(r"(\d+) passes · \d+\.\d\d s · ", note)[1]) for note in notes]
    assert passes == [COUNT, COUNT // 4]
    left, right = (window[name].bounding_box() for name in ("#text", "#text2"))
    assert left["x"] + left["width"] <= right["x"]
    window["#keep"].click()
    assert window.text() == second
    expect(window["#second"]).to_be_hidden()
    window["#undo"].click()
    assert (window.text(), window.text("#text2")) == (first, second)


def test_the_options_are_those_of_the_request(window: Window):
    with window.page.expect_request("**/v1/infill") as sent:
        window.generate(temperature=0.7, top_p=0.8, alpha_0=0.25, num_steps=6)
    body = sent.value.post_data_json
    assert {**body, "tokens": None} == {
        "temperature": 0.7, "top_p": 0.8, "alpha_0": 0.25, "num_steps": 6, "seed": 7, "tokens": None, "stream": True,
        "logprobs": 4,
    }  # fmt: skip
    want = row_of(temperature=0.7, top_p=0.8, alpha_0=0.25, num_steps=6)
    assert window.text() == decoded(want)
    window.set(sampler="left_to_right")  # takes neither
    expect(window["#alpha_0"]).to_be_hidden()
    expect(window["#num_steps"]).to_be_hidden()


def test_the_surest_tokens_come_first_unless_another_sampler_is_chosen(window: Window):
    expect(window["#sampler"]).to_have_value("confidence")
    made = window.generate(sampler="confidence", window=12)
    assert made == decoded(row_of(sampler="confidence", window=12))
    expect(window["#num_steps"]).to_be_visible()
    window.set(sampler="left_to_right")
    expect(window["#window"]).to_be_hidden()
    window["button[type=reset]"].click()
    expect(window["#sampler"]).to_have_value("confidence")
    expect(window["#window"]).to_have_value("16")


def test_a_link_reproduces_the_sample(window: Window):
    window.generate(alpha_0=0.25, temperature=0.8, other="left_to_right")
    window.word(5).focus()
    window.page.keyboard.press("l")
    window.click(9)
    values = {name: window[f"#{name}"].input_value() for name in ("alpha_0", "temperature", "count", "other", "source")}
    locked = window["#text .locked"].all_inner_texts()
    assert locked
    shown, link = [window.text(), window.text("#text2")], window.page.url
    window["#undo"].click()  # the link is that of the text that is shown
    assert "row=" not in window.page.url
    assert "locked=" in window.page.url
    again = Window(window.page, link)
    expect(again["#note2"]).to_contain_text("seed")
    again.rest()
    assert [again.text(), again.text("#text2")] == shown
    assert {name: again[f"#{name}"].input_value() for name in values} == values
    assert again["#text .locked"].all_inner_texts() == locked
    assert again.page.url == link


def test_copying(window: Window):
    window.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    pasted = "() => navigator.clipboard.readText()"
    text = window.generate()
    window["#copy"].click()
    expect(window["#status"]).to_contain_text("text")
    assert window.page.evaluate(pasted) == text
    window["#link"].click()
    expect(window["#status"]).to_contain_text("link")
    assert window.page.evaluate(pasted) == window.page.url
    window.page.context.clear_permissions()


def test_a_damaged_link_is_explained(window: Window):
    for link in ("nonsense", "source=a&seed=x", "source=a&seed=1&row=1.b", "source=a&seed=1&sampler=b"):
        window["#error"].evaluate("error => { error.hidden = true }")
        window.page.goto(f"{window.url}/#{link}")
        assert "link" in window.error()


def test_errors_of_the_server_are_sentences(window: Window):
    before = window.generate()
    window["#source"].fill(PROMPT * 30)
    window["#go"].click()
    assert "64" in window.error()  # the longest text
    assert window.text() == before
    window.page.route("**/v1/infill", lambda route: route.abort())
    window.click(9)
    assert "reached" in window.error()
    assert window.text() == before
    window.page.unroute("**/v1/infill")
    window.click(9)
    expect(window["#error"]).to_be_hidden()
    assert window.text() != before


def test_what_a_system_cannot_do_is_a_sentence(tab: Page):
    with served.live(Engine(browser.writer("ar"))) as url:
        window = Window(tab, url)
        assert window.generate().startswith(PROMPT)
        window["#source"].fill("The ____ ran home.")
        window["#go"].click()
        expect(window["#error"]).to_contain_text("ar is left to right")
        assert window.text().startswith(PROMPT)


def test_stop_keeps_the_text(window: Window):
    before = window.generate()
    window.page.route("**/v1/infill", lambda route: None)  # never answered
    window.word(9).click()
    expect(window["#undo"]).to_be_disabled()
    window["#halt"].click()
    window.rest()
    assert window.text() == before
    expect(window["#error"]).to_be_hidden()


def test_a_key_is_asked_for(tab: Page):
    with served.live(Engine(browser.writer()), api_key="secret") as url:
        tab.goto(url)
        expect(tab.locator("#error")).to_be_visible()
        expect(tab.locator("#key")).to_be_focused()
        tab.keyboard.type("secret")
        tab.keyboard.press("Tab")
        expect(tab.locator("#model")).to_contain_text("tokens")
        expect(tab.locator("#error")).to_be_hidden()
        tab.locator("#go").click()
        expect(tab.locator("#note")).to_contain_text("passes")


def test_the_keyboard_alone(window: Window):
    press, focused = window.page.keyboard.press, window[":focus"]
    window.set(seed=7, count=COUNT, sampler="")
    window["#source"].evaluate("box => box.focus()")
    window.page.keyboard.type(PROMPT)
    press("Control+Enter")
    window.rest()
    before, old = window.text(), row_of()
    assert before == decoded(old)
    for _ in range(20):
        if focused.evaluate("each => each.matches('.word')"):
            break
        press("Tab")
    for _ in range(9):
        press("ArrowRight")
    expect(window["#peek"]).to_be_visible()
    expect(window.word(9)).to_be_focused()
    press("Shift+ArrowRight")
    positions = range(window.tokens(9).start, window.tokens(10).stop)
    assert window["#text .selected"].count() == 2
    press("Enter")
    window.rest()
    assert window.text() == rewritten(old, positions, 8) != before
    expect(window.word(9)).to_be_focused()
    press("Control+z")
    assert window.text() == before
    press("l")
    kept = set(window.tokens(9))
    assert window["#text .locked"].count() == len(kept)
    press("Control+a")
    press("Enter")
    window.rest()
    assert window.text() == rewritten(old, set(range(len(old))) - kept, 9)
    press("Control+z")
    press("Control+z")
    press("Control+Shift+z")
    assert window["#text .locked"].count() > 0
    press("Home")
    line = focused.bounding_box()["y"]
    press("End")
    assert focused.bounding_box()["y"] >= line
    assert focused.evaluate("each => getComputedStyle(each).outlineStyle") == "solid"


def test_the_end_of_a_text_is_marked(tab: Page):
    lm = browser.writer(ends=True)
    assert lm.tokenizer.eos_id in lm.sample(tokens=[[None] * COUNT], seed=7, **OPTIONS).tokens[0]
    with served.live(Engine(lm)) as url:
        window = Window(tab, url)
        assert "endoftext" not in window.generate("")
        assert window["#text .end"].count() > 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_have_contrast(window: Window, scheme: str):
    window.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    dark = window["body"].evaluate("body => getComputedStyle(body).backgroundColor.match(/\\d+/g).every(c => c < 64)")
    assert dark == (scheme == "dark")
    found = window.page.evaluate(browser.CONTRASTS)
    window.generate()
    window.word(7).focus()
    window.page.keyboard.press("l")
    window.page.keyboard.press("Enter")  # shows an error
    for tinted in (False, True):
        window["#tint"].set_checked(tinted)
        window.word(12).hover()
        expect(window["#peek"]).to_be_visible()
        more = window.page.evaluate(browser.CONTRASTS)
        found |= {f"{name}, tinted {tinted}": value for name, value in more.items()}
    assert {"error, tinted True", "example"} <= set(found)
    assert {name: value for name, value in found.items() if value < 4.5} == {}


def test_a_phone(chromium: Browser, url: str):
    sizes = {"viewport": {"width": 375, "height": 720}, "has_touch": True, "is_mobile": True}
    with chromium.new_context(**sizes) as context:
        window = Window(context.new_page(), url)

        def fits() -> None:
            assert window["html"].evaluate("page => page.scrollWidth") <= 375
            assert window.page.evaluate("() => visualViewport.scale") == 1  # not shrunk to fit either

        fits()
        expect(window["#settings"]).to_be_hidden()
        window["summary"].tap()
        fits()
        before = window.generate(other="left_to_right")
        fits()
        upper, lower = (window[name].bounding_box() for name in ("#text", "#text2"))
        assert upper["y"] + upper["height"] <= lower["y"]
        window.set(other="-")
        positions = window.tokens(9)
        window.word(9).tap()
        window.rest()
        assert window.text() == rewritten(row_of(), positions, 8) != before
        window["label"].filter(has_text="Inspect").tap()
        window.word(9).tap()
        expect(window["#peek"]).to_be_visible()
        fits()
        small = "all => all.filter(each => each.offsetHeight && each.offsetHeight < 40).map(each => each.id)"
        assert window["button"].evaluate_all(small) == []
