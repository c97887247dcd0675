"""The suite ``ragged`` (``conf/suite/ragged.yaml``)."""
