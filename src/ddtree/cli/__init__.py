"""The command line: parses, calls, prints. Each command is a file; `main.py` puts them together."""
