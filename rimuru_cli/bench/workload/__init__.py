"""Serving many requests at once: one list of requests under several policies, for real or with a cost model in the place of computing."""
