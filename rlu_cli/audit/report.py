"""The JSON that users rely on (schema version 1). Fields may be added, never renamed or removed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rlu_cli import __version__
from rlu_cli.audit.auditor import Auditor
from rlu_cli.audit.client_round import ClientRound
from rlu_cli.core.metrics import score_counts, uniform_counts
from rlu_cli.core.reliability import Reliability, reliability
from rlu_cli.core.sensitivity import Moved
from rlu_cli.core.types import FloatArray, IntArray, Note, Recovery

SCHEMA_VERSION = 1

_SURROGATE = re.compile("[\ud800-\udfff]")


def envelope(command: str) -> dict[str, Any]:
    """The fields that every object begins with."""
    return {"schema_version": SCHEMA_VERSION, "command": command, "rlu_version": __version__}


def dumps(document: dict[str, Any], *, indent: int | None = None) -> str:
    """JSON text without NaN, infinity or NumPy numbers, with a newline at its end.

    File names that are no UTF-8 have lone surrogates in Python, which only JSON's escapes can carry.
    """
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=indent)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


def recovery_document(
    auditor: Auditor, client: ClientRound, recovery: Recovery, moved: Sequence[Moved] | None = None
) -> dict[str, Any]:
    """What `recover` prints of one client; ``moved`` is its sensitivity, where that was asked for."""
    about = auditor.described_inputs()
    return {
        **envelope("recover"),
        "method": recovery.method,
        "seed": auditor.run.seed,
        "device": auditor.run.device,
        "inputs": {
            "global": {"path": str(auditor.reference.path), "sha256": auditor.sha256},
            "local": {"path": str(client.path), "sha256": client.sha256, "update": client.update},
            "aux": about["aux"],
        },
        "model": {**model_document(about), "sources": auditor.model_sources},
        "training": {**client.training.values, "sources": client.training.sources},
        "total": recovery.total,
        "counts": recovery.counts.tolist(),
        "classes": _classes(auditor.names, recovery),
        "reliability": client_reliability(auditor, client, recovery).document(),
        **({} if moved is None else {"sensitivity": [entry.document() for entry in moved]}),
        "diagnostics": recovery.diagnostics,
        "warnings": client_warnings(auditor, client, recovery),
    }


def statistics_document(auditor: Auditor, output: str | None) -> dict[str, Any]:
    """What `estimate-logits` prints."""
    statistics = auditor.statistics
    about = auditor.described_inputs()
    return {
        **envelope("estimate-logits"),
        "seed": auditor.run.seed,
        "device": auditor.run.device,
        "inputs": {
            "global": {"path": str(auditor.reference.path), "sha256": auditor.sha256},
            "aux": about["aux"],
        },
        "model": {**model_document(about), "sources": auditor.model_sources},
        "samples": auditor.run.samples,
        "output": output,
        "aux_accuracy": statistics.overall_accuracy,
        "max_standard_error": float(statistics.standard_error.max()),
        "classes": [
            {
                "index": n,
                "name": name,
                "images": int(statistics.moments.counts[n]),
                "accuracy": float(statistics.accuracy[n]),
                "own_confidence": float(statistics.confidence[n, n]),
            }
            for n, name in enumerate(auditor.names)
        ],
        "warnings": warning_list(auditor.notes),
    }


def evaluation_document(
    truth: IntArray, recovered: Sequence[tuple[str, IntArray, Sequence[dict[str, str]]]], names: Sequence[str]
) -> dict[str, Any]:
    """What `evaluate` prints: the scores of (method, counts, warnings) against the truth."""
    total = int(truth.sum())
    return {
        **envelope("evaluate"),
        "truth": {"counts": truth.tolist(), "total": total},
        "results": [
            {
                "method": method,
                "counts": counts.tolist(),
                **score_counts(counts, truth).document(),
                "per_class": [
                    {
                        "index": n,
                        "name": name,
                        "count": int(counts[n]),
                        "truth": int(truth[n]),
                        "error": int(counts[n] - truth[n]),
                    }
                    for n, name in enumerate(names)
                ],
                "warnings": list(warnings),
            }
            for method, counts, warnings in recovered
        ],
        "baselines": {"uniform": score_counts(uniform_counts(len(truth), total), truth).document()},
    }


def model_document(about: dict[str, Any]) -> dict[str, Any]:
    """What the JSON says of the network and of how it was fed."""
    keys = ("arch", "num_classes", "embedding_size", "head")
    more = ("image_size", "channels", "normalize", "batch_norm", "dropout", "class_order")
    return {key: about[key] for key in (*keys, *more)}


def client_warnings(auditor: Auditor, client: ClientRound, recovery: Recovery) -> list[dict[str, str]]:
    """All that is to be said of one recovery: of the global model, the client and the method."""
    return warning_list(_client_notes(auditor, client, recovery))


def client_reliability(auditor: Auditor, client: ClientRound, recovery: Recovery) -> Reliability:
    """The grade of one recovery, by its bounds and by all that is to be said of it."""
    return reliability(recovery, {note.code for note in _client_notes(auditor, client, recovery)})


def _client_notes(auditor: Auditor, client: ClientRound, recovery: Recovery) -> tuple[Note, ...]:
    return (*auditor.notes, *client.notes, *recovery.warnings)


def warning_list(notes: Sequence[Note]) -> list[dict[str, str]]:
    """Warnings as JSON objects."""
    return [{"code": note.code, "message": note.message} for note in notes]


def _classes(names: Sequence[str], recovery: Recovery) -> list[dict[str, Any]]:
    def at(values: FloatArray | IntArray | None, n: int) -> float | None:
        return None if values is None else values[n].item()

    return [
        {
            "index": n,
            "name": name,
            "count": int(recovery.counts[n]),
            "estimate": float(recovery.estimate[n]),
            "low": at(recovery.low, n),
            "high": at(recovery.high, n),
            "presence": at(recovery.presence, n),
        }
        for n, name in enumerate(names)
    ]
