"""Event log of the scheduler, and its readers: journal, status, and the page of the status."""
