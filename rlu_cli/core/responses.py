"""What one sample does to the output layer, by class: its mean and spread in a few directions."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from rlu_cli.core.types import FloatArray, Responses

DIRECTIONS = 8
"""Random directions of the embedding that are looked at: enough to tell classes apart, few enough to keep."""

_SEED = 20240721


@cache
def directions(size: int) -> FloatArray:
    """V, shape (L, d): fixed random directions of an embedding of L values, the same for every model."""
    if size <= DIRECTIONS:
        return np.eye(size)
    return np.asarray(np.random.default_rng(_SEED).normal(size=(size, DIRECTIONS)) / np.sqrt(size))


def empty_responses(num_classes: int, size: int) -> Responses:
    """Room for the responses of N classes to embeddings of L values."""
    width = 1 + directions(size).shape[1]
    return Responses(np.empty((width, num_classes, num_classes)), np.empty((num_classes, width, width)))


def class_response(residuals: FloatArray, embeddings: NDArray[np.floating]) -> tuple[FloatArray, FloatArray]:
    """Mean and spread of r ⊗ g over the K samples of one class.

        r = onehot − s,     g = (1, e·v_1, …, e·v_d)
        mean[b, j] = E[r_j g_b],     spread[b, c] = Σ_j Cov[r_j g_b, r_j g_c]

    The gradient of the head is −r for the bias and −r eᵀ for the weight, so a step moves the bias, and the
    weight along each v_b, by η times the mean of r g_b over its batch. One sample has no spread.

    Parameters
    ----------
    residuals : r, shape (K, N)
    embeddings : e, shape (K, L)
    """
    count = len(residuals)
    g = np.concatenate((np.ones((count, 1)), embeddings @ directions(embeddings.shape[1])), axis=1)
    mean = g.T @ residuals / count  # (d + 1, N)
    if count < 2:
        return mean, np.zeros((g.shape[1], g.shape[1]))
    # Without an array of shape (K, d + 1, N): r·r weighs the products of g.
    power = np.square(residuals).sum(axis=1)
    second = (g * power[:, None]).T @ g / count
    return mean, np.asarray((second - mean @ mean.T) * count / (count - 1))
