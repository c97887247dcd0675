"""The scheduler's process: its socket, the service behind it, and the desks of the service."""
