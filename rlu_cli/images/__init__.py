"""Auxiliary images: class folders, decoding, loading and normalisation.

Importing this package loads neither torch nor Pillow; the functions that need them import them.
"""

from __future__ import annotations

from rlu_cli.images.collection import ImageCollection, Reading, open_collection
from rlu_cli.images.decode import decode_image, to_mode
from rlu_cli.images.folder import ClassFolder, natural_key, scan_class_folder
from rlu_cli.images.load import ImageSet, load_images, native_size
from rlu_cli.images.normalize import PRESETS, Normalization, parse_normalization

__all__ = [
    "PRESETS",
    "ClassFolder",
    "ImageCollection",
    "ImageSet",
    "Normalization",
    "Reading",
    "decode_image",
    "load_images",
    "native_size",
    "natural_key",
    "open_collection",
    "parse_normalization",
    "scan_class_folder",
    "to_mode",
]
