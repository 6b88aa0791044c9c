"""The mathematics, as pure functions of tensors: randomness, the noise process, orders and schedules, attention
patterns, loss terms, drawing tokens, and the batch type. Imports nothing else of the package.
"""
