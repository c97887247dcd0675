"""Text for language models: where documents come from, their vocabulary, and the batches made of them."""
