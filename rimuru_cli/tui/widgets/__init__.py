"""Parts of a screen. Those that change often draw lines of their own and refresh only what changed."""
