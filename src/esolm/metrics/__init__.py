"""Metrics of generated text: judge perplexity and entropy, MAUVE, ROUGE and BERTScore, molecules, n-gram baselines.

Owns everything that measures samples or predictions from a file, and the one loader of outside transformers models.
Imports core, runtime, likelihood, data and model.
"""
