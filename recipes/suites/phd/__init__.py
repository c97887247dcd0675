"""The suite ``phd`` (``conf/suite/phd.yaml``)."""
