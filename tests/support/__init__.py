"""Toy networks, slow twins, tiny runs and process crews that the tests share."""
