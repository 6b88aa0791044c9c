"""A system outside the package goes through everything that the library does, with no edit elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import esolm
from esolm.cli import main
from esolm.core.batch import Batch
from support import foreign, tiny

NAME = "support.foreign.FixedRate"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run and its export."""
    folder = tmp_path_factory.mktemp("foreign")
    data = tiny.make_data(folder / "data")
    argv = tiny.command(data, folder / "run", f"--system.name={NAME}", "--system.rate=0.4", "--steps=4")
    assert main(argv) == 0
    assert main(["export", str(folder / "run"), str(folder / "model")]) == 0
    return folder


def printed(capsys: pytest.CaptureFixture[str], *argv: object) -> dict:
    assert main([*map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_trains_and_its_options_are_stored(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = printed(capsys, "info", home / "run")["config"]
    assert config["system"] == {"name": NAME, "rate": 0.4}
    lm = esolm.load(home / "run")
    assert isinstance(lm.system, foreign.FixedRate)
    assert (lm.system.rate, lm.system.name) == (0.4, NAME)


@pytest.mark.parametrize("place", ["run", "model"])
def test_it_samples_infills_and_scores(home: Path, capsys: pytest.CaptureFixture[str], place: str) -> None:
    model = home / place
    drawn = printed(capsys, "sample", model, "--num_samples=2", "--prompt=abc", "--sampler=left_to_right")
    assert [tokens[:3] for tokens in drawn["tokens"]] == [list(b"abc")] * 2
    assert drawn["schedule"][0] == [[i] for i in range(3, tiny.LENGTH)]
    filled = printed(capsys, "infill", model, "ab____c", "--tokens_per_blank=2")
    assert (len(filled["tokens"][0]), filled["texts"][0][:2]) == (5, "ab")
    (bound,) = printed(capsys, "score", model, home / "data")
    (weighed,) = printed(capsys, "score", model, home / "data", "--estimator=iw", "--num_orders=2")
    assert bound["kind"] == weighed["kind"] == "bound"
    assert bound["terms"].keys() == {"masked"}
    assert main(["sample", str(model), "--num_steps=3"]) == 2  # it takes no such option
    assert "num_steps" in capsys.readouterr().err


def test_transformers_opens_it(home: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import esolm.interop.hf

    model = transformers.AutoModelForMaskedLM.from_pretrained(home / "model")
    lm = esolm.load(home / "model")
    x = torch.tensor([[97, lm.system.mask_id, 99, 100]])
    with torch.no_grad():
        found, expected = model(input_ids=x).logits, lm.system.logits(lm.net, Batch(x))
    torch.testing.assert_close(found, expected)
    assert model(input_ids=x[:, ::3], labels=x[:, ::3]).loss.isfinite()


def test_the_harness_scores_and_continues(home: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    import esolm.interop.harness  # noqa: F401

    lm = get_model("esolm")(str(home / "model"), num_orders=2)
    ask = Instance("loglikelihood", {}, ("ab", "cd"), 0)
    ((value, greedy),) = lm.loglikelihood([ask])
    assert value < 0
    assert isinstance(greedy, bool)
    text = Instance("generate_until", {}, ("ab", {"max_gen_toks": 4, "until": []}), 0)
    assert len(lm.generate_until([text])) == 1


def test_what_it_does_not_define_is_refused_by_name(home: Path) -> None:
    lm = esolm.load(home / "model")
    with pytest.raises(ValueError, match=NAME):
        lm.log_prob("abc", alpha_0=0.5)
