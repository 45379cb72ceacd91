"""The method: arrays in, arrays out. No files, no printing, no command line."""
