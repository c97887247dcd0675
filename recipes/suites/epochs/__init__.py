"""The suite ``epochs`` (``conf/suite/epochs.yaml``)."""
