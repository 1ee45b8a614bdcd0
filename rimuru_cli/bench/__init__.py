"""Measurements: what `rimuru bench` runs. No output here, only numbers."""
