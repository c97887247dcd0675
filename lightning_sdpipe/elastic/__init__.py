"""An elastic job: each pipeline is a small job of its own, pipelines come and go, and meet at a standing scheduler."""
