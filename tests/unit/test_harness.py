"""The lm-evaluation-harness on small local tasks gives the likelihoods of `esolm score`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from esolm import cli, load
from esolm.interop.convert import convert
from support import causal, foreign
from support.runs import make_run

pytest.importorskip("lm_eval", reason="needs the lm-evaluation-harness: pip install 'esolm[eval]'")
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from esolm.generation.collect import before_stop
from esolm.interop.harness import HarnessModel

L, TEXT = 8, "To be, or not to be, that is the question. " * 2
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{context}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "writing": {
        "output_type": "generate_until", "doc_to_text": "{{context}}", "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 4}, "metric_list": [{"metric": "exact_match"}],
    },
    "last": {
        "output_type": "loglikelihood", "doc_to_text": "{{context}}", "doc_to_target": "{{choices[0]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
}  # fmt: skip


def instances(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, and tasks as YAML and JSON lines."""
    home = tmp_path_factory.mktemp("harness")
    make_run(home / "esolm", alpha_0=1.0)
    make_run(home / "ar", "ar")
    make_run(home / "shift", alpha_0=0.0, query="shift")
    make_run(home / "mdlm", "mdlm")
    make_run(home / "bd3lm", "bd3lm", block_size=4)
    docs = [
        {"context": "To", "text": TEXT, "choices": [" be", " do", " ey"], "answer": 0},
        {"context": "or no", "text": TEXT[:30], "choices": ["t", " go"], "answer": 1},
    ]
    (tasks := home / "tasks").mkdir()
    (tasks / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, task in TASKS.items():
        data = {"data_files": {"test": str(tasks / "docs.jsonl")}, "cache_dir": str(home / "cache")}
        common = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
        (tasks / f"{name}.yaml").write_text(yaml.safe_dump({**common, **task}))
    (home / "a.txt").write_text(TEXT)
    return home


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("esolm", {"estimator": "iw", "num_orders": 12}),
        ("esolm", {"estimator": "any_order", "num_orders": 4}),
        ("esolm", {"estimator": "nelbo", "num_draws": 3}),
        ("mdlm", {"estimator": "nelbo"}),
        ("mdlm", {"estimator": "jackknife", "num_orders": 3}),
        ("bd3lm", {"estimator": "nelbo"}),
        ("ar", {}),
    ],
)
def test_likelihoods_are_those_of_esolm_score(
    home: Path, name: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"estimator": "iw", **options}
    words = [f"--{key}={str(value).replace('_', '-')}" for key, value in given.items()]
    assert cli.main(["score", str(home / name), str(home / "a.txt"), "--num_sequences=4", "--json", *words]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    lm = HarnessModel(str(home / name), **options, device="cpu")
    (found,) = lm.loglikelihood_rolling(instances("loglikelihood_rolling", (TEXT[: 4 * L],)))
    assert -found / (4 * L) == pytest.approx(record["nats"], rel=1e-9)
    assert lm.get_model_info()["system"] == name


def test_shifted_queries_from_left_to_right_are_those_of_ar(home: Path) -> None:
    """The same weights: likelihoods, greedy continuations and texts."""
    pairs = [("To", " be"), ("or", " not"), ("", "to be")]
    found = []
    for name in ("ar", "shift"):
        lm = HarnessModel(str(home / name), device="cpu", sampler="left_to_right")
        scores = lm.loglikelihood(instances("loglikelihood", *pairs))
        asked = instances("generate_until", ("To b", {"max_gen_toks": 4}))
        found.append((lm.generate_until(asked), [greedy for _, greedy in scores], [value for value, _ in scores]))
    assert found[0][:2] == found[1][:2]
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-5)


@pytest.mark.parametrize(("name", "estimator"), [("esolm", "iw"), ("mdlm", "nelbo"), ("bd3lm", "nelbo")])
def test_likelihoods_do_not_depend_on_the_batch_size(home: Path, name: str, estimator: str) -> None:
    pairs = [("To", " be"), ("or", " not"), ("", "to be"), ("that is", " it")] * 2
    found = []
    for size in (1, 3, 32):
        lm = HarnessModel(str(home / name), estimator=estimator, num_orders=3, batch_size=size, device="cpu")
        found.append([value for value, _ in lm.loglikelihood(instances("loglikelihood", *pairs))])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] == pytest.approx(found[2], rel=1e-5)


def test_the_task_files_of_the_experiments_run(home: Path) -> None:
    (home / "passages.txt").write_text("to be or not to be\nthat is the question\n")
    tasks = Path(__file__).parents[2] / "experiments" / "harness" / "tasks"
    manager = TaskManager(
        include_path=str(tasks), include_defaults=False, metadata={"file": str(home / "passages.txt")}
    )
    names = ["lambada_local", "pydocs_choice"]
    model = HarnessModel(str(home / "ar"), device="cpu")
    found = simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=0, limit=3)
    assert found["n-samples"]["lambada_local"]["original"] == 2
    asked = [tuple(sample["arguments"][0]) for sample in found["samples"]["lambada_local"]]
    assert asked == [("to be or not to", " be"), ("that is the", " question")]  # with the space between them
    assert found["results"]["lambada_local"]["perplexity,none"] > 1


def test_windows_may_overlap(home: Path) -> None:
    lm, own = HarnessModel(str(home / "ar"), stride=3, device="cpu"), load(home / "ar")
    found = lm.loglikelihood_rolling(instances("loglikelihood_rolling", (TEXT,), ("",), (TEXT[:5],)))
    expected = [float(own.rolling_log_prob(text, stride=3).total) for text in (TEXT, TEXT[:5])]
    assert found == pytest.approx([expected[0], 0.0, expected[1]], rel=1e-6)


def test_a_continuation_is_scored_after_its_context(home: Path) -> None:
    lm, own = HarnessModel(str(home / "ar"), device="cpu"), load(home / "ar")
    pairs = [("To b", "e"), ("", "To"), ("To ", "be"), ("so many words that not all fit: To b", "e")]
    found = [value for value, _ in lm.loglikelihood(instances("loglikelihood", *pairs))]
    texts = [("To b", "e"), (None, "To"), ("To", " be"), ("t: To b", "e")]
    for value, (context, text) in zip(found, texts, strict=True):
        assert value == pytest.approx(float(own.log_prob(text, context).total), rel=1e-5)
    ((long, _),) = lm.loglikelihood(instances("loglikelihood", ("a", "more than eight")))
    parts = (("a", "more"), ("more", " tha"), (" tha", "n ei"), ("an ei", "ght"))
    assert long == pytest.approx(sum(float(own.log_prob(text, context).total) for context, text in parts), rel=1e-5)
    with pytest.raises(ValueError, match="empty"):
        lm.loglikelihood(instances("loglikelihood", ("", "")))


@pytest.mark.parametrize("name", ["esolm", "ar", "mdlm", "bd3lm"])
def test_greedy_is_what_greedy_sampling_gives(home: Path, name: str) -> None:
    estimator = "nelbo" if name == "bd3lm" else "iw"
    lm = HarnessModel(str(home / name), estimator=estimator, num_orders=2, device="cpu")
    text = lm._sample([[*lm.lm.tokenizer.encode("To"), None]], temperature=0.0)[0][:3]
    last = lm.lm.tokenizer.decode(text[2:])
    other = "x" if last != "x" else "y"
    if len(last.encode()) == 1 and last.isascii() and not last.isspace():
        (_, yes), (_, no) = lm.loglikelihood(instances("loglikelihood", ("To", last), ("To", other)))
        assert yes
        assert not no
    quick = HarnessModel(str(home / name), estimator=estimator, num_orders=2, greedy=False, device="cpu")
    assert quick.loglikelihood(instances("loglikelihood", ("To", "a")))[0][1] is False


@pytest.mark.parametrize(("name", "expected"), [("support.foreign.FixedRate", "left_to_right"), ("bd3lm", None)])
def test_the_greedy_sampler_is_left_to_right_where_a_system_has_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: str | None
) -> None:
    assert "left_to_right" in foreign.FixedRate.samplers
    folder = home / name if name == "bd3lm" else make_run(tmp_path / "run", name)
    lm = HarnessModel(str(folder), estimator="nelbo", device="cpu")
    samplers = []

    def sample(rows: list[list[int]], **options: Any) -> list[list[int]]:
        samplers.append(options["sampler"])
        return rows

    monkeypatch.setattr(lm, "_sample", sample)
    lm.loglikelihood(instances("loglikelihood", ("To", "a")))
    assert samplers == [expected]


@pytest.mark.slow
def test_the_module_runs_the_command_line_of_the_harness(home: Path) -> None:
    words = ["run", "--model", "esolm", "--model_args", f"pretrained={home / 'ar'}", "--tasks", "last"]
    words += ["--include_path", str(home / "tasks"), "--limit", "1", "--device", "cpu"]
    found = subprocess.run(
        [sys.executable, "-m", "esolm.interop.harness", *words], capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr
    assert "|last" in found.stdout


def test_generation_stops_at_the_stop_text(home: Path) -> None:
    lm = HarnessModel(str(home / "esolm"), device="cuda:0", batch_size="auto")  # as the command line says by default
    requests = instances(
        "generate_until",
        ("To be", {"until": ["\n"], "max_gen_toks": 3}),
        ("a very long context", {"until": "q", "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 5}),
    )
    first, second = (lm.generate_until(requests) for _ in range(2))
    assert first == second
    assert before_stop("a. b", [".", " "]) == "a"
    assert before_stop("a b", []) == "a b"
    assert before_stop("a b a b", ["b", "a"], 3) == "a b "
    with pytest.raises(ValueError, match=r"max_gen_toks is 8; .* 7"):
        lm.generate_until(instances("generate_until", ("a", {"max_gen_toks": 8})))
    with pytest.raises(ValueError, match=r"best.*nelbo, exact, any-order"):
        HarnessModel(str(home / "esolm"), estimator="best")


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", ["esolm", "bd3lm"])
def test_the_harness_runs_and_caches(home: Path, tmp_path: Path, name: str) -> None:
    estimator = {"estimator": "nelbo"} if name == "bd3lm" else {"estimator": "any_order", "num_orders": 2}
    manager = TaskManager(include_path=str(home / "tasks"), include_defaults=False)
    runs = [
        simple_evaluate(
            model="esolm", model_args={"pretrained": str(home / name), **estimator}, tasks=list(TASKS),
            task_manager=manager, batch_size=4, device="cpu", bootstrap_iters=0, use_cache=str(tmp_path / "cache"),
        )
        for _ in range(2)
    ]  # fmt: skip
    first, second = (run["results"] for run in runs)
    assert first.keys() == set(TASKS)
    for task, values in first.items():
        assert {k: v for k, v in values.items() if isinstance(v, float)} == {
            k: v for k, v in second[task].items() if isinstance(v, float)
        }
    assert 0 <= first["choice"]["acc,none"] <= 1
    assert first["rolling"]["bits_per_byte,none"] > 1
    assert "|rolling" in make_table(runs[0])


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_converted_model_scores_as_in_transformers(name: str, home: Path, tmp_path: Path) -> None:
    """Likelihoods of the same tasks by the harness's own model for transformers, which starts with BOS as ours does."""
    pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    causal.save(name, tmp_path / "theirs")
    convert(str(tmp_path / "theirs"), tmp_path / "ours")
    theirs = HFLM(str(tmp_path / "theirs"), add_bos_token=True, dtype="float32", device="cpu", max_length=causal.LENGTH)
    ours = HarnessModel(str(tmp_path / "ours"), device="cpu")
    pairs = instances("loglikelihood", ("To", " be"), ("or no", "t"), ("", "what is"), ("To be, or", " not to"))
    for found, expected in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        assert found[0] == pytest.approx(expected[0], abs=1e-3)
        assert found[1] == expected[1]
    whole = instances("loglikelihood_rolling", ("To be, or not to be",))  # one window in both
    theirs.add_bos_token = False  # it adds one here anyway
    expected = theirs.loglikelihood_rolling(whole)
    assert ours.loglikelihood_rolling(whole) == pytest.approx(expected, abs=1e-3)
    theirs.add_bos_token = True
    tasks = TaskManager(include_path=str(home / "tasks"), include_defaults=False)
    results = [
        simple_evaluate(lm, tasks=["choice", "last"], task_manager=tasks, log_samples=True) for lm in (ours, theirs)
    ]
    for task, metrics in {"choice": ["acc,none"], "last": ["acc,none", "perplexity,none"]}.items():
        found, expected = ([result["results"][task][metric] for metric in metrics] for result in results)
        assert found == pytest.approx(expected, rel=1e-3)
        for one, two in zip(*(result["samples"][task] for result in results), strict=True):
            found, expected = ([float(part[0]) for part in sample["filtered_resps"]] for sample in (one, two))
            assert found == pytest.approx(expected, abs=1e-3)
