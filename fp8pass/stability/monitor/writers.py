"""Write a Monitor's samples to a CSV file and to TensorBoard."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fp8pass.option_checks import ConfigError
from fp8pass.stability.monitor.statistics import COLUMNS, LANDSCAPE, TensorStatistics

TENSORBOARD_SCALARS = ("amax", "saturated", "underflow", "sqnr_db", "nonfinite")


class CsvWriter:
    """Appends one line for each tensor and sample to a CSV file."""

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, (str, os.PathLike)) or Path(path).is_dir():
            raise ConfigError(
                f"csv must be a file to append to, such as 'health.csv', got {path!r}."
            )
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self._read_header() not in ("", ",".join(COLUMNS)):
            raise ConfigError(
                f"csv={str(path)!r} was not written by a Monitor of this version: its first line "
                "has other columns. Name another file."
            )

    def _read_header(self) -> str:
        with self.path.open() as file:
            return file.readline().rstrip("\r\n")

    def write(self, rows: Sequence[TensorStatistics]) -> None:
        """Append the rows, after a header if the file is empty."""
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if file.tell() == 0:
                writer.writeheader()
            writer.writerows(asdict(row) for row in rows)

    def close(self) -> None:
        """Do nothing: the file is closed after each sample."""


class TensorBoardWriter:
    """Writes finite statistics as scalars `fp8pass <statistic>/<module> <tensor> <scales>`.

    The model's sharpness is the scalar `fp8pass/sharpness`. `target` is a folder, or a
    `torch.utils.tensorboard.SummaryWriter`, which the caller closes.
    """

    def __init__(self, target: Any) -> None:
        self._owned = isinstance(target, (str, Path))
        self._writer: Any = _open_summary_writer(target) if self._owned else target
        if not hasattr(self._writer, "add_scalar"):
            kind = type(target).__name__
            raise ConfigError(f"tensorboard must be a folder or a SummaryWriter, got {kind}.")

    def write(self, rows: Sequence[TensorStatistics]) -> None:
        for row in rows:
            if row.tensor == LANDSCAPE:
                self._add("fp8pass/sharpness", row.sharpness, row.step)
                continue
            for statistic in TENSORBOARD_SCALARS:
                tag = f"fp8pass {statistic}/{row.module} {row.tensor} {row.scales}"
                self._add(tag, getattr(row, statistic), row.step)
        self._writer.flush()

    def _add(self, tag: str, value: float, step: int) -> None:
        if math.isfinite(value):
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Close the writer, unless it is the caller's."""
        if self._owned:
            self._writer.close()


def _open_summary_writer(folder: str | Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "Monitor(tensorboard=...) needs TensorBoard: pip install tensorboard"
        ) from error
    return SummaryWriter(str(folder))
