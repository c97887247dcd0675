"""One worker of a run: its connection to the scheduler, its processes, its training."""
