"""Everything read from or written to disk: checkpoints, metadata, truth files, hashes.

Nothing here runs code from a file. torch is imported inside functions only.
"""
