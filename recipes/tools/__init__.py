"""Tools for work on the package and for studies of stragglers: ``python -m recipes.tools.NAME``."""
