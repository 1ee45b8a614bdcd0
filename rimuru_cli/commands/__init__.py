"""The verbs of the command line, one a file: they read flags and call the rooms below; no logic lives here."""
