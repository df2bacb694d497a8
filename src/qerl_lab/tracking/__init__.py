"""Mirror the run directory to MLflow."""
