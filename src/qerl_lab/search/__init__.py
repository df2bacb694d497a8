"""Search of values for numeric keys, by short sweeps."""
