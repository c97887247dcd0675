"""The benchmark suites: a folder each, whose `run` returns rows and ratios."""
