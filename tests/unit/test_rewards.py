"""What the built-in rewards return; and one that raises, hangs, dies or returns no number costs one reward."""

from __future__ import annotations

import math

import pytest

from esolm.tune.options import Reward
from esolm.tune.pool import Pool
from esolm.tune.rewards import BUILT_IN, Molecules, countdown, regex, sudoku


def test_a_failure_costs_one_reward() -> None:
    reward = Reward("support.flawed:flawed", '{"bonus": 0.5}', workers=2, timeout=20.0, chunk=4)
    bad = {"raise": "raised", "nan": "nan", "die": "code 7", "word": "raised", "part": "without a reward"}
    texts = ["one", "raise", "three", "four", "nan", "six", "die", "word", "part", "seven"]
    with Pool(reward) as pool:
        for _ in range(2):  # the pool survives
            found = pool(texts, [{"more": 1.0}] * len(texts))
            for text, scored in zip(texts, found, strict=True):
                if text in bad:
                    assert math.isnan(scored.reward)
                    assert scored.error is not None
                    assert bad[text] in scored.error
                else:
                    assert scored == (len(text) + 1.5, {"size": len(text)}, None)


def test_a_reward_that_hangs_is_stopped() -> None:
    with Pool(Reward("support.flawed:flawed", workers=1, timeout=5.0, chunk=1)) as pool:
        found = pool(["one", "hang", "three"], [{}] * 3)
        assert [scored.reward for scored in found][::2] == [3.0, 5.0]
        assert "more than 5 s" in str(found[1].error)
        assert pool(["four"], [{}])[0].reward == 4.0
        assert pool([], []) == []


def test_a_reward_that_hangs_while_it_is_loaded_is_stopped() -> None:
    with pytest.raises(ValueError, match=r"not ready after 1 s: raise reward\.loading"):
        Pool(Reward("support.flawed:Hanging", workers=1, loading=1.0))


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("nothing", "{}", "molecules"),
        ("support.missing:f", "{}", "support.missing"),
        ("support.flawed:missing", "{}", "missing"),
        ("molecules", '{"train": "no-file.smi"}', "no-file.smi"),
        ("judge", "{}", "model"),
        ("regex", "{}", "missing a required argument: .pattern."),
        ("support.flawed:half", '{"no": 1}', "unexpected keyword argument .no."),
        ("", "{}", "--reward"),
    ],
)
def test_a_reward_that_cannot_be_loaded(name: str, options: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Pool(Reward(name, options, workers=1))


@pytest.mark.parametrize("options", [{"options": "{"}, {"options": "[1]"}, {"timeout": 0.0}, {"workers": 0}])
def test_options_that_cannot_be(options: dict) -> None:
    with pytest.raises(ValueError, match="reward"):
        Reward("regex", **options)


def test_too_few_rewards_are_a_failure() -> None:
    with Pool(Reward("support.flawed:short", workers=1)) as pool:
        assert [scored.reward for scored in pool(["a", "b"], [{}, {}])] == [1.0, 1.0]  # each alone


def test_regex() -> None:
    assert regex(["ab", "abb", "xab", "ab\n"], [{}] * 4, pattern="ab+") == [1, 1, 0, 0]


SOLVED = "1234341221434321"


def test_sudoku() -> None:
    rows = [{"puzzle": "1..4" + "." * 12}] * 4
    found = sudoku([SOLVED, SOLVED[:-1] + "2", SOLVED[::-1], "12"], rows)
    assert [parts["reward"] for parts in found] == [1, 0, 1, 0]
    assert found[1]["units"] == pytest.approx(9 / 12)
    assert sudoku([SOLVED], [{"puzzle": "2" + "." * 15}])[0] == {"reward": 0, "solved": 0, "units": 0}
    assert sudoku(["12 34\n34 12\n21 43\n43 21"], [{}])[0]["solved"] == 1
    assert sudoku([SOLVED[:-1] + "2"], [{}], partial=0.5)[0]["reward"] == pytest.approx(9 / 24)


def test_countdown() -> None:
    row = {"numbers": [3, 5, 2], "target": 11}
    right = ["3*2+5", "5+(2*3)", "5 + 3 * 2 = 11"]
    wrong = ["3*5+2", "11", "3*2+5+0", "3**2+5", "__import__('os')", "(" * 500, "5+3*2/0", "3*2", ""]
    found = countdown([*right, *wrong], [row] * (len(right) + len(wrong)))
    assert [parts["reward"] for parts in found] == [1] * len(right) + [0] * len(wrong)
    assert found[3]["allowed"] == 1
    assert countdown(["8/(3-8/3)"], [{"numbers": [8, 3, 8, 3], "target": 24}])[0]["reward"] == 1


def test_molecules(tmp_path) -> None:
    pytest.importorskip("rdkit")
    (train := tmp_path / "train.smi").write_text("CC(=O)Oc1ccccc1C(=O)O aspirin\n")
    caffeine, aspirin = "CN1C=NC2=C1C(=O)N(C(=O)N2C)C", "O=C(O)c1ccccc1OC(C)=O"
    found = Molecules(train=str(train))([caffeine, aspirin, "CC", "c1cc", f"{caffeine}.{caffeine}", ""], [{}] * 6)
    assert [round(parts["reward"], 2) for parts in found] == [0.54, 0, 0, 0, 0, 0]
    assert [parts["valid"] for parts in found] == [1, 1, 1, 0, 1, 0]
    assert [parts["new"] for parts in found[:2]] == [1, 0]
    assert Molecules(atoms=2)(["CC"], [{}])[0]["reward"] > 0


def test_all_rewards_are_tested() -> None:
    assert set(BUILT_IN) == {"molecules", "regex", "sudoku", "countdown", "judge"}
