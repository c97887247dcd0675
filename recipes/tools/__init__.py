"""Tools for those who work on the package, or study stragglers: ``python -m recipes.tools.NAME``."""
