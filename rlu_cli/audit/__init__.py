"""From files to recovered counts: the edges put together, without a command line."""
