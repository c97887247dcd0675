"""Which worker is where: the mesh, its process groups, hosts, and the file of a placement."""
