"""What Lightning's Trainer, its callbacks and precision plugins do per rank, made right for stages and pipelines."""
