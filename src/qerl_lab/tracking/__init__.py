"""MLflow, the mirror of the run directory."""
