"""Experts: where they lie, which of them are worth the pool's pages, and how a layer runs over them."""
