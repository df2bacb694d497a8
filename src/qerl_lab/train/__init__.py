"""Training: one run, one step, and the trainer built on TRL's."""
