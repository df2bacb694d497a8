"""Units in which a machine's memory is told."""

GIB = 2**30  # bytes
