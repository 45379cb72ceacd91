"""The command line: parses, calls, writes. One file a command."""
