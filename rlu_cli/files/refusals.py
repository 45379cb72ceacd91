"""Why a file can't be read as a checkpoint, and what the user can do about it."""

from __future__ import annotations

from pathlib import Path

from rlu_cli.errors import FileError
from rlu_cli.files.sniff import FileKind, read_head
from rlu_cli.files.text import names, size

RESAVE = "re-save the weights alone with torch.save(model.state_dict(), 'weights.pt')"
_EXPECTED = "expected a checkpoint (safetensors, torch .pt/.pth/.bin, .npz or OpenFL .pbuf)"
_ADVICE = {
    FileKind.TORCHSCRIPT: f"it holds code besides the weights, which is never run here; {RESAVE}.",
    FileKind.TORCH_EXPORT: f"loading it could run code; {RESAVE}.",
    FileKind.PICKLE: f"loading it could run code; {RESAVE} or with safetensors.",
    FileKind.NPY: "one array without a name is no model; save all of them with np.savez(path, *arrays).",
    FileKind.GIT_LFS_POINTER: "the real file was never downloaded; run 'git lfs pull' in that repository.",
    FileKind.HTML: "most likely an error page saved by a failed download; download the file again.",
    FileKind.JSON: "it has no 'weight_map', so it isn't the index of a sharded checkpoint either;"
    " give the checkpoint itself.",
    FileKind.GGUF: "its tensors are quantised for inference; give the checkpoint it was made from.",
    FileKind.HDF5: "save the weights with np.savez(path, *model.get_weights()) instead.",
    FileKind.FOBS: "NVFlare's own format; load it with nvflare and save the weights with torch.save.",
    FileKind.FLATBUFFER: "if it is MNN's (FedML writes such files for phones, under the name .pt too),"
    " convert it with MNN's tools and save the weights with np.savez(path, *arrays).",
    FileKind.GZIP: "decompress it first (gunzip).",
    FileKind.ZIP: "no data.pkl and no .npy entries in it; if the checkpoint is inside, unzip it first.",
    FileKind.ZIP_DAMAGED: "its directory, which lies at the end of the file, is missing or damaged: the copy"
    " is most likely cut short; copy or download it again.",
    FileKind.EMPTY: "the save or copy failed; write it again.",
}


def _folder_advice(path: Path) -> str:
    try:
        found = sorted(entry.name for entry in path.iterdir())
    except OSError:
        return "give a file in it."
    if "data.pkl" in found or (path / "archive" / "data.pkl").exists():
        return (
            "it holds data.pkl, so it is a torch checkpoint (a zip file) that some tool unpacked; zip the"
            " folder again without compression (zip -0 -r weights.pt FOLDER) or download the file again."
        )
    suffixes = (".safetensors", ".safetensors.index.json", ".pt", ".pth", ".bin", ".npz")
    candidates = [name for name in found if name.endswith(suffixes)]
    return f"give a file in it, such as {names(candidates, 3)}." if candidates else "give a file in it."


def describe_refusal(kind: FileKind, path: Path | str) -> str:
    """One message: what was expected, what was found, what to do."""
    path = Path(path)
    if kind is FileKind.DIRECTORY:
        return f"{path}: {_EXPECTED}, found a folder; {_folder_advice(path)}"
    try:
        length = size(path.stat().st_size)
        head = read_head(path, 8)
    except (OSError, FileError):
        length, head = "unknown size", b""
    article = "an" if kind.value.startswith(("H", "e", "i")) else "a"
    advice = _ADVICE.get(kind)
    if advice is None:
        hint = ""
        if path.suffix in {".pbuf", ".pb"}:
            hint = " It is not OpenFL's ModelProto; convert what wrote it with 'fx model save'."
        advice = f"its first bytes are {head.hex(' ')}; check that it is the right file and complete.{hint}"
    return f"{path}: {_EXPECTED}, found {article} {kind.value} of {length}; {advice}"
