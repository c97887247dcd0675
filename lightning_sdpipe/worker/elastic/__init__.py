"""The worker's side of an elastic run: each pipeline is a small job of its own, which comes, meets the others at a
standing scheduler, and goes."""
