"""Whole screens of the dashboard: the pool, one huge page, help, engines, the chat."""
