"""The suite ``convergence`` (``conf/suite/convergence.yaml``)."""
