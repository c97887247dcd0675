"""The suite ``throughput`` (``conf/suite/throughput.yaml``)."""
