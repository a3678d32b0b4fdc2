"""Batches: independent programs that one operator runs.

If programs store data in different columns of one matrix, this matrix is the operator's first
result. The remaining results follow in the order of the programs and their stores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from fp8pass.codegen.program.ir import Program
from fp8pass.codegen.program.reference import compute_program

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """The programs of one operator. Its inputs are the inputs of all programs, in order."""

    programs: tuple[Program, ...]

    def dumps(self) -> str:
        return json.dumps([program.dumps() for program in self.programs])

    @staticmethod
    @cache
    def parse(text: str) -> Batch:
        return Batch(tuple(map(Program.parse, json.loads(text))))

    @property
    def joins(self) -> bool:
        return any(store.width for program in self.programs for store in program.stores)

    def split(self, inputs: Sequence[T]) -> Iterator[tuple[Program, list[T], list[int]]]:
        """Yield each program, its inputs, and the indices of its results in the batch's results."""
        first, number = 0, int(self.joins)
        for program in self.programs:
            numbers = []
            for is_part in (x for store in program.stores for x in store.are_parts):
                numbers.append(0 if is_part else number)
                number += not is_part
            yield program, list(inputs[first : first + program.input_count]), numbers
            first += program.input_count

    def empty_outputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for program, operands, numbers in self.split(inputs):
            for number, x in zip(numbers, program.empty_outputs(operands), strict=True):
                found.setdefault(number, x)
        return [found[number] for number in range(len(found))]

    def reference(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        results = self.empty_outputs(inputs)
        for program, operands, numbers in self.split(inputs):
            stores = [(store, part) for store in program.stores for part in store.are_parts]
            found = compute_program(program, operands)
            for (store, is_part), number, x in zip(stores, numbers, found, strict=True):
                if is_part:
                    place = results[number].view(torch.uint8)
                    place[:, store.offset : store.offset + x.shape[1]] = x.view(torch.uint8)
                else:
                    results[number] = x
        return results
