"""`python -m fp8pass.demo`: train the same small language model with and without fp8pass.

A byte-level Llama-style decoder learns the source text of Python's standard library, or `--data`.
Both variants start from the same weights and see the same batches, one after the other so that
each has the memory for itself.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import re
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import fp8pass
from fp8pass import hardware
from fp8pass.config import unknown

VOCABULARY = 256
MAX_TEXT_BYTES = 4 << 20
HELD_OUT_SHARE = 16
HELD_OUT_BATCHES = 16
# In the standard library's folder, but tables, tests or not part of it.
SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "encodings",
    "lib2to3",
    "idlelib",
}


@dataclass(frozen=True)
class Size:
    """A model and how it is trained."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    seq: int
    batch: int
    steps: int
    peak_lr: float

    @property
    def tokens(self) -> int:
        """Tokens in a batch."""
        return self.batch * self.seq


SIZES = {
    "tiny": Size(128, 1, 2, 1, 256, 64, 8, steps=40, peak_lr=1e-2),
    "small": Size(256, 2, 4, 2, 768, 128, 8, steps=200, peak_lr=2e-3),
    "large": Size(2048, 8, 16, 8, 5632, 2048, 8, steps=150, peak_lr=4e-4),
}


class Attention(nn.Module):
    """Causal attention with rotary embeddings and grouped queries."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.dim // size.heads
        self.q_proj = nn.Linear(size.dim, size.dim, bias=False)
        self.k_proj = nn.Linear(size.dim, size.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(size.dim, size.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(size.dim, size.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.dim, size.ffn, bias=False)
        self.up_proj = nn.Linear(size.dim, size.ffn, bias=False)
        self.down_proj = nn.Linear(size.ffn, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and SwiGLU, each after a norm and beside a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.attention = Attention(size)
        self.mlp_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.mlp = MLP(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A Llama-style language model over bytes; returns the loss."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size.dim)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.lm_head = nn.Linear(size.dim, VOCABULARY, bias=False)
        cos, sin = rope_tables(size.seq, size.dim // size.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def rope_tables(seq: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary embeddings, [seq, head_dim] each."""
    angles = torch.arange(seq)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to [batch, heads, seq, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class DemoError(ValueError):
    """Something the user asked for cannot be done; the message says what to do instead."""


def read_text(path: Path | None) -> bytes:
    """Text of a file or folder, by default of the standard library; at most MAX_TEXT_BYTES.

    Raises:
        DemoError: there is no such path.
    """
    if path and not path.exists():
        raise DemoError(f"--data {path}: no such file or folder.")
    text = b""
    for file in _files(path):
        with file.open("rb") as stream:
            content = stream.read(MAX_TEXT_BYTES - len(text))
        if b"\0" not in content:
            text += content
        if len(text) == MAX_TEXT_BYTES:
            break
    return text


def _files(path: Path | None) -> list[Path]:
    if path and path.is_file():
        return [path]
    root = path or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*" if path else "*.py") if p.is_file())
    if not path:
        files = [p for p in files if SKIPPED_FOLDERS.isdisjoint(p.relative_to(root).parts)]
    # What is read, and what of it is held out, should be a fair sample of the whole.
    random.Random(0).shuffle(files)
    return files


@dataclass(frozen=True)
class Data:
    """Bytes to learn and bytes held out, on the device that trains."""

    train: Tensor
    held_out: Tensor

    @classmethod
    def of(cls, text: bytes, size: Size, device: torch.device) -> Data:
        """Hold out the end of `text`.

        Raises:
            DemoError: it is too short.
        """
        held_out = len(text) // HELD_OUT_SHARE
        if held_out <= size.seq:
            raise DemoError(
                f"Found {len(text):,} bytes of text, too little for sequences of {size.seq}: "
                f"give at least {HELD_OUT_SHARE * (size.seq + 1):,} with --data PATH."
            )
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        return cls(tokens[:-held_out], tokens[-held_out:])

    def train_batches(self, size: Size, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`size.steps` random batches, the same for the same seed on every device."""
        generator = torch.Generator().manual_seed(seed)
        count = len(self.train) - size.seq
        starts = torch.randint(count, (size.steps, size.batch), generator=generator)
        return (_windows(self.train, s, size.seq) for s in starts.to(self.train.device))

    def held_out_batches(self, size: Size) -> Iterator[tuple[Tensor, Tensor]]:
        """Windows spread over what is held out."""
        last = len(self.held_out) - size.seq - 1
        starts = torch.linspace(0, last, HELD_OUT_BATCHES * size.batch).long()
        batches = starts.to(self.held_out.device).split(size.batch)
        return (_windows(self.held_out, s, size.seq) for s in batches)


def _windows(tokens: Tensor, starts: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the windows that begin at `starts`."""
    index = starts[:, None] + torch.arange(seq, device=starts.device)
    return tokens[index].long(), tokens[index + 1].long()


@dataclass
class Run:
    """What came of training one variant; `peak_bytes` is None where nothing counts it."""

    variant: str
    losses: list[float]
    held_out_loss: float
    tokens_per_second: float
    activation_bytes: int
    peak_bytes: int | None

    @property
    def final_loss(self) -> float:
        """Loss averaged over the last steps."""
        last = self.losses[-max(1, min(20, len(self.losses) // 5)) :]
        return sum(last) / len(last)


class Meter:
    """Time and peak memory from its creation on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start = self._now()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def read(self) -> tuple[float, int | None]:
        """Seconds, and bytes where something counts them."""
        seconds = self._now() - self.start
        on_gpu = self.device.type == "cuda"
        return seconds, torch.cuda.max_memory_allocated(self.device) if on_gpu else None


Compile = Callable[[nn.Module], Any]
OnStep = Callable[[int, float], None]


def run_variant(
    name: str, compile_model: Compile, data: Data, size: Size, seed: int, on_step: OnStep
) -> Run:
    """Train one variant from scratch and measure it; `on_step` hears of progress."""
    device = data.train.device
    model = compile_model(new_model(size, seed, device))
    losses, tokens_per_second, peak_bytes = train(model, data, size, seed, on_step)
    return Run(
        name,
        losses=losses,
        held_out_loss=held_out_loss(model, data, size),
        tokens_per_second=tokens_per_second,
        activation_bytes=activation_bytes(model, *next(data.train_batches(size, seed))),
        peak_bytes=peak_bytes,
    )


def new_model(size: Size, seed: int, device: torch.device) -> Decoder:
    """A model in BF16 with the weights of `seed`."""
    torch.manual_seed(seed)
    return Decoder(size).to(device, torch.bfloat16)


def train(
    model: Any, data: Data, size: Size, seed: int, on_step: OnStep
) -> tuple[list[float], float, int | None]:
    """Losses, tokens per second and peak bytes; the latter two without the first steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=size.peak_lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    device = data.train.device
    first_steps = min(5, size.steps - 1)
    # Reading a loss makes the CPU wait for the GPU.
    report_every = 10 if device.type == "cuda" else 1
    losses = []
    for step, (tokens, targets) in enumerate(data.train_batches(size, seed)):
        if step == first_steps:
            meter = Meter(device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, size)
        loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step < first_steps or step % report_every == 0 or step == size.steps - 1:
            on_step(step + 1, loss.item())
    seconds, peak_bytes = meter.read()
    tokens_per_second = (size.steps - first_steps) * size.tokens / seconds
    return [x.item() for x in losses], tokens_per_second, peak_bytes


def learning_rate(step: int, size: Size) -> float:
    """Linear warm-up over a twentieth of the steps, then a cosine down to a tenth of the peak."""
    warm_up = max(1, size.steps // 20)
    progress = max(0, step - warm_up) / (size.steps - warm_up)
    return size.peak_lr * min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * progress))


def activation_bytes(model: Any, *args: Tensor) -> int:
    """Bytes that one forward of `model` saves for its backward, measured, parameters not counted.

    Tensors that share a storage count once.
    """
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*args)  # while it lives, so do the storages: no address is used twice
    del loss
    return sum(count for address, count in saved.items() if address not in own)


def held_out_loss(model: Any, data: Data, size: Size) -> float:
    """Loss averaged over the held-out batches."""
    # Not under no_grad, for which torch.compile would compile the model once more.
    losses = [model(*batch).item() for batch in data.held_out_batches(size)]
    return sum(losses) / len(losses)


def compare(recipe: str, data: Data, size: Size, seed: int, console: Console) -> list[Run]:
    """Run stock `torch.compile`, then fp8pass."""
    with_fp8pass = partial(torch.compile, backend="fp8pass", options={"recipe": recipe})
    variants: dict[str, Compile] = {
        "torch.compile": torch.compile,
        f"fp8pass {recipe}": with_fp8pass,
    }
    runs = []
    with progress_bar(console, list(variants), size.steps) as update:
        for name, compile_model in variants.items():
            update(name, 0)
            runs.append(run_variant(name, compile_model, data, size, seed, partial(update, name)))
            free_memory()
    return runs


def free_memory() -> None:
    """Give back what the last variant held."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def progress_bar(console: Console, names: list[str], steps: int) -> Iterator[Callable[..., None]]:
    """A bar for each variant; yields `update(name, step, loss)`, without a loss while compiling."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        console=console,
    ) as bars:
        tasks = {n: bars.add_task(n, start=False, total=steps, status="waiting") for n in names}

        def update(name: str, step: int, loss: float | None = None) -> None:
            bars.start_task(tasks[name])
            status = "compiling" if loss is None else f"loss {loss:.3f}"
            # Without a total the bar pulses.
            total = None if loss is None else steps
            bars.update(tasks[name], completed=step, total=total, status=status)

        yield update


def results_table(runs: list[Run]) -> Table:
    """The runs side by side."""
    table = Table(title="BF16 with stock torch.compile and with fp8pass", title_justify="left")
    table.add_column("\nvariant", no_wrap=True)
    columns = ("train\nloss", "held-out\nloss", "\ntokens/s", "kept for\nbackward", "peak\nmemory")
    for column in columns:
        table.add_column(column, justify="right")
    for run in runs:
        table.add_row(
            run.variant,
            f"{run.final_loss:.3f}",
            f"{run.held_out_loss:.3f}",
            f"{run.tokens_per_second:,.0f}",
            _mib(run.activation_bytes),
            "n/a" if run.peak_bytes is None else _mib(run.peak_bytes),
        )
    return table


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def notes(device: torch.device) -> Iterator[str]:
    """What to know when reading the table."""
    if device.type == "cpu":
        yield (
            "A CPU has to emulate FP8, so fp8pass trains slower than BF16 here, and PyTorch counts "
            "no peak memory. Losses and the bytes kept for the backward are measured all the same."
        )
    if reason := hardware.why_no_fp8_gemm(device):
        yield f"Linear layers stayed in BF16: {reason}."


def write_plot(runs: list[Run], folder: Path) -> str:
    """Plot to `folder`; returns where that is, or how to get matplotlib."""
    path = folder / "loss.png"
    try:
        plot_losses(runs, path)
    except ImportError:
        return "No loss curves: matplotlib is missing. Install it: pip install 'fp8pass[demo]'"
    return f"Loss curves: {path}"


def plot_losses(runs: list[Run], path: Path) -> None:
    """Both loss curves, and what fp8pass adds to the loss, as a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, difference) = pyplot.subplots(
        2, sharex=True, height_ratios=(3, 1), figsize=(8, 6), layout="constrained"
    )
    window = max(1, len(runs[0].losses) // 20)
    for run, color, style in zip(runs, ("C0", "C1"), ("-", "--"), strict=True):
        curves.plot(run.losses, color=color, alpha=0.3, linewidth=0.8)
        curves.plot(running_mean(run.losses, window), style, color=color, label=run.variant)
    curves.set(ylabel=f"train loss, nats per byte (bold: mean of {window} steps)")
    curves.set_title("Same initial weights, same batches")
    curves.legend()
    added = [b - a for a, b in zip(runs[0].losses, runs[1].losses, strict=True)]
    difference.axhline(0, color="C0", linewidth=0.8)
    difference.plot(added, color="C1", alpha=0.3, linewidth=0.8)
    difference.plot(running_mean(added, window), color="C1")
    difference.set(xlabel="step", ylabel="difference")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def running_mean(values: list[float], window: int) -> list[float]:
    """Each value averaged with those before it, `window` in all where there are as many."""
    recent = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(chunk) / len(chunk) for chunk in recent]


def main(argv: list[str] | None = None) -> list[Run]:
    """Run the demo with the given command line, by default that of the process."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest:
        parser.error(unknown("option", rest[0], [f"--{name}" for name in vars(args)]))
    device = args.device
    size = SIZES[args.size or ("large" if device.type == "cuda" else "small")]
    size = replace(size, steps=args.steps or size.steps)
    try:
        config = fp8pass.Config.recipe(args.recipe)
        data = Data.of(read_text(args.data), size, device)
        args.out.mkdir(parents=True, exist_ok=True)
    except (DemoError, fp8pass.ConfigError) as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}.")

    console = Console()
    free_memory()
    model = new_model(size, args.seed, device)
    console.print(summary(model, size), highlight=False)
    runs = compare(args.recipe, data, size, args.seed, console)
    console.print("", results_table(runs), *notes(device), sep="\n", highlight=False)
    print(write_plot(runs, args.out))
    batch = next(data.train_batches(size, args.seed))
    print(f"\nfp8pass.explain(model):\n\n{fp8pass.explain(model, *batch, config=config)}")
    return runs


def summary(model: Decoder, size: Size) -> str:
    """What is about to be trained."""
    parameters = sum(p.numel() for p in model.parameters())
    device = model.lm_head.weight.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    return (
        f"{parameters / 1e6:,.1f}M parameters, {size.steps} steps of "
        f"{size.batch}×{size.seq} bytes, on {name}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fp8pass.demo",
        description="Train the same small language model with and without fp8pass, and compare.",
        allow_abbrev=False,
    )
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--data", type=Path, help="file or folder of text (default: Python's standard library)")
    add("--out", type=Path, default=Path("demo-output"), help="folder for the plot")
    add("--steps", type=_steps, help="training steps of each variant")
    add("--seed", type=int, default=0, help="of weights and batches")
    add("--recipe", default="coat", help=f"of fp8pass: {', '.join(fp8pass.RECIPES)}")
    add("--device", type=_device, default=default_device, help="cpu, cuda or cuda:N")
    add("--size", type=_size, help=f"of the model: {', '.join(SIZES)} (default: by the device)")
    return parser


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        message = f"a whole number from 2 up is needed, got {text!r}; the first step compiles"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def _size(text: str) -> str:
    if text not in SIZES:
        message = f"{unknown('size', text, SIZES)} size is one of {', '.join(SIZES)}."
        raise argparse.ArgumentTypeError(message)
    return text


def _device(text: str) -> torch.device:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        message = f"{unknown('device', text, ('cpu', 'cuda'))} device is one of cpu, cuda, cuda:N."
        raise argparse.ArgumentTypeError(message)
    device = torch.device(text)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise argparse.ArgumentTypeError(f"no such GPU: PyTorch sees {count} here. Try cpu.")
    return device


if __name__ == "__main__":
    main()
