"""Tables and figures of recorded runs. Reads run directories and MLflow only; imports no torch."""
