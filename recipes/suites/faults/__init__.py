"""The suite ``faults`` (``conf/suite/faults.yaml``)."""
