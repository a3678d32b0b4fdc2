"""`compress` on two ranks: errors, bytes, and equal replicas."""

from __future__ import annotations

import importlib
import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import parallel
import pytest
import torch
from test_parallel import assert_replicas_are_equal, backward, distributed, gradients
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fp8pass
from fp8pass import Config
from fp8pass.weights.quantized_parameter import QuantizedWeight

# --- functions of ranks -------------------------------------------------------------------------

COPIES = ("ddp", "replicate", "hsdp", "fsdp replicate")
WAYS = (*COPIES, "fsdp blocks", "fsdp whole")


def compressed_gradients_are_close(device: str, way: str) -> None:
    """Gradients have the error of one rounding if ranks get shards, of two if ranks get copies."""
    found = []
    for compresses in (False, True):
        model = distributed(way, device, "exact")
        if compresses:
            compression = fp8pass.distributed.compress(model, weights="none")
        backward(way, device, model)
        found.append(gradients(model))
    want, got = (torch.cat([g.flatten() for g in each]) for each in found)
    error = float((got - want).norm() / want.norm())
    assert 0 < error <= (0.036 if way in COPIES else 0.025)
    elements = sum(g.numel() for g in gradients(model))
    sent = compression.gradients.elements
    # A rank sends half, and DDP also half of the sums. FSDP2 pads what it cannot split evenly.
    assert elements / 2 <= sent / (2 if way in COPIES else 1) <= elements / 2 + 64
    # The last group of each parameter is padded, which counts because parameters are small.
    assert compression.gradients.ratio <= 0.52
    assert_replicas_are_equal(model)


def other_factors_than_the_mean(device: str, way: str) -> None:
    """torchtitan divides by the number of tokens itself, and sets the factor of FSDP2 to 1."""
    found = []
    for factor in (None, 1.0, 2.0, 8.0):
        model = distributed(way, device, "exact")
        fp8pass.distributed.compress(model, weights="none")
        for module in model.modules() if factor else ():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
        backward(way, device, model)
        found.append(
            torch.cat([g.flatten() for g in gradients(model)]) * (factor or dist.get_world_size())
        )
    for sums in found[1:]:
        assert torch.equal(sums, found[0])


def compressed_training(device: str, way: str) -> None:
    """Losses are close to training without compression, with sums of two backwards."""
    losses: list[list[Tensor]] = []
    for compresses in (False, True):
        model = distributed(way, device, "coat")
        if compresses:
            fp8pass.distributed.compress(model)
        optimizer = fp8pass.optim.AdamW(model.parameters(), lr=3e-3)
        losses.append([])
        for _ in range(6):
            with parallel.no_sync(model):
                backward(way, device, model, seed=0)
            losses[-1].append(backward(way, device, model, seed=1))
            optimizer.step()
            optimizer.zero_grad()
        assert_replicas_are_equal(model)
    plain, compressed = losses
    assert compressed[-1] < 0.9 * compressed[0]
    assert abs(compressed[-1] - plain[-1]) < 0.05 * plain[-1]


def a_nonfinite_gradient_reaches_all_ranks(device: str, way: str) -> None:
    model = distributed(way, device, "exact")
    fp8pass.distributed.compress(model)
    ids = parallel.batch(device, of_rank=True)
    loss = parallel.loss_of(model(ids), ids)
    (loss * (float("nan") if dist.get_rank() == 1 else 1.0)).backward()
    norms = torch.stack([parallel.full(p.grad).norm() for p in model.parameters()])
    assert norms.isnan().all()


def wrong_models(device: str) -> None:
    compress = fp8pass.distributed.compress
    with pytest.raises(fp8pass.ConfigError, match=r"takes a distributed module .*, got str"):
        compress("fsdp")
    with pytest.raises(fp8pass.ConfigError, match="No module of this Decoder reduces gradients"):
        compress(parallel.Decoder())
    with pytest.raises(fp8pass.ConfigError, match="pass the result to compress"):
        compress(distributed("ddp", device, None).module)
    model = distributed("fsdp blocks", device, "exact")
    with pytest.raises(fp8pass.ConfigError, match="Did you mean 'groups'"):
        compress(model, "group")
    with pytest.raises(fp8pass.ConfigError, match="Did you mean 'row'"):
        compress(model, weights="rows")
    assert compress(model).modules == ("", "blocks.0", "blocks.1")
    with pytest.raises(fp8pass.ConfigError, match="The model is compressed already"):
        compress(model)
    with_hook = distributed("hsdp", device, "exact")
    with_hook.set_all_reduce_hook(lambda gradients: None)
    with pytest.raises(fp8pass.ConfigError, match="set_all_reduce_hook was called"):
        compress(with_hook)
    hooked = distributed("ddp", device, "exact")
    hooked.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(fp8pass.ConfigError, match="Remove other reductions"):
        compress(hooked)
    late = distributed("replicate", device, "exact")
    backward("replicate", device, late)
    with pytest.raises(fp8pass.ConfigError, match="before its first forward"):
        compress(late)
    sparse = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)).to(device)
    with pytest.raises(fp8pass.ConfigError, match="sparse=False"):
        compress(nn.parallel.DistributedDataParallel(sparse))
    again = distributed("fsdp blocks", device, "exact")
    compress(again.blocks[1])
    with pytest.raises(fp8pass.ConfigError, match=r"blocks\.1 is compressed already"):
        compress(again)


def ranks_with_different_arguments(device: str, way: str) -> None:
    model = distributed(way, device, "exact")
    gradients = "groups" if dist.get_rank() else "none"
    with pytest.raises(fp8pass.ConfigError, match=r"different arguments: .*groups.* and .*none"):
        fp8pass.distributed.compress(model, gradients)
    with pytest.raises(fp8pass.ConfigError, match=r"refused: .*Did you mean 'row'"):
        fp8pass.distributed.compress(model, weights="row" if dist.get_rank() else "rows")
    assert fp8pass.distributed.compress(model).gradients.bytes == 0


def a_late_rank(device: str) -> None:
    """The other rank warns that it waits."""
    compression = importlib.import_module("fp8pass.distributed.compression")
    model, warned = distributed("ddp", device, "exact"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compression, "PATIENCE_S", 0.2)
        patch.setattr(compression.log, "warning", lambda text, seconds: warned.append(text))
        if dist.get_rank() == 1:
            time.sleep(2)
        fp8pass.distributed.compress(model)
    assert len(warned) == (dist.get_rank() == 0)


@contextmanager
def capture_log() -> Iterator[list[str]]:
    """Collect the lines that fp8pass logs within."""
    log, lines = logging.getLogger("fp8pass"), []
    level, handler = log.level, logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def shard_in_bf16(device: str, *, keeps: bool = False) -> nn.Module:
    """Return compiled blocks that compute in BF16 with FP32 shards.

    With `keeps` gathered weights of blocks are kept until the backward.
    """
    torch.manual_seed(0)
    model = parallel.Decoder().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    backend = fp8pass.backend(Config(compiler="eager"))
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
        fully_shard(
            block,
            mesh=parallel.mesh_of(model),
            mp_policy=policy,
            reshard_after_forward=not keeps,
        )
    return fully_shard(model, mesh=parallel.mesh_of(model), mp_policy=policy)


LINEARS = [f"attention.{name}" for name in ("q", "k", "v", "out")] + ["mlp.up", "mlp.down"]


def quantized_gathers_change_no_bit(device: str) -> None:
    """Bits are equal. The backward requantizes weights with another scale without rounding."""
    found = []
    for weights in ("none", "row"):
        model = shard_in_bf16(device)
        done = fp8pass.distributed.compress(model, "none", weights)
        ids = parallel.batch(device, of_rank=True)
        with torch.no_grad():
            logits = model(ids)
        found.append([logits])
        losses = [parallel.loss_of(model(ids), ids)]
        losses[0].backward()
        found[-1] += [losses[0].detach(), *gradients(model)]
        assert all(type(p.to_local()) is Tensor for p in model.parameters())
        assert all(type(x.to_local()) is Tensor for x in model.state_dict().values())
    for want, got in zip(*found, strict=True):
        assert torch.equal(got, want)
    assert done.layers == tuple(f"blocks.{i}.{name}" for i in (0, 1) for name in LINEARS)
    assert not done.modules
    row = parallel.WIDTH  # the longest rows would save a little more
    assert 0.5 < done.weights.ratio <= (1 + 4 / row) / 2
    shards = sum(model.get_submodule(path).weight.numel() // 2 for path in done.layers)
    assert done.weights.elements == 3 * shards  # two forwards, one backward


def weights_that_are_not_resharded_are_gathered_once(device: str) -> None:
    """Weights are gathered once for forward and backward, or once for all micro-batches."""
    trained, sent = [], []
    for keeps in (False, True):
        model = shard_in_bf16(device, keeps=keeps)
        done = fp8pass.distributed.compress(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for seed in (0, 1):  # micro-batches
                model.set_is_last_backward(seed == 1)
                model.set_reshard_after_backward(not keeps or seed == 1)
                ids = parallel.batch(device, seed, of_rank=True)
                parallel.loss_of(model(ids), ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([p.full_tensor() for p in model.parameters()])
        sent.append(done.weights.bytes)
    assert all(map(torch.equal, *trained))
    assert sent[0] == 4 * sent[1]


def gathered_weights_are_freed(device: str) -> None:
    """Quantized weights are views of memory that FSDP2 frees."""
    model, seen = parallel.Decoder().to(device), []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=parallel.mesh_of(model), mp_policy=policy)
        block.mlp.up.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight))
    fully_shard(model, mesh=parallel.mesh_of(model), mp_policy=policy)
    fp8pass.distributed.compress(model, "none", "row")
    ids = parallel.batch(device, of_rank=True)
    parallel.loss_of(model(ids), ids).backward()
    assert len(seen) == 2
    assert all(isinstance(weight, QuantizedWeight) for weight in seen)
    for part in (x for weight in seen for x in (weight.fp8_data, weight.scales)):
        assert part.untyped_storage().nbytes() == 0


def skipped_layers(device: str) -> None:
    model = shard_in_bf16(device)
    with pytest.warns(UserWarning, match="skip pattern 'mpl' matches no linear layer"):
        fp8pass.distributed.compress(shard_in_bf16(device), skip="mpl")
    done = fp8pass.distributed.compress(model, skip=["blocks.0", "mlp.*"])
    assert done.layers == tuple(f"blocks.1.{name}" for name in LINEARS[:4])
    ids = parallel.batch(device, of_rank=True)
    parallel.loss_of(model(ids), ids).backward()
    late = shard_in_bf16(device)
    late(ids)
    with pytest.raises(fp8pass.ConfigError, match="before its first forward"):
        fp8pass.distributed.compress(late)


def names_of_layers_omit_wrappers(device: str) -> None:
    """torchtitan and activation checkpointing wrap blocks."""
    model = parallel.Decoder().to(device)
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=parallel.mesh_of(model), mp_policy=policy)
    fully_shard(model, mesh=parallel.mesh_of(model), mp_policy=policy)
    done = fp8pass.distributed.compress(model, skip=("blocks.0.attention", "blocks.1.mlp.*"))
    rest = "blocks.0.mlp.up", "blocks.0.mlp.down", *(f"blocks.1.{name}" for name in LINEARS[:4])
    assert done.layers == rest
    assert done.modules == ("", "blocks.0", "blocks.1")


def replaced_shards_are_requantized(device: str) -> None:
    """Loading with `assign=True` replaces shards."""
    model = shard_in_bf16(device)
    done = fp8pass.distributed.compress(model)
    ids = parallel.batch(device, of_rank=True)
    losses = []
    for _ in range(2):
        sent = done.weights.bytes
        losses.append(float(parallel.loss_of(model(ids), ids)))
        assert done.weights.bytes > sent
        state = {name: 2 * x for name, x in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    assert losses[0] != losses[1]
    model.blocks[0].unshard()
    assert isinstance(model.blocks[0].mlp.up.weight, QuantizedWeight)


def modules_sharded_together(device: str) -> None:
    """After shards are replaced, the second module runs alone with weights gathered for both."""
    outputs = []
    for weights in ("none", "row"):
        torch.manual_seed(0)
        model = parallel.Decoder().to(device)
        mesh, policy = parallel.mesh_of(model), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(list(model.blocks), mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        done = fp8pass.distributed.compress(model, "none", weights)
        ids = parallel.batch(device, of_rank=True)
        with torch.no_grad():
            model(ids)
            x = torch.randn(2, 8, parallel.WIDTH, generator=torch.Generator().manual_seed(1))
            model.load_state_dict(dict(model.state_dict()), assign=True)
            outputs.append(model.blocks[1](x.to(device)).float() - x.to(device))
    assert done.layers == tuple(f"blocks.{i}.{name}" for i in (0, 1) for name in LINEARS)
    assert 0 < (outputs[1] - outputs[0]).norm() < 0.1 * outputs[0].norm()


def parts_that_run_alone_are_quantized(device: str) -> None:
    """Lightning calls parts of a model after it moved the model, which replaces shards."""
    model = shard_in_bf16(device)
    done = fp8pass.distributed.compress(model)
    model.load_state_dict(dict(model.state_dict()), assign=True)
    x = torch.randn(2, 8, parallel.WIDTH, device=device)
    for block in model.blocks:
        sent = done.weights.bytes
        x = block(x)
        assert done.weights.bytes > sent
    x.sum().backward()


def weights_that_cannot_be_quantized(device: str) -> None:
    """Refused: FP32, integers, computed, narrow, not gathered. Shared weights are listed once."""
    compress = fp8pass.distributed.compress
    assert not compress(distributed("fsdp blocks", device, "exact")).layers
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Embedding(48, 64))
    model.extend([nn.Linear(64, 48), nn.Linear(1024, 32)])
    model.to(device)
    takes_integers = torch.__version__ >= "2.13"  # FSDP2 gathers integers
    if takes_integers:
        integers = torch.ones(64, 64, dtype=torch.int8)
        model[1].weight = nn.Parameter(integers, requires_grad=False)
    model[3].weight = model[0].weight
    parametrizations.weight_norm(model[2])
    mesh = parallel.mesh_of(model)
    parallelize_module(model, mesh, {"5": ColwiseParallel()})
    ignored = {p for name, p in model.named_parameters() if name.startswith("5.")}
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    layers = ("0",) if takes_integers else ("0", "1")
    with capture_log() as lines:
        assert compress(model, gradients="none").layers == layers
    (line,) = lines
    assert line.startswith(f"compress: FSDP2 gathers the weights of {len(layers)} of 6 linear ")


def reasons_against_quantization_are_logged(device: str) -> None:
    """Each layer has another reason. A line lists the first three."""
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    sizes = (64, 64), (64, 48), (48, 63), (63, 64), (64, 96)
    model = nn.Sequential(*(nn.Linear(*pair) for pair in sizes))
    model.lm_head = nn.Linear(96, 64)
    mesh = parallel.mesh_of(model.to(device))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh, mp_policy=bf16)
    with capture_log() as lines:
        assert fp8pass.distributed.compress(model, skip="1").layers == ("4",)
    assert lines == [
        "compress: FSDP2 gathers the weights of 1 of 6 linear layers in FP8; 0 in high precision: "
        "it computes in float32: pass fully_shard mp_policy=MixedPrecisionPolicy("
        "param_dtype=torch.bfloat16); 1 in high precision: it is an output head, or skipped; "
        "2 in high precision: weight 63×48: both sizes must be multiples of 16; and 2 more"
    ]
    alone, on_host = nn.Sequential(nn.Linear(64, 64)).to(device), CPUOffloadPolicy(pin_memory=False)
    offloaded = fully_shard(alone, mesh=mesh, mp_policy=bf16, offload_policy=on_host)
    with capture_log() as lines:
        fp8pass.distributed.compress(offloaded, "none")
    assert device == "cpu" or "0 in high precision: its weight is on the cpu" in lines[0]
    double = fully_shard(
        nn.Sequential(nn.Linear(64, 64).double()).to(device), mesh=mesh, mp_policy=bf16
    )
    with capture_log() as lines:
        fp8pass.distributed.compress(double, "none")
    assert lines[0].endswith("0 in high precision: its weight is a DTensor of float64")


def pytorch_warns_of_nothing(device: str) -> None:
    """PyTorch's deprecation warnings about calls in `compress` would not help users."""
    model = distributed("ddp", device, None)
    fp8pass.distributed.compress(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        backward("ddp", device, model)


def copies_of_ddp(device: str, folder: str) -> None:
    """A copy, such as an average of weights, uses PyTorch's reduction until it is compressed."""
    model = distributed("ddp", device, None)  # modules compiled in place cannot be pickled
    fp8pass.distributed.compress(model, monitor=fp8pass.Monitor())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    file = f"{folder}/{dist.get_rank()}"
    torch.save(model, file)
    again = torch.load(file, weights_only=False)
    done = fp8pass.distributed.compress(again)
    for each in (model, average.module, again):
        backward("ddp", device, each)
        assert_replicas_are_equal(each)
    assert done.gradients.ratio < 0.53
    assert all(map(torch.equal, gradients(model), gradients(again)))
    assert not all(map(torch.equal, gradients(model), gradients(average.module)))


def a_monitor_measures_sent_gradients(device: str) -> None:
    monitor = fp8pass.Monitor(every=1)
    model = distributed("fsdp blocks", device, "exact")
    with pytest.raises(fp8pass.ConfigError, match=r"monitor must be a fp8pass\.Monitor, got dict"):
        fp8pass.distributed.compress(model, monitor={})
    fp8pass.distributed.compress(model, monitor=monitor)
    backward("fsdp blocks", device, model)
    monitor.step()
    assert {row.module for row in monitor.latest} == {"", "blocks.0", "blocks.1"}
    assert {(row.tensor, row.scales) for row in monitor.latest} == {("gradient sent", "1×128")}
    assert all(24 < row.sqnr_db < 40 for row in monitor.latest)


def models_on_the_meta_device(device: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh(device, (2,)), mp_policy=policy)
    done = fp8pass.distributed.compress(model)
    model.to_empty(device=device)
    for p in model.parameters():
        nn.init.normal_(p)
    model(torch.randn(16, 64, device=device)).sum().backward()
    assert done.layers == ("0", "1")
    assert done.weights.bytes


# --- tests --------------------------------------------------------------------------------------


@pytest.mark.drawn(2)
@pytest.mark.parametrize("claim", [compressed_gradients_are_close, compressed_training])
@pytest.mark.parametrize("way", WAYS)
def test_compression_trains_on_two_ranks(two, way, claim):
    two(claim, way)


@pytest.mark.long
@pytest.mark.parametrize("way", ["fsdp blocks", "hsdp", "fsdp replicate"])
def test_gradients_can_have_other_factors_than_the_mean(two, way):
    two(other_factors_than_the_mean, way)


@pytest.mark.long
@pytest.mark.parametrize("way", ["ddp", "fsdp blocks", "hsdp", "fsdp replicate"])
def test_a_nonfinite_gradient_reaches_all_ranks(two, way):
    two(a_nonfinite_gradient_reaches_all_ranks, way)


def one_rank_alone(device: str) -> None:
    """On a mesh of one rank `compress` changes nothing."""
    meshes = init_device_mesh(device, (2, 1), mesh_dim_names=("ranks", "alone"))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(device)
    fully_shard(model, mesh=meshes["alone"])
    done = fp8pass.distributed.compress(model)
    assert (done.modules, done.layers) == ((), ())
    model(torch.randn(8, 64, device=device)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_mesh_of_one_rank_is_not_compressed(two):
    two(one_rank_alone)


@pytest.mark.parametrize("way", ["ddp", "fsdp blocks"])
def test_ranks_with_different_arguments_are_refused(two, way):
    two(ranks_with_different_arguments, way)


@pytest.mark.long
def test_waiting_for_a_late_rank_causes_a_warning(two):
    two(a_late_rank)


GATHERS = (
    quantized_gathers_change_no_bit,
    weights_that_are_not_resharded_are_gathered_once,
    gathered_weights_are_freed,
    skipped_layers,
    names_of_layers_omit_wrappers,
    replaced_shards_are_requantized,
    modules_sharded_together,
    parts_that_run_alone_are_quantized,
    weights_that_cannot_be_quantized,
    reasons_against_quantization_are_logged,
    models_on_the_meta_device,
)


@pytest.mark.long
@pytest.mark.parametrize("claim", GATHERS, ids=lambda claim: claim.__name__)
def test_gathers_of_quantized_weights(two, claim):
    two(claim)


def test_compression_causes_no_warnings(two):
    two(pytorch_warns_of_nothing)


def test_copies_of_ddp_can_be_compressed(two, tmp_path):
    two(copies_of_ddp, str(tmp_path))


@pytest.mark.long
def test_a_monitor_measures_sent_gradients(two):
    two(a_monitor_measures_sent_gradients)


@pytest.mark.long
def test_wrong_models_are_refused(two):
    two(wrong_models)
