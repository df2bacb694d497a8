"""Read and write the run directory. A kill or a full disk leaves each file complete or absent."""
