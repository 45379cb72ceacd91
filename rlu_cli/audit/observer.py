"""From one client's update to what the methods asked for may look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from weakref import WeakKeyDictionary

from rlu_cli.audit.clipping import Clipped, clip_factor, told_clipping
from rlu_cli.audit.compression import compression
from rlu_cli.audit.doubted_size import of_any_size
from rlu_cli.audit.measurements import Measurements
from rlu_cli.audit.memory import bytes_to_keep
from rlu_cli.audit.network import check_finite
from rlu_cli.audit.options import RunOptions
from rlu_cli.audit.reading import Reading
from rlu_cli.audit.replay import ReplayedUpdates
from rlu_cli.audit.replayed_clients import ReplayedClients
from rlu_cli.audit.seen_noise import with_seen_noise
from rlu_cli.audit.source import Measurement, Source
from rlu_cli.core.checks import check_range
from rlu_cli.core.coarse import coarsening
from rlu_cli.core.dense_layers import DenseTail
from rlu_cli.core.losses import losses
from rlu_cli.core.methods import AUTO, METHODS, Method, best_method, get_method
from rlu_cli.core.methods.base import check_optimizer
from rlu_cli.core.methods.disaggregation import out_of_scope
from rlu_cli.core.methods.regression import out_of_scope as no_regression
from rlu_cli.core.noise import alike, is_rounding
from rlu_cli.core.types import Activations, Clipping, Observation, Treatment
from rlu_cli.core.unit_direction import stands_for_bias
from rlu_cli.core.update_size import size_is_doubted
from rlu_cli.core.variates import STATEFUL
from rlu_cli.files.checkpoint import Checkpoint

_REPLAY_COST = 5e10
"""Floating-point operations that --method auto is ready to spend on a replay for `gls`, which makes four a
client: seconds of a small processor's time."""

_SHARED_REPLAY_COST = 4e11
"""The same for `replay`, which makes twenty of that size for all clients of a global model: two minutes."""

_OWN_REPLAY_COST = 5e10
"""The same where it makes twenty for each client alone: half a minute."""

_FEW_LEVELS = 16
"""Values of a quantised update up to which what rounding adds isn't like noise."""


class Observer:
    """Chooses methods for the clients of a global model, and gathers what they need.

    Parameters
    ----------
    reference : the global model
    named : a checkpoint with its tensors by name
    head_name : of the output layer's prefix, once it is known
    """

    def __init__(
        self,
        source: Source,
        measured: Measurements,
        run: RunOptions,
        *,
        reference: Checkpoint,
        named: Callable[[Checkpoint], Checkpoint],
        head_name: Callable[[], str],
    ) -> None:
        self._source, self._measured, self._run = source, measured, run
        self._reference, self._named, self._head_name = reference, named, head_name
        self._tails: WeakKeyDictionary[Reading, DenseTail | None] = WeakKeyDictionary()
        self._frozen: WeakKeyDictionary[Reading, tuple[str, ...]] = WeakKeyDictionary()
        self._treatments: WeakKeyDictionary[Reading, Treatment] = WeakKeyDictionary()
        self._makers: dict[tuple[int | None, Treatment, tuple[str, ...]], ReplayedClients] = {}

    def readings(self, sent: Reading, names: Sequence[str]) -> list[tuple[Method, Reading]]:
        """Each method, and the update as it is to read it: the same for all, unless it was clipped."""
        training = sent.record.training
        start = self._measured.start(training.batch_size)

        def method_for(name: str, reading: Reading) -> Method:
            if name != AUTO:
                return get_method(name)
            noise = reading.record.noise_std
            return self._best(reading, has_bias=stands_for_bias(reading.opened.head, start, noise))

        check_range(sent.observation(start))
        sent, norm = told_clipping(sent, self._named(self._reference), start)
        seen = with_seen_noise(sent, start, sized=norm is None and not sent.record.lr_unknown)
        clipped = None if norm is None else self._clipped(seen, norm)
        whole = (self._of_any_size(sent) or seen) if clipped is None else clipped.whole(seen)
        simulated = None
        if clipped is not None and not clipped.sharp and not sent.record.lr_unknown:
            simulated = clipped.simulated(seen)
        found = []
        for name in names:
            method, reading = method_for(name, simulated or whole), simulated or whole
            if simulated is not None and not self._learns_from_clipped(method, simulated):
                method, reading = method_for(name, whole), whole
            check_optimizer(method, training)
            found.append((method, reading))
        return found

    def _learns_from_clipped(self, method: Method, reading: Reading) -> bool:
        """Whether a method learns from clients that it makes up for such training."""
        training = reading.record.training
        counts = self._measured.start(training.batch_size).moments.counts
        if method.needs_dense:  # a sample's own inputs tell the scale
            apart = out_of_scope(self._dense(reading), training, len(counts)) is None
            return apart or self._learns_from_clipped(METHODS["regression"], reading)  # which answers then
        if method.out_of_scope is None or method.out_of_scope(counts, training) is not None:
            return False
        return not method.needs_replayed_clients or self._replayed_clients(reading) is not None

    def observe(
        self, reading: Reading, methods: Sequence[Method]
    ) -> tuple[Observation, Checkpoint, Measurement | None]:
        """What these methods need to know of a client; its whole model, if they do, and what that does."""
        opened, record = reading.opened, reading.record
        training = record.training
        needs_end = any(method.needs_end(training) for method in methods) or (
            record.lr_unknown and (training.steps > 1 or training.optimizer != "sgd")
        )
        model = opened.weights() if needs_end else opened.stored
        end = self._measured.end(model, training.batch_size) if needs_end else None
        start = self._measured.start(training.batch_size)
        needs_residuals = any(method.needs_residuals for method in methods)
        replayed = (needs_residuals and end is not None) or any(
            method.needs_update_replays or method.needs_replayed_clients for method in methods
        )
        frozen = self._frozen_in(reading) if replayed else ()
        observation = replace(
            reading.observation(start, None if end is None else end.statistics),
            residuals=self._measured.residuals(
                end,
                model,
                training,
                noise_std=record.noise_std,
                needs_samples=any(method.needs_samples for method in methods),
                compressed=coarsening(reading.observation(start)).any,
                constant=None if end is None else reading.whole_constant(),
                frozen=frozen,
            )
            if needs_residuals
            else None,
            replayed_update=self._replayed_update(reading)
            if any(method.needs_update_replays for method in methods)
            else None,
            replayed_clients=self._replayed_clients(reading)
            if any(method.needs_replayed_clients for method in methods)
            else None,
            rescaled=partial(self._rescaled, reading)
            if any(method.needs_replayed_clients for method in methods)
            else None,
            levels=self._levels(reading) if any(method.needs_samples for method in methods) else 0,
            dense=self._dense(reading)
            if record.lr_unknown or any(method.needs_dense for method in methods)
            else None,
            shared=self._measured.batch_matters(training.batch_size),
            frozen=frozen,
            fits=self._measured.kept_fits(training.batch_size),
            samples=self._run.samples,
            search_iterations=self._run.search_iterations,
            kept_bytes=self._kept_bytes,
            seed=self._run.seed,
            device=self._run.device,
        )
        return observation, model, end

    def _rescaled(self, reading: Reading, factor: float, deviation: float) -> Observation:
        """See `Observation`."""
        whole = reading.enlarged(factor, self._head_name())
        clipping = Clipping(None, alike(whole.record.noise_std), deviation)
        return self.observe(replace(whole, scaled=True, clipping=clipping), [METHODS["replay"]])[0]

    def _of_any_size(self, sent: Reading) -> Reading | None:
        training = sent.record.training
        if sent.record.clip is not None or not self._measured.has_samples:
            return None
        start = self._measured.start(training.batch_size)

        def samples() -> Activations:
            return self._measured.measured_start(training.batch_size).activations

        return of_any_size(sent, start, samples, seed=self._run.seed)

    def _clipped(self, sent: Reading, norm: float) -> Clipped:
        """How an update was clipped whose norm is as large as that lets it be."""
        record, training = sent.record, sent.record.training
        assert record.clip is not None
        found, whole = None, sent.opened.weights()
        steady = training.optimizer == "sgd" and not record.lr_unknown
        if steady and self._measured.has_samples and (training.steps == 1 or self._source.reads_weights):
            end = self._measured.end(whole, training.batch_size) if training.steps > 1 else None
            start = self._measured.start(training.batch_size)
            observation = sent.observation(start, None if end is None else end.statistics)
            samples = self._measured.measured_start(training.batch_size).activations
            found = clip_factor(
                replace(observation, seed=self._run.seed), samples, None if end is None else end.activations
            )
        return Clipped(norm, record.clip, found, self._head_name())

    def _frozen_in(self, reading: Reading) -> tuple[str, ...]:
        """What the client's training left alone."""
        if reading not in self._frozen:
            self._frozen[reading] = self._source.frozen(reading.opened.weights())
        return self._frozen[reading]

    def _treatment(self, reading: Reading) -> Treatment:
        """What was done to the update. Noise only seen in a quantised one may be what quantisation adds."""
        if reading not in self._treatments:
            observation = reading.observation(self._measured.start(reading.record.training.batch_size))
            coarse, how = coarsening(observation), None
            if coarse.any:
                whole = reading.opened.weights()
                check_finite(whole.tensors, where=whole.path)
                how = compression(whole, self._named(self._reference), coarse)
            noise_std, clipping = observation.noise_std, observation.clipping
            if how is not None and how.levels and is_rounding(observation):
                noise_std = 0.0
                clipping = None if clipping is None else replace(clipping, noise_std=0.0)
            self._treatments[reading] = Treatment(0.0 if clipping else noise_std, clipping, how)
        return self._treatments[reading]

    def _levels(self, reading: Reading) -> int:
        """See `Observation`."""
        training = reading.record.training
        if training.steps > 1 or not self._measured.has_samples:
            return 0
        if not coarsening(reading.observation(self._measured.start(training.batch_size))).quantised:
            return 0
        how = self._treatment(reading).compression
        return 0 if how is None or how.by_tensor else how.levels

    def _replayed_update(self, reading: Reading) -> ReplayedUpdates | None:
        """What a client's training makes of a class mix, None where it can't be replayed."""
        training = reading.record.training
        effective, frozen = self._source.effective_batch(training.batch_size), self._frozen_in(reading)
        replay = self._source.replay(self._reference, training, effective, frozen=frozen)
        return None if replay is None else ReplayedUpdates(replay)

    def _replayed_clients(self, reading: Reading) -> ReplayedClients | None:
        """What makes up clients from the global model on, None where training can't be replayed."""
        training = reading.record.training
        if math.isinf(self._source.replay_cost(training)):  # though another client's could be
            return None
        effective = self._source.effective_batch(training.batch_size)
        frozen = self._frozen_in(reading)
        treatment = self._treatment(reading)
        key = (effective, treatment, frozen)
        alone = training.scheme in STATEFUL
        if not alone and key in self._makers:
            return self._makers[key]
        constant = reading.whole_constant() if alone else None
        base = self._source.replay(self._reference, training, effective, constant=constant, frozen=frozen)
        if base is None:
            return None
        made = ReplayedClients(base, treatment)
        if not alone:
            self._makers[key] = made
        return made

    def _dense(self, reading: Reading) -> DenseTail | None:
        """The dense layers before the head, where their update is the exact gradient of one batch."""
        if reading not in self._tails:
            self._tails[reading] = self._dense_tail(reading)
        return self._tails[reading]

    def _dense_tail(self, reading: Reading) -> DenseTail | None:
        record = reading.record
        training = record.training
        single = training.steps == 1 and training.optimizer == "sgd"
        inexact = record.noise_std > 0 or reading.opened.rounding > 0
        if not single or inexact or not self._measured.has_samples:
            return None
        if coarsening(reading.observation(self._measured.start(training.batch_size))).any:
            return None
        constants = None
        if training.scheme in STATEFUL:
            vector = reading.whole_constant()
            if vector is None:
                return None
            constants = self._source.by_name(vector)
        layers = self._measured.dense_layers(training.batch_size)
        before, after = (self._source.tensors(model) for model in (self._reference, reading.opened.weights()))
        read = {name: after[name] for name in layers.tensors if name in after}
        check_finite(read, where=reading.opened.stored.path)
        return layers.tail(before, after, constants)

    def _best(self, reading: Reading, *, has_bias: bool) -> Method:
        """What ``auto`` stands for.

        It hangs on how clients train, not on their numbers, but for single steps of another size than
        training made them, or of few values, of which `gls` would make the wrong counts.
        """
        training = reading.record.training
        if self._run.search_iterations and training.optimizer == "sgd":
            return METHODS["rlu"]
        start = self._measured.start(training.batch_size)
        made = None
        if training.steps > 1 or training.optimizer != "sgd":
            made = self._clients_in_time(reading)
        noisy = reading.record.noise_std > 0  # then embeddings are looked at too, which aren't stored

        def separable() -> bool:
            return out_of_scope(self._dense(reading), training, start.num_classes) is None

        best = best_method(
            training,
            has_bias=has_bias,
            residuals=start.residuals,
            has_samples=start.samples is not None and not (noisy and self._measured.stored is not None),
            can_replay=training.steps > 1 and self._source.replay_cost(training) <= _REPLAY_COST,
            can_make_clients=made is not None,
            separable=separable,
            alone=made is not None and made.own is not None,
            scaled=reading.scaled,
        )
        sized = training.steps == 1 and not (reading.record.lr_unknown or reading.scaled)
        if best is not METHODS["gls"] or training.steps > 1:
            return best
        observation = reading.observation(start)
        if sized and size_is_doubted(observation) and separable():
            return METHODS["disaggregation"]
        levels = coarsening(observation).values
        few = levels is not None and levels[0] <= _FEW_LEVELS
        rough = few and self._measured.has_samples and losses(observation) is not None
        if rough and no_regression(start.moments.counts, training) is None:
            return METHODS["regression"]
        return best

    def _clients_in_time(self, reading: Reading) -> ReplayedClients | None:
        """What makes up clients, where `replay` takes no longer with it than ``auto`` is ready to wait."""
        made = self._replayed_clients(reading)
        if made is None:
            return None
        most = _SHARED_REPLAY_COST if made.own is None else _OWN_REPLAY_COST
        return made if made.cost(reading.record.training) <= most else None

    @cached_property
    def _kept_bytes(self) -> int:
        """Memory for what would be made again; the same for all clients, who share it."""
        return bytes_to_keep(self._run.device)
