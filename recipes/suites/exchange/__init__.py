"""The suite ``exchange`` (``conf/suite/exchange.yaml``)."""
