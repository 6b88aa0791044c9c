"""Constraints: regular expressions and JSON schemas as automata over tokens, and the tokens that still fit.

Owns the compilation of a pattern (`compile`), the automaton over tokens (`automaton`), its walk along a partly known
sequence of fixed length (`walk`), and the guide that restricts the draws of a batch (`guide`). Knows no model and no
tokenizer: a `Vocabulary` says what text each id stands for. Imports runtime.
"""
