"""What flags and annotations say of the network and of its inputs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from rlu_cli.audit.annotations import Annotations, architecture, image_size, name_list, normalization
from rlu_cli.audit.options import ModelOptions
from rlu_cli.errors import MismatchError


@dataclass(frozen=True)
class ModelDescription:
    """The network and its inputs, as far as somebody describes them; None stands for "not said".

    arch_by_config : whether only a ``config.json`` says the architecture, which may be another program's word
    """

    arch: str | None
    normalize: str | None
    image_size: tuple[int, int] | None
    class_names: tuple[str, ...] | None
    arch_by_config: bool = field(default=False, compare=False)


def describe_model(options: ModelOptions, annotations: Annotations) -> ModelDescription:
    """The first of flag, local and global metadata and sidecar that says each.

    Raises
    ------
    MismatchError
        A value that can't be parsed.
    """
    return ModelDescription(
        annotations.get("arch", options.arch, architecture),
        annotations.get("normalize", options.normalize, normalization),
        annotations.get("image_size", options.image_size, image_size),
        annotations.get("class_names", None, name_list),
        annotations.sources.get("arch") == "config",
    )


def check_described_alike(first: ModelDescription, other: ModelDescription) -> None:
    """All clients of one call share a network, so that their order never matters.

    Raises
    ------
    MismatchError
        Two clients' annotations describe different ones.
    """
    for said in fields(ModelDescription):
        one, two = getattr(first, said.name), getattr(other, said.name)
        if said.compare and one != two:
            raise MismatchError(
                f"expected all local checkpoints of one call to agree on fl.{said.name}, found {one!r} and "
                f"{two!r}: recover them in separate calls"
            )
