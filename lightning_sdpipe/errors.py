"""The exceptions that reach users."""


class ConfigurationError(ValueError):
    """What was asked for cannot work; the message says what was given, what is allowed and what to do."""


class SchedulerError(RuntimeError):
    """The scheduler cannot be reached, or did not answer in time."""


class NonFiniteError(RuntimeError):
    """A loss, gradients or parameters are nan or infinite: ``what`` names them, the pipeline and the step."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"Not finite: {what}. Lower the learning rate or clip gradients; Trainer(detect_anomaly=True) finds the "
            "operation. SDPipeStrategy(on_nonfinite='continue') goes on all the same."
        )


class WorkerFailedError(RuntimeError):
    """Another worker of the run failed first; the message names it and its reason."""
