"""The suite ``soak`` (``conf/suite/soak.yaml``)."""
