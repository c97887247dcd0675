"""The suite ``scheduler`` (``conf/suite/scheduler.yaml``)."""
