"""Tables and figures of recorded runs. Reads run directories, results folders and benchmark results; imports no torch.

An arm is a set of runs that share every setting but the seed. A run counts if it finished and no newer finished run has
its arm and seed.
"""
