"""How fast the core is: against the paper's algorithms word for word, and against the machine's own limits.

    python -m benchmarks.speed --quick                  (a minute or two)
    python -m benchmarks.speed --threads 1 --clock cpu  (half an hour; for machines that others use)
    python -m benchmarks.speed --device cuda            (3 minutes; checks first that it agrees with the CPU)

Both run in one process, in turn; printed are medians, and the range of their ratio over the repeats.
"Literal" is benchmarks/literal.py; where it would take too long it runs on some of the classes or steps,
which are independent of each other, and its time is scaled up: marked ≈. "Floor" is the time that the
floating-point operations of rlu's matrix products, its exponentials and the bytes it can't avoid to move
would take one after the other at the machine's rates, measured in turn with the rest and for products of the
shape that rlu uses. "Ready" is S alone, of factors that are on the device in float32 already.

Prints Markdown tables and writes results/speed.ndjson (speed_cuda.ndjson) as it goes: a case that fails or
takes too long is reported and the others go on. With --plot FILE, draws how the times grow.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.clock import Clock, Probes, Rates, Work, median_and_range
from benchmarks.common import machine
from benchmarks.literal import LiteralConfidence, literal_final_means, literal_search
from benchmarks.speed_cases import (
    ITERATIONS,
    check_agreement,
    client_counts,
    count_calls,
    network_moments,
    search_case,
    some_moves_away,
)
from benchmarks.speed_plot import exponent, plot
from benchmarks.speed_run import Case, Column, Row, Runner
from rlu_cli.audit.memory import bytes_to_keep
from rlu_cli.core import expectation as expectation_module
from rlu_cli.core.confidence import coefficient_matrix, monte_carlo_confidence
from rlu_cli.core.expectation import SoftmaxExpectation
from rlu_cli.core.search import MeanSimulator, posterior_search
from rlu_cli.core.simplex import SimplexSolver
from rlu_cli.core.types import FloatArray, IntArray

RESULTS = Path(__file__).parent / "results"


class Bench:
    """The sections: each a list of cases."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device: str = arguments.device
        self.cuda = self.device.startswith("cuda")
        self.clock = Clock(arguments.device, arguments.clock)
        self.repeats: int = arguments.repeats
        self.quick: bool = arguments.quick
        self.literal_classes: int = arguments.literal_classes
        self.literal_limit: float = arguments.literal_limit
        self.repeat_limit: float = arguments.repeat_limit
        self.case_limit: float = arguments.case_limit

    def rates(self) -> Rates:
        """Best of several measurements: what the machine can do."""
        probes = Probes(self.device)
        return probes.rates([min(column) for column in self._times(probes.works, 9)])

    def _times(self, works: list[Work], repeats: int | None = None) -> list[list[float]]:
        return self.clock.interleaved(works, repeats or self.repeats, self.repeat_limit)

    def compare(
        self,
        ours: Work,
        literal: Work,
        scale: float,
        floor: Callable[[Rates], float],
        *,
        shape: tuple[int, int, int] | None = None,
        ready: Work | None = None,
        trial: Work | None = None,
        trials: int = 1,
        peak: Row | None = None,
    ) -> Row:
        """Medians over rounds of: our seconds, the literal ones times ``scale``, the floor, and the ratios.

        The machine's rates are measured in each round, so that its load hits the floor as well. With
        ``ready``, the same work on what is already on the device, its seconds and its ratio to a floor
        without the upload are added. Whether the literal work takes too long is told from ``trial``, of which
        it is ``trials`` times as much.
        """
        probes = Probes(self.device, shape)
        if peak is None:
            peak = self.peak_on_gpu(ours) if self.cuda else {}
        row: Row = {**peak, **self.reason_against(trial or literal, trials)}
        works = [ours, ready or (lambda: None), *probes.works]
        if "literal_skipped" not in row:
            works.append(literal)
        times = self._times(works)
        mine, prepared, measured = times[0], times[1], times[2 : 2 + len(probes.works)]
        rates = [probes.rates(round_) for round_ in zip(*measured, strict=True)]
        floors = [floor(r) for r in rates]
        row |= {
            "rlu_s": statistics.median(mine),
            "floor_s": statistics.median(floors),
            "over_floor": [a / b for a, b in zip(mine, floors, strict=True)],
        }
        if ready:
            without = [floor(Rates(r.products, r.exponentials, r.bytes)) for r in rates]
            row["ready_s"] = statistics.median(prepared)
            row["ready_over_floor"] = [a / b for a, b in zip(prepared, without, strict=True)]
        if "literal_skipped" not in row:
            row["literal_s"] = scale * statistics.median(times[-1])
            row["ratios"] = [scale * b / a for a, b in zip(mine, times[-1], strict=True)]
        return row

    def peak_on_gpu(self, work: Work) -> Row:
        """Does the work and says how many megabytes it took on the GPU at the most, beyond what was there."""
        if not self.cuda:
            work()
            return {}
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        return {"gpu_peak_mb": (torch.cuda.max_memory_allocated(self.device) - before) / 2**20}

    def reason_against(self, trial: Work, trials: int = 1) -> Row:
        """Why the literal algorithm isn't timed: it fails, for want of memory, or takes too long."""
        try:
            clock = Clock(self.device)
            seconds = trials * clock.seconds(trial)
            if seconds > self.literal_limit:  # the first call may have loaded libraries
                seconds = min(seconds, trials * clock.seconds(trial))
        except (RuntimeError, MemoryError) as error:
            return {"literal_skipped": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:100]}
        if seconds > self.literal_limit:
            return {"literal_skipped": f"once takes {seconds:.0f} s"}
        return {}

    def some_classes(self, classes: int) -> IntArray:
        """Those that the literal algorithm runs on."""
        return np.arange(min(classes, self.literal_classes or classes))

    def confidence(self) -> list[Case]:
        """Erroneous confidence: N × K × M."""
        return [
            ({"N": N, "K": K, "M": M}, partial(self._confidence, N, K, M))
            for N in ((10, 100) if self.quick else (10, 100, 200, 1000))
            for K in (20, 100)
            for M in ((1000,) if self.quick else (1000, 10_000))
        ]

    def _confidence(self, classes: int, per_class: int, samples: int) -> Row:
        moments = network_moments(classes, per_class)
        literal = LiteralConfidence(moments, samples, self.device)
        some = self.some_classes(classes)
        expectation = SoftmaxExpectation(moments, samples=samples, seed=0, device=self.device)
        pairs, rank = expectation.frames * expectation.rows, moments.factor.shape[1]
        row = self.compare(
            lambda: monte_carlo_confidence(moments, samples=samples, device=self.device),
            lambda: literal.rows(some),
            classes / len(some),
            lambda rates: rates.floor(
                products=2.0 * pairs * classes**2 * (rank + 4),
                exponentials=float(pairs * classes**2),
                bytes_=4.0 * classes**2 * (rank + 2),
                upload=4.0 * classes**2 * (rank + 2),
            ),
            shape=(min(pairs, expectation.block), rank, classes),
            ready=expectation.unmoved,
            trial=lambda: literal.rows(some[:1]),
            trials=len(some),
        )
        return {"literal_classes": len(some), **row}

    def error(self) -> list[Case]:
        """Time to a given standard error of S: seconds × variance, from the real spread over seeds."""
        models = (("soft", 3.0, 0.5), ("middle", 6.0, 2.0), ("sharp", 12.0, 2.0))
        return [({"model": name}, partial(self._error, *how)) for name, *how in models]

    def _error(self, margin: float, spread: float) -> Row:
        classes, per_class, samples = (50, 20, 1000) if self.quick else (200, 100, 10_000)
        moments = network_moments(classes, per_class, margin=margin, spread=spread)
        literal = LiteralConfidence(moments, samples, self.device)
        some = self.some_classes(classes)
        draws = torch.stack([literal.softmaxes(int(n)).var(dim=0) for n in some])
        literal_error = float((draws / samples).mean().sqrt())
        runs = [
            monte_carlo_confidence(moments, samples=samples, seed=seed, device=self.device)
            for seed in range(4 if self.quick else 8)
        ]
        rows = np.stack([run.mean[some] for run in runs])
        error = float(np.sqrt(np.mean(np.var(rows, axis=0, ddof=1))))
        reported = float(np.sqrt(np.mean([run.standard_error[some] ** 2 for run in runs])))
        mine, theirs = self._times(
            [
                lambda: monte_carlo_confidence(moments, samples=samples, device=self.device),
                lambda: literal.rows(some),
            ]
        )
        ratios = [classes / len(some) * b / a for a, b in zip(mine, theirs, strict=True)]
        return {
            "N": classes,
            "K": per_class,
            "M": samples,
            "own_confidence": float(np.diag(runs[0].mean).mean()),
            "literal_classes": len(some),
            "error": error,
            "reported_error": reported,
            "literal_error": literal_error,
            "variance_gain": (literal_error / error) ** 2,
            "ratios": ratios,
            "time_to_error_ratio": statistics.median(ratios) * (literal_error / error) ** 2,
        }

    def search(self) -> list[Case]:
        """Posterior search of one client: N × m."""
        M = 1000 if self.quick else 10_000
        sizes = [(N, M, m) for N in ((10,) if self.quick else (10, 100, 200)) for m in (1, 10, 785)]
        sizes = [size for size in sizes if not self.quick or size[2] < 100]
        sizes += [] if self.quick else [(1000, 1000, m) for m in (1, 10, 785)]
        return [({"N": N, "K": 100, "M": M, "m": m}, partial(self._search, N, m, M)) for N, M, m in sizes]

    def _search(self, classes: int, steps: int, samples: int) -> Row:
        moments, gram, training = search_case(classes, steps)
        truth, first = client_counts(classes, training, 1)
        literal = LiteralConfidence(moments, samples, self.device)
        keep = bytes_to_keep(self.device)
        final = MeanSimulator(moments, gram, training, samples=samples, seed=1, device=self.device, keep=keep)
        final_mean = final.final_means(truth)
        some = self.some_classes(classes)
        passes: list[list[int]] = []

        def ours() -> None:
            """Draws included, as a client that comes alone pays for them."""
            simulator = MeanSimulator(moments, gram, training, samples=samples, device=self.device, keep=keep)
            counted = count_calls(simulator, simulator.softmax)
            posterior_search(simulator, final_mean, first, ITERATIONS)
            passes.append(counted)

        on_gpu = self.peak_on_gpu(ours)
        iterates, evaluations, columns = passes[-1]
        softmax, rank = final.softmax, moments.factor.shape[1]
        pairs = softmax.frames * softmax.rows
        kept = all(bundle.keeps for bundle in softmax.bundles)
        made = columns / evaluations if kept else float(columns)  # classes with exponentials to be made
        row = self.compare(
            ours,
            lambda: literal.rows(some),
            classes / len(some) * steps * iterates,
            lambda rates: rates.floor(
                products=2.0 * pairs * classes * (rank * made + 4.0 * columns),
                exponentials=made * pairs * classes,
                bytes_=4.0 * pairs * classes * columns if kept else 0.0,
                upload=4.0 * classes**2 * (rank + 2 * evaluations),
            ),
            shape=(min(pairs, softmax.block), rank, classes),
            trial=lambda: literal.rows(some[:1]),
            trials=len(some),
            peak=on_gpu,
        )
        return {
            "iterates": iterates,
            "evaluations": evaluations,
            "literal_classes": len(some),
            "kept": kept,
            **row,
        }

    def growth(self) -> list[Case]:
        """How the time grows with one quantity, the others held."""

        def confidence(classes: int, per_class: int, samples: int) -> Work:
            moments = network_moments(classes, per_class)
            return lambda: monte_carlo_confidence(moments, samples=samples, device=self.device)

        def search(classes: int, steps: int, clients: int) -> Work:
            moments, gram, training = search_case(classes, steps)
            truth, first = client_counts(classes, training, clients)
            simulator = MeanSimulator(moments, gram, training, samples=1000, device=self.device)
            final = simulator.final_means(truth)
            return lambda: posterior_search(simulator, final, first, ITERATIONS)

        def sweep(sizes: tuple[int, ...], make: Callable[[int], Work]) -> Row:
            seconds = [statistics.median(s) for s in self._times([make(size) for size in sizes])]
            return {"sizes": sizes, "seconds": seconds, "exponent": exponent(sizes, seconds)}

        few = slice(0, 3) if self.quick else slice(None)
        sweeps: dict[str, tuple[tuple[int, ...], Callable[[int], Work]]] = {
            "N": ((25, 50, 100, 200, 400, 800), lambda n: confidence(n, 20, 1000)),
            "M": ((500, 1000, 2000, 5000, 10_000, 20_000, 50_000), lambda n: confidence(50, 50, n)),
            "m": ((2, 5, 10, 25, 50, 100, 250, 785), lambda n: search(20, n, 1)),
            "clients": ((1, 2, 4, 8, 16, 32, 64), lambda n: search(20, 10, n)),
        }
        return [
            ({"against": name}, partial(sweep, sizes[few], make)) for name, (sizes, make) in sweeps.items()
        ]

    def counts(self) -> list[Case]:
        """Whether the literal search, run in full, ends at the same counts, and at the true ones."""
        cases = [(10, 10, 1000, 4)] if self.quick else [(10, 10, 10_000, 8), (100, 10, 1000, 3)]
        return [
            ({"N": N, "m": m, "M": M, "clients": clients}, partial(self._counts, N, m, M, clients))
            for N, m, M, clients in cases
        ]

    def _counts(self, classes: int, steps: int, samples: int, clients: int) -> Row:
        moments, gram, training = search_case(classes, steps)
        truth, _ = client_counts(classes, training, clients)
        first = some_moves_away(truth, steps)
        literal = LiteralConfidence(moments, samples, self.device)
        one = np.arange(1)
        literal.rows(one)
        expected = (
            Clock(self.device).seconds(lambda: literal.rows(one)) * classes * steps * clients * ITERATIONS
        )
        if expected > self.case_limit:
            return {"skipped": f"the literal search would take some {expected:.0f} s"}
        simulator = MeanSimulator(moments, gram, training, samples=samples, device=self.device)
        final = np.stack([literal_final_means(literal, gram, training, c, steps) for c in truth])
        start = time.perf_counter()
        theirs = [
            literal_search(literal, gram, training, f, c, ITERATIONS)
            for f, c in zip(final, first, strict=True)
        ]
        literal_s = time.perf_counter() - start
        found = [r.counts for r in posterior_search(simulator, final, first, ITERATIONS)]
        return {
            "same": sum(map(np.array_equal, found, theirs)),
            "true": sum(map(np.array_equal, found, truth)),
            "literal_true": sum(map(np.array_equal, theirs, truth)),
            "literal_s": literal_s / clients,
        }

    def least_squares(self) -> list[Case]:
        """Least squares on the simplex (always on the CPU): the first client, one more, and SciPy's NNLS."""
        if self.cuda:
            return []
        return [
            ({"N": N}, partial(self._least_squares, N))
            for N in ((10, 100) if self.quick else (10, 100, 200, 1000))
        ]

    def _least_squares(self, classes: int) -> Row:
        from scipy.optimize import nnls

        S = monte_carlo_confidence(network_moments(classes, 20), samples=1000).mean
        A = coefficient_matrix(S)
        rng = np.random.default_rng(0)
        mixes = rng.dirichlet(np.full(classes, 0.5), size=4)
        updates = [A @ z + 0.02 * rng.normal(size=classes) / np.sqrt(classes) for z in mixes]
        shared = SimplexSolver(A)
        if not all(shared.solve(u).certified for u in updates):
            raise RuntimeError("expected solutions with a certificate")

        def by_scipy(u: FloatArray = updates[0]) -> None:
            stacked = np.vstack((A - u[:, None], np.ones((1, len(u)))))
            nnls(stacked, np.append(np.zeros(len(u)), 1.0))

        clients = len(mixes)
        row = self.compare(
            lambda: [shared.solve(u) for u in updates],
            by_scipy,
            clients,
            lambda rates: rates.floor(bytes_=float(clients * A.nbytes)),
        )
        (first,) = self._times([lambda: SimplexSolver(A).solve(updates[0])])
        for key in ("rlu_s", "literal_s", "floor_s"):
            if key in row:
                row[key] /= clients
        return {"first_s": statistics.median(first), **row}

    def memory(self) -> list[Case]:
        """Peak memory beyond that of the imports and inputs, each case in a process of its own (CPU)."""
        if self.cuda:
            return []
        if self.quick:
            tasks = [("confidence", 100, 20, 1000)]
        else:
            tasks = [
                ("confidence", 200, 100, 10_000),
                ("confidence", 1000, 100, 1000),
                ("search", 100, 100, 10_000),
                ("search", 200, 100, 10_000),
                ("search", 1000, 100, 1000),
            ]
        return [
            ({"task": task, "N": N, "K": K, "M": M}, partial(self._memory, task, N, K, M))
            for task, N, K, M in tasks
        ]

    def _memory(self, task: str, classes: int, per_class: int, samples: int) -> Row:
        command = [sys.executable, "-m", "benchmarks.speed", "--peak"]
        words = [task, str(classes), str(per_class), str(samples)]
        limit = None if math.isinf(self.case_limit) else self.case_limit
        done = subprocess.run(
            [*command, *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=limit,
            cwd=RESULTS.parent.parent,
        )
        return {**json.loads(done.stdout), "all_logits_mb": 4.0 * classes**2 * samples / 2**20}

    def block(self) -> list[Case]:
        """CUDA: bytes of logits in a block, against the time of S on factors that are on the device."""
        if not self.cuda:
            return []
        return [
            ({"N": N, "K": 100, "M": 10_000, "block": block}, partial(self._block, N, block))
            for N in (200, 1000)
            for block in (2**23, 2**25, 2**26, 2**27, 2**28)
        ]

    def _block(self, classes: int, block: int) -> Row:
        usual = expectation_module._GPU_BLOCK
        expectation_module._GPU_BLOCK = block
        try:
            expectation = SoftmaxExpectation(
                network_moments(classes, 100), samples=10_000, seed=0, device=self.device
            )
        finally:
            expectation_module._GPU_BLOCK = usual
        (seconds,) = self._times([expectation.unmoved])
        return {"rlu_s": statistics.median(seconds), "usual": block == usual}


def peak(task: str, classes: int, per_class: int, samples: int) -> Row:
    """Megabytes beyond what there was before (Linux)."""
    case = network_moments(classes, per_class), *search_case(classes, 10)[1:]
    truth, first = client_counts(classes, case[2], 1)
    monte_carlo_confidence(network_moments(10, 10), samples=100)  # libraries settle in
    before = resident("VmRSS")
    if task == "confidence":
        monte_carlo_confidence(case[0], samples=samples)
    else:
        simulator = MeanSimulator(*case, samples=samples, keep=bytes_to_keep())
        posterior_search(simulator, simulator.final_means(truth), first, 1)
    return {"peak_mb": resident("VmHWM") - before}


def resident(what: str) -> float:
    """Megabytes that Linux counts for this process."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) / 1024


def ms(key: str) -> Callable[[Row], str]:
    return lambda row: f"{1e3 * row[key]:.3g}"


def literal_ms(row: Row) -> str:
    whole = row["section"] == "least_squares" or row.get("literal_classes") == row["N"]
    if "literal_skipped" in row:
        return f"skipped: {row['literal_skipped']}"
    return f"{1e3 * row['literal_s']:.3g}" if whole else f"≈ {1e3 * row['literal_s']:.3g}"


def over_floor(row: Row) -> str:
    return median_and_range(row["over_floor"], 2)


def literal_ratio(row: Row) -> str:
    return "" if "literal_skipped" in row else median_and_range(row["ratios"])


SIZES: list[Column] = [(name, lambda row, name=name: f"{row[name]:,}") for name in ("N", "K", "M")]
TIMES: list[Column] = [
    ("rlu, ms", ms("rlu_s")),
    ("literal, ms", literal_ms),
    ("literal / rlu", literal_ratio),
    ("floor, ms", ms("floor_s")),
    ("rlu / floor", over_floor),
]
GPU: Column = ("on the GPU, MB", lambda row: f"{row['gpu_peak_mb']:.0f}" if row.get("gpu_peak_mb") else "")
TABLES: dict[str, list[Column]] = {
    "confidence": [
        *SIZES,
        *TIMES,
        ("ready factors, ms", ms("ready_s")),
        ("ready / floor", lambda row: median_and_range(row["ready_over_floor"], 2)),
        GPU,
    ],
    "search": [
        ("N", lambda row: str(row["N"])),
        ("M", lambda row: f"{row['M']:,}"),
        ("m", lambda row: str(row["m"])),
        ("simulations", lambda row: str(row["iterates"])),
        ("evaluations of S", lambda row: str(row["evaluations"])),
        *TIMES,
        GPU,
    ],
    "block": [
        *SIZES,
        ("block, MB", lambda row: f"{row['block'] / 2**20:.0f}"),
        ("rlu, ms", lambda row: f"{1e3 * row['rlu_s']:.3g}" + (" (usual)" if row["usual"] else "")),
    ],
    "error": [
        ("model", lambda row: row["model"]),
        ("mean S[n, n]", lambda row: f"{row['own_confidence']:.0%}"),
        ("error of S, literal", lambda row: f"{row['literal_error']:.2e}"),
        ("error of S, rlu", lambda row: f"{row['error']:.2e}"),
        ("as reported", lambda row: f"{row['reported_error']:.2e}"),
        ("variance, literal / rlu", lambda row: f"{row['variance_gain']:.3g}"),
        ("time, literal / rlu", lambda row: median_and_range(row["ratios"])),
        ("time to the same error, literal / rlu", lambda row: f"{row['time_to_error_ratio']:,.0f}"),
    ],
    "growth": [
        ("against", lambda row: row["against"]),
        ("sizes", lambda row: ", ".join(map(str, row["sizes"]))),
        ("rlu, ms", lambda row: ", ".join(f"{1e3 * s:.3g}" for s in row["seconds"])),
        ("exponent, larger half", lambda row: f"{row['exponent']:.2f}"),
    ],
    "counts": [
        ("N", lambda row: str(row["N"])),
        ("M", lambda row: f"{row['M']:,}"),
        ("m", lambda row: str(row["m"])),
        ("clients", lambda row: str(row["clients"])),
        ("same counts", lambda row: str(row["same"])),
        ("true counts, rlu", lambda row: str(row["true"])),
        ("true counts, literal", lambda row: str(row["literal_true"])),
        ("literal, s a client", lambda row: f"{row['literal_s']:.1f}"),
    ],
    "least_squares": [
        ("N", lambda row: str(row["N"])),
        ("first client, ms", ms("first_s")),
        ("one more, ms", ms("rlu_s")),
        ("SciPy nnls, ms", literal_ms),
        ("nnls / one more", literal_ratio),
        ("floor (A read once), ms", ms("floor_s")),
    ],
    "memory": [
        ("what", lambda row: row["task"]),
        *SIZES,
        ("peak, MB", lambda row: f"{row['peak_mb']:.0f}"),
        ("all N×M×N logits, MB", lambda row: f"{row['all_logits_mb']:,.0f}"),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="default: as many as torch takes")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--literal-classes", type=int, default=4, help="0: all of them")
    parser.add_argument(
        "--literal-limit", type=float, help="seconds for the literal classes; beyond, skipped"
    )
    parser.add_argument("--repeat-limit", type=float, help="seconds after which a case isn't repeated again")
    parser.add_argument("--case-limit", type=float, help="seconds after which a case is broken off")
    parser.add_argument("--budget", type=float, help="seconds in all (on CUDA 160, else no limit)")
    parser.add_argument("--only", choices=tuple(TABLES), action="append")
    parser.add_argument("--tf32", action="store_true", help="let CUDA round products to 10 bits")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path, help="draw how times grow, from the results, as SVG or PNG")
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.peak:
        task, *sizes = arguments.peak
        print(json.dumps(peak(task, *map(int, sizes))))
        return
    on_gpu = arguments.device.startswith("cuda")
    if on_gpu and arguments.clock == "cpu":
        parser.error("processor time says nothing about a GPU: use --clock wall")
    limits = (4.0, 5.0, 40.0, 160.0) if on_gpu else (30.0, 60.0, 1800.0, math.inf)
    for name, limit in zip(("literal_limit", "repeat_limit", "case_limit", "budget"), limits, strict=True):
        if getattr(arguments, name) is None:
            setattr(arguments, name, limit)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = arguments.tf32
    output = arguments.output or RESULTS / ("speed_cuda.ndjson" if on_gpu else "speed.ndjson")
    runner = Runner(output, budget=arguments.budget, case_limit=arguments.case_limit)
    sections = arguments.only or list(TABLES)
    if arguments.only:
        runner.keep_other_sections(sections)
    bench = Bench(arguments)
    agrees = arguments.device == "cpu" or agreement(runner, arguments.device)
    runner.add({"section": "machine", **runner.attempt(partial(about, bench))})
    for section in TABLES:
        cases = getattr(bench, section)() if section in sections else []
        if cases:
            print(f"### {getattr(bench, section).__doc__}\n", flush=True)
            runner.section(section, cases, [c for c in TABLES[section] if bench.cuda or c is not GPU])
    if arguments.plot:
        plot(runner.rows, arguments.plot)
    if not agrees and not arguments.tf32:
        sys.exit("expected S on the device to agree with the CPU's to 1e-5")


def agreement(runner: Runner, device: str) -> bool:
    """Whether S agrees with the CPU's to 1e-5: said first, and whatever comes of it, the times are taken."""
    row = runner.attempt(lambda: {"difference": check_agreement(device)})
    runner.add({"section": "agreement", **row})
    if "difference" not in row:
        print(f"**no agreement with the CPU: {row}**\n", flush=True)
        return False
    agrees: bool = row["difference"] <= 1e-5
    verdict = "agrees" if agrees else "**DOES NOT AGREE**"
    print(
        f"{verdict} with the CPU: largest difference of S {row['difference']:.1e} (at most 1e-5)\n",
        flush=True,
    )
    return agrees


def about(bench: Bench) -> Row:
    """Says what machine it is and what it can do at best."""
    rates = bench.rates()
    upload = f", {rates.upload / 1e9:.3g} GB/s to the device" if bench.cuda else ""
    print(
        f"{machine()}, {torch.get_num_threads()} threads, {bench.clock.kind} time; at best "
        f"{rates.products / 1e9:.3g} Gflop/s, {rates.exponentials / 1e9:.3g} G exponentials/s, "
        f"{rates.bytes / 1e9:.3g} GB/s{upload}\n",
        flush=True,
    )
    return {
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "clock": bench.clock.kind,
        "products_per_s": rates.products,
        "exponentials_per_s": rates.exponentials,
        "bytes_per_s": rates.bytes,
        "upload_bytes_per_s": rates.upload,
    }


if __name__ == "__main__":
    main()
