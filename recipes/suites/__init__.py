"""The benchmark suites, modules or packages whose `run` returns rows and ratios."""
