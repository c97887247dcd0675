"""Membership of an elastic run: events and the time go in, decisions on which pipelines take part come out.

The package is pure, as the policies are.
"""
