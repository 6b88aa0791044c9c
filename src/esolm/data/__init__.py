"""Corpora, tokenizers, token shards and the loader.

This package reads documents from files, the Python documentation or the Hugging Face hub, splits and encodes them,
packs them into memory-mapped shards with a manifest (`prepare`), and serves batches from these (`Loader`). It imports
only `core` and `runtime`.
"""

from ..core.batch import Batch
from .chat import ChatFormat
from .corpora import Corpus, corpus
from .documents import Document, Message
from .loader import Loader
from .manifest import Manifest, Shard, Split
from .options import PrepareOptions
from .prepare import prepare
from .tokenizer import Tokenizer, tokenizer

__all__ = [
    "Batch",
    "ChatFormat",
    "Corpus",
    "Document",
    "Loader",
    "Manifest",
    "Message",
    "PrepareOptions",
    "Shard",
    "Split",
    "Tokenizer",
    "corpus",
    "prepare",
    "tokenizer",
]
