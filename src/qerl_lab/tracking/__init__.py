"""Record metrics, and mirror the run directory to MLflow or W&B."""
