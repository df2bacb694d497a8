"""Measure a policy: held-out accuracy, entropy, KL, and the sigma that matches a weight format."""
