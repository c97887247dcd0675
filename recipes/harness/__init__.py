"""Processes, hosts and links for the suites and the tests."""
