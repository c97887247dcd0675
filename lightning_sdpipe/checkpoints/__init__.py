"""Saving and loading of checkpoints: one file of the whole model, or a directory to which every rank writes its
part."""
