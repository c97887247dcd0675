"""Pictures for image classifiers: how data sets are read, and how pictures are varied while training."""
