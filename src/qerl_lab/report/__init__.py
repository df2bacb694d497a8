"""Tables and figures of records. Reads run directories and MLflow only; imports no torch."""
