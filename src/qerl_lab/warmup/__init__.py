"""A base model learns the format of the answers from worked solutions, before reinforcement learning begins."""
