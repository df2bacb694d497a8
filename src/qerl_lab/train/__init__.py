"""Training: one run, one step, and TRL's trainer between them."""
