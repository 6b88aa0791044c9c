"""Reinforcement learning (GRPO) and preference tuning (DPO) by the likelihood of a sample given its schedule: rollouts,
rewards, objectives, and their sessions of the Trainer. Imports training, model and metrics, and what they import.

The modules of rewards (`pool`, `rewards`) import nothing heavy: worker processes load them.
"""
