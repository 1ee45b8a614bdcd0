"""Talking to a loaded model: conversation state, one answer, slash commands, the line editor. No flags and no Typer here."""
