"""What OpenFL's pipelines write; run as a script with a torch state dict and the folder to write into."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from openfl.pipelines import EdenPipeline, KCPipeline, NoCompressionPipeline, SKCPipeline, STCPipeline
from openfl.protocols.utils import construct_model_proto, dump_proto

PIPELINES = {
    "raw": NoCompressionPipeline,
    "kc": KCPipeline,
    "skc": SKCPipeline,
    "stc": STCPipeline,
    "eden": EdenPipeline,
}


def main(source: Path, out: Path) -> None:
    state = torch.load(source, weights_only=True)
    tensors = {name: tensor.numpy() for name, tensor in state.items()}
    tensors["__opt_state_0_0_momentum_buffer"] = np.ones(3, dtype=np.float32)
    for name, pipeline in PIPELINES.items():
        try:
            proto = construct_model_proto(
                tensors if name == "raw" else {"w": tensors["fc1.weight"]}, 3, pipeline()
            )
        except ImportError:  # KC and SKC need scikit-learn
            continue
        dump_proto(proto, out / f"{name}.pbuf")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
