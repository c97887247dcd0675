"""The suite ``far_apart`` (``conf/suite/far_apart.yaml``)."""
