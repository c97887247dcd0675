"""Pictures for image classifiers: reads data sets, and varies pictures while training."""
