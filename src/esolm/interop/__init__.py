"""Other people's weights and tools: published checkpoints, model folders with cards, transformers, lm-eval.

Owns `esolm convert` and `esolm export`, the transformers model class (`interop.hf`) and the model of the
lm-evaluation-harness (`interop.harness`). Imports core to model, storage and metrics; never viz, bench or cli.
transformers and lm_eval are imported by `hf` and `harness` alone.
"""
