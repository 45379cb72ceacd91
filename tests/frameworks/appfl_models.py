"""What APPFL's own functions save; run as a script with a state dict and the folder to write into."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from appfl.misc.utils import save_model_iteration, save_partial_model_iteration
from omegaconf import OmegaConf

from rlu_cli.models import build_model, parse_spec


def main(source: Path, out: Path) -> None:
    warnings.simplefilter("ignore")
    model = build_model(
        parse_spec("lenet5:image_size=28,in_channels=1,num_classes=10"), allow_user_code=False
    )
    model.load_state_dict(torch.load(source, weights_only=True))
    cfg = {"save_model_dirname": str(out), "save_model_filename": "model", "personalization": False}
    for client in (None, 1):
        save_partial_model_iteration(3, model, OmegaConf.create(cfg), client)
    save_model_iteration(3, model, OmegaConf.create({**cfg, "save_model_filename": "whole"}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
