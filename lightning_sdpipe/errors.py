"""The exceptions that reach users."""


class ConfigurationError(ValueError):
    """What was asked for cannot work; the message says what was given, what is allowed and what to do."""


class SchedulerError(RuntimeError):
    """The scheduler cannot be reached, or did not answer in time."""


class WorkerFailedError(RuntimeError):
    """Another worker of the run failed first; the message names it and its reason."""
