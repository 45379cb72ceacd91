"""The auxiliary images, as the network wants them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlu_cli.audit.network import Network
from rlu_cli.audit.options import AuxOptions
from rlu_cli.audit.progress import Reporter
from rlu_cli.core.types import Note
from rlu_cli.errors import MismatchError
from rlu_cli.files.text import names as listed
from rlu_cli.images import (
    ImageCollection,
    ImageSet,
    Normalization,
    Reading,
    open_collection,
    parse_normalization,
)

_NAMED = 3
"""How many damaged images a warning names."""


@dataclass(frozen=True)
class Auxiliary:
    """Decoded auxiliary images, with how they are fed to the network."""

    images: ImageSet
    normalization: Normalization
    notes: tuple[Note, ...]


def scan_auxiliary(
    root: Path, options: AuxOptions, *, class_names: Sequence[str] | None, class_order: str | None
) -> tuple[ImageCollection, list[Note]]:
    """The classes and their output indices, with what there is to say about them."""
    collection = open_collection(
        root,
        class_names=class_names,
        order=class_order,
        split=options.aux_split,
        svhn_digit_zero=options.svhn_digit_zero,
    )
    notes = []
    if collection.skipped:
        notes.append(Note("aux-skipped", f"left out of {root}: {'; '.join(collection.skipped)}"))
    if class_order is None and class_names is None and collection.numeric_order_differs:
        notes.append(
            Note(
                "class-order-ambiguous",
                f"the class folders of {root} are numbers, taken in string order (1, 10, 2), as "
                "torchvision's ImageFolder does: pass --class-order natural if training had "
                "1, 2, 10",
            )
        )
    return collection, [*notes, *_disagreement(collection.names, class_names)]


def _disagreement(names: Sequence[str], class_names: Sequence[str] | None) -> list[Note]:
    """A warning where --class-order puts a class at another output than the checkpoint's names do."""
    said = {name: n for n, name in enumerate(class_names or ())}
    moved = [(n, name) for n, name in enumerate(names) if said.get(name, n) != n]
    if not moved:
        return []
    n, name = moved[0]
    return [
        Note(
            "class-names-disagree",
            f"--class-order puts {len(moved)} of {len(names)} classes at other outputs than the checkpoint's "
            f"own class names do ({name!r} at {n}, there at {said[name]}): one of the two is wrong",
        )
    ]


def reading(options: AuxOptions, *, seed: int) -> Reading:
    """The options, for the image collection."""
    return Reading(options.aux_per_class, seed, options.exif, options.skip_bad)


def auxiliary_document(collection: ImageCollection, images: ImageSet, options: AuxOptions) -> dict[str, Any]:
    """What the JSON says of the auxiliary data."""
    return {
        "path": str(collection.root),
        "images": len(images.labels),
        "classes": len(collection.names),
        "kind": collection.kind,
        "split": collection.split,
        "per_class": options.aux_per_class,
        "svhn_digit_zero": (options.svhn_digit_zero or "first") if collection.kind == "svhn" else None,
        "exif": options.exif,
        "bad": len(images.bad) if options.skip_bad else None,
    }


def load_auxiliary(
    collection: ImageCollection,
    how: Reading,
    network: Network,
    normalize: str | None,
    *,
    resize: bool,
    reporter: Reporter,
) -> Auxiliary:
    """Decode the images once, at the network's size and channels.

    resize : whether images of another size are resized; otherwise all must have the network's
    """
    _check_number(collection, network.layer.num_classes)
    notes = []
    size = collection.native_size(how)
    if size != network.image_size:
        notes.append(
            Note(
                "images-resized",
                f"auxiliary images of {size[0]}x{size[1]} are resized to {network.image_size[0]}x"
                f"{network.image_size[1]} (height x width), what the network was built for",
            )
        )
    if normalize is None:
        notes.append(
            Note(
                "normalize-assumed",
                "nothing says how the client normalised its images; pixels scaled to 0..1 are assumed: "
                "pass --normalize",
            )
        )
    normalization = parse_normalization(normalize or "none")
    normalization.check_channels(network.channels)
    with reporter("decoding auxiliary images") as update:
        images = collection.load(
            how,
            channels=network.channels,
            size=network.image_size if resize else None,
            progress=update,
        )
    if images.bad:
        more = len(images.bad) - _NAMED
        notes.append(
            Note(
                "aux-bad-images",
                f"{len(images.bad)} of {len(images.bad) + len(images.labels)} auxiliary images are left out, "
                f"since they can't be decoded: {', '.join(map(str, images.bad[:_NAMED]))}"
                + (f" and {more} more" if more > 0 else ""),
            )
        )
    return Auxiliary(images, normalization, (*notes, *few_samples(images.names, images.counts)))


def few_samples(names: Sequence[str], counts: Sequence[int]) -> list[Note]:
    """A warning where a class has a single auxiliary sample."""
    few = [name for name, count in zip(names, counts, strict=True) if count == 1]
    if not few:
        return []
    return [
        Note(
            "aux-few-images",
            f"classes with a single auxiliary image ({', '.join(few[:5])}): their logits get no "
            "variance, so their erroneous confidence is poor; give at least 20 images a class",
        )
    ]


def _check_number(collection: ImageCollection, expected: int) -> None:
    """Refuse a collection that has not one class for each output of the model."""
    found = len(collection.names)
    if found == expected:
        return
    what = "classes"
    advice = "pass the path whose classes are the model's, one for each output"
    if collection.kind == "folders":
        what = "class folders"
        advice = "add the missing classes, or pass the folder whose direct sub-folders are the classes"
        if (collection.root / "val_annotations.txt").is_file():
            advice = (
                "this is Tiny-ImageNet's flat validation set: pass the folder above it, which has wnids.txt"
            )
    raise MismatchError(
        f"expected {expected} {what} in {collection.root}, one for each output of the model, found {found} "
        f"({listed(collection.names)}): {advice}"
    )
