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


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
TEXTS = [("a b b", "c a"), ("c", "a b c a"), ("b c a", "b c a"), (" a b ", "b"), ("", "a")]


def encoder(folder: Path, kind: str) -> str:
    """An encoder of two layers with random weights: BERT with words, or RoBERTa with byte-level BPE."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'esolm[hf]'")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    torch.manual_seed(0)
    if kind == "bert":
        core = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
        core.pre_tokenizer = pre_tokenizers.Whitespace()
        core.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
        special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
        words = transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special, model_max_length=16)
        model = transformers.BertModel(transformers.BertConfig(vocab_size=8, max_position_embeddings=16, **sizes))
    else:
        pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "b", "c", "Ġ", "Ġa", "Ġb", "Ġc"]
        vocabulary = {piece: i for i, piece in enumerate(pieces)}
        merges = [("Ġ", "a"), ("Ġ", "b"), ("Ġ", "c")]
        words = transformers.RobertaTokenizer(vocab=vocabulary, merges=merges, model_max_length=16)
        config = transformers.RobertaConfig(vocab_size=12, max_position_embeddings=18, pad_token_id=1, **sizes)
        model = transformers.RobertaModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    words.save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


def baseline(folder: Path) -> str:
    (path := folder / "baseline.tsv").write_text("LAYER,P,R,F\n0,0.1,0.2,0.15\n1,0.3,0.4,0.35\n2,0.5,0.55,0.52\n")
    return str(path)


def test_bertscore_is_the_greedy_matching_of_embeddings(tmp_path: Path) -> None:
    score = overlap.BertScore(encoder(tmp_path / "bert", "bert"))
    assert score("a b c", "a b c").tolist() == pytest.approx([1.0] * 3, abs=1e-5)
    assert score("", "a").tolist() == [0.0] * 3
    (ours, _), (theirs, words) = score.embed("a b b"), score.embed("c a")
    assert (len(ours), words.tolist()) == (5, [False, True, True, False])
    near = torch.tensor([[float(x @ y) for y in theirs] for x in ours])
    p, r = near.max(1).values[1:-1].mean(), near.max(0).values[1:-1].mean()
    expected = [float(p), float(r), float(2 * p * r / (p + r))]
    assert score("a b b", "c a").tolist() == pytest.approx(expected, rel=1e-5)
    assert score("a b b", "c a")[2] < 1


def test_byte_level_tokens_have_a_space_before_the_first_word(tmp_path: Path) -> None:
    score = overlap.BertScore(encoder(tmp_path / "roberta", "roberta"), 1)
    with torch.no_grad():
        states = score.outside.model(torch.tensor([[0, 9, 10, 2]]), output_hidden_states=True).hidden_states[1][0]
    for text in ("a b", "  a b "):
        torch.testing.assert_close(score.embed(text)[0], torch.nn.functional.normalize(states, dim=-1))


@pytest.mark.parametrize(("layer", "row"), [(None, (0.5, 0.55, 0.52)), (1, (0.3, 0.4, 0.35)), (0, (0.1, 0.2, 0.15))])
def test_bertscore_is_rescaled_by_the_baseline_of_its_layer(tmp_path: Path, layer: int | None, row: tuple) -> None:
    folder = encoder(tmp_path / "bert", "bert")
    plain, rescaled = (overlap.BertScore(folder, layer, b) for b in (None, baseline(tmp_path)))
    for a, b in TEXTS:
        expected = [(x - base) / (1 - base) for x, base in zip(plain(a, b).tolist(), row)]
        assert rescaled(a, b).tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_bertscore_is_that_of_the_package(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("bert_score", reason="needs bert_score, which is not installed")
    if kind == "roberta":  # transformers 5 ignores the package's add_prefix_space
        spaced = lambda tokenizer, text: tokenizer.encode(f" {text.strip()}")  # noqa: E731
        monkeypatch.setattr(package.utils, "sent_encode", spaced)
    folder, file = encoder(tmp_path / kind, kind), baseline(tmp_path)
    pairs = TEXTS[:-1]  # the package does not encode empty texts with the tokenizers of transformers 5
    options = {"model_type": folder, "num_layers": 1, "lang": "en", "baseline_path": file}
    expected = package.score(*map(list, zip(*pairs)), **options, rescale_with_baseline=True)
    score = overlap.BertScore(folder, 1, file)
    torch.testing.assert_close(
        torch.stack([score(*pair) for pair in pairs]), torch.stack(expected, 1), atol=1e-5, rtol=0
    )


def test_the_command_with_bertscore(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The means over predictions of the best reference of each, for precision, recall and F1 apart."""
    folder, base = encoder(tmp_path / "roberta", "roberta"), baseline(tmp_path)
    records = [{"prediction": "a b b", "target": ["c a", "b"]}, {"prediction": "c", "target": "a b c a"}]
    (file := tmp_path / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    words = ["overlap", str(file), "--bertscore", folder, "--layer", "2", "--baseline", base, "--json"]
    assert cli.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    score = overlap.BertScore(folder, 2, base)
    best = torch.maximum(score("a b b", "c a"), score("a b b", "b"))
    expected = ((best + score("c", "a b c a")) / 2).tolist()
    assert [found[f"bertscore{end}"] for end in ("_precision", "_recall", "")] == pytest.approx(expected, rel=1e-5)
    (tmp_path / "wrong.tsv").write_text("LAYER,P,R,F\n0,1,1,1\n1,0.5\n")
    for wrong in (
        ["--bertscore", folder, "--layer", "3"],
        ["--bertscore", folder, "--layer", "2", "--baseline", str(tmp_path / "wrong.tsv")],
        ["--bertscore", folder, "--layer", "1", "--baseline", str(tmp_path / "wrong.tsv")],
        ["--bertscore", folder, "--layer", "0", "--baseline", str(tmp_path / "wrong.tsv")],
        ["--bertscore", folder, "--baseline", str(tmp_path / "none.tsv")],
        ["--baseline", base],
    ):
        assert cli.main(["overlap", str(file), *wrong]) == 2


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
