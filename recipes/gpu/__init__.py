"""One command that tells what works on a GPU, and how fast: ``python3 -m recipes.gpu``."""
