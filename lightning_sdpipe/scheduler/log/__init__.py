"""Event log of the scheduler, and its readers: the status, and its page."""
