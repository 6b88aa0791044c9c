"""The experiments behind docs/results.md: one folder for a table or figure, and `runner`, which runs them."""
