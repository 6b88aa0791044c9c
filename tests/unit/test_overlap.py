"""ROUGE against the `rouge_score` package, BERTScore by hand, and `esolm overlap`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from esolm import cli
from esolm.metrics import overlap
from support.runs import make_run

PAIRS = [
    ("the cat sat on the mat", "the cat was on the mat"),
    ("We propose a new method for X-ray images.", "A new method for images, by X-rays, is proposed"),
    ("", "something"),
    ("same same same", "same"),
    ("a b c d e f g", "g f e d c b a"),
]


@pytest.mark.parametrize(("prediction", "reference"), PAIRS)
def test_rouge_is_that_of_the_package(prediction: str, reference: str) -> None:
    package = pytest.importorskip("rouge_score.rouge_scorer", reason="needs rouge_score, which lm-eval brings")
    expected = package.RougeScorer(list(overlap.KINDS)).score(reference, prediction)
    found = overlap.rouge(prediction, reference)
    assert found == pytest.approx({kind: expected[kind].fmeasure for kind in overlap.KINDS})


def test_rouge_by_hand() -> None:
    found = overlap.rouge("the cat sat on the mat", "the cat was on the mat")
    assert found == pytest.approx({"rouge1": 10 / 12, "rouge2": 6 / 10, "rougeL": 10 / 12})
    assert overlap.best_rouge(["a b", "c"], [["x", "a b"], ["c"]]) == pytest.approx(
        {"rouge1": 1.0, "rouge2": 0.5, "rougeL": 1.0}
    )


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"prediction": "a b", "target": ["x", "a\u2028b"]}, {"prediction": "c", "target": "d"}]
    (file := tmp_path / "p.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    assert cli.main(["overlap", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"predictions": 2, "rouge1": 0.5, "rouge2": 0.5, "rougeL": 0.5}
    assert cli.main(["overlap", str(file)]) == 0
    assert "rougeL" in capsys.readouterr().out
    for words in (
        [str(tmp_path / "none")],
        [str(file), "--reference", "gold"],
        [str(file), "--bertscore", "none"],
        [str(file), "--layer", "3"],
    ):
        assert cli.main(["overlap", *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_bertscore_is_the_greedy_matching_of_embeddings(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'esolm[hf]'")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]))
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    core = Tokenizer(models.WordPiece.from_file(str(tmp_path / "vocab.txt"), unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=core, cls_token="[CLS]", sep_token="[SEP]")
    words.save_pretrained(tmp_path / "bert")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=8, max_position_embeddings=16, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    score = overlap.BertScore(str(tmp_path / "bert"))
    assert score("a b c", "a b c") == pytest.approx(1.0, abs=1e-5)
    assert score.embed("a b c").shape == (3, 8)
    assert score("", "a") == 0.0
    near = torch.tensor([[float(x @ y) for y in score.embed("c a")] for x in score.embed("a b b")])
    p, r = near.max(1).values.mean(), near.max(0).values.mean()
    assert score("a b b", "c a") == pytest.approx(float(2 * p * r / (p + r)), rel=1e-5)
    assert score("a b b", "c a") < 1


def test_the_summaries_experiment_runs(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "experiments" / "scitldr" / "run.py"
    spec = importlib.util.spec_from_file_location("scitldr_run", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    docs = [{"source": ["A cat.", "It sat."], "target": ["ab", "c"]}, {"source": ["B"], "target": ["de"]}]
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    module.lines(str(tmp_path / "dev.jsonl"), str(tmp_path / "lines.jsonl"))
    assert json.loads((tmp_path / "lines.jsonl").read_text().splitlines()[0]) == {
        "prompt": "A cat. It sat.", "target": "ab",
    }  # fmt: skip
    run = make_run(tmp_path / "run", alpha_0=1.0)
    found = module.score(str(run), str(tmp_path / "dev.jsonl"), 4, 3, 1, [2, 4])
    assert found["summaries"] == 2
    assert found["rouge"]["another summary"]["rouge1"] == 0
    assert found["rouge"]["T = 2"]["passes"] <= 2
