"""Ready-made trainings and benchmarks on top of lightning_sdpipe."""
