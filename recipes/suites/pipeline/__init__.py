"""The suite ``pipeline`` (``conf/suite/pipeline.yaml``)."""
