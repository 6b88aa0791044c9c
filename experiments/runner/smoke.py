"""The whole pipeline at tiny sizes: generated corpora, models with random weights, one process."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.runner import document, jobs, spec

WORDS = ("the", "a", "old", "new", "sea", "house", "man", "king", "ran", "saw", "made", "was", "and", "of", "in", "to")


def run(experiments: Path, names: list[str] | None, command: jobs.Command, console: Console) -> int:
    """Run every job of the named experiments and build the document, all in a temporary folder."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copytree(experiments, root / "experiments", ignore=shutil.ignore_patterns("results"))
        plan = spec.read(root / "experiments", smoke=True)
        chosen = names or list(plan.experiments)
        if unknown := [name for name in chosen if name not in plan.experiments]:
            raise ValueError(f"no experiment {unknown[0]!r}: choose from {', '.join(plan.experiments)}")
        space = jobs.Workspace(root / "work", plan, make_places(root))
        space.folder.mkdir()
        missing = space.missing(chosen)
        jobs.run_here(space, missing, command, lambda line: console.print(line, style="dim"))
        path = document.build(plan, root / "docs")
        if still := space.missing(chosen):
            raise ValueError(f"{len(still)} jobs wrote no output, the first is {still[0].title}")
        size = len(path.read_text("utf-8"))
        console.print(f"{len(missing)} jobs in {time.perf_counter() - start:.0f} s; the document has {size} characters")
    return 0


def make_places(root: Path) -> dict[str, str]:
    """Create corpora, a judge, an embedder and left-to-right models under root and return their paths."""
    made = {name: root / name.lower() for name in spec.PLACES}
    _corpora(made["CORPORA"])
    _models(made["JUDGE"], made["EMBEDDER"])
    for name in ("stories260K", "stories15M"):
        _causal(made["MODELS"] / name, [(made["CORPORA"] / "books" / "train.txt").read_text("utf-8")])
    return {name: str(path) for name, path in made.items()}


def _corpora(folder: Path) -> None:
    draw = random.Random(0)

    def text(words: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(words))

    for name, lines in {
        "books/train.txt": [text(40) for _ in range(60)],
        "books/valid.txt": [text(40) for _ in range(12)],
        "stories/train.txt": [f"{text(30)}\n<|endoftext|>" for _ in range(20)],
        "stories/valid.txt": [f"{text(30)}\n<|endoftext|>" for _ in range(6)],
        "wikitext-2/wiki.valid.tokens": [text(30) for _ in range(8)],
        "lambada/lambada_development_plain_text.txt": [text(20) for _ in range(8)],
        "arxiv/cs.IR.jsonl": [json.dumps({"title": text(4), "abstract": text(30)}) for _ in range(8)],
        "moses/train.100k.smi": ["C" * i + "O" for i in range(1, 30)],
        "moses/valid.5k.smi": ["C" * i + "N" for i in range(1, 9)],
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n\n".join(lines) if name.startswith("books") else "\n".join(lines) + "\n", "utf-8")


def _causal(folder: Path, texts: list[str]) -> None:
    """A Llama with a byte-level BPE and random weights."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    plain.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=290, special_tokens=["<s>", "</s>"], initial_alphabet=sorted(alphabet), show_progress=False
        ),
    )
    size: Any = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ids = {"vocab_size": plain.get_vocab_size(), "bos_token_id": 0, "eos_token_id": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(max_position_embeddings=512, **ids, **size))
    model.save_pretrained(folder)
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>")
    words.save_pretrained(folder)


def _models(judge: Path, embedder: Path) -> None:
    try:
        import transformers
    except ImportError as error:
        raise ValueError("the judge needs transformers: pip install 'esolm[hf]'") from error
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(["<s>", "<unk>", *WORDS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", unk_token="<unk>", pad_token="<s>"
    )
    size: Any = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.set_seed(0)
    llama = transformers.LlamaConfig(vocab_size=len(vocabulary), max_position_embeddings=512, **size)
    bert = transformers.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=512, **size)
    for path, model in ((judge, transformers.LlamaForCausalLM(llama)), (embedder, transformers.BertModel(bert))):
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
