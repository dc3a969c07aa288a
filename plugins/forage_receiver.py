"""Receives the trainer's weights in a vLLM worker, over a torch process group.

vLLM imports this file because the server is started with this folder on PYTHONPATH and with

    --worker-extension-cls forage_receiver.Receiver --weight-transfer-config '{"backend": "forage"}'

The trainer is rank 0 of the group and the workers are the other ranks. The group uses NCCL if each
rank has its own GPU, and gloo otherwise. Weights arrive in buckets: contiguous bytes, with the
position of each tensor. vLLM's layerwise reload puts them into its layers. This file does not need
the package ``forage``.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "forage"
VERSION = 3
"""Raised whenever the trainer's requests change; it only uses servers with the same version."""
NUM_SEEN = 64
"""How many values of a first column identify a layer."""
_RAISES = "TORCH_NCCL_BLOCKING_WAIT"


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """The address of the trainer's store, and the rank of this server's first worker."""

    address: str
    port: int
    rank_offset: int
    world_size: int
    backend: str
    timeout_s: float


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """The contents of a bucket; ``starts`` are offsets in bytes."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    starts: list[int]
    num_bytes: int


class ForageTransferEngine(WeightTransferEngine[GroupInfo, BucketInfo]):
    """One worker's end of the group."""

    init_info_cls = GroupInfo
    update_info_cls = BucketInfo

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._group: dist.ProcessGroup | Any = None
        self._is_open = False
        self._bucket_device = self.device

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        timeout = timedelta(seconds=init_info.timeout_s)
        store = dist.TCPStore(
            init_info.address, init_info.port, None, is_master=False, timeout=timeout
        )
        is_gloo = init_info.backend == "gloo"
        self._bucket_device = torch.device("cpu") if is_gloo else self.device
        place = (store, init_info.rank_offset + rank, init_info.world_size)
        if is_gloo:
            mine = _address_towards(init_info.address, init_info.port)
            group = _gloo_group(*place, mine, timeout)
        else:
            group = _nccl_group(*place, timeout)
        _meet(group, self._bucket_device, init_info.timeout_s)
        self._group = group

    def start_weight_update(self) -> None:
        self.put_back()  # closes an update that ended half-way
        self._is_open = True
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in the base class, without its wait for an accelerator, which a CPU build refuses."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        if self._group is None:
            raise RuntimeError("this worker has no group: POST /init_weight_transfer_engine first")
        # A new buffer per bucket: the reload keeps views of it until a layer is complete.
        bucket = torch.empty(update_info.num_bytes, dtype=torch.uint8, device=self._bucket_device)
        self._group.broadcast([bucket], dist.BroadcastOptions()).wait()
        pairs: list[tuple[str, torch.Tensor]] = []
        for name, dtype_name, shape, start in zip(
            update_info.names,
            update_info.dtypes,
            update_info.shapes,
            update_info.starts,
            strict=True,
        ):
            dtype: torch.dtype = getattr(torch, dtype_name)
            size = torch.Size(shape)
            num_bytes = size.numel() * dtype.itemsize
            pairs.append((name, bucket[start : start + num_bytes].view(dtype).view(size)))
        with torch.no_grad():
            self.model.load_weights(pairs)

    def finish_weight_update(self) -> None:
        self.put_back()

    def put_back(self) -> None:
        """Ends the reload: layers are complete again, whatever has arrived for them."""
        if not self._is_open:
            return
        finalize_layerwise_reload(self.model, self.model_config)
        repack_heads(self.model)
        self._is_open = False

    def shutdown(self) -> None:
        self._group = None


class Receiver:
    """Methods that a worker offers to ``/collective_rpc``."""

    def receiver_version(self) -> int:
        """Lets the trainer detect a copy of this file that is older than its own."""
        return VERSION

    def name_gpu(self) -> list[str]:
        """The worker's GPU and its NCCL version; nothing on a CPU."""
        if self.device.type != "cuda":
            return []
        version = ".".join(map(str, torch.cuda.nccl.version()))
        return [str(torch.cuda.get_device_properties(self.device).uuid), version]

    def check_weights(self, names: list[str], shapes: list[list[int]]) -> list[str]:
        """The differences from the served model, one sentence each; called before an update."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.model_config.hf_config)
        known = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        needed = {name for name, _ in model.named_parameters()}  # tied ones once
        problems = [f"{name} is missing" for name in sorted(needed - set(names))]
        for name, shape in zip(names, shapes, strict=True):
            if name in known and name not in needed:
                # Loading both would leave the last one in both places.
                problems.append(f"{name} is tied to another weight on the server, but not here")
            elif name not in known:
                problems.append(f"{name} is not in the served model")
            elif known[name] != shape:
                problems.append(f"{name} has the shape {known[name]} on the server, {shape} here")
        return problems

    def first_columns(self, names: list[str]) -> dict[str, list[float]]:
        """The beginning of the first column of each linear layer, without its adapters.

        The layer computes it, because on a CPU it keeps its weight in another format. A layer that
        vLLM merges from several begins with the first of them. Quantized layers are left out.
        """
        model = self.model_runner.get_model()
        packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        whole = {parts[0]: name for name, parts in packed.items()}
        layers = dict(model.named_modules())
        columns: dict[str, list[float]] = {}
        for name in names:
            block, _, last = name.rpartition(".")
            layer = layers.get(f"{block}.{whole.get(last, last)}")
            layer = getattr(layer, "base_layer", layer)
            method = getattr(layer, "quant_method", None)
            if isinstance(layer, LinearBase) and isinstance(method, UnquantizedLinearMethod):
                width = getattr(layer, "input_size_per_partition", layer.input_size)
                first = torch.zeros(1, width, dtype=self.model_config.dtype, device=self.device)
                first[0, 0] = 1
                with torch.inference_mode():
                    column = method.apply(layer, first)[0, :NUM_SEEN]
                columns[name] = column.nan_to_num().tolist()  # JSON has no NaN or infinity
        return columns

    def load_from_disk(self, folder: str) -> None:
        """Runs vLLM's own reload from a folder, then repacks the heads.

        If the reload fails, layers without weights would end the server at the next turn, so the
        layers are finalized all the same.
        """
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            try:
                self.reload_weights(weights_path=folder)
            except BaseException:
                finalize_layerwise_reload(model, self.model_config)
                raise
            finally:
                repack_heads(model)

    def load_adapters(self, folder: str) -> None:
        """Replaces the served adapters, for turns in flight as well.

        A request that itself asks for a load in place has its folder read at every step while it is
        in flight, so requests with older adapters would restore these.
        """
        manager = self.model_runner.lora_manager
        (served,) = manager.list_adapters()
        # In place, only here: vLLM drops the old adapters once it has read the new ones.
        manager.add_adapter(LoRARequest(folder, served, folder, load_inplace=True))

    def abandon_weight_update(self) -> None:
        """Ends an update that will not continue, so that the next one can start."""
        with set_current_vllm_config(self.vllm_config):  # which some layers read
            self.weight_transfer_engine.put_back()
        self._weight_update_active = False


def repack_heads(model: torch.nn.Module) -> None:
    """Packs the heads again for a CPU: a reload leaves the old ones in use if they are tied."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _packing_each_time(set_up: Callable[..., None]) -> Callable[..., None]:
    """Packs experts for a CPU after every load; vLLM does so only after the first.

    Without it the kernel reads later weights in the packed layout, that is, scrambled.
    """

    @wraps(set_up)
    def set_up_and_pack(method: Any, layer: Any, *weights: torch.Tensor, **named: Any) -> None:
        is_first = method.moe_kernel is None
        set_up(method, layer, *weights, **named)
        if not is_first and layer.w13_weight.device.type == "cpu":
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return set_up_and_pack


UnquantizedFusedMoEMethod._setup_kernel = _packing_each_time(
    UnquantizedFusedMoEMethod._setup_kernel
)


def _address_towards(host: str, port: int) -> str:
    """This machine's address as seen by ``host``; sends nothing."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def _gloo_group(
    store: dist.Store, rank: int, world_size: int, address: str, timeout: timedelta
) -> dist.ProcessGroupGloo:
    """A gloo group that listens on ``address``.

    By default gloo resolves the host name, often to the loopback address.
    """
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def _nccl_group(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> dist.ProcessGroupNCCL:
    """An NCCL group whose failures raise errors; by default they end the process.

    torch reads the variable when it creates a group, and offers no other way to set this.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    before = os.environ.get(_RAISES)
    os.environ[_RAISES] = "1"
    try:
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    finally:
        if before is None:
            del os.environ[_RAISES]
        else:
            os.environ[_RAISES] = before


def _meet(group: dist.ProcessGroup | Any, device: torch.device, timeout_s: float) -> None:
    """Receives a byte: NCCL connects in the first broadcast, and waits there without a timeout."""
    failures: list[RuntimeError | None] = []

    def work() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread starts on the first GPU
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        try:
            group.broadcast([byte], dist.BroadcastOptions()).wait()
        except RuntimeError as error:
            failures.append(error)
        else:
            failures.append(None)

    thread = threading.Thread(target=work, name="meeting", daemon=True)
    thread.start()
    thread.join(2 * timeout_s)
    if not failures:
        raise RuntimeError(f"the trainer did not connect within {2 * timeout_s:g} s")
    if failures[0] is not None:
        raise failures[0]


WeightTransferEngineFactory.register_engine(BACKEND, ForageTransferEngine)
