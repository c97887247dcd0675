"""What the scheduler has heard and decided, and its readers: journal, status, and the page of the status."""
