"""``rlu simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlu_cli.audit.options import SimulationOptions, StepOptions
from rlu_cli.cli.options import LARGEST_SEED, show_version, with_options


@with_options(training=StepOptions, options=SimulationOptions)
def simulate(
    *,
    data: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="digits, fashion-mnist, a folder of class folders, or official files of MNIST, CIFAR, SVHN "
            "or Tiny-ImageNet.",
        ),
    ],
    arch: Annotated[str, typer.Option(metavar="SPEC", help="Architecture, as for recover.")] = "lenet5",
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Where the archive goes.")],
    normalize: Annotated[
        str, typer.Option(metavar="SPEC", help="How images are normalised, as for recover.")
    ] = "half",
    init: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Checkpoint of the first global model.")
    ] = None,
    options: SimulationOptions,
    training: StepOptions,
    seed: Annotated[
        int,
        typer.Option(min=0, max=LARGEST_SEED, metavar="N", help="Same seed and same inputs, same archive."),
    ] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress on stderr.")] = False,
    verbose: Annotated[int, typer.Option("-v", "--verbose", count=True, help="Say more on stderr.")] = 0,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=show_version),
    ] = False,
) -> None:
    """Train a federation for real, and archive every round with the truth.

    rlu simulate --data digits -o ./archive --lr 0.05 --batch-size 32 --steps 10

    Writes round_0001/{global,client_0000,…}.safetensors, annotated so that `rlu recover` needs no
    training flags, truth.ndjson, aux/ and (with rlu[plot]) partition.png, and prints a JSON summary. Run
    again, it goes on where it stopped.
    """
    from rlu_cli.audit.report import dumps, envelope
    from rlu_cli.cli.console import Terminal, round_progress
    from rlu_cli.cli.output import open_output
    from rlu_cli.files.checkpoint import read_checkpoint
    from rlu_cli.files.shards import sha256_checkpoint
    from rlu_cli.images.datasets import open_dataset
    from rlu_cli.simulation.plot import plot_partition
    from rlu_cli.simulation.run import Simulator
    from rlu_cli.simulation.settings import Simulation

    terminal = Terminal(quiet=quiet, verbose=verbose)
    with terminal.reporter("reading images") as update:
        images = open_dataset(data, progress=update)
    simulator = Simulator(
        Simulation(
            data, arch, normalize, seed, training, options, None if init is None else sha256_checkpoint(init)
        ),
        images,
        output,
        start=None if init is None else read_checkpoint(init),
        allow_user_code=True,
        device=device,
    )
    rounds = []
    with round_progress(terminal, options.rounds) as advance:
        for report in simulator.run():
            advance(report.number, report.accuracy)
            rounds.append(
                {"round": report.number, "accuracy": report.accuracy, "clients": list(report.clients)}
            )
    drawn = plot_partition(simulator.data.partition_table(), images.names, output / "partition.png")
    if not drawn and terminal.shows_tables:
        terminal.say("no partition.png: matplotlib is not installed (pip install 'rlu-cli[plot]')")
    with open_output("-") as write:
        write(
            dumps(
                {
                    **envelope("simulate"),
                    "archive": str(output),
                    "seed": seed,
                    "device": str(simulator.device),
                    "final_accuracy": simulator.accuracy(),
                    "rounds": rounds,
                },
                indent=2,
            )
        )
