"""Processes, hosts and links that the suites and the tests share."""
