"""Placement: which device runs which stage of which pipeline (after DT-FM, NeurIPS 2022). Needs torch only to
measure."""
