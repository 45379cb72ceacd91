"""The auxiliary images, as the network wants them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlu_cli.audit.network import Network
from rlu_cli.audit.progress import Reporter
from rlu_cli.core.types import Note
from rlu_cli.errors import MismatchError
from rlu_cli.images import (
    ClassFolder,
    ImageSet,
    Normalization,
    load_images,
    native_size,
    parse_normalization,
    scan_class_folder,
)


@dataclass(frozen=True)
class Auxiliary:
    """Decoded auxiliary images, with how they are fed to the network."""

    folder: ClassFolder
    images: ImageSet
    normalization: Normalization
    notes: tuple[Note, ...]


def scan_auxiliary(
    root: Path, *, class_names: Sequence[str] | None, class_order: str | None
) -> tuple[ClassFolder, list[Note]]:
    """The class folders and their output indices, with what there is to say about them."""
    folder = scan_class_folder(root, class_names=class_names, order=class_order)
    notes = []
    if folder.skipped:
        notes.append(Note("aux-skipped", f"left out of {root}: {'; '.join(folder.skipped)}"))
    if class_order is None and class_names is None and folder.numeric_order_differs:
        notes.append(
            Note(
                "class-order-ambiguous",
                f"the class folders of {root} are numbers, taken in string order (1, 10, 2), as "
                "torchvision's ImageFolder does: pass --class-order natural if training had "
                "1, 2, 10",
            )
        )
    return folder, notes


def load_auxiliary(
    folder: ClassFolder,
    network: Network,
    normalize: str | None,
    *,
    resize: bool,
    seed: int,
    reporter: Reporter,
) -> Auxiliary:
    """Decode the images once, at the network's size and channels.

    resize : whether images of another size are resized; otherwise all must have the network's
    """
    expected = network.layer.num_classes
    if len(folder.names) != expected:
        raise MismatchError(
            f"expected {expected} class folders in {folder.root}, one for each output of the model, found "
            f"{len(folder.names)}: add the missing classes, or pass the right folder to --aux"
        )
    notes = []
    size = native_size(folder)
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
        images = load_images(
            folder,
            channels=network.channels,
            size=network.image_size if resize else None,
            seed=seed,
            progress=update,
        )
    few = [name for name, count in zip(images.names, images.counts, strict=True) if count < 2]
    if few:
        notes.append(
            Note(
                "aux-few-images",
                f"classes with a single auxiliary image ({', '.join(few[:5])}): their logits get no "
                "variance, so their erroneous confidence is poor; give at least 20 images a class",
            )
        )
    return Auxiliary(folder, images, normalization, tuple(notes))
