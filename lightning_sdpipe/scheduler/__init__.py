"""The central half of synchronisation: who averages with whom, and when. Never touches a tensor.

Imports neither torch nor numpy nor lightning, so it runs on a machine that has none of them.
"""
