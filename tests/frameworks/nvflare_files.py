"""What NVFlare's own classes write; run as a script with a torch state dict and the folder to write into."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.decomposers import common_decomposers
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.app_opt.pt.fedavg import PTFedAvg
from nvflare.app_opt.pt.file_model_persistor import PTFileModelPersistor
from nvflare.app_opt.pt.model_persistence_format_manager import PTModelPersistenceFormatManager
from nvflare.fuel.utils import fobs


def main(source: Path, out: Path) -> None:
    state = torch.load(source, weights_only=True)
    common_decomposers.register()
    fobs.register(TensorDecomposer)

    persistor = PTFileModelPersistor()
    persistor.persistence_manager = PTModelPersistenceFormatManager(
        {"model": dict(state), "meta_props": {"validation_metric": np.float64(0.5)}},
        {"train": {"model": "Net"}},
    )
    learnable = persistor.persistence_manager.to_model_learnable(None)
    persistor.persistence_manager.update(learnable)
    persistor.save_model_file(str(out / "FL_global_model.pt"))

    controller = PTFedAvg(num_clients=1, num_rounds=1)
    controller.fl_ctx = FLContext()
    delta = {name: torch.full_like(tensor, 0.5) for name, tensor in state.items()}
    controller.save_model_file(FLModel(params_type=ParamsType.DIFF, params=delta), str(out / "diff.pt"))

    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    fobs.dumpf(make_model_learnable(arrays, {}), str(out / "SRV_FL_global_model.pt"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
