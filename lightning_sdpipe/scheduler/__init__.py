"""The central half of synchronisation: it decides which workers average, and when, and never touches a tensor.

Imports neither torch nor numpy nor lightning, so it runs on a machine that has none of them.
"""
