"""The suite ``partial_reduce`` (``conf/suite/partial_reduce.yaml``)."""
