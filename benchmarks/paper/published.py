"""The numbers that the paper prints, to stand beside ours: iAcc, in the order of `METHODS`."""

from __future__ import annotations

METHODS = ("llg+", "zlg+", "ilrg", "rlu")

TABLE_2: dict[tuple[str, str, int], tuple[float, float, float, float]] = {
    ("SVHN", "relu", 1): (0.984, 0.906, 1.000, 1.000),
    ("SVHN", "tanh", 1): (0.063, 0.831, 1.000, 1.000),
    ("CIFAR-10", "relu", 1): (0.981, 0.982, 0.979, 1.000),
    ("CIFAR-10", "elu", 1): (0.925, 0.932, 0.936, 0.996),
    ("CIFAR-100", "relu", 1): (0.932, 0.943, 0.992, 1.000),
    ("CIFAR-100", "selu", 1): (0.104, 0.855, 0.982, 1.000),
    ("Tiny-ImageNet", "relu", 1): (0.938, 0.666, 0.995, 1.000),
    ("Tiny-ImageNet", "silu", 1): (0.794, 0.534, 1.000, 1.000),
    ("SVHN", "relu", 10): (0.934, 0.644, 0.997, 1.000),
    ("SVHN", "tanh", 10): (0.164, 0.699, 0.996, 1.000),
    ("CIFAR-10", "relu", 10): (0.875, 0.866, 0.717, 0.946),
    ("CIFAR-10", "elu", 10): (0.812, 0.798, 0.650, 0.923),
    ("CIFAR-100", "relu", 10): (0.948, 0.929, 0.902, 0.981),
    ("CIFAR-100", "selu", 10): (0.014, 0.840, 0.689, 0.904),
    ("Tiny-ImageNet", "relu", 10): (0.921, 0.723, 0.937, 0.976),
    ("Tiny-ImageNet", "silu", 10): (0.840, 0.759, 0.984, 0.996),
}
"""By data set, activation and local steps."""

TABLE_3: dict[float, tuple[float, float, float, float]] = {
    0.05: (0.766, 0.747, 0.449, 0.961),
    0.1: (0.831, 0.812, 0.630, 0.947),
    0.5: (0.882, 0.867, 0.715, 0.944),
    1.0: (0.905, 0.897, 0.766, 0.943),
    5.0: (0.941, 0.944, 0.820, 0.931),
}
"""By α: VGG-16 on CIFAR-10, ten steps."""

TABLE_4: dict[tuple[str, float, str], tuple[float, float, float, float]] = {
    ("fedprox", 0.5, "SVHN"): (0.917, 0.656, 0.982, 0.991),
    ("fedprox", 0.5, "CIFAR-10"): (0.747, 0.795, 0.691, 0.938),
    ("fedprox", 0.5, "CIFAR-100"): (0.805, 0.791, 0.594, 0.930),
    ("fedprox", 5.0, "SVHN"): (0.079, 0.566, 0.881, 0.973),
    ("fedprox", 5.0, "CIFAR-10"): (0.665, 0.682, 0.616, 0.899),
    ("fedprox", 5.0, "CIFAR-100"): (0.659, 0.626, 0.493, 0.929),
    ("sgdm", 0.1, "SVHN"): (0.951, 0.520, 0.819, 0.987),
    ("sgdm", 0.1, "CIFAR-10"): (0.884, 0.872, 0.919, 0.935),
    ("sgdm", 0.1, "CIFAR-100"): (0.855, 0.826, 0.856, 0.915),
    ("sgdm", 0.9, "SVHN"): (0.737, 0.870, 0.114, 0.916),
    ("sgdm", 0.9, "CIFAR-10"): (0.883, 0.871, 0.450, 0.928),
    ("sgdm", 0.9, "CIFAR-100"): (0.864, 0.859, 0.755, 0.882),
}
"""By scheme, λ or γ, and data set."""
