"""vLLM's own offloading connector, with the device oracle as the worker that moves blocks.

Both of its halves are the release's: the scheduler's, with its CPU offload manager, and the worker's, which decides
when a transfer is submitted and what a step must wait for. What is not the release's is what lies under them: the copy
of a block, here a copy of tracers between the device and a dictionary that stands for host memory.

A transfer runs beside the forward, so its copy may happen at any time between its submission and its end. It is done
at the end here, which is the moment that shows a block given to somebody else too early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvproof.impl.vllm.connector import Store, make_connector_class
from kvproof.impl.vllm.device import Device
from kvproof.impl.vllm.drift import load, only, release
from kvproof.impl.vllm.requests import unread
from kvproof.spec.config import Config, ConfigError
from kvproof.spec.events import Event, Offer, Offloaded, OffloadMoment
from kvproof.spec.tracer import State, decode_key
from kvproof.spec.view import NULL, MambaContent

PAGE = 65_536
"""Bytes of one block. Nothing is ever written to them: they are what the release divides its host memory by."""

TRANSLATED_SINCE = (0, 26)
"""The first release that translates its configuration in a place of its own, where it refuses what it can't offload."""

RESULTS_SINCE = (0, 25)
"""The first release whose worker is asked for stores and loads apart, and which keeps the results' type beside them."""

AT_ONCE_SINCE = (0, 26)
"""The first release whose worker submits what was chosen in a step before that step runs, where it has to be waited
for at once. Until then it waits for what was submitted by then, and the rest is submitted with the next step."""

Move = tuple[int, int, int, int]
"""One block of a transfer: group, index of the block in its request, block, and place in host memory."""

Page = tuple[list[State | None] | None, MambaContent | None]
"""A block as it was copied: its attention tokens, and its recurrent state."""


def prepare(config: Config, engine: Any, caches: Any) -> None:
    """Complete ``engine`` and ``caches`` by what the offloading connector asks of them, in place.

    Raises :class:`ConfigError` where the release refuses to offload such a cache.
    """
    torch, interface = load("torch"), load("vllm.v1.kv_cache_interface")
    chunks = config.offload_blocks or 64 * config.num_blocks
    extra = {
        "spec_name": "CPUOffloadingSpec",
        "cpu_bytes_to_use": chunks * PAGE,
        "self_describing_kv_events": config.cache_events,
        "eviction_policy": config.offload_policy,
        "offload_prompt_only": not config.offload_outputs,
        "store_threshold": config.offload_after,
    }
    object.__setattr__(engine.kv_transfer_config, "kv_connector_extra_config", extra)
    model = engine.model_config
    model.model, model.dtype, model.get_total_num_kv_heads = "kvproof", torch.float32, lambda: 1
    layers = [name for group in caches.kv_cache_groups for name in group.layer_names]
    caches.kv_cache_tensors = [
        only(
            interface.KVCacheTensor,
            size=PAGE * config.num_blocks,
            shared_by=layers,
            layers=layers,
            layer_stride=0,
            block_stride=PAGE if "layers" in interface.KVCacheTensor.__dataclass_fields__ else 0,
        )
    ]
    if release().version < TRANSLATED_SINCE:
        check = load("vllm.v1.kv_offload.factory").OffloadingSpecFactory.create_spec
    else:
        check = load("vllm.distributed.kv_transfer.kv_connector.v1.offloading.config").build_offloading_config
    try:
        check(engine, caches)
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"the offloading connector refuses this configuration: {error}") from error


def connector_class(config: Config, store: Store) -> Any:
    """The connector that the scheduler constructs: a double bound to ``store``, the release's own, or ``None``."""
    if config.connector == "none":
        return None
    if config.connector == "offload":
        return load("vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector").OffloadingConnector
    return make_connector_class(store)


@dataclass
class _Job:
    """A transfer that was submitted."""

    store: bool
    moves: list[Move]
    steps: int


class HostMemory:
    """The release's interface of a worker that moves blocks between the device and host memory."""

    def __init__(self, device: Device, steps: int, copying: Callable[[int, Sequence[Move]], None]) -> None:
        """``steps`` is how many steps a transfer takes. ``copying`` is told what is stored by which transfer, just
        before it is."""
        self.device, self.steps, self.copying = device, steps, copying
        self.pages: dict[int, Page] = {}
        self.jobs: dict[int, _Job] = {}
        self._finished: list[int] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.jobs[job_id] = _Job(True, list(_moves(src_spec, dst_spec)), self.steps)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        self.jobs[job_id] = _Job(False, list(_moves(dst_spec, src_spec)), self.steps)
        return True

    def transfer_async(self, job_id: int, spec: tuple[Any, Any]) -> bool:
        """Up to 0.24: either direction, told by which of its ends has groups."""
        submit = self.submit_store if hasattr(spec[0], "group_sizes") else self.submit_load
        return submit(job_id, *spec)

    def wait(self, job_ids: set[int]) -> None:
        for job in sorted(job_ids & self.jobs.keys()):
            self._end(job)

    def get_finished(self) -> list[Any]:
        """Everything that has ended since this was last asked, which happens once a step."""
        for number, job in sorted(self.jobs.items()):
            job.steps -= 1
            if job.steps <= 0:
                self._end(number)
        ended, self._finished = self._finished, []
        place = "base" if release().version >= RESULTS_SINCE else "worker.worker"
        result = load(f"vllm.v1.kv_offload.{place}").TransferResult
        return [result(job_id=job, success=True) for job in ended]

    def shutdown(self) -> None: ...

    def _end(self, number: int) -> None:
        job = self.jobs.pop(number)
        if job.store:
            self.copying(number, job.moves)
        for _, _, block, place in job.moves:
            if job.store:
                tokens = self.device.attention.get(block)
                self.pages[place] = (None if tokens is None else list(tokens), self.device.mamba.get(block))
            elif block != NULL:
                self._put(block, self.pages.get(place, (None, None)))
        self._finished.append(number)

    def _put(self, block: int, page: Page) -> None:
        tokens, state = page
        self.device.attention.pop(block, None)
        self.device.mamba.pop(block, None)
        if tokens is not None:
            self.device.attention[block] = list(tokens)
        if state is not None:
            self.device.mamba[block] = state
        self.device.dirty.add(block)


def _ends(job: Any) -> tuple[Any, Any]:
    """Where a transfer reads, and where it writes: a pair up to 0.24."""
    return job.transfer_spec if hasattr(job, "transfer_spec") else (job.src_spec, job.dst_spec)


def _moves(device_spec: Any, host_spec: Any) -> Iterator[Move]:
    """The single copies of a transfer, group by group, one block to one place (a chunk is one block here)."""
    blocks, places = iter(device_spec.block_ids.tolist()), iter(host_spec.block_ids.tolist())
    for group, (size, first) in enumerate(zip(device_spec.group_sizes, device_spec.block_indices, strict=True)):
        for index in range(first, first + size):
            yield group, index, next(blocks), next(places)


class Offload:
    """The connector of one scheduler, watched, and its worker."""

    def __init__(
        self,
        config: Config,
        scheduler: Any,
        device: Device,
        store: Store,
        states_of: Callable[[Any], Sequence[State]],
        emit: Callable[[Event], None],
    ) -> None:
        """``store`` is told what is offered, ``states_of`` knows the prefixes of a release's request."""
        self.config, self.store, self.states_of, self.emit = config, store, states_of, emit
        self.connector = scheduler.connector
        self.flushes_first = not scheduler.use_v2_model_runner
        """Whether a step waits for what it must wait for before anything else (V1), or before its forward (V2)."""
        self.held: dict[bytes, bool] = {}
        """What is in host memory: the key, and whether it can be read yet."""
        self._keys: dict[int, bytes] = {}
        self._chosen: dict[int, Any] = {}
        self._loads: dict[int, str] = {}
        self.memory = HostMemory(device, config.load_steps, self._copying)
        role = load("vllm.distributed.kv_transfer.kv_connector.v1.base").KVConnectorRole.WORKER
        self.worker = type(self.connector)(scheduler.vllm_config, role, scheduler.kv_cache_config)
        self.worker.connector_worker.worker = self.memory
        self._watch()

    # -- a step, as the model runner takes it -------------------------------------------------------------------------

    def begins(self, output: Any) -> None:
        """The step is scheduled, and nothing of it has run.

        What was chosen in the step before is due by now, and so is what is chosen now and has to be waited for at once.
        """
        metadata = output.kv_connector_metadata
        jobs = metadata.store_jobs
        at_once = (metadata.jobs_to_flush or ()) if release().version >= AT_ONCE_SINCE else ()
        due = self._chosen | {number: job for number, job in jobs.items() if number in at_once}
        for number, job in due.items():
            self._judge(number, _moves(*_ends(job)), "chosen")
        self._chosen = {number: job for number, job in jobs.items() if number not in at_once}
        if self.flushes_first:
            self.before(output)

    def before(self, output: Any) -> None:
        """What the runner does with the connector before the forward."""
        metadata = output.kv_connector_metadata
        self._loads |= {number: job.req_id for number, job in metadata.load_jobs.items()}
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)

    def runner(self, output: Any) -> Callable[[], None] | None:
        """What is left of :meth:`before` when copies and states have been moved."""
        return None if self.flushes_first else lambda: self.before(output)

    def after(self, output: Any) -> Any:
        """The same after the forward: what it tells the scheduler."""
        if output.total_num_scheduled_tokens:
            self.worker.wait_for_save()
        sent, received = self.worker.get_finished(output.finished_req_ids)
        told = load("vllm.v1.outputs").KVConnectorOutput(
            finished_sending=sent,
            finished_recving=received,
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        return told

    def arriving(self) -> dict[str, list[int]]:
        """The blocks that loads are still writing to, by request."""
        return {
            request: [block for _, _, block, _ in self.memory.jobs[number].moves if block != NULL]
            for number, request in self._loads.items()
            if number in self.memory.jobs
        }

    @property
    def busy(self) -> bool:
        """Whether something is on its way, so that waiting for it is no stall."""
        return bool(self.memory.jobs)

    # -- what is watched ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        manager = self.connector.connector_scheduler.manager
        asked = self.connector.get_num_new_matched_tokens
        prepare, complete, reset = manager.prepare_store, manager.complete_store, manager.reset_cache

        def get_num_new_matched_tokens(request: Any, computed: int) -> Any:
            answer = asked(request, computed)
            name = request.request_id
            self.store.shown[name] = computed
            self.store.offered[name] = answer[0] or 0
            if unread(request):  # whatever it answers does not count
                return answer
            self.emit(
                Offer(
                    request=name,
                    states=tuple(self.states_of(request)),
                    local=computed,
                    offered=answer[0],
                    held=frozenset((_group(key), decode_key(key)) for key, ready in self.held.items() if ready),
                )
            )
            return answer

        def prepare_store(keys: Any, *rest: Any, **named: Any) -> Any:
            answer = prepare(keys, *rest, **named)
            if answer is not None:
                for key in answer.evicted_keys:
                    self.held.pop(bytes(key), None)
                for key, place in zip(answer.keys_to_store, answer.store_spec.block_ids.tolist(), strict=True):
                    self.held[bytes(key)] = False
                    self._keys[place] = bytes(key)
            return answer

        def complete_store(keys: Any, *rest: Any, **named: Any) -> Any:
            for key in keys:
                if bytes(key) in self.held:
                    self.held[bytes(key)] = True
            return complete(keys, *rest, **named)

        def reset_cache(*rest: Any, **named: Any) -> Any:
            self.held.clear()
            self._keys.clear()
            return reset(*rest, **named)

        self.connector.get_num_new_matched_tokens = get_num_new_matched_tokens
        manager.prepare_store, manager.complete_store = prepare_store, complete_store
        manager.reset_cache = reset_cache

    def _copying(self, number: int, moves: Iterable[Move]) -> None:
        self._judge(number, moves, "copied")

    def _judge(self, number: int, moves: Iterable[Move], moment: OffloadMoment) -> None:
        # A reset of the store gives up what was chosen before it, wherever that is by then: on its way, put off by the
        # worker to its next step, or in a step that was scheduled and has not run. The manager has forgotten its keys,
        # and the scheduler passes over the end of every transfer below this number, so that no lookup comes upon what
        # it brings. Nor does it write over what is stored in its place later: transfers end in order, and the next
        # step submits it and waits for it before it submits anything new.
        if number < self.connector.connector_scheduler._stale_job_threshold:
            return
        for _, _, block, place in moves:
            key = self._keys.get(place)
            if key is not None:
                self.emit(Offloaded(group=_group(key), block=block, state=decode_key(key), moment=moment))


def _group(key: bytes) -> int:
    return int.from_bytes(key[32:36], "big")
