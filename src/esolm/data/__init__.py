"""Corpora to token shards, and batches from them."""

from .corpora import Corpus, Document, corpus
from .loader import Batch, Loader
from .manifest import Manifest, Shard, Split
from .prepare import prepare
from .tokenizer import Tokenizer, tokenizer

__all__ = [
    "Batch",
    "Corpus",
    "Document",
    "Loader",
    "Manifest",
    "Shard",
    "Split",
    "Tokenizer",
    "corpus",
    "prepare",
    "tokenizer",
]
