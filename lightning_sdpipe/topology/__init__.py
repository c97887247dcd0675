"""Topology of a run: the mesh of workers, its process groups, hosts, and the file of a placement."""
