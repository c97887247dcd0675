"""The suite ``variance`` (``conf/suite/variance.yaml``)."""
