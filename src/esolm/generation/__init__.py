"""Generation: what stands between a user's text and a sampling loop, and between its steps and the finished texts.

Owns rows with prompts and blanks (`rows`), the spans that must match a pattern (`limits`), the lengths of blanks chosen
by likelihood (`lengths`), and the collected samples (`samples`) with their importance weights (`collect`). Imports
everything up to likelihood.
"""
