"""The experiments behind docs/results.md: one folder per table or figure, and `runner`, which runs them."""
