"""Tables and figures of recorded runs. Reads run directories and MLflow only; imports no torch.

An arm is a set of runs that share every setting but the seed.
"""
