"""From records to tables and figures. Reads run directories and MLflow only; imports no torch."""
