"""Training data: lines of JSON files become documents, documents rows, rows batches."""
