"""Placement: which device runs which stage of which pipeline (DT-FM, NeurIPS 2022, and beyond it). Needs no torch,
except to measure."""
