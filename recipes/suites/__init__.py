"""The benchmark suites: one module each, whose `run` returns rows and ratios."""
