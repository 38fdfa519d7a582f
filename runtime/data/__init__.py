"""The path from data sources to training batches: rows (sources), messages (formats), texts (template), the
characters that carry loss (masking), tokens (encoding), rows of samples (epochs), batches; all by prepare."""
