"""Measurements of a policy: held-out accuracy, KL, and which sigma is how much noise."""
