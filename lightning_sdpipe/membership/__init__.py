"""Which pipelines take part in an elastic run: events and the time go in, decisions come out.

Pure, as the policies are.
"""
