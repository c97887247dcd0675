"""Text for language models: sources of documents, their vocabulary, and batches."""
