"""The suite ``placement`` (``conf/suite/placement.yaml``)."""
