"""Dealing of batches to pipelines by speed: leases of the shards of a data set.

The package is pure, as the policies are.
"""
